"""Knowledge distillation: a teacher's probabilities in the loss, and its translations as training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import cli
from regard.data.packing import IGNORE
from regard.errors import UsageError
from regard.recipes import run_config
from regard.training.distillation import distillation_loss
from regard.training.loss import Batch, batch_loss
from regard.training.run_directory import RunDirectory
from regard.training.tasks.translation import Translate

from .runs import assert_same, metrics, train, words_of, write_data
from .test_initial_model import FAST, hf_directory

STUDENT = ("train.steps=2", "train.teacher_weight=0.8", "train.teacher_temperature=2.0")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """A run of two tasks, and what it learned from."""
    folder, made = tmp_path_factory.mktemp("teachers"), {}
    for task in ("translate", "classify"):
        data = write_data(task, folder)
        train(task, folder / task, data, "train.steps=4")
        made[task] = folder / task, data
    return made


def student_words(task: str, data: str, teacher: Path, out: Path, *more: str) -> list[str]:
    """Of a student that is smaller; its tokens are left to the teacher."""
    words = words_of(task, data, f"train.teacher={teacher}", f"train.out={out}", "model.d_ff=12", *STUDENT, *more)
    return [word for word in words if not word.startswith("data.tokenizer")]


def test_the_loss_is_hintons() -> None:
    torch.manual_seed(0)
    student, teacher = (regard.build("gpt2", vocab_size=11, d_model=8, n_heads=2, n_layers=1, d_ff=8) for _ in range(2))
    student.train(), teacher.eval()
    tokens = torch.randint(0, 11, (2, 5))
    targets = torch.randint(0, 11, (2, 5))
    targets[1, 3:] = IGNORE
    batch, t = Batch((tokens,), targets), 2.0
    ours = distillation_loss(student, batch, 0.1, teacher, weight=0.3, temperature=t)
    p, q = (F.log_softmax(model(tokens)[targets != IGNORE] / t, -1) for model in (student, teacher))
    divergence = (q.exp() * (q - p)).sum()
    expected = 0.7 * batch_loss(student, batch, 0.1) + 0.3 * t**2 * divergence
    assert torch.allclose(ours, expected, rtol=1e-5)
    assert not any(p.grad is not None for p in teacher.parameters())
    student.eval()
    assert torch.equal(distillation_loss(student, batch, 0.0, teacher), batch_loss(student, batch)), "held-out data"


@pytest.mark.parametrize("task", ["translate", "classify"])
def test_a_student_has_its_teachers_tokens_and_goes_on(task: str, teachers: Any, tmp_path: Path) -> None:
    teacher, data = teachers[task]
    words = student_words(task, data, teacher, tmp_path / "whole", "train.steps=4")
    assert cli.main(["train", task, "--quiet", *words]) == 0
    parts = student_words(task, data, teacher, tmp_path / "parts", "train.steps=4", "train.stop_at=2")
    assert cli.main(["train", task, "--quiet", *parts]) == 0
    assert cli.main(["train", "--quiet", "--resume", str(tmp_path / "parts")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")
    ours, theirs = (RunDirectory.open(path).processor for path in (tmp_path / "whole", teacher))
    assert ours.source.content == theirs.source.content
    alone = [word for word in words if not word.startswith(("train.teacher", "train.out"))]
    tokenizer = "data.tokenizer=words"
    assert cli.main(["train", task, "--quiet", *alone, tokenizer, f"train.out={tmp_path / 'alone'}"]) == 0
    first = [metrics(tmp_path / name)[0]["loss"] for name in ("whole", "alone")]
    assert first[0] != first[1], "the teacher has a part in the loss"


def test_a_hugging_face_directory_teaches_a_small_model(tmp_path: Path) -> None:
    teacher = hf_directory("gpt2", tmp_path / "theirs")
    sizes = ("model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.d_ff=16", "data.max_len=16")
    words = [f"data={write_data('lm', tmp_path)}", "data.documents=line", *FAST, *sizes, f"train.teacher={teacher}"]
    assert cli.main(["train", "lm", "--quiet", *words, f"train.out={tmp_path / 'run'}"]) == 0
    model = regard.load(tmp_path / "run")
    assert model.config.d_model == 16
    assert model.processor.source.content == (teacher / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.tokenizer=chars",), "has other tokens than this run; leave out data.tokenizer"),
        (("train.teacher=nowhere",), "nowhere"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(words: Any, message: str, teachers: Any, tmp_path: Path) -> None:
    teacher, data = teachers["translate"]
    typed = student_words("translate", data, teacher, tmp_path / "run")
    named = {word.partition("=")[0]: word for word in (*typed, *words)}
    with pytest.raises(Exception, match=message):
        regard.train(run_config("translate", list(named.values())), style="quiet")
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_another_task_is_refused(teachers: Any, tmp_path: Path) -> None:
    (teacher, _), (_, data) = teachers["translate"], teachers["classify"]
    with pytest.raises(UsageError, match="not a model for the task classify"):
        regard.train(run_config("classify", student_words("classify", data, teacher, tmp_path / "run")), style="quiet")


# ------------------------------------------------------------------------------------- sequence level


def test_distill_writes_what_the_teacher_translates(teachers: Any, tmp_path: Path) -> None:
    """`regard distill`: sources it learned from with its own beam search, held-out pairs as they are."""
    teacher, data = teachers["translate"]
    out = tmp_path / "student.tsv"
    assert cli.main(["distill", str(teacher), str(out), "--beam", "2", "--device", "cpu"]) == 0
    rows = [line.split("\t") for line in out.read_text(encoding="utf-8").splitlines()]
    held_out = [line.split("\t") for line in (tmp_path / "student.valid.tsv").read_text(encoding="utf-8").splitlines()]
    known = dict(line.split("\t") for line in Path(data).read_text(encoding="utf-8").splitlines())
    assert len(rows) > 9, "what the teacher has no words for is left out"
    assert {source for source, _ in rows} | {source for source, _ in held_out} <= set(known)
    assert not {source for source, _ in rows} & {source for source, _ in held_out}
    assert all(known[source] == target for source, target in held_out)
    sources = [source for source, _ in rows[:3]]
    assert [target for _, target in rows[:3]] == list(regard.translate(regard.load(teacher), sources, beam=2))
    valid = f"data.valid={tmp_path / 'student.valid.tsv'}"
    words = student_words("translate", str(out), teacher, tmp_path / "run", valid)
    assert cli.main(["train", "translate", "--quiet", *words]) == 0


def test_distill_takes_other_sources(teachers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher, data = teachers["translate"]
    words = ["distill", str(teacher), str(tmp_path / "s.jsonl"), f"data.source={data}", "--limit", "3", "--json"]
    assert cli.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["pairs"], said["valid"], said["beam"]) == (3, None, 4)
    assert len((tmp_path / "s.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert cli.main(["distill", str(teacher), str(tmp_path / "s.txt")]) == 2
    assert "written as .tsv or .jsonl" in capsys.readouterr().err
    assert cli.main(["distill", str(teacher), str(tmp_path / "no/s.tsv")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    before = Path(data).read_bytes()
    assert cli.main(["distill", str(teacher), str(data)]) == 2
    assert "is the file to read, which would be lost" in capsys.readouterr().err
    assert Path(data).read_bytes() == before
    valid = tmp_path / "mine.valid.tsv"  # the held-out pairs would be written there
    valid.write_bytes(before)
    words = [f"data.source={data}", f"data.valid={valid}"]
    assert cli.main(["distill", str(teacher), str(tmp_path / "mine.tsv"), *words]) == 2
    assert f"{valid} is the file to read, which would be lost" in capsys.readouterr().err
    assert valid.read_bytes() == before
    assert cli.main(["distill", str(teachers["classify"][0]), str(tmp_path / "s.tsv")]) == 2
    assert "sequences are distilled from a translator" in capsys.readouterr().err


def test_distill_does_not_overwrite_a_file_of_a_folder_it_reads(
    teachers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher, data = teachers["translate"]
    (tmp_path / "pairs").mkdir()
    train = tmp_path / "pairs/train.tsv"
    train.write_bytes(before := Path(data).read_bytes())
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (train.parent, "~/pairs", "~/pairs/train.tsv", f"{data}, {train}"):
        assert cli.main(["distill", str(teacher), str(train), f"data.source={source}", "--limit", "1"]) == 2
        assert "is the file to read, which would be lost" in capsys.readouterr().err
    assert train.read_bytes() == before
    assert cli.main(["distill", str(teacher), str(tmp_path / "pairs/new.tsv"), f"data.source={train.parent}"]) == 0


def test_no_pair_at_all_is_a_failure(
    teachers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Translate, "translate", lambda self, model, texts, **_: [" "] * len(texts))
    assert cli.main(["distill", str(teachers["translate"][0]), str(tmp_path / "s.tsv"), "--limit", "3"]) == 1
    assert "gave a pair: 3 empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
