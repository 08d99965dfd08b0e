"""The explorer's back end in the page: each of its answers is the server's, for the same model and text."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from generation.spoken import classifier, language_model, translator
from regard.models import Model
from regard.web.served_models import ServedModel

from .browsing import Tab, serving
from .conftest import TEXT
from .page_models import STAND_IN, TorchPasses, model_module

CLOSE = 1e-5
# Both back ends are asked the same; what is compared are plain values.
ASK = f"""async ([page, request, calls]) => {{
  {STAND_IN}
  const {{ Server }} = await import("/static/api.js");
  const plain = (x) => x?.values ? {{ shape: x.shape, values: Array.from(x.values) }} : x;
  const answers = async (source) => {{
    await source.models();
    const look = await source.look(request), out = {{ look: {{ ...look, id: "", image: Boolean(look.image) }} }};
    for (const [name, reading, ...args] of calls) {{
      const from = Object.keys(reading).length ? await source.read(look, reading) : look;
      const stands = {{ LOOK: look, END: from.kinds[args[0]]?.[`n_${{args[1]}}`] }};
      const own = args.map((each) => stands[each] ?? each);
      out[JSON.stringify([name, reading, ...args])] = plain(await source[name](from, ...own));
    }}
    return out;
  }};
  return [await answers(new Server()), await answers(inPage(page))];
}}"""


@pytest.fixture(scope="module")
def explored(models: dict[str, Model]) -> dict[str, TorchPasses]:
    others = {
        "letters": translator(joint=False),
        "grouped": language_model(preset="gpt2", positions="alibi", n_kv_heads=2, window=5, attention_sinks=True),
        "relative": translator("t5-small"),
        "critic": classifier(),
    }
    every = {**{name: models[name] for name in ("en-ko", "shapes", "images")}, **others}
    return {name: TorchPasses(ServedModel(name, name, model)) for name, model in every.items()}


@pytest.fixture(scope="module")
def home(explored: dict[str, TorchPasses]) -> Iterator[str]:
    with serving([passes.served for passes in explored.values()]) as address:
        yield address


@pytest.fixture(scope="module")
def listening(page: Any, explored: dict[str, TorchPasses]) -> Any:
    """The page, which can ask torch for passes."""
    page.expose_function("torch_pass", lambda name, request: explored[name].trace(request))
    page.expose_function("torch_layers", lambda name, key, position: explored[name].layers(key, position))
    return page


def same(a: Any, b: Any, where: str) -> None:
    """Equal texts and lists; numbers within ``CLOSE``."""
    if isinstance(a, dict):
        assert set(a) == set(b), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{n}]")
    elif isinstance(a, float) or isinstance(b, float):
        assert b == pytest.approx(a, abs=CLOSE * max(1, abs(a))), f"{where}: {a} and {b}"
    else:
        assert a == b, where


def picture() -> str:
    out = io.BytesIO()
    Image.radial_gradient("L").resize((24, 20)).convert("RGB").save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def calls_for(passes: TorchPasses, kinds: tuple[str, ...], is_written: bool) -> list[list[Any]]:
    """Every question of the views, of one layer and some heads."""
    model, plain = passes.model, {"words": False, "specials": True}
    layered: list[list[Any]] = []
    for kind in kinds:
        here = [kind, 1]
        layered += [["walk", {}, *here, 2, 2, 1], ["story", {}, *here, 1, 2], ["patterns", {}, kind]]
        for reading in ({}, {**plain, "words": True}, {**plain, "specials": False}):
            layered += [["labels", reading, kind, axis, 0, "END"] for axis in ("rows", "cols")]
            layered += [["tile", reading, *here, head, 0, 2, 0, 2] for head in (-1, 3)]
            layered += [["pooled", reading, *here, -1, 3, 2, reduce] for reduce in ("mean", "max")]
            layered += [["thumbnails", reading, *here, 3], ["top", reading, *here, 0, 1, 3]]
    if model.config.head == "lm":
        layered += [["fit", {}], ["changes", {}, "LOOK"], ["logitLens", {}, 1], ["next", {}, {"position": 1, "k": 5}]]
        layered.append(["next", {}, {"position": 0, "k": 9, "temperature": 0.7, "top_k": 8, "top_p": 0.8}])
    return [*layered, ["heads", {}], *([["beams", {}]] if is_written else [])]


@pytest.mark.parametrize(
    ("name", "request_body", "kinds"),
    [
        ("en-ko", {"text": TEXT, "generate": {"beam": 3}}, ("encoder", "self", "cross")),
        ("letters", {"text": "a cat, 고양이 ran", "target": "고양이가 앉았다"}, ("encoder", "self", "cross")),
        ("grouped", {"text": "the cat sat on the 매트, the cat sat"}, ("self",)),
        ("relative", {"text": "the dog ran", "target": "고양이 cat"}, ("encoder", "self", "cross")),
        ("critic", {"text": "a dog ran, too"}, ("encoder",)),
        ("images", {"image": picture()}, ("encoder",)),
        ("shapes", {"image": picture(), "generate": {"beam": 1}}, ("encoder", "self", "cross")),
    ],
)
def test_every_answer_is_the_servers(
    tab: Tab,
    listening: Any,
    explored: dict[str, TorchPasses],
    name: str,
    request_body: dict[str, Any],
    kinds: tuple[str, ...],
) -> None:
    passes, written = explored[name], request_body.get("generate", {}).get("beam", 1) > 1
    tab.page.goto(tab.home)
    tab.settled()
    request = {"model": name, **request_body}
    served, in_page = tab.page.evaluate(ASK, [passes.page(), request, calls_for(passes, kinds, written)])
    for key, value in served.items():
        same(value, in_page[key], key)


def test_changed_attention_is_the_servers(tab: Tab, listening: Any, explored: dict[str, TorchPasses]) -> None:
    variant = {"causal": False, "scale": 2.0, "off": [["self", 0, 1], ["self", 1, 3]]}
    request = {"model": "grouped", "text": "the cat sat on", "variant": variant}
    calls = [["tile", {}, "self", 1, -1, 0, 4, 0, 4], ["walk", {}, "self", 0, 2, 0, 3], ["story", {}, "self", 1, 3, 2]]
    tab.page.goto(tab.home)
    tab.settled()
    served, in_page = tab.page.evaluate(ASK, [explored["grouped"].page(), request, [*calls, ["fit", {}]]])
    for key, value in served.items():
        same(value, in_page[key], key)
    tile = served['["tile",{},"self",1,-1,0,4,0,4]']["values"]
    assert tile[3] > 0  # the first token sees a later one


SENTENCES = ("contributions", "why", "patching", "history")  # views that a page explains instead of showing


@pytest.fixture
def in_page(tab: Tab, listening: Any, explored: dict[str, TorchPasses]) -> Iterator[Callable[[str], Tab]]:
    """The explorer as an exported page has it, of one model; whoever asks the server for more than files is noted."""
    asked: list[str] = []
    index = files("regard").joinpath("web", "static", "index.html").read_text(encoding="utf-8")
    marked = index.replace('<meta charset="utf-8">', '<meta charset="utf-8"><meta name="regard" content="page">')

    def open_page(name: str) -> Tab:
        module = model_module(explored[name].page())
        tab.page.route(f"{tab.home}/", lambda route: route.fulfill(body=marked, content_type="text/html"))
        tab.page.route("**/page/model.js", lambda route: route.fulfill(body=module, content_type="text/javascript"))
        return tab

    tab.page.on("request", lambda request: asked.append(request.url))
    yield open_page
    tab.page.unroute_all()
    assert [url for url in asked if not url.startswith((f"{tab.home}/static/", f"{tab.home}/#", "data:", "blob:"))] == [
        url for url in asked if url == f"{tab.home}/"
    ]


def walk_views(tab: Tab) -> list[str]:
    """Each view in turn: it draws, or says in a sentence why it cannot."""
    views = tab.tabs()
    for view in views:
        tab.to(view)
        assert tab.page.inner_text(".message") == "", view
        if view in SENTENCES:
            assert "regard serve" in tab.page.inner_text(".stage .unavailable")
        else:
            assert tab.box()["width"] > 100, view
    return views


@pytest.mark.parametrize(
    ("viewport", "theme"), [({"width": 1440, "height": 900}, "light"), ({"width": 390, "height": 844}, "dark")]
)
def test_a_translator_in_the_page(in_page: Any, viewport: dict[str, int], theme: str) -> None:
    tab = in_page("en-ko")
    tab.page.set_viewport_size(viewport)
    tab.open(text=TEXT, theme=theme, beam=2)
    for _ in tab.languages():
        assert walk_views(tab) == [
            "story", "align", "sentence", "heatmap", "grid", "walk", "next", "contributions", "why", "patching",
            "patterns", "beams", "variant",
        ]  # fmt: skip
    overflow = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert tab.page.evaluate(overflow) <= 0


def test_heads_switched_off_in_the_page(in_page: Any) -> None:
    """All cross heads off: the sentence is written again, and the page says what happened."""
    tab = in_page("en-ko")
    tab.open(text=TEXT, view="variant")
    for button in ("cross.0.0 cross.0.1 cross.0.2 cross.0.3", "cross.1.0 cross.1.1 cross.1.2 cross.1.3"):
        tab.page.click(f'[data-heads="{button}"]')
        tab.settled()
    before, after = (tab.page.inner_text(f'[data-side="{side}"] .new') for side in ("before", "after"))
    assert before != after
    assert tab.page.inner_text(".happened") != ""
    tab.page.click('[data-do="reset"]')
    tab.settled()
    tab.page.click('[data-do="find"]')
    tab.page.wait_for_selector('[data-do="worst"]')


@pytest.mark.parametrize("name", ["critic", "grouped"])
def test_other_models_in_the_page(in_page: Any, name: str) -> None:
    tab = in_page(name)
    tab.open(text="the cat sat on the mat.")
    views = walk_views(tab)
    assert {"story", "sentence", "heatmap", "grid", "walk", "patterns", "variant"} <= set(views)


def test_images_in_the_page(in_page: Any, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(base64.b64decode(picture()))
    for name in ("images", "shapes"):
        tab = in_page(name)
        tab.show(file)
        assert {"story", "image", "heatmap"} <= set(walk_views(tab))
