"""A look as one HTML file: the explorer's page with the weights embedded, viewable without a server.

The page and its JavaScript modules are those of web/static, embedded as data: URLs in an import map. The file holds
all heads if they fit, otherwise one head, otherwise an overview of it.
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
from .render import select_head

if TYPE_CHECKING:
    from .labels import Label
    from .look import Look

HTML_LIMIT = 980_000  # bytes; the server's limit for a response
# The file makes no requests: its modules and pictures are data: URLs.
_POLICY = (
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' data:; """
    """style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">"""
)
_OVERVIEW_CELLS = 200  # per side
_PREFIX = "regard/"
_IMPORT = re.compile(r'(\bfrom\s+|\bimport\s+)"(\.{1,2}/[^"]+)"')
_SERVER_MODULES = {  # not embedded: they need a server
    "server_errors.js",
    "server_words.js",
    "terms.js",
    "views/index.js",
    "views/walk.js",
    "views/next.js",
    "views/beams.js",
    "views/variant.js",
    "views/contributions.js",
    "views/why.js",
    "views/patching.js",
    "views/story.js",
    "views/history.js",
    "story_map.js",
    "writers.js",
    "pair.js",
}


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
    """The page as text of at most ``limit`` bytes.

    layer, head, kind  shown first; the only ones in the file if the weights of all heads do not fit
    view               "heatmap", "sentence", "grid", "align" or "image"
    language, theme    "en" or "ko", "light" or "dark"; None follows the browser's settings
    words, specials    as in ``Look.merged``
    """
    kind = kind if kind is not None else ("cross" if "cross" in look.kinds else look.kinds[0])
    layer = look._layer(look._kind(kind), layer)
    head = None if head is None else look._head(kind, head)
    views = {each: select_head(look, kind=each, words=words, specials=specials).view for each in look.kinds}
    for each, merged in views.items():
        if not merged.rows or not merged.cols:
            raise ValueError(f"specials=False leaves nothing of the {each} attention: all tokens are special")
    content = _describe(look, views)
    if words or not specials:
        content["reading"] = {"words": words, "specials": specials}
    opening = {"kind": kind, "layer": layer, "head": -1 if head is None else head}
    opening |= {name: value for name, value in {"view": view, "lang": language, "theme": theme}.items() if value}
    empty = _assemble(content, opening)
    n_bytes = (limit - len(empty.encode())) * 3 // 4  # base64 turns 3 bytes into 4
    content |= _pack_views(views, kind, layer, head, n_bytes)
    page = _assemble(content, opening)
    if len(page.encode()) > limit:
        raise ValueError(f"the page would have {len(page.encode()):,} bytes, more than limit={limit:,}")
    return page


def _describe(look: Look, views: dict[str, MergedView]) -> dict[str, Any]:
    """The content of the page other than the weights."""
    kinds = {kind: view.facts for kind, view in views.items()}
    labels = {
        kind: {"rows": list(map(_label_list, view.rows)), "cols": list(map(_label_list, view.cols))}
        for kind, view in views.items()
    }
    about: dict[str, Any] = {"id": "0", "text": look.text, "target": look.target_text, "kinds": kinds}
    if look.image is not None:
        small = look.image.convert("RGB")
        small.thumbnail((640, 640))
        suffix = "jpeg" if small.width > 160 else "png"  # JPEG would blur a small image
        out = io.BytesIO()
        small.save(out, suffix.upper(), quality=88)
        about["image"] = f"data:image/{suffix};base64,{base64.b64encode(out.getvalue()).decode()}"
    if look.model.config.head == "classify" and (classes := look.classes()):
        about["classes"] = classes
    return {"model": {"id": "", "name": "", "kinds": kinds}, "look": about, "labels": labels}


def _label_list(label: Label) -> list[Any]:
    fields: list[Any] = [label.text, int(label.special)]
    return fields if label.box is None else [*fields, [round(x, 5) for x in label.box]]


