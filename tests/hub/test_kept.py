"""What a config of ours cannot say, or only others read, is still there after loading and saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from regard.errors import BadModelFile
from regard.generation import generate, stream_tokens
from regard.hub import restore_token_ids, token_ids, write_config
from regard.hub.hf_family import ForeignFields, from_our_activation
from regard.io import load
from regard.layers import ACTIVATIONS, GATED

from .helpers import THEIRS, edit_json, ours, theirs

TOKEN_KINDS = [kind for kind in THEIRS if kind != "vit"]
FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def directory(kind: str, to: Path, **changes: Any) -> Path:
    """A directory of transformers' whose config.json was changed, without a generation_config.json; None is null."""
    theirs(kind).save_pretrained(to)
    (to / "generation_config.json").unlink(missing_ok=True)
    (to / "config.json").write_text(json.dumps(config_of(to) | changes), encoding="utf-8")
    return to


def without(folder: Path, *names: str) -> Path:
    edit_json(folder / "config.json", **dict.fromkeys(names))
    return folder


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_token_ids_are_saved_as_they_came(tmp_path: Path, kind: str) -> None:
    folder = directory(kind, tmp_path / "theirs")
    saved = load(folder).save(tmp_path / "ours")
    assert token_ids(config_of(saved)) == token_ids(config_of(folder))
    one, other = (hf.AutoConfig.from_pretrained(x) for x in (folder, saved))
    assert [getattr(one, name, None) for name in FIELDS] == [getattr(other, name, None) for name in FIELDS]
    twice = load(saved).save(tmp_path / "twice")
    assert config_of(twice) == config_of(saved)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "t5", "bart", "marian"])
def test_several_ends_and_no_padding(tmp_path: Path, kind: str) -> None:
    folder = directory(kind, tmp_path / "theirs", eos_token_id=[3, 4, 5], pad_token_id=None, bad_words_ids=[[7]])
    model = load(folder)
    assert (model.config.eos_id, model.config.more_eos_ids) == (3, (4, 5))
    for saved in (model.save(tmp_path / "ours"), load(tmp_path / "ours").save(tmp_path / "twice")):
        fields = config_of(saved)
        assert fields["eos_token_id"] == [3, 4, 5]
        assert fields["bad_words_ids"] == [[7]]
        assert "pad_token_id" in fields
        assert fields["pad_token_id"] is None


def test_every_end_token_ends_a_text(tmp_path: Path) -> None:
    folder = directory("llama", tmp_path / "theirs", eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4, 5]}')
    model = load(load(folder).save(tmp_path / "ours"))
    assert (model.config.eos_id, model.config.more_eos_ids) == (3, (4, 5))
    for end in (3, 4, 5):
        only = generate(model, [1, 6], max_new_tokens=8, logit_bias={end: 100.0}).hypotheses[0][0]
        assert (only.tokens, only.n_ending) == ([end], 1)
        assert list(stream_tokens(model, [1, 6], max_new_tokens=8, logit_bias={end: 100.0})) == [end]


@pytest.mark.parametrize(
    ("kind", "named", "ids"),
    [
        ("llama", {"eos_token_id": 5}, (1, 5, ())),
        ("llama", {"eos_token_id": [5, 6]}, (1, 5, (6,))),
        ("llama", {"eos_token_id": 3}, (1, 3, ())),
        ("llama", {"eos_token_id": [3, 5]}, (1, 3, (5,))),
        ("llama", {"eos_token_id": 10**9, "decoder_start_token_id": 7}, (1, 3, (4,))),
        ("llama", {"eos_token_id": True}, (1, 3, (4,))),
        ("bart", {"decoder_start_token_id": 7, "eos_token_id": [4, 3, 5]}, (7, 3, (4, 5))),
    ],
)
def test_start_and_end_of_generation_config_come_first(
    kind: str, named: dict[str, Any], ids: tuple[int, int, tuple[int, ...]], tmp_path: Path
) -> None:
    """transformers generates with these, whatever config.json says."""
    folder = directory(kind, tmp_path / "theirs", bos_token_id=1, eos_token_id=[3, 4])
    (folder / "generation_config.json").write_text(json.dumps(named))
    model = load(folder)
    for each in (model, load(model.save(tmp_path / "ours")), load(load(tmp_path / "ours").save(tmp_path / "twice"))):
        assert (each.config.bos_id, each.config.eos_id, each.config.more_eos_ids) == ids


def test_end_tokens_that_were_changed_are_kept(tmp_path: Path) -> None:
    folder = directory("llama", tmp_path / "theirs", bos_token_id=1, eos_token_id=[3, 4])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    model = load(folder)
    model.config = model.config.with_(more_eos_ids=(5, 6))
    assert load(model.save(tmp_path / "ours")).config.more_eos_ids == (5, 6)


@pytest.mark.parametrize("rule", ["bad_words_ids", "suppress_tokens"])
def test_a_rule_for_tokens_that_is_no_list_forbids_none(rule: str, tmp_path: Path) -> None:
    folder = directory("marian", tmp_path / "theirs", **{rule: 5})
    assert load(folder).config.forbidden_ids == ()
    (folder / "generation_config.json").write_text(json.dumps({rule: True}))
    assert load(folder).config.forbidden_ids == ()


