"""Checking a learner's answer and explaining in one sentence what is wrong with it.

The answer is called on the oracle's inputs. If a result differs, the typical mistakes of the exercise, alone and in
pairs, are called on the same inputs. The one with the same results as the answer is the learner's mistake.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import math
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..foundation.files import write_atomic
from ..foundation.language import localise
from .exercises import Exercise, find_exercise, note_attempt, read_answer

Answer = Callable[..., Any]
SECONDS = 10.0  # time limit of a learner's function
_STARTING_SECONDS = 300.0  # additional time to import torch on a busy machine


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and one sentence about it in the user's language. Truthy if it is right."""

    exercise: str
    passed: bool
    sentence: str
    printed: str = ""  # output of the learner's file

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"{self.exercise} {'✓' if self.passed else '✗'} {self.sentence}"


def check(number: str, answer: Answer) -> Verdict:
    """Check a function that solves an exercise of the course: `regard.check("3.2", masked_attention)`.

    The result is truthy if the function is right, and prints as one sentence. `regard learn` shows the progress.
    """
    exercise = find_exercise(number)
    if not callable(answer):
        raise TypeError(f"an answer must be a function: regard.check({number!r}, {exercise.function})")
    verdict = judge(exercise, answer)
    note_attempt(number, verdict.passed)
    return verdict


def judge(exercise: Exercise, answer: Answer) -> Verdict:
    """Compare an answer with the oracle; if it is wrong, find out why."""
    from .oracles import oracle_cases

    cases = oracle_cases(exercise.number)
    outcomes = [_call(answer, inputs) for inputs, _ in cases]
    pairs = list(zip(outcomes, cases, strict=True))
    if all(not outcome.changed and same(outcome.value, expected) for outcome, (_, expected) in pairs):
        right = localise(f"Right: it agrees with the reference in all {len(cases)} cases.")
        return Verdict(exercise.number, True, right)
    sentence = _recognise(exercise, outcomes, [inputs for inputs, _ in cases])
    if sentence is None:
        outcome, (_, expected) = next(pair for pair in pairs if pair[0].changed or not same(pair[0].value, pair[1][1]))
        sentence = localise(_describe(exercise.function, outcome.value, expected))
    return Verdict(exercise.number, False, sentence)


# ------------------------------------------------------------------------------------------- one call


@dataclass(frozen=True)
class Raised:
    """An exception instead of a value; two are the same if their kinds are."""

    kind: str
    message: str
    line: int | None


@dataclass(frozen=True)
class CallOutcome:
    """The result of a call, and whether it modified one of its arguments."""

    value: Any
    changed: bool = False


def _call(function: Answer, inputs: Sequence[Any]) -> CallOutcome:
    arguments = [_copy(x) for x in inputs]
    try:
        value = function(*arguments)
    except Exception as error:  # an answer may raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        line = next((x.lineno for x in reversed(frames) if x.filename == frames[0].filename), None)  # not one of torch
        return CallOutcome(Raised(type(error).__name__, " ".join(str(error).split())[:200], line))
    return CallOutcome(value, any(not same(now, before) for now, before in zip(arguments, inputs, strict=True)))


def _copy(x: Any) -> Any:
    if callable(x):
        return x
    return x.clone() if hasattr(x, "clone") else copy.deepcopy(x)


