"""Extended sweep reports: the cost of each mechanism's training step, and losses beyond the training length.

Time and memory of a step cover the forward and backward pass without the optimiser. They are measured when all runs are
done, one cell at a time, each in a process of its own, so that nothing else competes for the machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..foundation.device import resolve_device
from ..foundation.files import write_atomic
from ..foundation.jsonio import to_json
from ..models import build
from ..training.precision import Precision
from ..training.run_directory import RunDirectory
from .benchmarking import measure
from .sweep_cell import EXTRAPOLATION_METRICS, FACTORS
from .sweep_report import CellSummary, SweepReport
from .sweep_runner import LocalRunner
from .sweep_spec import fingerprint, run_folder

STEPS_FILE = "steps.json"
_ENOUGH_SECONDS = 1.0  # steps are repeated for this long, and the best time counts


def step_cost(job: tuple[str, str]) -> dict[str, Any]:
    """Milliseconds and MiB of a training step, for the job (run directory, device), at the shape of the run's batches.

    Must be called in a process of its own. On a CPU, memory is what the step adds to the process, including gradients;
    on a GPU it is the allocator's peak.
    """
    run, device_name = job
    config, device = RunDirectory.open(Path(run)).config, torch.device(device_name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(config.model).to(device).train()
    rows = max(1, config.train.batch_tokens // config.data.max_len)
    tokens = torch.randint(3, config.model.vocab_size, (rows, config.data.max_len), device=device)
    options = {"padding_mask": torch.ones_like(tokens, dtype=torch.bool)} if config.model.head == "masked-lm" else {}
    precision = Precision("fp32" if config.train.precision == "auto" else config.train.precision, device)

    def step() -> None:
        model.zero_grad()
        with precision.forward():
            loss = F.cross_entropy(model(tokens, **options).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    if device.type != "cuda":
        seconds, memory, _ = measure(step, enough_s=_ENOUGH_SECONDS)
        return {"ms": 1e3 * seconds, "mib": memory / 2**20, "device": device.type}
    step()  # loads kernels and allocates workspaces
    torch.cuda.reset_peak_memory_stats()
    seconds, _, _ = measure(step, enough_s=_ENOUGH_SECONDS, least_runs=3, most_runs=50)
    return {"ms": 1e3 * seconds, "mib": torch.cuda.max_memory_allocated() / 2**20, "device": "cuda"}


def _step_costs(report: SweepReport, progress: Callable[[str], None], measure: bool) -> dict[str, dict[str, Any]]:
    """The step cost of every cell with a finished run, all on one device; stored costs are not measured again."""
    sweep, file = report.sweep, report.out / STEPS_FILE
    before = _read_costs(file)
    digests = {row.cell.name: fingerprint(sweep.config(row.cell)) for row in report.rows}
    known = {name: cost for name, cost in before.items() if cost["fingerprint"] == digests.get(name)}
    if measure:
        device = resolve_device(sweep.config(report.base.cell).train.device, "train.device").type
    else:  # the stored costs, whichever device they were measured on
        device = next((cost["device"] for cost in known.values()), "")
    known = {name: cost for name, cost in known.items() if cost["device"] == device}
    waiting: dict[str, Path] = {}
    for row in report.rows if measure else ():
        seed = next((seed for seed, x in row.runs.items() if x is not None and x["status"] == "done"), None)
        if seed is not None and row.cell.name not in known:
            waiting[row.cell.name] = run_folder(report.out, row.cell.name, seed) / "run"
    if waiting:
        progress(f"measuring a step of each of {len(waiting)} cells")
        with LocalRunner() as runner:
            for name, run in waiting.items():
                cost = runner.submit(step_cost, (str(run), device)).result()
                known[name] = {"fingerprint": digests[name], **cost}
                write_atomic(file, to_json({**before, **known}))
    return known


def _read_costs(file: Path) -> dict[str, dict[str, Any]]:
    """The stored step costs; invalid entries of a damaged file are ignored."""
    try:
        stored = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    types: dict[str, Any] = {"ms": int | float, "mib": int | float, "fingerprint": str, "device": str}

    def is_valid(cost: Any) -> bool:
        return isinstance(cost, dict) and all(isinstance(cost.get(key), kind) for key, kind in types.items())

    return {name: cost for name, cost in stored.items() if is_valid(cost)} if isinstance(stored, dict) else {}


@dataclass(frozen=True)
class MechanismReport(SweepReport):
    """The sweep's table with two more columns, and a figure of quality against cost."""

    costs: dict[str, dict[str, Any]] = field(default_factory=dict)  # ms, mib and device, by cell name

    def to_dict(self) -> dict[str, Any]:
        document = super().to_dict()
        for cell in document["cells"]:
            cost = self.costs.get(cell["name"], {})
            cell |= {"step_ms": cost.get("ms"), "step_mib": cost.get("mib")}
        return {**document, "step_device": self._device}

    def _lines(self) -> list[list[str]]:
        lines = super()._lines()
        lines[0] += ["step", "memory"]
        for line, row in zip(lines[1:], self.rows, strict=True):
            cost = self.costs.get(row.cell.name)
            line += ["", ""] if cost is None else [f"{cost['ms']:.1f} ms", f"{cost['mib']:,.0f} MiB"]
        return lines

    @property
    def _device(self) -> str | None:
        return next((cost["device"] for cost in self.costs.values()), None)

    def conclusions(self) -> list[str]:
        where = {"cpu": "one thread of this processor", "cuda": "the GPU"}.get(self._device or "", self._device)
        how = f"step, memory: forward and backward of one batch on {where}, measured alone; tradeoff.png shows them"
        return [*super().conclusions(), *([how] if self.costs else [])]

    def draw(self) -> None:
        from .sweep_figures import draw_tradeoff

        draw_tradeoff(self, self.out / "tradeoff.png")


