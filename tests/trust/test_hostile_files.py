"""Files that others wrote with bad intent: nothing in them is run, and what they cost is bounded."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from regard.cli import main
from regard.data.images import check_image, pixels_of
from regard.errors import BadData
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


def test_eps_by_another_name_starts_no_ghostscript(
    ghostscript: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pictures" / "cat"
    folder.mkdir(parents=True)
    (folder / "x.png").write_bytes(EPS)
    Image.new("RGB", (8, 8)).save(folder / "y.png")
    assert "cannot identify" in str(check_image(folder / "x.png", 10**6, decode=True))
    with pytest.raises(BadData, match="cannot be decoded"):
        pixels_of(folder / "x.png")
    assert main(["data", "describe", str(folder.parent)]) == 1
    assert "cannot be decoded" in capsys.readouterr().err
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
def test_every_image_format_is_read(kind: str, tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), "white").save(tmp_path / f"x.{kind}")
    assert pixels_of(tmp_path / f"x.{kind}").shape == (2, 3, 3)


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


def test_an_image_of_one_long_column_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    Image.new("1", (1, 65_536)).save(tmp_path / "x.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("the picture was decoded"))
    assert check_image(tmp_path / "x.png", 10**8, decode=True) == "1 × 65536 pixels; a side has at most 65,535"
    with pytest.raises(BadData, match="a side has at most 65,535"):
        pixels_of(tmp_path / "x.png")


def test_a_strip_is_not_resized_to_gigabytes() -> None:
    processor = ImageProcessor(size=224)
    assert processor(Image.new("RGB", (10, 30))).shape == (1, 3, 672, 224)
    with pytest.raises(ValueError, match="too long a strip for a shorter side of 224"):
        processor(Image.new("RGB", (1, 60_000)))