def same(got: Any, expected: Any) -> bool:
    """Whether two results are equal up to rounding; lists and tuples are compared element by element."""
    import torch

    if got is expected:
        return True
    if isinstance(expected, Raised) or isinstance(got, Raised):
        return isinstance(got, Raised) and isinstance(expected, Raised) and got.kind == expected.kind
    got, expected = _scalar(got), _scalar(expected)
    if isinstance(expected, torch.Tensor):
        is_shaped = isinstance(got, torch.Tensor) and got.shape == expected.shape
        alike = is_shaped and (got.dtype == torch.bool or expected.dtype != torch.bool)
        return alike and torch.allclose(got.double(), expected.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(expected, list | tuple):
        alike = isinstance(got, list | tuple) and len(got) == len(expected)
        return alike and all(same(a, b) for a, b in zip(got, expected, strict=True))
    if isinstance(expected, float):
        return isinstance(got, float | int) and (
            math.isclose(got, expected, rel_tol=1e-4, abs_tol=1e-9) or (math.isnan(got) and math.isnan(expected))
        )
    is_whole = isinstance(expected, int) and isinstance(got, float | int) and bool not in (type(got), type(expected))
    return bool((is_whole or type(got) is type(expected)) and got == expected)


def _scalar(x: Any) -> Any:
    """The number in a tensor or array of one element."""
    return x.item() if getattr(x, "shape", None) in ((), (1,)) else x


# ------------------------------------------------------------------------------------------- what is wrong


def _recognise(exercise: Exercise, outcomes: Sequence[CallOutcome], inputs: Sequence[Sequence[Any]]) -> str | None:
    """The message of the mistake, or of the two mistakes, with the same results as the answer on every input."""
    for mistakes in chain(combinations(exercise.mistakes, 1), combinations(exercise.mistakes, 2)):
        code = exercise.code_with(*mistakes)
        if len(mistakes) == 2 and code in map(exercise.code_with, mistakes):
            continue  # both change the same line
        try:
            wrong = function_in(code, exercise.function)
        except SyntaxError:  # the two replacements do not fit together
            continue
        if all(same(_call(wrong, case).value, outcome.value) for case, outcome in zip(inputs, outcomes, strict=True)):
            return " ".join(str(mistake.say) for mistake in mistakes)
    return None


def function_in(code: str, name: str) -> Answer:
    """The function that the code of an exercise defines."""
    names: dict[str, Any] = {}
    exec(compile(code, "<exercise>", "exec"), names)
    return names[name]


def _describe(name: str, got: Any, expected: Any) -> str:
    """A sentence about a wrong result that no known mistake explains."""
    if got is None or got is ...:
        return f"{name} returns nothing yet: fill the gap and return the answer."
    if isinstance(got, Raised):
        where = "" if got.line is None else f" in line {got.line}"
        return f"{name} raised {got.kind}{where}: {got.message}"
    return _difference(name, got, expected) or f"{name} modifies its arguments: work on a copy."


def _difference(name: str, got: Any, expected: Any) -> str | None:
    """A sentence about the first difference between two results; None if they are the same."""
    import torch

    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(got) != len(expected):
            if any(isinstance(x, torch.Tensor) for x in (*got, *expected)):
                return f"{name} returns {len(got)} values, where {len(expected)} are expected."
            return f"{name} returns {_short(got)}, where {_short(expected)} is right."
        differences = (_difference(name, *pair) for pair in zip(got, expected, strict=True))
        return next((sentence for sentence in differences if sentence is not None), None)
    if same(got, expected):
        return None
    got, expected = _scalar(got), _scalar(expected)
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if isinstance(got, type(expected)) or {type(got), type(expected)} == {int, float}:
            return f"{name} returns {_short(got)}, where {_short(expected)} is right."
        return f"{name} returns {_kind(got)}, where {_kind(expected)} is expected."
    if got.shape != expected.shape:
        return f"The shape is {tuple(got.shape)}, where {tuple(expected.shape)} is expected."
    if expected.dtype == torch.bool != got.dtype:
        return f"{name} returns numbers, where True and False are expected."
    got, expected = got.double(), expected.double()
    if not got.isfinite().all() and expected.isfinite().all():
        return "There is NaN or infinity where the reference has numbers."
    error = (got - expected).abs().nan_to_num(math.inf)
    at = [int(x) for x in torch.unravel_index(error.argmax(), error.shape)]
    value, right = float(got[tuple(at)]), float(expected[tuple(at)])
    return f"The numbers differ, most of all at {at}: {value:.4g}, where {right:.4g} is right."


def _kind(x: Any) -> str:
    return "a tensor" if type(x).__name__ == "Tensor" else f"a value of type {type(x).__name__}"


def _short(x: Any) -> str:
    inside = ", ".join(map(_short, x)) if isinstance(x, list) else ""
    text = f"[{inside}]" if inside else f"{x:.4g}" if isinstance(x, float) else repr(x)
    return text if len(text) <= 60 else f"{text[:57]}…"


# ------------------------------------------------------------------------------------------- a file, in its own process


def check_file(exercise: Exercise, file: Path, seconds: float = SECONDS) -> Verdict:
    """Check a learner's file in a separate process, with a time limit that starts once torch is imported."""
    if not file.is_file():
        raise UsageError(f"{file} does not exist; regard learn start {exercise.number} creates it")
    with tempfile.TemporaryDirectory(prefix="regard-learn-") as folder:
        code, result = Path(folder) / f"{exercise.file_name}.py", Path(folder) / "result.json"
        code.write_text(read_answer(file), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "regard.course", exercise.number, str(code), str(result), str(seconds)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds + _STARTING_SECONDS
            )
        except subprocess.TimeoutExpired:
            return _too_long(exercise, seconds, "")
        printed, errors = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
        if result.is_file():
            verdict = json.loads(result.read_text(encoding="utf-8"))
            return Verdict(exercise.number, verdict["passed"], verdict["sentence"], printed[-10_000:])
        if "Timeout (" in errors:
            return _too_long(exercise, seconds, errors)
        sentence = localise(f"Python ended before {exercise.function} returned (exit code {done.returncode}).")
        return Verdict(exercise.number, False, sentence, printed[-10_000:])


def _too_long(exercise: Exercise, seconds: float, dump: str) -> Verdict:
    """The verdict on a timeout; ``dump`` is the traceback of faulthandler, which has the line of the learner's file."""
    match = re.search(rf'{exercise.file_name}\.py", line (\d+)', dump)
    where = f"seconds in line {match[1]}" if match else "seconds"
    sentence = f"{exercise.function} took longer than {seconds:g} {where}: is there a loop that does not end?"
    return Verdict(exercise.number, False, localise(sentence))


def check_here(number: str, file: str, result: str, seconds: str) -> None:
    """Run the file, judge its function and write the verdict to ``result``. Exits the process after ``seconds``."""
    exercise = find_exercise(number)
    from . import oracles  # imports torch before the time limit starts

    oracles.oracle_cases(number)
    faulthandler.dump_traceback_later(float(seconds), exit=True)  # works even if a loop in C holds the interpreter
    try:
        verdict = _judge_file(exercise, file)
    finally:
        faulthandler.cancel_dump_traceback_later()
    write_atomic(Path(result), json.dumps({"passed": verdict.passed, "sentence": verdict.sentence}).encode())


def _judge_file(exercise: Exercise, file: str) -> Verdict:
    name = exercise.function
    try:
        names = runpy.run_path(file, run_name="exercise")
    except Exception as error:  # a learner's file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [*(frame.lineno for frame in frames if frame.filename == file), getattr(error, "lineno", None)]
        where = next((f" in line {line}" for line in reversed(lines) if line), "")
        message = getattr(error, "msg", None) or " ".join(str(error).split())[:200]
        sentence = f"the file cannot be run: {type(error).__name__}{where}: {message}"
        return Verdict(exercise.number, False, localise(sentence))
    if not callable(names.get(name)):
        return Verdict(exercise.number, False, localise(f"there is no function {name} in the file: keep its name."))
    return judge(exercise, names[name])
