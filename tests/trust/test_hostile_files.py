"""Files that others wrote with bad intent: nothing in them is run, and what they cost is bounded."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from regard.cli import main
from regard.config import DataConfig, ModelConfig
from regard.data.images import check_image, open_upright
from regard.data.sources import open_source
from regard.errors import BadData, BadModelFile
from regard.foundation.jsonio import parse_json
from regard.hub.hf_directory import open_safetensors
from regard.text.image_processor import ImageProcessor
from regard.training import run_directory

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


# ---- code that would run


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `gs` in front of the real one, and the file that it writes when it is started."""
    marker, tool = tmp_path / "gs-was-started", tmp_path / "bin" / "gs"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ntouch {marker}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    return marker


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
def test_eps_by_another_name_starts_no_ghostscript(
    ghostscript: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pictures" / "cat"
    folder.mkdir(parents=True)
    (folder / "x.png").write_bytes(EPS)
    Image.new("RGB", (8, 8)).save(folder / "y.png")
    assert "cannot identify" in str(check_image(folder / "x.png", 10**6, decode=True))
    with pytest.raises(BadData, match="cannot be decoded"):
        open_upright(folder / "x.png")
    assert main(["data", "describe", str(folder.parent)]) == 1
    assert "cannot be decoded" in capsys.readouterr().err
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
def test_every_image_format_is_read(kind: str, tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), "white").save(tmp_path / f"x.{kind}")
    assert open_upright(tmp_path / f"x.{kind}").size == (3, 2)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "someone@example.com")
    (folder / "a.txt").write_text("text")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *words], check=True)
    return folder


