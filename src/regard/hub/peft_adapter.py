"""LoRA adapters (Hu et al. 2022) in the format of the ``peft`` package: a directory with adapter_config.json and
adapter_model.safetensors, in which layers have the names of transformers.

One layer of transformers may hold several of our matrices, each with its own low-rank addition (GPT-2's c_attn: q, k
and v). Together they are one addition whose rank is the sum of the ranks: W + s [B₁ 0; 0 B₂] [A₁; A₂].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import BadModelFile
from ..foundation.files import fsync, write_atomic
from ..foundation.jsonio import parse_json, to_json
from ..models import Model
from .hf_config import write_config
from .hf_directory import open_safetensors
from .weight_steps import Tensors, to_ours, to_theirs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MAX_ROWS = 2**40
_UNSUPPORTED = (
    *("use_dora", "lora_bias", "alora_invocation_tokens", "trainable_token_indices"),
    *("layer_replication", "use_qalora", "arrow_config"),
)
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")  # others, such as PiSSA's, also change the base model's weights
_TASK_TYPES = {
    ("decoder", "lm"): "CAUSAL_LM",
    ("encoder-decoder", "lm"): "SEQ_2_SEQ_LM",
    ("encoder", "classify"): "SEQ_CLS",
}


class LowRank(NamedTuple):
    """A low-rank addition to some rows of a layer's weight: scale · b a."""

    rows: slice
    a: Tensor  # (r, d_in)
    b: Tensor  # (rows, r)


def write_adapter(
    folder: Path,
    model: Model,
    layers: Mapping[str, Sequence[LowRank]],
    *,
    scale: float,
    whole: Collection[str],
    base: str,
) -> None:
    """Write an adapter of ``model``.

    layers  the low-rank additions to each layer
    whole   names of parameters that are written in full
    base    the directory of the model that the adapter belongs to
    """
    from safetensors.torch import save_file

    tensors: Tensors = {}
    ranks: dict[str, int] = {}
    whole_modules: set[str] = set()
    is_transposed = False
    theirs, sources = _source_rows(model, [*(f"{layer}.weight" for layer in layers), *whole])
    for name, (our_name, rows, transposed) in sources.items():
        module = name.rpartition(".")[0]
        if our_name in whole:
            tensors[f"{_PREFIX}{name}"] = theirs[name].cpu().contiguous()
            whole_modules.add("classifier" if module.startswith("classifier.") else module)
            continue
        inside = [x for x in layers[our_name.removesuffix(".weight")] if rows.start <= x.rows.start < rows.stop]
        if inside:
            is_transposed |= transposed
            tensors[f"{_PREFIX}{module}{_A}"], tensors[f"{_PREFIX}{module}{_B}"] = _combine(inside, rows)
            ranks[module] = sum(len(x.a) for x in inside)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    fsync(folder / WEIGHTS)
    rank = min(ranks.values())
    others = {module: each for module, each in ranks.items() if each != rank}
    fields = {
        **{"peft_type": "LORA", "task_type": _task_type(model.config), "base_model_name_or_path": base},
        **{"r": rank, "lora_alpha": scale * rank, "lora_dropout": 0.0, "bias": "none", "inference_mode": True},
        "rank_pattern": others,
        "alpha_pattern": {module: scale * each for module, each in others.items()},
        "target_modules": _target_modules(ranks, theirs),
        "modules_to_save": sorted(whole_modules) or None,
        "fan_in_fan_out": is_transposed,
    }
    write_atomic(folder / CONFIG, to_json(fields))


class _SourceRows(NamedTuple):
    """The rows of one of our tensors that one of theirs consists of."""

    our_name: str
    rows: slice
    transposed: bool


def _source_rows(model: Model, our_names: Sequence[str]) -> tuple[Tensors, dict[str, _SourceRows]]:
    """All tensors under their names, and for those made of the named ones, the rows that they consist of."""
    steps, state = write_config(model.config).steps, {name: x.detach() for name, x in model.state_dict().items()}
    # Row numbers instead of weights go through the steps, and so show where each row ends up.
    numbers = {}
    for index, name in enumerate(our_names):
        rows = torch.arange(len(state[name])) + index * _MAX_ROWS
        numbers[name] = rows.view(-1, *[1] * (state[name].dim() - 1))
    sources = {}
    for name, x in to_theirs(steps, {**state, **numbers}).items():
        if x.dtype == torch.int64:
            index, start = divmod(int(x.flatten()[0]), _MAX_ROWS)
            transposed = x.dim() == 2 and x.shape[0] == 1 < x.shape[1]
            sources[name] = _SourceRows(our_names[index], slice(start, start + x.numel()), transposed)
    return to_theirs(steps, state), sources


def _combine(parts: Sequence[LowRank], rows: slice) -> tuple[Tensor, Tensor]:
    """A (Σr, d_in) and B (rows, Σr) of several additions to one matrix."""
    a = torch.cat([x.a.detach().cpu() for x in parts])
    b, end = a.new_zeros(rows.stop - rows.start, len(a)), 0
    for x in parts:
        b[x.rows.start - rows.start : x.rows.stop - rows.start, end : end + len(x.a)] = x.b.detach().cpu()
        end += len(x.a)
    return a, b


