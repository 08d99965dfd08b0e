"""The stages one after the other: what was done before is kept, what is missing is done, all of it is shown."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..errors import UsageError
from ..foundation.files import file_lock, write_atomic
from ..foundation.jsonio import parse_json, to_json
from ..foundation.logs import silence_warnings
from ..training.signals import Interrupted
from . import stages
from .says import Says
from .showing import Shown
from .wanted import N_JUDGED, demo_config

if TYPE_CHECKING:
    from ..models import Model

MARK = "demo.json"
"""What makes a directory a demo's: it says what was asked for."""
_HALF_WRITTEN = re.compile(r"\..+\.(json|html)\.[0-9a-f]{8}")
_Computed = Callable[[], dict[str, Any]]


@dataclass
class Demo:
    """A demo in its directory."""

    root: Path
    config: RunConfig
    words: tuple[str, ...]
    shown: Shown
    style: Any = "auto"
    command: Sequence[str] = ()
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each stage came to, with its ``seconds``, and whether it was ``kept`` from before."""

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def page(self) -> Path:
        return self.root / "look.html"

    @property
    def onnx(self) -> Path:
        return self.root / "onnx"

    @property
    def says(self) -> Says:
        return self.shown.says

    def document(self) -> dict[str, Any]:
        """As JSON."""
        total = sum(stage["seconds"] for stage in self.found.values())
        made = {"run": str(self.run), "page": str(self.page), "onnx": str(self.onnx)}
        return {"out": str(self.root), **made, "seconds": round(total, 1), "stages": self.found}

    def all_stages(self) -> None:
        """From the first that is not done to the last."""
        with self._alone():
            self._train()
            self._stage("judge", lambda: stages.judge(self.run, self._n_judged), n=self._n_judged)
            self._stage("translate", lambda: stages.translate(self.model))
            self._stage("look", lambda: stages.align(self.model, self.page, self.says.language), self.page)
            self._stage("export", self._export, self.onnx / "certificate.json")
        self.shown.end(self.document()["seconds"], self.run)

    # ---------------------------------------------------------------- stages

    def _train(self) -> None:
        """Its artefact is the run's own: an evaluation and a model."""
        done = (self.run / "evaluation.json").is_file() and (self.run / "model").is_dir()
        self.shown.stage("train", kept=done, n=self.config.data.epoch_examples)
        started = time.perf_counter()
        if done:
            path = self.run / "evaluation.json"
            found = parse_json(path.read_bytes(), path)
        else:
            self._begin_or_go_on()
            found = stages.train(self.config, self.command, self.style)
            found["seconds"] = round(max(found["seconds"], time.perf_counter() - started), 1)  # of all its parts
        if not found["finished"]:
            raise Interrupted(self.says("stopped"), 0)
        self.found["train"] = {**found, "kept": done}
        self.shown.result("train", self.found["train"])

    def _begin_or_go_on(self) -> None:
        if (self.run / "run.json").is_file():
            steps = [
                int(path.name[5:]) for path in (self.run / "checkpoints").glob("step-*") if path.name[5:].isdigit()
            ]
            self.shown.note("train.goes_on", step=max(steps, default=0), steps=self.config.train.steps)
        elif self.run.exists():  # stopped before the run had a config: nothing was learned yet
            shutil.rmtree(self.run)

    def _stage(self, name: str, compute: _Computed, *files: Path, **about: Any) -> None:
        """Keep what was found about this very model, or find it and write it down."""
        record = self.root / f"{name}.json"
        found = self._recorded(record, files)
        self.shown.stage(name, kept=found is not None, **about)
        kept = found is not None
        if found is None:
            started = time.perf_counter()
            result = compute()
            found = {**result, "seconds": round(time.perf_counter() - started, 1), "model": self._digest}
            if "left_out" not in found:
                write_atomic(record, to_json(found))
        self.found[name] = {**found, "kept": kept}
        self.shown.result(name, self.found[name], self)

    def _recorded(self, record: Path, files: tuple[Path, ...]) -> dict[str, Any] | None:
        if not record.is_file() or not all(file.is_file() for file in files):
            return None
        found = parse_json(record.read_bytes(), record)
        return found if found.get("model") == self._digest else None

    def _export(self) -> dict[str, Any]:
        try:
            return stages.export(self.model, self.onnx)
        except ImportError as error:
            return {"left_out": error.name or str(error)}

    @property
    def _n_judged(self) -> int:
        return min(N_JUDGED, self.config.data.valid_rows or N_JUDGED)

    @cached_property
    def model(self) -> Model:
        from ..io import load

        return load(self.run, device="cpu")

    @cached_property
    def _digest(self) -> str:
        """Of the trained model: what was found about another one is not kept."""
        return hashlib.sha256((self.run / "model" / "manifest.json").read_bytes()).hexdigest()

    # ---------------------------------------------------------------- the directory

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One demo at a time in a directory that is a demo's, and one that was asked for the same."""
        self._open_directory()
        with file_lock(self.root, "has a demo running in it; --out names another directory"):
            for path in self.root.glob(".*"):
                if _HALF_WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            try:
                yield
            except KeyboardInterrupt:
                raise Interrupted(self.says("stopped"), 130) from None
            except Interrupted as stop:
                raise Interrupted(self.says("stopped"), stop.exit_code) from None

    def _open_directory(self) -> None:
        mark = self.root / MARK
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"--out {self.root} is a file; a demo needs a directory")
        if mark.is_file():
            before = parse_json(mark.read_bytes(), mark).get("words")
            if before != list(self.words):
                said = " ".join(before or ()) or "no words"
                raise UsageError(
                    f"{self.root} holds a demo with {said}; give the same, or --out another directory, or remove it"
                )
            return
        if self.root.exists() and any(path for path in self.root.iterdir() if not _HALF_WRITTEN.fullmatch(path.name)):
            raise UsageError(f"--out {self.root} holds something else; name another directory")
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomic(mark, to_json({"words": list(self.words)}))


def demo(
    out: str | Path, words: Sequence[str] = (), *, shown: Shown, style: Any = "auto", command: Sequence[str] = ()
) -> Demo:
    """Do what is not done yet of the demo in ``out``; words change the recipe, as in `regard train`."""
    root = Path(out)
    made = Demo(root, demo_config(root, words), tuple(words), shown, style, command)
    with silence_warnings("regard.io"):  # that transformers has no twin of this model is no news here
        made.all_stages()
    return made
