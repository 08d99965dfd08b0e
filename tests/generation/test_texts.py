"""Text in, text out: what comes is the text of the tokens, whatever company it is written in."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import regard
from generation.spoken import (
    LINES,
    captioner,
    classifier,
    image_classifier,
    language_model,
    made,
    picture,
    tokenizer_of,
    translator,
)
from regard.generation import GenerateConfig, Generated, GeneratedTexts, prompts
from regard.generation.text_codec import ModelTokenizers, split_special_tokens
from regard.models import Model
from regard.text.image_processor import ImageProcessor
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import train_tokenizer

NEVER = {2: -1e9}


@pytest.fixture(scope="module")
def speaker() -> Model:
    return language_model()


@pytest.fixture(scope="module")
def translating() -> Model:
    return translator()


# ---- the front door


def test_text_in_is_text_out_and_tokens_in_are_tokens_out(speaker: Model) -> None:
    tokenizer = tokenizer_of(speaker)
    texts = regard.generate(speaker, "ROMEO:", max_new_tokens=9)
    ids = tokenizer.encode("ROMEO:")
    plain = regard.generate(speaker, ids, max_new_tokens=9)
    assert isinstance(texts, GeneratedTexts)
    assert isinstance(plain, Generated)
    assert texts.tokens == plain.tokens
    assert texts == [tokenizer.decode(plain.tokens[0])]
    assert str(texts) == texts[0]
    assert texts.scores == plain.scores
    assert texts.finishes == ["length"]
    assert texts.n_best[0][0].text == texts[0]


def test_a_list_may_hold_both_texts_and_tokens(speaker: Model) -> None:
    ids = tokenizer_of(speaker).encode("the cat")
    texts = regard.generate(speaker, ["the cat", ids, "a dog"], max_new_tokens=6)
    assert isinstance(texts, GeneratedTexts)
    assert texts[0] == texts[1]
    assert texts[2] == regard.generate(speaker, "a dog", max_new_tokens=6)[0]


def test_a_saved_model_is_opened_by_its_path(speaker: Model, tmp_path: Path) -> None:
    path = speaker.save(tmp_path / "model")
    told = regard.generate(speaker, "the cat", max_new_tokens=6)
    for same in (path, str(path)):
        assert regard.generate(same, "the cat", max_new_tokens=6) == told
        assert "".join(regard.stream(same, "the cat", max_new_tokens=6)) == told[0]
    helped = regard.generate(path, "the cat", max_new_tokens=6, draft=path)
    assert helped == told
    assert helped.drafted is not None
    assert helped.drafted.share == 1


def test_n_best_is_in_order(speaker: Model) -> None:
    texts = regard.generate(speaker, ["the", "a dog"], beam=4, n_best=3, max_new_tokens=6)
    for group in texts.n_best:
        assert len(group) == 3
        assert [x.score for x in group] == sorted((x.score for x in group), reverse=True)
        assert len({x.text for x in group}) > 1
    assert list(texts) == [group[0].text for group in texts.n_best]


# ---- how texts are cut and joined


@pytest.mark.parametrize("kind", ["bpe", "words", "unigram", "bytes", "chars"])
def test_a_continuation_begins_as_it_stands_in_the_text(kind: Any) -> None:
    """A tokenizer drops the space at the beginning of a text; here the prompt is the beginning."""
    model = language_model(kind)
    tokenizer = tokenizer_of(model)
    for seed in range(4):
        made = regard.generate(model, "the cat", max_new_tokens=7, temperature=1.5, seed=seed)
        whole = tokenizer.decode([*tokenizer.encode("the cat"), *made.tokens[0]])
        assert "the cat" + made[0] == whole


@pytest.mark.parametrize("kind", ["bpe", "words", "unigram", "bytes", "chars"])
def test_a_stream_is_the_text_in_whole_characters(kind: Any) -> None:
    model = language_model(kind)
    for seed in range(4):
        fields = {"max_new_tokens": 40, "temperature": 2.0, "seed": seed, "logit_bias": NEVER}
        pieces = list(regard.stream(model, "고양이가", **fields))
        assert "".join(pieces) == regard.generate(model, "고양이가", **fields)[0]
        assert len(pieces) > 1


def test_a_streamed_syllable_is_never_split() -> None:
    """Forced to write Hangul byte by byte, the model's text still comes syllable by syllable."""
    model = language_model("bytes")
    pieces = list(
        regard.stream(model, "the ", prefix="고양이가 앉았다", max_new_tokens=len("고양이가 앉았다".encode()))
    )
    assert pieces == list("고양이가 앉았다")


