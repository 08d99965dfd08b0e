"""Fine-tuning: start from trained weights (what fits is copied, the rest is reported), freezing, LoRA and QLoRA."""

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
from .optimiser import joined_rows

# The same layer, where it stands with another head: an encoder's own pooler, a classifier's.
_ALSO_CALLED = (("classifier.pooler.", "pooler."), ("pooler.", "classifier.pooler."))
_TABLES_AND_HEADS = ("token.", "target_token.", "head.", "classifier.", "pooler.")
M = TypeVar("M", bound=nn.Module)
# No model has all of these, so a list of targets may name one that is not there; any other must be found.
_ATTENTION_LAYERS = ("w_qkv", "w_query", "w_kv", "w_o", "w_q", "w_k", "w_v")
# Fields that change what weights of the same shape mean.
_MEANINGS = (
    *("n_heads", "n_kv_heads", "positions", "sinusoid_layout", "position_offset", "rope_base", "rope_fraction"),
    *("scale_embeddings", "norm", "norm_place", "residual", "mixer", "attention_scale", "causal", "window"),
    *("sparsity", "sparsity_size", "sparsity_random"),
    *("parallel_residual", "norm_offset", "score_cap", "qk_norm_over", "rope_layers", "window_rope_base"),
    *("activation", "logit_scale", "logit_cap", "cell", "alignment", "input_feeding"),
)


@dataclass(frozen=True)
class WeightTransfer:
    """Which weights of a trained model a run starts from. LoRA has to train ``unlearned`` beside its own."""

    path: str
    copied: tuple[str, ...]
    partly: tuple[str, ...]  # tables of positions of another length: as many rows as both have
    new: dict[str, str]  # parameters that keep their initial values, and why
    unused: tuple[str, ...]  # weights that this model has no place for
    differs: dict[str, tuple[Any, Any]]  # config fields, theirs and ours, that change what the weights mean

    @property
    def unlearned(self) -> tuple[str, ...]:
        """Parameters that must be trained even where the others are frozen."""
        return (*self.new, *self.partly)

    def to_dict(self) -> dict[str, Any]:
        """As in started.json, where ``unused`` is called left."""
        return {"left" if name == "unused" else name: value for name, value in asdict(self).items()}

    def to_text(self) -> str:
        lines = [f"{self.path}: {len(self.copied) + len(self.partly)} weights copied, {len(self.unused)} not needed"]
        reasons: dict[str, list[str]] = {}
        for name, why in self.new.items():
            reasons.setdefault(why, []).append(name)
        lines += [f"  new, {why}: {_first_names(names)}" for why, names in reasons.items()]
        lines += [f"  only the rows both have: {_first_names(self.partly)}"] if self.partly else []
        for name, (theirs, ours) in self.differs.items():
            lines.append(f"  {name} was {theirs!r} there and is {ours!r} here")
        return "\n".join(lines)


def start_from(
    model: Model, path: str, initial: Model, processor: Processor | None = None, *, partial: bool = True
) -> WeightTransfer:
    """Copy into ``model`` what fits of ``initial``, the model at ``path``, by name and shape; UsageError if none does.

    Without ``partial`` it is also an error where less than half of the layers' weights fit, tables and heads apart.
    Rows of token tables belong to tokens, those of a classifier to classes: they are copied only where tokenizers and
    labels are the same. ``processor`` is what the model will be used with; None: its own.
    """
    why_not = _foreign_rows(model, model.processor if processor is None else processor, initial.processor)
    given = dict(initial.state_dict())
    same_offset = model.config.position_offset == initial.config.position_offset
    lengths = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, Learned)}
    copied, partly, new, taken = [], [], {}, set()
    with torch.no_grad():
        for name, x in model.state_dict().items():
            names = [name, *(there + name.removeprefix(here) for here, there in _ALSO_CALLED if name.startswith(here))]
            source = next((each for each in names if each in given), None)
            if source is None:
                new[name] = "not among those weights"
                continue
            y = given[source]
            if name in why_not:
                new[name] = why_not[name]
            elif x.shape == y.shape:
                x.copy_(y)
                copied.append(name)
            elif name in lengths and x.shape[1:] == y.shape[1:] and same_offset:
                rows = min(len(x), len(y))
                x[:rows].copy_(y[:rows])
                partly.append(name)
            else:
                shapes = ("×".join(map(str, each.shape)) or "a number" for each in (y, x))
                new[name] = "of shape {} there, {} here".format(*shapes)
                continue
            taken.add(source)
    share = _share_of_body(model, {*copied, *partly})
    if (not copied and not partly) or (share < 0.5 and not partial):
        sizes = _differences(initial, model, ("architecture", "d_model", "n_layers", "d_ff", *_MEANINGS))
        why = ", ".join(f"{name} is {theirs} there and {ours} here" for name, (theirs, ours) in sizes.items())
        why = why or "; ".join(f"{name}: {reason}" for name, reason in list(new.items())[:2])
        if not copied and not partly:
            raise UsageError(f"train.init={path}: none of its weights fits this model ({why})")
        how = "leave out the model fields that differ, or start anyway with train.init_partial=true"
        raise UsageError(f"train.init={path}: only {share:.0%} of this model's layers fit its weights ({why}); {how}")
    parameters = {name for name, _ in model.named_parameters()}
    new = {name: why for name, why in new.items() if name in parameters}
    unused = tuple(name for name in given if name not in taken)
    differs = _differences(initial, model, _MEANINGS)
    return WeightTransfer(str(path), tuple(copied), tuple(partly), new, unused, differs)


