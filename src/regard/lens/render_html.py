"""One HTML file of a look: the explorer's own modules with the weights inside, for a reader without a server.

Its page and its modules are those of web/static, but for the names by which they link to each other: inside one file
modules are data: URLs under an import map. It holds all heads where they fit, else one head, else an overview of it.
"""

from __future__ import annotations

import base64
import io
import json
import math
import posixpath
import re
import zlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .merged_view import MergedView
from .patterns import patterns

if TYPE_CHECKING:
    from .labels import Label
    from .look import Look

HTML_LIMIT = 980_000  # bytes; what the server sends as one answer
_OVERVIEW = 200
_PREFIX = "regard/"
_IMPORT = re.compile(r'(\bfrom\s+|\bimport\s+)"(\.{1,2}/[^"]+)"')
_WITH_SERVER = {"views/index.js", "views/walk.js", "views/next.js", "views/beams.js", "views/variant.js"}


def page_html(
    look: Look,
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
) -> str:
    """The page as text, at most ``limit`` bytes.

    layer, head, kind  what it opens with, and all it holds where the weights of every head do not fit
    view               "heatmap", "sentence", "grid", "align" or "image"
    language, theme    "en" or "ko", "light" or "dark"; otherwise as the reader's browser has them
    words, specials    sub-words joined to words, special tokens hidden, as ``Look.merged`` does it
    """
    kind = kind if kind is not None else ("cross" if "cross" in look.kinds else look.kinds[0])
    look.weights(
        layer=layer, head=head, rows=slice(0, 1), cols=slice(0, 1), kind=kind
    )  # says what is wrong with a kind, a layer or a head
    layer, head = layer % look.layers(kind=kind), None if head is None else head % look.heads(kind=kind)
    views = {each: _view(look, each, words, specials) for each in look.kinds}
    content = _about(look, views)
    if words or not specials:
        content["reading"] = {"words": words, "specials": specials}
    opening = {"kind": kind, "layer": layer, "head": -1 if head is None else head}
    opening |= {name: value for name, value in {"view": view, "lang": language, "theme": theme}.items() if value}
    empty = _assembled(content, opening)
    room = (limit - len(empty.encode())) * 3 // 4  # base64 makes 4 bytes of 3
    content |= _weights(views, kind, layer, head, room)
    page = _assembled(content, opening)
    if len(page.encode()) > limit:
        raise ValueError(f"the page would have {len(page.encode()):,} bytes, more than limit={limit:,}")
    return page


# ---- what is inside


def _view(look: Look, kind: str, words: bool, specials: bool) -> MergedView:
    view = (
        look.merged(kind=kind, words=words, specials=specials)
        if words or not specials
        else MergedView.plain(look, kind)
    )
    if not view.rows or not view.cols:
        raise ValueError(f"specials=False leaves nothing of the {kind} attention: all its tokens are special")
    return view


def _about(look: Look, views: dict[str, MergedView]) -> dict[str, Any]:
    """Everything but the weights."""
    kinds = {
        kind: {
            "layers": look.layers(kind=kind),
            "heads": look.heads(kind=kind),
            "n_rows": len(x.rows),
            "n_cols": len(x.cols),
        }
        for kind, x in views.items()
    }
    about: dict[str, Any] = {"id": "0", "text": look.text, "target": look.target_text, "kinds": kinds}
    if look.image is not None:
        about["image"] = _picture(look)
    labels = {
        kind: {"rows": [_label(label) for label in x.rows], "cols": [_label(label) for label in x.cols]}
        for kind, x in views.items()
    }
    return {"model": {"id": "", "name": "", "kinds": kinds}, "look": about, "labels": labels}


def _label(label: Label) -> list[Any]:
    found: list[Any] = [label.text, int(label.special)]
    return found if label.box is None else [*found, [round(x, 5) for x in label.box]]


