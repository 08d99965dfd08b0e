"""GGUF, the one-file format of llama.cpp, Ollama and LM Studio: read and write models of the LLaMA line.

A GGUF file holds the content of config.json, model.safetensors and tokenizer.json under other names. Its tensors are
those of transformers after two more invertible steps: renaming, and reordering the rows of a LLaMA's queries and keys.
llama.cpp rotates dimension 2i with 2i + 1 (as Su et al. 2021 do), transformers and regard rotate i with i + D/2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import ModelConfig, RopeScalingConfig
from ..errors import BadModelFile, first_line
from ..foundation.plugins import import_optional
from ..layers.quantised_linear import Int8Linear
from ..layers.rope import base_frequencies, frequencies, original_length
from ..models import Model
from ..text.gguf_vocabulary import gguf_vocabulary, tokenizer_of_gguf
from ..text.processor import ONE
from . import hf_family as hf
from .hf_config import write_config
from .hf_directory import Directory, Weights
from .weight_steps import Step, Tensors, matches, to_ours, to_theirs

FloatType = Literal["f32", "f16", "bf16", "q8_0"]
NAME = "model.gguf"
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by model_type
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FIELDS = {  # field of config.json → GGUF keys, without the architecture before them
    "max_position_embeddings": ("context_length",),
    "vocab_size": ("vocab_size",),
    "hidden_size": ("embedding_length",),
    "num_hidden_layers": ("block_count",),
    "intermediate_size": ("feed_forward_length",),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length", "attention.value_length", "rope.dimension_count"),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon",),
}
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_ROPE_FREQS = "rope_freqs.weight"  # Llama 3: the divisor of each RoPE frequency
_LLAMA3: dict[str, Any] = {"original_max_len": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # all Llama 3
_SCALING_FIELDS = {  # the fields that a GGUF file can hold; llama.cpp has the paper's values for yarn's other fields
    "linear": {"kind", "factor"},
    "yarn": {"kind", "factor", "original_max_len"},
    "llama3": {"kind", "factor", "original_max_len", "low_freq_factor", "high_freq_factor"},
}
_SCALING_DEFAULTS = {  # keys of llama.cpp without a field of ours, and the only values that regard computes
    **{f"rope.scaling.{name}": 1.0 for name in ("attn_factor", "yarn_attn_factor", "yarn_beta_slow")},
    **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_ext_factor": -1.0},
}
_REQUIRED = {"head": "lm", "activation": "swiglu", "gate_limit": None}  # the only values that llama.cpp supports
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


@dataclass(frozen=True)
class Interleave(Step):
    """Reorder the rows of each head: RoPE pairs (0, 1), (2, 3) … in theirs, (0, D/2), (1, D/2 + 1) … in ours."""

    name: str
    n_heads: int

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self._swap(x, (-1, 2)) if matches(name, self.name) else x for name, x in tensors.items()}

    def undo(self, tensors: Tensors) -> Tensors:
        return {name: self._swap(x, (2, -1)) if matches(name, self.name) else x for name, x in tensors.items()}

    def _swap(self, x: Tensor, rows: tuple[int, int]) -> Tensor:
        heads = x.reshape(self.n_heads, *rows, *x.shape[1:])
        return heads.transpose(1, 2).reshape(x.shape)


def gguf_steps(architecture: str, n_heads: int, n_kv_heads: int) -> list[Step]:
    """The steps from the tensors of a GGUF file to those of transformers."""
    reordered = [("attn_q", n_heads), ("attn_k", n_kv_heads)] if architecture == "llama" else []
    kinds = ("weight", "bias")
    return [
        *(Interleave(f"blk.{{i}}.{name}.{kind}", heads) for name, heads in reordered for kind in kinds),
        *hf.modules(hf.layer_names("gguf")),
    ]


def gguf_obstacles(config: ModelConfig) -> list[str]:
    """Why llama.cpp cannot run a model; empty if it can."""
    if config.architecture != "decoder":
        return [f"architecture={config.architecture!r}"]
    written = write_config(config)
    if written.obstacles:
        return list(written.obstacles)
    if written.model_type not in _ARCHITECTURES:
        return [f"the architecture of {written.model_type}"]
    scaling = {} if config.rope_scaling is None else config.rope_scaling.model_dump(exclude_none=True)
    unsupported = {
        **{name: getattr(config, name) != value for name, value in _REQUIRED.items()},
        "window": config.window is not None and config.window < config.max_len,
        "qkv_bias": config.qk_norm and config.qkv_bias,
        "rope_scaling": not set(scaling) <= _SCALING_FIELDS.get(scaling.get("kind", "linear"), set()),
    }
    return [f"{name}={getattr(config, name)!r}" for name, is_wrong in unsupported.items() if is_wrong]


def check_gguf(config: ModelConfig) -> None:
    """Raise ValueError if llama.cpp cannot run a model of this config."""
    if reasons := gguf_obstacles(config):
        raise ValueError(
            f"GGUF is for models of the LLaMA line, and this one has {'; '.join(reasons)}; train one with "
            "model=llama-1b, in any size (model.d_model=256 …)"
        )


def import_gguf() -> Any:
    return import_optional("gguf", "GGUF", "export")


def write_gguf(model: Model, path: Path, float_type: FloatType = "f32") -> None:
    """Write a model and its tokenizer. Matrices are stored as ``float_type``, norms and biases always in float32."""
    gguf = import_gguf()
    check_gguf(model.config)
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("this model is quantised already; export the original model")
    fields = gguf_fields(model)
    tensors = _tensors(model)
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture"))
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[float_type]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in fields.items():
        _add_field(writer, key, value)
    for name, x in tensors.items():
        kind = _storage(gguf.GGMLQuantizationType, x, float_type)
        data = gguf.quants.quantize(x.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_fields(model: Model) -> dict[str, Any]:
    """The metadata of the file; ValueError if GGUF cannot represent the tokenizer."""
    config, processor = model.config, model.processor
    written = write_config(config).fields
    architecture = _ARCHITECTURES[written["model_type"]]
    record = model.training_record or {}
    hyperparameters = {key: written[name] for name, keys in _FIELDS.items() for key in keys}
    hyperparameters |= {"rope.freq_base": float(config.rope_base), **_rope_scaling_fields(config)}
    fields = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": str(record.get("run") or "regard"),
        **{f"{architecture}.{key}": value for key, value in hyperparameters.items()},
    }
    if processor is None or not processor.tokenizers:
        ids = {f"tokenizer.ggml.{theirs}_token_id": written.get(name) for name, theirs in _TOKEN_IDS.items()}
        return {**fields, "tokenizer.ggml.model": "none", **{key: x for key, x in ids.items() if x is not None}}
    return fields | gguf_vocabulary(processor.tokenizer, config, processor.chat_template)


def _rope_scaling_fields(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "llama3":  # llama3 is stored as a tensor
        return {}
    fields: dict[str, Any] = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        original = original_length(scaling, config.max_len)
        fields["rope.scaling.original_context_length"] = original
        fields["rope.scaling.factor"] = scaling.factor or config.max_len / original
    return fields


def _tensors(model: Model) -> Tensors:
    config = model.config
    written, n_kv_heads = write_config(config), config.n_kv_heads or config.n_heads
    state = {name: x.detach().float().cpu() for name, x in model.state_dict().items()}
    steps = gguf_steps(_ARCHITECTURES[written.model_type], config.n_heads, n_kv_heads)
    tensors = to_theirs(steps, to_theirs(written.steps, state))
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        tensors[_ROPE_FREQS] = _divisors(config.rope_scaling, config.head_width, config.rope_base, config.max_len)
    return {name: x.contiguous() for name, x in tensors.items()}


def _divisors(scaling: RopeScalingConfig, width: int, base: float, max_len: int) -> Tensor:
    """The divisor of each RoPE frequency under the scaling (D/2,)."""
    return base_frequencies(width, base) / frequencies(scaling, width, base, max_len).short


def _storage(types: Any, x: Tensor, float_type: FloatType) -> Any:
    """The type in which a tensor is stored; Q8_0 needs rows of a multiple of 32."""
    if x.dim() == 1:
        return types.F32
    return types.F16 if float_type == "q8_0" and x.shape[-1] % 32 else types[float_type.upper()]


def _add_field(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that a path names: the file itself, or the only one in a directory without a config.json."""
    path = Path(path)
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    return files[0] if len(files) == 1 else None


