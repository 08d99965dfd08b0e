"""The command line's promises: exit codes, one line on stderr, one document on stdout."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard import cli
from regard.config import RunConfig
from regard.errors import BadModelFile, Diverged, RegardError, UsageError
from regard.foundation.device import resolve_device
from regard.models import build
from regard.recipes import RECIPES


class Measured:
    """Stands in for the result of a measurement that would take minutes."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked

    def to_dict(self) -> dict[str, Any]:
        return {"lengths": self.asked["lengths"], "unit": "µs"}

    def to_text(self) -> str:
        return "a table"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """regard.experiments.bench_attention, replaced: the command is under test, not the measurement."""
    module = ModuleType("regard.experiments.bench_attention")
    module.asked = None

    def bench_attention(**asked: Any) -> Measured:
        asked.pop("progress")("measuring")
        module.asked = asked
        return Measured(asked)

    module.bench_attention = bench_attention
    module.choose_contenders = importlib.import_module(module.__name__).choose_contenders
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("REGARD_DEBUG", raising=False)
    return module


def fail_with(module: ModuleType, failure: BaseException) -> None:
    def bench_attention(**asked: Any) -> None:
        raise failure

    module.bench_attention = bench_attention


def test_version_also_as_a_module() -> None:
    answer = subprocess.run([sys.executable, "-m", "regard", "--version"], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"regard {regard.__version__}\n", "")


def test_a_threshold_is_a_probability(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["classify", "runs/any", "text", "--threshold", "80"]) == 2
    assert "threshold" in capsys.readouterr().err


@pytest.mark.parametrize(("world", "code"), [("2", 0), ("1", -signal.SIGABRT)])
def test_a_process_of_torchrun_skips_the_interpreters_shutdown(world: str, code: int) -> None:
    """In which a thread of gloo that frees a tensor would abort it; here an exit handler does."""
    program = "import atexit, os; atexit.register(os.abort); from regard.cli import run; run()"
    env = {**os.environ, "WORLD_SIZE": world}
    answer = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, env=env)
    assert answer.returncode == code
    assert code != 0 or answer.stdout == f"regard {regard.__version__}\n"


def test_bench_attention_hands_its_options_on(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--lengths 128,256 --mechanisms sdpa,tiled --heads 2 --width 16 --no-causal --backward --out somewhere"
    assert cli.main(["bench", "attention", *words.split()]) == 0
    assert bench.asked == {
        "lengths": [128, 256],
        "mechanisms": ["sdpa", "tiled"],
        "n_heads": 2,
        "d_head": 16,
        "causal": False,
        "backward": True,
        "out": Path("somewhere"),
    }
    said = capsys.readouterr()
    assert said.out == "a table\n"
    assert said.err == "measuring\n"


def test_bench_attention_measures_everything_unless_told(bench: ModuleType) -> None:
    assert cli.main(["bench", "attention"]) == 0
    assert bench.asked["mechanisms"] is None
    assert bench.asked["causal"] is True
    assert bench.asked["backward"] is False
    assert bench.asked["out"] == Path("runs/bench-attention")


def test_json_is_one_document_on_stdout(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "attention", "--lengths", "64", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"lengths": [64], "unit": "µs"}
    assert said.err == "measuring\n"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RegardError("it failed"), 1),
        (ValueError("d_model=10 is not divisible\nby n_heads=3"), 1),
        (BadModelFile("model.safetensors: checksum differs"), 3),
        (Diverged("loss is nan at step 12"), 4),
    ],
)
def test_a_failure_is_one_line_and_its_own_exit_code(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], failure: Exception, code: int
) -> None:
    fail_with(bench, failure)
    assert cli.main(["bench", "attention"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    advice = "; a smaller train.lr or a longer train.warmup often helps" if isinstance(failure, Diverged) else ""
    assert said.err == f"regard: {' '.join(str(failure).split())}{advice}\n"


def test_a_hint_that_another_process_gave_is_not_repeated(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/run.json").touch()
    message = "there is no directory 'runs/dem'; did you mean runs/demo?"
    for said in (message.partition(";")[0], message):
        fail_with(bench, RegardError(f"the server did not start: {said}"))
        assert cli.main(["bench", "attention"]) == 1
        assert capsys.readouterr().err == f"regard: the server did not start: {message}\n"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(UsageError, match=r"^device=cuda:1 is not available on this machine"):
        resolve_device("cuda:1")
    with pytest.raises(UsageError, match=r"^device=cuda:first is not a device, such as cuda or cuda:0$"):
        resolve_device("cuda:first")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("x.json", "x.json"), ("/runs/.x.json.1a2b3c4d", "/runs/x.json"), ("/a/.b.0a1b2c3d.saving/c", "/a/b/c")],
)
def test_what_the_system_refuses_is_a_sentence(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], name: str, shown: str
) -> None:
    """Without the number of the error, and without the name a file has while it is written."""
    fail_with(bench, FileNotFoundError(2, "No such file or directory", name))
    assert cli.main(["bench", "attention"]) == 1
    assert capsys.readouterr().err == f"regard: {shown} cannot be read or written: No such file or directory\n"


