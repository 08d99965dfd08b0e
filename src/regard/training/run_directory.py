"""The directory of a run: its config, checkpoints and metrics, and the model it has trained.

run.json        the resolved config; --resume reads it
manifest.json   SHA-256 of run.json, provenance.json, choice.json, started.json, the tokenizers and labels.json
provenance.json data hash, versions, command, git state
choice.json     precision and compilation, and why
started.json    which weights were taken over from train.init
tokenizer.json  or one each for source and target, with the companion files that ``model.save`` writes
labels.json     the names of the classes
checkpoints/    step-000200/ …: the last ones and the best
metrics.jsonl   one JSON object per line; tensorboard/ and curves.png show the same
model/          at the end: the model to ship, as ``model.save`` writes it
adapter/        with train.lora and train.init: the low-rank additions alone, in the format of the peft package
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
from ..foundation.files import file_lock, replace_directory, resolve_inside, write_atomic
from ..foundation.jsonio import read_json, to_json, wrong_values_as_bad_file
from ..hub import write_adapter
from ..hub.hf_directory import INDEX
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import Manifest, is_training_record
from ..models import Encoder, Model
from ..models.build import build
from ..text.processor import PROCESSOR_FILES, Processor, read_processor
from .averaging import average
from .checkpoint import Checkpoint, Checkpoints
from .finetuning import add_lora, low_rank_additions, merge, quantise_frozen
from .journal import TIMINGS, is_evaluation, read_line
from .parallel import Group

RUN_FILE = "run.json"
IN_MEMORY = "memory"  # data.source of examples passed in memory
_LABELS = "labels.json"
CHOICE_FILE, STARTED_FILE, FACTS_FILE = "choice.json", "started.json", "provenance.json"
_IN_MANIFEST = (RUN_FILE, FACTS_FILE, CHOICE_FILE, STARTED_FILE, _LABELS, *PROCESSOR_FILES)
# Names of the temporary files of ``write_atomic``.
_HALF_WRITTEN = re.compile(r"\..+\.(json|jsonl|png|bin|spm|txt|model|jinja)\.[a-z0-9_]{8}")
_MAX_READS = 10  # attempts to read a run while it is being trained


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, finished or in training."""

    root: Path

    @classmethod
    def create(cls, root: Path, config: RunConfig, processor: Processor, facts: dict[str, Any]) -> RunDirectory:
        """Create the directory of a new run; FileExistsError if it already holds other files."""
        if root.exists() and any(root.iterdir()) and not _is_unfinished(root):
            present = "a run; --resume continues it" if (root / RUN_FILE).exists() else "other files"
            raise FileExistsError(f"{root} already holds {present}; train.out=… names another directory")
        root.mkdir(parents=True, exist_ok=True)
        for path in root.iterdir():
            path.unlink()
        # Written first: it marks the directory as ours if the process is killed before run.json exists.
        write_atomic(root / FACTS_FILE, to_json({**facts, "folder": os.path.abspath(root)}))
        for name, content in processor.files(config.model).items():
            write_atomic(root / name, content)
        if processor.labels is not None:
            write_atomic(root / _LABELS, to_json({"labels": list(processor.labels)}))
        run = cls(root)
        run.write(config.with_(data=absolute_paths(config.data), train=_change_models(config.train, _absolute)))
        return run

    def clear(self) -> None:
        """Remove everything in a directory in which nothing was trained."""
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def write(self, config: RunConfig) -> None:
        """Write run.json. ``create`` does so last: a directory without it is not a run yet."""
        self.replace_files({RUN_FILE: to_json(config.model_dump(mode="json"))})

    def replace_files(self, files: Mapping[str, bytes | None]) -> None:
        """Write or, for None, remove files that the manifest lists.

        The manifest is removed first and written last, so that a run interrupted in between still loads.
        """
        (self.root / MANIFEST).unlink(missing_ok=True)
        for name, content in files.items():
            if content is None:
                (self.root / name).unlink(missing_ok=True)
            else:
                write_atomic(self.root / name, content)
        Manifest.of_files(self.root, filter(self.has, _IN_MANIFEST)).write(self.root)

    def check(self) -> None:
        """Raise BadModelFile if a file differs from the manifest; runs of older versions have none."""
        while (manifest := Manifest.read(self.root)) is not None:
            try:
                return manifest.check(self.root)
            except BadModelFile:
                if Manifest.read(self.root) == manifest:  # otherwise the training process has just changed the run
                    raise

    def remove_half_written(self) -> None:
        """Remove temporary files left by a process that was killed."""
        for folder in (self.root, self.root / "tokens"):
            for path in folder.glob(".*"):
                if _HALF_WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def lock(self) -> AbstractContextManager[None]:
        """A context that keeps other processes from training in this directory."""
        return file_lock(self.root, "is being trained by another process")

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        root = Path(path)
        if not (root / RUN_FILE).is_file():
            raise BadModelFile(f"{root} has no {RUN_FILE}, so it is not a training run")
        run = cls(root)
        run.check()
        return run

    @cached_property
    def config(self) -> RunConfig:
        """run.json with current paths: a file that has moved is searched for relative to the run and in the current
        directory."""
        path = self.root / RUN_FILE
        try:
            config = RunConfig(**read_json(path))
        except (ValueError, TypeError) as error:
            raise BadModelFile(f"{path} is not the config of a run: {error}") from None
        data, train = _change_paths(config.data, self._find_moved), _change_models(config.train, self._find_moved)
        return config.with_(data=data, train=train)

    def _find_moved(self, name: str) -> str:
        path, root = Path(name), Path(os.path.abspath(self.root))
        if os.path.exists(path):
            return name
        if path.is_absolute():
            candidates = [Path.cwd() / path.name, root.parent / path.name]
            with suppress(BadModelFile):  # runs of older versions did not record their folder
                candidates.insert(0, Path(os.path.normpath(root / os.path.relpath(path, self.facts["folder"]))))
        else:  # relative to the directory where the run was started, usually a parent of it
            candidates = [folder / path for folder in root.parents]
        return next((str(candidate) for candidate in candidates if os.path.exists(candidate)), name)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of provenance.json."""
        return read_json(self.root / FACTS_FILE)

    @cached_property
    def processor(self) -> Processor:
        processor = read_processor(self, {}, self.config.model) or Processor()
        if not self.has(_LABELS):
            return processor
        labels = self.json(_LABELS)["labels"]
        if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
            raise BadModelFile(f"{self.root / _LABELS} does not hold a list of labels")
        if len(labels) != (n := self.config.model.n_classes):
            raise BadModelFile(f"{self.root / _LABELS} names {len(labels)} classes, the model of {RUN_FILE} has {n}")
        return replace(processor, labels=tuple(labels))

    # The interface through which ``read_processor`` reads files.

    def has(self, name: str) -> bool:
        return (self.root / name).is_file()

    def bytes(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def json(self, name: str) -> dict[str, Any]:
        return read_json(self.root / name)

    def checkpoints(self, group: Group | None = None) -> Checkpoints:
        train = self.config.train
        return Checkpoints(resolve_inside(self.root, "checkpoints"), max(train.keep, train.average), group)

    @property
    def model_folder(self) -> Path:
        return resolve_inside(self.root, "model")

    def model(self, step: int | None = None, *, merged: bool = True) -> tuple[Model, str]:
        """The model to ship and a description of its weights: those of ``step``, else averaged, else best, else last.

        ``merged``: low-rank additions are merged into the weights. While a run is in training, a checkpoint may be
        removed before it is read; the remaining ones are then tried again.
        """
        for _ in range(_MAX_READS):
            steps = self.checkpoints().steps()
            try:
                return self._model(step, merged)
            except (BadModelFile, OSError):
                if self.checkpoints().steps() == steps:
                    raise
        return self._model(step, merged)

    def check_step(self, step: int | None) -> None:
        """Raise unless there is a checkpoint of this step; None: any will do."""
        steps = self.checkpoints().steps()
        if step is not None and step not in steps:
            raise BadModelFile(f"{self.root} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")

    def _model(self, step: int | None, merged: bool) -> tuple[Model, str]:
        checkpoints, train = self.checkpoints(), self.config.train
        steps, has_ema = checkpoints.steps(), train.ema is not None
        if not steps:
            raise BadModelFile(f"{self.root} has no checkpoint yet")
        self.check_step(step)
        if step is None and train.average > 1:
            last = steps[-train.average :]
            to_average = [checkpoints.at(each) for each in last]
            name = f"the average of steps {', '.join(map(str, last))}"
            return self._model_with(average(_weights(x, has_ema) for x in to_average), last[-1], name, merged), name
        latest = checkpoints.latest()
        if latest is None:  # removed meanwhile
            raise BadModelFile(f"{self.root} has no checkpoint")
        chosen = latest if step is None else checkpoints.at(step)
        note = ", moving average" if has_ema else ""
        with wrong_values_as_bad_file(latest.path / "state.json"):
            best = latest.state["at"]["best_step"]
        if step is None and not has_ema and best in steps:
            chosen, note = checkpoints.at(best), ", the best"
        name = f"step {chosen.step}{note}"
        return self._model_with(_weights(chosen, has_ema), chosen.step, name, merged), name

    def _model_with(self, weights: dict[str, torch.Tensor], step: int, name: str, merged: bool) -> Model:
        self._check_shapes(weights, step)
        train, model = self.config.train, build(self.config.model)
        if train.lora is not None:
            # Parameters that train.init did not have were trained whole and not quantised.
            trained_whole = self.json(STARTED_FILE)["unlearned"] if self.has(STARTED_FILE) else ()
            add_lora(model, train.lora, train.lora_alpha, train.lora_targets, keep=trained_whole)
        if train.quantize == "nf4":
            quantise_frozen(model)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            fault = str(error).splitlines()[-1].strip()
            raise BadModelFile(f"{self.root}: the weights of step {step} do not fit {RUN_FILE}: {fault}") from None
        if train.lora is not None and merged:
            merge(model)
        if isinstance(model, Encoder) and model.generator is not None and merged:
            model.drop_generator()
        model.processor, model.training_record = self.processor, self._training_record(step, name)
        return model.eval()

    def _check_shapes(self, weights: dict[str, torch.Tensor], step: int) -> None:
        """Raise BadModelFile if weights do not fit run.json, before a possibly huge model is allocated."""
        with wrong_values_as_bad_file(self.root / RUN_FILE):  # such as a class that is not registered
            expected = build(self.config.model, device="meta")
        for name, p in expected.named_parameters():
            if name in weights and weights[name].shape != p.shape:
                fault = f"{name} has shape {tuple(weights[name].shape)}, in {RUN_FILE} {tuple(p.shape)}"
                raise BadModelFile(f"{self.root}: the weights of step {step} do not fit {RUN_FILE}: {fault}")

    def _training_record(self, step: int, weights: str) -> dict[str, Any] | None:
        """The training record of a shipped model; ``metrics`` are those of its weights, if they were evaluated."""
        if not self.has(FACTS_FILE):
            return None
        facts, path, metrics = self.facts, self.root / "metrics.jsonl", {}
        with wrong_values_as_bad_file(self.root / FACTS_FILE):
            data = {name: facts["data"][name] for name in ("source", "sha256")}
        for line in path.read_bytes().splitlines() if path.exists() else []:
            record = read_line(line)
            if record is None or not is_evaluation(record):
                continue
            if record.pop("weights", f"step {record['step']}") in (weights, weights.partition(",")[0]):
                metrics = {name: x for name, x in record.items() if name not in ("step", "loss", "tokens", *TIMINGS)}
        record = {
            **{"run": self.root.resolve().name, "task": self.config.task, "step": step, "weights": weights},
            "data": data,
            **{"metrics": metrics, "command": facts["command"], "versions": facts["versions"], "git": facts["git"]},
        }
        if not is_training_record(record):
            raise BadModelFile(f"{self.root / FACTS_FILE} does not hold the provenance of a run")
        return record

    def save_adapter(self, merged: Model) -> None:
        """Write the low-rank additions as an adapter, if the run started from a directory with everything else."""
        recipe = self.config.train
        if recipe.lora is None or recipe.init is None:
            return
        started = self.json(STARTED_FILE)
        base, trained_whole = started.get("base"), started["unlearned"]
        if base is None or any(name.startswith(("token.", "target_token.")) for name in trained_whole):
            return
        additions = low_rank_additions(self.model(merged=False)[0])
        scale = (2.0 * recipe.lora if recipe.lora_alpha is None else recipe.lora_alpha) / recipe.lora
        with replace_directory(self.root / "adapter") as folder:
            for file in self.model_folder.iterdir():  # config.json and tokenizers; it gets its own card and checksums
                if file.suffix != ".safetensors" and file.name not in (MANIFEST, "README.md", INDEX):
                    write_atomic(folder / file.name, file.read_bytes())
            write_adapter(folder, merged, additions, scale=scale, whole=trained_whole, base=base)
            Manifest.of(folder).write(folder)


def _is_unfinished(root: Path) -> bool:
    """Whether a directory holds only files of a ``RunDirectory.create`` that was interrupted."""
    names = {path.name for path in root.iterdir() if not _HALF_WRITTEN.fullmatch(path.name)}
    return not names or (FACTS_FILE in names and RUN_FILE not in names and names <= {*_IN_MANIFEST, MANIFEST})


def _paths(data: DataConfig) -> dict[str, list[str]]:
    """The files and folders that the data names, by field; without corpora, hub data sets and examples in memory."""
    fields = ["source", "valid", "images", *(["tokenizer"] if data.tokenizer.endswith(TOKENIZER_FILES) else [])]
    names = {field: name for field in fields if (name := getattr(data, field)) is not None}
    files = {field: name for field, name in names.items() if name not in (*CORPORA, IN_MEMORY) and name[:3] != "hf:"}
    return {field: [name] if os.path.exists(name) else name.split(",") for field, name in files.items()}


def _change_paths(data: DataConfig, change: Callable[[str], str]) -> DataConfig:
    return data.with_(**{field: ",".join(map(change, parts)) for field, parts in _paths(data).items()})


def _change_models(train: TrainConfig, change: Callable[[str], str]) -> TrainConfig:
    """The recipe with ``change`` applied to the paths of its models; RUN@STEP keeps its step."""
    fields = {}
    for field in ("init", "teacher", "language_model"):
        if (name := getattr(train, field)) is not None:
            path, at, step = name.rpartition("@") if "@" in name and not os.path.exists(name) else (name, "", "")
            fields[field] = f"{change(path)}{at}{step}"
    return train.with_(**fields)


def absolute_paths(data: DataConfig) -> DataConfig:
    """The data with absolute paths of existing files, so that they are found from any directory."""
    return _change_paths(data, _absolute)


def _absolute(name: str) -> str:
    return os.path.abspath(name) if os.path.exists(name) else name


def missing_data(data: DataConfig, run: str | Path) -> BadData | None:
    """An error that names the first missing file or folder of the data; None if all exist."""
    missing = next((part for parts in _paths(data).values() for part in parts if not os.path.exists(part)), None)
    if missing is None:
        return None
    return BadData(f"{missing}, the data of {run}, does not exist; data.source=FILE gives its new location")


def find_run(path: str | Path, *, must_exist: bool = False) -> tuple[RunDirectory, int | None] | None:
    """The run and the step that RUN or RUN@STEP names; None if it does not name a run.

    ``must_exist``: raise BadModelFile for RUN@STEP if RUN is not a run.
    """
    name, _, step = str(path).rpartition("@")
    if name and step.isdecimal() and not Path(path).exists():
        if (Path(name) / RUN_FILE).is_file():
            return RunDirectory.open(name), int(step)
        if must_exist:
            raise BadModelFile(f"{path}: {name} is not a run, so it has no step {step}")
    return (RunDirectory.open(path), None) if (Path(path) / RUN_FILE).is_file() else None


def _weights(checkpoint: Checkpoint, ema: bool) -> dict[str, torch.Tensor]:
    weights = checkpoint.tensors("model/")
    if not ema:
        return weights
    # Matched by identity, because a tied tensor has several names.
    averages = {id(weights.get(name)): x for name, x in checkpoint.tensors("ema/average/").items()}
    return {name: averages.get(id(x), x) for name, x in weights.items()}


def provenance(source: Source, command: Sequence[str], processes: int = 1) -> dict[str, Any]:
    """The content of provenance.json: data, command, versions, machine and git state."""
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
    """The current commit and whether there are changes (None if git cannot tell); None outside a repository.

    `git status` executes commands from the repository's config (core.fsmonitor, filters, remotes of missing objects),
    which someone else may have written. It therefore runs in a temporary GIT_DIR with an empty config that points to
    the objects, the index and the work tree of the repository.
    """

    def run_git(*arguments: str, **variables: str) -> str | None:
        try:
            process = subprocess.run(
                ["git", *arguments], capture_output=True, text=True, timeout=5, env={**os.environ, **variables}
            )
        except (OSError, UnicodeError, subprocess.TimeoutExpired):
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    names = ("objects", "index", "info/exclude")
    paths = [word for name in names for word in ("--git-path", name)]
    lines = (run_git("rev-parse", "HEAD", "--show-toplevel", "--path-format=absolute", *paths) or "").splitlines()
    if len(lines) != 2 + len(names):
        return None
    commit, top, objects, index, exclude = lines
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "HEAD").write_text(commit)
        (Path(folder) / "refs").mkdir()
        (Path(folder) / "info").mkdir()
        if os.path.isfile(exclude):
            shutil.copyfile(exclude, Path(folder) / "info" / "exclude")
        status = run_git(
            *("--no-optional-locks", "status", "--porcelain", "--ignore-submodules=all"),
            **{"GIT_DIR": folder, "GIT_WORK_TREE": top, "GIT_OBJECT_DIRECTORY": objects, "GIT_INDEX_FILE": index},
        )
    return {"commit": commit, "changed": None if status is None else bool(status)}
