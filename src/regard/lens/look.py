"""``look``: a model runs once on its fast path, and every attention weight of every layer and head can be read.

Only q and k are kept, O(T) numbers a layer. What is asked for (a tile, a row's largest weights, an overview) is
recomputed from them, exactly, when it is asked for; no matrix is ever stored.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..attention.attention_map import AttentionMap, Pick, as_span
from ..attention.frame import ALL, span_length
from ..attention.readings import flow_to, rollout
from ..generation import Generated, sampling
from ..models import Model
from ..models.translating import SourceToTarget
from .labels import Label, token_text
from .shown import Shown
from .taking import Generating, Taken, take
from .view import Looks, View

if TYPE_CHECKING:
    from PIL.Image import Image

    from .patterns import HeadPatterns

_MOST_AT_ONCE = 1 << 22  # weights held at a time by what goes over all of them


class Next(NamedTuple):
    """A token that may come next."""

    token: int
    text: str
    probability: float


def look(
    model: Model, what: Any, target: Any = None, *, generate: Generating | None = None, device: Any = None
) -> Look:
    """Look at one text or image through a model.

    what      text or token ids; for models that read images a file, a picture or pixels; for regions a tensor
    target    beside an encoder: the text (or ids) whose writing is looked at, word by word as it is given
    generate  how a target, or the continuation of a text, is written first: fields of a GenerateConfig, {"beam": 4};
              a model with an encoder and no target writes greedily
    device    where a path is loaded to; a model stays where it is
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
    if device is not None and torch.device(device).type != model.device.type:
        raise ValueError(f"device={device} is for loading; this model is on {model.device}: move it with model.to()")
    return Look(model, take(model, what, target, generate))


