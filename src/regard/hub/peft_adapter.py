"""Low-rank additions (LoRA, Hu et al. 2022) as directories of the ``peft`` package: adapter_config.json and
adapter_model.safetensors, under the names that transformers gives the layers of the model they belong to.

One layer there may hold several of our matrices, each with additions of its own (GPT-2's c_attn: q, k and v). Side by
side they are one addition of the ranks' sum: W + s [B₁ 0; 0 B₂] [A₁; A₂].
"""

from __future__ import annotations

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
_MOST_ROWS = 2**40
_TASK_TYPES = {
    ("decoder", "lm"): "CAUSAL_LM",
    ("encoder-decoder", "lm"): "SEQ_2_SEQ_LM",
    ("encoder", "classify"): "SEQ_CLS",
}


class LowRank(NamedTuple):
    """An addition to some rows of a layer's weight: scale · b a."""

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
    """Write the additions to ``layers``, and the parameters named in ``whole`` as they are in ``model``.

    ``base`` is the directory of the model that everything else is in.
    """
    from safetensors.torch import save_file

    tensors: Tensors = {}
    ranks: dict[str, int] = {}
    whole_modules: set[str] = set()
    is_transposed = False
    theirs, places = _their_places(model, [*(f"{layer}.weight" for layer in layers), *whole])
    for name, (our_name, rows, transposed) in places.items():
        module = name.rpartition(".")[0]
        if our_name in whole:
            tensors[f"{_PREFIX}{name}"] = theirs[name].cpu().contiguous()
            whole_modules.add("classifier" if module.startswith("classifier.") else module)
            continue
        inside = [x for x in layers[our_name.removesuffix(".weight")] if rows.start <= x.rows.start < rows.stop]
        if inside:
            is_transposed |= transposed
            tensors[f"{_PREFIX}{module}{_A}"], tensors[f"{_PREFIX}{module}{_B}"] = _side_by_side(inside, rows)
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


class _Place(NamedTuple):
    """Which rows of which of our tensors one of theirs holds."""

    our_name: str
    rows: slice
    transposed: bool


def _their_places(model: Model, our_names: Sequence[str]) -> tuple[Tensors, dict[str, _Place]]:
    """All tensors in their names, and where those come from that hold our named ones."""
    steps, state = write_config(model.config).steps, {name: x.detach() for name, x in model.state_dict().items()}
    # Row numbers in place of the numbers: what the steps do to names and rows can then be read off.
    numbers = {}
    for index, name in enumerate(our_names):
        rows = torch.arange(len(state[name])) + index * _MOST_ROWS
        numbers[name] = rows.view(-1, *[1] * (state[name].dim() - 1))
    places = {}
    for name, x in to_theirs(steps, {**state, **numbers}).items():
        if x.dtype == torch.int64:
            index, start = divmod(int(x.flatten()[0]), _MOST_ROWS)
            transposed = x.dim() == 2 and x.shape[0] == 1 < x.shape[1]
            places[name] = _Place(our_names[index], slice(start, start + x.numel()), transposed)
    return to_theirs(steps, state), places


def _side_by_side(parts: Sequence[LowRank], rows: slice) -> tuple[Tensor, Tensor]:
    """A (Σr, d_in) and B (rows, Σr) of several additions to one matrix."""
    a = torch.cat([x.a.detach().cpu() for x in parts])
    b, end = a.new_zeros(rows.stop - rows.start, len(a)), 0
    for x in parts:
        b[x.rows.start - rows.start : x.rows.stop - rows.start, end : end + len(x.a)] = x.b.detach().cpu()
        end += len(x.a)
    return a, b


def _target_modules(modules: Collection[str], theirs: Tensors) -> list[str]:
    """The last parts of the names, as people write them, where they mean these modules and no other."""
    everything = {name.removesuffix(".weight") for name in theirs if name.endswith(".weight")}
    last = {module.rpartition(".")[2] for module in modules}
    exact = {x for x in everything if x.rpartition(".")[2] in last} == set(modules)
    return sorted(last if exact and not any(x.isdigit() for x in last) else modules)


def _task_type(config: ModelConfig) -> str | None:
    return _TASK_TYPES.get((config.architecture, config.head)) if config.source == "text" else None


@dataclass(frozen=True)
class Adapter:
    """What an adapter's directory holds."""

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
        for name in ("use_dora", "lora_bias", "alora_invocation_tokens", "trainable_token_indices"):
            if fields.get(name):
                raise BadModelFile(f"{root / CONFIG} has {name}={fields[name]!r}, which regard does not read")
        if not (root / WEIGHTS).is_file():
            raise BadModelFile(f"{root} has no {WEIGHTS}")
        return cls(root, fields, open_safetensors(root / WEIGHTS).read())

    @property
    def base(self) -> Path:
        """The model's directory: as written, or from the adapter's own place."""
        name = str(self.fields.get("base_model_name_or_path") or "")
        for path in (Path(name), self.root / name):
            if name and path.is_dir():
                return path
        where = f"{self.root / CONFIG} has base_model_name_or_path={name!r}"
        raise BadModelFile(f"{where}, which is no local directory: write there where the model lies")

    def _scale(self, module: str, rank: int) -> float:
        """α / r, or α / √r where the config says so."""
        patterns = self.fields.get("alpha_pattern") or {}
        matching = (x for name, x in patterns.items() if f".{module}".endswith(f".{name}"))
        alpha = next(matching, self.fields.get("lora_alpha", 8))  # peft's own default
        return float(alpha) / (rank**0.5 if self.fields.get("use_rslora") else rank)

    @torch.no_grad()
    def add_to(self, model: Model) -> None:
        """Add B A to the model's weights, in place, in double precision rounded once; replace what is kept whole."""
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
        """The tensor of that name, also where one of the two is named without the model around its layers."""
        near = [each for each in theirs if f".{each}".endswith(f".{name}") or f".{name}".endswith(f".{each}")]
        if name not in theirs and len(near) != 1:
            raise BadModelFile(f"{self.root / WEIGHTS} is for another model: {self.base} has no {name}")
        return name if name in theirs else near[0]

    def _fit(self, name: str, x: Tensor, place: Tensor) -> Tensor:
        if x.shape != place.shape:
            shapes = f"{tuple(x.shape)} there and {tuple(place.shape)} in {self.base}"
            raise BadModelFile(f"{self.root / WEIGHTS} is for another model: {name} gives {shapes}")
        return x


def is_adapter(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()
