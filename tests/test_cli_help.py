"""Help with examples that can be typed, completion at the tab key, and failures that say what to type next."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from generation.spoken import captioner, classifier, image_classifier, language_model, picture, translator
from regard.cli import EXAMPLES, app, completion, doctor, main
from regard.recipes import run_config

ROOT = Path(__file__).resolve().parents[1]


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, each in getattr(command, "commands", {}).items():
            yield from walk(each, (*path, name))
        if not hasattr(command, "commands"):
            yield " ".join(path), command

    return walk(typer.main.get_command(app), ())


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_in_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES[name]) >= 2
    assert main([*name.split(), "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Examples" in said
    for typed, what_for in EXAMPLES[name]:
        assert " ".join(typed.split()) in said
        assert what_for in said


def test_the_program_itself_has_some_and_every_example_has_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "regard demo" in capsys.readouterr().out
    assert set(EXAMPLES) - {"regard"} == set(COMMANDS)


def test_commands_are_grouped_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    panels = re.findall(r"─ (Learn|Train|Look|Ship|Research|Commands) ─", said)
    assert panels == ["Learn", "Train", "Look", "Ship", "Research"]
    assert "Print the version and exit." in said


@pytest.mark.parametrize("name", ["", "data", *COMMANDS])
def test_flags_show_no_type(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert "--help" in said
    assert re.findall(r"<[a-z]+[ \[\]a-zA-Z]*>|\{[a-z]+\}", said) == []  # no <int range>, no {source}


@pytest.mark.parametrize("typed", [typed for rows in EXAMPLES.values() for typed, _ in rows])
def test_every_example_can_be_typed(typed: str) -> None:
    program, *words = shlex.split(typed)
    assert program == "regard"
    if words == ["--install-completion"]:
        return
    name = words[0] if words[0] in COMMANDS else " ".join(words[:2])
    command = COMMANDS[name]
    with command.make_context(name, words[len(name.split()) :], resilient_parsing=False) as ctx:
        if name != "train" or ctx.params["resume"]:
            return
        task, typed_words, preset = ctx.params["task"], list(ctx.params["words"] or ()), ctx.params["preset"]
    if preset is not None and "=" in task:
        task, typed_words = "lm", [task, *typed_words]
    assert run_config(task, typed_words, preset=preset).task == task


def test_examples_fit_a_narrow_terminal() -> None:
    assert max(len(text) for rows in EXAMPLES.values() for row in rows for text in row) <= 78


# ------------------------------------------------------------------------------------- completion


def offers(line: str, folder: Path | None = None, shell: str = "zsh") -> str:
    """What the shell is told for a line that ends at the cursor."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "_REGARD_COMPLETE": f"complete_{shell}"}
    if shell == "zsh":
        environ["_TYPER_COMPLETE_ARGS"] = line
    else:
        parts = re.split(r"(=)|\s+", line)  # bash takes words apart at =
        words = [part for part in parts if part]
        environ |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    script = "import sys; from regard.cli import main; code = main([]); sys.exit(7 if 'torch' in sys.modules else code)"
    answer = subprocess.run([sys.executable, "-c", script], env=environ, cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("regard tra", ['"train"', '"translate"'], ['"eval"']),
        ("regard train cl", ['"classify"', '"classify-images"'], ['"lm"']),
        ("regard train lm model.n_h", ['"model.n_heads="'], ["model.d_model"]),
        ("regard train lm train.optimiser=m", ['"train.optimiser=muon"'], ["adam"]),
        ("regard train lm model=gpt2-", ['"model=gpt2-medium"'], ["llama"]),
        ("regard train lm data=std", ['"data=stdlib"'], ["en-ko"]),
        ("regard train --preset sha", ['"shapes"', '"shakespeare"'], ["nsmc"]),
        ("regard translate --engine o", ['"onnx"'], ["torch"]),
        ("regard look runs/e", ['"runs/en-ko"'], ["runs/other"]),
        ("regard data describe sh", ['"shapes"'], ["stdlib"]),
    ],
)
def test_the_tab_key(line: str, offered: list[str], not_offered: list[str], tmp_path: Path) -> None:
    for name in ("en-ko", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    said = offers(line, tmp_path)
    assert all(word in said for word in offered), said
    assert not any(word in said for word in not_offered), said


def test_bash_which_takes_words_apart() -> None:
    assert offers("regard train lm train.schedule=co", shell="bash").split() == ["cosine", "constant"]


def test_models_are_offered_before_anything_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/run.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("x")
    assert completion.models("") == ["runs/a", "runs/"]
    assert completion.models("nowhere/x") == []
    assert "gpt2" in completion.presets_or_models("gp")
    assert "notes.txt" in completion.sources("no")


# ------------------------------------------------------------------------------------- what to type next


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    translator().save(folder / "translator")
    language_model().save(folder / "speaker")
    captioner().save(folder / "captioner")
    classifier().save(folder / "judge")
    classifier().save(folder / "a judge")
    image_classifier().save(folder / "eye")
    language_model().save(folder / "runs/lm")
    (folder / "photos").mkdir()
    (folder / "captions.tsv").write_text("a.png\ta dog\nb.png\ta cat\n", encoding="utf-8")
    picture(folder / "a.png")
    (folder / "pairs.tsv").write_text("one\teins\ntwo\n", encoding="utf-8")
    (folder / "text.txt").write_text("hello\n", encoding="utf-8")
    (folder / "latin.tsv").write_bytes("un café\ta café\n".encode("latin-1"))
    return folder


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["generate", "speeker", "hi"], 3, "did you mean speaker?"),
        (["look", "gpt2", "hi"], 3, "gpt2 is a preset: regard train TASK model=gpt2"),
        (["train", "--resume", "speaker"], 3, "regard train TASK train.init=speaker starts from its weights"),
        (["translate", "speaker", "hi"], 1, "it is for lm: regard generate speaker"),
        (["generate", "judge", "hi"], 1, "it is for classify: regard classify judge"),
        (["classify", "translator", "hi"], 1, "it is for translate: regard translate translator"),
        (["caption", "translator", "a.png"], 1, "it is for translate: regard translate translator"),
        (["generate", "captioner", "hi"], 1, "it is for caption: regard caption captioner"),
        (["generate", "translator", "hi"], 1, "continue a prompt; it is for translate: regard translate translator"),
        (["generate", "translator", "--file", "text.txt", "--lines"], 1, "regard translate translator"),
        (["generate", "eye", "hi"], 1, "it is for classify-images: regard classify eye"),
        (["translate", "judge", "hi"], 1, "it is for classify: regard classify judge"),
        (["translate", "a judge", "hi"], 1, "it is for classify: regard classify 'a judge'"),
        (["translate", "captioner", "hi"], 1, "it is for caption: regard caption captioner"),
        (["classify", "speaker", "hi"], 1, "it is for lm: regard generate speaker"),
        (["classify", "captioner", "a.png"], 1, "it is for caption: regard caption captioner"),
        (["caption", "speaker", "a.png"], 1, "it is for lm: regard generate speaker"),
        (["caption", "eye", "a.png"], 1, "it is for classify-images: regard classify eye"),
        (["classify", "eye", "a nice film"], 2, "no such file; this model reads image files"),
        (["classify", "judge", "a.png"], 2, "a.png is an image file, and this model reads text"),
        (["look", "speaker", "a.png"], 2, "a.png is an image file, and this model reads text"),
        (["export", "speaker", "onx", "out"], 2, "there is no kind 'onx'; did you mean onnx?"),
        (["train", "translate", "data.source=pair.tsv"], 2, "did you mean pairs.tsv?"),
        (["train", "translate", "data=pairs.tsv", "data.valid=pair.tsv"], 2, "regard: there is no file pair.tsv; "),
        (["translate", "translator", "--file", "pair.tsv"], 2, "there is no file pair.tsv; did you mean pairs.tsv?"),
        (["translate", "translator", "--file", "photos"], 2, "photos is a folder of images, and texts are needed"),
        (["circuit", "speaker", "nowhere.csv"], 2, "there is no file nowhere.csv"),
        (["translate", "translator", "--file", "latin.tsv"], 1, "; --encoding sets another encoding"),
        (["train", "translate", "data.source=text.txt"], 1, "regard data describe text.txt shows what was read"),
        (["train", "translate", "pairs.tsv"], 2, "section.field=value; did you mean data=pairs.tsv?"),
        (["train", "lm", "gpt2"], 2, "did you mean model=gpt2?"),
        (["train", "lm", "data=a.png"], 1, "regard: a.png is a PNG image, not a text file\n"),
        (["data", "describe", "a.png"], 1, "regard: a.png is a PNG image, not a text file\n"),
        (
            ["train", "caption", "data=captions.tsv", "data.images=nowhere"],
            2,
            "images=nowhere: there is no folder nowhere",
        ),
        (["train", "caption", "data=captions.tsv", "data.images=photo"], 2, "; did you mean photos?"),
        (["generate", "runs/nothing", "hi"], 3, "; the newest here is runs/lm"),
        (["generate", "runs/lms", "hi"], 3, "did you mean runs/lm?"),
        (["train", "translat"], 2, "did you mean translate?"),
        (["train", "lm", "model=gtp2"], 2, "did you mean gpt2?"),
        (["train", "lm", "train.stps=3"], 2, "did you mean train.steps?"),
        (["train", "--preset", "shakespear"], 2, "did you mean shakespeare?"),
        (["eval", "speaker"], 1, "data.source=… must name the data to evaluate on"),
    ],
)
def test_a_failure_says_what_to_type_next(
    here: Path,
    words: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(here)
    assert main(words) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_bad_lines_are_skipped_by_a_word(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    assert main(["train", "translate", "data.source=pairs.tsv"]) == 1
    assert "data.bad_lines=skip leaves them out" in capsys.readouterr().err
    assert main(["train", "translate", "data.source=latin.tsv"]) == 1
    assert "leaves them out; data.encoding=… sets another encoding\n" in capsys.readouterr().err


def test_where_there_is_no_model_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["translate", "nothing", "hi"]) == 3
    assert "regard demo makes one" in capsys.readouterr().err


def test_a_run_that_is_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_config("lm", ["train.steps=5"])
    Path("begun").mkdir()
    Path("begun/run.json").write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
    for words in (["generate", "begun", "hi"], ["info", "begun"]):
        assert main(words) == 3
        assert "regard train --resume begun resumes it" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- doctor


def test_doctor_names_versions_devices_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "fastapi" else real(name))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    by_name = {row["name"]: row for row in found["findings"]}
    assert by_name["torch"]["state"] == "ok"
    assert by_name["serve"]["state"] == "note"
    assert by_name["serve"]["type"] == 'pip install "regard[serve]"'
    assert "the explorer" in by_name["serve"]["text"]
    assert {"cpu", "attention", "fonts", "cache", "here"} <= set(by_name)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert 'pip install "regard[serve]"' in said
    assert said.endswith("everything the core needs is here\n")


