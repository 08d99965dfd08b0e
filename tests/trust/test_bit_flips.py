"""One bit changed in one file: whatever opens the directory next says so in a sentence and ends with 3."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from export.translators import translator
from regard.cli import main
from regard.export.ctranslate2_export import FOLDER as CT2_FOLDER
from regard.export.ctranslate2_export import export_ctranslate2
from regard.export.quantise import quantise, write_int8
from regard.hub import Manifest
from regard.hub.manifest import NAME as MANIFEST
from training.runs import train, write_data

from .promises import IS_FULL, Tally, size

# What a run writes all the time, and nothing is decided by.
UNLISTED = ("metrics.jsonl", "tensorboard/", "tokens/", "curves.png", "evaluation.json")


@dataclass(frozen=True)
class Opened:
    """A directory, the command that opens it, and those of its files that are to be damaged."""

    root: Path
    command: Sequence[str]
    pattern: str = "**/*"

    def files(self) -> list[Path]:
        found = (path for path in sorted(self.root.glob(self.pattern)) if path.is_file() and path.stat().st_size)
        return [path for path in found if not path.relative_to(self.root).as_posix().startswith(UNLISTED)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Opened]:
    """Of every kind one: a run that was stopped, the model of one that has ended, models as every engine reads them."""
    folder = tmp_path_factory.mktemp("flips")
    data, words = write_data("classify", folder), ("train.steps=2", "train.ema=0.9", "train.keep=1")
    train("classify", stopped := folder / "stopped", data, *words, "train.stop_at=1")
    train("classify", ended := folder / "ended", data, *words)
    translator().save(model := folder / "model")
    (int8 := folder / "int8").mkdir()
    write_int8(quantise(translator()), int8)
    Manifest.of(int8).write(int8)
    engines = ["ctranslate2"]
    export_ctranslate2(translator(), model / CT2_FOLDER)
    if IS_FULL:  # ten seconds
        from regard.export.onnx_export import export_onnx

        export_onnx(translator(), model)
        engines.append("onnx")
    (model / MANIFEST).unlink()
    Manifest.of(model).write(model)
    return [
        Opened(stopped, ("train", "--resume", str(stopped), "--quiet")),
        Opened(stopped, ("classify", str(stopped), "one two"), "*"),
        Opened(stopped, ("classify", f"{stopped}@1", "one two"), "checkpoints/**/*"),
        Opened(ended / "model", ("classify", str(ended), "one two")),
        Opened(ended / "model", ("info", str(ended))),
        Opened(int8, ("translate", str(int8), "A cat.")),
        Opened(int8, ("info", str(int8))),
        Opened(model, ("translate", str(model), "A cat.")),
        *(Opened(model, ("translate", str(model), "A cat.", "--engine", engine), "**/*") for engine in engines),
        *(Opened(model, ("translate", str(model), "A cat.", "--engine", x), f"{x}/*") for x in engines),
    ]


def run(words: Sequence[str]) -> tuple[int, str]:
    """The exit code of `regard WORDS`, in this process, and what it said on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        return main(list(words)), said.getvalue()


@pytest.mark.promise(2, "bits flipped in weights, optimiser, tokenizers, configs, run files, manifests and exports")
def test_a_flipped_bit_is_refused(directories: list[Opened], tally: Tally) -> None:
    chosen = random.Random(2)
    for number in range(size(short=44, full=2000)):
        opened = directories[number % len(directories)]
        path = chosen.choice(opened.files())
        before = path.read_bytes()
        place, bit = chosen.randrange(len(before)), chosen.randrange(8)
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
        try:
            with tally.attempt(f"{opened.command} {path.relative_to(opened.root)} byte {place} bit {bit}"):
                code, said = run(opened.command)
                assert code == 3, f"{code}: {said}"
                assert said.startswith("regard: ")
                assert said.count("\n") == 1, said
        finally:
            path.write_bytes(before)
    for opened in directories[1:] + directories[:1]:  # without a flip they are all read
        assert run(opened.command)[0] == 0
