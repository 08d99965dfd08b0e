"""Ablations, cost predictions and benchmarks. ``ablate`` runs a sweep by name, from a file, or resumes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .sweep_report import SweepReport
    from .sweep_spec import Sweep

__all__ = ["ablate"]


def ablate(
    what: str | Path | Sweep,
    words: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    tests: dict[str, str] | None = None,
    minutes: float | None = None,
    max_seconds: float | None = None,
    keep: bool = False,
    report_only: bool = False,
    on: str = "local",
    progress: Callable[[str], None] | None = None,
) -> SweepReport:
    """Run an ablation and report its results.

    what         a name (``ablate("heads", ["train.steps=500"])``), a TOML file, the directory of a sweep to resume, or
                 a ``Sweep``
    words        overrides of the base; model.mixer=module:Class imports a mechanism of your own, but a stored sweep's
                 own overrides import nothing
    out          the sweep's directory, by default runs/ablate-NAME; finished runs in it are not run again
    seeds        the number of seeds; more can be added to a sweep later
    jobs         runs at a time; None: one per core, or four on a GPU
    tests        further examples to evaluate on, by name: {"test": "test.en,test.de"} gives test_bleu
    minutes      stop after this time; unfinished runs are saved and resumed by the next call
    max_seconds  a run that takes longer counts as failed
    keep         keep the weights of finished runs
    report_only  report the stored results without running anything
    on           where it runs: local, ray (the cluster this machine belongs to) or ray://HOST:PORT
    progress     called with each line of progress
    """
    from .extended_reports import extend_report
    from .sweep_report import write_report
    from .sweep_runner import run_sweep
    from .sweep_spec import Sweep

    sweep, stored_in = _resolve_sweep(what, words, seeds)
    folder = Path(out) if out is not None else stored_in or Path("runs") / f"ablate-{sweep.name}"
    if report_only and not isinstance(what, Sweep):  # reports the stored sweep; words, if given, must agree with it
        stored = Sweep.read(folder)
        if words:
            sweep.check_same_settings(stored, folder)
        sweep = stored if seeds is None else replace(stored, seeds=tuple(range(seeds)))
    if tests:
        metrics = tuple(dict.fromkeys((*sweep.metrics, *map(sweep.test_metric, tests))))
        sweep = replace(sweep, tests={**sweep.tests, **tests}, metrics=metrics)
    if report_only:
        report = write_report(folder, sweep)
    else:
        report = run_sweep(
            sweep, folder, jobs=jobs, minutes=minutes, max_seconds=max_seconds, keep=keep, progress=progress, on=on
        )
    return extend_report(report, progress or (lambda line: None), measure=not report_only)


def _resolve_sweep(what: str | Path | Sweep, words: Sequence[str], seeds: int | None) -> tuple[Sweep, Path | None]:
    """The sweep that ``what`` names, and its directory if ``what`` is one."""
    from .ablations import SWEEPS, ablation, unknown_ablation
    from .sweep_spec import SWEEP_FILE, Sweep, check_words, read_grid

    if seeds is not None and seeds < 1:
        raise UsageError(f"seeds={seeds} must be at least 1")
    if isinstance(what, str) and what in SWEEPS:
        return ablation(what, words, seeds=3 if seeds is None else seeds), None
    folder = None
    if isinstance(what, Sweep):
        sweep = what.with_words(check_words(words))
    elif (Path(what) / SWEEP_FILE).is_file():
        sweep, folder = Sweep.read(what).with_words(check_words(words)), Path(what)
    elif str(what).endswith(".toml"):
        sweep = read_grid(Path(what), check_words(words))
    else:
        raise unknown_ablation(str(what), [*SWEEPS, "scaling", "a file.toml", "the directory of a sweep"])
    return sweep if seeds is None else replace(sweep, seeds=tuple(range(seeds))), folder
