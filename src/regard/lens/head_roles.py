"""Roles of a language model's heads, and its attention sinks and massive activations.

previous, induction, duplicate   the weight on such keys, see ``lens.patterns``
sink        the weight on the first token (Xiao et al. 2023)
copying     whether the head's OV circuit copies tokens, see ``lens.head_weights``
mover       the logits that a head adds to the tokens it attends to, relative to the mean of the vocabulary; high for
            the name movers of indirect object identification (Wang et al. 2022)
inhibition  how far a head shifts the scores of movers from tokens that occur twice in the text to those that occur
            once, as S-inhibition heads do; defined for texts that have both, and for scores that are dot products
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.attention_map import as_span
from ..attention.frame import split_span
from ..attention.score_matrix import AttentionCall
from ..models import Model
from ..models.components import TokenHead
from .activations import ActivationRecord, capture
from .capture import attention_name, attention_sites, resolve_kind
from .contributions import head_values
from .head_history import repeated_tokens
from .head_weights import copying_scores
from .look import Look, look
from .notebook import table_html
from .patterns import HeadPatterns, nan_to_none
from .residual import check_float_weights, fold_norm, layer_block, norm_scale, output_matrix
from .why import has_dot_scores, split_query

# Minimum score of each role.
LEAST = {"previous": 0.4, "induction": 0.4, "duplicate": 0.4, "sink": 0.6}  # shares of attention
LEAST |= {"copying": 0.5, "mover": 0.5, "inhibition": 0.5}  # eigenvalue score, logits, scores before softmax
_N_MOVERS = 3  # the best movers, whose queries are split for inhibition


@dataclass(frozen=True, eq=False)
class HeadRoles:
    """Scores (L, H) by role; NaN if the texts do not determine it."""

    scores: dict[str, Tensor]

    def labels(self, layer: int, head: int) -> list[str]:
        """The roles whose score reaches ``LEAST``, by descending ratio to it."""
        ratios = {name: float(x[layer, head]) / LEAST[name] for name, x in self.scores.items()}
        return sorted((name for name, ratio in ratios.items() if ratio >= 1), key=lambda name: -ratios[name])

    def top(self, role: str, k: int = 5) -> list[tuple[int, int, float]]:
        """(layer, head, score) of the k heads with the highest score for a role."""
        if role not in self.scores:
            raise ValueError(f"role={role!r} is not one of {', '.join(self.scores)}")
        x = self.scores[role].nan_to_num(-math.inf)
        best = x.flatten().topk(min(k, x.numel()))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [(*divmod(index, x.shape[1]), value) for value, index in pairs if value > -math.inf]

    def to_dict(self) -> dict[str, Any]:
        n_layers, n_heads = self._shape
        scores = {name: nan_to_none(x.tolist()) for name, x in self.scores.items()}
        labels = [[self.labels(layer, head) for head in range(n_heads)] for layer in range(n_layers)]
        return {**scores, "labels": labels}

    def to_text(self) -> str:
        """A line for each head: its scores, then its roles."""
        names = list(self.scores)
        lines = ["  head  " + "  ".join(f"{name:>10}" for name in names)]
        for head, roles, *scores in self._rows():
            lines.append(f"{head:>6}  {'  '.join(f'{score:10.2f}' for score in scores)}  {', '.join(roles)}".rstrip())
        return "\n".join(lines)

    def _rows(self) -> list[tuple[Any, ...]]:
        return [
            (
                f"L{layer + 1}H{head + 1}",
                self.labels(layer, head),
                *(float(x[layer, head]) for x in self.scores.values()),
            )
            for layer, head in itertools.product(*map(range, self._shape))
        ]

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(next(iter(self.scores.values())).shape)

    def _repr_html_(self) -> str:
        rows = [(head, ", ".join(roles), *scores) for head, roles, *scores in self._rows() if roles]
        return table_html(("head", "roles", *self.scores), rows, repr(self))

    def __repr__(self) -> str:
        n_layers, n_heads = self._shape
        labels = [name for _, roles, *_ in self._rows() for name in roles]
        counts = ", ".join(f"{labels.count(name)} {name}" for name in self.scores if name in labels)
        return f"HeadRoles({n_layers} layers × {n_heads} heads: {counts or 'no roles'})"


def head_roles(model: Model, what: Sequence[Any] | None = None) -> HeadRoles:
    """The roles of a language model's heads, from its weights and from texts (or rows of token ids).

    what  None: repeated random tokens, which do not determine inhibition
    """
    check_float_weights(model)
    if not model.is_decoder_only or not isinstance(model.head, TokenHead):
        raise ValueError("head roles are defined for language models only")
    if what is None:
        rows: Any = repeated_tokens(model)
    else:
        rows = [what] if isinstance(what, str) else list(what)
    looks = [look(model, row) for row in rows]
    patterns = [each.patterns() for each in looks]
    scores = {
        name: torch.stack([each.scores[pattern] for each in patterns]).nanmean(0)
        for name, pattern in (("previous", "previous"), ("induction", "induction"), ("duplicate", "repeated"))
    }
    sinks = [_weight_on_first(*both) for both in zip(looks, patterns, strict=True)]
    scores |= {"sink": torch.stack(sinks).mean(0), "copying": copying_scores(model)}
    records = [capture(model, each.inputs[0]) for each in looks]
    scores["mover"] = torch.stack([moved_logits(record) for record in records]).mean(0)
    movers = [(layer, head) for layer, head, _ in HeadRoles(scores).top("mover", _N_MOVERS)]
    scores["inhibition"] = torch.stack([_inhibition(record, movers) for record in records]).nanmean(0)
    return HeadRoles(scores)


def _weight_on_first(each: Look, patterns: HeadPatterns) -> Tensor:
    """The mean weight on the first token, (L, H), without that of its own query, which can only attend to itself."""
    n = each.inputs[0].shape[1]
    own = torch.stack([each.map(layer=layer).tile(0, 0)[0, :, 0, 0].float().cpu() for layer in range(each.layers())])
    return (patterns.first * n - own) / max(n - 1, 1)


@torch.no_grad()
def moved_logits(record: ActivationRecord, prompt: int = 0) -> Tensor:
    """The logits that each head adds to the tokens it attends to, averaged over queries (L, H):

    Σ_j a_ij (u_j − ū) W_o v_j    through all norms between the head and the logits; u_j: output row of token j,
                                  ū: mean of all output rows
    """
    model: Any = record.model
    table = output_matrix(model).double()
    tokens = record.inputs.tensors[0][prompt, : record.lengths[prompt]]
    rows = (table[tokens] - table.mean(0)) * model.head.scale  # (T, M)
    states = record[f"decoder.blocks.{len(attention_sites(model)['self']) - 1}.output"][prompt, : len(tokens)].double()
    gains, scales = fold_norm(model.decoder.norm, rows), norm_scale(model.decoder.norm, states)
    scores = []
    for layer, site in reversed([*enumerate(attention_sites(model)["self"])]):
        module: Any = site.owner
        block, stem = layer_block(model, "self", layer), f"decoder.blocks.{layer}"
        norms = block.residuals()
        for part, before in (("ff", "after_attention"), ("attention", "input")):
            if (total := getattr(norms, part).total) is not None:  # post-norm
                summed = record[f"{stem}.{before}"] * block.residual + record[f"{stem}.{part}.output"]
                scales = scales * norm_scale(total, summed[prompt, : len(tokens)].double())
                gains = fold_norm(total, gains)
        norm = norms.attention.output
        heads = record[f"{attention_name('self', layer)}.heads"][prompt, :, : len(tokens)]
        divisors = scales * norm_scale(norm, module.w_o(heads.transpose(0, 1).flatten(1)).double())  # (T,)
        v = head_values(record, "self", layer, prompt)[:, : len(tokens)].double()
        # what reading key j adds to its own token's logit
        moved = torch.einsum("hsd,mhd,sm->hs", v, module.head_outputs().double(), fold_norm(norm, gains))
        weights = record.attention(layer=layer).part(batch=prompt)
        # A / divisor, averaged over queries: what each key receives, in one pass over the map's blocks
        pushed = (1 / divisors / len(tokens)).to(weights.dtype).expand(1, module.n_heads, 1, -1)
        pushed = torch.nn.functional.pad(pushed, (0, weights.shape[2] - len(tokens)))
        received = weights.push(pushed)[0, :, 0, : len(tokens)].double()
        scores.append((received * moved).sum(-1))
    return torch.stack(scores[::-1]).float().cpu()


@torch.no_grad()
def _inhibition(record: ActivationRecord, movers: list[tuple[int, int]]) -> Tensor:
    """How much more each head adds to the movers' last-query scores of single tokens than of repeated ones, (L, H)."""
    tokens = record.inputs.tensors[0][0].tolist()
    n_layers = len(attention_sites(record.model)["self"])
    n_heads = record.call(layer=0).q.shape[1]
    total = torch.full((n_layers, n_heads), math.nan)
    past = tokens[:-1]
    twice = torch.tensor([tokens.count(token) > 1 for token in past])
    for layer, head in movers:
        module = attention_sites(record.model)["self"][layer].owner
        if twice.all() or not twice.any() or not has_dot_scores(module):
            break
        names, scores = split_query(record, "self", layer, head, -1)  # (writers, S)
        shifts = scores[:, :-1][:, ~twice].mean(1) - scores[:, :-1][:, twice].mean(1)
        for name, shift in zip(names, shifts.tolist(), strict=True):
            if name.startswith("self."):
                at = tuple(int(number) for number in name.split(".")[1:])  # (layer, head) of the writer
                total[at] = torch.fmax(total[at], torch.tensor(shift))
    return total


