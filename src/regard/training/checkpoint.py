"""Checkpoints: a directory a step, whole or not there, checked by SHA-256 before it is used.

RUN/checkpoints/step-000200/   model.safetensors, optimiser.safetensors … by the first part of the tensors' names
                               (of a sharded run shard-00000-of-00002.safetensors … by process), index.json,
                               state.json, manifest.json
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import BadModelFile, RegardError
from ..foundation.checks import check_positive
from ..foundation.files import fsync, remove_abandoned, replace_directory, resolve_inside, write_atomic
from ..foundation.jsonio import parse_json, to_json
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import Entry, Manifest
from . import shards
from .parallel import Group

STATE = "state.json"
_STEP = re.compile(r"step-(\d{6,})")
_NAME = re.compile(r"([A-Za-z0-9_-]+)/.+", re.DOTALL)
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Part = tuple[dict[str, tuple[str, shards.TensorRegion]], dict[str, Entry]]


class Checkpoint(shards.TensorReader):
    """One checkpoint. Tensors are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.step = step_of(path)

    def check(self) -> None:
        """Raise BadModelFile, naming every file that is missing or is not the one that was written."""
        manifest = Manifest.read(self.path)
        if manifest is None:
            raise BadModelFile(f"{self.path} is not whole: it has no {MANIFEST}, which is written last")
        manifest.check(self.path)

    @cached_property
    def state(self) -> dict[str, Any]:
        """What was given beside the tensors."""
        path = resolve_inside(self.path, STATE)
        try:
            return parse_json(path.read_bytes(), path)
        except OSError as error:
            raise BadModelFile(f"{path} cannot be read: {error.strerror}") from None

    def fill(self, prefix: str, targets: Mapping[str, Tensor]) -> None:
        """Write the numbers of those under a prefix into tensors there are, each into its shard. All must be there."""
        there = {name.removeprefix(prefix) for name in self.names(prefix)}
        faults = {"lacks": sorted(set(targets) - there), "also has": sorted(there - set(targets))}
        if reasons := [f"{fault} {', '.join(names)}" for fault, names in faults.items() if names]:
            raise BadModelFile(f"{self.path} does not fit the run: of {prefix} it {' and '.join(reasons)}")
        with torch.no_grad():
            for name, target in targets.items():
                shards.local(target).copy_(shards.local(self.tensor(prefix + name, like=target)))


