"""Helpers of the benchmarks, some of which tests use too: memory, times, verdicts, and a short training run."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from regard.config import ModelConfig, TrainConfig
from regard.experiments.bench_attention import Setup, measure_contender
from regard.experiments.sweep_runner import LocalRunner
from regard.models import build
from regard.training.loss import Batch, Objective
from regard.training.optimiser import build_optimiser, cosine
from regard.training.precision import Precision

# ------------------------------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of all live tensors, including those in ``known``, which exist before it.

    The counterpart of ``torch.cuda.max_memory_allocated`` for any device, including meta.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, Any] = {}
        for x in known:
            self._add(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                self._add(x)
        return result

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._storages:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def remove(_: Any) -> None:
            self.now -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, remove)


SavedTensor = tuple[tuple[int, ...], str, int]  # shape, dtype and bytes of a tensor that autograd saves


def saved_bytes(run: Callable[[], Any], known: Iterable[Tensor]) -> tuple[int, list[SavedTensor]]:
    """The tensors that autograd saves in a forward pass, without those in ``known``: their total bytes, and each."""
    skip = {x.untyped_storage()._cdata for x in known}
    saved: dict[int, SavedTensor] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in skip and storage._cdata not in saved:
            saved[storage._cdata] = (tuple(x.shape), str(x.dtype).removeprefix("torch."), storage.nbytes())
            alive.append(x.detach())  # so that no later storage gets its address

    def unpack(_: None) -> Tensor:
        raise RuntimeError("this forward pass was only measured; it has no backward pass")

    # ``pack`` returns nothing: an output that the graph held would hold the graph in turn, and neither would be freed.
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        run()
    return sum(size for *_, size in saved.values()), list(saved.values())


def resident_bytes(field: str) -> int:
    """VmRSS, the resident memory of this process, or VmHWM, its peak, in bytes (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def reset_peak_resident() -> int:
    """Reset VmHWM to the resident memory now, which is returned (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resident_bytes("VmRSS")


# ------------------------------------------------------------------------------------- times


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of several calls; on a GPU, until its work is done."""
    times = []
    for _ in range(repeats):
        start = synchronised_time()
        run()
        times.append(synchronised_time() - start)
    return statistics.median(times)


def synchronised_time() -> float:
    """The time in seconds, after all work of the GPU if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def gpu_seconds(run: Callable[[], object]) -> float:
    """The time of one call on the GPU, between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def best_measurements(
    jobs: Mapping[str, tuple[str, Setup]], rounds: int, enough_s: float
) -> dict[str, dict[str, float]]:
    """The least seconds and the largest peak_bytes of each job (contender, setup), each run in its own process.

    The jobs take turns, so that other programs on the machine slow all of them down alike.
    """
    best: dict[str, dict[str, float]] = {}
    with LocalRunner() as runner:
        for n in range(rounds):
            for name, job in jobs.items():
                print(f"round {n + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                measured = runner.submit(measure_contender, (*job, enough_s)).result()
                before = best.get(name, measured)
                seconds, peak = (f(before[key], measured[key]) for f, key in ((min, "seconds"), (max, "peak_bytes")))
                best[name] = {**measured, "seconds": seconds, "peak_bytes": peak}
    return best


def crossing_length(lengths: Sequence[float], first: Sequence[float], second: Sequence[float]) -> float | None:
    """The length from which ``first`` stays below ``second``, interpolated linearly in logarithms; None if it does not
    end below."""
    gaps = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    if not gaps or gaps[-1] >= 0:
        return None
    above = [n for n, gap in enumerate(gaps) if gap >= 0]
    if not above:
        return lengths[0]
    n = above[-1]
    share = gaps[n] / (gaps[n] - gaps[n + 1])
    return math.exp(math.log(lengths[n]) + share * math.log(lengths[n + 1] / lengths[n]))


# ------------------------------------------------------------------------------------- verdicts


def print_verdict(passed: bool, sentence: str, file: Any = None) -> bool:
    """Print PASS or FAIL before a sentence about a bar, and return whether it passed."""
    print(f"{'PASS' if passed else 'FAIL'}  {sentence}", file=file, flush=True)
    return passed


def print_bar(what: str, value: float, bar: float, unit: str, *, at_least: bool = False) -> bool:
    """Print a value next to its bar, an upper or a lower one, and return whether it passed."""
    passed = value >= bar if at_least else value <= bar
    print(f"{what:60}{value:>9.4g} {unit:4}{bar:>8.4g} {unit:4} {'PASS' if passed else 'FAIL'}", flush=True)
    return passed


# ------------------------------------------------------------------------------------- training


def train_on_tokens(
    name: str, config: ModelConfig, tokens: Tensor, valid: Tensor, *, seed: int, n_steps: int, lr: float, rows: int
) -> float:
    """Train a decoder on rows of ``config.max_len`` tokens drawn from a text; returns its held-out loss in nats."""
    torch.manual_seed(seed)
    device, length = tokens.device, config.max_len
    objective = Objective(build(config, device=str(device))).train()
    print(f"{name}: {objective.model.n_parameters:,} parameters, {len(tokens):,} tokens", file=sys.stderr, flush=True)
    optimiser = build_optimiser(objective, TrainConfig(optimiser="adamw", lr=lr, weight_decay=0.1, betas=(0.9, 0.95)))
    schedule, generator = cosine(n_steps // 20, n_steps, 0.05), torch.Generator().manual_seed(seed)
    precision, columns = Precision("bf16" if device.type == "cuda" else "fp32", device.type), torch.arange(length + 1)
    valid_loss = math.inf
    for step in range(1, n_steps + 1):
        starts = torch.randint(len(tokens) - length - 1, (rows, 1), generator=generator)
        batch = tokens[(starts + columns).to(device)]
        with precision.forward():
            loss = objective(Batch((batch[:, :-1],), batch[:, 1:], n_counted=rows * length)) / (rows * length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimiser.set_lr(schedule(step))
        optimiser.step()
        optimiser.zero_grad()
        if step % 100 == 0 or step == n_steps:
            valid_loss = _mean_loss(objective, valid, length, precision)
            router = {key: round(float(x), 2) for key, x in objective.router_numbers.items()}
            line = {"model": name, "seed": seed, "step": step, "valid": round(valid_loss, 4), **router}
            print(json.dumps(line), file=sys.stderr, flush=True)
    return valid_loss


@torch.no_grad()
def _mean_loss(objective: Objective, tokens: Tensor, length: int, precision: Precision) -> float:
    """The mean loss over consecutive rows of a text."""
    objective.eval()
    n = (len(tokens) - 1) // length * length
    total = 0.0
    for x, y in zip(tokens[:n].view(-1, length).split(64), tokens[1 : n + 1].view(-1, length).split(64), strict=True):
        with precision.forward():
            total += float(objective(Batch((x,), y, n_counted=y.numel())))
    objective.train()
    return total / n