@torch.no_grad()
def sink_scores(record: ActivationRecord, *, kind: str | None = None, prompt: int = 0) -> Tensor:
    """The mean weight that each key gets from the queries that may attend to it, (L, H, S); high for a sink (Gu et al.
    2024)."""
    kind = resolve_kind(record.model, kind)
    n_queries = record.inputs.lengths_in(kind)[prompt]
    scores = []
    for layer in range(len(attention_sites(record.model)[kind])):
        attention = record.attention(layer=layer, kind=kind).part(batch=prompt)
        real = (torch.arange(attention.shape[2]) < n_queries).to(attention.device, attention.dtype)
        sums = attention.push(real.expand(1, attention.shape[1], 1, -1))[0, :, 0].cpu()
        scores.append(sums / _n_readers(record.call(layer=layer, kind=kind), prompt, n_queries).clamp(min=1))
    return torch.stack(scores)


def _n_readers(call: AttentionCall, prompt: int, n_queries: int) -> Tensor:
    """For each key, how many of the first ``n_queries`` queries may attend to it, (H, S)."""
    n_batch, n_heads, n_keys = *call.q.shape[:2], call.k.shape[2]
    counts = torch.zeros(n_heads, n_keys)
    for rows in split_span(slice(0, n_queries), 1024):
        allowed, n_rows = call.allowed(rows), rows.stop - rows.start
        counts += n_rows if allowed is None else allowed.expand(n_batch, n_heads, n_rows, n_keys)[prompt].sum(1).cpu()
    return counts


