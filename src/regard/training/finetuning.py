"""Fine-tuning: start from trained weights (what fits is copied, the rest is reported), freezing, LoRA."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..layers import FeedForward, Learned
from ..models import Model
from ..models.components import TokenHead
from ..text.processor import Processor
from ..text.tokenizer import MarianTokenizer, Tokenizer

# The same layer, where it stands with another head: an encoder's own pooler, a classifier's.
_ALSO_CALLED = (("classifier.pooler.", "pooler."), ("pooler.", "classifier.pooler."))
# Fields that change what weights of the same shape mean.
_MEANINGS = (
    *("n_heads", "n_kv_heads", "positions", "sinusoid_layout", "position_offset", "rope_base", "rope_fraction"),
    *("scale_embeddings", "norm", "norm_place", "residual", "mixer", "attention_scale", "causal", "window"),
    *("sparsity", "sparsity_size", "sparsity_random"),
    *("activation", "logit_scale", "cell", "alignment", "input_feeding"),
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
        lines += [
            f"  {name} was {theirs!r} there and is {ours!r} here" for name, (theirs, ours) in self.differs.items()
        ]
        return "\n".join(lines)


def start_from(
    model: Model, path: str, load: Callable[[str], Model], processor: Processor | None = None
) -> WeightTransfer:
    """Copy into ``model`` what fits of the model ``load(path)`` gives, by name and shape; ValueError if nothing does.

    Rows of token tables belong to tokens, those of a classifier to classes: they are copied only where tokenizers and
    labels are the same. ``processor`` is what the model will be used with; None: its own.
    """
    there = load(path)
    ours = model.processor if processor is None else processor
    why_not = {**_strange_tokens(model, ours, there), **_strange_labels(model, ours, there)}
    given = dict(there.state_dict())
    lengths = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, Learned)}
    copied, partly, new, taken = [], [], {}, set()
    with torch.no_grad():
        for name, x in model.state_dict().items():
            source = _name_there(name, given)
            if source is None:
                new[name] = "not among those weights"
                continue
            y = given[source]
            if name in why_not:
                new[name] = why_not[name]
            elif x.shape == y.shape:
                x.copy_(y)
                copied.append(name)
            elif name in lengths and x.shape[1:] == y.shape[1:] and _same_offset(model, there):
                rows = min(len(x), len(y))
                x[:rows].copy_(y[:rows])
                partly.append(name)
            else:
                new[name] = f"of shape {_shape(y)} there, {_shape(x)} here"
                continue
            taken.add(source)
    if not copied and not partly:
        raise ValueError(_nothing_fits(path, there, model, new))
    parameters = {name for name, _ in model.named_parameters()}
    new = {name: why for name, why in new.items() if name in parameters}
    unused = tuple(name for name in given if name not in taken)
    return WeightTransfer(str(path), tuple(copied), tuple(partly), new, unused, _differences(there, model))


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Leave the parameters as they are that a pattern names: a name, the start of one up to a dot, * for anything.

    A pattern that names nothing is an error, and so is leaving nothing to train. Returns the names.
    """
    parameters = dict(model.named_parameters())
    frozen: set[str] = set()
    for pattern in patterns:
        hit = [n for n in parameters if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern.rstrip('.')}.*")]
        if not hit:
            near = _nearest(pattern, list(parameters))
            raise ValueError(f"freeze={pattern!r} names no parameter; the nearest are {', '.join(near)}")
        frozen.update(hit)
    if not any(p.requires_grad for name, p in parameters.items() if name not in frozen):
        raise ValueError(f"freeze={','.join(patterns)} leaves no parameter to train")
    for name in frozen:
        parameters[name].requires_grad_(False)
    return [name for name in parameters if name in frozen]


# ------------------------------------------------------------------------------------- what goes with what


def _name_there(name: str, given: dict[str, Tensor]) -> str | None:
    if name in given:
        return name
    for here, there in _ALSO_CALLED:
        if name.startswith(here) and (other := there + name.removeprefix(here)) in given:
            return other
    return None


