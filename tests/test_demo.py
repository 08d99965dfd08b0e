"""`regard demo`: all of it at a small size, stopped at every stage and gone on with, in both languages, and served."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from forked_shell import Shell
from regard import demo as demo_run
from regard.cli import main
from regard.demo import demo_screen
from regard.demo.demo_screen import DemoTexts
from regard.foundation.language import environment_language
from training.runs import told_after

SRC = Path(__file__).resolve().parents[1] / "src"
WORDS = [
    *("train.steps=12", "train.save_every=4", "train.eval_every=0", "train.samples=0", "train.batch_tokens=512"),
    *("train.compile=off", "train.precision=fp32", "data.epoch_examples=300", "data.valid_rows=6"),
    *("model.d_model=32", "model.d_ff=64", "model.n_layers=1", "train.device=cpu"),
]
STAGES = ["train", "judge", "translate", "look", "export", "publish"]


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Let stages measure on few examples, and leave out the picture of the curves."""
    for name in ("N_ALIGNED", "N_SHAPES", "N_LOOKUP"):
        patch.setattr(demo_run, name, 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo that was stopped in training by a signal and finished by calling it again."""
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        with told_after(6):
            assert main(["demo", "--no-serve", "--out", str(out), *WORDS]) == 130
        assert (out / "run/checkpoints/step-000006").is_dir()
        assert not (out / "judge.json").exists()
        assert main(["demo", "--no-serve", "--out", str(out), *WORDS]) == 0
    return out


def again(out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Call it once more; what it says of each stage."""
    capsys.readouterr()
    assert main(["demo", "--no-serve", "--json", "--out", str(out), *options, *WORDS]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_it_leaves_everything_it_speaks_of(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = again(made, capsys)
    assert list(found["stages"]) == STAGES
    assert found["stages"]["train"]["steps"] == 12
    assert 0 <= found["stages"]["judge"]["exact"] <= 1
    assert found["stages"]["judge"]["n"] == 6
    assert [row["source"].split()[0] for row in found["stages"]["translate"]["sentences"][:3]] == [
        *("[polite]", "[formal]", "[plain]")
    ]
    assert (made / "look.html").read_text(encoding="utf-8").count("<html") == 1
    assert json.loads((made / "onnx/certificate.json").read_bytes())["passes"]
    assert found["stages"]["export"]["max_abs"] < 1e-4
    assert (made / "page/index.html").is_file()
    assert found["stages"]["publish"]["bytes"] < 10_000_000
    assert [path.name for path in made.glob(".*")] == []


@pytest.mark.slow
def test_called_again_it_keeps_all_of_it_and_shows_it(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*") if path.is_file()}
    assert main(["demo", "--no-serve", "--out", str(made), "--lang", "en", *WORDS]) == 0
    said = capsys.readouterr()
    assert said.out.count("already done") == len(STAGES)
    assert "cross attention, layer 1 of 1, mean of heads" in said.out
    assert "BLEU" in said.out
    assert "What to try next" in said.out
    assert said.out.count("regard translate") == said.out.count("regard look") == said.out.count("regard train") == 1
    assert said.err == ""
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "redone"),
    [
        (["judge.json"], ["judge"]),
        (["translate.json"], ["translate"]),
        (["look.html"], ["look"]),
        (["look.json", "translate.json"], ["translate", "look"]),
        (["run/evaluation.json"], ["train"]),
    ],
)
def test_only_what_is_missing_is_done_again(
    made: Path, lost: list[str], redone: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in lost:
        (made / name).unlink()
    found = again(made, capsys)["stages"]
    assert [name for name in STAGES if not found[name]["kept"]] == redone
    assert all((made / name).is_file() for name in lost)


@pytest.mark.slow
def test_stopped_while_it_exports(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads((made / "export.json").read_bytes())
    (made / "export.json").unlink()

    def stopped(*args: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_run, "export_onnx", stopped)
        assert main(["demo", "--no-serve", "--lang", "en", "--out", str(made), *WORDS]) == 130
    assert "Run the same command to continue." in capsys.readouterr().err
    assert not (made / "export.json").exists()
    # Exporting once more, for real, would take as long as everything else together.
    monkeypatch.setattr(
        demo_run, "export_onnx", lambda *args: {name: before[name] for name in before if name != "model"}
    )
    found = again(made, capsys)["stages"]
    assert [name for name in STAGES if not found[name]["kept"]] == ["export"]


@pytest.mark.slow
def test_without_onnx_it_says_what_to_install_and_ends_well(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = (made / "export.json").read_bytes()
    (made / "export.json").unlink()

    def missing(*args: Any) -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'onnxscript'", name="onnxscript")

    monkeypatch.setattr(demo_run, "export_onnx", missing)
    assert main(["demo", "--no-serve", "--lang", "en", "--out", str(made), *WORDS]) == 0
    assert 'onnxscript is not installed; pip install "regard[export]"' in " ".join(capsys.readouterr().out.split())
    assert not (made / "export.json").exists()
    (made / "export.json").write_bytes(record)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


@pytest.mark.slow
def test_killed_in_training_it_goes_on_from_its_last_checkpoint(
    bash: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = [*WORDS[1:], "train.steps=4000"]
    called = [bash.regard, "demo", "--no-serve", "--out", str(out), *words]
    process = subprocess.Popen(called, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 400
        while not list(out.glob("run/checkpoints/step-*")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate(timeout=120)  # closed when what it started is gone too
    assert not (out / "run/model").exists()
    went_on: list[dict[str, Any]] = []

    def note(self: Any, name: str, **values: Any) -> None:
        went_on.append(values)

    monkeypatch.setattr("regard.demo.demo_screen.DemoScreen.note", note)
    with told_after(3):  # that it goes on is enough; 4,000 steps are not needed
        assert main(["demo", "--no-serve", "--out", str(out), *words]) == 130
    assert went_on[0]["step"] >= 4
    lines = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_it_ends_with_the_explorer_which_answers_until_it_is_told_to_stop(made: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", "demo", "--out", str(made), "--port", "0", "--lang", "en", *WORDS],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        url = None
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                url = found[0]
                break
        assert url is not None, process.stderr.read()
        with urllib.request.urlopen(f"{url}api/models", timeout=60) as answer:
            assert [model["task"] for model in json.load(answer)] == ["translate"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_it_speaks_korean(made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_LANG", "ko")
    assert main(["demo", "--no-serve", "--out", str(made), *WORDS]) == 0
    said = capsys.readouterr().out
    assert "7  학습" in said
    assert "다음에 해 볼 것" in said
    assert "kept" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lang", "fr"], "--lang fr is not one of en, ko"),
        (["train.out=x"], "--out DIR sets the directory"),
        (["data=pairs.tsv"], "regard train translate data.source=pairs.tsv"),
        (["train.stps=3"], "did you mean train.steps?"),
        (["--out", "occupied"], "holds something else"),
        (["--out", "other", "train.steps=3"], "holds a demo with no overrides"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_done(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("occupied").mkdir()
    Path("occupied/thesis.tex").write_text("mine")
    Path("other").mkdir()
    Path("other/demo.json").write_text('{"words": []}')
    assert main(["demo", "--no-serve", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert Path("occupied/thesis.tex").read_text() == "mine"


def test_both_languages_say_the_same_things() -> None:
    for key, texts in demo_screen.load_texts().items():
        names = [{name for _, name, _, _ in Formatter().parse(text) if name is not None} for text in texts.values()]
        assert names[0] == names[1], key
        assert re.search("[가-힣]", texts["ko"]), key
    with pytest.raises(ValueError, match="is not one of en, ko"):
        DemoTexts("de")


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({"LANG": "ko_KR.UTF-8"}, "ko"),
        ({"LANG": "ko_KR.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "", "LC_MESSAGES": "ko"}, "ko"),
        ({"LANG": "en_US.UTF-8", "REGARD_LANG": "ko"}, "ko"),
        ({"LC_ALL": "ko_KR.UTF-8", "REGARD_LANG": "en"}, "en"),
        ({}, "en"),
    ],
)
def test_the_language_of_the_environment(
    environ: dict[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REGARD_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert environment_language() == language


def test_the_sentences_come_with_the_grammars_own_answers() -> None:
    pairs = demo_run.demo_sentences()
    assert len({pair.target for pair in pairs}) == len(pairs) == 6
    assert len({pair.source.partition(" ")[2] for pair in pairs[:3]}) == 1
