"""Pre-norm encoders of image patches.

ViT (Dosovitskiy et al. 2021), DeiT with a second class token for distillation (Touvron et al. 2021), DINOv2 with layer
scales (Oquab et al. 2023) and with registers (Darcet et al. 2024); and Swin (Liu et al. 2021), with windows shifted in
every other layer and stages between which four patches become one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Join, Rename, Reshape, Step

_VIT_CLASSES = {"ViTModel": "none", "ViTForImageClassification": "classify"}
_DEIT_CLASSES = {
    "DeiTModel": "none",
    "DeiTForImageClassification": "classify",
    "DeiTForImageClassificationWithTeacher": "classify",
}
_FIELDS, _LAYER = hf.field_names("vit"), hf.layer_names("vit")
_QKV = tuple(f"attention.attention.{x}" for x in hf.QUERY_KEY_VALUE)
_IMAGE: dict[str, Any] = {"architecture": "encoder", "source": "image", "positions": "learned", "norm_place": "pre"}


def square_sides(theirs: hf.ForeignFields, ours: dict[str, Any]) -> dict[str, Any]:
    """Our fields with image and patch size as one number each; theirs may be a pair of equal ones."""
    theirs.only("pruned_heads", {})
    theirs.only("head_dim", None, ours["d_model"] // ours["n_heads"])
    for name in ("image_size", "patch_size"):
        sides = {ours[name]} if isinstance(ours[name], int) else set(ours[name])
        if len(sides) > 1:
            raise ValueError(f"config.json has {name}={ours[name]}; regard supports square ones only")
        ours[name] = sides.pop()
    return {**_IMAGE, **ours, "embedding_dropout": ours["dropout"]}


def _read_vit(theirs: hf.ForeignFields) -> ModelConfig:
    ours, classes = square_sides(theirs, hf.read_fields(theirs, _FIELDS)), _VIT_CLASSES
    theirs.only("pooler_act", "tanh", "relu")
    theirs.only("pooler_output_size", None, ours["d_model"])
    if theirs.model_type == "deit":
        classes, has_two_heads = _DEIT_CLASSES, theirs.architecture.endswith("WithTeacher")
        ours |= {"class_tokens": 2, "pooling": "class-tokens" if has_two_heads else "first"}
    head = hf.read_head(theirs, classes, pooler=theirs.get("pooler_act", "tanh"), class_pooler="none")
    return ModelConfig(**ours, **head, activation=theirs.activation("hidden_act", "gelu"))


def _write_vit(config: ModelConfig, model_type: str = "vit", classes: dict[str, str] = _VIT_CLASSES) -> dict[str, Any]:
    fields = hf.write_encoder(config, model_type, classes, _FIELDS)
    fields["pooler_act"] = "tanh" if config.pooler == "none" else config.pooler
    if config.head == "classify" and config.pooling == "class-tokens":
        fields["architectures"] = [f"{fields['architectures'][0]}WithTeacher"]
    return fields


def _steps(config: ModelConfig, base: str) -> list[Step]:
    """The steps of ViT and DeiT; ``base`` is the prefix of the base model in a model with a head."""
    prefix = "" if config.head == "none" else f"{base}."
    head: list[Step] = []
    if config.head == "classify":
        has_two_heads = config.pooling == "class-tokens"
        names = {"cls_classifier": "classifier.out", "distillation_classifier": "classifier.others.0"}
        head = [*hf.drop_modules(f"{prefix}pooler.dense"), *hf.modules(names if has_two_heads else _CLASSIFIER)]
    layer = hf.layer(config, f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}.", _LAYER, _QKV)
    return [*head, *_embedding_steps(config, prefix), *layer]


_CLASSIFIER = {"classifier": "classifier.out"}


def _embedding_steps(config: ModelConfig, prefix: str) -> list[Step]:
    theirs, width = f"{prefix}embeddings.", config.d_model
    n_positions = (config.image_size // config.patch_size) ** 2 + config.class_tokens
    token, registers = "embeddings.class_token", config.register_tokens
    tokens: list[Step] = [Rename(f"{theirs}cls_token", token), Reshape(token, (1, 1, width), (1, width))]
    if config.class_tokens == 2:
        tokens = [
            Reshape(f"{theirs}cls_token", (1, 1, width), (1, width)),
            Reshape(f"{theirs}distillation_token", (1, 1, width), (1, width)),
            Join((f"{theirs}cls_token", f"{theirs}distillation_token"), token, (1, 1)),
        ]
    return [
        *hf.modules({f"{theirs}patch_embeddings.projection": "embeddings.patches"}),
        *tokens,
        Rename(f"{theirs}register_tokens", "embeddings.registers"),
        Reshape("embeddings.registers", (1, registers, width), (registers, width)),
        Rename(f"{theirs}mask_token", "embeddings.mask_token"),
        Reshape("embeddings.mask_token", (1, width), (width,)),
        Rename(f"{theirs}position_embeddings", "embeddings.position.weight"),
        Reshape("embeddings.position.weight", (1, n_positions, width), (n_positions, width)),
        *hf.modules({f"{prefix}layernorm": "encoder.norm"}),
    ]


VIT = hf.Family(("vit",), _read_vit, _write_vit, partial(_steps, base="vit"))
DEIT = hf.Family(
    ("deit",), _read_vit, partial(_write_vit, model_type="deit", classes=_DEIT_CLASSES), partial(_steps, base="deit")
)


def _dino_classes(model_type: str) -> dict[str, str]:
    name = "Dinov2WithRegisters" if model_type == _WITH_REGISTERS else "Dinov2"
    return {f"{name}Model": "none", f"{name}ForImageClassification": "classify"}


_WITH_REGISTERS = "dinov2_with_registers"
_DINO_FIELDS = {name: pair for name, pair in hf.field_names("vit", "dinov2").items() if name != "intermediate_size"}
_DINO_LAYER = hf.layer_names("dinov2")


def _read_dino(theirs: hf.ForeignFields) -> ModelConfig:
    registers = theirs.model_type == _WITH_REGISTERS
    ours = hf.read_fields(theirs, _DINO_FIELDS) | {"patch_size": theirs.get("patch_size", 16 if registers else 14)}
    ours = square_sides(theirs, ours)
    theirs.only("drop_path_rate", 0.0)
    gated = theirs.get("use_swiglu_ffn", False)
    head = hf.read_head(theirs, _dino_classes(theirs.model_type), pooler="none", class_pooler="none")
    return ModelConfig(
        **ours,
        **head,
        d_ff=_dino_ff(ours["d_model"], theirs.get("mlp_ratio", 4), gated),
        activation="swiglu" if gated else theirs.activation("hidden_act", "gelu"),
        pooling="first-and-mean" if head["head"] == "classify" else "first",
        register_tokens=theirs.get("num_register_tokens", 4) if registers else 0,
        mask_token=registers or theirs.get("use_mask_token", True),
    )


def _dino_ff(width: int, ratio: int, gated: bool) -> int:
    """Inner width of the feed-forward network; a gated one has two thirds, rounded up to a multiple of 8."""
    return (int(width * ratio * 2 / 3) + 7) // 8 * 8 if gated else int(width * ratio)


def _write_dino(config: ModelConfig) -> dict[str, Any]:
    model_type = _WITH_REGISTERS if config.register_tokens else "dinov2"
    gated = config.activation == "swiglu"
    ratios = [ratio for ratio in range(1, 65) if _dino_ff(config.d_model, ratio, gated) == config.d_ff]
    if not ratios:
        raise ValueError(f"d_ff={config.d_ff} is not a multiple of d_model={config.d_model} that {model_type} has")
    fields = {
        "model_type": model_type,
        **hf.write_head(config, _dino_classes(model_type)),
        **hf.write_fields(config, _DINO_FIELDS),
        "mlp_ratio": ratios[0],
        "use_swiglu_ffn": gated,
        "hidden_act": "gelu" if gated else hf.from_our_activation(config.activation),
    }
    registers = {"num_register_tokens": config.register_tokens}
    return {**fields, **(registers if config.register_tokens else {"use_mask_token": config.mask_token})}


def _dino_steps(config: ModelConfig) -> list[Step]:
    base = _WITH_REGISTERS if config.register_tokens else "dinov2"
    prefix = "" if config.head == "none" else f"{base}."
    theirs, ours = f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}."
    kinds = ("weights_in", "weights_out") if config.activation == "swiglu" else ("fc1", "fc2")
    names = {**_DINO_LAYER, f"mlp.{kinds[0]}": "ff.w_in", f"mlp.{kinds[1]}": "ff.w_out"}
    scales = {"layer_scale1": "attention_scale", "layer_scale2": "ff_scale"}
    return [
        *(hf.modules(_CLASSIFIER) if config.head == "classify" else []),
        *_embedding_steps(config, prefix),
        *(Rename(f"{theirs}{one}.lambda1", f"{ours}{other}.weight") for one, other in scales.items()),
        *hf.layer(config, theirs, ours, names, _QKV),
    ]


DINO = hf.Family(("dinov2", _WITH_REGISTERS), _read_dino, _write_dino, _dino_steps)

_SWIN_CLASSES = {"SwinModel": "none", "SwinForImageClassification": "classify"}
_SWIN_FIELDS = hf.field_names("swin")
_SWIN_QKV = tuple(f"attention.self.{x}" for x in hf.QUERY_KEY_VALUE)


def _read_swin(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("use_absolute_embeddings", False)
    theirs.only("layer_norm_eps", 1e-5)  # transformers has it in some norms and 1e-5 in the others
    depths, heads = theirs.get("depths", [2, 2, 6, 2]), theirs.get("num_heads", [3, 6, 12, 24])
    width = theirs.get("embed_dim", 96) * 2 ** (len(depths) - 1)
    ours = hf.read_fields(theirs, _SWIN_FIELDS) | {"d_model": width, "n_heads": heads[-1]}
    ours = square_sides(theirs, ours) | {"positions": "window", "class_tokens": 0, "embedding_norm": True}
    head = hf.read_head(theirs, _SWIN_CLASSES, pooler="none", class_pooler="none")
    return ModelConfig(
        **ours,
        **head,
        n_layers=sum(depths),
        stages=tuple(depths),
        stage_heads=tuple(heads),
        d_ff=int(width * theirs.get("mlp_ratio", 4.0)),
        pooling="mean",
        activation=theirs.activation("hidden_act", "gelu"),
    )


def _write_swin(config: ModelConfig) -> dict[str, Any]:
    if config.stages is None or config.stage_heads is None:
        raise ValueError("stages=None: swin needs stages")
    return {
        **hf.write_encoder(config, "swin", _SWIN_CLASSES, _SWIN_FIELDS),
        "embed_dim": config.d_model // 2 ** (len(config.stages) - 1),
        "depths": list(config.stages),
        "num_heads": list(config.stage_heads),
        "mlp_ratio": config.d_ff / config.d_model,
    }


def _swin_steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "swin."
    steps: list[Step] = [*hf.modules({"classifier": "classifier.out"})] if config.head == "classify" else []
    steps += hf.modules(
        {
            f"{prefix}embeddings.patch_embeddings.projection": "embeddings.patches",
            f"{prefix}embeddings.norm": "embeddings.norm",
            f"{prefix}layernorm": "encoder.norm",
        }
    )
    stages = len(config.stages or ())
    for stage in range(stages):
        theirs, ours = f"{prefix}encoder.layers.{stage}.", f"encoder.stages.{stage}.blocks.{{i}}."
        width = config.d_model // 2 ** (stages - 1 - stage)
        table = "attention.self.relative_position_bias_table"
        steps += [
            Rename(f"{theirs}blocks.{{i}}.{table}", f"{ours}attention.position_bias.w"),
            *hf.modules(_LAYER, f"{theirs}blocks.{{i}}.", ours),
            *hf.join_modules(
                [f"{theirs}blocks.{{i}}.{x}" for x in _SWIN_QKV], f"{ours}attention.w_qkv", (width, width, width)
            ),
            Rename(f"{theirs}downsample.reduction.weight", f"encoder.merges.{stage}.w.weight"),
            *hf.modules({f"{theirs}downsample.norm": f"encoder.merges.{stage}.norm"}),
        ]
    return steps


SWIN = hf.Family(("swin",), _read_swin, _write_swin, _swin_steps)