class Look(Shown):
    """One pass of a model, seen from inside. A layer or head counts from 0, from the end if negative.

    ``kind`` is "self", "cross" or "encoder"; None means the only one there is, or else "self". ``head`` None is the
    mean of all heads. A row of "cross" is named by the token that is written there, one of "self" by the one read.
    """

    def __init__(self, model: Model, taken: Taken) -> None:
        self.model, self._taken = model, taken
        self._maps: dict[tuple[str, int], AttentionMap] = {}

    def __repr__(self) -> str:
        kinds = ", ".join(
            f"{kind} {self.layers(kind)}×{self.heads(kind)} of {len(self.rows(kind))}×{len(self.cols(kind))}"
            for kind in self.kinds
        )
        return f"Look({kinds})"

    # ---- what was looked at

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention this model has."""
        return tuple(self._taken.places)

    @property
    def text(self) -> str | None:
        """What was read; None for images, and for tokens without a tokenizer."""
        return self._taken.text

    @property
    def target_text(self) -> str | None:
        """What was written, where there is an encoder."""
        return self._taken.target_text

    @property
    def image(self) -> Image | None:
        """The part of the picture that the model was shown; boxes of labels are shares of it."""
        return self._taken.image

    @property
    def generated(self) -> Generated | None:
        """The search that wrote the text, if one did: its hypotheses, and a beam's parents."""
        return self._taken.generated

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the model was called with: (tokens,), (pixels,) or (source, target)."""
        return self._taken.inputs

    def layers(self, kind: str | None = None) -> int:
        return len(self._taken.places[self._kind(kind)])

    def heads(self, kind: str | None = None) -> int:
        return self.map(kind, 0).shape[1]

    def rows(self, kind: str | None = None) -> list[Label]:
        """Who looks."""
        return self._taken.rows[self._kind(kind)]

    def cols(self, kind: str | None = None) -> list[Label]:
        """What is looked at."""
        return self._taken.cols[self._kind(kind)]

    def tokens(self, kind: str | None = None) -> list[int | None]:
        """The ids of the rows; None for a patch or a region."""
        return [label.token_id for label in self.rows(kind)]

    # ---- the weights

    def map(self, kind: str | None = None, layer: int = -1) -> AttentionMap:
        """The attention map (1, H, T, S) of one layer: tiles, rows, entropy and overviews of all its heads."""
        kind = self._kind(kind)
        layer = self._layer(kind, layer)
        if (kind, layer) not in self._maps:
            self._maps[kind, layer] = self._taken.seen.map(*self._taken.places[kind][layer])
        return self._maps[kind, layer]

    def weights(
        self, layer: int, head: int | None = None, rows: Pick = ALL, cols: Pick = ALL, kind: str | None = None
    ) -> Tensor:
        """The weights (R, C) of one head, exactly; a row sums to 1 over all columns."""
        found = self.map(kind, layer)
        if head is not None:
            return found.head(0, self._head(kind, head)).tile(rows, cols)[0, 0]
        _, n_heads, n_rows, n_cols = found.shape
        sizes = (
            span_length(as_span(rows, n_rows, "rows", found.device), n_rows),
            span_length(as_span(cols, n_cols, "cols", found.device), n_cols),
        )
        if n_heads * sizes[0] * sizes[1] <= _MOST_AT_ONCE:
            return found.tile(rows, cols)[0].mean(0)
        total = found.head(0, 0).tile(rows, cols)[0, 0]
        for h in range(1, n_heads):  # one head at a time: what is T × T is held twice, not H times
            total += found.head(0, h).tile(rows, cols)[0, 0]
        return total / n_heads

    def top(
        self,
        k: int = 3,
        layer: int = -1,
        head: int | None = None,
        rows: Pick = ALL,
        kind: str | None = None,
    ) -> list[Looks]:
        """For each row the k labels it looks at most, with their weights; fewer where fewer are seen."""
        return View.plain(self, self._kind(kind)).top(k, layer, head, rows)

    def entropy(self, kind: str | None = None, layer: int = -1) -> Tensor:
        """How spread out each row's attention is, in nats, (H, T)."""
        return self.map(kind, layer).entropy()[0]

    def distance(self, kind: str | None = None, layer: int = -1) -> Tensor:
        """How far each row looks on average, Σ_j A_ij |i - j|, (H, T): in tokens, or in patches across an image.

        A class token stands nowhere: it is at no distance.
        """
        kind, found = self._kind(kind), self.map(kind, layer)
        places = self._coordinates(kind).to(found.device, found.dtype)  # (T, 1 or 2)
        out = torch.zeros(found.shape[1:3], dtype=found.dtype, device=found.device)
        _, n_heads, n_rows, n_cols = found.shape
        size = max(1, _MOST_AT_ONCE // (n_heads * n_cols))
        for start in range(0, n_rows, size):
            here = slice(start, min(start + size, n_rows))
            far = torch.cdist(places[here], places).nan_to_num_(0.0)
            out[:, here] = (found.tile(here)[0] * far).sum(-1)
        return out

    def pooled(
        self,
        kind: str | None = None,
        layer: int = -1,
        head: int | None = None,
        h: int = 64,
        w: int = 64,
        reduce: str = "mean",
    ) -> Tensor:
        """An overview (h, w), or as many as there are rows or columns: each cell's mean, or ("max") its largest weight.

        Of the heads together, the mean of their overviews.
        """
        found = self.map(kind, layer)
        found = found if head is None else found.head(0, self._head(kind, head))
        size = min(_positive("h", h), found.shape[2]), min(_positive("w", w), found.shape[3])
        return found.pooled(*size, reduce)[0].mean(0)

    def rollout(self, kind: str | None = None, rows: Pick | None = None, residual: float = 0.5) -> Tensor:
        """How much of each input is in each output after all layers (Abnar & Zuidema 2020), (T, T); or some rows."""
        kind = self._kind(kind)
        if kind == "cross":
            raise ValueError("a rollout follows one text through its layers; kind='cross' leads to another")
        maps = [self.map(kind, layer) for layer in range(self.layers(kind))]
        return rollout(maps, residual)[0] if rows is None else flow_to(maps, rows, residual)[0]

    def merged(self, kind: str | None = None, *, words: bool = True, specials: bool = False) -> View:
        """The same weights with sub-words as words (rows averaged, columns summed), special tokens hidden or kept.

        Hidden columns leave the others, whose rows then sum to 1 again.
        """
        kind = self._kind(kind)
        return View(self, kind, words, specials)

    def words(self, kind: str | None = None) -> View:
        """The merged view of words, without special tokens."""
        return self.merged(kind)

    def patterns(self, kind: str | None = None) -> HeadPatterns:
        """What the heads of one kind do, as numbers (L, H): previous token, first token, delimiters, induction …"""
        from .patterns import patterns

        return patterns(self, kind)

    # ---- the states

    def hidden(self, position: int | None = None) -> Tensor:
        """The last states (T, M), of the decoder where there is one; or one position's, (M,)."""
        states = self._taken.states
        return states if position is None else states[self._position(position)]

    def next(
        self,
        position: int = -1,
        k: int = 10,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> list[Next]:
        """The likeliest tokens after one position (of a masked-token model: at it), best first."""
        head: Any = getattr(self.model, "head", None)
        if head is None:
            raise ValueError(f"this model has head={self.model.config.head!r}: it says no tokens")
        from ..generation import GenerateConfig

        drawing: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        config = GenerateConfig(**{name: value for name, value in drawing.items() if value is not None})
        with torch.no_grad():
            logits = head(self.hidden(position)[None, None], self._table)[0].float()
        texts = torch.empty(1, 0, dtype=torch.long, device=logits.device)
        scores = sampling.filtered(logits, texts, 0, config, None)
        best = scores.softmax(-1)[0].topk(min(_positive("k", k), scores.shape[-1]))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Next(index, self._say(index), chance) for index, chance in found if chance > 0]

    @property
    def _table(self) -> Tensor:
        model: Any = self.model
        return model.output_table if isinstance(model, SourceToTarget) else model.token.weight

    def _say(self, index: int) -> str:
        processor = self.model.processor
        target = None if processor is None else processor.target or processor.source
        return token_text(index, target, self.model.config)

    # ---- what is asked for, checked

    def _kind(self, kind: str | None) -> str:
        if kind is None:
            return self.kinds[0] if len(self.kinds) == 1 else "self"
        if kind not in self.kinds:
            raise ValueError(f"kind={kind!r}: this model has {' and '.join(map(repr, self.kinds))} attention")
        return kind

    def _layer(self, kind: str, layer: int) -> int:
        return _counted("layer", layer, len(self._taken.places[kind]), f"{kind} attention in")

    def _head(self, kind: str | None, head: int) -> int:
        return _counted("head", head, self.heads(kind), "")

    def _position(self, position: int) -> int:
        n = len(self._taken.states)
        if not -n <= position < n:
            raise ValueError(f"position={position}: there are {n:,} tokens, 0 … {n - 1:,}")
        return position % n

    @cached_property
    def _grid(self) -> bool:
        return any(label.box is not None for label in self.rows("encoder")) if "encoder" in self.kinds else False

    def _coordinates(self, kind: str) -> Tensor:
        """Where rows and columns stand, (T, 1), or (T, 2) in an image, NaN where nowhere."""
        labels = self.rows(kind)
        if len(labels) != len(self.cols(kind)) or kind == "cross":
            raise ValueError(
                f"kind={kind!r} looks from one row of things to another: there is no distance between them"
            )
        if kind != "encoder" or not self._grid or self.model.config.source != "image":
            return torch.arange(len(labels), dtype=torch.float32)[:, None]
        boxes = [label.box for label in labels]
        first = next(box for box in boxes if box is not None)
        nowhere = (float("nan"), float("nan"))
        width, height = first[2] - first[0], first[3] - first[1]
        return torch.tensor([nowhere if box is None else (box[0] / width, box[1] / height) for box in boxes])


def _counted(name: str, index: int, total: int, where: str) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must be a whole number, got {index!r}")
    if not -total <= index < total:
        there = f"{where} {total} {name}s".strip() if total != 1 else f"{where} 1 {name}".strip()
        raise ValueError(f"{name}={index}: this model has {there}, 0 … {total - 1}")
    return index % total


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    return value
