"""Words as people type them become fields by the field's type, and a wrong one is told in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from regard.config import DataConfig, ModelConfig, TrainConfig
from regard.config.overrides import (
    SECTIONS,
    build_section,
    fields_to_dict,
    fields_to_text,
    format_value,
    parse_overrides,
)
from regard.errors import UsageError

FIELDS = [(section, name) for section, config in SECTIONS.items() for name in config.model_fields]


def one(word: str) -> Any:
    """The only value of a word."""
    ((fields,),) = (parse_overrides([word]).values(),)
    ((value,),) = (fields.values(),)
    return value


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("train.lr=3e-4", 3e-4),
        ("train.steps=1_000", 1000),
        ("train.betas=0.9,0.98", (0.9, 0.98)),
        ("train.betas=[0.9, 0.95]", (0.9, 0.95)),
        ("train.freeze=encoder.*, token.*", ("encoder.*", "token.*")),
        ("train.freeze=", ()),
        ("train.checkpointing=true", True),
        ("train.checkpointing=off", False),
        ("train.out=007", "007"),
        ("train.out=[a]", "[a]"),
        ("train.out=a=b", "a=b"),
        ("train.out=none", None),
        ("train.clip=none", None),
        ("train.clip=null", None),
        ("train.clip=2", 2.0),
        ("train.optimiser=muon", "muon"),
        ("data.source=none", "none"),
        ("data.source=12", "12"),
        ("data.columns=0,2", ("0", "2")),
        ("data.columns=[0, 2]", (0, 2)),
        ("data.labels=1,0", ("1", "0")),
        ("data.normalise=none", "none"),
        ("data.header=false", False),
        ("model.alignment=none", "none"),
        ("model.d_box=4", 4),
        ("model.window_layers=0,2", (0, 2)),
        ("model.n_kv_heads=NONE", None),
    ],
)
def test_a_value_is_what_its_field_says(word: str, value: Any) -> None:
    found = one(word)
    assert found == value
    assert type(found) is type(value)


def test_numbers_of_columns_are_numbers_in_the_config() -> None:
    assert DataConfig(columns="²,1").columns == ("²", 1)  # a digit, but not a decimal one
    assert DataConfig(**parse_overrides(["data.columns=0,en"])["data"]).columns == (0, "en")


def test_a_config_inside_a_config_is_json() -> None:
    scaling = one('model.rope_scaling={"kind": "linear", "factor": 2}')
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)
    assert one(f"model.rope_scaling={format_value(scaling)}") == scaling


def test_short_forms() -> None:
    words = ["data=pairs.tsv", "model=gpt2", "model.n_layers=2"]
    assert parse_overrides(words) == {"data": {"source": "pairs.tsv"}, "model": {"preset": "gpt2", "n_layers": 2}}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.stpes=5"], "there is no train.stpes; did you mean train.steps?"),
        (["steps=5"], "there is no steps; did you mean train.steps?"),
        (["trian.steps=5"], "there is no trian.steps; did you mean train.steps?"),
        (["train.n_layers=5"], "there is no train.n_layers; did you mean model.n_layers?"),
        (["foo.bar=5"], "there is no foo.bar"),
        (["train=5"], "train=5: train is a section; its fields are written train.field=value"),
        (["=5"], "'=5' is not of the form section.field=value"),
        (["fast"], "'fast' is not of the form section.field=value"),
        (["train.steps"], "train.steps has no value: write train.steps=VALUE"),
        (["train.steps="], "train.steps= has no value"),
        (["train.out="], "train.out= has no value"),
        (["model="], "model= has no value"),
        (["train.steps=2e3"], "train.steps=2e3 is not a whole number"),
        (["train.steps=1.5"], "train.steps=1.5 is not a whole number"),
        (["train.steps=none"], "train.steps=none is not a whole number"),
        (["train.steps=[1]"], "train.steps=[1] is not a whole number"),
        (["train.lr=fast"], "train.lr=fast is not a number"),
        (["train.lr=nan"], "train.lr=nan is not a finite number"),
        (["train.betas=0.9,inf"], "train.betas=0.9,inf is not a finite number"),
        (["train.betas=0.9"], "train.betas=0.9 is not of the form number,number"),
        (["train.betas=0.9,0.9,0.9"], "train.betas=0.9,0.9,0.9 is not of the form number,number"),
        (["train.betas=0.9,x"], "train.betas=0.9,x: x is not a number"),
        (["train.betas=[0.9"], "train.betas=[0.9: [0.9 is not JSON: Expecting ',' delimiter: line 1 column 5 (char 4)"),
        (["train.checkpointing=maybe"], "train.checkpointing=maybe is neither true nor false"),
        (["train.optimiser=adm"], "train.optimiser=adm is not one of adam, adamw, muon; did you mean adam?"),
        (["model.d_box=3"], "model.d_box=3 is not one of 0, 4, 5"),
        (["model.rope_scaling={}"], "model.rope_scaling={}: the field 'kind' is missing"),
        (["model.rope_scaling=yarn"], 'model.rope_scaling=yarn must be JSON, {"field": value}'),
        (["train.seed=1", "train.seed=2"], "train.seed is given twice: train.seed=1 and train.seed=2"),
        (["train.seed=1"] * 2, "train.seed is given twice: train.seed=1 and train.seed=1"),
        (["data=a", "data.source=b"], "data.source is given twice: data=a and data.source=b"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_what_is_wrong_is_one_sentence_and_usage(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_overrides(words)
    assert str(raised.value) == sentence
    assert raised.value.exit_code == 2


def test_very_deep_json_is_refused_too() -> None:
    with pytest.raises(UsageError, match="is not JSON"):
        parse_overrides(["model.window_layers=" + "[" * 100_000])


def test_only_the_sections_asked_for() -> None:
    with pytest.raises(UsageError, match=r"^train\.steps=5: only data\.\* can be given here$"):
        parse_overrides(["train.steps=5"], sections={"data": DataConfig})
    with pytest.raises(UsageError, match=r"^model=gpt2: only data\.\* can be given here$"):
        parse_overrides(["model=gpt2"], sections={"data": DataConfig})


@pytest.mark.parametrize(
    ("section", "config", "fields", "sentence"),
    [
        ("train", TrainConfig, {"steps": 0}, "train.steps=0 must be at least 1"),
        ("train", TrainConfig, {"eval_batches": 0}, "train.eval_batches=0 must be at least 1"),
        ("train", TrainConfig, {"stop_at": -1}, "train.stop_at=-1 must be at least 1"),
        ("train", TrainConfig, {"lora_alpha": -3.0}, "train.lora_alpha=-3.0 must be a positive number"),
        ("data", DataConfig, {"encoding": "hex"}, "data.encoding='hex': 'hex' is an unknown encoding"),
        ("model", ModelConfig, {"d_model": 10, "n_heads": 3}, "model.d_model=10 is not divisible by n_heads=3"),
        ("model", ModelConfig, {"architecture": "encoder"}, "model: head='lm' needs a decoder"),
    ],
)
def test_what_a_config_refuses_names_its_section(
    section: str, config: type[TrainConfig], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as raised:
        build_section(section, config, fields)
    assert str(raised.value).startswith(sentence.replace("model: head", "model.head"))


@pytest.mark.parametrize(("section", "name"), FIELDS, ids=".".join)
def test_every_default_can_be_typed_and_every_field_is_documented(section: str, name: str) -> None:
    default = SECTIONS[section].model_fields[name].default
    assert one(f"{section}.{name}={format_value(default)}") == default
    about = fields_to_dict()[section][name]
    assert about["about"], f"{section}.{name} has no docstring"
    assert about["type"] != ""
    assert f"  {section}.{name}={format_value(default)}  ({about['type']})\n      {about['about']}" in fields_to_text()


@given(st.text(min_size=1))
def test_any_text_is_a_source(text: str) -> None:
    assert parse_overrides([f"data.source={text}"]) == {"data": {"source": text}}


@given(st.sampled_from(FIELDS), st.text())
@example(("train", "freeze"), " ")
def test_no_value_gets_past_as_something_else(field: tuple[str, str], text: str) -> None:
    word = f"{field[0]}.{field[1]}={text}"
    try:
        value, said = one(word), ""
    except UsageError as error:
        value, said = None, str(error)
    assert word in said or one(f"{field[0]}.{field[1]}={format_value(value)}") == value
