"""``look``: run a model once on its fast path, then read any attention weight of any layer and head.

Only q and k are kept, O(T) numbers per layer. A tile, the largest weights of a row or an overview is recomputed from
them, exactly, on request; no T × T matrix is ever stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ..attention.attention_map import AttentionMap, Pick, as_span
from ..attention.frame import ALL, span_length
from ..attention.readings import flow_to, rollout
from ..foundation.checks import check_positive
from ..foundation.files import write_atomic
from ..generation import GenerateConfig, Generated, sampling
from ..generation.text_generation import check_can_classify, rank_classes
from ..models import Model, ModelOrPath, open_model
from ..models.experts import Experts, Routing
from . import render
from .capture import Capture, GenerateOptions, capture_look
from .capture_inputs import tokenizers
from .labels import Label, token_text
from .merged_view import WEIGHTS_AT_ONCE, Looks, MergedView
from .render import HeadOptions
from .render_html import HTML_LIMIT, page_html

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

    from .patterns import HeadPatterns


class Next(NamedTuple):
    """A predicted token (or class) and its probability."""

    token: int
    text: str
    probability: float


def look(
    model: ModelOrPath,
    what: Any,
    target: Any = None,
    *,
    generate: GenerateOptions | None = None,
    device: torch.device | str | None = None,
) -> Look:
    """Run a model over one text or image and keep the queries and keys of its attention.

    model     a model, or the path of one
    what      text or token ids; for models that read images a file, a PIL image or pixels; for regions a tensor
    target    encoder-decoder only: the text (or ids) that the decoder reads
    generate  a GenerateConfig or its fields, {"beam": 4}: first generate the target, or a continuation of the text;
              an encoder-decoder without a target generates greedily
    device    where to load a path; a model object stays on its device
    """
    model = open_model(model, device)
    model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
    if device is not None and torch.device(device).type != model.device.type:
        raise ValueError(f"device={device} is for loading; this model is on {model.device}: move it with model.to()")
    return Look(model, capture_look(model, what, target, generate))


class Look:
    """One forward pass of a model over one input. Its methods share three keyword arguments:

    layer  counts from 0, from the end if negative
    head   likewise; None is the mean of all heads
    kind   "self", "cross" or "encoder"; None is "self", or the first kind of a model without it

    A row of "cross" is labelled by the token it predicts, a row of "self" by the token it reads.
    """

    def __init__(self, model: Model, capture: Capture) -> None:
        self.model, self._capture = model, capture
        self._maps: dict[tuple[str, int], AttentionMap] = {}
        self.kinds: tuple[str, ...] = tuple(capture.sites)  # the model's kinds of attention
        self.inputs: tuple[Tensor, ...] = capture.inputs  # (tokens,), (pixels,) or (source, target)
        self.text: str | None = capture.text  # None for images, and for token ids without a tokenizer
        self.target_text: str | None = capture.target_text  # the decoder's text in an encoder-decoder
        self.image: Image | None = capture.image  # cropped to what the model sees; boxes of labels are fractions of it
        self.generated: Generated | None = capture.generated  # hypotheses and beams, if a text was generated

    def __repr__(self) -> str:
        parts = []
        for kind in self.kinds:
            n_rows, n_cols = len(self.rows(kind=kind)), len(self.cols(kind=kind))
            parts.append(f"{kind} {self.layers(kind=kind)}×{self.heads(kind=kind)} of {n_rows}×{n_cols}")
        return f"Look({', '.join(parts)})"

    # ---- rows and columns

    def layers(self, *, kind: str | None = None) -> int:
        return len(self._capture.sites[self._kind(kind)])

    def heads(self, *, kind: str | None = None) -> int:
        return self.map(layer=0, kind=kind).shape[1]

    def rows(self, *, kind: str | None = None) -> list[Label]:
        """Labels of the queries."""
        return self._capture.rows[self._kind(kind)]

    def cols(self, *, kind: str | None = None) -> list[Label]:
        """Labels of the keys."""
        return self._capture.cols[self._kind(kind)]

    def tokens(self, *, kind: str | None = None) -> list[int | None]:
        """Token ids of the queries; None for a patch or a region."""
        return [label.token_id for label in self.rows(kind=kind)]

    # ---- the weights

    def map(self, *, layer: int = -1, kind: str | None = None) -> AttentionMap:
        """The attention map (1, H, T, S) of one layer: tiles, rows, entropy and overviews of its heads on request."""
        kind = self._kind(kind)
        layer = self._layer(kind, layer)
        if (kind, layer) not in self._maps:
            name, call = self._capture.sites[kind][layer]
            self._maps[kind, layer] = self._capture.recorder.map(name, call)
        return self._maps[kind, layer]

    def weights(
        self, *, layer: int = -1, head: int | None = None, kind: str | None = None, rows: Pick = ALL, cols: Pick = ALL
    ) -> Tensor:
        """The exact weights (R, C) of one head; a row sums to 1 over all columns."""
        attention = self.map(layer=layer, kind=kind)
        if head is not None:
            return attention.head(0, self._head(kind, head)).tile(rows, cols)[0, 0]
        _, n_heads, n_rows, n_cols = attention.shape
        height = span_length(as_span(rows, n_rows, "rows", attention.device), n_rows)
        width = span_length(as_span(cols, n_cols, "cols", attention.device), n_cols)
        if n_heads * height * width <= WEIGHTS_AT_ONCE:
            return attention.tile(rows, cols)[0].mean(0)
        total = attention.head(0, 0).tile(rows, cols)[0, 0]
        for h in range(1, n_heads):  # head by head, to hold two T × T tensors instead of H
            total += attention.head(0, h).tile(rows, cols)[0, 0]
        return total / n_heads

    def combined_weights(
        self, *, layer: int = -1, head: int = 0, kind: str | None = None, rows: Pick = ALL, cols: Pick = ALL
    ) -> Tensor:
        """The weights (R, C) that are multiplied with a head's values.

        With mixer=differential, head h is the difference of the maps 2h and 2h + 1; otherwise this is ``weights``.
        """
        attention = self.map(layer=layer, kind=kind)
        head = check_index("head", head, attention.n_combined, "")
        n_maps = attention.shape[1] // attention.n_combined
        return attention.part(heads=range(head * n_maps, (head + 1) * n_maps)).combined(rows, cols)[0, 0]

    def top(
        self, k: int = 3, *, layer: int = -1, head: int | None = None, kind: str | None = None, rows: Pick = ALL
    ) -> list[Looks]:
        """For each row, the k keys of the largest weights; fewer if it attends to fewer."""
        return MergedView(self, self._kind(kind), plain=True).top(k, layer=layer, head=head, rows=rows)

    def entropy(self, *, layer: int = -1, kind: str | None = None) -> Tensor:
        """The entropy of each row's attention in nats, (H, T)."""
        return self.map(layer=layer, kind=kind).entropy()[0]

    def distance(self, *, layer: int = -1, kind: str | None = None) -> Tensor:
        """The mean attention distance of each row, Σ_j A_ij |i - j|, (H, T): in tokens, or in patches of an image.

        A class token has no position in the image; its distance is 0.
        """
        attention = self.map(layer=layer, kind=kind)
        coordinates = self._coordinates(self._kind(kind)).to(attention.device, attention.dtype)  # (T, 1 or 2)
        out = torch.zeros(attention.shape[1:3], dtype=attention.dtype, device=attention.device)
        _, n_heads, n_rows, n_cols = attention.shape
        size = max(1, WEIGHTS_AT_ONCE // (n_heads * n_cols))
        for start in range(0, n_rows, size):
            rows = slice(start, min(start + size, n_rows))
            distances = torch.cdist(coordinates[rows], coordinates).nan_to_num_(0.0)
            out[:, rows] = (attention.tile(rows)[0] * distances).sum(-1)
        return out

    def pooled(
        self,
        *,
        layer: int = -1,
        head: int | None = None,
        kind: str | None = None,
        h: int = 64,
        w: int = 64,
        reduce: str = "mean",
    ) -> Tensor:
        """An overview of at most (h, w) cells, each the mean of its weights or, with reduce="max", their maximum.

        head=None gives the mean of the heads' overviews.
        """
        attention = self.map(layer=layer, kind=kind)
        attention = attention if head is None else attention.head(0, self._head(kind, head))
        check_positive(h=h, w=w)
        return attention.pooled(min(h, attention.shape[2]), min(w, attention.shape[3]), reduce)[0].mean(0)

    def rollout(self, *, kind: str | None = None, rows: Pick | None = None, residual: float = 0.5) -> Tensor:
        """Attention rollout (Abnar & Zuidema 2020): the share of each input in each output after all layers, (T, T).

        rows  compute only these outputs, (R, T)
        """
        kind = self._kind(kind)
        if kind == "cross":
            raise ValueError("a rollout follows one text through its layers; kind='cross' attends to another text")
        maps = [self.map(layer=layer, kind=kind) for layer in range(self.layers(kind=kind))]
        return rollout(maps, residual)[0] if rows is None else flow_to(maps, rows, residual)[0]

    def merged(self, *, kind: str | None = None, words: bool = True, specials: bool = False) -> MergedView:
        """The same weights with sub-words joined to words (rows averaged, columns summed).

        With ``specials=False``, special tokens are hidden and the rows scaled up to their sums, which are 1 without
        sinks.
        """
        return MergedView(self, self._kind(kind), words, specials)

    def words(self, *, kind: str | None = None) -> MergedView:
        """``merged`` with its defaults: words, without special tokens."""
        return self.merged(kind=kind)

    def patterns(self, *, kind: str | None = None) -> HeadPatterns:
        """Pattern scores (L, H) of the heads of one kind: previous token, first token, delimiters, induction …"""
        from .patterns import patterns

        return patterns(self, kind=kind)

    def routing(self, *, layer: int = -1, kind: str | None = None) -> Routing:
        """How one layer routed its tokens: probabilities of all experts (T, E), the chosen experts and weights (T, k).

        kind  selects the stack: "encoder", or "self" for the decoder
        """
        kind = self._kind(kind)
        name, call = self._capture.sites[kind][self._layer(kind, layer)]
        place = f"{name.rpartition('.')[0]}.ff"
        experts = self.model.get_submodule(place)
        if not isinstance(experts, Experts):
            raise ValueError("this model has no experts: all tokens go through the same feed-forward network")
        return experts.choose(self._capture.recorder.tensors[f"{place}.router"][call][0])

    # ---- hidden states

    def hidden(self, position: int | None = None) -> Tensor:
        """The last hidden states (T, M), the decoder's if there is one; or that of one position, (M,)."""
        states = self._capture.states
        return states if position is None else states[self._position(position)]

    def next(
        self,
        position: int = -1,
        k: int = 10,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> list[Next]:
        """The likeliest tokens after one position (at it, for a masked language model), best first."""
        check_positive(k=k)
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        config = GenerateConfig(**{name: value for name, value in options.items() if value is not None})
        position = self._position(position)
        logits = self.logits(slice(position, position + 1))
        texts = torch.empty(1, 0, dtype=torch.long, device=logits.device)
        scores = sampling.filter_logits(logits, texts, 0, config, None)
        best = scores.softmax(-1)[0].topk(min(k, scores.shape[-1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Next(index, self.token_text(index), chance) for index, chance in pairs if chance > 0]

    def logits(self, positions: slice = ALL) -> Tensor:
        """Logits of the token after each position (at it, for a masked language model), (T, V)."""
        head: Any = getattr(self.model, "head", None)
        if head is None:
            raise ValueError(f"this model has head={self.model.config.head!r}: it does not predict tokens")
        with torch.no_grad():
            logits: Tensor = head(self.hidden()[None, positions], self.model.output_table)[0]
        return logits.float()

    def uncertainty(self, positions: slice = ALL) -> Tensor:
        """The entropy of the next-token distribution at each position in nats, (T,)."""
        return torch.special.entr(self.logits(positions).softmax(-1)).sum(-1)

    def classes(self) -> dict[str, float]:
        """The probability of each class of a classifier, likeliest first."""
        check_can_classify(self.model)
        classifier: Any = self.model.classifier
        with torch.no_grad():
            logits = classifier(self.hidden()[None]).float()
        return rank_classes(self.model, logits)[0].all

    def token_text(self, index: int) -> str:
        """The text of a token id of the output vocabulary."""
        return token_text(index, tokenizers(self.model)[1], self.model.config)

    # ---- on screen and in files

    def print(self, *, console: Console | None = None, **options: Unpack[HeadOptions]) -> None:
        """Print a heat map of the selected head (``HeadOptions``) in the terminal."""
        render.print_heatmap(render.select_head(self, **options), console)

    def heatmap(self, file: str | Path, *, title: str | None = None, **options: Unpack[HeadOptions]) -> Path:
        """Write a heat map as PNG, SVG or PDF, depending on the suffix; cells show their weights if these fit."""
        from .heatmap import draw_heatmap

        return draw_heatmap(render.select_head(self, **options), Path(file), title)

    def overlay(self, file: str | Path, *, title: str | None = None, **options: Unpack[HeadOptions]) -> Path:
        """Draw the weights over the image, one panel per row; as a PNG, SVG or PDF file."""
        from .heatmap import draw_overlay

        if options.get("kind") is None and "cross" in self.kinds:
            options["kind"] = "cross"
        options.setdefault("specials", not options.get("words"))
        return draw_overlay(render.select_head(self, **options), Path(file), title)

    def csv(self, file: str | Path, **options: Unpack[HeadOptions]) -> Path:
        """Write the weights as CSV, one line each: kind, layer, head, row, row_text, col, col_text, weight."""
        return render.write_csv(render.select_head(self, **options), Path(file))

    def html(
        self,
        file: str | Path,
        *,
        layer: int = -1,
        head: int | None = None,
        kind: str | None = None,
        view: str | None = None,
        language: str | None = None,
        theme: str | None = None,
        words: bool = False,
        specials: bool = True,
        limit: int = HTML_LIMIT,
    ) -> Path:
        """Write one self-contained page that needs no network; ``render_html.page_html`` explains the options."""
        options: dict[str, Any] = {"view": view, "language": language, "theme": theme, "limit": limit}
        page = page_html(self, layer=layer, head=head, kind=kind, words=words, specials=specials, **options)
        write_atomic(Path(file), page.encode())
        return Path(file)

    def _repr_html_(self) -> str:
        """The page, for a notebook."""
        return f'<iframe srcdoc="{escape(page_html(self))}" style="width:100%;height:680px;border:0"></iframe>'

    # ---- checks of arguments

    def _kind(self, kind: str | None) -> str:
        if kind is None:
            return "self" if "self" in self.kinds else self.kinds[0]
        if kind not in self.kinds:
            raise ValueError(f"kind={kind!r}: this model has {' and '.join(map(repr, self.kinds))} attention")
        return kind

    def _layer(self, kind: str, layer: int) -> int:
        return check_index("layer", layer, len(self._capture.sites[kind]), f"{kind} attention in")

    def _head(self, kind: str | None, head: int) -> int:
        return check_index("head", head, self.heads(kind=kind), "")

    def _position(self, position: int) -> int:
        n = len(self._capture.states)
        if not -n <= position < n:
            raise ValueError(f"position={position}: there are {n:,} tokens, 0 … {n - 1:,}")
        return position % n

    def _coordinates(self, kind: str) -> Tensor:
        """Positions of rows and columns: (T, 1), or (T, 2) in an image, where a class token is NaN."""
        labels = self.rows(kind=kind)
        if len(labels) != len(self.cols(kind=kind)) or kind == "cross":
            raise ValueError(f"kind={kind!r}: queries and keys are not the same tokens, so they have no distance")
        boxes = [label.box for label in labels]
        first = next((box for box in boxes if box is not None), None)
        if first is None or self.model.config.source != "image":
            return torch.arange(len(labels), dtype=torch.float32)[:, None]
        nowhere = (float("nan"), float("nan"))
        width, height = first[2] - first[0], first[3] - first[1]
        return torch.tensor([nowhere if box is None else (box[0] / width, box[1] / height) for box in boxes])


@torch.no_grad()
def token_logits(look: Look, n: int) -> Iterator[Tensor]:
    """Logits (≤ 64, V) of the first n positions, up to 64 positions at a time."""
    head: Any = look.model.head
    for states in look.hidden()[:n].split(64):
        yield head(states[None], look.model.output_table)[0]


def check_index(name: str, index: int, total: int, where: str) -> int:
    """Check the index of a layer or head and resolve a negative one, which counts from the end."""
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must be a whole number, got {index!r}")
    if not -total <= index < total:
        count = f"{where} {total} {name}{'' if total == 1 else 's'}".strip()
        raise ValueError(f"{name}={index}: this model has {count}, 0 … {total - 1}")
    return index % total