def test_rules_for_tokens_that_are_not_followed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = directory("marian", tmp_path / "theirs", bad_words_ids=[[7]])
    load(folder)
    assert caplog.text == ""
    folder = directory("marian", tmp_path / "theirs", bad_words_ids=[[7], [8, 9]], forced_bos_token_id=3)
    (folder / "generation_config.json").write_text('{"forced_bos_token_id": 5}')
    load(folder)
    assert "forced_bos_token_id=5, bad_words_ids=[[8, 9]]" in caplog.text


def test_penalties_that_are_not_followed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = directory("gpt2", tmp_path / "theirs")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}')
    load(folder)
    assert caplog.text == ""
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.05, "no_repeat_ngram_size": 3}')
    load(folder)
    assert "generates with repetition_penalty=1.05, no_repeat_ngram_size=3, which regard does not follow" in caplog.text


@pytest.mark.parametrize("beam", [1, 3])
def test_tokens_that_no_text_may_contain(beam: int, tmp_path: Path) -> None:
    """Every published Marian forbids its padding, whose logit is 0 and was never trained."""
    ids: dict[str, Any] = {"pad_token_id": 7, "decoder_start_token_id": 7, "forced_eos_token_id": None}
    folder = directory("marian", tmp_path / "theirs", **ids, bad_words_ids=[[7]])
    theirs = hf.AutoModelForSeq2SeqLM.from_pretrained(folder)
    with torch.no_grad():
        theirs.final_logits_bias[0, 7] = 5.0
    theirs.save_pretrained(folder)
    model, source = load(folder), [4, 6, 9, 3]
    lengths = {"max_new_tokens": 6, "num_beams": beam, "do_sample": False}
    row = theirs.generate(torch.tensor([source]), **lengths)[0, 1:].tolist()
    assert 7 not in row
    for each in (model, load(model.save(tmp_path / "ours"))):
        written = generate(each, [source], max_new_tokens=6, beam=beam)
        assert written.hypotheses[0][0].tokens == row[: len(written.hypotheses[0][0].tokens)]
        assert each.config.forbidden_ids == (7,)
    assert 7 in generate(model, [source], max_new_tokens=6, beam=beam, logit_bias={7: 1.0}).tokens[0]


def test_a_null_quantization_config_is_none(tmp_path: Path) -> None:
    folder = directory("llama", tmp_path / "theirs")
    fields = config_of(folder)
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": None}))
    assert load(folder).config == load(folder, verify=False).config
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(BadModelFile, match="quantization_config"):
        load(folder)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_a_missing_token_id_stays_missing(tmp_path: Path, kind: str) -> None:
    """transformers then takes its own default, which null would not give."""
    gone = ("bos_token_id", "eos_token_id", "pad_token_id")
    folder = without(directory(kind, tmp_path / "theirs"), *gone)
    fields = config_of(load(folder).save(tmp_path / "ours"))
    assert not set(gone) & set(fields)


def test_a_value_changed_here_counts(tmp_path: Path) -> None:
    model = load(directory("llama", tmp_path / "theirs", eos_token_id=[3, 4], pad_token_id=None))
    model.config = model.config.with_(eos_id=4, pad_id=6)
    fields = config_of(model.save(tmp_path / "ours"))
    assert (fields["eos_token_id"], fields["pad_token_id"]) == (4, 6)


def test_ids_of_another_kind_of_model_are_not_taken_over(tmp_path: Path) -> None:
    model = ours(positions="learned", norm_place="pre", activation="gelu_tanh")
    model.provenance = load(directory("llama", tmp_path / "theirs", eos_token_id=[2, 4])).provenance
    assert config_of(model.save(tmp_path / "ours"))["eos_token_id"] == 2


def test_ids_that_cannot_be_read_are_not_kept() -> None:
    written = write_config(ours(positions="learned", norm_place="pre", activation="gelu_tanh").config)
    assert restore_token_ids(written, token_ids(written.fields) | {"eos_token_id": "</s>"}) == written


@pytest.mark.parametrize("kind", ["llama", "bart", "vit"])
def test_generation_config_is_copied_without_a_tokenizer(tmp_path: Path, kind: str) -> None:
    content = b'{ "eos_token_id": [3, 4, 5],\n\n  "temperature": 0.6 }'
    folder = directory(kind, tmp_path / "theirs")
    (folder / "generation_config.json").write_bytes(content)
    saved = load(folder).save(tmp_path / "ours")
    assert (saved / "generation_config.json").read_bytes() == content
    again = load(saved)
    assert again.provenance.verified == "verified"
    assert (again.save(tmp_path / "twice") / "generation_config.json").read_bytes() == content


def test_a_generation_config_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = directory("llama", tmp_path / "theirs")
    (folder / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "secret").write_text("{}")
    (folder / "generation_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(BadModelFile, match="generation_config"):
        load(folder)


# ------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("name", GATED)
def test_a_gated_activation_is_no_foreign_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"hidden_act='{name}'"):
        ForeignFields({"hidden_act": name}).activation("hidden_act", "gelu")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_goes_there_and_back(name: str) -> None:
    spelled = from_our_activation(name)
    assert spelled in hf.activations.ACT2FN
    assert ForeignFields({"hidden_act": spelled}).activation("hidden_act", "relu") == name
