"""Checkpoints: one directory per step, written atomically and verified by SHA-256 before it is used.

RUN/checkpoints/step-000200/   model.safetensors, optimiser.safetensors …: one file per prefix of the tensor names
                               (in a sharded run one per process: shard-00000-of-00002.safetensors …),
                               index.json, state.json, manifest.json
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import BadModelFile, RegardError
from ..foundation.files import fsync, remove_abandoned, replace_directory, resolve_inside, write_atomic
from ..foundation.jsonio import read_json, to_json
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import Entry, Manifest
from . import shards
from .parallel import Group

STATE = "state.json"
_STEP = re.compile(r"step-(\d{6,})")
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# What one process wrote: the file and the region of each tensor, and the manifest entry of each file.
_Part = tuple[dict[str, tuple[str, shards.TensorRegion]], dict[str, Entry]]


class Checkpoint(shards.TensorReader):
    """One checkpoint. Tensors are read on access."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.step = step_of(path)

    def check(self) -> None:
        """Raise BadModelFile, naming every file that is missing or differs from its checksum."""
        manifest = Manifest.read(self.path)
        if manifest is None:
            raise BadModelFile(f"{self.path} is incomplete: it has no {MANIFEST}, which is written last")
        manifest.check(self.path)

    @cached_property
    def state(self) -> dict[str, Any]:
        """The ``state`` that was written with the tensors."""
        return read_json(resolve_inside(self.path, STATE))

    def fill(self, prefix: str, targets: Mapping[str, Tensor]) -> None:
        """Copy the tensors stored under ``prefix`` into ``targets``, each into its shard. The names must match."""
        stored = {name.removeprefix(prefix) for name in self.names(prefix)}
        faults = {"lacks": sorted(set(targets) - stored), "also has": sorted(stored - set(targets))}
        if reasons := [f"{fault} {', '.join(names)}" for fault, names in faults.items() if names]:
            raise BadModelFile(f"{self.path} does not fit the run: of {prefix} it {' and '.join(reasons)}")
        with torch.no_grad():
            for name, target in targets.items():
                shards.local(target).copy_(shards.local(self.tensor(prefix + name, like=target)))


