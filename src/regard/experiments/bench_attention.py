"""``regard bench attention``: time and memory of every attention mechanism against length, and how fast they grow.

Each measurement, one mechanism at one length, runs in a fresh process. A measurement predicted to exceed the limits of
memory or time is skipped, and the table gives the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attend
from ..attention.biases import T5Bias
from ..attention.masks import Mask, bigbird, causal, strided, window
from ..attention.mechanisms import Sinks
from ..config import Architecture, ModelConfig
from ..config.mixers import MixingWork, all_mixers, get_mixer, register
from ..foundation.checks import check_positive, did_you_mean
from ..foundation.files import write_atomic
from ..models.components import mechanism, mixing
from .benchmarking import available_memory, fit_exponent, format_table, measure
from .sweep_runner import LocalRunner, Runner

MOST_BYTES = 4 << 30  # limit of a measurement's memory; also at most half of the available memory
ENOUGH_S = 0.3  # runs are repeated for this many seconds, and the best time counts
PILOT = 256  # if no shorter length has been measured, this one predicts the time of the first

# ------------------------------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Setup:
    """The shape of a measurement, with batch 1, in fp32 on the CPU."""

    length: int
    n_heads: int = 8
    d_head: int = 64
    causal: bool = True
    backward: bool = False

    def heads(self) -> list[Tensor]:
        """q, k and v, (1, H, T, D)."""
        shape = (1, self.n_heads, self.length, self.d_head)
        return [torch.randn(shape, requires_grad=self.backward) for _ in range(3)]

    @property
    def mask(self) -> Mask | None:
        return causal() if self.causal else None


Forward = Callable[[], Tensor]
Build = Callable[[Setup], tuple[Forward, list[Tensor]]]


@dataclass(frozen=True)
class Contender:
    """A mechanism on a backend. ``build`` returns its forward pass and the tensors that get gradients."""

    name: str
    title: str
    family: str  # exact, sparse or approximate
    build: Build
    grows: int = 2  # time grows like length to this power; predicts runs that would take too long
    matrices: tuple[float, float] = (0, 0)  # peak memory per head in units of T × T: forward, forward and backward
    rows: tuple[float, float] = (4, 12)  # further peak memory per head in units of T × D
    most_seconds: float = 10.0  # a run predicted to take longer is skipped
    causal: bool | None = None  # True: always, False: never, None: as the setup says

    def note(self, setup: Setup) -> str | None:
        """How the measurement differs from the setup; None if it does not."""
        if self.causal is None or self.causal == setup.causal:
            return None
        if self.causal:
            return "is causal by definition"
        return "mixes all positions and cannot be causal; measured without a mask"

    def predict_bytes(self, setup: Setup) -> int:
        """The approximate peak memory of a run, including its inputs."""
        matrices, rows = self.matrices[setup.backward], self.rows[setup.backward] + 3
        return int(4 * setup.n_heads * setup.length * (matrices * setup.length + rows * setup.d_head))


def _attention_run(
    setup: Setup, backend: str, mask: Mask | None, module: nn.Module | None = None, **options: Any
) -> tuple[Forward, list[Tensor]]:
    q, k, v = setup.heads()
    parameters = [] if module is None else list(module.parameters())
    return lambda: attend(q, k, v, backend=backend, mask=mask, **options).output, [q, k, v, *parameters]


def _attention(backend: str, pattern: str = "") -> Build:
    """Builds the scaled dot product on a backend, causal or not, or restricted to a sparse pattern."""
    return lambda setup: _attention_run(setup, backend, sparse_mask(pattern, setup.causal) if pattern else setup.mask)


def _t5_run(setup: Setup) -> tuple[Forward, list[Tensor]]:
    bias = T5Bias(setup.n_heads, bidirectional=not setup.causal)
    return _attention_run(setup, "tiled", setup.mask, bias, bias=bias)


def _sinks_run(setup: Setup) -> tuple[Forward, list[Tensor]]:
    sinks = Sinks(setup.n_heads)
    return _attention_run(setup, "sdpa", setup.mask, sinks, sinks=sinks.logits)


def sparse_mask(name: str, is_causal: bool) -> Mask:
    """A sparse pattern of this benchmark, with about 256 keys per query."""
    if name == "window":
        return window(256) if is_causal else window(129, ahead=127)
    if name == "strided":
        return strided(128)
    pattern = bigbird(size=64, global_count=64, percent=2.0)
    return pattern & causal() if is_causal else pattern


def _mixer_run(name: str, backend: str = "auto") -> Build:
    """Builds a registered mechanism as a model's layer does."""

    def build(setup: Setup) -> tuple[Forward, list[Tensor]]:
        entry, width = get_mixer(name), setup.n_heads * setup.d_head
        sizes: dict[str, Any] = {"d_model": width, "n_heads": setup.n_heads, "max_len": setup.length}
        kind: Architecture = "decoder" if entry.recurrent else "encoder"
        config = ModelConfig(architecture=kind, head="none", mixer=name, **sizes)
        if not entry.weights:
            layer = mixing(config, setup.n_heads, None)
            x = torch.randn(1, setup.length, width, requires_grad=setup.backward)
            return lambda: layer(x), [x, *layer.parameters()]
        built = mechanism(config, setup.n_heads, setup.d_head, cross=False)
        module = built if isinstance(built, nn.Module) else None
        return _attention_run(setup, backend, setup.mask if entry.causal else None, module, mechanism=built)

    return build