def _pack_views(views: dict[str, MergedView], kind: str, layer: int, head: int | None, n_bytes: int) -> dict[str, Any]:
    """The first that fits into ``n_bytes`` of all heads, one head, or an overview of that head."""
    all_heads = _pack_all_heads(views, n_bytes - 60_000)  # reserves about the size of the patterns
    if all_heads is not None:
        scores = {each: patterns(view.look, kind=each).to_dict() for each, view in views.items()}
        return {"weights": all_heads, "patterns": scores}
    only = {"only": {"kind": kind, "layer": layer, "head": -1 if head is None else head}}
    view = views[kind]
    if 4 * len(view.rows) * len(view.cols) < 8 * n_bytes:  # compression saves less than a factor of 8
        weights = _pack(view.weights(layer=layer, head=head))
        if len(weights["bytes"]) * 3 // 4 <= n_bytes:
            return only | {"weights": weights}
    side = min(_OVERVIEW_CELLS, math.isqrt(max(1, n_bytes // 4)))
    return only | {"overview": _pack(view.pooled(layer=layer, head=head, h=side, w=side))}


def _pack_all_heads(views: dict[str, MergedView], n_bytes: int) -> dict[str, list[dict[str, Any]]] | None:
    sizes = [math.prod(view.sizes.values()) for view in views.values()]
    if 4 * sum(sizes) > 8 * n_bytes:
        return None
    layers: dict[str, list[dict[str, Any]]] = {kind: [] for kind in views}
    for kind, view in views.items():
        for layer in range(view.sizes["layers"]):
            heads = [view.weights(layer=layer, head=head) for head in range(view.sizes["heads"])]
            layers[kind].append(_pack(torch.stack(heads)))
            n_bytes -= len(layers[kind][-1]["bytes"]) * 3 // 4
            if n_bytes < 0:
                return None
    return layers


def _pack(weights: Tensor) -> dict[str, Any]:
    """float32, zlib-compressed and base64-encoded; the zeros of a mask compress to almost nothing."""
    raw = np.ascontiguousarray(weights.detach().cpu().float().numpy(), dtype="<f4").tobytes()
    return {"bytes": base64.b64encode(zlib.compress(raw, 9)).decode(), "shape": list(weights.shape)}


def _assemble(content: dict[str, Any], opening: dict[str, Any]) -> str:
    """The explorer's page with all linked files embedded."""
    static = files("regard").joinpath("web", "static")
    page, style = (static.joinpath(name).read_text(encoding="utf-8") for name in ("index.html", "style.css"))
    scripts = f"""<script type="importmap">{_script_json({"imports": _module_urls(static)})}</script>
  <script type="application/json" id="look">{_script_json(content)}</script>
  <script type="application/json" id="opening">{_script_json(opening)}</script>
  <script type="module">import "{_PREFIX}main.js";</script>"""
    replacements = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n  {_POLICY}',
        '<link rel="icon" href="static/icon.svg" type="image/svg+xml">': "",
        '<link rel="stylesheet" href="static/style.css">': f"<style>\n{style}</style>",
        '<script type="module" src="static/main.js"></script>': scripts,
    }
    for link, replacement in replacements.items():
        assert page.count(link) == 1, link
        page = page.replace(link, replacement)
    return page


def _script_json(content: Any) -> str:
    """JSON that cannot close the surrounding script element."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _module_urls(static: Traversable) -> dict[str, str]:
    """The data: URL of each module, by name.

    Relative imports are rewritten to full names, since a data: URL has no folder: "../dom.js" becomes "regard/dom.js".
    """
    urls = {}
    # page/ runs a model in the browser, watch/ is the training page: neither belongs to a look.
    names = {name for name in _module_names(static, "") if not name.startswith(("page/", "watch/"))}
    for name in sorted(names - _SERVER_MODULES):
        parts = _IMPORT.split(static.joinpath(*name.split("/")).read_text(encoding="utf-8"))
        for n in range(2, len(parts), 3):
            parts[n] = f'"{_PREFIX}{posixpath.normpath(posixpath.join(posixpath.dirname(name), parts[n]))}"'
        # views/offline.js lists the views that need no server; it replaces views/index.js.
        target = "views/index.js" if name == "views/offline.js" else name
        encoded = base64.b64encode("".join(parts).encode()).decode()
        urls[_PREFIX + target] = f"data:text/javascript;charset=utf-8;base64,{encoded}"
    return urls


def _module_names(folder: Traversable, prefix: str) -> Iterator[str]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _module_names(each, f"{prefix}{each.name}/")
        elif each.name.endswith(".js"):
            yield prefix + each.name
