"""What compiling a model cost and brought on this machine, remembered from run to run in the user's cache directory.

A table of guesses stands in where nothing was measured yet. Losing the file loses nothing but those measurements.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import ModelConfig

__all__ = ["Compiling", "expected", "key_of", "remember", "table_path"]

_MOST_ENTRIES = 1000
# Guesses, used until a compiled run of the same model has been recorded here: what a small Transformer takes cold.
_SECONDS_PER_LAYER = {"cpu": 25.0 / 4, "cuda": 40.0 / 4}
_SPEED_UP = {"cpu": 1.25, "cuda": 1.6}
_LAYERS_AT_LEAST = 2  # what is compiled around the layers


@dataclass(frozen=True)
class Compiling:
    """Seconds until a compiled step runs, and how many times faster than an eager one it then is."""

    seconds: float
    speed_up: float
    measured: bool = False

    def gain(self, n_steps: int, eager_seconds: float) -> float:
        """Seconds saved, or lost, by compiling before so many steps."""
        return n_steps * eager_seconds * (1 - 1 / self.speed_up) - self.seconds


def table_path() -> Path:
    """$XDG_CACHE_HOME/regard/speed.json, else ~/.cache/regard/speed.json."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says to pass over a path that is not absolute.
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "regard" / "speed.json"


def key_of(config: ModelConfig | None, n_numbers: int, precision: str, device: torch.device) -> str:
    """What a measurement holds for: device, torch, threads, model, precision, and a batch's size to a power of 2."""
    fields = "" if config is None else config.model_dump_json()
    return " | ".join(
        [
            _device_name(device),
            f"torch {torch.__version__}",
            f"{torch.get_num_threads()} threads",
            f"model {hashlib.sha256(fields.encode()).hexdigest()[:16]}",
            precision,
            f"batch 2^{max(n_numbers, 1).bit_length()}",
        ]
    )


def expected(key: str, module: nn.Module, device: torch.device) -> Compiling:
    """What was measured under this key, else a guess from the number of layers."""
    found = _read().get(key)
    if found is not None:
        with suppress(TypeError, ValueError, KeyError):
            seconds, speed_up = float(found["seconds"]), float(found["speed_up"])
            if seconds >= 0 and speed_up > 0:
                return Compiling(seconds, speed_up, measured=True)
    kind = device.type if device.type in _SPEED_UP else "cpu"
    return Compiling(_SECONDS_PER_LAYER[kind] * max(_n_layers(module), _LAYERS_AT_LEAST), _SPEED_UP[kind])


def remember(key: str, seconds: float, eager_ms: float, compiled_ms: float) -> None:
    """Keep a measurement. A cache that cannot be written is no reason to stop a run."""
    if not (seconds >= 0 and eager_ms > 0 and compiled_ms > 0):
        raise ValueError(f"seconds={seconds}, eager_ms={eager_ms}, compiled_ms={compiled_ms} must be positive")
    before = _read().get(key, {})
    # With inductor's own cache a second compilation takes a moment; the first one's cost is what has to pay back.
    with suppress(TypeError, ValueError):
        seconds = max(seconds, float(before.get("seconds", 0.0)))
    entry = {**asdict(Compiling(seconds, eager_ms / compiled_ms)), "eager_ms": eager_ms, "compiled_ms": compiled_ms}
    table = {**{name: old for name, old in _read().items() if name != key}, key: entry}
    for name in list(table)[: max(0, len(table) - _MOST_ENTRIES)]:  # the oldest
        del table[name]
    with suppress(OSError):
        _write(table_path(), table)


def _read() -> dict[str, Any]:
    try:
        found = json.loads(table_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def _write(path: Path, table: dict[str, Any]) -> None:
    """Beside it, then in its place: whoever reads at the same time reads a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".speed-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _n_layers(module: nn.Module) -> int:
    """Layers that are traced one by one: the lists of modules, each as long as it is."""
    return sum(len(part) for part in module.modules() if isinstance(part, nn.ModuleList))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{device.type} {line.partition(':')[2].strip()}"
    return f"{device.type} {platform.processor() or platform.machine()}"
