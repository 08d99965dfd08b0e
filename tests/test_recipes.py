"""Recipes are runs that can be made, and words change them in the order they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regard.config import DataConfig, ModelConfig, TrainConfig
from regard.errors import UsageError
from regard.models import build
from regard.presets import PRESETS
from regard.recipes import RECIPES, TASKS, default_recipe, recipe, recipes_to_dict, recipes_to_text, run_config
from regard.training.optimiser import paper_lr

OF_FILES = [task for task in TASKS if "source" not in default_recipe(task)["data"]]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_run_with_a_model_that_can_be_built(name: str) -> None:
    made = RECIPES[name]
    assert set(made) == {"task", "data", "model", "train"}
    config = run_config(made["task"], [] if "source" in made["data"] else ["data=files"], preset=name)
    assert config.task == made["task"]
    for section in ("data", "train"):
        for field, value in made[section].items():
            assert getattr(getattr(config, section), field) == value
    model = build(config.model, device="meta")
    assert 0 < model.n_parameters < 100e6, "a recipe is for one machine"


def test_the_papers_recipe_is_the_papers() -> None:
    """Vaswani et al. 2017, §3.5, §5.3, §5.4 and §6.1."""
    config = run_config("translate", ["data.source=pairs.tsv"], preset="paper")
    model, train = config.model, config.train
    assert (model.norm_place, model.positions, model.activation, model.scale_embeddings) == (
        *("post", "sinusoidal", "relu"),
        True,
    )
    assert (model.dropout, model.embedding_dropout, model.tie_head) == (0.1, 0.1, True)
    assert config.data.joint_vocab
    assert (train.optimiser, train.betas, train.eps, train.clip) == ("adam", (0.9, 0.98), 1e-9, None)
    assert (train.schedule, train.label_smoothing) == ("noam", 0.1)
    assert train.lr == pytest.approx(paper_lr(model.d_model, train.warmup))
    assert (train.average, train.beam, train.length_penalty) == (5, 4, 0.6)


@pytest.mark.parametrize("task", TASKS)
def test_the_default_of_a_task_is_of_that_task(task: str) -> None:
    assert default_recipe(task)["task"] == task
    assert run_config(task, ["data=x"]).task == task


def test_the_embedded_corpora_are_the_defaults() -> None:
    assert [run_config(task).data.source for task in ("translate", "lm", "mlm", "caption")] == [
        *("en-ko", "stdlib", "stdlib", "shapes")
    ]


@pytest.mark.parametrize("task", OF_FILES)
def test_a_task_without_a_corpus_asks_for_data(task: str) -> None:
    with pytest.raises(UsageError, match=rf"^{task} needs data\.source: .* for instance data\.source=\w"):
        run_config(task)
    assert OF_FILES == ["sft", "dpo", "classify", "classify-images", "tag", "embed", "answer"]


def test_a_named_recipe_stands_alone_and_words_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what its task starts from gets into it."""
    monkeypatch.setitem(
        RECIPES, "named", {"task": "lm", "data": {"source": "x.txt"}, "model": {"n_layers": 2}, "train": {"lr": 0.5}}
    )
    named = run_config("lm", preset="named")
    typed = run_config("lm", ["train.lr=0.25", "model.n_layers=1"], preset="named")
    assert (named.data.source, named.model.n_layers, named.train.lr) == ("x.txt", 2, 0.5)
    assert (typed.data.source, typed.model.n_layers, typed.train.lr) == ("x.txt", 1, 0.25)
    assert named.model == ModelConfig(n_layers=2, architecture="decoder"), "its task sets what it trains"
    assert named.train == TrainConfig(lr=0.5)
    assert named.data == DataConfig(source="x.txt")
    base = run_config("lm")
    assert base.model != named.model
    assert base.train.steps == default_recipe("lm")["train"]["steps"]


def test_a_named_recipe_without_data_asks_for_it_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "named", {"task": "lm", "data": {}, "model": {}, "train": {}})
    with pytest.raises(UsageError, match=r"^named needs data\.source: .* for instance data\.source=text\.txt"):
        run_config("lm", preset="named")
    assert run_config("lm", ["data=x.txt"], preset="named").data.source == "x.txt"


def test_the_same_with_other_files_differs_in_nothing_else() -> None:
    for name in ("nsmc-three", "sst"):
        assert RECIPES[name]["model"] == RECIPES["nsmc"]["model"]
        assert RECIPES[name]["data"]["source"] != RECIPES["nsmc"]["data"]["source"]
    assert RECIPES["nsmc-three"]["train"] == RECIPES["nsmc"]["train"]