class Checkpoints:
    """The checkpoints of a run. Every process of a group has one, and calls the same methods in the same order.

    With a group, tensors that are sharded are written by the processes that hold them, all others by the main one; the
    directory must be one that all of them see.
    """

    def __init__(self, root: Path | str, keep: int, group: Group | None = None) -> None:
        check_positive(keep=keep)
        self.root, self.keep = Path(root), keep
        self._group = Group() if group is None else group
        self._damaged: set[int] = set()
        if self._group.is_main:
            self._remove_leftovers()

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, oldest first; not yet checked."""
        return sorted(step_of(path) for path in self.root.glob("step-*") if _STEP.fullmatch(path.name))

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of one step; BadModelFile where there is none or it is damaged."""
        self._choose_on_main(lambda: self._check_step(step))
        return Checkpoint(self._path(step))

    def latest(self) -> Checkpoint | None:
        """The newest that is what its manifest says; damaged ones after it are told of in the log. None where there is
        none at all; where all are damaged, BadModelFile: a run that went on from nothing would lose what was done."""

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
                        _log.warning("%s; the checkpoint before it is taken", fault)
                    return step
            if faults:
                raise BadModelFile(f"{self.root} has no checkpoint that is whole: {faults[0]}")
            return None

        step = self._choose_on_main(newest)
        return None if step is None else Checkpoint(self._path(step))

    def write(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Store a step. When this returns it is on disk, whole; when it raises, the directory is as it was."""
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        if fault := _not_json(dict(state), "state"):
            raise ValueError(fault)
        for name, x in tensors.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"a tensor is named {name!r}; a kind, '/' and a name belong there, such as model/w")
            if x.is_meta:
                raise ValueError(f"{name} is on the meta device: it has no numbers to store")
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
                f"the checkpoints written before it are as they were"
            ) from None
        self._damaged.discard(step)
        return target

    def prune(self, best: int | None = None, protect: Collection[int] = ()) -> None:
        """Remove all but the last ``keep``, the best, and the protected. A damaged one counts for nothing and stays."""
        if not self._group.is_main:
            return
        there = [step for step in self.steps() if step not in self._damaged]
        for step in set(there[: -self.keep]) - {best, *protect}:
            self.remove(step)

    def remove(self, step: int) -> None:
        """Remove one; where there is none, nothing."""
        path = self._path(step)
        if not self._group.is_main or not path.exists():
            return
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.saving")  # a leftover, if this is the end
        os.rename(path, aside)
        fsync(self.root)
        shutil.rmtree(aside, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step:06}"

    def _choose_on_main(self, choose: Callable[[], int | None]) -> int | None:
        """What the main process found, so that all read the same, and only one reads everything to check it."""
        found: int | RegardError | None = None
        if self._group.is_main:
            try:
                found = choose()
            except RegardError as error:
                found = error
        found = self._group.broadcast_object(found)
        if isinstance(found, RegardError):
            raise found
        return found

    def _check_step(self, step: int) -> int:
        if step not in (steps := self.steps()):
            known = ", ".join(map(str, steps)) or "none"
            raise BadModelFile(f"{self.root} has no checkpoint of step {step}; it has {known}")
        Checkpoint(resolve_inside(self.root, self._path(step).name)).check()
        return step

    def _write(self, target: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str], state: bytes) -> None:
        """In three moves, after each of which all know of a fault of any; the folder is the main process'."""
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
                Manifest(entries).write(folder)  # the last thing written
                unfinished.close()  # the folder takes its place

            folder = self._together(begin if main else lambda: target)[0]
            parts = self._together(lambda: self._write_part(folder, tensors))
            self._together(lambda: finish(parts) if main else None)

    def _together(self, action: Callable[[], _T]) -> list[_T]:
        """What the action gives on each process, by rank; where it failed on one it raises on all."""
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
        """What falls to this process: its pieces of sharded tensors; all that is whole, on the main one."""
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
        """What killed writers left."""
        for leftover in self.root.glob(".step-*.saving"):
            remove_abandoned(leftover)
        for previous in self.root.glob(".step-*.previous"):  # where a directory cannot be exchanged in one step
            target = self.root / previous.name.removeprefix(".").removesuffix(".previous")
            if target.exists():
                shutil.rmtree(previous, ignore_errors=True)
            else:
                os.rename(previous, target)


class _WriteFailed(Exception):
    """What the system said on some process."""


def step_of(path: Path) -> int:
    """The step a checkpoint's directory is named after."""
    found = _STEP.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path} is not named as a checkpoint: step- and at least six digits")
    return int(found[1])


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor that holds a NaN or an infinity, of shards in what this process holds; None: all finite."""
    floats = {name: shards.local(x) for name, x in tensors.items() if x.is_floating_point() and shards.local(x).numel()}
    # One answer for all of them: to ask each would have the GPU wait as often.
    finite = [torch.isfinite(x).all() for x in floats.values()]
    if not finite or bool(torch.stack([x.to(finite[0].device) for x in finite]).all()):
        return None
    return next(name for name, x in zip(floats, finite, strict=True) if not bool(x))


def _tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that are another one's very numbers, and that one's name."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, x in tensors.items():
        here = shards.local(x)
        if here.numel():
            key = (here.device, here.data_ptr(), here.dtype, tuple(x.shape), here.stride())
            if first.setdefault(key, name) != name:
                tied[name] = first[key]
    return tied


def _not_json(value: object, where: str) -> str | None:
    """What in a value would not come back from JSON as it is, in a sentence; None: all would."""
    match value:
        case None | bool() | int() | str():
            return None
        case float():
            return None if math.isfinite(value) else f"{where} is {value}: nothing that is not finite is stored"
        case list() | tuple():
            faults = (_not_json(x, f"{where}[{i}]") for i, x in enumerate(value))
        case dict():
            if odd := [key for key in value if not isinstance(key, str)]:
                return f"{where} has the key {odd[0]!r}, of {type(odd[0]).__name__}; JSON has only text there"
            faults = (_not_json(x, f"{where}[{key!r}]") for key, x in value.items())
        case _:
            return f"{where} is of {type(value).__name__}, which is not stored: numbers, text, lists and dicts are"
    return next((fault for fault in faults if fault), None)