def test_an_installed_package_is_found_if_its_module_has_another_name() -> None:
    assert doctor._extra("serve", {"markdown-it-py": "3.0"}, "the course").state == "ok"


@pytest.mark.parametrize(("version", "text"), [(None, "not installed"), ("0.1.2", "older than 0.5")])
def test_what_the_core_needs_and_lacks_is_a_failure(
    version: str | None, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: version if name == "safetensors" else real(name))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert re.search(rf"✗ safetensors +.*{text}", said)
    assert 'pip install "safetensors>=0.5"' in said
    assert "broken: safetensors" in said


def test_a_wrong_result_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import regard

    real = regard.attend

    def wrong(*args: Any, backend: str = "auto", **options: Any) -> Any:
        found = real(*args, backend=backend, **options)
        return found if backend == "reference" else found._replace(output=found.output + 0.1)

    monkeypatch.setattr(regard, "attend", wrong)
    assert main(["doctor"]) == 1
    assert "the fused path is 0.1 away from the formula" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = doctor._writable("cache", tmp_path / "file" / "below", "so what", needed=False)
    assert found.state == "note"
    assert "cannot be written to" in found.text
    assert doctor._writable("cache", tmp_path / "new" / "deeper", "", needed=True).state == "ok"


def test_the_doctor_knows_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def table(rows: list[str]) -> dict[str, str]:
        everywhere = [row for row in rows if ";" not in row]  # not needed, since some systems do without
        return dict(re.sub(r"\[.*\]", "", row).split(">=") for row in everywhere)  # ray[default,serve] is ray

    assert table(project["dependencies"]) == doctor.CORE
    extras = {name: table(rows) for name, rows in project["optional-dependencies"].items() if name != "dev"}
    assert {name: packages for name, (packages, _) in doctor.EXTRAS.items()} == extras