class GgufDirectory(Directory):
    """A GGUF file presented as a model directory: config.json, tokenizer.json and weights as transformers names them.

    Reads all types that the ``gguf`` package can decode; quantised weights become float32, half precision is kept.
    """

    def __init__(self, path: Path) -> None:
        gguf = import_gguf()
        self.root, self._listed, self.training_record = path, None, None
        with _bad_gguf_errors(path):
            reader = gguf.GGUFReader(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._fields = {name: _value(field) for name, field in reader.fields.items()}
            self._config = self._read_config()
            halves = {"f16": torch.float16, "bf16": torch.bfloat16}
            self.dtype = halves.get(self.float_type, torch.float32)
            self._files = self._read_tokenizer()

    @property
    def float_type(self) -> str:
        """The type of most tensors."""
        import gguf

        kinds = {gguf.LlamaFileType[name].value: float_type for float_type, name in _FILE_TYPES.items()}
        return kinds.get(self._fields.get("general.file_type", 0), "other")

    def _read_config(self) -> dict[str, Any]:
        architecture = self._fields["general.architecture"]
        if architecture not in _CLASSES:
            known = ", ".join(_CLASSES)
            raise BadModelFile(f"{self.root} holds a model of architecture {architecture!r}; regard reads {known}")
        values = {key.removeprefix(f"{architecture}."): value for key, value in self._fields.items()}
        stored = {name: values[keys[0]] for name, keys in _FIELDS.items() if keys[0] in values}
        tokens = self._fields.get("tokenizer.ggml.tokens")
        fields: dict[str, Any] = {
            "model_type": architecture,
            "architectures": [_CLASSES[architecture]],
            "head_dim": values["embedding_length"] // values["attention.head_count"],
            **({} if tokens is None else {"vocab_size": len(tokens)}),
            **stored,
            "rope_parameters": {"rope_theta": values.get("rope.freq_base", 10000.0), **self._rope_scaling(values)},
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
        }
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
        for name, theirs in _TOKEN_IDS.items():
            fields[name] = self._fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if values.get("expert_count"):
            raise BadModelFile(f"{self.root} holds a mixture of experts, which regard does not read from GGUF")
        for key, supported in {"rope.dimension_count": fields["head_dim"], **_SCALING_DEFAULTS}.items():
            if values.get(key, supported) != supported:
                raise BadModelFile(f"{self.root} has {key}={values[key]}; regard supports {supported}")
        return fields

    def _rope_scaling(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """As llama.cpp reads it: a factor without a type is linear, and older files name it ``rope.scale_linear``."""
        if _ROPE_FREQS in self._tensors:
            return self._llama3_scaling(values)
        factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
        kind = values.get("rope.scaling.type", "none" if factor is None else "linear")
        if kind == "none":
            return {"rope_type": "default"}
        original = values.get("rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": factor or 1.0}
        return scaling if original is None else {**scaling, "original_max_position_embeddings": original}

    def _llama3_scaling(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Llama 3's scaling, recovered from the divisors in the file: its factor is the largest of them."""
        divisors = self._dequantise(_ROPE_FREQS)
        width, base = 2 * len(divisors), values.get("rope.freq_base", 10000.0)
        scaling = RopeScalingConfig(kind="llama3", factor=round(divisors.max().item(), 4), **_LLAMA3)
        if not torch.allclose(divisors, _divisors(scaling, width, base, 8192), rtol=1e-4):
            raise BadModelFile(f"{self.root} has a {_ROPE_FREQS} other than Llama 3's, which regard does not read")
        fields = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_max_len}
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        return {"rope_type": "llama3", **fields}

    def _read_tokenizer(self) -> dict[str, bytes]:
        if self._fields.get("tokenizer.ggml.model") in (None, "none"):
            return {}
        files = {ONE: tokenizer_of_gguf(self._fields, str(self.root))}
        template = self._fields.get("tokenizer.chat_template")
        return files if template is None else {**files, "chat_template.jinja": template.encode()}

    def files(self) -> dict[str, int]:
        return {self.root.name: self.root.stat().st_size}

    def has(self, name: str) -> bool:
        return name in self._files

    def bytes(self, name: str) -> bytes:
        return self._files[name]

    def json(self, name: str) -> dict[str, Any]:
        return json.loads(self._files[name])

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def weights(self, *, allow_pickle: bool = False) -> Weights:
        names = [name for name in self._tensors if name != _ROPE_FREQS]
        shapes = {name: tuple(int(n) for n in reversed(self._tensors[name].shape)) for name in names}
        heads = (self._config["num_attention_heads"], self._config["num_key_value_heads"])
        steps = gguf_steps(self._config["model_type"], *heads)

        def read() -> Tensors:
            with _bad_gguf_errors(self.root):
                return to_ours(steps, {name: self._dequantise(name) for name in names})

        with _bad_gguf_errors(self.root):
            layout = to_ours(steps, {name: torch.empty(shapes[name], device="meta") for name in names})
        return Weights(layout, read)

    def _dequantise(self, name: str) -> Tensor:
        import gguf

        tensor = self._tensors[name]
        shape = [int(n) for n in reversed(tensor.shape)]
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).reshape(shape)


def _value(field: Any) -> Any:
    """The value of a field; a float32 as its shortest representation, 1e-05 instead of 9.99999974e-06."""
    value = field.contents()
    kind = field.types[-1].name if field.types else ""
    return float(str(field.parts[-1][0])) if kind == "FLOAT32" and isinstance(value, float) else value


@contextmanager
def _bad_gguf_errors(path: Path) -> Iterator[None]:
    """Turn the exceptions of a damaged file into BadModelFile."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RuntimeError, NotImplementedError) as error:
        raise BadModelFile(f"{path} cannot be read, it is damaged or not a GGUF file: {first_line(error)}") from None