def _strange_tokens(model: Model, ours: Processor | None, there: Model) -> dict[str, str]:
    """The tables over a vocabulary that is not the same there, and why they are not copied."""
    theirs = there.processor
    reasons = {}
    for side, names in _vocabularies(model).items():
        if names and not _same_tokens(_tokenizer(ours, side), _tokenizer(theirs, side)):
            reasons.update(dict.fromkeys(names, "the tokens are others"))
    return reasons


def _vocabularies(model: Model) -> dict[str, list[str]]:
    """On each side the parameters with one row a token."""
    tables = {name: f"{name}.weight" for name in ("token", "target_token") if getattr(model, name, None) is not None}
    head = getattr(model, "head", None)
    of_head = [] if not isinstance(head, TokenHead) else [f"head.{n}" for n in ("weight", "bias") if hasattr(head, n)]
    out = "target" if "target_token" in tables else "source"
    sides: dict[str, list[str]] = {"source": [], "target": []}
    if "token" in tables:
        sides["source"].append(tables["token"])
    if "target_token" in tables:
        sides["target"].append(tables["target_token"])
    sides[out] += of_head
    return sides


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


def _strange_labels(model: Model, ours: Processor | None, there: Model) -> dict[str, str]:
    mine = None if ours is None else ours.labels
    yours = None if there.processor is None else there.processor.labels
    if mine is None or yours is None or tuple(mine) == tuple(yours):
        return {}
    return {f"classifier.out.{name}": "the classes are others" for name in ("weight", "bias")}


def _same_offset(model: Model, there: Model) -> bool:
    return model.config.position_offset == there.config.position_offset


def _differences(there: Model, model: Model) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (getattr(there.config, name), getattr(model.config, name)) for name in _MEANINGS}
    pairs["n_kv_heads"] = (
        there.config.n_kv_heads or there.config.n_heads,
        model.config.n_kv_heads or model.config.n_heads,
    )
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ------------------------------------------------------------------------------------- messages


def _nothing_fits(path: str, there: Model, model: Model, new: dict[str, str]) -> str:
    sizes = ("architecture", "d_model", "n_layers", "d_ff")
    unlike = [n for n in sizes if getattr(there.config, n) != getattr(model.config, n)]
    if unlike:
        why = ", ".join(f"{n} is {getattr(there.config, n)} there and {getattr(model.config, n)} here" for n in unlike)
    else:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(new.items())[:2])
    return f"train.init={path}: none of its weights fits this model ({why})"


def _nearest(pattern: str, names: list[str]) -> list[str]:
    """Stretches of names, as many words long as the pattern, that look like it."""
    plain = pattern.replace("*", "").strip(".")
    n_words = plain.count(".") + 1
    words = [name.split(".") for name in names]
    stretches = {".".join(w[at : at + n_words]) for w in words for at in range(max(1, len(w) - n_words + 1))}
    return difflib.get_close_matches(plain, sorted(stretches), 3, 0.5) or sorted({w[0] for w in words})


def _shape(x: Tensor) -> str:
    return "×".join(map(str, x.shape)) or "a number"


def _first_names(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


M = TypeVar("M", bound=nn.Module)
# No model has all of these, so a list of targets may name one that is not there; any other must be found.
_ATTENTION_LAYERS = ("w_qkv", "w_query", "w_kv", "w_o", "w_q", "w_k", "w_v")
_WHOLE = "whole"


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

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x, self.weight, self.bias)
        return base + self.scale * self._addition(x)

    def _addition(self, x: Tensor) -> Tensor:
        """The B A x of every part side by side (…, d_out), zeros where a part is not adapted."""
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
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain Linear with W + (α/r) B A, computed in double precision and rounded once."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight = self.weight.detach().clone()
        for name, rows in self.rows.items():
            addition = self.scale * (self.lora_b[name].double() @ self.lora_a[name].double())
            weight[rows] = (self.weight[rows].double() + addition).to(weight.dtype)
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
    if rank < 1:
        raise ValueError(f"lora={rank} must be at least 1")
    found = _find(model, targets)
    kept = set(keep)
    unknown = sorted(kept - {name for name, _ in model.named_parameters()})
    if unknown:
        raise ValueError(f"keep names {unknown[0]!r}, which is no parameter of the model")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
    made: dict[int, LoraLinear] = {}
    for owner, attribute, layer, parts, adapted in found:
        if id(layer) not in made:  # a layer that stands in two places stays one
            made[id(layer)] = LoraLinear(layer, rank, 2.0 * rank if alpha is None else alpha, parts, adapted)
        setattr(owner, attribute, made[id(layer)])
    return model