_TABLE = (
    Contender("reference", "reference, the formula", "exact", _attention("reference"), matrices=(3.2, 6.5)),
    Contender("sdpa", "sdpa, torch's fused kernel", "exact", _attention("sdpa")),
    Contender("tiled", "tiled", "exact", _attention("tiled")),
    Contender("tiled+t5", "tiled + trained T5 bias", "exact", _t5_run),
    Contender("sinks", "sdpa + learned sinks", "exact", _sinks_run, rows=(8, 20)),
    Contender("additive", "additive (Bahdanau), tiled", "exact", _mixer_run("additive", "tiled"), most_seconds=3.0),
    Contender("window", "window of 256, tiled", "sparse", _attention("tiled", "window"), 1),
    Contender("strided", "strided by 128, tiled", "sparse", _attention("tiled", "strided"), causal=True),
    Contender("bigbird", "bigbird, tiled", "sparse", _attention("tiled", "bigbird")),
    Contender("linear", "linear, elu + 1", "approximate", _mixer_run("linear", "linear"), 1, rows=(14, 26)),
    Contender(
        "performer", "performer, 256 features", "approximate", _mixer_run("performer", "linear"), 1, rows=(36, 75)
    ),
    Contender("linformer", "linformer, rank 256", "approximate", _mixer_run("linformer", "sdpa"), 1, causal=False),
    Contender("mamba2", "Mamba 2, chunks of 128", "approximate", _mixer_run("mamba2"), 1, causal=True),
    Contender("fourier", "fourier mixing", "approximate", _mixer_run("fourier"), 1, causal=False),
)
CONTENDERS = {contender.name: contender for contender in _TABLE}


def contenders() -> dict[str, Contender]:
    """The contenders above and every other registered mechanism; dot products are listed by backend."""
    known = dict(CONTENDERS)
    for name, entry in all_mixers().items():
        if name in known or name == "dot":
            continue
        # The power is derived from the operations that the entry declares.
        near, far = (entry.flops(MixingWork(8, 64, keys, entry.size or 0, n_kv_heads=8)) for keys in (1 << 14, 1 << 20))
        matrices = (3.2, 6.5) if entry.weights and entry.family.kind == "shares" else (0, 0)
        build, grows, causal = _mixer_run(name), 2 if far > near else 1, None if entry.causal else False
        known[name] = Contender(name, entry.summary or name, "own", build, grows, matrices, causal=causal)
    return known


def choose_contenders(names: list[str] | None) -> list[Contender]:
    """The contenders called ``names``, by default all; module:Class imports a mechanism of the user's own."""
    for name in names or ():
        if ":" in name:
            register(name)
    known = contenders()
    for name in names or ():
        if name not in known:
            hint = did_you_mean(name, known, quoted=True)
            raise ValueError(f"mechanism {name!r} is not one of {', '.join(known)}{hint}")
    return [known[name] for name in dict.fromkeys(names or known)]


