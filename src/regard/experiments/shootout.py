"""The shoot-out: one model, one corpus, every attention mechanism and position scheme; what each learns and costs.

The task is a masked language model, because an encoder lets all of them play: Linformer and FNet cannot hide a future.
Quality is the held-out loss of the sweep. Time and memory are those of one training step without the optimiser,
measured when all runs are done, one cell at a time in a process of its own: nothing computes beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F

from ..config import Positions, RunConfig
from ..config.mixers import all_mixers
from ..foundation.files import write_atomic
from ..foundation.jsonio import to_json
from ..models import build
from ..training.precision import Precision
from ..training.run_directory import RunDirectory
from .sweep import Cell, fingerprint, folder_of
from .sweep_report import Report, RowOf

__all__ = ["WORDS", "Shot", "mechanisms", "patterns", "positions", "shot"]

ABOUT = (
    "Every attention mechanism, sparse pattern and position scheme in one masked language model on one corpus: "
    "what each learns, and what a training step costs. The base is the scaled dot product with sinusoidal positions."
)
RECIPE = "stdlib-masked"
# Bytes, so that every run learns something within a minute; plain q and k, as Performer and linear attention were
# written for; sinusoids, which all of them can take (learned positions stay on the plateau of having none longer
# than this); precision and compilation fixed, since chosen by measurement cells might differ in them.
WORDS = (
    *("data.tokenizer=bytes", "data.max_len=64", "data.mask_rate=0.3"),
    *("model.d_model=64", "model.n_layers=2", "model.n_heads=4", "model.d_ff=256", "model.max_len=64"),
    *("model.positions=sinusoidal", "model.qk_norm=false", "model.scale_embeddings=true"),
    *("train.steps=500", "train.warmup=30", "train.batch_tokens=1024", "train.muon_lr=0.03", "train.lr=4e-3"),
    *("train.precision=fp32", "train.compile=off", "train.eval_every=0", "train.save_every=0", "train.samples=0"),
    "train.eval_batches=16",
)
METRICS = ("valid_loss", "perplexity")
STEPS_FILE = "steps.json"


# ------------------------------------------------------------------------------------- the cells


def mechanisms(base: RunConfig) -> list[Cell]:
    """Every entry of the table of mechanisms, your own too; ranks and features are half the length."""
    decoder, size = base.model.has_decoder and base.model.causal, max(1, base.data.max_len // 2)
    return [
        Cell(name.replace(":", "."), (f"model.mixer={name}", *([f"model.mixer_size={size}"] if entry.size else [])))
        for name, entry in all_mixers().items()
        if name != base.model.mixer and (entry.causal or not decoder)
    ]


def patterns(base: RunConfig) -> list[Cell]:
    """The scaled dot product, told where to look: a window, strides, BigBird; each query meets about a quarter."""
    length = base.data.max_len
    block = max(1, length // 16)
    return [
        Cell("window", (f"model.window={max(1, length // 8)}",)),
        Cell("strided", ("model.sparsity=strided", f"model.sparsity_size={max(1, length // 8)}")),
        Cell("bigbird", ("model.sparsity=bigbird", f"model.sparsity_size={block}")),
    ]


def positions(base: RunConfig) -> list[Cell]:
    """Every way to tell order."""
    return [Cell(f"positions={x}", (f"model.positions={x}",)) for x in get_args(Positions) if x != base.model.positions]


# ------------------------------------------------------------------------------------- the cost of a step


def cost_of_step(run: str, device: str, enough_s: float = 1.0) -> dict[str, Any]:
    """Milliseconds and MiB of one step, forward and backward, of the model of a run at the shape of its batches.

    To be called in a process of its own. On a processor, memory is what the step adds to the process, gradients
    included; on a GPU it is the allocator's peak.
    """
    config = RunDirectory.open(Path(run)).config
    place = torch.device(device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(config.model).to(place).train()
    rows = max(1, config.train.batch_tokens // config.data.max_len)
    tokens = torch.randint(3, config.model.vocab_size, (rows, config.data.max_len), device=place)
    options = {"keep": torch.ones_like(tokens, dtype=torch.bool)} if config.task == "mlm" else {}
    precision = Precision("fp32" if config.train.precision == "auto" else config.train.precision, place)

    def step() -> None:
        model.zero_grad()
        with precision.forward():
            loss = F.cross_entropy(model(tokens, **options).flatten(0, 1).float(), tokens.flatten())
        loss.backward()

    seconds, memory = _on_gpu(step, enough_s) if place.type == "cuda" else _on_processor(step, enough_s)
    return {"ms": 1e3 * seconds, "mib": memory / 2**20, "device": place.type}


def _device(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _on_processor(step: Callable[[], None], enough_s: float) -> tuple[float, float]:
    from .measure import measure

    found = measure(step, enough_s=enough_s)
    return found.seconds, found.peak_bytes


def _on_gpu(step: Callable[[], None], enough_s: float) -> tuple[float, float]:
    step()  # kernels are loaded, workspaces allocated
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < enough_s and len(times) < 50):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times), torch.cuda.max_memory_allocated()


def _costs(report: Report, say: Callable[[str], None], measure: bool) -> dict[str, dict[str, Any]]:
    """Of every cell that has a finished run, all on one device; what is known already is not measured again."""
    sweep, file = report.sweep, report.out / STEPS_FILE
    before, waiting = _known(file), dict[str, Path]()
    marks = {row.cell.name: fingerprint(sweep.config(row.cell)) for row in report.rows}
    known = {name: cost for name, cost in before.items() if cost["fingerprint"] == marks.get(name)}
    device = torch.device(_device(sweep.config(report.base.cell).train.device)).type
    if not measure:  # then those there are, wherever it was
        device = next((cost["device"] for cost in known.values()), device)
    known = {name: cost for name, cost in known.items() if cost["device"] == device}
    for row in report.rows if measure else ():
        seed = next((seed for seed, x in row.runs.items() if x is not None and x["status"] == "done"), None)
        if seed is not None and row.cell.name not in known:
            waiting[row.cell.name] = folder_of(report.out, row.cell.name, seed) / "run"
    if waiting:
        from .measure import Children

        say(f"measuring a step of each of {len(waiting)} cells")
        with Children(__name__) as children:
            for name, run in waiting.items():
                found = children.call(f"{__name__}:cost_of_step", run=str(run), device=device)
                known[name] = {"fingerprint": marks[name], **found}
                write_atomic(file, to_json({**before, **known}))
    return known


def _known(file: Path) -> dict[str, dict[str, Any]]:
    """What was measured before; of a damaged file, what can be read."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    costs = found.items() if isinstance(found, dict) else ()
    return {name: cost for name, cost in costs if isinstance(cost, dict) and _is_cost(cost)}