def merge(model: M) -> M:
    """Fold every addition into its weights, in place: plain layers again, under the names the base had, to be saved.

    All parameters may learn again.
    """
    plain: dict[int, nn.Linear] = {}
    for owner in list(model.modules()):
        for attribute, layer in list(owner.named_children()):
            if isinstance(layer, LoraLinear):
                if id(layer) not in plain:
                    plain[id(layer)] = layer.merged()
                setattr(owner, attribute, plain[id(layer)])
    return model.requires_grad_(True)


def has_lora(model: nn.Module) -> bool:
    """Whether something is left to merge."""
    return any(isinstance(module, LoraLinear) for module in model.modules())


def lora_names(model: nn.Module) -> list[str]:
    """The parameters of the additions: small enough to be kept and passed around without the base."""
    return [name for name, _ in model.named_parameters() if ".lora_a." in name or ".lora_b." in name]


_Found = tuple[nn.Module, str, nn.Linear, dict[str, slice], list[str]]


def _find(model: nn.Module, targets: Sequence[str]) -> list[_Found]:
    """Which layers are adapted, and which parts of them."""
    found: list[_Found] = []
    missed = set(targets)
    layers = list(_linear_layers(model))
    for name, owner, attribute, layer in layers:
        parts = _parts(owner, attribute, layer)
        adapted: set[str] = set()
        for target in targets:
            whole = fnmatchcase(attribute, target) or fnmatchcase(name, target)
            hit = set(parts) if whole else {part for part in parts if target == f"w_{part}"}
            adapted |= hit
            if hit:
                missed.discard(target)
        if adapted:
            found.append((owner, attribute, layer, parts, [part for part in parts if part in adapted]))
    strange = sorted(missed - set(_ATTENTION_LAYERS)) or (sorted(missed) if not found else [])
    if strange or not found:
        raise ValueError(_no_such_layer(strange, sorted({_word(name, attribute) for name, _, attribute, _ in layers})))
    return found


def _word(name: str, attribute: str) -> str:
    """What to call a layer in a list of targets: layers of a list have only their number for a last part."""
    return f"{name.rpartition('.')[0]}.*" if attribute.isdigit() else attribute


def _no_such_layer(strange: list[str], available: list[str]) -> str:
    if not available:
        return "lora needs linear layers, and this model has none"
    what = ", ".join(strange) or "nothing"
    near = difflib.get_close_matches(strange[0], available, 1) if strange else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"lora_targets={what} is no linear layer of this model, which has {', '.join(available)}{hint}"


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    for prefix, owner in model.named_modules():
        for attribute, layer in owner.named_children():
            if isinstance(layer, LoraLinear):
                raise ValueError(f"{prefix}.{attribute} already has a low-rank addition; merge it first")
            if isinstance(layer, nn.Linear):
                yield f"{prefix}.{attribute}".lstrip("."), owner, attribute, layer


def _parts(owner: nn.Module, attribute: str, layer: nn.Linear) -> dict[str, slice]:
    """The matrices a weight joins, by name, and their rows."""
    names: tuple[str, ...] = (_WHOLE,)
    sizes: tuple[int, ...] = (layer.out_features,)
    if isinstance(owner, MultiHeadAttention) and attribute in ("w_qkv", "w_kv", "w_query"):
        names = {"w_qkv": ("q", "k", "v"), "w_kv": ("k", "v"), "w_query": ("q",)}[attribute]
        width = {"q": owner.n_heads * owner.d_head, "k": owner.n_kv_heads * owner.d_head}
        sizes = tuple(width["q" if name == "q" else "k"] for name in names)
    elif isinstance(owner, FeedForward) and owner.gated and attribute == "w_in":
        names, sizes = ("gate", "up"), (owner.d_ff, owner.d_ff)
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return {name: slice(end - size, end) for name, size, end in zip(names, sizes, ends, strict=True)}