# ---- stop strings, prefixes, biases


def whole_text(model: Model, prompt: str, **fields: Any) -> str:
    return regard.generate(model, prompt, max_new_tokens=30, logit_bias=NEVER, temperature=1.5, seed=3, **fields)[0]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["bytes", "bpe", "words"]))
def test_a_text_ends_before_the_first_stop_string(
    speakers: dict[str, Model], unstopped: dict[str, str], data: st.DataObject, kind: str
) -> None:
    model, text = speakers[kind], unstopped[kind]
    first = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[first : first + data.draw(st.integers(1, 4))]
    if not stop or "\ufffd" in text:
        return
    assert whole_text(model, "the cat", stop=[stop, "never there"]) == text[: text.index(stop)]


@pytest.fixture(scope="module")
def speakers() -> dict[str, Model]:
    return {"bytes": language_model("bytes"), "bpe": language_model("bpe", seed=5), "words": language_model("words")}


@pytest.fixture(scope="module")
def unstopped(speakers: dict[str, Model]) -> dict[str, str]:
    return {kind: whole_text(model, "the cat") for kind, model in speakers.items()}


def test_generation_ends_as_soon_as_a_stop_string_is_complete(speakers: dict[str, Model]) -> None:
    model = speakers["words"]
    fields = {"max_new_tokens": 30, "no_repeat_ngram": 1, "logit_bias": NEVER}
    whole = regard.generate(model, "the cat", **fields)
    decode = tokenizer_of(model).decode
    stop = decode(whole.tokens[0])[8:12]
    made = regard.generate(model, "the cat", stop=stop, **fields)
    assert made.finishes == ["stop"]
    n = len(made.tokens[0])
    assert made.tokens[0] == whole.tokens[0][:n]
    assert n < 30
    assert stop in decode(made.tokens[0])
    assert stop not in decode(made.tokens[0][:-1])


def test_a_stop_string_in_a_batch_ends_its_own_text_alone(speakers: dict[str, Model]) -> None:
    model = speakers["words"]
    fields = {"max_new_tokens": 20, "no_repeat_ngram": 1, "logit_bias": NEVER}
    prompts = ["the cat", "a dog ran", "ROMEO:", "the"]
    whole = regard.generate(model, prompts, **fields)
    stop = [whole[0][6:9], whole[2][9:12]]
    assert regard.generate(model, prompts, stop=stop, **fields) == [
        regard.generate(model, prompt, stop=stop, **fields)[0] for prompt in prompts
    ]
    by_hand = [min((text.split(s)[0] for s in stop), key=len) for text in whole]
    assert regard.generate(model, prompts, stop=stop, **fields) == by_hand


@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_a_beam_takes_a_stop_string_for_what_its_tokens_are(beam: int, early_stopping: Any) -> None:
    """Where every letter is a token, a string and the sequence of its tokens end the same texts."""
    model = language_model("chars").double()
    tokenizer = tokenizer_of(model)
    prompts, fields = ["the cat", "a", "고양이"], {"beam": beam, "n_best": beam, "early_stopping": early_stopping}
    free = regard.generate(model, prompts, max_new_tokens=12, logit_bias=NEVER, **fields)
    likely = "".join(text.text for texts in free.n_best for text in texts)
    finishes = set()
    for stops in ([likely[3]], [likely[5:7]], [likely[2], likely[8:11], "zz"], list(set(likely[:40]))):
        stops = [stop for stop in stops if "\ufffd" not in stop]
        by_text = regard.generate(model, prompts, max_new_tokens=12, stop=stops, **fields)
        ids = [tokenizer.encode(stop) for stop in stops]
        by_token = regard.generate(model, prompts, max_new_tokens=12, stop=ids, **fields)
        assert [[x.text for x in texts] for texts in by_text.n_best] == [
            [x.text for x in texts] for texts in by_token.n_best
        ]
        scores = [x.score for texts in by_token.n_best for x in texts]
        assert [x.score for texts in by_text.n_best for x in texts] == pytest.approx(scores, abs=1e-9)
        finishes |= {x.finish for texts in by_text.n_best for x in texts}
    assert "stop" in finishes


