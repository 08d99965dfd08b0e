"""A run's own files: a flipped bit, a file that is missing or a link that leads out is refused with exit code 3."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

import regard
from regard import cli
from regard.errors import BadModelFile
from regard.training.run_directory import RunDirectory
from training.runs import resume, train, write_data

N_FLIPS = 600 if os.environ.get("REGARD_TRUST") else 60
FILES = (
    "run.json",
    "tokenizer.source.json",
    "tokenizer.target.json",
    "provenance.json",
    "choice.json",
    "manifest.json",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust")
    words = ("train.steps=2", "train.save_every=1", "data.joint_vocab=false")
    train("translate", folder / "run", write_data("translate", folder), *words)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_every_flipped_bit_of_a_runs_files_is_refused(run: Path) -> None:
    chosen, loaded = random.Random(0), []
    for number in range(N_FLIPS):
        path = run / FILES[number % len(FILES)]
        whole = path.read_bytes()
        place, bit = chosen.randrange(len(whole)), chosen.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            regard.load(run)
            loaded.append(f"{path.name}: bit {bit} of byte {place}")
        except BadModelFile:
            pass
        path.write_bytes(whole)
    assert not loaded
    regard.load(run)


@pytest.mark.parametrize("words", [["translate", "one"], ["eval"], ["train", "--resume"], ["look", "one"]])
def test_the_commands_end_with_3(run: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    command = [words[0], str(run), *words[1:]] if words[0] != "train" else [*words, str(run)]
    assert cli.main(command) == 3
    assert (
        capsys.readouterr().err == f"regard: {run} is not what its manifest.json says: run.json has another SHA-256\n"
    )


def test_a_tokenizer_that_is_missing_is_said(run: Path) -> None:
    (run / "tokenizer.source.json").unlink()
    with pytest.raises(BadModelFile, match=r"tokenizer\.source\.json is missing"):
        regard.load(f"{run}@2")


def test_a_run_of_an_older_version_has_no_manifest_and_gets_one_when_it_goes_on(run: Path) -> None:
    (run / "manifest.json").unlink()
    regard.load(run)
    resume(run, steps=3)
    assert (run / "manifest.json").is_file()
    RunDirectory.open(run)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-000002"])
def test_a_link_out_of_the_run_is_not_followed(run: Path, finished: Path, name: str) -> None:
    shutil.rmtree(run / name)
    (run / name).symlink_to(finished / name)
    with pytest.raises(BadModelFile, match="is a link out of the directory"):
        regard.load(f"{run}@2")


def test_a_model_that_is_a_link_is_not_followed(run: Path, finished: Path) -> None:
    shutil.rmtree(run / "model")
    (run / "model").symlink_to(finished / "model")
    with pytest.raises(BadModelFile, match="is a link out of the directory"):
        regard.load(run)