def measure_contender(job: tuple[str, Setup, float]) -> dict[str, Any]:
    """Measure the job (contender, setup, enough_s) in a process of its own: seconds, peak_bytes, runs, threads."""
    name, setup, enough_s = job
    torch.manual_seed(0)
    build_run(name, replace(setup, length=min(setup.length, 32)))()  # warm-up: loads code and starts threads
    measurement = measure(build_run(name, setup), enough_s=enough_s)
    return {**measurement._asdict(), "threads": torch.get_num_threads()}


def build_run(name: str, setup: Setup) -> Callable[[], object]:
    """A function that runs a contender on prepared inputs: forward, or forward and backward."""
    (contender,) = choose_contenders([name])
    forward, leaves = contender.build(setup)
    if not setup.backward:
        return torch.no_grad()(forward)
    d_output = torch.randn(1, setup.n_heads, setup.length, setup.d_head)

    def forward_and_backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        output = forward()
        output.backward(d_output.view_as(output))

    return forward_and_backward


# ------------------------------------------------------------------------------------- the benchmark


@dataclass(frozen=True)
class BenchCell:
    """One mechanism at one length: measured, or skipped with a reason."""

    mechanism: str
    length: int
    seconds: float | None = None
    peak_bytes: int | None = None
    runs: int = 0
    threads: int = 0
    skipped: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("mechanism", "threads")}


@dataclass(frozen=True)
class AttentionBench:
    """All cells of one benchmark."""

    lengths: list[int]
    contenders: list[Contender]
    setup: Setup  # its length is 0 and not used
    cells: list[BenchCell]
    files: list[Path]

    def of(self, name: str) -> list[BenchCell]:
        return [cell for cell in self.cells if cell.mechanism == name]

    def series(self, name: str, quantity: str) -> tuple[list[int], list[float]]:
        """Lengths and values of ``quantity`` ("seconds" or "peak_bytes") of the measured cells."""
        cells = [cell for cell in self.of(name) if cell.skipped is None]
        return [cell.length for cell in cells], [getattr(cell, quantity) for cell in cells]

    def exponent(self, name: str, quantity: str) -> float | None:
        """The power p of the length with which the quantity grows at the longer lengths."""
        return fit_exponent(*self.series(name, quantity))

    def to_dict(self) -> dict[str, Any]:
        """All figures, as JSON-compatible values; numbers are finite or None."""
        mechanisms = [
            {
                "name": contender.name,
                "title": contender.title,
                "note": contender.note(self.setup),
                "time_exponent": self.exponent(contender.name, "seconds"),
                "memory_exponent": self.exponent(contender.name, "peak_bytes"),
                "cells": [cell.to_dict() for cell in self.of(contender.name)],
            }
            for contender in self.contenders
        ]
        facts = {"device": "cpu", "threads": self.threads, "torch": torch.__version__, "direction": self.direction}
        facts |= {name: getattr(self.setup, name) for name in ("causal", "n_heads", "d_head")}
        return facts | {"lengths": self.lengths, "mechanisms": mechanisms, "files": [str(file) for file in self.files]}

    @property
    def threads(self) -> int:
        """The number of threads of the measuring processes."""
        return max(cell.threads for cell in self.cells) or torch.get_num_threads()

    @property
    def direction(self) -> str:
        return "forward and backward" if self.setup.backward else "forward"

    @property
    def headline(self) -> str:
        causal = "causal" if self.setup.causal else "not causal"
        heads = f"{self.setup.n_heads} heads of width {self.setup.d_head}"
        return f"{self.direction}, {causal}, {heads}, fp32, CPU threads: {self.threads}, torch {torch.__version__}"

    def to_text(self) -> str:
        """Both tables, then the reasons for skipped cells and the notes."""
        remarks: list[str] = []
        marks = {
            (cell.mechanism, cell.length): _add_remark(remarks, f"{cell.mechanism} at {cell.length:,}: {cell.skipped}")
            for cell in self.cells
            if cell.skipped is not None
        }
        titles = {contender.name: contender.title for contender in self.contenders}
        for contender in self.contenders:
            if note := contender.note(self.setup):
                titles[contender.name] += f" {_add_remark(remarks, f'{contender.name} {note}')}"
        parts = [f"Attention: {self.headline}"]
        for heading, quantity, unit in (("time, ms", "seconds", 1e-3), ("peak memory, MiB", "peak_bytes", 2**20)):
            rows = [[heading, *[f"{length:,}" for length in self.lengths], "grows like"]]
            for name, title in titles.items():
                power, cells = self.exponent(name, quantity), self.of(name)
                values = [marks.get((name, x.length)) or _format_number(getattr(x, quantity) / unit) for x in cells]
                rows.append([title, *values, "–" if power is None else f"T^{power:.2f}"])
            parts.append(format_table(rows))
        parts += ["\n".join(remarks)] if remarks else []
        parts += ["\n".join(f"wrote {file}" for file in self.files)] if self.files else []
        return "\n\n".join(parts)


