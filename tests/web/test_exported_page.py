"""An exported folder as visitors get it: the model runs in Chromium, without Python, and later without a network."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from web_page import host_folder, open_text, visit_page

import regard
from export.test_web_page import small_translator
from generation.spoken import language_model
from regard.export.web_certificate import certify_page

TEXTS = ("the cat sat on the mat", "a dog saw the cat")


@pytest.fixture(scope="module")
def translator() -> regard.Model:
    torch.manual_seed(0)  # one that writes something
    return small_translator()


@pytest.fixture(scope="module")
def folder(translator: regard.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return regard.export(translator, "web", tmp_path_factory.mktemp("exported") / "page", n_shapes=2)


def test_a_first_visit_and_one_without_a_network(browser: Any, translator: regard.Model, folder: Path) -> None:
    seen = visit_page(browser, folder, TEXTS)
    assert seen.texts == regard.translate(translator, list(TEXTS), beam=1)
    assert (seen.console_errors, seen.other_hosts) == ([], [])
    on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert 0.9 * on_disk < seen.sent < on_disk, "every file once; licences, certificate and manifest are not asked for"


def test_a_bar_shows_how_much_has_come(browser: Any, folder: Path) -> None:
    page = browser.new_page()
    with host_folder(folder) as (address, _):
        page.route("**/model/decoder.onnx.gz", lambda route: None)  # never answered
        open_text(page, address, TEXTS[0])
        page.wait_for_function("() => document.querySelector('.loading progress')?.value > 0.5")
        assert "It runs in this page" in page.inner_text(".loading")
        page.unroute_all(behavior="ignoreErrors")
        page.reload()
        page.wait_for_selector("nav button[aria-selected=true]")
        assert page.locator(".loading").count() == 0
    page.close()


def test_another_file_in_its_place_is_refused(browser: Any, folder: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(folder, tmp_path / "page")
    file = changed / "model" / "decoder.onnx.gz"
    content = bytearray(gzip.decompress(file.read_bytes()))
    content[-1] ^= 1
    file.write_bytes(gzip.compress(bytes(content)))
    page = browser.new_page()
    with host_folder(changed) as (address, _):
        open_text(page, address, TEXTS[0])
        page.wait_for_function("() => document.querySelector('.message')?.textContent")
        assert "model/decoder.onnx.gz is not the file that was exported" in page.inner_text(".message")
        assert page.locator(".loading").count() == 0
    page.close()


def test_rounded_weights_take_less_room(translator: regard.Model, folder: Path, tmp_path: Path) -> None:
    rounded = regard.export(translator, "web-int8", tmp_path / "page", n_shapes=2)
    about = [json.loads((path / "page.json").read_bytes()) for path in (rounded, folder)]
    assert [one["weights"] for one in about] == ["int8", "float32"]
    sizes = [sum(one["files"][name]["bytes"] for name in one["graphs"].values()) for one in about]
    assert sizes[0] < sizes[1]


def test_a_long_text(tmp_path: Path) -> None:
    """And one that never contains the token that the model would repeat."""
    model, text = language_model(max_len=512), "the cat sat on the mat. " * 18
    (usual,) = regard.generate(model, [text], max_new_tokens=1).tokens[0]
    model.config = model.config.with_(forbidden_ids=(usual,))
    folder = regard.export(model, "web", tmp_path / "page", n_shapes=1)
    certificate = certify_page(model, folder, inputs=[text])
    assert certificate["passes"], certificate["comparisons"]
    assert certificate["shapes"]["count"] == 1