def test_a_beam_without_enough_ways_on_is_no_beam(speakers: dict[str, Model]) -> None:
    """Where nearly every token ends a text, the rest of the beams are empty, and nothing ended goes on."""
    model = speakers["bytes"]
    stops = [chr(code) for code in range(1, 128)]
    made = regard.generate(model, "the", beam=4, n_best=4, max_new_tokens=6, stop=stops)
    for text in made.n_best[0]:
        assert not any(stop in tokenizer_of(model).decode(text.tokens[:-1]) for stop in stops)


def test_stops_may_be_strings_tokens_and_sequences(speaker: Model) -> None:
    fields = {"max_new_tokens": 12, "no_repeat_ngram": 1, "logit_bias": NEVER}
    whole = regard.generate(speaker, "the cat", **fields)
    tokens, decode = whole.tokens[0], tokenizer_of(speaker).decode
    for stop in (tokens[4], [tokens[4]], [tokens[3:5], 299], ["never there", tokens[4]]):
        made = regard.generate(speaker, "the cat", stop=stop, **fields)
        n = 3 if isinstance(stop, list) and isinstance(stop[0], list) else 4
        assert made.tokens[0] == tokens[:n]
        assert made[0] == decode(tokens[:n])
    by_ids = regard.generate(speaker, tokenizer_of(speaker).encode("the cat"), stop=whole[0][5:8], **fields)
    assert isinstance(by_ids, Generated)
    assert by_ids.best[0].finish == "stop"


def test_a_stop_before_the_least_length_or_in_the_prefix_does_not_count(speaker: Model) -> None:
    fields = {"max_new_tokens": 12, "no_repeat_ngram": 1, "logit_bias": NEVER}
    whole = regard.generate(speaker, "the cat", **fields)
    decode = tokenizer_of(speaker).decode
    early = decode(whole.tokens[0][:1])
    if early not in decode(whole.tokens[0][1:]):
        assert regard.generate(speaker, "the cat", stop=early, min_new_tokens=5, **fields) == whole
    prefixed = regard.generate(speaker, "the cat", prefix=" sat on", stop=" sat", **fields)
    assert prefixed[0].startswith(" sat on")
    assert len(prefixed[0]) > len(" sat on")
    assert "".join(regard.stream(speaker, "the cat", prefix=" sat on", stop=" sat", **fields)) == prefixed[0]


def test_a_prefix_is_forced(speaker: Model, translating: Model) -> None:
    assert regard.generate(speaker, "the cat", prefix=" 고양이", max_new_tokens=20)[0].startswith(" 고양이")
    assert regard.translate(translating, "the cat", prefix="고양이가")[0].startswith("고양이가")
    made = regard.generate(translating, "the cat", target="고양이가", max_new_tokens=5)
    n_prefix = len(tokenizer_of(translating).encode("고양이가", special=False))
    with_prefix = regard.generate(translating, "the cat", prefix="고양이가", max_new_tokens=n_prefix + 5)
    assert with_prefix[0] == "고양이가" + made[0]


