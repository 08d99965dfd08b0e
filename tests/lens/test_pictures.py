"""Pictures, tables and the terminal show the numbers that ``look.weights`` has, with labels that can be read."""

from __future__ import annotations

import csv
import io
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import regard
from generation.spoken import captioner, language_model, translator
from models.small import small
from regard.foundation import plotting
from regard.lens import Look, heatmap
from regard.lens.render import colour_of, select_head, weight_text


@pytest.fixture(scope="module")
def seen() -> Look:
    return regard.look(translator(), "the cat sat on the mat.", "고양이가 매트 위에 앉았다.")


@pytest.fixture(scope="module")
def caption() -> Look:
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:20, :30] = (200, 30, 30)
    return regard.look(captioner(), Image.fromarray(pixels), "the cat")


def drawn(look: Look, width: int = 100, colour: bool = False, **options: object) -> str:
    out = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(file=out, width=width, force_terminal=colour, color_system=system)  # type: ignore[arg-type]
    look.print(console=console, **options)  # type: ignore[arg-type]
    return out.getvalue()


# ---- terminal


def test_the_terminal_says_every_weight_that_fits(seen: Look) -> None:
    view = seen.words(kind="cross")
    lines = drawn(seen, kind="cross", layer=1, head=2, words=True, specials=False).splitlines()
    assert lines[0] == "cross attention, layer 2 of 2, head 3 of 4"
    body = [line for line in lines if re.search(r"[.\d]\d\d?\s*$", line)][: len(view.rows)]
    for label, line, row in zip(view.rows, body, view.weights(layer=1, head=2).tolist(), strict=True):
        assert line.strip().startswith(label.text)
        assert line.split()[1:] == [weight_text(value) for value in row]


def test_wide_letters_take_two_places(seen: Look) -> None:
    from rich.cells import cell_len

    lines = drawn(seen, kind="cross", words=True, specials=False).splitlines()
    body = [line for line in lines if line.strip().startswith(("고양이가", "매트", "앉았다", "."))]
    starts = {cell_len(line.split(".")[0]) for line in body[:3]}
    assert len(starts) == 1, "columns stand below each other"


def test_colours_are_those_of_the_weights(seen: Look) -> None:
    text = drawn(seen, colour=True, kind="self", layer=0, head=1)
    weights = seen.weights(layer=0, head=1, kind="self")
    top = float(weights.max())
    for value in (weights[3, 0], weights[5, 2]):
        red, green, blue = colour_of(float(value) / top)
        assert f"48;2;{red};{green};{blue}" in text
    assert colour_of(0) == (0x44, 0x01, 0x54)
    assert colour_of(1) == colour_of(7) == (0xFD, 0xE7, 0x25)


def test_a_long_text_becomes_an_overview_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    look = regard.look(small("gpt2", max_len=600), torch.randint(31, (500,)))
    lines = drawn(look, width=60, head=0).splitlines()
    assert max(len(line) for line in lines) <= 60
    assert len(lines) < 75
    assert "each block is the mean of several weights" in lines[-1]
    assert [line[:4] for line in lines[-66:-2:16]] == ["  0 ", "128 ", "256 ", "384 "]
    monkeypatch.setenv("REGARD_LANG", "ko")
    assert drawn(look, width=60, head=0).splitlines()[-1].strip() == "칸마다 가중치 여러 개의 평균입니다"


def test_one_token_alone_can_be_shown() -> None:
    look = regard.look(language_model(), "a")
    assert "1.0" in drawn(look)
    assert [x.text for x in look.rows()] == ["a"]


# ---- pictures


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_a_heat_map_file(seen: Look, tmp_path: Path, suffix: str) -> None:
    file = seen.heatmap(tmp_path / f"x.{suffix}", kind="cross", words=True, specials=False)
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    assert file.read_bytes().startswith(begins)
    again = seen.heatmap(tmp_path / f"y.{suffix}", kind="cross", words=True, specials=False)
    assert file.read_bytes() == again.read_bytes(), "the same picture every time"


def test_a_heat_map_draws_the_weights_and_writes_them_into_the_cells(seen: Look) -> None:
    sheet = select_head(seen, 1, 2, "cross", words=True, specials=False).sheet(1024, 1024)
    figure = heatmap._heatmap_figure(sheet, ["DejaVu Sans"], "title", "said")
    axes = figure.axes[0]
    drawn_values = np.asarray(axes.images[0].get_array())
    wanted = seen.words(kind="cross").weights(layer=1, head=2)
    np.testing.assert_allclose(drawn_values, wanted.numpy())
    said = [text.get_text() for text in axes.texts]
    assert said == [f"{x:.2f}"[1:] if x < 0.995 else "1" for x in wanted.flatten().tolist() if x > 0]
    assert [x.get_text() for x in axes.get_yticklabels()] == [x.text for x in seen.words(kind="cross").rows]


