"""Fine-tuning: start from trained weights (matching ones are copied, the rest reported), freezing, LoRA and QLoRA."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from ..foundation.checks import check_positive
from ..hub import LowRank
from ..layers import Learned
from ..layers.nf4_linear import NF4Linear, NF4Weight
from ..models import Model
from ..models.components import TokenHead
from ..text.processor import Processor
from ..text.tokenizer import MarianTokenizer, Tokenizer
from .optimiser import joined_matrices

# The pooler is part of the encoder or of the classifier, depending on the head.
_ALSO_CALLED = (("classifier.pooler.", "pooler."), ("pooler.", "classifier.pooler."))
_TABLES_AND_HEADS = ("token.", "target_token.", "head.", "classifier.", "pooler.")
M = TypeVar("M", bound=nn.Module)
# The default targets of LoRA. No model has all of them, so missing ones are not an error; any other target must exist.
_ATTENTION_LAYERS = ("w_qkv", "w_query", "w_kv", "w_o", "w_q", "w_k", "w_v")
# Config fields that change the meaning of weights without changing their shape.
_MEANINGS = (
    *("n_heads", "n_kv_heads", "positions", "sinusoid_layout", "position_offset", "rope_base", "rope_fraction"),
    *("scale_embeddings", "norm", "norm_place", "residual", "mixer", "attention_scale", "causal", "window"),
    *("sparsity", "sparsity_size", "sparsity_random"),
    *("parallel_residual", "norm_offset", "score_cap", "qk_norm_over", "rope_layers", "window_rope_base"),
    *("activation", "gate_limit", "logit_scale", "logit_cap", "cell", "alignment", "input_feeding"),
)


@dataclass(frozen=True)
class WeightTransfer:
    """Which weights of a trained model a run starts from. LoRA trains ``unlearned`` in addition to its factors."""

    path: str
    copied: tuple[str, ...]
    partly: tuple[str, ...]  # position tables of another length: the rows that both have are copied
    new: dict[str, str]  # parameters that keep their initial values, with the reason
    unused: tuple[str, ...]  # weights of the trained model that this model does not have
    differs: dict[str, tuple[Any, Any]]  # config fields (theirs, ours) that change the meaning of the weights

    @property
    def unlearned(self) -> tuple[str, ...]:
        """Parameters that must be trained even when the others are frozen."""
        return (*self.new, *self.partly)

    def to_dict(self) -> dict[str, Any]:
        """The content of started.json, where ``unused`` is named "left"."""
        return {"left" if name == "unused" else name: value for name, value in asdict(self).items()}

    def to_text(self) -> str:
        lines = [f"{self.path}: {len(self.copied) + len(self.partly)} weights copied, {len(self.unused)} not needed"]
        reasons: dict[str, list[str]] = {}
        for name, why in self.new.items():
            reasons.setdefault(why, []).append(name)
        lines += [f"  new, {why}: {_first_names(names)}" for why, names in reasons.items()]
        if self.partly:
            lines.append(f"  only the rows both have: {_first_names(self.partly)}")
        for name, (theirs, ours) in self.differs.items():
            lines.append(f"  {name} was {theirs!r} there and is {ours!r} here")
        return "\n".join(lines)


def start_from(
    model: Model, path: str, initial: Model, processor: Processor | None = None, *, partial: bool = True
) -> WeightTransfer:
    """Copy the weights of ``initial``, the model at ``path``, that match ``model`` in name and shape.

    UsageError if none does or, without ``partial``, if less than half of the weights match (embeddings and heads not
    counted). Rows of embeddings belong to tokens and rows of a classifier to classes: they are copied only if the
    tokenizers and labels are the same. ``processor`` is the one the model will be used with (default: its own).
    """
    processors = (processor or model.processor or Processor(), initial.processor or Processor())
    not_copied = _foreign_rows(model, *processors)
    weights = dict(initial.state_dict())
    same_offset = model.config.position_offset == initial.config.position_offset
    position_tables = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, Learned)}
    copied: list[str] = []
    partly: list[str] = []
    new: dict[str, str] = {}
    used: set[str] = set()
    with torch.no_grad():
        for name, x in model.state_dict().items():
            names = [name, *(there + name.removeprefix(here) for here, there in _ALSO_CALLED if name.startswith(here))]
            source = next((each for each in names if each in weights), None)
            if source is None:
                new[name] = "not among those weights"
                continue
            y = weights[source]
            if name in not_copied:
                new[name] = not_copied[name]
            elif x.shape == y.shape:
                x.copy_(y)
                copied.append(name)
            elif name in position_tables and x.shape[1:] == y.shape[1:] and same_offset:
                rows = min(len(x), len(y))
                x[:rows].copy_(y[:rows])
                partly.append(name)
            else:
                shapes = ("×".join(map(str, each.shape)) or "a number" for each in (y, x))
                new[name] = "of shape {} there, {} here".format(*shapes)
                continue
            used.add(source)
    if fault := _too_few({*copied, *partly}, new, initial, model, partial):
        raise UsageError(f"train.init={path}: {fault}")
    parameters = {name for name, _ in model.named_parameters()}
    new = {name: why for name, why in new.items() if name in parameters}
    unused = tuple(name for name in weights if name not in used)
    differs = _differences(initial, model, _MEANINGS)
    return WeightTransfer(str(path), tuple(copied), tuple(partly), new, unused, differs)


def _too_few(copied: set[str], new: dict[str, str], initial: Model, model: Model, partial: bool) -> str | None:
    """Why the copied weights are too few to start from; None if they are enough."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if not name.startswith(_TABLES_AND_HEADS)}
    total = sum(sizes.values())
    share = sum(size for name, size in sizes.items() if name in copied) / total if total else 1.0
    if copied and (share >= 0.5 or partial):
        return None
    differ = _differences(initial, model, ("architecture", "d_model", "n_layers", "d_ff", *_MEANINGS))
    why = ", ".join(f"{name} is {theirs} there and {ours} here" for name, (theirs, ours) in differ.items())
    why = why or "; ".join(f"{name}: {reason}" for name, reason in list(new.items())[:2])
    if not copied:
        return f"none of its weights fit this model ({why})"
    how = "leave out the model fields that differ, or start anyway with train.init_partial=true"
    return f"only {share:.0%} of this model's layers fit its weights ({why}); {how}"


