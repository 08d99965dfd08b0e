"""``ablate``: the door to sweeps by name, from a file, or going on. What is behind it is imported when it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .sweep import Sweep
    from .sweep_report import Report

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
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run an ablation and tell what it came to.

    what    a name (``ablate("heads", ["train.steps=500"])``), a TOML file, the directory of a sweep to go on with, or a
            ``Sweep``
    out     where it is kept; runs/ablate-NAME unless given. What is done there is not done again
    seeds   how many; more may join a sweep later
    tests   further examples to evaluate on, by name: {"test": "test.en,test.de"} gives test_bleu
    Words may name a mechanism of your own, model.mixer=module:Class; one that only a directory names is not imported.
    """
    from .ablations import FINISHED
    from .sweep import Sweep, report, run

    sweep, place = _opened(what, words, seeds)
    folder = Path(out) if out is not None else place or Path("runs") / f"ablate-{sweep.name}"
    if report_only and not isinstance(what, Sweep):
        sweep = _as_stored(sweep, folder, words, seeds)
    if tests:
        metrics = tuple(dict.fromkeys((*sweep.metrics, *map(sweep.metric_of_test, tests))))
        sweep = replace(sweep, tests={**sweep.tests, **tests}, metrics=metrics)
    if report_only:
        found = report(folder, sweep)
    else:
        found = run(sweep, folder, jobs=jobs, minutes=minutes, max_seconds=max_seconds, keep=keep, progress=progress)
    finish = FINISHED.get(sweep.ending)
    return found if finish is None else finish(found, progress, not report_only)


def _as_stored(asked: Sweep, folder: Path, words: Sequence[str], seeds: int | None) -> Sweep:
    """What the directory holds, with the seeds that are asked for; words, where given, must be its own."""
    from .sweep import Sweep

    found = Sweep.read(folder)
    if words:
        asked.need_same(found, folder)
    return found if seeds is None else replace(found, seeds=tuple(range(seeds)))


def _opened(what: str | Path | Sweep, words: Sequence[str], seeds: int | None) -> tuple[Sweep, Path | None]:
    from .ablations import SWEEPS, ablation
    from .sweep import SWEEP_FILE, Sweep, named_words, unknown

    if seeds is not None and seeds < 1:
        raise UsageError(f"seeds={seeds} must be at least 1")
    if isinstance(what, str) and what in SWEEPS:
        return ablation(what, words, seeds=3 if seeds is None else seeds), None
    given = () if seeds is None else tuple(range(seeds))
    if isinstance(what, Sweep):
        sweep, place = what.with_words(named_words(words)), None
    elif (Path(what) / SWEEP_FILE).is_file():
        sweep, place = Sweep.read(what).with_words(named_words(words)), Path(what)
    elif str(what).endswith(".toml"):
        from .ablate_file import read_grid

        sweep, place = read_grid(Path(what), named_words(words)), None
    else:
        raise unknown("ablation", str(what), [*SWEEPS, "scaling", "a file.toml", "the directory of a sweep"])
    return replace(sweep, seeds=given or sweep.seeds), place
