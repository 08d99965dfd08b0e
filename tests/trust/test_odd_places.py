"""Terminals that cannot show every letter, files that are replaced while they are written, memory that is not there."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from generation.spoken import language_model
from regard import cli
from regard.cli import main, terminal
from regard.lens import Look, look


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model().save(tmp_path_factory.mktemp("model") / "speaker")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["cost", "gpt2"], ["nothing"], ["look", "MODEL", "고양이 🐈"], ["info", "MODEL"]],
    ids=" ".join,
)
def test_a_terminal_that_lacks_letters(
    folder: Path, words: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors="strict") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    code = main([str(folder) if word == "MODEL" else word for word in words])
    assert code == (2 if words == ["nothing"] else 0)
    for stream in streams:
        stream.flush()
    assert sum(len(stream.buffer.getvalue()) for stream in streams) > 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_stays_json(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.allow_any_text()
    terminal.print_json(document := {"text": "é 고양이 🐈"})
    stream.flush()
    written: bytes = stream.buffer.getvalue()  # type: ignore[attr-defined]
    assert json.loads(written.decode(encoding)) == document


# ---- files of a look


@pytest.fixture(scope="module")
def seen() -> Look:
    return look(language_model(), "the cat sat")


@pytest.mark.parametrize("suffix", ["csv", "html", "png"])
def test_a_file_of_a_look_is_the_old_one_or_the_new(
    seen: Look, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"look.{suffix}"
    write = {"csv": seen.csv, "html": seen.html, "png": seen.heatmap}[suffix]
    write(file)
    before = file.read_bytes()
    assert len(before) > 100

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(file, layer=0)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


# ---- memory


def test_memory_that_is_not_there_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def run_out(*_: object, **__: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(cli, "app", run_out)
    assert main(["cost", "gpt2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("regard: ")
    assert "memory" in said
    assert said.count("\n") == 1