def _foreign_rows(model: Model, ours: Processor, theirs: Processor) -> dict[str, str]:
    """Parameters with a row per token or class that the two models do not share, each with the reason."""
    tables: dict[str, list[str]] = {"source": [], "target": []}  # by the side whose tokenizer numbers the rows
    for side, name in (("source", "token"), ("target", "target_token")):
        if getattr(model, name, None) is not None:
            tables[side].append(f"{name}.weight")
    head = getattr(model, "head", None)
    if isinstance(head, TokenHead):
        names = [f"head.{name}" for name in ("weight", "bias") if hasattr(head, name)]
        tables["target" if tables["target"] else "source"] += names
    reasons = {}
    for side, names in tables.items():
        if names and not _same_tokens(ours.tokenizer_of(side), theirs.tokenizer_of(side)):
            reasons.update(dict.fromkeys(names, "the tokens differ"))
    if None not in (ours.labels, theirs.labels) and ours.labels != theirs.labels:
        reasons.update(dict.fromkeys(("classifier.out.weight", "classifier.out.bias"), "the classes differ"))
    return reasons


def same_processors(ours: Processor, theirs: Processor | None) -> bool:
    """Whether two models agree in the meaning of inputs and outputs: tokens, classes and images."""
    theirs = theirs or Processor()
    same_labels = None in (ours.labels, theirs.labels) or ours.labels == theirs.labels
    same_tokens = all(_same_tokens(ours.tokenizer_of(side), theirs.tokenizer_of(side)) for side in ("source", "target"))
    return same_tokens and same_labels and ours.image == theirs.image


def _same_tokens(ours: Tokenizer | None, theirs: Tokenizer | None) -> bool:
    """Whether ids stand for the same text; True if neither side has a tokenizer."""
    if ours is None or theirs is None:
        return ours is None and theirs is None
    return ours.content == theirs.content or _vocabulary(ours) == _vocabulary(theirs)


def _vocabulary(tokenizer: Tokenizer) -> list[str | None]:
    """The text of every token, by id."""
    size = max(tokenizer.vocab.values(), default=-1) + 1 if isinstance(tokenizer, MarianTokenizer) else tokenizer.size
    return [tokenizer.token(index) for index in range(size)]


