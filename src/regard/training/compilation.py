"""The choice of precision and compilation by device and model size, and a wrapper for compiled modules."""

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

# The choice follows from these constants and is never timed, so that a command and a seed always give the same weights.
_BF16_FLOPS = 1e10  # operations per pass from which a CPU's bf16 matrix unit outweighs the cost of conversions
SMALL_FLOPS = 2e13  # operations per pass below which a GPU waits for the host, or has too few rows
_MARGIN = 1.2  # the estimated gain of compiling must exceed its cost by this factor


@dataclass(frozen=True)
class _Speed:
    """Estimates for a small Transformer on a type of device, used by ``train.compile=auto``."""

    flops: float  # operations per second of an eager pass
    seconds_per_layer: float  # overhead of Python and kernel launches in an eager pass
    compile_seconds_per_layer: float
    speed_up: float  # of a compiled pass over an eager one


# cuda is an H200, where the twelve layers of GPT-2 compile in half a minute on sixteen cores.
_SPEEDS = {"cpu": _Speed(5e10, 3e-3, 25.0 / 4, 1.25), "cuda": _Speed(3e14, 1.5e-3, 3.0, 1.4)}


@dataclass(frozen=True)
class Choice:
    """The precision, whether to compile, and the reason in one sentence."""

    precision: PrecisionName
    compile: bool
    reason: str


def choose(objective: nn.Module, flops: float, train: TrainConfig, device: torch.device) -> Choice:
    """Choose precision and compilation of a run by the device and ``flops``, the operations of one pass."""
    if train.compile == "on" and (trouble := compiler_trouble(device.type)) is not None:
        raise RegardError(f"train.compile=on is not possible here: {trouble}; train.compile=auto trains without it")
    precision, why = _choose_precision(flops, train, device)
    compiles, why_compile = _choose_compilation(objective, flops, train, device.type)
    return Choice(precision, compiles, f"{why}; {why_compile}")


def _choose_precision(flops: float, train: TrainConfig, device: torch.device) -> tuple[PrecisionName, str]:
    if train.precision != "auto":
        return train.precision, f"{train.precision} as requested"
    if device.type == "cuda":
        if "bf16" in supported_precisions(device):
            return "bf16", "bf16: supported by this GPU"
        return "fp32", "fp32: this GPU does not support bf16"
    if device.type != "cpu" or not has_bf16_matrix_unit():
        return "fp32", f"fp32: this {device.type} has no matrix unit for bf16"
    if flops < _BF16_FLOPS:
        return "fp32", f"fp32: a pass of {flops / 1e9:.1f} GFLOP is too small for bf16"
    return "bf16", f"bf16: this cpu has a matrix unit for it, and passes of {flops / 1e9:.1f} GFLOP are large enough"


def _choose_compilation(objective: nn.Module, flops: float, train: TrainConfig, device: str) -> tuple[bool, str]:
    if train.compile != "auto":
        return train.compile == "on", f"compile {train.compile} as requested"
    if device not in _SPEEDS:
        return False, f"not compiled on {device}"
    if (trouble := compiler_trouble(device)) is not None:
        return False, f"not compiled: {trouble}"
    speed, passes = _SPEEDS[device], train.steps * train.accumulate
    # Layers are traced one by one. A model without a list of layers counts as two.
    n_layers = max(2, sum(len(part) for part in objective.modules() if isinstance(part, nn.ModuleList)))
    eager = passes * (n_layers * speed.seconds_per_layer + flops / speed.flops)
    cost, gain = n_layers * speed.compile_seconds_per_layer, eager * (1 - 1 / speed.speed_up)
    pays = gain > _MARGIN * cost
    terms = f"expected: {cost:.0f} s to compile, {gain:.0f} s saved in {passes:,} passes of {flops / 1e9:.3g} GFLOP"
    return pays, f"{'compiled' if pays else 'not compiled, it would not pay off'} ({terms})"


@contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """A context in training mode; buffers, modes and all random generators are restored afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
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
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class Compiled(nn.Module):
    """A module that runs compiled, or eagerly after the first failure; ``note`` then says what failed.

    ``dynamic``: batches differ in shape; ``options`` are those of torch.compile. ``inner`` itself stays eager.
    torch compiles in the first forward and backward pass. ``prepare`` therefore runs both once, without side effects;
    ``seconds`` is the time that took.
    """

    def __init__(self, inner: nn.Module, dynamic: bool = False, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.note: str | None = None
        self.seconds: float | None = None
        # A tuple hides it from nn.Module, which would list its parameters under a second name. Empty after a failure.
        self._compiled: tuple[Any, ...] = (torch.compile(inner, dynamic=True if dynamic else None, options=options),)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments, unless it has been done.

        The first arguments influence the code compiled for later ones, so a resumed run must prepare with the same.
        """
        if not self._compiled or self.seconds is not None:
            return
        started = time.perf_counter()
        parameters = [p for p in self.inner.parameters() if p.requires_grad]
        sharded = any(hasattr(p, "to_local") for p in parameters)  # the hooks of FSDP need a real step
        if torch.is_grad_enabled() and parameters and not sharded:
            try:
                with preserve_state(self.inner):
                    loss = self._compiled[0](*args, **kwargs)
                    if isinstance(loss, Tensor) and loss.requires_grad:
                        torch.autograd.grad(loss.float().sum(), parameters, allow_unused=True)
            except Exception as error:
                self._give_up(error)
        self.seconds = time.perf_counter() - started

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.prepare(*args, **kwargs)
        if self._compiled:
            try:
                return self._compiled[0](*args, **kwargs)
            except Exception as error:  # a new shape may recompile and fail
                result = self.inner(*args, **kwargs)  # if the arguments are wrong, this raises the module's own error
                self._give_up(error)
                return result
        return self.inner(*args, **kwargs)

    def _give_up(self, error: Exception) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        self.note = f"torch.compile failed, continuing without it: {' '.join(lines[:2])[:300]}"
        self._compiled = ()


def compiler_options(flops: float, device: torch.device) -> dict[str, Any] | None:
    """Options of torch.compile for passes of ``flops`` operations.

    Small passes on a GPU compute the gradients of a norm's input and weights in two kernels; Inductor's combined kernel
    leaves most of the GPU idle there.
    """
    if device.type != "cuda" or flops >= SMALL_FLOPS:
        return None
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else None


def compiler_trouble(device_type: str) -> str | None:
    """Why torch.compile cannot work here, in a few words; None if it can."""
    if device_type == "cuda":
        if find_spec("triton") is None:
            return "triton is not installed"
        cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
        return None if cc is not None else "there is no C compiler, which triton needs"
    return _cpp_trouble(os.environ.get("CXX"), os.environ.get("PATH"))


@functools.cache
def _cpp_trouble(cxx: str | None, path: str | None) -> str | None:
    """Why torch cannot compile for a CPU: it needs a C++ compiler that finds Python's headers. None if it can."""
    name = cxx or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    compiler = shutil.which(name, path=path)
    if compiler is None:
        return f"there is no C++ compiler ({name})"
    if sys.platform == "win32":
        return None
    include = sysconfig.get_path("include")
    command = [compiler, "-std=c++17", "-x", "c++", "-fsyntax-only", f"-I{include}", "-"]
    try:
        process = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C++ compiler {name} does not run: {error}"
    if process.returncode == 0:
        return None
    fault = next((line for line in process.stderr.splitlines() if "error" in line), "it fails on an empty program")
    return f"the C++ compiler {name} does not work: {fault.strip()[:200]}"
