"""T5 and T5 1.1 (Raffel et al. 2020): bucketed position bias shared by all layers, RMSNorm, no biases, no √d_k.

mT5 (Xue et al. 2021) is T5 1.1 under other class names; it is saved as T5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...config import ModelConfig
from .. import hf_family as hf
from ..weight_steps import Drop, Join, Rename, Step, Tensors, Tie

_ARCHITECTURES = {
    "T5ForConditionalGeneration": ("encoder-decoder", "lm"),
    "T5Model": ("encoder-decoder", "none"),
    "T5EncoderModel": ("encoder", "none"),
    "MT5ForConditionalGeneration": ("encoder-decoder", "lm"),
    "MT5Model": ("encoder-decoder", "none"),
    "MT5EncoderModel": ("encoder", "none"),
}
_FIELDS = hf.field_names("t5")
_FEED_FORWARD = {"relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu", "gated-relu": "reglu"}


def read(theirs: hf.ForeignFields) -> ModelConfig:
    theirs.only("is_decoder", False)
    multilingual = theirs.model_type == "mt5"
    forward = theirs.get("feed_forward_proj", "gated-gelu" if multilingual else "relu")
    theirs.only("feed_forward_proj", *_FEED_FORWARD)
    # What follows from it is in many files, too, and transformers reads it there.
    theirs.only("dense_act_fn", "gelu_new" if forward == "gated-gelu" else forward.removeprefix("gated-"))
    theirs.only("is_gated_act", forward.startswith("gated-"))
    ours, tied = hf.read_fields(theirs, _FIELDS), theirs.get("tie_word_embeddings", True)
    # T5 scales its output by d_model^-0.5 and ties its head to the embeddings; 1.1 does neither. Older files tell them
    # apart by ``tie_word_embeddings``, which is always True in newer ones.
    scaled = bool(theirs.fields.get("scale_decoder_outputs", tied and not multilingual))  # null is False
    if scaled and not tied:
        both = "scale_decoder_outputs=True with tie_word_embeddings=False"
        raise ValueError(f"config.json has {both}; both are True in T5 and False in T5 1.1")
    architecture, head = theirs.head(_ARCHITECTURES)
    return ModelConfig(
        architecture=architecture,
        head=head,
        **ours,
        n_decoder_layers=theirs.get("num_decoder_layers", ours["n_layers"]),
        positions="t5",
        norm="rms",
        norm_place="pre",
        attention_scale=1.0,
        qkv_bias=False,
        out_bias=False,
        activation=_FEED_FORWARD[forward],
        ff_bias=False,
        tie_head=scaled,
        logit_scale=ours["d_model"] ** -0.5 if scaled else 1.0,
        attention_dropout=ours["dropout"],
        embedding_dropout=ours["dropout"],
        activation_dropout=ours["dropout"],
        bos_id=theirs.get("decoder_start_token_id", ours["pad_id"]),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    heads = {name: head for name, (kind, head) in _ARCHITECTURES.items() if kind == config.architecture}
    forward = {ours: theirs for theirs, ours in _FEED_FORWARD.items()}
    if config.activation not in forward:
        raise ValueError(f"activation={config.activation!r} is not one of T5's: {', '.join(forward)}")
    return {
        **hf.write_decoder(config, "t5", heads, _FIELDS, activation=None),
        "num_decoder_layers": config.n_decoder_layers or config.n_layers,
        "d_kv": config.head_width,
        "feed_forward_proj": forward[config.activation],
        "tie_word_embeddings": config.tie_head,
        "scale_decoder_outputs": config.tie_head,
        "decoder_start_token_id": config.bos_id,
    }


@dataclass(frozen=True)
class OwnHead(Step):
    """An untied head; transformers leaves it out of the file while it still shares memory with the table."""

    head: str
    table: str

    def apply(self, tensors: Tensors) -> Tensors:
        if self.head in tensors or self.table not in tensors:
            return tensors
        return {**tensors, self.head: tensors[self.table].clone()}


def steps(config: ModelConfig) -> list[Step]:
    out: list[Step] = [
        Tie("encoder.embed_tokens.weight", "shared.weight"),
        Tie("decoder.embed_tokens.weight", "shared.weight"),
        Drop("decoder.block.{i}.layer.1.EncDecAttention.relative_attention_bias.weight"),
    ]
    if config.head == "lm" and config.tie_head:
        out.append(Tie("lm_head.weight", "shared.weight"))
    elif config.head == "lm":
        out += [OwnHead("lm_head.weight", "shared.weight"), Rename("lm_head.weight", "head.weight")]
    out.append(Rename("shared.weight", "token.weight"))
    for stack in ("encoder", "decoder") if config.has_decoder else ("encoder",):
        out += _stack_steps(config, stack)
    return out


def _stack_steps(config: ModelConfig, stack: str) -> list[Step]:
    theirs, ours, rows = f"{stack}.block.{{i}}.layer.", f"{stack}.blocks.{{i}}.", config.n_heads * config.head_width
    qkv = tuple(f"{theirs}0.SelfAttention.{x}.weight" for x in "qkv")
    ff = 2 if stack == "decoder" else 1  # the last of a block's sub-layers
    out: list[Step] = [
        Rename(f"{stack}.final_layer_norm.weight", f"{stack}.norm.weight"),
        Rename(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{stack}.position_bias.w"),
        Rename(f"{theirs}0.layer_norm.weight", f"{ours}attention_norm.weight"),
        Rename(f"{theirs}0.SelfAttention.o.weight", f"{ours}attention.w_o.weight"),
        Join(qkv, f"{ours}attention.w_qkv.weight", (rows, rows, rows)),
        Rename(f"{theirs}{ff}.layer_norm.weight", f"{ours}ff_norm.weight"),
        Rename(f"{theirs}{ff}.DenseReluDense.wo.weight", f"{ours}ff.w_out.weight"),
        Rename(f"{theirs}{ff}.DenseReluDense.wi.weight", f"{ours}ff.w_in.weight"),
    ]
    if config.activation != "relu":
        halves = tuple(f"{theirs}{ff}.DenseReluDense.wi_{x}.weight" for x in (0, 1))
        out[-1] = Join(halves, f"{ours}ff.w_in.weight", (config.d_ff, config.d_ff))
    if stack == "decoder":
        cross = f"{theirs}1.EncDecAttention."
        out += [
            Rename(f"{theirs}1.layer_norm.weight", f"{ours}cross_norm.weight"),
            Rename(f"{cross}q.weight", f"{ours}cross_attention.w_query.weight"),
            Rename(f"{cross}o.weight", f"{ours}cross_attention.w_o.weight"),
            Join((f"{cross}k.weight", f"{cross}v.weight"), f"{ours}cross_attention.w_kv.weight", (rows, rows)),
        ]
    return out


T5 = hf.Family(("t5", "mt5"), read, write, steps)