def _target_modules(modules: Collection[str], theirs: Tensors) -> list[str]:
    """The last components of the names, as is usual, if they select exactly these modules; otherwise the full names."""
    all_modules = {name.removesuffix(".weight") for name in theirs if name.endswith(".weight")}
    last = {module.rpartition(".")[2] for module in modules}
    exact = {x for x in all_modules if x.rpartition(".")[2] in last} == set(modules)
    return sorted(last if exact and not any(x.isdigit() for x in last) else modules)


def _task_type(config: ModelConfig) -> str | None:
    return _TASK_TYPES.get((config.architecture, config.head)) if config.source == "text" else None


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter directory."""

    root: Path
    fields: Mapping[str, Any]
    tensors: Tensors

    @classmethod
    def read(cls, path: str | Path) -> Adapter:
        root = Path(path)
        fields = parse_json((root / CONFIG).read_bytes(), root / CONFIG)
        kind = fields.get("peft_type")
        if kind != "LORA":
            raise BadModelFile(f"{root / CONFIG} has peft_type={kind!r}; regard reads LORA")
        unsupported = {name for name in _UNSUPPORTED if fields.get(name)}
        if isinstance(start := fields.get("init_lora_weights"), str) and start not in _PLAIN_STARTS:
            unsupported.add("init_lora_weights")
        if any(re.search(r"[^\w.-]", key) for key in fields.get("alpha_pattern") or {}):
            unsupported.add("alpha_pattern")  # peft reads its keys as regular expressions
        for name in sorted(unsupported):
            raise BadModelFile(f"{root / CONFIG} has {name}={fields[name]!r}, which regard does not read")
        if not (root / WEIGHTS).is_file():
            raise BadModelFile(f"{root} has no {WEIGHTS}")
        return cls(root, fields, open_safetensors(root / WEIGHTS).read())

    @property
    def base(self) -> Path:
        """The directory of the base model; a relative path may start at the working or the adapter's directory."""
        name = str(self.fields.get("base_model_name_or_path") or "")
        for path in (Path(name), self.root / name):
            if name and path.is_dir():
                return path
        where = f"{self.root / CONFIG} has base_model_name_or_path={name!r}"
        raise BadModelFile(f"{where}, which is not a local directory: set it to the path of the base model")

    def _scale(self, module: str, rank: int) -> float:
        """α / r, or α / √r with ``use_rslora``."""
        patterns = self.fields.get("alpha_pattern") or {}
        matching = (x for name, x in patterns.items() if f".{module}".endswith(f".{name}"))
        alpha = next(matching, self.fields.get("lora_alpha", 8))  # peft's default
        return float(alpha) / (rank**0.5 if self.fields.get("use_rslora") else rank)

    @torch.no_grad()
    def add_to(self, model: Model) -> None:
        """Add s B A to the model's weights in place, in double precision rounded once; replace those stored whole."""
        steps = write_config(model.config).steps
        theirs = to_theirs(steps, {name: x.detach().clone() for name, x in model.state_dict().items()})
        for name, x in self.tensors.items():
            plain = name.removeprefix(_PREFIX)
            if plain.endswith(_B):
                continue
            target = self._find(f"{plain.removesuffix(_A)}.weight" if plain.endswith(_A) else plain, theirs)
            if not plain.endswith(_A):
                theirs[target] = self._fit(name, x, theirs[target])
                continue
            b = self.tensors.get(name.removesuffix(_A) + _B)
            if b is None:
                raise BadModelFile(f"{self.root / WEIGHTS} has {name} without its lora_B")
            delta = self._scale(plain.removesuffix(_A), len(x)) * (b.double() @ x.double())
            weight = theirs[target]
            delta = self._fit(name, delta.T if self.fields.get("fan_in_fan_out") else delta, weight)
            theirs[target] = (weight.double() + delta.to(weight.device)).to(weight.dtype)
        model.load_state_dict(to_ours(steps, theirs))

    def _find(self, name: str, theirs: Tensors) -> str:
        """The tensor of that name, or the only one whose name differs by a prefix."""
        if name in theirs:
            return name
        similar = [each for each in theirs if f".{each}".endswith(f".{name}") or f".{name}".endswith(f".{each}")]
        if len(similar) != 1:
            raise BadModelFile(f"{self.root / WEIGHTS} is for another model: {self.base} has no {name}")
        return similar[0]

    def _fit(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """``x``, which must have the shape of the ``weight``."""
        if x.shape != weight.shape:
            shapes = f"{tuple(x.shape)} there and {tuple(weight.shape)} in {self.base}"
            raise BadModelFile(f"{self.root / WEIGHTS} is for another model: {name} gives {shapes}")
        return x


def is_adapter(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()