def test_a_model_preset_takes_the_place_of_the_recipes_model() -> None:
    model = run_config("lm", ["model.n_layers=2", "model=gpt2"]).model
    assert model.model_dump() == {**model.model_dump(), **PRESETS["gpt2"], "n_layers": 2}
    assert model.norm == "layer"
    assert run_config("lm").model.norm == "rms"


def test_a_recipe_is_not_changed_by_a_run() -> None:
    before = repr(RECIPES)
    run_config("caption", ["model.d_ff=64", "train.steps=3", "data.max_len=8"])
    run_config("caption", ["model=captioner"])
    assert repr(RECIPES) == before


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: recipe("shape"), "there is no preset 'shape'; did you mean shapes? (all: "),
        (lambda: default_recipe("translat"), "there is no task 'translat'; did you mean translate? (all: "),
        (lambda: run_config("lm", preset="en-ko"), "preset=en-ko is for the task translate, not for lm"),
        (lambda: run_config("lm", ["model=gpt-2"]), "model=gpt-2: there is no such model; did you mean gpt2?"),
        (lambda: run_config("lm", ["train.steps=0"]), "train.steps=0 must be at least 1"),
        (lambda: run_config("lm", ["model.n_heads=7"]), "model.d_model=192 is not divisible by n_heads=7"),
    ],
)
def test_wrong_names_and_values_are_usage_errors(call: object, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()  # type: ignore[operator]
    assert str(raised.value).startswith(sentence)


def test_the_list_shows_every_task_preset_and_model() -> None:
    table = recipes_to_text()
    for name in (*TASKS, *RECIPES, *PRESETS):
        assert name in table
    assert "model=captioner model.image_size=64" in table
    assert set(recipes_to_dict()["presets"]) == set(RECIPES)


def test_sections_may_be_python_values() -> None:
    values = run_config(
        "translate",
        data={"source": ["a.en", "a.de"], "columns": ["en", "de"]},
        model={"n_layers": 3, "dropout": 0},
        train={"betas": (0.9, 0.95), "steps": 5, "clip": None},
    )
    words = "data=a.en,a.de data.columns=en,de model.n_layers=3 model.dropout=0 train.betas=0.9,0.95 train.clip=none"
    assert values == run_config("translate", [*words.split(), "train.steps=5"])
    assert run_config("lm", data=Path("x.txt"), model="gpt2") == run_config("lm", ["data=x.txt", "model=gpt2"])
    assert run_config("lm", ["train.steps=7"], train={"steps": 5}).train.steps == 7
    whole = run_config("lm", model=ModelConfig(architecture="decoder"), train=TrainConfig(steps=3))
    assert (whole.model, whole.train) == (ModelConfig(architecture="decoder"), TrainConfig(steps=3))


def test_paths_are_accepted_wherever_a_config_of_data_is_made() -> None:
    paths = {"source": [Path("a.en"), "a.de"], "valid": Path("b.tsv")}
    names = DataConfig(source="a.en,a.de", valid="b.tsv")
    assert DataConfig(**paths) == DataConfig().with_(**paths) == names
    assert run_config("translate", data=paths).data.source == names.source
    with pytest.raises(ValueError, match=r"source=3: input should be a valid string"):
        DataConfig(source=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"train": {"stpes": 5}}, "there is no train.stpes; did you mean train.steps?"),
        ({"train": {"n_layers": 5}}, "there is no train.n_layers; did you mean model.n_layers?"),
        ({"train": {"steps": "many"}}, "train.steps=many is not a whole number"),
        ({"train": {"steps": [1]}}, "train.steps=1 is not a whole number"),
        ({"train": {"lr": float("nan")}}, "train.lr=nan is not a finite number"),
        ({"train": {"optimiser": "adm"}}, "train.optimiser=adm is not one of adam, adamw, muon; did you mean adam?"),
        ({"train": {"steps": 0}}, "train.steps=0 must be at least 1"),
        ({"model": "gpt-2"}, "model=gpt-2: there is no such model; did you mean gpt2?"),
        ({"model": {"mixer": "mine:Own"}}, "model.mixer='mine:Own' is not registered"),
    ],
)
def test_python_values_get_the_hints_of_typed_words(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        run_config("lm", **sections)
    assert str(raised.value).startswith(sentence)
