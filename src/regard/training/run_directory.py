"""A run's directory: everything about it in one place, and the model it has come to.

run.json        the resolved config: what to run again, and what --resume reads
manifest.json   SHA-256 of run.json, provenance.json, choice.json, started.json, the tokenizers and labels.json
provenance.json data hash, versions, command, git state
choice.json     precision and compilation, and why; started.json: what became of the weights of train.init
tokenizer.json  or one each for source and target, and what else ``model.save`` writes for them; labels.json
checkpoints/    step-000200/ …: the last ones and the best
metrics.jsonl   one object a line; tensorboard/ and curves.png show the same
model/          at the end: the model to ship, as ``model.save`` writes it
adapter/        with train.lora and train.init: the low-rank additions alone, as the peft package writes them
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..config import DataConfig, RunConfig, TrainConfig
from ..config.data_config import TOKENIZER_FILES
from ..data.corpora import CORPORA
from ..data.sources import Source
from ..errors import BadData, BadModelFile
from ..foundation.files import file_lock, resolve_inside, write_atomic
from ..foundation.jsonio import parse_json, to_json, wrong_values_as_bad_file
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import Manifest, is_training_record
from ..models import Model
from ..models.build import build
from ..text.processor import PROCESSOR_FILES, Processor, read_processor
from .averaging import average
from .checkpoint import Checkpoint, Checkpoints
from .finetuning import add_lora, merge, quantise_frozen
from .journal import TIMINGS, is_evaluation, read_line
from .parallel import Group

RUN_FILE = "run.json"
IN_MEMORY = "memory"  # data.source of examples that come from no file
_LABELS = "labels.json"
CHOICE_FILE, STARTED_FILE, _FACTS_FILE = "choice.json", "started.json", "provenance.json"
_IN_MANIFEST = (RUN_FILE, _FACTS_FILE, CHOICE_FILE, STARTED_FILE, _LABELS, *PROCESSOR_FILES)
# How files are called while they are written, beside what they will be.
_HALF_WRITTEN = re.compile(r"\..+\.(json|jsonl|png|bin|spm|txt|model|jinja)\.[a-z0-9_]{8}")
_MAX_READS = 10  # attempts to read a run that goes on


@dataclass(frozen=True)
class RunDirectory:
    """A directory that ``regard train`` wrote, or is writing."""

    root: Path

    @classmethod
    def create(cls, root: Path, config: RunConfig, processor: Processor, facts: dict[str, Any]) -> RunDirectory:
        """A new one. A directory that holds anything else already is refused: runs are not mixed."""
        if root.exists() and any(root.iterdir()) and not _is_unfinished(root):
            what = "a run; --resume continues it" if (root / RUN_FILE).exists() else "something else"
            raise FileExistsError(f"{root} already holds {what}; train.out=… names another directory")
        root.mkdir(parents=True, exist_ok=True)
        for path in root.iterdir():
            path.unlink()
        # First, since it tells a directory that was never finished from one that holds something else.
        write_atomic(root / _FACTS_FILE, to_json({**facts, "folder": os.path.abspath(root)}))
        for name, content in processor.files(config.model).items():
            write_atomic(root / name, content)
        if processor.labels is not None:
            write_atomic(root / _LABELS, to_json({"labels": list(processor.labels)}))
        run = cls(root)
        run.write(config.with_(data=absolute_paths(config.data), train=_change_models(config.train, _absolute)))
        return run

    def write(self, config: RunConfig) -> None:
        """The config, last: a directory without it is no run yet."""
        self.replace_files({RUN_FILE: to_json(config.model_dump(mode="json"))})

    def write_facts(self, facts: dict[str, Any]) -> None:
        """provenance.json"""
        self.replace_files({_FACTS_FILE: to_json(facts)})

    def replace_files(self, files: Mapping[str, bytes | None]) -> None:
        """Write files that the manifest lists, None removing one. Without a manifest meanwhile: whatever interrupts
        this leaves a run that loads."""
        (self.root / MANIFEST).unlink(missing_ok=True)
        for name, content in files.items():
            if content is None:
                (self.root / name).unlink(missing_ok=True)
            else:
                write_atomic(self.root / name, content)
        Manifest.of_files(self.root, filter(self.has, _IN_MANIFEST)).write(self.root)

    def check(self) -> None:
        """Raise BadModelFile where a file is not what the manifest says; runs of older versions have no manifest."""
        while (manifest := Manifest.read(self.root)) is not None:
            try:
                return manifest.check(self.root)
            except BadModelFile:
                if Manifest.read(self.root) == manifest:  # otherwise the run was just changed by its own process
                    raise

    def remove_half_written(self) -> None:
        """Remove what a process that was killed had half written."""
        for folder in (self.root, self.root / "tokens"):
            for path in folder.glob(".*"):
                if _HALF_WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def lock(self) -> AbstractContextManager[None]:
        """Nobody else trains here meanwhile."""
        return file_lock(self.root, "is being trained by another process")

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        root = Path(path)
        if not (root / RUN_FILE).is_file():
            raise BadModelFile(f"{root} has no {RUN_FILE}, so it is no training run")
        run = cls(root)
        run.check()
        return run

    @cached_property
    def config(self) -> RunConfig:
        """run.json, its data where it is now: a path that is gone is looked for beside the run as it was, and here."""
        path = self.root / RUN_FILE
        try:
            config = RunConfig(**parse_json(path.read_bytes(), path))
        except (ValueError, TypeError) as error:
            raise BadModelFile(f"{path} is not the config of a run: {error}") from None
        data, train = _change_paths(config.data, self._find_moved), _change_models(config.train, self._find_moved)
        return config.with_(data=data, train=train)

    def _find_moved(self, name: str) -> str:
        path, here = Path(name), Path(os.path.abspath(self.root))
        if os.path.exists(path):
            return name
        if path.is_absolute():
            places = [Path.cwd() / path.name, here.parent / path.name]
            with suppress(BadModelFile, KeyError):  # of an older version
                places.insert(0, Path(os.path.normpath(here / os.path.relpath(path, self.facts["folder"]))))
        else:  # typed where the run was started, which is somewhere above it
            places = [folder / path for folder in here.parents]
        return next((str(place) for place in places if os.path.exists(place)), name)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """provenance.json"""
        path = self.root / _FACTS_FILE
        try:
            return parse_json(path.read_bytes(), path)
        except OSError as error:
            raise BadModelFile(f"{path} cannot be read: {error.strerror}") from None

    @cached_property
    def processor(self) -> Processor:
        processor = read_processor(self, {}, self.config.model) or Processor()
        if not self.has(_LABELS):
            return processor
        labels = self.json(_LABELS)["labels"]
        if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
            raise BadModelFile(f"{self.root / _LABELS} holds no list of labels")
        return replace(processor, labels=tuple(labels))

    # The files, as ``read_processor`` asks for them.

    def has(self, name: str) -> bool:
        return (self.root / name).is_file()

    def bytes(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def json(self, name: str) -> dict[str, Any]:
        return parse_json(self.bytes(name), self.root / name)

    def checkpoints(self, group: Group | None = None) -> Checkpoints:
        train = self.config.train
        return Checkpoints(resolve_inside(self.root, "checkpoints"), max(train.keep, train.average), group)

    @property
    def model_folder(self) -> Path:
        return resolve_inside(self.root, "model")

    def model(self, step: int | None = None, *, merged: bool = True) -> tuple[Model, str]:
        """The weights one would ship, and which they are: of a step, else averaged, else the best, else the last.

        Low-rank additions are ``merged`` into them, or beside them still. While the run goes on its checkpoints come
        and go: where one is gone before it was read, those that are there then are taken.
        """
        for _ in range(_MAX_READS):
            steps = self.checkpoints().steps()
            try:
                return self._model(step, merged)
            except (BadModelFile, OSError):
                if self.checkpoints().steps() == steps:
                    raise
        return self._model(step, merged)

    def _model(self, step: int | None, merged: bool) -> tuple[Model, str]:
        checkpoints, train = self.checkpoints(), self.config.train
        steps, has_ema = checkpoints.steps(), train.ema is not None
        if not steps:
            raise BadModelFile(f"{self.root} has no checkpoint yet")
        if step is not None and step not in steps:
            raise BadModelFile(f"{self.root} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
        if step is None and train.average > 1:
            last = steps[-train.average :]
            found = [checkpoints.at(each) for each in last]
            name = f"the average of steps {', '.join(map(str, last))}"
            return self._model_with(average(_weights(x, has_ema) for x in found), last[-1], name, merged), name
        latest = checkpoints.latest()
        if latest is None:  # removed meanwhile
            raise BadModelFile(f"{self.root} has no checkpoint")
        chosen, note = latest if step is None else checkpoints.at(step), ", averaged as it went" if has_ema else ""
        with wrong_values_as_bad_file(latest.path / "state.json"):
            best = latest.state["at"]["best_step"]
        if step is None and not has_ema and best in steps:
            chosen, note = checkpoints.at(best), ", the best"
        name = f"step {chosen.step}{note}"
        return self._model_with(_weights(chosen, has_ema), chosen.step, name, merged), name

    def _model_with(self, weights: dict[str, torch.Tensor], step: int, name: str, merged: bool) -> Model:
        train, model = self.config.train, build(self.config.model)
        if train.lora is not None:
            # Parameters that were new had learned beside the additions, and were not quantised.
            whole = self.json(STARTED_FILE)["unlearned"] if self.has(STARTED_FILE) else ()
            add_lora(model, train.lora, train.lora_alpha, train.lora_targets, keep=whole)
        if train.quantize == "nf4":
            quantise_frozen(model)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            fault = str(error).splitlines()[-1].strip()
            raise BadModelFile(f"{self.root}: the weights of step {step} do not fit {RUN_FILE}: {fault}") from None
        if train.lora is not None and merged:
            merge(model)
        model.processor, model.training_record = self.processor, self._training_record(step, name)
        return model.eval()

    def _training_record(self, step: int, weights: str) -> dict[str, Any] | None:
        """What a shipped model says about its training; ``metrics`` are those of the step, where it was evaluated."""
        if not self.has(_FACTS_FILE):
            return None
        facts, path, metrics = self.facts, self.root / "metrics.jsonl", {}
        with wrong_values_as_bad_file(self.root / _FACTS_FILE):
            data = {name: facts["data"][name] for name in ("source", "sha256")}
        for line in path.read_bytes().splitlines() if path.exists() else []:
            record = read_line(line)
            if record is not None and record["step"] == step and is_evaluation(record):
                metrics = {name: x for name, x in record.items() if name not in ("step", "loss", "tokens", *TIMINGS)}
        record = {
            **{"run": self.root.resolve().name, "task": self.config.task, "step": step, "weights": weights},
            "data": data,
            **{"metrics": metrics, "command": facts["command"], "versions": facts["versions"], "git": facts["git"]},
        }
        if not is_training_record(record):
            raise BadModelFile(
                f"{self.root / _FACTS_FILE} does not say where the weights came from, as regard writes it"
            )
        return record


def _is_unfinished(root: Path) -> bool:
    """Whether a directory holds only what ``RunDirectory.create`` had written when its process was killed."""
    names = {path.name for path in root.iterdir() if not _HALF_WRITTEN.fullmatch(path.name)}
    return not names or (_FACTS_FILE in names and RUN_FILE not in names and names <= {*_IN_MANIFEST, MANIFEST})


def _paths(data: DataConfig) -> dict[str, list[str]]:
    """The files and folders that the data names, by field; not corpora, data sets of the hub, or what is in memory."""
    fields = ["source", "valid", "images", *(["tokenizer"] if data.tokenizer.endswith(TOKENIZER_FILES) else [])]
    names = {field: name for field in fields if (name := getattr(data, field)) is not None}
    files = {field: name for field, name in names.items() if name not in (*CORPORA, IN_MEMORY) and name[:3] != "hf:"}
    return {field: [name] if os.path.exists(name) else name.split(",") for field, name in files.items()}


def _change_paths(data: DataConfig, change: Callable[[str], str]) -> DataConfig:
    return data.with_(**{field: ",".join(map(change, parts)) for field, parts in _paths(data).items()})


def _change_models(train: TrainConfig, change: Callable[[str], str]) -> TrainConfig:
    """The recipe with other paths of the models it names; RUN@STEP keeps its step."""
    fields = {}
    for field in ("init", "teacher"):
        if (name := getattr(train, field)) is not None:
            path, at, step = name.rpartition("@") if "@" in name and not os.path.exists(name) else (name, "", "")
            fields[field] = f"{change(path)}{at}{step}"
    return train.with_(**fields)


def absolute_paths(data: DataConfig) -> DataConfig:
    """The data with the full path of every file that is there, so that it is found from any folder."""
    return _change_paths(data, _absolute)


def _absolute(name: str) -> str:
    return os.path.abspath(name) if os.path.exists(name) else name


def missing_data(data: DataConfig, run: str | Path) -> BadData | None:
    """The error about the first file or folder that a run learned from and that is not there; None: all are."""
    missing = next((part for parts in _paths(data).values() for part in parts if not os.path.exists(part)), None)
    if missing is None:
        return None
    return BadData(f"{missing}, which {run} learned from, is not there; data.source=FILE says where it is now")


def find_run(path: str | Path, *, must_exist: bool = False) -> tuple[RunDirectory, int | None] | None:
    """The run that RUN or RUN@STEP names, and the step; None where it names no run.

    ``must_exist``: a name of the form RUN@STEP whose RUN is no run raises BadModelFile.
    """
    name, _, step = str(path).rpartition("@")
    if name and step.isdecimal() and not Path(path).exists():
        if (Path(name) / RUN_FILE).is_file():
            return RunDirectory.open(name), int(step)
        if must_exist:
            raise BadModelFile(f"{path}: {name} is no run, so it has no step {step}")
    return (RunDirectory.open(path), None) if (Path(path) / RUN_FILE).is_file() else None


def _weights(checkpoint: Checkpoint, ema: bool) -> dict[str, torch.Tensor]:
    weights = checkpoint.tensors("model/")
    if not ema:
        return weights
    # By the tensor, not by its name: a tied one has several.
    averages = {id(weights.get(name)): x for name, x in checkpoint.tensors("ema/average/").items()}
    return {name: averages.get(id(x), x) for name, x in weights.items()}


def provenance(source: Source, command: Sequence[str], processes: int = 1) -> dict[str, Any]:
    """What a run came from, for whoever reads it later."""
    from .. import __version__

    data = {"source": source.name, "sha256": source.sha256, "train": len(source.train), "valid": len(source.valid)}
    machine = {"system": platform.platform(), "processor": platform.machine(), "threads": torch.get_num_threads()}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(command),
        "data": {**data, "split": source.split.to_dict(), "lines": source.report.to_dict()},
        "versions": {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {**machine, "processes": processes},
        "git": _git(),
    }


def _git() -> dict[str, Any] | None:
    """The commit one stands on, and whether there are changes (None: git cannot tell); None outside a repository.

    `git status` runs what a repository's config names (core.fsmonitor, filters, remotes of missing objects), and others
    may have written it; so the status is taken with an empty config, the files and objects being the repository's.
    """

    def ask(*words: str, **variables: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", *words], capture_output=True, text=True, timeout=5, env={**os.environ, **variables}
            )
        except (OSError, UnicodeError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    names = ("objects", "index", "info/exclude")
    paths = [word for name in names for word in ("--git-path", name)]
    found = (ask("rev-parse", "HEAD", "--show-toplevel", "--path-format=absolute", *paths) or "").splitlines()
    if len(found) != 2 + len(names):
        return None
    commit, top, objects, index, exclude = found
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "HEAD").write_text(commit)
        (Path(folder) / "refs").mkdir()
        (Path(folder) / "info").mkdir()
        if os.path.isfile(exclude):
            shutil.copyfile(exclude, Path(folder) / "info" / "exclude")
        status = ask(
            *("--no-optional-locks", "status", "--porcelain", "--ignore-submodules=all"),
            **{"GIT_DIR": folder, "GIT_WORK_TREE": top, "GIT_OBJECT_DIRECTORY": objects, "GIT_INDEX_FILE": index},
        )
    return {"commit": commit, "changed": None if status is None else bool(status)}
