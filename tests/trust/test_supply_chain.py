"""What is installed is known by hash and listed, a wheel can be built again, and nothing is fetched at run time."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import release

from regard.cli import main
from training.runs import words_of, write_data

from .promises import IS_FULL, ROOT, Tally

# ---- hashes


@pytest.mark.promise(10, "pins with their hashes")
def test_every_pin_has_hashes(tally: Tally) -> None:
    locked = release.read_lock()
    for pin in release.pins().items():
        with tally.attempt(pin):
            hashes = locked.pop(pin)
            assert hashes, "no hash"
            assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in hashes)
    with tally.attempt("nothing else"):
        assert not locked


def test_hashes_are_those_of_the_version() -> None:
    page = "".join(
        f'<a href="https://x/{file}#sha256={digit * 64}" data-requires-python="&gt;=3.10">{file}</a>'
        for digit, file in (
            ("a", "Ruamel.yaml-1.2-cp311-cp311-linux_x86_64.whl"),
            ("b", "ruamel_yaml-1.2.tar.gz"),
            ("c", "ruamel_yaml-1.2.1.tar.gz"),
            ("d", "ruamel_yaml-1.2rc1-py3-none-any.whl"),
            ("e", "ruamel_yaml_clib-1.2.tar.gz"),
        )
    )
    assert release.hashes_on_index(page, "ruamel-yaml", "1.2") == ["a" * 64, "b" * 64]


@pytest.mark.promise(10, "packages that others built refused where their hash is another")
def test_pip_refuses_another_file(tmp_path: Path, tally: Tally) -> None:
    """A wheel that claims to be a pinned one; pip is asked as requirements.lock says."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "typing_inspection-0.4.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        info = "typing_inspection-0.4.5.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: typing-inspection\nVersion: 0.4.5\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    own = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for sha256, code in ((release.read_lock()["typing-inspection", "0.4.5"][0], 1), (own, 0)):
        listed = tmp_path / "listed.txt"
        listed.write_text(f"typing-inspection==0.4.5 --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "--isolated", "download", "--no-index", "--no-deps", "--require-hashes"]
        command += ["--find-links", str(wheels), "--dest", str(tmp_path / "out"), "-r", str(listed)]
        with tally.attempt(sha256):
            ran = subprocess.run(command, capture_output=True, text=True)
            assert ran.returncode == code, ran.stderr
            assert code == 0 or "HASHES" in ran.stderr


# ---- SBOM


@pytest.mark.promise(10, "packages of the SBOM with version, URL and hash")
def test_the_sbom_lists_what_is_needed(tally: Tally) -> None:
    document = release.sbom()
    assert document == release.sbom(), "the same installation gives the same document"
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", document["serialNumber"])
    known = {each["bom-ref"] for each in (*document["components"], document["metadata"]["component"])}
    names = {each["name"] for each in document["components"]}
    assert names >= {"torch", "numpy", "safetensors", "tokenizers", "pydantic", "fastapi", "transformers", "onnx"}
    for each in document["components"]:
        with tally.attempt(each["name"]):
            assert each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}"
            assert each["version"] == distribution(each["name"]).version.partition("+")[0]
            assert each["hashes"], "it is not in requirements.lock"
    for each in document["dependencies"]:
        with tally.attempt(each["ref"]):
            assert {each["ref"], *each["dependsOn"]} <= known


# ---- the wheel


@pytest.mark.promise(10, "wheels of the same sources, byte for byte the same")
def test_the_same_sources_give_the_same_wheel(tmp_path: Path, tally: Tally) -> None:
    """From trees written at other times, in another order, under another umask."""
    names = ["pyproject.toml", "README.md", "LICENSE", "src", "docs"]
    made = []
    for number, umask in enumerate((0o022, 0o077)):
        tree = tmp_path / f"tree {number}"
        tree.mkdir()
        before = os.umask(umask)
        try:
            for name in names if number == 0 else reversed(names):
                if (ROOT / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / name, tree / name, ignore=ignored, copy_function=shutil.copyfile)
                else:
                    shutil.copyfile(ROOT / name, tree / name)
            made.append(release.build_wheel(tree, tmp_path / f"out {number}").read_bytes())
        finally:
            os.umask(before)
    with tally.attempt("two trees"):
        assert made[0] == made[1]
    if IS_FULL:
        with tally.attempt("this tree"):
            assert release.build_wheel(ROOT, tmp_path / "out").read_bytes() == made[0]


# ---- no network


ASKED: list[str] | None = None  # what was asked of the network, while somebody listens


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    names = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
    if ASKED is not None and event in names:
        ASKED.append(f"{event} {arguments[-1]!r}")
        raise OSError(f"{event} is not allowed here")


@contextmanager
def no_network() -> Iterator[list[str]]:
    global ASKED
    if not hasattr(watch, "added"):
        sys.addaudithook(watch)  # it stays, and does nothing later
        watch.added = True  # type: ignore[attr-defined]
    ASKED = []
    try:
        yield ASKED
    finally:
        ASKED = None


@pytest.mark.promise(10, "commands without a network")
def test_nothing_is_fetched_at_run_time(tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_data("translate", tmp_path)
    words = words_of("translate", "pairs.tsv", "model=transformer-tiny", "train.steps=2", "train.out=run")
    little = ["--shapes", "1", "--no-compile", "--same-text", "0"]
    kinds = ["int8", "hf", "onnx", "ctranslate2"] if IS_FULL else ["int8"]
    commands = [
        ["train", "translate", *words],
        ["eval", "run", "--limit", "2"],
        ["translate", "run", "one two"],
        ["look", "run", "one two", "--out", "look.html"],
        *(["export", "run", kind, f"shipped-{kind}", *little] for kind in kinds),
        ["info", "shipped-int8"],
        ["translate", "shipped-int8", "one two"],
        ["cost", "gpt2"],
        ["doctor"],
    ]
    with no_network() as asked:
        for command in commands:
            with tally.attempt(" ".join(command)[:60]):
                assert main(command) == 0
                assert asked == []
        with pytest.raises(OSError, match="not allowed"):
            socket.create_connection(("127.0.0.1", 9), 1)