def test_a_full_card_is_no_bug(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(bench, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert cli.main(["bench", "attention"]) == 1
    told = "regard: there is not enough memory (CUDA out of memory. Tried to allocate 2.00 GiB); a smaller model, "
    assert capsys.readouterr().err == f"{told}a smaller batch or shorter texts need less\n"


@pytest.mark.parametrize("how", ["option", "environment"])
def test_debug_shows_the_traceback(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    fail_with(bench, Diverged("loss is nan"))
    if how == "environment":
        monkeypatch.setenv("REGARD_DEBUG", "1")
    assert cli.main([*(["--debug"] if how == "option" else []), "bench", "attention"]) == 4
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "Diverged: loss is nan" in said


def test_a_bug_is_not_hidden(bench: ModuleType) -> None:
    fail_with(bench, ZeroDivisionError("a bug of ours"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["bench", "attention"])


def test_ctrl_c_is_130(bench: ModuleType) -> None:
    fail_with(bench, KeyboardInterrupt())
    assert cli.main(["bench", "attention"]) == 130


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "attention", "--lengths", "12,abc"],
        ["bench", "attention", "--lengths", "0"],
        ["bench", "attention", "--lengths", ","],
        ["bench", "attention", "--heads", "0"],
        ["bench", "attention", "--nonsense"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_and_names_what_was_wrong(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words[-2 if "--nonsense" not in words and len(words) > 1 else -1] in said.err
    assert bench.asked is None


# ------------------------------------------------------------------------------------- info


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24, "vocab_size": 30, "max_len": 12}
    return build("gpt2", **sizes).save(tmp_path_factory.mktemp("saved") / "model")


def test_info_says_what_a_directory_holds(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", str(saved)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for fact in (
        "gpt2: decoder",
        "4,624 parameters",
        "verified: ",
        "d_model = 16",
        "model.safetensors",
        "manifest.json",
    ):
        assert fact in said.out, said.out
    assert "n_segments" not in said.out, "only what differs from the defaults"


def test_info_as_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", str(saved), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parameters"] == build("gpt2", device="meta", **document["config"]).n_parameters
    assert (document["architecture"], document["model_type"], document["verified"]) == ("decoder", "gpt2", True)
    assert set(document["files"]) == {path.name for path in saved.iterdir()}


def test_info_says_when_nobody_vouches(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(saved, foreign)
    (foreign / "manifest.json").unlink()
    for words in ([str(foreign)], [str(saved), "--no-verify"]):
        assert cli.main(["info", *words]) == 0
        assert "unverified: " in capsys.readouterr().out
        assert cli.main(["info", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["verified"] is False


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 20), "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: shutil.rmtree(folder), "there is no directory"),
    ],
)
def test_info_on_a_bad_directory_is_3_and_one_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], word: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(saved, bad)
    damage(bad)
    for words in ([], ["--json"]):
        assert cli.main(["info", str(bad), *words]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("regard: ")
        assert said.err.count("\n") == 1
        assert word in said.err


def test_info_reads_a_pickle_only_when_asked(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    shutil.copytree(saved, old)
    (old / "manifest.json").unlink()
    torch.save(load_file(old / "model.safetensors"), old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    assert cli.main(["info", str(old)]) == 3
    assert "--allow-pickle" in capsys.readouterr().err
    assert cli.main(["info", str(old), "--allow-pickle"]) == 0


# ------------------------------------------------------------------------------------- train and eval


class Trained(Measured):
    """Stands in for a run that would take minutes."""

    def to_dict(self) -> dict[str, Any]:
        return {"steps": 3}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What reached the room that trains; nothing is trained."""
    asked: dict[str, Any] = {}
    run, evaluation = ModuleType("regard.training.trainer"), ModuleType("regard.training.evaluation")

    def train(config: RunConfig, **options: Any) -> Trained:
        asked.update(config=config, **options)
        return Trained({})

    def resume(path: str, **options: Any) -> Trained:
        asked.update(path=path, **options)
        return Trained({})

    def evaluate(path: str, data: dict[str, Any], **options: Any) -> Trained:
        asked.update(path=path, data=data, **options)
        return Trained({})

    run.train, run.resume, evaluation.evaluate = train, resume, evaluate
    monkeypatch.setitem(sys.modules, run.__name__, run)
    monkeypatch.setitem(sys.modules, evaluation.__name__, evaluation)
    monkeypatch.delenv("REGARD_DEBUG", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return asked


def test_train_hands_the_run_on(training: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "lm", "data=text.txt", "train.steps=7", "model.n_layers=2", "train.out=007"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == "a table\n"
    config = training["config"]
    assert (config.task, config.data.source, config.train.steps) == ("lm", "text.txt", 7)
    assert (config.model.n_layers, config.train.out) == (2, "007")
    assert (training["style"], training["command"]) == ("auto", ["regard", *words])


def test_train_quietly_for_machines_and_from_a_preset(
    training: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--preset", "shapes", "train.steps=7", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"steps": 3}
    assert (training["style"], training["config"].task, training["config"].train.steps) == ("quiet", "caption", 7)
    assert cli.main(["train", "--preset", "shapes", "--json"]) == 0
    assert training["style"] == "json"
    assert training["config"].train.steps == RECIPES["shapes"]["train"]["steps"]


@pytest.mark.parametrize("suffix", [".yaml", ".toml", ".json"])
def test_a_saved_config_trains_the_same_run(training: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    file = str(tmp_path / f"run{suffix}")
    assert cli.main(["train", "lm", "data=text.txt", "train.clip=none", "model=gpt2", "--save-config", file]) == 0
    config = training["config"]
    assert cli.main(["train", "--config", file]) == 0
    assert training["config"] == config
    assert cli.main(["train", "lm", "--config", file, "train.steps=5"]) == 0
    assert training["config"] == config.with_(train=config.train.with_(steps=5))


def test_a_wrong_config_file_is_named_with_a_hint(
    training: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("task = 'lm'\n[train]\nstpes = 5\n")
    assert cli.main(["train", "--config", str(file)]) == 2
    assert capsys.readouterr().err == f"regard: {file}: there is no train.stpes; did you mean train.steps?\n"
    assert cli.main(["train", "lm", "--save-config", "run.ini"]) == 2
    assert "run.ini ends in .ini; a config file ends in .yaml" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "runs/a", "--config", str(file)]) == 2
    assert "--config cannot change it" in capsys.readouterr().err
    assert training == {}


def test_of_several_processes_the_first_answers(
    training: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["train", "lm"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["train", "lm"]) == 0
    assert capsys.readouterr().out == "a table\n"


def test_resume_takes_only_what_leaves_it_the_same_run(training: dict[str, Any]) -> None:
    assert cli.main(["train", "--resume", "runs/a", "train.steps=9", "train.stop_at=none"]) == 0
    assert training == {"path": "runs/a", "steps": 9, "stop_at": None, "style": "auto"}
    assert cli.main(["train", "--resume", "runs/a", "--quiet"]) == 0
    assert training["style"] == "quiet"
    words = ["train.lr=0.5", "train.device=cpu", "train.average=3", "data.source=x.tsv", "--schedule", "restart"]
    assert cli.main(["train", "--resume", "runs/a", *words]) == 0
    assert (training["lr"], training["device"], training["average"]) == (0.5, "cpu", 3)
    assert (training["data"], training["restart_schedule"]) == ({"source": "x.tsv"}, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "",
            "name a task first: regard train TASK, one of translate, lm, mlm, electra, sft, ",
        ),
        ("train.steps=3", "name a task first: regard train TASK, one of translate, lm, mlm, "),
        ("lmm", "there is no task 'lmm'; did you mean lm?"),
        ("lm train.stpes=3", "there is no train.stpes; did you mean train.steps?"),
        ("lm train.steps=few", "train.steps=few is not a whole number"),
        ("lm train.steps=0", "train.steps=0 must be at least 1"),
        ("lm --preset shape", "there is no preset 'shape'; did you mean shapes?"),
        ("--preset shape", "there is no preset 'shape'; did you mean shapes?"),
        ("classify", "classify needs data.source"),
        ("--resume a lm", "--resume RUN knows its task: leave out 'lm'"),
        ("--resume a train.seed=1", "train.seed cannot change in a resumed run; train.steps, train.stop_at, "),
        ("--resume a data.max_len=4", "data.max_len cannot change in a resumed run; data.source, data.valid, "),
        ("--resume a model.dropout=0", "model.dropout=0: only train.* and data.* can be given here"),
        ("--resume a --schedule again", "--schedule again is not one of restart, continue"),
        ("lm --schedule restart", "--schedule restart is for --resume RUN; for a new run, use train.schedule=…"),
        ("--resume a train.steps=0", "train.steps=0 must be at least 1"),
        ("--resume a --preset shapes", "--resume keeps the run's own recipe; --preset cannot change it"),
    ],
)
def test_wrong_words_are_2_and_one_sentence(
    training: dict[str, Any], capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert cli.main(["train", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"regard: {sentence}")
    assert said.err.count("\n") == 1
    assert training == {}


@pytest.mark.parametrize(
    ("word", "names"), [("--list", RECIPES), ("--fields", ["train.lr=0.001", "model.d_model=512"])]
)
def test_lists(training: dict[str, Any], capsys: pytest.CaptureFixture[str], word: str, names: list[str]) -> None:
    assert cli.main(["train", word]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names)
    assert cli.main(["train", word, "--json"]) == 0
    assert {"--list": "presets", "--fields": "train"}[word] in json.loads(capsys.readouterr().out)
    assert training == {}


def test_eval_hands_its_options_on(training: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    options = "--against runs/b --out o --split longer --beam 5 --stride 64 --limit 10 --device cpu --json"
    assert cli.main(["eval", "runs/a@1200", "data=test.tsv", "data.columns=0,1", *options.split()]) == 0
    assert json.loads(capsys.readouterr().out) == {"steps": 3}
    assert training == {
        "path": "runs/a@1200",
        "data": {"source": "test.tsv", "columns": ("0", "1")},
        "against": "runs/b",
        "out": Path("o"),
        "split": "longer",
        "beam": 5,
        "stride": 64,
        "limit": 10,
        "device": "cpu",
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.lr=1"], "train.lr=1: only data.* can be given here"),
        (["data.sorce=x"], "there is no data.sorce; did you mean data.source?"),
        (["--device", "gpu"], "--device gpu is not one of auto, cpu, cuda, mps"),
    ],
)
def test_eval_refuses_other_words(
    training: dict[str, Any], capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert cli.main(["eval", "runs/a", *words]) == 2
    assert capsys.readouterr().err == f"regard: {sentence}\n"
    assert training == {}


# ------------------------------------------------------------------------------------- what it costs to be told


def test_help_and_usage_errors_load_nothing_heavy() -> None:
    asked = [
        ["--help"],
        ["--version"],
        *([*command, "--help"] for command in (["train"], ["eval"], ["data"], ["data", "describe"], ["info"])),
        ["bench", "attention", "--help"],
        ["train", "--list"],
        ["train", "--fields"],
        ["train", "lm", "train.stpes=3"],
        ["train", "--resume", "a", "train.seed=1"],
        ["train", "classify"],
        ["eval", "a", "train.lr=1"],
        ["data", "describe", "en-ko", "data.nope=1"],
        ["data", "describe", "en-ko", "--tokenizer", "bpee"],
        ["bench", "attention", "--lengths", "x"],
        ["nonsense"],
    ]
    script = f"""
import json, sys
from regard.cli import main
loaded = {{}}
for words in {asked!r}:
    code = main(words)
    heavy = sorted({{"torch", "transformers", "matplotlib", "PIL"}} & set(sys.modules))
    loaded[" ".join(words)] = [code, heavy]
print(json.dumps(loaded))
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    loaded = json.loads(answer.stdout.splitlines()[-1])
    assert all(heavy == [] for _, heavy in loaded.values()), loaded
    for words, (code, _) in loaded.items():
        assert code == (0 if words.split()[-1] in ("--help", "--version", "--list", "--fields") else 2), words
