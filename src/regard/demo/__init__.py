"""`regard demo`: train a translator, evaluate it, translate, look inside, export.

Each stage writes its files atomically, so an interrupted demo can continue where it stopped. Importing this module does
not import torch, so that the title appears at once.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..data.corpora.enko import REGISTERS, AlignedPair, EnKo, lookup_accuracy, realise
from ..errors import RegardError, UsageError, silence_warnings
from ..foundation.files import file_lock, write_atomic
from ..foundation.jsonio import read_json, to_json
from ..recipes import run_config
from .demo_screen import DemoScreen

if TYPE_CHECKING:
    from ..models import Model

RECIPE = "en-ko"
SPLIT = "combinations"  # sentences with verb–noun combinations that training never shows
N_EVALUATED, N_LOOKUP, N_ALIGNED, N_SHAPES = 500, 200, 40, 24
# Changes to the recipe: checkpoints so often that a killed demo loses seconds of training, not minutes, and a final
# evaluation on the same number of sentences as the next stage.
_OVERRIDES = {"train.save_every": "100", "data.valid_rows": str(N_EVALUATED)}
# Indices in the held-out split: one sentence is translated in every register, the others only in their own.
_IN_EVERY_REGISTER, _OTHERS = 6, (1, 13, 20)
_LOOKED_AT = 6
MARKER = "demo.json"  # marks a directory as a demo's and holds its overrides
_HALF_WRITTEN = re.compile(r"\..+\.(json|html)\.[0-9a-f]{8}")


def demo_config(root: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the demo's run; raises UsageError on overrides of its directory or its data."""
    names = {word.partition("=")[0] for word in overrides}
    if "train.out" in names:
        raise UsageError("the demo sets train.out itself: --out DIR sets the directory")
    if names & {"data", "data.source"}:
        raise UsageError("the demo learns en-ko; with your own pairs: regard train translate data.source=pairs.tsv")
    defaults = [f"{name}={value}" for name, value in _OVERRIDES.items() if name not in names]
    return run_config("translate", [*overrides, *defaults, f"train.out={root / 'run'}"], preset=RECIPE)


def demo_sentences() -> list[AlignedPair]:
    """The sentences to translate, with the translations of the grammar."""
    corpus = EnKo()
    structure = corpus.example(SPLIT, _IN_EVERY_REGISTER).structure
    registers = [realise({**structure, "register": register}) for register in REGISTERS]
    return [*registers, *(corpus.example(SPLIT, index) for index in _OTHERS)]


def evaluate_model(run: Path, n: int) -> dict[str, Any]:
    """Exact match and BLEU on held-out combinations, and the exact match of a dictionary."""
    from ..training import evaluate

    metrics = evaluate(run, split=SPLIT, limit=n, beam=1).metrics
    scores: Any = {name: metrics[name] for name in ("exact", "bleu", "chrf", "bleu_signature") if name in metrics}
    return {"split": SPLIT, "n": n, **scores, "lookup_exact": lookup_accuracy(SPLIT, min(n, N_LOOKUP))}


def translate_sentences(model: Model) -> dict[str, Any]:
    """Translate a few sentences and compare them with the grammar's translations."""
    from ..generation import translate

    pairs = demo_sentences()
    texts = translate(model, [pair.source for pair in pairs], beam=4)
    sentences = [
        {"source": pair.source, "text": text, "wanted": pair.target, "right": text == pair.target}
        for pair, text in zip(pairs, texts, strict=True)
    ]
    return {"sentences": sentences}


def render_alignment(model: Model, page: Path, language: str) -> dict[str, Any]:
    """Find the layer whose mean over heads aligns best, and write the page of one sentence."""
    from ..lens import look
    from ..lens.head_scores import alignment_error
    from ..lens.render_html import page_html

    error = alignment_error(model, N_ALIGNED, SPLIT)
    layers = error["together"]["written"]
    layer = min(range(len(layers)), key=layers.__getitem__)
    pair = EnKo().example(SPLIT, _LOOKED_AT)
    view = look(model, pair.source)
    right = view.target_text == pair.target
    if not right:
        view = look(model, pair.source, pair.target)
    write_atomic(page, page_html(view, layer=layer, kind="cross", language=language).encode())
    facts = {"source": pair.source, "target": pair.target, "right": right, "layer": layer}
    facts["heads"] = view.heads(kind="cross")
    return facts | {"n": error["n"], "error": layers[layer], "diagonal": error["diagonal"]}


def export_onnx(model: Model, path: Path) -> dict[str, Any]:
    """Export to ONNX with a certificate; to save time, with fewer shapes than `regard export` and uncompiled."""
    from ..export import export

    export(model, "onnx", path, n_shapes=N_SHAPES, compiled=False)
    certificate = read_json(path / "certificate.json")
    row = next(row for row in certificate["comparisons"] if row["name"].startswith("onnx"))
    return {name: row[name] for name in ("max_abs", "same_text")} | {"n": N_SHAPES, "passes": certificate["passes"]}


