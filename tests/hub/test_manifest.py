"""The manifest: nothing in a directory changes unseen, not one bit of any file, its own included."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.errors import BadModelFile
from regard.hub import Directory, Manifest
from regard.hub.manifest import Entry, file_names
from regard.io import load

from .helpers import copy, ours, speaks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, one in a folder, and their manifest."""
    root = tmp_path / "files"
    (root / "deep").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"first")
    (root / "deep" / "b.bin").write_bytes(bytes(range(256)))
    (root / "empty").write_bytes(b"")
    Manifest.of(root).write(root)
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ours(d_model=8, n_layers=1, d_ff=8).save(tmp_path_factory.mktemp("saved") / "model")


def test_it_lists_every_file_but_itself_with_size_and_checksum(folder: Path) -> None:
    manifest = Manifest.read(folder)
    assert manifest is not None
    assert manifest.files == {
        "a.txt": Entry(5, hashlib.sha256(b"first").hexdigest()),
        "deep/b.bin": Entry(256, hashlib.sha256(bytes(range(256))).hexdigest()),
        "empty": Entry(0, hashlib.sha256(b"").hexdigest()),
    }
    manifest.check(folder)
    assert Manifest.of(folder) == manifest


def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert Manifest.read(tmp_path) is None


def test_every_fault_is_named_at_once(folder: Path) -> None:
    manifest = Manifest.of(folder)
    (folder / "a.txt").write_bytes(b"First")
    (folder / "deep" / "b.bin").write_bytes(b"short")
    (folder / "empty").unlink()
    with pytest.raises(BadModelFile) as said:
        manifest.check(folder)
    assert "a.txt has another SHA-256" in str(said.value)
    assert "deep/b.bin has 5 bytes instead of 256" in str(said.value)
    assert "empty is missing" in str(said.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"files": {}}',
        '{"regard_manifest": 2, "files": {}}',
        '{"regard_manifest": 1, "files": []}',
        '{"regard_manifest": 1, "files": {"a.txt": {"size": 5}}}',
        '{"regard_manifest": 1, "files": {"a.txt": {"size": 5, "sha256": "abc"}}}',
        '{"regard_manifest": 1, "files": {"a.txt": {"size": "5", "sha256": "' + "0" * 64 + '"}}}',
        '{"regard_manifest": 1, "files": {}}',  # right, but not written as we write it
        "\ud800",
    ],
)
def test_what_is_not_a_manifest_of_ours_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BadModelFile, match=r"manifest\.json"):
        Manifest.read(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "deep/../../outside", "..\\outside", "C:\\outside"])
def test_a_manifest_does_not_reach_out_of_its_directory(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_bytes(b"x")
    Manifest({name: Entry(1, hashlib.sha256(b"x").hexdigest())}).write(folder)
    manifest = Manifest.read(folder)
    assert manifest is not None
    with pytest.raises(BadModelFile, match="leads out of the directory"):
        manifest.check(folder)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_refused(saved: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(file_names(saved))))
    path = saved / name
    before = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(before) - 1))
    flipped = bytearray(before)
    flipped[bit // 8] ^= 1 << (bit % 8)
    try:
        path.write_bytes(flipped)
        with pytest.raises(BadModelFile):
            load(saved)
    finally:
        path.write_bytes(before)


def test_a_flipped_bit_in_a_tensor_loads_where_nobody_vouches(saved: Path, tmp_path: Path) -> None:
    """Why there is a manifest: without one the same file is a model, only a wrong one, and says "unverified"."""
    folder = copy(saved, tmp_path / "copy")
    right = speaks(load(folder))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-2] ^= 0x40
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(BadModelFile, match=r"model\.safetensors has another SHA-256"):
        load(folder)
    wrong = load(folder, verify=False)
    assert wrong.provenance.verified == "unverified"
    assert not speaks(wrong).equal(right)
    (folder / "manifest.json").unlink()
    assert load(folder).provenance.verified == "unverified"


def test_a_file_that_is_not_listed_is_not_read(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path / "copy")
    (folder / "notes.txt").write_text("a stranger's file does no harm")
    assert load(folder).provenance.verified == "verified"
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BadModelFile, match=r"tokenizer\.json is not listed in manifest\.json"):
        load(folder)
    directory = Directory(folder)
    with pytest.raises(BadModelFile, match=r"notes\.txt is not listed"):
        directory.path("notes.txt")


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.foundation import files

    order: list[str] = []
    replace = files.os.replace

    def recording(source: Path, target: Path) -> None:
        order.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", recording)
    saved = ours(d_model=8, n_layers=1, d_ff=8).save(tmp_path / "model")
    assert order[-1] == "manifest.json"
    listed = json.loads((saved / "manifest.json").read_text())["files"]
    assert set(listed) == set(file_names(saved)) - {"manifest.json"}