def test_hangul_has_glyphs_or_one_sentence_says_that_it_has_none(seen: Look, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seen.heatmap(tmp_path / "x.png", kind="cross")
    found, missing = plotting.fonts_for("고양이 cat")
    assert len(said) == bool(missing)
    assert found[0] == "DejaVu Sans"
    if not missing:
        letters = {x for name in found for x in plotting._characters(name)}
        assert set("고양이") <= letters


def test_letters_that_no_font_has_are_said_once(seen: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "_candidates", lambda: ())
    with pytest.warns(UserWarning, match="no installed font has .*drawn as boxes") as said:
        seen.heatmap(tmp_path / "x.png", kind="cross")
    assert len(said) == 1


def test_dollars_are_no_formula(tmp_path: Path) -> None:
    look = regard.look(language_model(), "pay $5 or $x_{")
    assert look.heatmap(tmp_path / "x.png").stat().st_size > 1000


def test_a_part_and_an_overview(seen: Look, tmp_path: Path) -> None:
    some = select_head(seen, 0, 0, "self", rows=slice(2, 6), cols=slice(0, 3))
    torch.testing.assert_close(
        some.sheet(99, 99).values, seen.weights(layer=0, head=0, rows=slice(2, 6), cols=slice(0, 3), kind="self")
    )
    small_sheet = some.sheet(2, 1)
    assert small_sheet.pooled
    wanted = (
        seen.weights(layer=0, head=0, rows=slice(2, 6), cols=slice(0, 3), kind="self")
        .view(2, 2, 3)
        .mean((1, 2))[:, None]
    )
    torch.testing.assert_close(small_sheet.values, wanted)
    assert [x.text for x in small_sheet.rows] == ["2", "4"]
    look = regard.look(small("gpt2", max_len=1500), torch.randint(31, (1200,)))
    assert look.heatmap(tmp_path / "long.png", layer=0, head=0).stat().st_size > 1000
    whole = select_head(look, 0, 0).sheet(100, 100)
    torch.testing.assert_close(whole.values, look.pooled(layer=0, head=0, h=100, w=100))
    same = select_head(look, 0, 0, rows=slice(0, 1200)).sheet(100, 100)
    torch.testing.assert_close(same.values, whole.values, atol=1e-6, rtol=1e-4)
    uneven = select_head(look, 0, 0, rows=slice(0, 7), cols=slice(0, 7)).sheet(7, 2)
    assert [label.text for label in uneven.cols] == ["0", "4"]
    last = select_head(look, 0, 0, rows=slice(-6, None), cols=slice(0, 7)).sheet(2, 7)
    assert [label.text for label in last.rows] == ["1,194", "1,197"]
    left, right = look.weights(layer=0, head=0, rows=slice(0, 7), cols=slice(0, 7)).split([4, 3], 1)
    torch.testing.assert_close(uneven.values, torch.stack([left.mean(1), right.mean(1)], 1))


def test_a_table_without_rows_has_a_header(seen: Look, tmp_path: Path) -> None:
    assert seen.csv(tmp_path / "x.csv", rows=slice(2, 2)).read_text().splitlines() == [
        "kind,layer,head,row,row_text,col,col_text,weight"
    ]


def test_an_overlay_for_each_word_and_for_the_patches(caption: Look, tmp_path: Path) -> None:
    for kind in (None, "encoder"):
        assert caption.overlay(tmp_path / "x.png", kind=kind).read_bytes().startswith(b"\x89PNG")
    assert caption.overlay(tmp_path / "x.png", kind="encoder", rows=slice(0, 1)).is_file()  # the class token alone
    assert caption.image is not None
    assert caption.image.size == (60, 40)
    with pytest.raises(ValueError, match="kind='self' does not attend to an image"):
        caption.overlay(tmp_path / "x.png", kind="self")


def test_a_picture_that_is_cropped_shows_the_part_that_was_read() -> None:
    model = captioner()
    from dataclasses import replace

    from regard.text.image_processor import ImageProcessor

    model.processor = replace(model.processor, image=ImageProcessor(16, crop=(16, 16)))
    look = regard.look(model, np.zeros((40, 60, 3), dtype=np.uint8), "the cat")
    assert look.image is not None
    assert look.image.size == (40, 40), "the middle of 60 × 40"


@pytest.mark.parametrize(
    ("name", "message"), [("x.jpg", "a picture ends in .png, .svg, .pdf"), ("x", "ends in 'nothing'")]
)
def test_other_files_are_refused(seen: Look, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seen.heatmap(tmp_path / name)


def test_steps_between_rows_are_refused(seen: Look, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        seen.heatmap(tmp_path / "x.png", rows=slice(0, 4, 2))


# ---- tables and pages


@pytest.mark.parametrize(("rows", "cols"), [(slice(None), slice(None)), (slice(1, 3), slice(-2, None))])
def test_a_table_gives_every_weight_back_exactly(seen: Look, tmp_path: Path, rows: slice, cols: slice) -> None:
    file = seen.csv(tmp_path / "x.csv", layer=1, head=None, kind="cross", rows=rows, cols=cols)
    with file.open(encoding="utf-8", newline="") as lines:
        found = list(csv.DictReader(lines))
    wanted = seen.weights(layer=1, head=None, rows=rows, cols=cols, kind="cross")
    assert len(found) == wanted.numel()
    assert found[0]["head"] == "mean"
    values = torch.tensor([float(line["weight"]) for line in found]).view_as(wanted)
    assert torch.equal(values, wanted)
    for line in found:
        assert line["row_text"] == seen.rows(kind="cross")[int(line["row"])].text
        assert line["col_text"] == seen.cols(kind="cross")[int(line["col"])].text


def test_a_page_and_a_notebook_s_view(seen: Look, tmp_path: Path) -> None:
    page = seen.html(tmp_path / "x.html", kind="cross").read_text(encoding="utf-8")
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert seen._repr_html_().startswith("<iframe srcdoc=")