def _picture(look: Look) -> str:
    assert look.image is not None
    small = look.image.convert("RGB")
    small.thumbnail((640, 640))
    out = io.BytesIO()
    small.save(out, "JPEG" if small.width > 160 else "PNG", quality=88)  # what is drawn in few pixels stays sharp
    kind = "jpeg" if small.width > 160 else "png"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def _weights(views: dict[str, MergedView], kind: str, layer: int, head: int | None, room: int) -> dict[str, Any]:
    """All heads, one head, or an overview of it: the first that fits."""
    every = _all_heads(views, room - 60_000)  # patterns take a little of it
    if every is not None:
        return {
            "weights": every,
            "patterns": {each: patterns(x.look, kind=each).to_dict() for each, x in views.items()},
        }
    only = {"only": {"kind": kind, "layer": layer, "head": -1 if head is None else head}}
    view = views[kind]
    if 4 * len(view.rows) * len(view.cols) < 8 * room:  # else it is not worth the attempt: weights shrink little
        one = _packed(view.weights(layer=layer, head=head))
        if len(one["bytes"]) * 3 // 4 <= room:
            return only | {"weights": one}
    side = min(_OVERVIEW, math.isqrt(max(1, room // 4)))
    return only | {"overview": _packed(view.pooled(layer=layer, head=head, h=side, w=side))}


def _all_heads(views: dict[str, MergedView], room: int) -> dict[str, list[dict[str, Any]]] | None:
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in views}
    cells = {kind: x.look.heads(kind=kind) * len(x.rows) * len(x.cols) for kind, x in views.items()}
    if sum(4 * x.look.layers(kind=kind) * cells[kind] for kind, x in views.items()) > 8 * room:
        return None
    for kind, view in views.items():
        for layer in range(view.look.layers(kind=kind)):
            heads = range(view.look.heads(kind=kind))
            found[kind].append(_packed(torch.stack([view.weights(layer=layer, head=head) for head in heads])))
            room -= len(found[kind][-1]["bytes"]) * 3 // 4
            if room < 0:
                return None
    return found


def _packed(weights: Tensor) -> dict[str, Any]:
    """float32 as they are, deflated: what a mask hides costs nothing."""
    raw = np.ascontiguousarray(weights.detach().cpu().float().numpy(), dtype="<f4").tobytes()
    return {"bytes": base64.b64encode(zlib.compress(raw, 9)).decode(), "shape": list(weights.shape)}


# ---- the file


def _assembled(content: dict[str, Any], opening: dict[str, Any]) -> str:
    """The explorer's page with all that it links to inside."""
    static = files("regard").joinpath("web", "static")
    page, style = (static.joinpath(name).read_text(encoding="utf-8") for name in ("index.html", "style.css"))
    scripts = f"""<script type="importmap">{_json({"imports": dict(_modules(static))})}</script>
  <script type="application/json" id="look">{_json(content)}</script>
  <script type="application/json" id="opening">{_json(opening)}</script>
  <script type="module">import "{_PREFIX}main.js";</script>"""
    inside = {
        '<link rel="icon" href="static/icon.svg" type="image/svg+xml">': "",
        '<link rel="stylesheet" href="static/style.css">': f"<style>\n{style}</style>",
        '<script type="module" src="static/main.js"></script>': scripts,
    }
    for link, instead in inside.items():
        assert page.count(link) == 1, link
        page = page.replace(link, instead)
    return page


def _json(content: Any) -> str:
    """JSON that cannot end the script it stands in."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _modules(static: Traversable) -> Iterator[tuple[str, str]]:
    """Each module's name and its data: URL."""
    for name in sorted(_names(static, "")):
        if name in _WITH_SERVER:
            continue
        text = static.joinpath(*name.split("/")).read_text(encoding="utf-8")
        # The page's list of views has another name than the server's, and takes its place.
        target = "views/index.js" if name == "views/offline.js" else name
        encoded = base64.b64encode(_absolute(text, posixpath.dirname(name)).encode()).decode()
        yield _PREFIX + target, f"data:text/javascript;charset=utf-8;base64,{encoded}"


def _names(folder: Traversable, prefix: str) -> Iterator[str]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _names(each, f"{prefix}{each.name}/")
        elif each.name.endswith(".js"):
            yield prefix + each.name


def _absolute(text: str, folder: str) -> str:
    """A data: URL has no folder: "../dom.js" becomes "regard/dom.js"."""

    def named(found: re.Match[str]) -> str:
        return f'{found[1]}"{_PREFIX}{posixpath.normpath(posixpath.join(folder, found[2]))}"'

    return _IMPORT.sub(named, text)
