"""Reporting of a run: progress on the terminal, metrics.jsonl, curves.png, speed and memory."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..foundation.checks import check_positive
from ..foundation.jsonio import to_jsonable
from ..foundation.language import localise
from .console_display import GAP, RunStatus, Style, format_pairs, format_rows, format_value, make_console, printable
from .journal import TIMINGS, MetricsFile, draw_curves
from .loggers import LOGGERS, MetricLogger, TensorBoard

_SPAN_S, _FEWEST_MARKS = 20.0, 5  # of the window over which speed is measured
SHARE_FOR_CURVES = 0.02  # the largest share of a run's time spent drawing curves; the last drawing is always made


class Mark(NamedTuple):
    """The progress of a run at one moment of its training time."""

    seconds: float
    steps: int
    tokens: int


class Pace:
    """Speed over the second half of the training time so far, and at most over its last 20 seconds.

    Pauses (evaluating, saving) do not count. The first step never counts, and later slow steps (a recompilation for
    another shape) soon leave the window, so that the ETA is reliable early in a run.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._start, self._paused = clock, clock(), 0.0
        self._pauses: list[float] = []
        self._marks: deque[Mark] = deque()
        self._last = Mark(0.0, 0, 0)

    def wall(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def training(self) -> float:
        """Seconds since the start without pauses."""
        now = self._pauses[0] if self._pauses else self._clock()
        return now - self._start - self._paused

    def pause(self) -> None:
        """Stop the training clock; pauses may be nested."""
        self._pauses.append(self._clock())

    def resume(self) -> None:
        """Start the training clock again."""
        paused_at = self._pauses.pop()
        if not self._pauses:
            self._paused += self._clock() - paused_at

    def tick(self, tokens: int) -> None:
        now = self.training()
        self._last = Mark(now, self._last.steps + 1, self._last.tokens + tokens)
        # About 400 marks per window are enough; fast steps do not need one each.
        if len(self._marks) < _FEWEST_MARKS or now - self._marks[-1].seconds >= _SPAN_S / 400:
            self._marks.append(self._last)
        oldest = now - min(_SPAN_S, now / 2)
        while len(self._marks) > _FEWEST_MARKS and self._marks[1].seconds <= oldest:
            self._marks.popleft()

    def per_second(self, unit: Literal["steps", "tokens"]) -> float | None:
        """Steps or tokens per second; None until the second step."""
        if not self._marks or self._last.seconds <= self._marks[0].seconds:
            return None
        first, last = self._marks[0], self._last
        return (getattr(last, unit) - getattr(first, unit)) / (last.seconds - first.seconds)


def peak_memory_mib(device: str | None = None) -> float | None:
    """The peak memory so far: of tensors on a GPU, or of the whole process on a CPU; None if the system does not tell.

    Without ``device``: the GPU if one is in use, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    if device.startswith("cuda") and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if device.startswith("mps") and torch.backends.mps.is_available():
        return torch.mps.driver_allocated_memory() / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


class Reporter(AbstractContextManager["Reporter"]):
    """Writes what the loop reports, step by step. A step is cheap: numbers stay on the device until a line is due.

    A line is due at the first step, every ``log_every`` steps, and the last. ``flops_per_token`` (of training) and
    ``peak_flops`` (of all devices together) give the utilisation. To continue after ``start_step``, pass the ``state``
    saved there to ``restore``: the files are then the same as without a stop, apart from timings. ``loggers`` names the
    additional loggers; they show ``settings`` as the config of the run.

    style: ``auto`` live on a terminal, else plain · ``json`` plain · ``quiet`` only files · ``records`` only files and
    no curves.png (runs of a sweep) · ``off`` nothing at all (all processes but the main one).
    All output goes to stderr.
    """

    def __init__(
        self,
        out: Path,
        *,
        steps: int,
        log_every: int,
        style: Style = "auto",
        start_step: int = 0,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        loggers: Sequence[str] = (TensorBoard.name,),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        check_positive(log_every=log_every)
        self.out, self._start_step, self._log_every = Path(out), start_step, log_every
        self._active, self._draws = style != "off", style != "records"
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._status = RunStatus(steps=steps, step=start_step)
        self._console = make_console(style, self._status)
        self._device: str | None = None
        self._losses: list[Any] = []
        self._drawn_at = 0.0
        self._drawing_s = 1.0  # seconds the last drawing took; a guess before the first
        self._pace = Pace()
        self._file: MetricsFile | None = None
        self._loggers: list[MetricLogger] = []
        if self._active:
            self._file = MetricsFile(self.out / "metrics.jsonl", start_step, self.note)
            self._loggers = [LOGGERS[name](self.out, start_step, settings or {}, self.note) for name in loggers]
        self.restore({} if self._file is None else self._file.last)

    # ------------------------------------------------------------------------------------ checkpoint and resume

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores so that the lines after a resume are the same; plain JSON."""
        self._losses = _numbers(self._losses)
        losses = {"loss": to_jsonable(self.last_loss), "losses": to_jsonable(self._losses)}
        return {"tokens": self.tokens, **self.times(), **losses}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state()``, or from the last line of metrics.jsonl, which holds most of it."""
        self.tokens = int(state.get("tokens") or 0)
        self._seconds_before = float(state.get("seconds") or 0.0)
        self._training_before = float(state.get("train_seconds") or 0.0)
        self._last_loss = state.get("loss")
        self._losses = [float("nan") if loss is None else loss for loss in state.get("losses", ())]
        self._line_tokens, self._line_training = self.tokens, 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the run in total, including the time before a resume."""
        return self._seconds_before + self._pace.wall()

    @property
    def train_seconds(self) -> float:
        """``seconds`` without the time inside ``paused``."""
        return self._training_before + self._pace.training()

    def times(self) -> dict[str, float]:
        """``seconds`` and ``train_seconds``, which never exceeds it: it is read first."""
        training = self.train_seconds
        return {"seconds": self.seconds, "train_seconds": training}

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step; reading it synchronises the device."""
        return _number(self._losses[-1]) if self._losses else self._last_loss

    # ------------------------------------------------------------------------------------ calls of the loop

    def begin(self, facts: dict[str, Any]) -> None:
        """Print the facts of a run: ``task`` as the title; ``device`` also selects whose memory is reported."""
        self._device = str(facts["device"]).split()[0] if "device" in facts else None
        self._console.say(printable(str(facts.get("task", self.out.name))), "bold")
        shown = {name: localise(format_value(value)) for name, value in facts.items() if name != "task"}
        self._console.show_all(format_pairs(shown, self._console.width))
        if self._start_step:
            self.note(f"continues after step {self._start_step:,}")

    def step(
        self, step: int, *, loss: float | Tensor, lr: float, grad_norm: float | Tensor, n_tokens: int, **more: Any
    ) -> None:
        """Call after every step, with the ``n_tokens`` of all processes."""
        # Later steps may overwrite the tensor (CUDA graphs do), so it is copied, on its device.
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        self.tokens += n_tokens
        self._pace.tick(n_tokens)
        if not self._active:
            self._losses = self._losses[-1:]
            return
        due = step == 1 or step % self._log_every == 0 or step >= self._status.steps
        if due:
            self._write_line(step, {"lr": lr, "grad_norm": grad_norm, **more})
        # The rest of the live line needs no synchronisation with the device.
        now, steps_per_s = self._status, self._pace.per_second("steps")
        now.step, now.tokens_per_s = step, self._pace.per_second("tokens")
        now.mfu = self._mfu(now.tokens_per_s)
        now.left_s = None if not steps_per_s else max(0, now.steps - step) / steps_per_s
        if due:
            self._console.line()

    def _write_line(self, step: int, numbers: dict[str, Any]) -> None:
        losses = _numbers(self._losses)  # synchronises the device, so the times below are exact
        numbers = to_jsonable({name: _number(value) for name, value in numbers.items()})
        training, mib = self._pace.training(), peak_memory_mib(self._device)
        costs: dict[str, Any] = {}
        if self._line_training > 0 and training > self._line_training:  # the first line includes start-up
            speed = (self.tokens - self._line_tokens) / (training - self._line_training)
            costs = {"tokens_per_s": round(speed, 1), "mfu": self._mfu(speed)}
        self._line_tokens, self._line_training = self.tokens, training
        costs |= {name: round(value, 3) for name, value in self.times().items()}
        costs |= {"memory_mib": None if mib is None else round(mib, 1)}
        record = {"step": step, "loss": losses[-1], "loss_mean": sum(losses) / len(losses)} | numbers
        record |= {"tokens": self.tokens} | {name: value for name, value in costs.items() if value is not None}
        self._last_loss, self._losses = losses[-1], []
        kinds = {name: "cost" if name in (*TIMINGS, "tokens") else "train" for name in record if name != "step"}
        self._store(record, {f"{kind}/{name}": record[name] for name, kind in kinds.items()})
        now = self._status
        now.loss, now.lr, now.grad_norm, now.memory_mib = losses[-1], numbers["lr"], numbers["grad_norm"], mib

    def _store(self, record: dict[str, Any], scalars: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(record)
        for logger in self._loggers:
            logger.scalars(record["step"], scalars)

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        if not tokens_per_s or not self._flops_per_token or not self._peak_flops:
            return None
        return round(tokens_per_s * self._flops_per_token / self._peak_flops, 4)

    @contextmanager
    def paused(self, doing: str = "evaluating") -> Iterator[None]:
        """A context whose time does not count as training: evaluating, saving."""
        synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
        synchronize()  # work queued on the GPU before belongs to training
        self._pace.pause()
        previous, self._status.doing = self._status.doing, f"{doing} …"
        try:
            yield
        finally:
            synchronize()
            self._status.doing = previous
            self._pace.resume()

    def evaluation(self, step: int, metrics: dict[str, Any], *, shown: bool = True) -> None:
        """Write and, unless ``shown`` is False, print the metrics of an evaluation, such as valid_loss and bleu.

        Strings among them (a signature) are written only.
        """
        if not self._active:
            return
        values: dict[str, Any] = to_jsonable(metrics)
        record = {"step": step, "loss": self.last_loss} | values
        record |= {"tokens": self.tokens, "seconds": round(self.seconds, 3)}
        self._store(record, {f"valid/{name.removeprefix('valid_')}": value for name, value in values.items()})
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)} or values
        texts = (f"{name.replace('_', ' ')} {format_value(value)}" for name, value in numbers.items())
        if shown:
            self._console.say_at(step, GAP.join(texts), "bold")
        if self.seconds - self._drawn_at >= self._drawing_s / SHARE_FOR_CURVES:
            self._draw()

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Print and log current outputs of the model, as rows such as {"source": …, "target": …, "output": …}."""
        if self._active and rows:
            shown = [{localise(name): value for name, value in row.items()} for row in rows]
            self._console.show_all(format_rows(shown, self._console.width))
            names = list(dict.fromkeys(name for row in rows for name in row))
            cells = [[format_value(row.get(name, "")).replace("|", "\\|") for name in names] for row in rows]
            table = (f"| {' | '.join(line)} |" for line in (names, ["---"] * len(names), *cells))
            text = "\n".join(table)
            for logger in self._loggers:
                logger.text(step, "samples", text)

    def note(self, text: str | None) -> None:
        if text is not None:
            self._console.say(printable(text), "yellow")

    def report_checkpoint(self, step: int, path: Path | str) -> None:
        with suppress(ValueError):
            path = Path(path).relative_to(self.out)
        self._console.report_checkpoint(step, str(path))

    def finish(self) -> None:
        """End a complete run: draw the curves and close."""
        if self._active:
            with self.paused("drawing the curves"):
                self._draw()
        self.close()

    def close(self) -> None:
        """Restore the terminal and close the files; may be called twice."""
        self._console.close()
        for sink in (*self._loggers, self._file):
            if sink is not None:
                sink.close()
        self._loggers, self._file = [], None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _draw(self) -> None:
        if not self._draws:
            return
        started = time.perf_counter()
        try:
            draw_curves(self.out / "metrics.jsonl", self.out / "curves.png")
        except Exception as failure:  # a failed plot must never end a run
            self.note(f"curves.png cannot be drawn: {failure}")
        self._drawing_s, self._drawn_at = time.perf_counter() - started, self.seconds


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _numbers(values: list[Any]) -> list[float]:
    """Values as floats; tensors are copied from the device together, with a single synchronisation."""
    tensors = [value.reshape(()) for value in values if isinstance(value, Tensor)]
    copied = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(copied) if isinstance(value, Tensor) else float(_number(value)) for value in values]