class Checkpoints:
    """The checkpoints of a run. Every process of a group has an instance and calls the same methods in the same order.

    Each process writes the shards it holds, the main process everything else; all must share the directory.
    """

    def __init__(self, root: Path | str, keep: int, group: Group | None = None) -> None:
        self.root, self.keep = Path(root), keep
        self._group = Group() if group is None else group
        self._damaged: set[int] = set()
        if self._group.is_main:
            self._remove_leftovers()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint directory, oldest first; their files are not verified."""
        return sorted(step_of(path) for path in self.root.glob("step-*") if _STEP.fullmatch(path.name))

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of one step; BadModelFile if it is missing or damaged."""
        self._run_on_main(lambda: self._check_step(step))
        return Checkpoint(self._path(step))

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that matches its manifest, with a warning for each newer, damaged one.

        None if there are no checkpoints. If all are damaged, BadModelFile: starting over would lose the run's progress.
        """

        def newest() -> int | None:
            faults: list[BadModelFile | OSError] = []
            for step in reversed(self.steps()):
                try:
                    self._check_step(step)
                except (BadModelFile, OSError) as error:
                    self._damaged.add(step)
                    faults.append(error)
                else:
                    for fault in faults:
                        _log.warning("%s; the checkpoint before it is used", fault)
                    return step
            if faults:
                raise BadModelFile(f"{self.root} has no undamaged checkpoint: {faults[0]}")
            return None

        step = self._run_on_main(newest)
        return None if step is None else Checkpoint(self._path(step))

    def write(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step. On return it is complete and on disk; if it raises, nothing has changed.

        A tensor is named kind/name, such as model/w; each kind has a file.
        """
        target, state_text = self._path(step), to_json(dict(state))
        tied = self._group.broadcast_object(_tied_names(tensors))
        stored = {name: x for name, x in tensors.items() if name not in tied}
        try:
            self._write(target, stored, tied, state_text)
        except _WriteFailed as error:
            needed = sum(x.numel() * x.element_size() for x in stored.values()) + len(state_text)
            free = shutil.disk_usage(next(path for path in (self.root, *self.root.parents) if path.exists())).free
            raise RegardError(
                f"{target} could not be written ({error}): it needs {needed:,} bytes and {free:,} are free; "
                f"earlier checkpoints are unchanged"
            ) from None
        self._damaged.discard(step)
        return target

    def prune(self, best: int | None = None) -> None:
        """Remove all but the last ``keep`` and the best. Damaged ones neither count nor go."""
        if not self._group.is_main:
            return
        intact = [step for step in self.steps() if step not in self._damaged]
        for step in set(intact[: -self.keep]) - {best}:
            self.remove(step)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step, if there is one."""
        path = self._path(step)
        if not self._group.is_main or not path.exists():
            return
        # If the process dies before the directory is gone, the next one removes it as a leftover.
        renamed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.saving")
        os.rename(path, renamed)
        fsync(self.root)
        shutil.rmtree(renamed, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:06}"

    def _run_on_main(self, choose: Callable[[], int | None]) -> int | None:
        """The result of ``choose()`` on the main process, so that all agree and only one process verifies the files.

        A RegardError is raised on every process.
        """
        outcome: int | RegardError | None = None
        if self._group.is_main:
            try:
                outcome = choose()
            except RegardError as error:
                outcome = error
        outcome = self._group.broadcast_object(outcome)
        if isinstance(outcome, RegardError):
            raise outcome
        return outcome

    def _check_step(self, step: int) -> int:
        if step not in (steps := self.steps()):
            known = ", ".join(map(str, steps)) or "none"
            raise BadModelFile(f"{self.root} has no checkpoint of step {step}; it has {known}")
        Checkpoint(resolve_inside(self.root, self._path(step).name)).check()
        return step

    def _write(self, target: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str], state: bytes) -> None:
        """The main process opens a temporary directory, every process writes its part, the main process finishes.

        After each of the three, a failure on one process is raised on all.
        """
        main = self._group.is_main
        with ExitStack() as unfinished:

            def begin() -> Path:
                self._remove_leftovers()
                if not self.root.exists():
                    self.root.mkdir(parents=True)
                    fsync(self.root.parent)
                return unfinished.enter_context(replace_directory(target))

            def finish(parts: list[_Part]) -> None:
                stored = {}
                for name, x in tensors.items():
                    pieces = tuple(own[name] for own, _ in parts if name in own)
                    stored[name] = shards.StoredTensor(tuple(x.shape), x.dtype, pieces)
                entries = {file: entry for _, files in parts for file, entry in files.items()}
                for name, text in ((shards.INDEX, shards.Index(stored, tied).text()), (STATE, state)):
                    write_atomic(folder / name, text)
                    entries[name] = Entry(len(text), hashlib.sha256(text).hexdigest())
                Manifest(entries).write(folder)  # last, as the mark of a complete checkpoint
                unfinished.close()  # rename the folder to its final name

            folder = self._together(begin if main else lambda: target)[0]
            parts = self._together(lambda: self._write_part(folder, tensors))
            self._together(lambda: finish(parts) if main else None)

    def _together(self, action: Callable[[], _T]) -> list[_T]:
        """The results of ``action()`` of all processes, by rank; an OSError on one raises _WriteFailed on all."""
        outcome: _T | _WriteFailed
        try:
            outcome = action()
        except OSError as error:
            outcome = _WriteFailed(error.strerror or str(error))
        outcomes = self._group.gather_objects(outcome)
        for fault in outcomes:
            if isinstance(fault, _WriteFailed):
                raise fault
        return outcomes

    def _write_part(self, folder: Path, tensors: Mapping[str, Tensor]) -> _Part:
        """Write what this process stores: its pieces of sharded tensors and, on the main process, whole tensors."""
        rank, world = self._group.rank, self._group.world
        sharded = any(shards.is_sharded(x) for x in tensors.values())
        files: dict[str, dict[str, Tensor]] = {}
        pieces: dict[str, tuple[str, shards.TensorRegion]] = {}
        for name, x in tensors.items():
            region = shards.local_region(x)
            if region.numel and (shards.is_sharded(x) or rank == 0):
                file = f"shard-{rank:05}-of-{world:05}" if sharded else name.split("/")[0]
                pieces[name] = (f"{file}.safetensors", region)
                files.setdefault(f"{file}.safetensors", {})[name] = shards.local(x)
        return pieces, {file: shards.write_tensors(folder / file, held) for file, held in files.items()}

    def _remove_leftovers(self) -> None:
        """Remove the temporary directories of processes that were killed while writing."""
        for leftover in self.root.glob(".step-*.saving"):
            remove_abandoned(leftover)
        for previous in self.root.glob(".step-*.previous"):  # from file systems without an atomic exchange
            target = self.root / previous.name.removeprefix(".").removesuffix(".previous")
            if target.exists():
                shutil.rmtree(previous, ignore_errors=True)
            else:
                os.rename(previous, target)


class _WriteFailed(Exception):
    """The operating system's message for a write that failed on one process."""


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint directory."""
    return int(path.name.removeprefix("step-"))


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor with a NaN or an infinity in the shard of this process; None if all are finite."""
    floats = {name: shards.local(x) for name, x in tensors.items() if x.is_floating_point() and shards.local(x).numel()}
    # Combined on the device first: reading each result would synchronise the GPU once per tensor.
    finite = [torch.isfinite(x).all() for x in floats.values()]
    if not finite or bool(torch.stack([x.to(finite[0].device) for x in finite]).all()):
        return None
    return next(name for name, x in zip(floats, finite, strict=True) if not bool(x))


def _tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that share the memory of an earlier one, with the name of that one."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, x in tensors.items():
        local = shards.local(x)
        if local.numel():
            key = (local.device, local.data_ptr(), local.dtype, tuple(x.shape), local.stride())
            if first.setdefault(key, name) != name:
                tied[name] = first[key]
    return tied