def _share_of_body(model: Model, names: Collection[str]) -> float:
    """How many numbers of the layers, tables and heads apart, the named parameters hold; 1 where there are none."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if not name.startswith(_TABLES_AND_HEADS)}
    total = sum(sizes.values())
    return sum(size for name, size in sizes.items() if name in names) / total if total else 1.0


def _foreign_rows(model: Model, ours: Processor | None, theirs: Processor | None) -> dict[str, str]:
    """Parameters with a row for each token or class, where those are not the same there, and why they stay."""
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
        if names and not _same_tokens(_tokenizer(ours, side), _tokenizer(theirs, side)):
            reasons.update(dict.fromkeys(names, "the tokens are others"))
    labels = [x.labels for x in (ours, theirs) if x is not None and x.labels is not None]
    if len(labels) == 2 and tuple(labels[0]) != tuple(labels[1]):
        reasons.update(dict.fromkeys(("classifier.out.weight", "classifier.out.bias"), "the classes are others"))
    return reasons


def same_processors(ours: Processor, theirs: Processor | None) -> bool:
    """Whether the inputs and outputs of two models mean the same: their tokens, classes and images."""
    sides = [(_tokenizer(ours, side), _tokenizer(theirs, side)) for side in ("source", "target")]
    labels, image = (None, None) if theirs is None else (theirs.labels, theirs.image)
    same_labels = None in (labels, ours.labels) or labels == ours.labels
    return all(_same_tokens(*pair) for pair in sides) and same_labels and image == ours.image


def _tokenizer(processor: Processor | None, side: str) -> Tokenizer | None:
    if processor is None:
        return None
    first, second = (processor.source, processor.target) if side == "source" else (processor.target, processor.source)
    return second if first is None else first


def _same_tokens(ours: Tokenizer | None, theirs: Tokenizer | None) -> bool:
    """Whether an id is the same piece of text. Where neither side has a tokenizer, ids are all there is."""
    if ours is None or theirs is None:
        return ours is None and theirs is None
    return ours.content == theirs.content or _vocabulary(ours) == _vocabulary(theirs)


def _vocabulary(tokenizer: Tokenizer) -> list[str | None]:
    """Every token as it is written, by id."""
    size = max(tokenizer.vocab.values(), default=-1) + 1 if isinstance(tokenizer, MarianTokenizer) else tokenizer.size
    return [tokenizer.token(index) for index in range(size)]


def _differences(there: Model, model: Model, fields: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The config fields that are not the same, theirs and ours."""
    configs = [each.config.with_(n_kv_heads=each.config.n_kv_heads or each.config.n_heads) for each in (there, model)]
    pairs = {name: (getattr(configs[0], name), getattr(configs[1], name)) for name in fields}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _first_names(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Leave the parameters as they are that a pattern names: a name, the start of one up to a dot, * for anything.

    A pattern that names nothing is an error, and so is leaving nothing to train. Returns the names.
    """
    parameters = dict(model.named_parameters())
    frozen: set[str] = set()
    for pattern in patterns:
        hit = [n for n in parameters if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern.rstrip('.')}.*")]
        if not hit:
            # Parts of names, as many words long as the pattern, that look like it.
            plain, words = pattern.replace("*", "").strip("."), [name.split(".") for name in parameters]
            n = plain.count(".") + 1
            parts = {".".join(w[at : at + n]) for w in words for at in range(max(1, len(w) - n + 1))}
            near = difflib.get_close_matches(plain, sorted(parts), 3, 0.5) or sorted({w[0] for w in words})
            raise ValueError(f"freeze={pattern!r} names no parameter; the nearest are {', '.join(near)}")
        frozen.update(hit)
    if not any(p.requires_grad for name, p in parameters.items() if name not in frozen):
        raise ValueError(f"freeze={','.join(patterns)} leaves no parameter to train")
    for name in frozen:
        parameters[name].requires_grad_(False)
    return [name for name in parameters if name in frozen]


class LoraLinear(nn.Linear):
    """A Linear with frozen weights of its own and, for each of its ``parts`` that is adapted, a trained A and B.

    ``parts`` has the rows of the weight each joined matrix takes up; ``adapted`` the names of those that learn.
    """

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, parts: dict[str, slice], adapted: Collection[str]
    ) -> None:
        # On the meta device nothing is drawn or allocated; weight and bias are the base's own in a moment.
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.train(base.training)
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.rows = {name: rows for name, rows in parts.items() if name in adapted}
        a, b = {}, {}
        for name, rows in self.rows.items():
            a[name] = nn.Parameter(base.weight.new_empty(rank, base.in_features))
            b[name] = nn.Parameter(base.weight.new_zeros(rows.stop - rows.start, rank))
            nn.init.normal_(a[name], std=base.in_features**-0.5)  # A x is then of x's own size
        self.lora_a, self.lora_b = nn.ParameterDict(a), nn.ParameterDict(b)
        self.is_switched_off = False
        self.frozen: NF4Weight | None = None  # the weight in four bits, in place of ``weight``

    def quantise(self) -> None:
        """Keep the frozen weight in four bits."""
        self.frozen = NF4Weight(self.weight)
        self.register_parameter("weight", None)

    def _base(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.frozen is None else self.frozen.product(x, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The base's output plus the B A x of every part side by side (…, d_out), zeros where one is not adapted."""
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
    """Freeze the model, in place, and give the linear layers that ``targets`` name a trained low-rank addition.

    A target is the last part of a layer's name (``w_o``), a whole name, * for anything, or one matrix of a joined
    weight (``w_q``, ``w_v``, ``w_gate``). ``keep`` are the parameters that go on learning: a new head.
    """
    check_positive(lora=rank)
    found = _find_layers(model, targets)
    if unknown := sorted(set(keep) - {name for name, _ in model.named_parameters()}):
        raise ValueError(f"keep names {unknown[0]!r}, which is no parameter of the model")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in keep)
    replaced: dict[nn.Linear, LoraLinear] = {}
    for owner, attribute, layer, parts, adapted in found:
        if layer not in replaced:  # a layer that stands in two places stays one
            replaced[layer] = LoraLinear(layer, rank, 2.0 * rank if alpha is None else alpha, parts, adapted)
        setattr(owner, attribute, replaced[layer])
    return model


