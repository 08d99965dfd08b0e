"""The course's exercises: solutions pass, typical mistakes fail with their sentence, and learners' files are tested."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.course import checking
from regard.course.checking import check_file, function_in, judge, same
from regard.course.exercises import Exercise, chapters, find_exercise, notebook_json

EXERCISES = [exercise for chapter in chapters() for exercise in chapter.exercises]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, and progress of one's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "state" / "regard" / "learn.json"


# ------------------------------------------------------------------------------------------- the exercises


def test_there_are_forty_in_eight_chapters_and_two_languages() -> None:
    assert len(EXERCISES) == 40
    for chapter in chapters():
        numbers = [exercise.number for exercise in chapter.exercises]
        assert numbers == [f"{chapter.number}.{n}" for n in range(1, len(numbers) + 1)]
    for exercise in EXERCISES:
        texts = [exercise.task, *exercise.hints, *(mistake.say for mistake in exercise.mistakes)]
        assert len(exercise.mistakes) >= 2
        assert all(re.search("[가-힣]", text.ko) and not re.search("[가-힣]", text.en) for text in texts)
        assert f"def {exercise.function}(" in exercise.template
        assert len(exercise.template) < len(exercise.solution) + 200


def test_every_chapter_lists_its_exercises_in_both_languages() -> None:
    docs = Path(__file__).resolve().parents[1] / "docs"
    for chapter in chapters():
        for page, of in ((docs / "learn" / chapter.page, "en"), (docs / "ko" / "learn" / chapter.page, "ko")):
            text = page.read_text(encoding="utf-8")
            for exercise in chapter.exercises:
                assert f"- **{exercise.number}** {getattr(exercise.title, of)}\n" in text
            assert text.startswith(f"# {chapter.number} · {getattr(chapter.title, of)}\n")


@pytest.mark.parametrize("exercise", [pytest.param(each, id=each.number) for each in EXERCISES])
def test_the_solution_passes_and_each_mistake_gets_its_sentence(exercise: Exercise) -> None:
    assert judge(exercise, function_in(exercise.solution, exercise.function)).passed
    for mistake in exercise.mistakes:
        assert mistake.old in exercise.solution
        verdict = judge(exercise, function_in(exercise.code_with(mistake), exercise.function))
        assert (verdict.passed, verdict.sentence) == (False, mistake.say.en)
    gap = judge(exercise, function_in(exercise.template, exercise.function))
    assert gap.sentence == f"{exercise.function} returns nothing yet: fill the gap and return the answer."


# ------------------------------------------------------------------------------------------- answers in one's own words


def einsum_without_root(q: Any, k: Any, v: Any) -> Any:
    return torch.einsum("bhts,bhse->bhte", torch.einsum("bhtd,bhsd->bhts", q, k).softmax(3), v)


def mask_by_product(q: Any, k: Any, v: Any, mask: Any) -> Any:
    e = torch.exp(q @ k.T / q.size(1) ** 0.5)
    e = e / e.sum(1, keepdim=True)
    return torch.where(mask, e, 0 * e) @ v


def softmax_of_columns(scores: Any) -> Any:
    e = (scores - scores.amax(0)).exp()
    return e / e.sum(0)


def smoothing_of_others(logits: Any, targets: Any, eps: float) -> Any:
    log_p = logits.log_softmax(1)
    y = torch.full_like(logits, eps / (logits.size(1) - 1)).scatter(1, targets[:, None], 1 - eps)
    return (-(y * log_p).sum() / len(targets)).item()


def loss_over_padding(logits: Any, targets: Any, pad_id: int) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_of_wrong_shape(logits: Any, targets: Any, pad_id: int) -> Any:
    return torch.nn.functional.cross_entropy(logits, targets)  # raised inside torch, but this is the learner's line


def neighbours_rotated(x: Any, positions: Any) -> Any:
    d = x.shape[-1]
    freqs = torch.tensor([10000 ** (-2 * i / d) for i in range(d // 2)])
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones(len(positions), d // 2), positions[:, None] * freqs
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


def own_words(logits: Any) -> Any:
    top = logits.max(1, keepdim=True).values
    return (logits - top - (logits - top).exp().sum(1, keepdim=True).log()).exp()


def one_state_at_a_time(states: Any, norm: Any, unembedding: Any) -> Any:
    return torch.stack([(unembedding @ norm(state)).softmax(0) for state in states])


def ids_as_tensors(next_logits: Any, prompt: Any, eos: int, max_new: int) -> Any:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new and (len(tokens) == len(prompt) or tokens[-1] != eos):
        tokens.append(next_logits(tokens).argmax())
    return tokens


def best_by_tensor(hypotheses: Any, alpha: float) -> Any:
    return torch.tensor([sum(each) / len(each) ** alpha for each in hypotheses]).argmax()


def best_by_numpy(hypotheses: Any, alpha: float) -> Any:
    return np.argmax([sum(each) / len(each) ** alpha for each in hypotheses])


def root_before_eps(x: Any, weight: Any, bias: Any) -> Any:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + 1e-5) * weight + bias


def loss_without_zeros(logits: Any, targets: Any, pad_id: int) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


@pytest.mark.parametrize(
    ("number", "answer", "says"),
    [
        ("2.3", einsum_without_root, "√d is missing"),
        ("3.2", mask_by_product, "The mask comes after the softmax"),
        ("2.2", softmax_of_columns, "Wrong axis"),
        ("6.7", smoothing_of_others, "eps is spread over the other V − 1 classes"),
        ("6.6", loss_over_padding, "Padding counts as if it were text"),
        ("3.5", neighbours_rotated, "The pairs are neighbours here"),
        ("2.2", own_words, None),
        ("8.4", one_state_at_a_time, None),
        ("7.1", ids_as_tensors, None),
        ("7.5", best_by_tensor, None),
        ("7.5", best_by_numpy, None),
        ("7.5", lambda hypotheses, alpha: torch.tensor(9), "best_hypothesis returns 9, where "),
        ("6.1", root_before_eps, "eps is added to the root"),
        (
            "6.2",
            lambda x, weight: torch.nn.functional.normalize(x, dim=2) * x.shape[2] ** 0.5 * weight,
            "eps is missing",
        ),
        ("6.6", loss_without_zeros, "token_loss returns "),
        (
            "3.1",
            lambda n: [[j <= i for j in range(n)] for i in range(n)],
            "returns a value of type list, where a tensor",
        ),
        ("3.1", lambda n: torch.ones(n, n).tril(), "returns numbers, where True and False are expected"),
        ("2.1", lambda q, k: q @ k.T / 7, "The numbers differ, most of all at ["),
        ("2.1", lambda q, k: (q @ k.T).flatten(), r"The shape is (15,), where (3, 5) is expected."),
        ("6.1", lambda x, weight, bias: x / 0 * 0, "There is NaN or infinity"),
        ("2.4", lambda query, keys, values: [0.0], "attend_one returns [0], where ["),
        ("1.1", lambda words: [["".join(word)] for word in words], "returns ['low'], where ['lo', 'w'] is right"),
        ("7.4", lambda scores, log_probs: (scores, scores), "returns 2 values, where 3 are expected"),
        ("6.8", lambda step, d_model, warmup: 0.5, "returns 0.5, where"),
        ("5.1", lambda weights, d_weights: weights[9], "raised IndexError in line"),
        ("6.6", loss_of_wrong_shape, f"raised RuntimeError in line {loss_of_wrong_shape.__code__.co_firstlineno + 1}:"),
    ],
)
def test_an_answer_in_other_words(number: str, answer: Callable[..., Any], says: str | None) -> None:
    verdict = regard.check(number, answer)
    assert bool(verdict) == (says is None)
    assert says is None or says in verdict.sentence
    assert repr(verdict).startswith(f"{number} {'✓' if verdict else '✗'} ")


def test_two_mistakes_at_once_and_a_changed_argument() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT, dim=2) @ v

    assert regard.check("2.3", attention).sentence.count("√d is missing") == 1
    assert "Wrong axis" in regard.check("2.3", attention).sentence

    def in_place(x: Any, weight: Any) -> Any:
        return x.div_((x.square().mean(-1, keepdim=True) + 1e-6).sqrt()).mul_(weight)

    assert regard.check("6.2", in_place).sentence == "rms_norm modifies its arguments: work on a copy."
    with pytest.raises(TypeError, match="an answer must be a function"):
        regard.check("2.1", 3)  # type: ignore[arg-type]  # as somebody might


# ------------------------------------------------------------------------------------------- at the command line


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_a_learner_starts_tries_asks_and_solves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    """Each file is judged in this process: the next test starts one."""

    def in_process(exercise: Exercise, file: Path) -> checking.Verdict:
        return checking._judge_file(exercise, str(file))

    monkeypatch.setattr(checking, "check_file", in_process)
    assert main(["learn"]) == 0
    listed = said(capsys)
    assert "3 · Masks and positions  (docs/learn/3-masks-and-positions.md)" in listed
    assert f"0 of 40 solved; progress is kept in {state}" in listed
    assert main(["learn", "solution", "3.2"]) == 2
    assert "the solution of 3.2 is shown after an attempt" in capsys.readouterr().err
    assert main(["learn", "start", "3.2"]) == 0
    assert "Fill the gap in exercise_3_2.py, then: regard learn check 3.2" in said(capsys)
    file = Path("exercise_3_2.py")
    assert "in which a query looks only where" in file.read_text()
    assert main(["learn", "start", "3.2"]) == 2, "the learner's work is not written over"
    assert main(["learn", "check", "3.2"]) == 1
    assert "masked_attention returns nothing yet" in said(capsys)
    exercise = find_exercise("3.2")
    file.write_text(exercise.code_with(exercise.mistakes[0]))
    assert main(["learn", "check", "3.2"]) == 1
    assert said(capsys) == f"3.2 ✗ {exercise.mistakes[0].say.en}\n"
    for n in (1, 2, 2):
        assert main(["learn", "hint", "3.2"]) == 0
        shown = capsys.readouterr()
        assert shown.out == f"{n}/2  {exercise.hints[n - 1].en}\n"
        assert ("That is the last hint" in shown.err) == (n == 2)
    assert main(["learn", "solution", "3.2"]) == 0
    file.write_text(said(capsys))
    assert main(["learn", "check", "3.2", "--json"]) == 0
    assert json.loads(said(capsys))["passed"] is True
    file.write_text("import torch\ndef masked_attention(:\n")
    assert main(["learn", "check", "3.2"]) == 1
    assert "the file cannot be run: SyntaxError in line 2: invalid syntax" in said(capsys)
    file.write_text("x = 1\n")
    assert main(["learn", "check", "3.2"]) == 1
    assert "there is no function masked_attention in the file" in said(capsys)
    assert main(["learn", "list", "--json"]) == 0
    entry = json.loads(said(capsys))["chapters"][2]["exercises"][1]
    assert (entry["number"], entry["attempts"], entry["solved"], entry["hints"]) == ("3.2", 5, True, 2)
    assert main(["learn", "check", "9.1"]) == 2
    assert "there is no exercise 9.1; regard learn lists them" in capsys.readouterr().err


def test_a_file_runs_in_a_process_of_its_own_which_ends(state: Path) -> None:
    exercise = find_exercise("7.1")
    notebook = Path("answer.ipynb")
    cells = [("markdown", "hello"), ("code", f"%time\nprint('seen')\n{exercise.solution}"), ("code", "regard.check()")]
    notebook.write_bytes(notebook_json(cells))
    verdict = check_file(exercise, notebook)
    assert verdict.passed, verdict
    assert verdict.printed == "seen\n"
    endless = exercise.solution.replace("for _ in range(max_new):", "while True:").replace("break", "pass")
    Path("endless.py").write_text(endless)
    slow = check_file(exercise, Path("endless.py"), seconds=0.5)
    assert re.fullmatch(r"greedy took longer than 0.5 seconds in line \d+: is there a loop .*", slow.sentence)
    Path("gone.py").write_text("import os\nos._exit(3)\n")
    assert check_file(exercise, Path("gone.py")).sentence == "Python ended before greedy returned (exit code 3)."


def test_a_missing_file_is_named_without_another_exercise(capsys: pytest.CaptureFixture[str]) -> None:
    Path("exercise_3_2.py").touch()
    assert main(["learn", "check", "3.3"]) == 2
    assert capsys.readouterr().err == "regard: exercise_3_3.py does not exist; regard learn start 3.3 creates it\n"


def test_a_file_in_another_encoding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exercise_1_1.py"
    file.write_text("# 한국어\n", encoding="cp949")
    assert main(["learn", "check", "1.1", str(file)]) == 2
    assert capsys.readouterr().err == f"regard: {file} is not UTF-8 text\n"


def test_a_notebook_has_the_task_the_gap_and_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "start", "8.1", "--notebook"]) == 0
    notebook = json.loads(Path("exercise_8_1.ipynb").read_text(encoding="utf-8"))
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    assert (kinds, notebook["nbformat"]) == (["markdown", "code", "code"], 4)
    assert "".join(notebook["cells"][2]["source"]) == 'import regard\n\nregard.check("8.1", attend_in_blocks)'


def test_in_korean(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_LANG", "ko")
    assert main(["learn", "start", "2.1"]) == 0
    assert "빈칸을 채운 뒤: regard learn check 2.1" in said(capsys)
    assert "모든 쿼리와 모든 키의 점수" in Path("exercise_2_1.py").read_text(encoding="utf-8")
    assert "√d로 나누지 않았습니다" in regard.check("2.1", lambda q, k: q @ k.T).sentence
    for answer in (lambda q, k: None, lambda q, k: 3, lambda q, k: q, lambda q, k: q @ k.T / 7, lambda q, k: q[9]):
        verdict = regard.check("2.1", answer)
        assert not re.search("[a-z]{3,} [a-z]{3,}", verdict.sentence.partition("오류가 났습니다")[0])
    assert regard.check("2.1", lambda q, k: q @ k.T / q.shape[1] ** 0.5).sentence.startswith("맞습니다.")
    assert main(["learn"]) == 0
    listed = said(capsys)
    assert "40개 가운데 1개 풀었습니다." in listed
    assert "2 · 공식  (docs/ko/learn/2-the-formula.md)" in listed


@pytest.mark.parametrize(("got", "expected"), [(20001, 20000), (True, 1), (1, True), (3.0001, 3)])
def test_whole_numbers_and_truth_values_are_compared_exactly(got: Any, expected: Any) -> None:
    assert not same(got, expected)
    assert same(expected, expected)