def _is_cost(cost: dict[str, Any]) -> bool:
    numbers, texts = (cost.get("ms"), cost.get("mib")), (cost.get("fingerprint"), cost.get("device"))
    return all(isinstance(x, int | float) for x in numbers) and all(isinstance(x, str) for x in texts)


# ------------------------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Shot(Report):
    """The sweep's table with two columns more, and a picture of quality against cost."""

    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of cells by name: ms, mib and the device they were measured on."""

    def document(self) -> dict[str, Any]:
        found = super().document()
        for cell in found["cells"]:
            cost = self.costs.get(cell["name"], {})
            cell |= {"step_ms": cost.get("ms"), "step_mib": cost.get("mib")}
        return {**found, "step_device": self._device}

    def _lines(self) -> list[list[str]]:
        head, *lines = super()._lines()
        return [
            [*head, "step", "memory"],
            *([*line, *self._cost(row)] for line, row in zip(lines, self.rows, strict=True)),
        ]

    def _cost(self, row: RowOf) -> Sequence[str]:
        cost = self.costs.get(row.cell.name)
        return ("", "") if cost is None else (f"{cost['ms']:.1f} ms", f"{cost['mib']:,.0f} MiB")

    @property
    def _device(self) -> str | None:
        return next((cost["device"] for cost in self.costs.values()), None)

    def said(self) -> list[str]:
        where = {"cpu": "one thread of this processor", "cuda": "the GPU"}.get(self._device or "", self._device)
        how = f"step, memory: forward and backward of one batch on {where}, measured alone; tradeoff.png draws them"
        return [*super().said(), *([how] if self.costs else [])]


def shot(report: Report, say: Callable[[str], None] | None = None, measure: bool = True) -> Shot:
    """The report of the shoot-out: steps are measured, or not, table and pictures written."""
    from .shootout_figure import draw_tradeoff

    costs = _costs(report, say or (lambda line: None), measure)
    found = Shot(report.sweep, report.out, report.columns, report.rows, costs)
    write_atomic(found.out / "table.md", found.markdown().encode())
    if any(row.n_done for row in found.rows):
        draw_tradeoff(found, found.out / "tradeoff.png")
    return found
