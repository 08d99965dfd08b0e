"""Precision and compilation of a run, chosen by the device and the size of the work; and modules that run compiled."""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import TrainConfig
from ..errors import RegardError
from .precision import PrecisionName, has_bf16_matrix_unit, supported_precisions

# What decides is a table, never a clock: the same command and seed give the same weights on a busy machine too.
_BF16_FLOPS = 1e10  # operations of a pass from which a CPU's bf16 matrix unit makes up for the conversions
_MARGIN = 1.2  # compiling must bring this many times what it costs: estimates are estimates


@dataclass(frozen=True)
class _Speed:
    """What a small Transformer takes on a kind of device: estimates, for ``train.compile=auto``."""

    flops: float  # operations a second of an eager pass
    seconds_per_layer: float  # of an eager pass, whatever its size: Python and kernel launches
    compile_seconds_per_layer: float
    speed_up: float  # of a compiled pass


# Of a GPU: an H200, where the twelve layers of GPT-2 compile in half a minute on sixteen cores.
_SPEEDS = {"cpu": _Speed(5e10, 3e-3, 25.0 / 4, 1.25), "cuda": _Speed(3e14, 1.5e-3, 3.0, 1.4)}


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why in one sentence."""

    precision: PrecisionName
    compile: bool
    reason: str


def choose(objective: nn.Module, flops: float, train: TrainConfig, device: torch.device) -> Choice:
    """Precision and compilation of a run, from the device and the size; ``flops``: operations of one pass."""
    if train.compile == "on" and (trouble := compiler_trouble(device.type)) is not None:
        raise RegardError(f"train.compile=on cannot be done here: {trouble}; train.compile=auto goes on without")
    precision, why = _choose_precision(flops, train, device)
    compiles, why_compile = _choose_compilation(objective, flops, train, device.type)
    return Choice(precision, compiles, f"{why}; {why_compile}")


def _choose_precision(flops: float, train: TrainConfig, device: torch.device) -> tuple[PrecisionName, str]:
    if train.precision != "auto":
        return train.precision, f"{train.precision} as asked"
    if device.type == "cuda":
        has_bf16 = "bf16" in supported_precisions(device)
        return ("bf16", "bf16, which this GPU computes") if has_bf16 else ("fp32", "fp32: this GPU has no bf16")
    if device.type != "cpu" or not has_bf16_matrix_unit():
        return "fp32", f"fp32: this {device.type} has no matrix unit for bf16"
    if flops < _BF16_FLOPS:
        return "fp32", f"fp32: a pass of {flops / 1e9:.1f} GFLOP is too small for bf16"
    return "bf16", f"bf16, for which this cpu has a matrix unit, in passes of {flops / 1e9:.1f} GFLOP"


def _choose_compilation(objective: nn.Module, flops: float, train: TrainConfig, device: str) -> tuple[bool, str]:
    if train.compile != "auto":
        return train.compile == "on", f"compile {train.compile} as asked"
    if device not in _SPEEDS:
        return False, f"not compiled on {device}"
    if (trouble := compiler_trouble(device)) is not None:
        return False, f"not compiled: {trouble}"
    speed, passes = _SPEEDS[device], train.steps * train.accumulate
    # Layers are traced one by one; what is around them counts for two.
    n_layers = max(2, sum(len(part) for part in objective.modules() if isinstance(part, nn.ModuleList)))
    eager = passes * (n_layers * speed.seconds_per_layer + flops / speed.flops)
    cost, gain = n_layers * speed.compile_seconds_per_layer, eager * (1 - 1 / speed.speed_up)
    pays = gain > _MARGIN * cost
    terms = f"expected: {cost:.0f} s to compile, {gain:.0f} s saved in {passes:,} passes of {flops / 1e9:.3g} GFLOP"
    return pays, f"{'compiled' if pays else 'not compiled, it would not pay back'} ({terms})"


@contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """In training mode inside; afterwards buffers, modes and all random generators are restored."""
    python, of_numpy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    modes = {part: part.training for part in module.modules()}
    buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
    module.train()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        for part, training in modes.items():
            part.training = training
        with torch.no_grad():
            for name, x in module.named_buffers():
                if name in buffers and x.shape == buffers[name].shape:
                    x.copy_(buffers[name])
        random.setstate(python)
        np.random.set_state(of_numpy)


class Compiled(nn.Module):
    """A module that runs compiled, or eagerly from the first failure on: ``note`` then says what failed.

    ``dynamic`` where batches differ in shape. ``inner`` itself stays eager.
    torch compiles at the first call, and some of it in the backward pass. The first call is therefore tried out, both
    ways, with nothing left behind; ``seconds`` is what that took.
    """

    def __init__(self, inner: nn.Module, dynamic: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.note: str | None = None
        self.seconds: float | None = None
        # In a tuple: registered, its parameters would appear under a second name.
        self._fast: tuple[Any, ...] = (torch.compile(inner, dynamic=True if dynamic else None),)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments, unless that was done. What is compiled first shapes the code for all others, so
        a run that goes on has to begin with what it began with."""
        if not self._fast or self.seconds is not None:
            return
        started = time.perf_counter()
        parameters = [p for p in self.inner.parameters() if p.requires_grad]
        sharded = any(hasattr(p, "to_local") for p in parameters)  # FSDP gathers in hooks that belong to a real step
        if torch.is_grad_enabled() and parameters and not sharded:
            try:
                with preserve_state(self.inner):
                    loss = self._fast[0](*args, **kwargs)
                    if isinstance(loss, Tensor) and loss.requires_grad:
                        torch.autograd.grad(loss.float().sum(), parameters, allow_unused=True)
            except Exception as error:
                self._give_up(error)
        self.seconds = time.perf_counter() - started

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.prepare(*args, **kwargs)
        if self._fast:
            try:
                return self._fast[0](*args, **kwargs)
            except Exception as error:  # a new shape is compiled anew, and may fail anew
                result = self.inner(*args, **kwargs)  # what is wrong with the arguments is said by the module itself
                self._give_up(error)
                return result
        return self.inner(*args, **kwargs)

    def _give_up(self, error: Exception) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        self.note = f"torch.compile failed, going on without it: {' '.join(lines[:2])[:300]}"
        self._fast = ()


def compiler_trouble(device_type: str) -> str | None:
    """Why torch.compile cannot work here, in a few words; None where it can."""
    if device_type == "cuda":
        if find_spec("triton") is None:
            return "triton is not installed"
        cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
        return None if cc is not None else "there is no C compiler, which triton needs"
    return _cpp_trouble(os.environ.get("CXX"), os.environ.get("PATH"))


@functools.cache
def _cpp_trouble(cxx: str | None, path: str | None) -> str | None:
    """What torch's code for CPUs takes: a C++ compiler that finds Python's headers. Tried with an empty program."""
    name = cxx or ("clang++" if sys.platform == "darwin" else "cl" if sys.platform == "win32" else "g++")
    found = shutil.which(name, path=path)
    if found is None:
        return f"there is no C++ compiler ({name})"
    if sys.platform == "win32":
        return None
    include = sysconfig.get_path("include")
    command = [found, "-std=c++17", "-x", "c++", "-fsyntax-only", f"-I{include}", "-"]
    try:
        done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C++ compiler {name} does not run: {error}"
    if done.returncode == 0:
        return None
    says = next((line for line in done.stderr.splitlines() if "error" in line), "it fails on an empty program")
    return f"the C++ compiler {name} does not work: {says.strip()[:200]}"
