"""Config files say what words say: a saved run loads as the same run, and a wrong file is told by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.config.config_file import SUFFIXES, load_config_file, parse_yaml, save_config_file
from regard.errors import UsageError
from regard.recipes import RECIPES, run_config

WORDS = (
    *("data.source=x.txt", "data.normalise=none", "data.columns=0,en", "data.deduplicated=no", "train.clip=none"),
    *("train.compile=off", "train.lr=3e-4", "train.out=007", "train.freeze=encoder.*,token.*", "model.window=5"),
    *("model.window_layers=0,1", 'model.rope_scaling={"kind": "linear", "factor": 2}', "train.ema=none"),
)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("words", [(), WORDS, ("data=설명.txt", "model=gpt2")], ids=["plain", "odd", "preset"])
def test_a_saved_config_is_the_same_run(tmp_path: Path, suffix: str, words: tuple[str, ...]) -> None:
    config = run_config("lm", words)
    file = tmp_path / f"new/config{suffix}"
    save_config_file(file, config)
    again = run_config(config_file=file)
    assert again == config
    assert again.model_dump() == config.model_dump()
    assert {type(x) for x in again.train.betas} == {float}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_every_format(tmp_path: Path, name: str) -> None:
    config = run_config(preset=name, overrides=["data=files"])
    for suffix in SUFFIXES:
        save_config_file(tmp_path / f"x{suffix}", config)
        assert run_config(config_file=tmp_path / f"x{suffix}") == config


def test_a_file_changes_the_recipe_and_words_change_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: stdlib\nmodel: {n_layers: 2}\ntrain:\n  steps: 9\n  lr: 3e-4\n  compile: off\n")
    config = run_config(config_file=file, overrides=["train.steps=5"], train={"lr": 0.5, "steps": 6})
    assert (config.task, config.train.steps, config.train.lr, config.train.compile) == ("lm", 5, 0.5, "off")
    assert config.model == run_config("lm", ["model.n_layers=2"]).model
    file.write_text("task: lm\ndata: x.txt\nmodel: gpt2\n")
    assert run_config(config_file=file) == run_config("lm", ["data=x.txt", "model=gpt2"])


def test_another_runs_own_config_starts_a_run_of_its_own(tmp_path: Path) -> None:
    config = run_config("lm", ["train.out=runs/first", "train.steps=3"])
    save_config_file(tmp_path / "run.json", config)
    for place in (tmp_path, tmp_path / "run.json"):
        again = run_config(config_file=place)
        assert again == config.with_(train=config.train.with_(out=None))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.yaml", "task: lm\ntrain: {stpes: 5}", "there is no train.stpes; did you mean train.steps?"),
        ("a.toml", "task = 'lm'\n[train]\nn_layers = 5", "there is no train.n_layers; did you mean model.n_layers?"),
        ("a.json", '{"task": "lm", "trian": {}}', "there is no trian; did you mean train?"),
        ("a.yaml", "steps: 5", "there is no steps; did you mean train.steps?"),
        ("a.yaml", "train: {steps: many}", "train.steps=many is not a whole number"),
        (
            "a.toml",
            "[train]\noptimiser = 'adm'",
            "train.optimiser=adm is not one of adam, adamw, muon; did you mean adam",
        ),
        ("a.yaml", "train: {steps: 1, steps: 2}", "it names 'steps' twice"),
        ("a.json", '{"task": "lm", "task": "mlm"}', "is not valid JSON: it names 'task' twice"),
        ("a.yaml", "train: fast", "train is a section: write its fields as"),
        ("a.yaml", "train: {<<: 5}", "<<: merges the fields of one mapping"),
        ("a.yaml", "- 5", "it has no fields"),
        ("a.yaml", "a: [", "it is not YAML: "),
        ("a.yaml", "[" * 5000, "it is nested too deeply"),
        ("a.toml", "a = ", "Invalid value"),
        ("a.yaml", b"\xff", "'utf-8' codec can't decode"),
        ("a.json", '{"task": ["lm"]}', "task is a name, not ['lm']"),
        ("a.json", '{"task": 3}', "task is a name, not 3"),
        ("a.yaml", "task: lm\npreset: [stdlib, shapes]", "preset is a name, not ['stdlib', 'shapes']"),
    ],
)
def test_what_is_wrong_names_the_file(tmp_path: Path, name: str, text: str | bytes, sentence: str) -> None:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as raised:
        load_config_file(file)
    assert str(raised.value).startswith(f"{file}: {sentence}")


@pytest.mark.parametrize(
    ("suffix", "text"), [(".yaml", "task: lm"), (".toml", "task = 'lm'"), (".json", '{"task": "lm"}')]
)
def test_a_byte_order_mark_is_not_part_of_the_file(tmp_path: Path, suffix: str, text: str) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_text(text, encoding="utf-8-sig")
    assert run_config(config_file=file).task == "lm"


def test_a_merge_key_takes_over_fields_and_own_ones_win() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {z: 4, <<: *b}"
    assert parse_yaml(text)["c"] == {"x": "1", "y": "3", "z": "4"}


def test_a_file_of_another_kind_task_or_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.ini ends in \.ini; a config file ends in \.yaml, \.yml, \.toml, \.json"):
        load_config_file("x.ini")
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read: No such file"):
        load_config_file(tmp_path / "none.yaml")
    file = tmp_path / "a.yaml"
    file.write_text("train: {steps: 5}")
    with pytest.raises(UsageError, match=r"a\.yaml names no task: task is one of translate"):
        run_config(config_file=file)
    assert run_config("lm", config_file=file).train.steps == 5
    file.write_text("task: lm")
    with pytest.raises(UsageError, match=r"a\.yaml is for the task lm, not for translate"):
        run_config("translate", config_file=file)


def test_nothing_that_a_file_names_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("open('ran', 'w').close()\nclass Own: ...\n")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.yaml"
    for text in ("task: lm\nmodel: {mixer: 'planted:Own'}", "task: !!python/object/apply:planted.Own []"):
        file.write_text(text)
        with pytest.raises(UsageError):
            run_config(config_file=file)
    assert not (tmp_path / "ran").exists()