def _differences(there: Model, model: Model, fields: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The config fields that differ, as (theirs, ours)."""
    theirs, ours = (
        each.config.model_dump() | {"n_kv_heads": each.config.n_kv_heads or each.config.n_heads}
        for each in (there, model)
    )
    return {name: (theirs[name], ours[name]) for name in fields if theirs[name] != ours[name]}


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters that match a pattern: a name, the beginning of one up to a dot, or * as a wildcard.

    Returns their names. ValueError if a pattern matches nothing, or if nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    frozen: set[str] = set()
    for pattern in patterns:
        matches = [n for n in parameters if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern.rstrip('.')}.*")]
        if not matches:
            # Suggest similar parts of names with as many components as the pattern.
            plain, words = pattern.replace("*", "").strip("."), [name.split(".") for name in parameters]
            n = plain.count(".") + 1
            parts = {".".join(w[i : i + n]) for w in words for i in range(max(1, len(w) - n + 1))}
            near = difflib.get_close_matches(plain, sorted(parts), 3, 0.5) or sorted({w[0] for w in words})
            raise ValueError(f"freeze={pattern!r} matches no parameter; the nearest are {', '.join(near)}")
        frozen.update(matches)
    if not any(p.requires_grad for name, p in parameters.items() if name not in frozen):
        raise ValueError(f"freeze={','.join(patterns)} leaves no parameter to train")
    for name in frozen:
        parameters[name].requires_grad_(False)
    return [name for name in parameters if name in frozen]


def use_language_model(model: nn.Module, path: str | None, take: bool) -> None:
    """Freeze the language model of a captioner that has one; the image tower, the resampler and the gated
    cross-attention stay trainable. ``take``: load its weights from ``path`` first."""
    if path is None:
        return
    if take:
        from ..io import load

        names, state = {"token": "target_token", "embeddings": "target_embeddings"}, {}
        for name, x in load(path).state_dict().items():
            first, dot, rest = name.partition(".")
            state[names.get(first, first) + dot + rest] = x
        if unknown := model.load_state_dict(state, strict=False).unexpected_keys:
            raise ValueError(f"the captioner has no parameter for {', '.join(unknown)} of its language model")
    for name, p in model.named_parameters():
        if name.startswith(("target_token.", "target_embeddings.", "decoder.", "head.")) and ".cross_" not in name:
            p.requires_grad_(False)


class LoraLinear(nn.Linear):
    """A Linear with frozen weights and trained low-rank factors, W + (α/r) B A (LoRA, Hu et al. 2022).

    ``parts`` maps each matrix that is joined in the weight to its rows; ``adapted`` names those that get an A and a B.
    """

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, parts: dict[str, slice], adapted: Collection[str]
    ) -> None:
        # The meta device neither allocates nor draws random numbers; weight and bias are replaced below.
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.train(base.training)
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.rows = {name: rows for name, rows in parts.items() if name in adapted}
        a, b = {}, {}
        for name, rows in self.rows.items():
            a[name] = nn.Parameter(base.weight.new_empty(rank, base.in_features))
            b[name] = nn.Parameter(base.weight.new_zeros(rows.stop - rows.start, rank))
            nn.init.normal_(a[name], std=base.in_features**-0.5)  # A x has the scale of x
        self.lora_a, self.lora_b = nn.ParameterDict(a), nn.ParameterDict(b)
        self.is_switched_off = False
        self.frozen: NF4Weight | None = None  # replaces ``weight`` after ``quantise``

    def quantise(self) -> None:
        """Store the frozen weight in four bits."""
        self.frozen = NF4Weight(self.weight)
        self.register_parameter("weight", None)

    def _base(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.frozen is None else self.frozen.product(x, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the base layer plus (α/r) B A x of each adapted part in the columns of that part (…, d_out)."""
        if self.is_switched_off:
            return self._base(x)
        inner = F.linear(x, torch.cat([self.lora_a[name] for name in self.rows]))  # one product for all parts
        by_part = dict(zip(self.rows, inner.split(self.rank, dim=-1), strict=True))
        pieces, end = [], 0
        for name, rows in self.rows.items():
            if rows.start > end:
                pieces.append(inner.new_zeros(*x.shape[:-1], rows.start - end))
            pieces.append(F.linear(by_part[name], self.lora_b[name]))
            end = rows.stop
        if end < self.out_features:
            pieces.append(inner.new_zeros(*x.shape[:-1], self.out_features - end))
        addition = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
        return self._base(x) + self.scale * addition

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain Linear with W + (α/r) B A, computed in double precision and rounded once."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight = self.weight.detach().clone() if self.frozen is None else self.frozen.dequantise()
        for name, rows in self.rows.items():
            addition = self.scale * (self.lora_b[name].double() @ self.lora_a[name].double())
            weight[rows] = (weight[rows].double() + addition).to(weight.dtype)
        plain.weight, plain.bias = nn.Parameter(weight), self.bias
        plain.train(self.training)
        return plain

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}, adapted={', '.join(self.rows)}"