def export_page(model: Model, path: Path) -> dict[str, Any]:
    """Export the explorer with the model, as files for any web server."""
    from ..export import export

    shutil.rmtree(path, ignore_errors=True)  # what an interrupted demo left
    export(model, "web", path, n_shapes=N_SHAPES)
    return {"bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file())}


@dataclass
class Demo:
    """A demo in its directory. Finished stages are kept, missing ones are run, and all of them are shown."""

    root: Path
    config: RunConfig
    overrides: tuple[str, ...]
    screen: DemoScreen
    command: Sequence[str] = ()
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # stage → result, with ``seconds`` and ``kept``

    def __post_init__(self) -> None:
        self.run, self.page, self.onnx = self.root / "run", self.root / "look.html", self.root / "onnx"
        self.web = self.root / "page"
        self.texts = self.screen.texts

    def to_dict(self) -> dict[str, Any]:
        total = sum(stage["seconds"] for stage in self.results.values())
        paths = {"run": str(self.run), "page": str(self.page), "onnx": str(self.onnx), "web": str(self.web)}
        return {"out": str(self.root), **paths, "seconds": round(total, 1), "stages": self.results}

    def run_stages(self) -> None:
        """Run the missing stages while holding a lock on the directory."""
        from ..training.signals import Interrupted

        self._open_directory()
        n = min(N_EVALUATED, rows if isinstance(rows := self.config.data.valid_rows, int) else N_EVALUATED)
        with file_lock(self.root, "is in use by another demo; --out sets another directory"):
            for path in self.root.glob(".*"):
                if _HALF_WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            try:
                self._train()
                self._stage("judge", lambda: evaluate_model(self.run, n), n=n)
                self._stage("translate", lambda: translate_sentences(self.model))
                self._stage("look", lambda: render_alignment(self.model, self.page, self.texts.language), self.page)
                self._stage("export", self._export, self.onnx / "certificate.json")
                self._stage("publish", self._publish, self.web / "index.html")
            except (KeyboardInterrupt, Interrupted) as stop:
                raise Interrupted(self.texts("stopped"), getattr(stop, "exit_code", 130)) from None
        self.screen.end(self.to_dict()["seconds"], self.run)

    def _train(self) -> None:
        """Train, or resume an interrupted run; the stage is done if the run has an evaluation and a model."""
        record = self.run / "evaluation.json"
        done = record.is_file() and (self.run / "model").is_dir()
        self.screen.stage("train", kept=done, n=self.config.data.epoch_examples)
        started = time.perf_counter()
        if done:
            result = read_json(record)
        else:
            from ..training import resume, train

            if (self.run / "run.json").is_file():
                names = [path.name[5:] for path in (self.run / "checkpoints").glob("step-*")]
                step = max((int(name) for name in names if name.isdigit()), default=0)
                self.screen.note("train.goes_on", step=step, steps=self.config.train.steps)
                result = resume(self.run).to_dict()
            else:
                if self.run.exists():  # interrupted before the run had a config, so nothing is lost
                    shutil.rmtree(self.run)
                result = train(self.config, command=self.command).to_dict()
            # A resumed run counts the seconds of its earlier parts, but not the time to load.
            result["seconds"] = round(max(result["seconds"], time.perf_counter() - started), 1)
        if not result["finished"]:
            from ..training.signals import Interrupted

            raise Interrupted(self.texts("stopped"), 0)
        self.results["train"] = {**result, "kept": done}
        self.screen.result("train", self.results["train"])

    def _stage(self, name: str, compute: Callable[[], dict[str, Any]], *files: Path, **about: Any) -> None:
        """Read the stage's record if it belongs to this model and its files exist, else compute and write it."""
        record, result = self.root / f"{name}.json", None
        if record.is_file() and all(file.is_file() for file in files):
            stored = read_json(record)
            result = stored if stored.get("model") == self._model_hash else None
        kept = result is not None
        self.screen.stage(name, kept=kept, **about)
        if result is None:
            started = time.perf_counter()
            result = {**compute(), "seconds": round(time.perf_counter() - started, 1), "model": self._model_hash}
            if "left_out" not in result:
                write_atomic(record, to_json(result))
        self.results[name] = {**result, "kept": kept}
        self.screen.result(name, self.results[name], self)

    def _export(self) -> dict[str, Any]:
        try:
            return export_onnx(self.model, self.onnx)
        except ImportError as error:
            return {"left_out": error.name or str(error)}

    def _publish(self) -> dict[str, Any]:
        try:
            return export_page(self.model, self.web)
        except ImportError as error:
            return {"left_out": error.name or str(error)}
        except RegardError as error:  # for example without npm, which provides the libraries of the page
            return {"left_out": str(error)}

    @cached_property
    def model(self) -> Model:
        from ..io import load

        return load(self.run, device="cpu")

    @cached_property
    def _model_hash(self) -> str:
        """Hash of the trained model; the records of another model are recomputed."""
        return hashlib.sha256((self.run / "model" / "manifest.json").read_bytes()).hexdigest()

    def _open_directory(self) -> None:
        """Mark an empty directory as the demo's; accept one with the same overrides, and refuse any other."""
        marker = self.root / MARKER
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"--out {self.root} is a file; a demo needs a directory")
        if marker.is_file():
            before = read_json(marker).get("words")
            if before == list(self.overrides):
                return
            overrides = " ".join(before or ()) or "no overrides"
            advice = "use the same, or another --out directory, or remove it"
            raise UsageError(f"{self.root} holds a demo with {overrides}; {advice}")
        if self.root.exists() and any(path for path in self.root.iterdir() if not _HALF_WRITTEN.fullmatch(path.name)):
            raise UsageError(f"--out {self.root} holds something else; choose another directory")
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomic(marker, to_json({"words": list(self.overrides)}))


def demo(out: str | Path, overrides: Sequence[str] = (), *, screen: DemoScreen, command: Sequence[str] = ()) -> Demo:
    """Run the missing stages of the demo in ``out``; overrides change the recipe, as in `regard train`."""
    run = Demo(Path(out), demo_config(Path(out), overrides), tuple(overrides), screen, command)
    with silence_warnings("regard.io"):  # it warns that transformers has no equivalent of this model
        run.run_stages()
    return run