def quantise_frozen(model: M) -> M:
    """Store every frozen linear layer in four bits, in place: the base of low-rank additions, and layers without them.

    Token tables, heads and norms stay as they are (QLoRA, Dettmers et al. 2023).
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
    """Inside, the model is the one that its additions were added to, without dropout."""
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
    """Fold every addition into its weights, in place: plain layers again, under the names the base had, to be saved.

    All parameters may learn again. Weights in four bits become those they were rounded to, which is what was trained.
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
    """The additions to each layer, by its name."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    return {
        name: [LowRank(rows, layer.lora_a[part], layer.lora_b[part]) for part, rows in layer.rows.items()]
        for name, layer in layers.items()
    }


_AdaptedLayer = tuple[nn.Module, str, nn.Linear, dict[str, slice], list[str]]


def _find_layers(model: nn.Module, targets: Sequence[str]) -> list[_AdaptedLayer]:
    """Which layers are adapted, in which attribute of which module, and which parts of them."""
    found: list[_AdaptedLayer] = []
    missed = set(targets)
    available: set[str] = set()  # for the message
    for prefix, owner in model.named_modules():
        for attribute, layer in owner.named_children():
            if isinstance(layer, LoraLinear):
                raise ValueError(f"{prefix}.{attribute} already has a low-rank addition; merge it first")
            if not isinstance(layer, nn.Linear):
                continue
            name = f"{prefix}.{attribute}".lstrip(".")
            # Layers of a list have only their number for a last part.
            available.add(f"{name.rpartition('.')[0]}.*" if attribute.isdigit() else attribute)
            parts = _parts(owner, attribute, layer)
            adapted: set[str] = set()
            for target in targets:
                whole = fnmatchcase(attribute, target) or fnmatchcase(name, target)
                if hit := set(parts) if whole else {part for part in parts if target == f"w_{part}"}:
                    adapted |= hit
                    missed.discard(target)
            if adapted:
                found.append((owner, attribute, layer, parts, [part for part in parts if part in adapted]))
    if not available:
        raise ValueError("lora needs linear layers, and this model has none")
    strange = sorted(missed - set(_ATTENTION_LAYERS)) or (sorted(missed) if not found else [])
    if strange or not found:
        near = difflib.get_close_matches(strange[0], sorted(available), 1) if strange else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        what, known = ", ".join(strange) or "nothing", ", ".join(sorted(available))
        raise ValueError(f"lora_targets={what} is no linear layer of this model, which has {known}{hint}")
    return found


def _parts(owner: nn.Module, attribute: str, layer: nn.Linear) -> dict[str, slice]:
    """The matrices a weight joins, by name, and their rows."""
    sizes = joined_rows(owner).get(attribute, {"whole": layer.out_features})
    ends = itertools.accumulate(sizes.values())
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