class MassiveActivation(NamedTuple):
    """One element of the residual stream that is far larger than the others (Sun et al. 2024)."""

    site: str
    prompt: int
    position: int
    dimension: int
    value: float
    ratio: float  # |value| / median absolute value at the site


@torch.no_grad()
def massive_activations(
    record: ActivationRecord, *, least: float = 100.0, ratio: float = 1000.0, k: int = 20
) -> list[MassiveActivation]:
    """The k largest outputs of layers with an absolute value of at least ``least`` and ``ratio`` times the median."""
    massive = []
    for name in (name for name in record if name.endswith(".output") and name.count(".") == 3):
        x = record[name].float().abs()
        lengths = torch.tensor(record.inputs.lengths_in(name), device=x.device)
        real = torch.arange(int(lengths.max()), device=x.device) < lengths[:, None]  # (B, T): False at padding
        if record.positions is not None:
            real = real[:, as_span(record.positions, real.shape[1], "positions", x.device)]
        median = float(x[real].median())
        for prompt, position, dimension in ((x >= max(least, ratio * median)) & real[..., None]).nonzero().tolist():
            value = float(record[name][prompt, position, dimension])
            massive.append(MassiveActivation(name, prompt, position, dimension, value, abs(value) / max(median, 1e-30)))
    return sorted(massive, key=lambda each: -abs(each.value))[:k]
