"""Every Hugging Face type that is read, as a tiny directory: parts sum to the whole, a run patched with itself at every
site at once is itself, and the fast path, compiled too, gives what the formula does."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import regard
from hub.test_type_exports import tiny_config
from models.small import inputs_of, shaken, source_of, target_of
from regard.hub.families import BY_TYPE
from regard.lens.activations import ActivationRecord, capture
from regard.lens.capture import attention_sites
from regard.lens.interventions import patch
from regard.models import Model

TWO_TOWERS = ("clip", "siglip")  # an image and a text, each in a model of its own
STAGES = ("swin",)  # tokens are merged on the way
WITHOUT_SCORES = ("mamba", "mamba2", "fnet")  # no queries and keys, and no formula other than their own
READ_AT_ONCE = [name for name in BY_TYPE if name not in TWO_TOWERS]


@cache
def saved(model_type: str, folder: Path) -> Model:
    """Saved as a directory of this type and read from it; an encoder without a head gets one, so that it has logits."""
    config = tiny_config(model_type)
    if config.architecture == "encoder" and config.head == "none":
        config = config.with_(head="classify", n_classes=3)
    torch.manual_seed(0)
    return regard.load(shaken(regard.build(config), by=0.1).eval().save(folder / model_type)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("types")


def record_of(model: Model) -> ActivationRecord:
    return capture(model, *inputs_of(model.config))


@pytest.mark.parametrize("name", READ_AT_ONCE)
def test_patching_everything_with_itself_changes_nothing(name: str, folder: Path) -> None:
    model = saved(name, folder)
    record = record_of(model)
    with torch.no_grad():
        before = model(*record.inputs.tensors)
        with patch(model, {name: record[name] for name, site in model.sites().items() if not site.is_derived}):
            assert torch.equal(model(*record.inputs.tensors), before)


@pytest.mark.parametrize("name", [name for name in READ_AT_ONCE if name not in STAGES])
def test_parts_sum_to_the_logit(name: str, folder: Path) -> None:
    record = record_of(saved(name, folder))
    for prompt in (0, 2):
        found = record.logit_attribution(1, position=2, prompt=prompt)
        assert found.total == pytest.approx(found.logit, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in READ_AT_ONCE if name not in (*STAGES, *WITHOUT_SCORES)])
def test_pairs_of_writers_sum_to_the_score(name: str, folder: Path) -> None:
    record = record_of(saved(name, folder))
    for kind, layers in attention_sites(record.model).items():
        for layer in range(len(layers)):
            for head in (0, 3):
                found = record.why(layer=layer, head=head, row=3, col=2, kind=kind)
                assert found.total == pytest.approx(found.score, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in READ_AT_ONCE if name not in WITHOUT_SCORES])
def test_the_fast_path_and_the_compiled_one_give_what_the_formula_does(name: str, folder: Path) -> None:
    model = saved(name, folder)
    reference = regard.build(model.config.with_(attention_backend="reference")).eval()
    reference.load_state_dict(model.state_dict())
    expected = record_of(reference)
    for each in (model, torch.compile(model, backend="eager")):
        record = record_of(each)  # type: ignore[arg-type]
        assert record.keys() == expected.keys() == model.sites().keys()
        for site in expected:
            torch.testing.assert_close(record[site], expected[site], atol=1e-5, rtol=1e-5)


def test_what_has_no_one_residual_stream_says_so(folder: Path) -> None:
    record = record_of(saved("swin", folder))
    for split in (lambda: record.logit_attribution(1), lambda: record.why(layer=0, head=0, row=0, col=0)):
        with pytest.raises(ValueError, match="do not share one residual stream"):
            split()
    two = regard.build(tiny_config("clip")).eval()
    with pytest.raises(ValueError, match="two towers run separately"):
        capture(two, source_of(two.config), target_of(two.config))