def test_each_text_has_its_own_beginning_in_whatever_order_they_are_translated(
    translating: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest is translated first, in one batch or in several."""
    texts, tokenizer = ["the", "the cat sat on the mat.", "a dog ran, and the cat ran too."], tokenizer_of(translating)
    begun = [tokenizer.encode(text, special=False) for text in ("고양이가", "주의력만", "매트 위에 앉았다.")]
    alone = [
        regard.translate(translating, text, target=start, max_new_tokens=5).tokens[0]
        for text, start in zip(texts, begun, strict=True)
    ]
    assert regard.translate(translating, texts, target=begun, max_new_tokens=5).tokens == alone
    monkeypatch.setitem(prompts._MAX_CACHE_BYTES, "cpu", 1)
    assert regard.translate(translating, texts, target=begun, max_new_tokens=5).tokens == alone
    assert regard.generate(translating, texts, target=begun, beam=4, max_new_tokens=5).tokens == alone
    with pytest.raises(ValueError, match="there are 2 targets for 3 sources"):
        regard.translate(translating, texts, target=begun[:2])
    with pytest.raises(ValueError, match="target 1 has 201 tokens"):
        regard.translate(translating, texts, target=[[5], [5] * 200, [5]])


def test_biases_name_tokens_by_word_or_id(speaker: Model) -> None:
    tokenizer = tokenizer_of(speaker)
    [only] = tokenizer.encode("q")
    for key in ("q", only):
        assert regard.generate(speaker, "the", logit_bias={key: 1e6}, max_new_tokens=5)[0] == "q" * 5
    assert regard.generate(speaker, "the", logit_bias={"<eos>": 1e6}, max_new_tokens=5).finishes == ["end"]
    free = regard.generate(speaker, "the", max_new_tokens=5, logit_bias=NEVER).tokens[0]
    forbidden = regard.generate(speaker, "the", max_new_tokens=5, logit_bias={free[0]: -np.inf, **NEVER}).tokens[0]
    assert free[0] not in forbidden
    both = ModelTokenizers(speaker).encode_fields({"logit_bias": {"q": 1.0, only: 2.0}})[0]["logit_bias"]
    assert both == {only: 3.0}


@pytest.mark.parametrize("word", ["qqqq", "<nope>", ""])
def test_unknown_tokens_are_named(speaker: Model, word: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{word!r} is an unknown token")):
        regard.generate(speaker, "the", logit_bias={word: 1.0})


def test_a_word_the_tokenizer_replaces_is_unknown() -> None:
    model = language_model("words")
    with pytest.raises(ValueError, match="'zebra' is an unknown token: the tokenizer does not have it"):
        regard.generate(model, "the", logit_bias={"zebra": 1.0})
    assert ModelTokenizers(model).token_id("cat") == tokenizer_of(model).encode("cat")[0]


# ---- many at once


PROMPTS = ["the cat", "a", "고양이가 매트", "ROMEO: what light", "the dog ran, and the cat ran too.", "a", "JULIET:"]


@pytest.mark.parametrize("fields", [{}, {"beam": 3}, {"temperature": 1.2, "seed": 4}, {"stop": ["e"]}], ids=str)
def test_no_text_depends_on_its_neighbours(speaker: Model, fields: dict[str, Any]) -> None:
    """In float32, as models are used."""
    alone = [regard.generate(speaker, prompt, max_new_tokens=10, **fields) for prompt in PROMPTS]
    together = regard.generate(speaker, PROMPTS, max_new_tokens=10, **fields)
    assert together.tokens == [made.tokens[0] for made in alone]
    assert list(together) == [made[0] for made in alone]
    assert together.scores == pytest.approx([made.scores[0] for made in alone], abs=1e-4)


@pytest.mark.parametrize("name", ["transformer-base", "luong-lstm"])
def test_no_translation_depends_on_its_neighbours(name: str) -> None:
    model = translator(name)
    alone = [regard.translate(model, text) for text in PROMPTS]
    together = regard.translate(model, PROMPTS)
    assert together.tokens == [made.tokens[0] for made in alone]


def test_batches_are_small_and_of_similar_length(translating: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = regard.translate(translating, PROMPTS)
    seen: list[list[int]] = []
    kept = regard.generation.text_generation.generate_tokens  # type: ignore[attr-defined]

    def watched(model: Model, rows: list[list[int]], *args: Any, **fields: Any) -> Generated:
        seen.append([len(row) for row in rows])
        return kept(model, rows, *args, **fields)

    monkeypatch.setattr("regard.generation.text_generation.generate_tokens", watched)
    monkeypatch.setitem(prompts._MAX_CACHE_BYTES, "cpu", 150_000)
    assert regard.translate(translating, PROMPTS) == whole
    assert len(seen) > 2
    assert [n for group in seen for n in group] == sorted((n for group in seen for n in group), reverse=True)


def test_a_budget_too_small_for_one_still_takes_one(speaker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prompts._MAX_CACHE_BYTES, "cpu", 1)
    groups = list(prompts.length_batches(speaker, GenerateConfig(), [3, 9, 5], [8, 8, 8]))
    assert groups == [[1], [2], [0]]


# ---- translating


def test_translate_searches_with_four_beams(translating: Model) -> None:
    text = "the cat sat"
    ids = tokenizer_of(translating).encode(text)
    room = 64  # the least multiple of 32 above twice the source and 20
    assert 32 < 2 * len(ids) + 20 <= room
    plain = regard.generate(translating, ids, beam=4, max_new_tokens=room)
    assert regard.translate(translating, text).tokens == plain.tokens
    assert regard.translate(translating, text, beam=1, max_new_tokens=5).tokens == (
        regard.generate(translating, ids, max_new_tokens=5).tokens
    )
    assert regard.translate(translating, [text], GenerateConfig(max_new_tokens=5)).tokens == (
        regard.generate(translating, ids, max_new_tokens=5).tokens
    )
    assert regard.translate(translating, text, sample=False).scores == plain.scores
    assert len(regard.translate(translating, text, min_new_tokens=70).tokens[0]) >= 70


def test_nothing_to_translate_is_no_translation(translating: Model) -> None:
    assert regard.translate(translating, []) == []


def test_two_vocabularies(tmp_path: Path) -> None:
    model = translator(joint=False)
    made = regard.translate(model, ["the cat", "a dog"], max_new_tokens=8)
    opened = regard.load(model.save(tmp_path / "two"))
    assert regard.translate(opened, ["the cat", "a dog"], max_new_tokens=8) == made
    assert set("".join(made)) <= set("".join(LINES[2:4]))


def test_a_draft_helps_with_text(translating: Model, speaker: Model) -> None:
    alone = regard.translate(translating, PROMPTS, beam=1)
    helped = regard.translate(translating, PROMPTS, draft=translating)
    assert helped == alone
    assert helped.drafted is not None
    assert helped.drafted.share > 0.9
    other = language_model("bpe", seed=1)
    other.processor = Processor(source=train_tokenizer(["other words"] * 3, "bytes"))
    with pytest.raises(ValueError, match="the draft has a different tokenizer than the model"):
        regard.generate(speaker, "the", draft=other)


# ---- captions and classes


@pytest.fixture(scope="module")
def captioning() -> Model:
    return captioner()


def test_a_caption_of_whatever_holds_an_image(captioning: Model, tmp_path: Path) -> None:
    path = picture(tmp_path / "red.png")
    with Image.open(path) as image:
        image.load()
        array = np.asarray(image)
        told = regard.caption(captioning, path, max_new_tokens=8)
        assert told.tokens[0]
        for same in (str(path), image, array, [path], captioning.processor.image(image)):
            assert regard.caption(captioning, same, max_new_tokens=8) == told
    image_pixels = captioning.processor.image(Image.open(path))
    assert (
        regard.caption(captioning, path, beam=2).tokens
        == regard.generate(captioning, image_pixels, beam=2, max_new_tokens=19).tokens
    )


def test_captions_of_several_images(captioning: Model, tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{n}.png", (80 * n, 255 - 80 * n, 60), (10 + 7 * n, 30)) for n in range(4)]
    together = regard.caption(captioning, paths)
    assert together.tokens == [regard.caption(captioning, path).tokens[0] for path in paths]


def test_an_image_is_seen_as_in_training(captioning: Model, tmp_path: Path) -> None:
    """Turned as the camera was held, and what is transparent is white."""
    from regard.data.examples import ImageExample
    from regard.data.images import image_batch
    from regard.generation.prompts import image_pixels

    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "turned.png", exif=exif)
    paths = [tmp_path / "clear.png", tmp_path / "turned.png"]
    examples = [ImageExample(path, captions=("x",)) for path in paths]
    assert captioning.processor is not None
    resized = captioning.processor.image
    cropped = ImageProcessor(20, (0.1, 0.2, 0.3), (0.5, 0.4, 0.3), resample=3, crop=(16, 16))  # as CLIP does
    for processor in (resized, cropped):
        captioning.processor = replace(captioning.processor, image=processor)
        as_trained = image_batch(examples, [0, 1], processor)
        assert image_pixels(captioning, paths).equal(as_trained)
    captioning.processor = replace(captioning.processor, image=resized)
    assert (image_pixels(captioning, paths[0]) == 1).all()


def test_classes_of_texts(tmp_path: Path) -> None:
    model = classifier()
    alone = [regard.classify(model, text)[0] for text in PROMPTS]
    together = regard.classify(model, PROMPTS)
    assert [x.label for x in together] == [x.label for x in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.all == pytest.approx(other.all, abs=1e-5)
        assert sum(one.all.values()) == pytest.approx(1)
        assert list(one.all) == sorted(one.all, key=lambda name: -one.all[name])
        assert (one.label, one.probability) == next(iter(one.all.items()))
    ids = model.processor.source.encode(PROMPTS[0])
    with torch.no_grad():
        chances = model(torch.tensor([ids])).softmax(-1)[0].tolist()
    assert together[0].all == pytest.approx(dict(zip(("cats", "dogs", "plays"), chances, strict=True)), abs=1e-5)
    assert regard.classify(model.save(tmp_path / "classes"), PROMPTS[0])[0].label == alone[0].label
    with pytest.raises(ValueError, match=r"source 0 has .* tokens, but max_len=96; truncate=True"):
        regard.classify(model, "the cat " * 90)
    assert regard.classify(model, "the cat " * 90, truncate=True)[0].label in model.processor.labels


def test_classes_of_images(tmp_path: Path) -> None:
    model = image_classifier()
    paths = [picture(tmp_path / f"{n}.png", (80 * n, 0, 255 - 80 * n)) for n in range(3)]
    found = regard.classify(model, paths)
    assert [x.label for x in found] == [regard.classify(model, path)[0].label for path in paths]
    model.processor = Processor(image=model.processor.image)
    assert regard.classify(model, paths[0])[0].label.startswith("LABEL_")


# ---- what is refused


@pytest.mark.parametrize(
    ("prompt", "fields", "said"),
    [
        ("", {}, "prompt 0 is empty: there is nothing to continue"),
        (["the", ""], {}, "prompt 1 is empty"),
        ("the cat " * 60, {}, "max_len=96 leaves no room; truncate=True keeps its end"),
        (["the", "the cat " * 60], {}, "prompt 1 has"),
        ("the", {"beam": 301}, "beam=301 is larger than the vocabulary of 300 tokens"),
        ("the", {"temperature": 0}, "temperature=0.0 must be a positive number"),
        ("the", {"stop": [4000]}, "stop holds the unknown token 4000"),
        ("the", {"stop": ""}, "stop='' holds an empty string"),
        ("the", {"stopp": "x"}, "GenerateConfig has no field 'stopp'; did you mean 'stop'?"),
        ("the", {"target": "x"}, "target is for models with an encoder"),
        ("the", {"logit_bias": {5: 1e300}}, "logit_bias of token 5 is 1e+300; it must be a finite number"),
        ("the", {"padding_mask": torch.ones(1, 1)}, "padding_mask needs token ids as a tensor"),
    ],
)
def test_bad_input_of_a_language_model(speaker: Model, prompt: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        regard.generate(speaker, prompt, **fields)


def test_too_long_a_prompt_keeps_its_end(speaker: Model) -> None:
    made = regard.generate(speaker, "the cat " * 60 + "ROMEO:", truncate=True, max_new_tokens=5)
    assert made.finishes == ["length"]
    assert len(made.tokens[0]) == 5


def test_models_are_asked_for_what_they_can(speaker: Model, translating: Model, captioning: Model) -> None:
    bert = classifier()
    for model, run in (
        (speaker, lambda m: regard.translate(m, "x")),
        (bert, lambda m: regard.translate(m, "x")),
        (captioning, lambda m: regard.translate(m, "x")),
    ):
        with pytest.raises(ValueError, match="it does not translate"):
            run(model)
    with pytest.raises(TypeError, match="a model with architecture='encoder' writes no text"):
        regard.generate(bert, "the")
    with pytest.raises(ValueError, match="reads source='image', not text"):
        regard.generate(captioning, "the")
    with pytest.raises(ValueError, match="it does not caption images"):
        regard.caption(translating, "x.png")
    with pytest.raises(ValueError, match="this model has head='lm', but classification needs head='classify'"):
        regard.classify(speaker, "the")


def test_a_model_without_tokenizer_takes_tokens_alone(captioning: Model) -> None:
    model = made("gpt2", None, vocab_size=30)
    with pytest.raises(ValueError, match="this model has no tokenizer for text to read"):
        regard.generate(model, "the")
    with pytest.raises(ValueError, match="this model has no tokenizer for text to write"):
        regard.generate(model, [5], stop="x")
    assert isinstance(regard.generate(model, [5], max_new_tokens=3), Generated)
    blind = captioner()
    blind.processor = Processor(target=captioning.processor.target)
    with pytest.raises(ValueError, match="this model has no image processor"):
        regard.caption(blind, "x.png")


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.zeros((4, 4), dtype=np.float32), "uint8 (height, width) or (height, width, channels), got float32"),
        (np.zeros((4, 4, 7), dtype=np.uint8), "an image must have 1, 3 or 4 channels"),
        (np.zeros((0, 4), dtype=np.uint8), "got uint8 of shape (0, 4)"),
        ([], "there is no image: the list is empty"),
        (3, "an image must be a path, a Pillow image or an array of bytes, not int"),
    ],
)
def test_what_is_no_image(captioning: Model, image: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        regard.caption(captioning, image)


# ---- other people's tokenizers


def foreign(tokenizer: Tokenizer) -> Tokenizer:
    """The same vocabulary, its first special token under another name, so that it is not one of those learned here."""
    return Tokenizer(tokenizer.content.replace(b'"<pad>"', b'"[PAD]"'))


@pytest.mark.parametrize("template", ["none", "eos", "bos-eos"])
@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_what_stands_around_a_text(template: Any, kind: Any) -> None:
    own = train_tokenizer(LINES, kind, 300 if kind == "bpe" else None, template)
    first, last = {"none": ([], []), "eos": ([], [2]), "bos-eos": ([1], [2])}[template]
    for tokenizer in (own, foreign(own)):
        plain = own.encode("the cat", special=False)
        assert split_special_tokens(tokenizer, "the cat") == (first, plain, last)
        assert split_special_tokens(tokenizer, "")[1] == []


def test_a_prompt_has_no_end_behind_it() -> None:
    """A tokenizer that ends every text must not end the prompt."""
    tokenizer = train_tokenizer(LINES, "bpe", 300, "bos-eos")
    model = made("gpt2", Processor(source=foreign(tokenizer)), vocab_size=300)
    ids = tokenizer.encode("the cat")
    assert regard.generate(model, "the cat", max_new_tokens=4).tokens == (
        regard.generate(model, ids[:-1], max_new_tokens=4).tokens
    )


def test_half_a_surrogate_is_read_as_what_cannot_be_read(speaker: Model) -> None:
    speaker_of_theirs = made("gpt2", Processor(source=foreign(tokenizer_of(speaker))), vocab_size=300)
    for model in (speaker, speaker_of_theirs):
        assert regard.generate(model, "the \udcff", max_new_tokens=4) == (
            regard.generate(model, "the \ufffd", max_new_tokens=4)
        )