def _add_remark(remarks: list[str], remark: str) -> str:
    """Add a remark and return the sign that refers to it: (a), (b), …"""
    n = len(remarks)
    sign = f"({'' if n < 26 else chr(96 + n // 26)}{chr(97 + n % 26)})"
    remarks.append(f"{sign} {remark}")
    return sign


def _format_number(value: float) -> str:
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}"


def bench_attention(
    *,
    lengths: list[int],
    mechanisms: list[str] | None = None,
    n_heads: int = 8,
    d_head: int = 64,
    causal: bool = True,
    backward: bool = False,
    out: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> AttentionBench:
    """Measure each mechanism at each length; with ``out``, write the table, JSON and a figure to that folder."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={lengths} must be one or more whole numbers, each at least 1")
    check_positive(n_heads=n_heads, d_head=d_head)
    contenders, lengths = choose_contenders(mechanisms), sorted(set(lengths))
    if out is not None:  # before measuring, so that an unwritable folder fails at once
        out.mkdir(parents=True, exist_ok=True)
    setup = Setup(0, n_heads, d_head, causal, backward)
    most_bytes = min(MOST_BYTES, available_memory() // 2)
    cells: list[BenchCell] = []
    with LocalRunner() as runner:
        for contender in contenders:
            last: BenchCell | None = None  # the last cell that was measured
            for length in lengths:
                cell = _measure_cell(runner, contender, replace(setup, length=length), last, most_bytes)
                last = cell if cell.skipped is None else last
                cells.append(cell)
                result = cell.skipped
                if cell.seconds is not None and cell.peak_bytes is not None:
                    result = f"{cell.seconds * 1e3:,.1f} ms, {cell.peak_bytes / 2**20:,.1f} MiB"
                progress(f"{cell.mechanism} at {cell.length:,}: {result}")
    files = [out / f"attention.{ending}" for ending in ("txt", "json", "png")] if out is not None else []
    bench = AttentionBench(lengths, contenders, setup, cells, files)
    if files:
        from .sweep_figures import draw_attention_bench

        write_atomic(files[0], f"{bench.to_text()}\n".encode())
        write_atomic(files[1], f"{json.dumps(bench.to_dict(), indent=2, allow_nan=False)}\n".encode())
        draw_attention_bench(bench, files[2])
    return bench


def _measure_cell(
    runner: Runner, contender: Contender, setup: Setup, shorter: BenchCell | None, most_bytes: int
) -> BenchCell:
    """Measure one cell, or skip it; ``shorter`` is a measurement at a shorter length, from which time is predicted."""
    n_bytes = contender.predict_bytes(setup)
    if n_bytes > most_bytes:
        reason = f"needs {_format_bytes(n_bytes)}, more than the {_format_bytes(most_bytes)} allowed"
        return BenchCell(contender.name, setup.length, skipped=reason)
    if shorter is None and setup.length > PILOT:
        shorter = _run_cell(runner, contender, replace(setup, length=PILOT))
    if shorter is not None and shorter.seconds is not None:
        seconds = shorter.seconds * (setup.length / shorter.length) ** contender.grows
        if seconds > contender.most_seconds:
            reason = f"would take about {seconds:.1f} s, more than the {contender.most_seconds:g} s allowed"
            return BenchCell(contender.name, setup.length, threads=shorter.threads, skipped=reason)
    return _run_cell(runner, contender, setup)


def _run_cell(runner: Runner, contender: Contender, setup: Setup) -> BenchCell:
    answer = runner.submit(measure_contender, (contender.name, setup, ENOUGH_S)).result()
    return BenchCell(contender.name, setup.length, **answer)


def _format_bytes(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