def add_lora(
    model: M,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = _ATTENTION_LAYERS,
    keep: Sequence[str] = (),
) -> M:
    """Freeze the model and add trained low-rank factors to the linear layers that ``targets`` name, in place.

    A target is the last part of a layer's name (``w_o``), a whole name, a pattern with *, or one matrix of a joined
    weight (``w_q``, ``w_v``, ``w_gate``). ``keep`` names parameters that stay trainable, such as a new head.
    """
    check_positive(lora=rank)
    adapted_layers = _find_layers(model, targets)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in keep)
    replaced: dict[nn.Linear, LoraLinear] = {}
    for owner, attribute, layer, parts, adapted in adapted_layers:
        if layer not in replaced:  # a shared layer stays shared
            replaced[layer] = LoraLinear(layer, rank, 2.0 * rank if alpha is None else alpha, parts, adapted)
        setattr(owner, attribute, replaced[layer])
    return model


def quantise_frozen(model: M) -> M:
    """Store every frozen linear layer in four bits, in place, with or without low-rank additions.

    Embeddings, heads and norms are not changed (QLoRA, Dettmers et al. 2023).
    """
    quantised: dict[nn.Module, NF4Linear] = {}
    for owner in list(model.modules()):
        for attribute, layer in list(owner.named_children()):
            if isinstance(layer, LoraLinear):
                if layer.frozen is None:
                    layer.quantise()
            elif type(layer) is nn.Linear and not layer.weight.requires_grad:
                if layer not in quantised:
                    quantised[layer] = NF4Linear(layer)
                setattr(owner, attribute, quantised[layer])
    return model


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """A context in which the low-rank additions are off: the base model in eval mode."""
    layers, was_training = [x for x in model.modules() if isinstance(x, LoraLinear)], model.training
    model.eval()
    for layer in layers:
        layer.is_switched_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_switched_off = False
        model.train(was_training)


def merge(model: M) -> M:
    """Fold low-rank additions into the weights, in place; layers are plain again, under the names of the base model.

    All parameters become trainable. Weights in four bits are dequantised to the values that were trained with.
    """
    plain: dict[nn.Module, nn.Linear] = {}
    for owner in list(model.modules()):
        for attribute, layer in list(owner.named_children()):
            if isinstance(layer, LoraLinear | NF4Linear):
                if layer not in plain:
                    plain[layer] = layer.merged() if isinstance(layer, LoraLinear) else layer.plain()
                setattr(owner, attribute, plain[layer])
    return model.requires_grad_(True)


def low_rank_additions(model: nn.Module) -> dict[str, list[LowRank]]:
    """The low-rank additions to each layer, by the name of the layer."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    return {
        name: [LowRank(rows, layer.lora_a[part], layer.lora_b[part]) for part, rows in layer.rows.items()]
        for name, layer in layers.items()
    }


_AdaptedLayer = tuple[nn.Module, str, nn.Linear, dict[str, slice], list[str]]  # owner, attribute, layer, parts, adapted


def _find_layers(model: nn.Module, targets: Sequence[str]) -> list[_AdaptedLayer]:
    """The layers that ``targets`` name, with their owner, their parts and the names of the adapted parts."""
    layers: list[_AdaptedLayer] = []
    missed = set(targets)
    available: set[str] = set()  # names for the error message
    for prefix, owner in model.named_modules():
        for attribute, layer in owner.named_children():
            if isinstance(layer, LoraLinear):
                raise ValueError(f"{prefix}.{attribute} already has a low-rank addition; merge it first")
            if not isinstance(layer, nn.Linear):
                continue
            name = f"{prefix}.{attribute}".lstrip(".")
            # The last part of a layer in a list is only its number.
            available.add(f"{name.rpartition('.')[0]}.*" if attribute.isdigit() else attribute)
            parts = _parts(owner, attribute, layer)
            adapted: set[str] = set()
            for target in targets:
                whole = fnmatchcase(attribute, target) or fnmatchcase(name, target)
                if matches := set(parts) if whole else {part for part in parts if target == f"w_{part}"}:
                    adapted |= matches
                    missed.discard(target)
            if adapted:
                layers.append((owner, attribute, layer, parts, [part for part in parts if part in adapted]))
    if not available:
        raise ValueError("lora needs linear layers, and this model has none")
    unknown = sorted(missed - set(_ATTENTION_LAYERS)) or (sorted(missed) if not layers else [])
    if unknown or not layers:
        near = difflib.get_close_matches(unknown[0], sorted(available), 1) if unknown else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names, known = ", ".join(unknown) or "nothing", ", ".join(sorted(available))
        raise ValueError(f"lora_targets={names} is not a linear layer of this model, which has {known}{hint}")
    return layers


def _parts(owner: nn.Module, attribute: str, layer: nn.Linear) -> dict[str, slice]:
    """The matrices joined in a weight, by name, with their rows."""
    sizes = joined_matrices(owner).get(attribute, {"whole": layer.out_features})
    ends = itertools.accumulate(sizes.values())
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