def test_the_state_of_a_repository(repository: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert run_directory._git() == {"commit": commit, "changed": False}
    (repository / ".git" / "info" / "exclude").write_text("*.log\n")
    (repository / "b.log").write_text("not counted")
    assert run_directory._git() == {"commit": commit, "changed": False}
    (repository / "a.txt").write_text("another text")
    assert run_directory._git() == {"commit": commit, "changed": True}


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
def test_a_repository_runs_nothing(repository: Path, tmp_path: Path) -> None:
    """fsmonitor, filters of .gitattributes and a submodule's own config: `git status` runs them all."""
    marker = tmp_path / "it-ran"
    sub = repository / "sub"
    shutil.copytree(repository, sub)
    (repository / ".gitattributes").write_text("* filter=evil\n")
    subprocess.run(["git", "add", "."], check=True, stderr=subprocess.DEVNULL)
    evil = f'[core]\n\tfsmonitor = "touch {marker}; false"\n[filter "evil"]\n\tclean = "touch {marker}; cat"\n'
    for folder in (repository, sub):
        with (folder / ".git" / "config").open("a") as config:
            config.write(evil)
        (folder / "a.txt").write_text("more")
    found = run_directory._git()
    assert found is not None
    assert found["changed"]
    assert not marker.exists()
    subprocess.run(["git", "status"], capture_output=True)
    assert marker.exists()  # the trap works


# ---- what a file costs


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
def test_an_image_of_one_long_column_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    Image.new("1", (1, 65_536)).save(tmp_path / "x.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("the picture was decoded"))
    assert check_image(tmp_path / "x.png", 10**8, decode=True) == "1 × 65536 pixels; a side has at most 65,535"
    with pytest.raises(BadData, match="a side has at most 65,535"):
        open_upright(tmp_path / "x.png")


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
def test_a_strip_is_not_resized_to_gigabytes() -> None:
    processor = ImageProcessor(size=224)
    assert processor(Image.new("RGB", (10, 30))).shape == (1, 3, 672, 224)
    with pytest.raises(ValueError, match="is too long to resize to a shorter side of 224"):
        processor(Image.new("RGB", (1, 60_000)))


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
def test_a_packed_document_may_not_unpack_to_a_thousand_times_its_size(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "captions.json.gz", "wb", compresslevel=9) as file:
        for _ in range(34):
            file.write(b" " * (1 << 20))
    with pytest.raises(BadData, match=r"holds more than \d+ MB of JSON; a \.jsonl file"):
        open_source(DataConfig(source=str(tmp_path / "captions.json.gz")))


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
def test_a_header_of_very_many_tensors(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for n, words in ((100_001, "has 100,001 tensors; regard reads at most"), (300_000, "has a header of 1")):
        header = json.dumps({f"{number:06}": entry for number in range(n)}, separators=(",", ":")).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        start = time.process_time()
        with pytest.raises(BadModelFile, match=words):
            open_safetensors(tmp_path / "model.safetensors")
        assert time.process_time() - start < 3


@pytest.mark.parametrize(
    "field", ["n_layers", "n_decoder_layers", "d_model", "n_heads", "vocab_size", "max_len", "image_size", "n_classes"]
)
def test_a_model_of_any_size_is_not_tried(field: str) -> None:
    sizes = {"vocab_size": 50, "d_model": 16, "n_heads": 2, "n_layers": 1}
    with pytest.raises(ValueError, match=f"{field}=10000000000000000000.* must be at most"):
        ModelConfig(**{**sizes, field: 10**30})


def test_the_cost_of_a_hundred_thousand_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "gpt2", "model.n_layers=100000"]) == 2
    assert "n_layers=100000 must be at most 1,000" in capsys.readouterr().err


# ---- what a file says


@pytest.mark.parametrize("number", ["9" * 400, "-" + "1" * 60, "1e400", "-1e999", "1" * 5000])
def test_a_number_that_no_computer_adds(number: str) -> None:
    with pytest.raises(BadModelFile, match="is not valid JSON"):
        parse_json(f'{{"size": {number}}}'.encode(), "x.json")


def test_infinity_is_read_in_no_file_but_config_json() -> None:
    with pytest.raises(BadModelFile, match="Infinity is not a number in JSON"):
        parse_json(b'{"lr": Infinity}', "x.json")


def test_a_missing_name_is_a_fault_of_the_file() -> None:
    document = parse_json(b'{"a": {"b": 1}}', "x.json")
    assert document["a"]["b"] == 1
    for read in (lambda: document["c"], lambda: document["a"]["c"]):
        with pytest.raises(BadModelFile, match="has no 'c'"):
            read()


def test_a_name_that_stands_twice_among_very_many() -> None:
    text = b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b',"7":1}'
    start = time.process_time()
    with pytest.raises(BadModelFile, match="it names '7' twice"):
        parse_json(text, "x.json")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "document",
    [
        {"images": [1, None], "annotations": [2, []]},
        {"images": [{"id": [1], "file_name": "a.png"}], "annotations": [{"image_id": {}, "caption": "x"}]},
        {"images": [{"id": 1, "file_name": ["a.png"]}], "annotations": [{"image_id": 1, "caption": "x"}]},
        {"images": [{"id": 1, "file_name": "a\0.png"}], "annotations": [{"image_id": 1, "caption": "x"}]},
        {"images": [{"id": 1, "file_name": "../x.png"}], "annotations": [{"image_id": 1, "caption": "x"}]},
        {"a\0.png": "a text"},
        {"a.png": [1, 2]},
        [1, "x", None],
    ],
)
def test_captions_that_are_none(document: Any, tmp_path: Path) -> None:
    (tmp_path / "captions.json").write_text(json.dumps(document))
    with pytest.raises(BadData):
        open_source(DataConfig(source=str(tmp_path / "captions.json")))


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 10**30},
        {"size": {"height": 0, "width": 5}},
        {"size": {"shortest_edge": 60_000}},
        {"size": "large"},
        {"size": [1]},
        {"image_mean": [1, 2, {}]},
        {"image_std": [0, 1, 1]},
        {"image_std": 5},
        {"resample": []},
        {"rescale_factor": None},
        {"rescale_factor": []},
        {"do_center_crop": True, "crop_size": [10**9, 10**9]},
        {"image_processor_type": ["CLIP"]},
    ],
)
def test_a_preprocessor_that_is_none(fields: dict[str, Any], tmp_path: Path, images: Path) -> None:
    from regard.io import load

    folder = tmp_path / "model"
    shutil.copytree(images, folder)
    (folder / "manifest.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(BadModelFile, match="preprocessor_config"):
        load(folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from generation.spoken import image_classifier

    return image_classifier().save(tmp_path_factory.mktemp("images") / "model")


# ---- exports


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    pytest.importorskip("ctranslate2")
    from export.translators import writer
    from regard.export.ctranslate2_export import export_ctranslate2

    model, folder = writer(), tmp_path_factory.mktemp("ct2") / "model"
    export_ctranslate2(model, folder)
    return model, folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.bin", b""),
        ("model.bin", b"\xff" * 200),
        ("vocabulary.json", b""),
        ("vocabulary.json", b"{}"),
        ("vocabulary.json", b"[]"),
        ("vocabulary.json", b"[1, 2]"),
        ("vocabulary.json", b'["a"]'),
        ("vocabulary.json", b"\xff"),
        ("config.json", b"[]"),
        ("config.json", b'{"bos_token": 5}'),
        ("config.json", b"\xff"),
    ],
)
def test_a_ctranslate2_directory_that_is_none(
    exported: tuple[Any, Path], name: str, content: bytes, tmp_path: Path
) -> None:
    from regard.export.engines import Ct2Engine

    model, folder = exported
    shutil.copytree(folder, copy := tmp_path / "model")
    Ct2Engine(copy, model.config, model.processor, threads=1)
    (copy / name).write_bytes(content)
    with pytest.raises(BadModelFile):
        Ct2Engine(copy, model.config, model.processor, threads=1)


@pytest.mark.parametrize("field", ["n_layers", "d_model", "max_len", "vocab_size"])
def test_a_description_of_a_model_that_nobody_can_build(field: str, tmp_path: Path) -> None:
    from regard.export.onnx_export import open_onnx

    config = {"architecture": "decoder", "vocab_size": 50, "d_model": 16, "n_heads": 2, "n_layers": 1}
    document = {"regard_onnx": 1, "maps": False, "config": {**config, field: 10**15}}
    (tmp_path / "onnx.json").write_text(json.dumps(document))
    with pytest.raises(BadModelFile, match="must be at most"):
        open_onnx(tmp_path)
