"""Odd places to work in: other locales, homes, paths, newlines, umasks and users; files that are replaced while they
are written; memory that is not there."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from generation.spoken import language_model
from regard import cli
from regard.cli import main, terminal
from regard.data import token_files
from regard.foundation.jsonio import parse_json, to_json
from regard.lens import Look, look
from training.runs import words_of, write_data

from .promises import IS_FULL, ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model().save(tmp_path_factory.mktemp("model") / "speaker")


@pytest.mark.promise(9, "terminals that lack letters")
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


@pytest.mark.promise(4, "files of a look where the disk is full: the old one stays")
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

    monkeypatch.setattr(cli, "build_commands", lambda language: run_out)
    assert main(["cost", "gpt2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("regard: ")
    assert "memory" in said
    assert said.count("\n") == 1


# ---- a run from its data to what is shipped, somewhere else


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """A folder with data, and how a command is started there: its environment, umask, user and home."""
    folder = tmp_path / "place"
    folder.mkdir(mode=0o777)
    write_data("classify", folder)
    variables = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
    environment = {name: os.environ[name] for name in variables if name in os.environ}
    home = folder / "home"
    home.mkdir()
    environment |= {"PYTHONPATH": str(ROOT / "src"), "HOME": str(home), "OMP_NUM_THREADS": "1", "REGARD_LANG": "en"}
    return {"folder": folder, "environment": environment, "umask": 0o022, "user": None}


def c_locale(place: dict[str, Any]) -> None:
    place["environment"] |= {"LC_ALL": "C", "LANG": "C"}


def no_home(place: dict[str, Any]) -> None:
    place["environment"].pop("HOME")


def read_only_home(place: dict[str, Any]) -> None:
    """Root may write anywhere, so for root it is one that nobody can write to."""
    if os.getuid() == 0:
        place["environment"]["HOME"] = "/proc"
    else:
        Path(place["environment"]["HOME"]).chmod(0o555)


def spaces_and_korean(place: dict[str, Any]) -> None:
    place["folder"] = place["folder"].rename(place["folder"].with_name("내 문서 (2) 100% é 'a' #1"))


def windows_newlines(place: dict[str, Any]) -> None:
    file = place["folder"] / "labels.tsv"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))


def strict_umask(place: dict[str, Any]) -> None:
    place["umask"] = 0o027


def loose_umask(place: dict[str, Any]) -> None:
    place["umask"] = 0o000


def another_user(place: dict[str, Any]) -> None:
    """One whom no list of users knows; he may read everything, since this Python may stand in somebody's home."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, with setpriv")
    place["user"] = 12345
    for path in (place["folder"], *place["folder"].rglob("*")):
        os.chown(path, 12345, 12345)


def everything(place: dict[str, Any]) -> None:
    for change in (c_locale, windows_newlines, strict_umask, spaces_and_korean, read_only_home):
        change(place)
    if os.getuid() == 0 and shutil.which("setpriv"):
        another_user(place)
        no_home(place)


PLACES = [
    c_locale,
    no_home,
    read_only_home,
    spaces_and_korean,
    windows_newlines,
    strict_umask,
    loose_umask,
    another_user,
]
PROGRAM = """
import json, os, sys
from regard.cli import main
for words in json.loads(sys.argv[1]):
    code = main([os.fsdecode(word.encode()) for word in words])  # as a shell would give them
    if code != 0:
        sys.exit(f"regard {' '.join(words)}: {code}")
"""


@pytest.mark.promise(9, "train, evaluate, predict, look and export in odd places")
@pytest.mark.parametrize("change", [everything, *(PLACES if IS_FULL else [])], ids=lambda change: change.__name__)
def test_a_run_in_an_odd_place(place: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
    change(place)
    training = words_of(
        "classify", "labels.tsv", "train.steps=2", "train.out=run", "model.max_len=32", "data.max_len=32"
    )
    commands = [
        ["train", "classify", *training],
        ["eval", "run", "--limit", "2", "--out", "보고서"],
        ["classify", "run", "one two 고양이"],
        ["look", "run", "one two 고양이", "--out", "look.html"],
        ["export", "run", "int8", "shipped", "--shapes", "1", "--no-compile", "--same-text", "0"],
        ["info", "shipped"],
        ["doctor"],
    ]
    command = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    if (user := place["user"]) is not None:
        capability = "+dac_read_search"
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command = [*become, f"--inh-caps={capability}", f"--ambient-caps={capability}", *command]
    options = {"cwd": place["folder"], "env": place["environment"], "umask": place["umask"]}
    ran = subprocess.run(command, capture_output=True, **options)
    assert ran.returncode == 0, ran.stderr.decode("utf-8", "replace")[-2000:]
    assert b"Traceback" not in ran.stderr
    files = [
        path for name in ("run", "shipped", "보고서") for path in (place["folder"] / name).rglob("*") if path.is_file()
    ]
    assert len(files) > 15
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~place["umask"], path
    labels = json.loads((place["folder"] / "run" / "labels.json").read_text(encoding="utf-8"))
    assert labels["labels"] == ["even", "odd"]


@pytest.mark.promise(9, "large data where the cache cannot be written")
def test_large_data_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    nowhere, made = Path(os.devnull) / "regard", [[3, 4], [5]]

    def tokens(older: Path | None) -> token_files.TokenFile:
        return token_files.cached_tokens(nowhere, "s", "t", 9, lambda: token_files.whole_documents(made), older)

    assert [tokens(tmp_path).document(n) for n in range(2)] == made
    with pytest.raises(OSError, match="Not a directory"):
        tokens(None)


@pytest.mark.promise(9, "a path that is not UTF-8 in the records of a run")
def test_a_path_that_no_locale_can_read_is_recorded() -> None:
    document = {"data": os.fsdecode(b"/home/caf\xe9/pairs.tsv")}
    assert parse_json(to_json(document), "provenance.json") == document