@dataclass(frozen=True)
class ExtrapolationReport(SweepReport):
    """The sweep's table with lengths as column titles, and "cannot" where a position scheme cannot extrapolate."""

    @property
    def length(self) -> int:
        return self.sweep.config(self.base.cell).data.max_len

    def refusal(self, row: CellSummary, metric: str) -> str | None:
        """Why the cell's finished runs lack this loss; None if they do not."""
        for run in row.runs.values():
            if run is not None and metric in (run["metrics"].get("cannot") or {}):
                return str(run["metrics"]["cannot"][metric])
        return None

    def _lines(self) -> list[list[str]]:
        head, *lines = super()._lines()
        lengths = [factor * self.length for factor in FACTORS]
        titles = {metric: f"loss at {n:,}" for metric, n in zip(EXTRAPOLATION_METRICS, lengths, strict=True)}
        return [[titles.get(text, text) for text in head], *lines]

    def _number(self, row: CellSummary, name: str) -> str:
        return "cannot  " if self.refusal(row, name) else super()._number(row, name)

    def conclusions(self) -> list[str]:
        refusals = [(row, why) for row in self.rows if (why := self.refusal(row, EXTRAPOLATION_METRICS[-1]))]
        more = [f"{row.cell.name}: cannot go beyond its training length: {why}" for row, why in refusals]
        return [*super().conclusions(), *more, "every column predicts the same held-out text; lengths.png shows it"]

    def draw(self) -> None:
        from .sweep_figures import draw_lengths

        draw_lengths(self, self.out / "lengths.png")


def extend_report(report: SweepReport, progress: Callable[[str], None], measure: bool) -> SweepReport:
    """Write and return the report that the sweep asks for by its ``ending``; without one, ``report`` itself.

    ``measure``: whether step costs that are missing are measured.
    """
    parts = (report.sweep, report.out, report.columns, report.rows)
    extended: MechanismReport | ExtrapolationReport
    match report.sweep.ending:
        case "mechanisms":
            extended = MechanismReport(*parts, _step_costs(report, progress, measure))
        case "extrapolation":
            extended = ExtrapolationReport(*parts)
        case _:
            return report
    write_atomic(extended.out / "table.md", extended.markdown().encode())
    if any(row.n_done for row in extended.rows):
        extended.draw()
    return extended
