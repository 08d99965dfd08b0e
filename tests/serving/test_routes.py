"""The API over HTTP: our own routes, attention on request, limits, disconnects, and the end of the server."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
import tokenizers as hf
import torch
from tokenizers import decoders, pre_tokenizers

import regard
from generation.spoken import classifier, image_classifier, language_model, made
from regard.generation.label_answers import label_answerer
from regard.models import Model
from regard.serving import api_models, create_api
from regard.serving.choices import TextChoice
from regard.serving.openai_documents import CompletionDocument
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer
from regard.web.requests import Limits
from web.served import picture

from .served_api import TEXT, ServedApi, serving_api

NAN = "the model's logits are NaN; its training may have diverged"


def ask(api: ServedApi, route: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{api.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(api: ServedApi, route: str, status: int, **body: Any) -> str:
    answer = httpx.post(f"{api.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize("name", ["translator", "recurrent"])
def test_translate(api: ServedApi, models: dict[str, Model], name: str) -> None:
    texts = [TEXT, "a dog ran"]
    found = ask(api, "translate", model=name, text=texts)["translations"]
    wanted = regard.translate(models[name], texts)
    assert [one["text"] for one in found] == list(wanted)
    assert [one["score"] for one in found] == pytest.approx(wanted.scores, abs=1e-4)
    greedy = ask(api, "translate", model=name, text=TEXT, beams=1)["translations"][0]["text"]
    assert greedy == regard.translate(models[name], TEXT, beam=1)[0]
    several = ask(api, "translate", model=name, text=TEXT, beams=3, n=2, max_tokens=6)["translations"][0]
    two = regard.translate(models[name], TEXT, beam=3, n_best=2, max_new_tokens=6).n_best[0]
    assert [several["text"], several["alternatives"][0]["text"]] == [text.text for text in two]


def test_a_translator_also_completes(api: ServedApi, models: dict[str, Model]) -> None:
    answer = api.client.completions.create(
        model="translator", prompt=TEXT, max_tokens=9, extra_body={"beams": 4, "length_penalty": 0.6}
    )
    wanted = regard.translate(models["translator"], TEXT, beam=4, length_penalty=0.6, max_new_tokens=9)
    assert answer.choices[0].text == wanted[0]


def test_caption_and_classify(api: ServedApi, models: dict[str, Model]) -> None:
    found = ask(api, "caption", model="captioner", image=picture())["captions"][0]
    assert isinstance(found["text"], str)
    assert found["finish_reason"] in ("stop", "length")
    lines = "\r\n".join(textwrap.wrap(picture(), 76))  # as base64 and MIME write it
    assert ask(api, "caption", model="captioner", image=lines)["captions"] == [found]
    results = ask(api, "classify", model="classifier", text=[TEXT, "a dog ran"])["results"]
    for result, wanted in zip(results, regard.classify(models["classifier"], [TEXT, "a dog ran"]), strict=True):
        assert result["label"] == wanted.label
        assert result["probabilities"] == pytest.approx(wanted.all, abs=1e-5)
    assert ask(api, "classify", model="images", image=picture())["results"][0]["label"] in ("red", "green", "blue")


def test_every_kind_of_label_is_answered_as_the_command_answers_it() -> None:
    shapes = {
        "one": {},
        "several": {"problem_type": "multi_label"},
        "rater": {"problem_type": "regression", "n_classes": 1},
        "tagger": {"head": "tag"},
    }
    models = {name: classifier(**fields) for name, fields in shapes.items()}
    with serving_api(models | {"pictures": image_classifier()}) as api:
        for name, model in models.items():
            for threshold in (None, 0.2, 1.0) if name in ("one", "several") else (None,):
                (wanted,) = label_answerer(model, threshold=threshold).answer([TEXT])
                (result,) = ask(api, "classify", model=name, text=TEXT, threshold=threshold)["results"]
                wanted = {"probabilities" if key == "all" else key: value for key, value in wanted.items()}
                assert json.dumps(result) == json.dumps(wanted)
        pair = ask(api, "classify", model="several", text=["a cat", "a\tdog"], second=["ran", "sat"], threshold=0)
        expected = regard.classify(models["several"], [("a cat", "ran"), ("a dog", "sat")], threshold=0)
        for result, one in zip(pair["results"], expected, strict=True):
            assert (result["labels"], result["probabilities"]) == (list(one.labels), pytest.approx(one.all))
        for fields, message in (
            ({"model": "one", "text": ["a", "b"], "second": "c"}, "there are 2 texts and 1 second texts"),
            ({"model": "one", "text": "a", "second": " "}, "one of the two texts of the pair is empty"),
            ({"model": "tagger", "text": "a", "second": "b"}, "this model reads one text at a time"),
            ({"model": "rater", "text": "a", "threshold": 0.5}, "threshold=0.5 is for classes, which"),
            ({"model": "one", "text": "a", "second": "b", "attention": {}}, "the attention of a pair"),
            ({"model": "tagger", "text": ""}, "empty"),
            ({"model": "pictures", "image": picture(), "second": "b"}, "this model reads one image at a time"),
        ):
            assert message in refused(api, "classify", 400, **fields)
        too_long = refused(api, "classify", 400, model="one", text="dog " * 100)
        assert too_long.endswith("but max_len=96")


def test_attention_is_that_of_look(api: ServedApi, models: dict[str, Model]) -> None:
    asked = {"layers": [0, -1], "heads": [1, 3], "tokens": [2, -1]}
    body: dict[str, Any] = {"model": "speaker", "prompt": TEXT, "max_tokens": 6, "temperature": 0, "attention": asked}
    choice = ask(api, "completions", **body)["choices"][0]
    seen = choice["attention"]
    tokenizer = models["speaker"].processor.tokenizer  # type: ignore[union-attr]
    wanted = regard.generate(models["speaker"], TEXT, max_new_tokens=6)
    look = regard.look(models["speaker"], [*tokenizer.encode(TEXT, special=False), *wanted.tokens[0]])
    rows = [2, len(look.rows()) - 1]
    for layer, own in zip((0, 1), seen["weights"], strict=True):
        for head, weights in zip((1, 3), own, strict=True):
            exact = look.weights(layer=layer, head=head)[rows]
            assert torch.allclose(torch.tensor(weights), exact, atol=1e-5, rtol=0)
    assert seen["layers"] == [0, 1]
    assert seen["tokens"] == rows
    assert len(seen["columns"]) == len(look.cols())


@pytest.mark.parametrize(
    ("route", "body", "kind"),
    [
        ("translate", {"model": "translator", "text": TEXT, "beams": 3}, "cross"),
        ("caption", {"model": "captioner", "image": picture()}, "cross"),
        ("classify", {"model": "classifier", "text": TEXT}, "encoder"),
    ],
)
def test_attention_of_every_task(api: ServedApi, route: str, body: dict[str, Any], kind: str) -> None:
    options = {"kind": kind} if kind == "cross" else {}
    answer = ask(api, route, **body, attention={"layers": [0], "heads": [0], **options})
    (entries,) = (answer[name] for name in ("translations", "captions", "results") if name in answer)
    for row in entries[0]["attention"]["weights"][0][0]:
        assert sum(row) == pytest.approx(1, abs=1e-5)


def test_attention_of_a_stream_comes_last(api: ServedApi) -> None:
    body = {"model": "speaker", "prompt": TEXT, "max_tokens": 3, "stream": True, "attention": {"layers": [0]}}
    lines = httpx.post(f"{api.url}/v1/completions", json=body, timeout=60).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    assert "attention" in json.loads(lines[-2].removeprefix("data: "))["choices"][0]


def test_what_a_stream_sends_at_its_end_is_one_chunk(api: ServedApi) -> None:
    """The last text of both choices, usage and [DONE]: every write costs a system call, and so does every read."""
    body = {"model": "speaker", "prompt": TEXT, "max_tokens": 1, "n": 2, "temperature": 1.0, "seed": 1, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{api.url}/v1/completions", json=body, timeout=60) as answer:
        *_, last = answer.iter_raw()
    events = last.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    *choices, usage = (json.loads(event.removeprefix("data: ")) for event in events[:-1])
    assert [choice["choices"][0]["finish_reason"] for choice in choices] == ["length", "length"]
    assert usage["usage"]["completion_tokens"] == 2


def test_texts_do_not_wait_for_a_look_at_attention(api: ServedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    is_looking, has_finished = threading.Event(), threading.Event()

    def slow_look(*args: Any) -> Any:
        is_looking.set()
        assert has_finished.wait(20), "the other text waited for the look"
        return regard.look(*args)

    monkeypatch.setattr(api_models, "look", slow_look)
    body: dict[str, Any] = {"model": "speaker", "prompt": TEXT, "max_tokens": 4, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, api, "completions", **body, attention={"layers": [0]})
        assert is_looking.wait(20)
        ask(api, "completions", **body)
        has_finished.set()
        assert "attention" in asked.result()["choices"][0]


def test_wrong_inputs_are_4xx_and_name_the_field(api: ServedApi) -> None:
    assert "does not translate" in refused(api, "translate", 400, model="speaker", text=TEXT)
    assert "does not caption" in refused(api, "caption", 400, model="translator", image=picture())
    assert "does not classify" in refused(api, "classify", 400, model="speaker", text=TEXT)
    assert "does not embed" in refused(api, "embeddings", 400, model="images", input=TEXT)
    assert "base64" in refused(api, "caption", 422, model="captioner", image="?")
    body: dict[str, Any] = {"model": "speaker", "prompt": TEXT}
    assert "attention.layers holds 9" in refused(api, "completions", 400, **body, attention={"layers": [9]})
    assert "weights" in refused(
        api, "completions", 400, model="speaker", prompt=TEXT * 30, max_tokens=1, attention={}, temperature=0
    )
    assert "boolean" in refused(api, "completions", 400, **body, temperature=True)
    assert "64" in refused(api, "completions", 400, **body, n=65)
    assert "this server runs" in refused(api, "completions", 400, **body, n=60)
    assert "empty" in refused(api, "completions", 400, model="speaker", prompt=[""])
    # Of a field that may have several types, the value is named, not a type that it need not have.
    assert "at most 256 items" in refused(api, "completions", 400, model="speaker", prompt=["a"] * 257)
    assert "prompt.0: input should be greater" in refused(api, "completions", 400, model="speaker", prompt=[-1])
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "type: input should be 'text'" in refused(api, "chat/completions", 400, model="chatty", messages=parts)
    chat = refused(api, "chat/completions", 400, model="chatty", messages=[{"role": "user", "content": None}])
    assert chat == "messages.0.content: input should be a valid string"
    many = refused(api, "completions", 413, model="speaker", prompt=["a"] * 100_000)
    assert "strings" in many


def test_a_refused_image_leaves_no_traceback_in_the_log(api: ServedApi, caplog: pytest.LogCaptureFixture) -> None:
    assert "base64" in refused(api, "caption", 422, model="captioner", image="?")
    assert "image is not one of" in refused(api, "caption", 422, model="captioner", image="AAAA")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("said", ["internal error (RuntimeError); see the server's log", NAN])
def test_an_internal_error_in_a_stream_is_in_the_log(
    said: str, api: ServedApi, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's last event says so, as the status 500 of a whole response does."""
    body = {"model": "speaker", "prompt": TEXT, "max_tokens": 30, "temperature": 0, "logit_bias": {"2": -100}}
    ask(api, "completions", **body)
    slots = api.scheduler("speaker").batches.slots[1]
    decode, n_steps, has_received = slots.decode, itertools.count(), threading.Event()

    def fail_later(tokens: torch.Tensor) -> torch.Tensor:
        if next(n_steps) > 3 and has_received.wait(60):  # an error before the first event is a status, not an event
            if said != NAN:
                raise RuntimeError("the device is lost")
            return decode(tokens) * torch.nan  # type: ignore[no-any-return]
        return decode(tokens)  # type: ignore[no-any-return]

    monkeypatch.setattr(slots, "decode", fail_later)
    lines = []
    with httpx.stream("POST", f"{api.url}/v1/completions", json=body | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            has_received.set()
            lines.append(line)
    *_, error, end = filter(None, lines)
    assert end == "data: [DONE]"
    assert json.loads(error[6:])["error"] == {"message": said, "type": "server_error", "param": None, "code": None}
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == (NAN if said == NAN else "the device is lost")


def test_log_probs_name_bytes_choices_and_places_as_openai_does(api: ServedApi, models: dict[str, Model]) -> None:
    tokenizer = models["chatty"].processor.tokenizer  # type: ignore[union-attr]
    part = next(index for index in range(300) if (tokenizer.token_bytes(index) or b"")[:1] == b"\xec")
    spelled = tokenizer.token_bytes(part)
    assert spelled is not None
    messages, forced = [{"role": "user", "content": TEXT}], {str(part): 100}
    body: dict[str, Any] = {"model": "chatty", "messages": messages, "max_tokens": 2, "logit_bias": forced}
    logs = ask(api, "chat/completions", **body, logprobs=True)["choices"][0]["logprobs"]
    assert [token["bytes"] for token in logs["content"]] == [list(spelled)] * 2  # part of a character
    assert logs["content"][0]["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
    rare = {"model": "speaker", "prompt": "the cat", "max_tokens": 4, "temperature": 2, "seed": 1}
    logs = ask(api, "completions", **rare, logprobs=1)["choices"][0]["logprobs"]
    for token, value, top in zip(logs["tokens"], logs["token_logprobs"], logs["top_logprobs"], strict=True):
        assert top[token] == value  # the chosen token, whether it is the likeliest or not
    assert any(len(top) == 2 for top in logs["top_logprobs"])
    echoed = ask(api, "completions", **rare, logprobs=1, echo=True)["choices"][0]
    offsets = [len("the cat") + offset for offset in logs["text_offset"]]
    assert echoed["logprobs"]["text_offset"][-len(offsets) :] == offsets  # after those of the prompt
    lines = httpx.post(f"{api.url}/v1/completions", json=rare | {"logprobs": 1, "echo": True, "stream": True}).text
    chunks = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines.split("\n\n")[:-2]]
    offsets = [offset for chunk in chunks if chunk for offset in chunk["text_offset"]]
    assert offsets == echoed["logprobs"]["text_offset"]


def test_bytes_that_are_no_character_are_replaced_as_in_generate() -> None:
    """A decoder for bytes replaces a whole run of them if one is wrong, so it matters which tokens it is given."""
    letters = ["<pad>", "<s>", "</s>", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = hf.Tokenizer(hf.models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    model = made(
        "gpt2", Processor(source=Tokenizer(backend.to_str().encode(), "tokenizer.json")), vocab_size=len(letters)
    )
    bias = {letters.index("<0x3F>"): 99.0, letters.index("<0xC4>"): 99.0}
    body: dict[str, Any] = {"model": "bytes", "prompt": "a", "max_tokens": 30, "logit_bias": bias, "logprobs": 0}
    with serving_api({"bytes": model}) as api:
        for seed in range(4):
            text = ask(api, "completions", **body, seed=seed)["choices"][0]["text"]
            wanted = regard.generate(model, "a", max_new_tokens=30, temperature=1.0, seed=seed, logit_bias=bias)
            assert text == wanted[0]


def test_log_probs_name_the_place_of_each_new_token(api: ServedApi) -> None:
    """Also after tokens that are parts of a character."""
    pattern = {"type": "regex", "pattern": "(고양이|😀| cat|된){9}"}
    body: dict[str, Any] = {
        "model": "speaker",
        "prompt": "the cat",
        "max_tokens": 90,
        "seed": 3,
        "response_format": pattern,
    }
    choice = ask(api, "completions", **body, logprobs=0)["choices"][0]
    logs, n_read = choice["logprobs"], 0
    for token, offset in zip(logs["tokens"], logs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert any(token.startswith("bytes:") for token in logs["tokens"])
    lines = httpx.post(f"{api.url}/v1/completions", json=body | {"logprobs": 0, "stream": True}).text
    for chunk in (json.loads(line[6:])["choices"][0] for line in lines.split("\n\n")[:-2]):
        offsets = chunk["logprobs"]["text_offset"]
        assert offsets == logs["text_offset"][n_read : (n_read := n_read + len(offsets))]


def test_formats_where_a_text_begins_with_a_space() -> None:
    """SentencePiece puts one before every text; the tokens that a format leaves no choice about have none."""
    letters = ["<pad>", "<s>", "</s>", "▁", *'{}":,0123456789nameth\t\n\r']
    backend = hf.Tokenizer(hf.models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model = made(
        "gpt2", Processor(source=Tokenizer(backend.to_str().encode(), "tokenizer.json")), vocab_size=len(letters)
    )
    schema = {"type": "object", "properties": {"name": {"enum": [7, 42]}}, "required": ["name"]}
    format_ = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    body: dict[str, Any] = {"model": "spaced", "prompt": "the name", "max_tokens": 90, "seed": 1}
    with serving_api({"spaced": model}) as api:
        answer = ask(api, "completions", **body, response_format=format_)["choices"][0]
    assert json.loads(answer["text"])["name"] in (7, 42)


def test_log_probs_of_a_prompt_at_the_edges(api: ServedApi, models: dict[str, Model]) -> None:
    """Places in characters of several bytes, an end token, a text up to max_len, and what is refused."""
    tokenizer = models["speaker"].processor.tokenizer  # type: ignore[union-attr]
    body: dict[str, Any] = {"model": "speaker", "prompt": "고양이 ♥ cat", "logprobs": 0, "echo": True, "temperature": 0}
    choice = ask(api, "completions", **body, max_tokens=0)["choices"][0]
    logs = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == ("고양이 ♥ cat", "length")
    assert [logs["token_logprobs"][0], logs["top_logprobs"][0]] == [None, None]
    for token, offset in zip(logs["tokens"], logs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert any(token.startswith("bytes:") for token in logs["tokens"])
    ended = ask(api, "completions", **body, max_tokens=3, logit_bias={str(models["speaker"].config.eos_id): 100})
    assert ended["choices"][0]["logprobs"]["tokens"] == [*logs["tokens"], "<eos>"]  # one entry for each token
    assert ended["choices"][0]["logprobs"]["token_logprobs"][:-1] == logs["token_logprobs"]
    whole = {"model": "speaker", "prompt": tokenizer.encode(TEXT * 40, special=False)[:400], "echo": True}
    assert len(ask(api, "completions", **whole, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]["tokens"]) == 400
    assert "leaves no room" in refused(api, "completions", 400, **whole, logprobs=1, max_tokens=1)
    assert "needs echo" in refused(api, "completions", 400, model="speaker", prompt=TEXT, max_tokens=0)
    said = refused(api, "completions", 400, model="translator", prompt=TEXT, echo=True, logprobs=1)
    assert said == "model 'translator' has an encoder, whose prompt has no log P: echo cannot be combined with logprobs"
    assert ask(api, "completions", model="translator", prompt=TEXT, echo=True, max_tokens=2)["choices"][0]["text"]


def test_log_probs_of_a_prompt_are_not_written_in_the_event_loop(
    api: ServedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All streams would wait: 3,600 tokens, each with the 20 likeliest, take a second."""
    plain, in_loop = CompletionDocument._log_probs, list[bool]()

    def note(document: CompletionDocument, choice: TextChoice, start: int) -> dict[str, Any]:
        in_loop.append(asyncio._get_running_loop() is not None)
        return plain(document, choice, start)

    monkeypatch.setattr(CompletionDocument, "_log_probs", note)
    body: dict[str, Any] = {"model": "speaker", "prompt": TEXT, "max_tokens": 2, "echo": True, "logprobs": 1}
    for stream in (False, True):
        assert httpx.post(f"{api.url}/v1/completions", json=body | {"stream": stream}, timeout=60).status_code == 200
    assert len(in_loop) > 1
    assert not any(in_loop)


def test_nan_of_a_model_is_its_fault_and_not_the_clients() -> None:
    """A status 500, and in a stream an event, whichever route finds it; wrong requests are still 400."""
    broken = {"speaker": language_model(max_len=64), "classifier": classifier(), "tagger": classifier(head="tag")}
    with torch.no_grad():
        for model in broken.values():
            model.embeddings.position.weight[9] = torch.nan  # type: ignore[union-attr, index]
    with serving_api(broken) as api:
        long = [5] * 20
        body: dict[str, Any] = {"model": "speaker", "prompt": long, "max_tokens": 20}
        for fields in ({}, {"temperature": 0}, {"stream": True}, {"beams": 2}, {"echo": True, "logprobs": 1}):
            assert refused(api, "completions", 500, **body, **fields) == NAN
        assert refused(api, "completions", 500, **(body | {"prompt": [5] * 7})) == NAN  # after a few tokens
        for name in ("classifier", "tagger"):
            assert refused(api, "classify", 500, model=name, text=TEXT * 3) == NAN
        vectors = "the model's vectors are NaN; its training may have diverged"
        assert refused(api, "embeddings", 500, model="speaker", input=long) == vectors
        assert "leaves no room" in refused(api, "completions", 400, **(body | {"prompt": [5] * 64}))
        ask(api, "completions", model="speaker", prompt=[5], max_tokens=2)


def test_texts_that_cannot_fit_are_refused_before_they_are_tokenised(
    api: ServedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a text was tokenised")

    for name in ("chatty", "translator", "classifier"):
        monkeypatch.setattr(type(api.state.models[name].model.processor.source), "encode", fail)
    long, chat = "the cat " * 20_000, [{"role": "user", "content": "the cat " * 2000}] * 4
    for route, body in (
        ("chat/completions", {"model": "chatty", "messages": chat}),
        ("translate", {"model": "translator", "text": long, "source_language": "en"}),
        ("classify", {"model": "classifier", "text": [long]}),
    ):
        assert "characters; model" in refused(api, route, 400, **body)


def test_only_few_short_texts_are_read_in_the_event_loop(api: ServedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread reads what takes longer: a WebP of 700 bytes may hold 16 million pixels."""
    readers: list[threading.Thread] = []
    for name in ("read_texts", "read_images"):
        read = getattr(api_models.ApiModel, name)
        record = lambda *args, read=read: (readers.append(threading.current_thread()), read(*args))[1]  # noqa: E731
        monkeypatch.setattr(api_models.ApiModel, name, record)
    requests: list[tuple[bool, str, dict[str, Any]]] = [
        (True, "completions", {"model": "speaker", "prompt": [TEXT] * 8}),
        (True, "translate", {"model": "translator", "text": TEXT}),
        (True, "chat/completions", {"model": "chatty", "messages": [{"role": "user", "content": TEXT}]}),
        (False, "completions", {"model": "speaker", "prompt": ["a"] * 9}),
        (False, "completions", {"model": "speaker", "prompt": "the " * 501}),
        (False, "completions", {"model": "speaker", "prompt": "a", "response_format": {"type": "json_object"}}),
        (False, "caption", {"model": "captioner", "image": picture()}),
    ]
    for in_loop, route, body in requests:
        httpx.post(f"{api.url}/v1/{route}", json=body | {"max_tokens": 1}, timeout=60)
        assert (readers.pop() is api.thread) == in_loop, body


@pytest.mark.parametrize("blocks", [False, True], ids=["reads", "reads nothing"])
def test_who_leaves_a_stream_cancels_it_at_once(blocks: bool) -> None:
    """Also where the server waits until the client has room for more."""

    async def leave() -> None:
        app: Any = create_api({"speaker": language_model(max_len=4000)})
        scheduler = app.app.state.serving.models["speaker"].scheduler
        body = {"model": "speaker", "prompt": TEXT, "max_tokens": 3900, "logit_bias": {"2": -100}, "stream": True}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        has_sent, is_gone = asyncio.Event(), asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                has_sent.set()
                await asyncio.Event().wait() if blocks else None

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        async with app.app.router.lifespan_context(app.app):
            asked = asyncio.ensure_future(app(scope, receive, send))
            await has_sent.wait()
            is_gone.set()
            await asyncio.wait_for(asked, 60)
            n_steps = scheduler.statistics.steps
            while not scheduler.is_idle:
                await asyncio.sleep(0.001)
            assert scheduler.statistics.steps <= n_steps + 2
            assert scheduler.statistics.cancelled == 1

    gc.disable()  # at once, not when the garbage collector finds the generator
    try:
        asyncio.run(asyncio.wait_for(leave(), 120))
    finally:
        gc.enable()


def test_more_prompts_than_the_queue_holds_are_not_told_to_come_back(models: dict[str, Model]) -> None:
    with serving_api({"speaker": models["speaker"]}, Limits(waiting=2)) as served:
        body: dict[str, Any] = {"model": "speaker", "max_tokens": 1, "temperature": 0}
        assert len(ask(served, "completions", **body, prompt=[TEXT] * 2)["choices"]) == 2
        message = refused(served, "completions", 400, **body, prompt=[TEXT] * 3)
    assert message == "the request has 3 prompts; the queue of this server holds 2"


def test_a_body_without_its_content_type_is_told_so(api: ServedApi) -> None:
    content = b'{"model": "speaker", "prompt": "a", "max_tokens": 1}'
    for body, headers in ((content, {}), (b"[]", {"Content-Type": "application/json"})):
        answer = httpx.post(f"{api.url}/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].endswith("sent with the header Content-Type: application/json")
    cut_off = httpx.post(f"{api.url}/v1/completions", content=content[:9], headers={"Content-Type": "application/json"})
    assert cut_off.json()["error"] == {
        "message": "the body is not JSON",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_an_offer_to_upgrade_is_passed_over(api: ServedApi) -> None:
    """Java's client offers HTTP/2 with its first request, and its body counts all the same."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    body = {"model": "speaker", "prompt": TEXT, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{api.url}/v1/completions", json=body, headers=offer, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == ask(api, "completions", **body)["choices"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b'{"model": NaN, "prompt": "a"}', b'{"model":"speaker","temperature":NaN}']
)
def test_a_body_that_is_no_request_is_refused_quickly(api: ServedApi, content: bytes) -> None:
    start = time.process_time()  # of client and server
    answer = httpx.post(f"{api.url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert "message" in answer.json()["error"]
    assert time.process_time() - start < 2  # a few milliseconds, unless other threads compute


def test_the_explorer_is_at_the_same_port(models: dict[str, Model]) -> None:
    """Pages and their API beside /v1, each with its own errors; a look meanwhile changes no text."""
    with (
        serving_api({"speaker": models["speaker"]}, has_explorer=True) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        assert "<html" in client.get("/").text
        assert client.get("/static/").status_code == 404
        (model,) = client.get("/api/models").json()
        assert model["id"] == client.get("/v1/models").json()["data"][0]["id"] == "speaker"
        body = {"model": "speaker", "prompt": TEXT, "max_tokens": 12, "temperature": 0}
        wanted = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        look = {"model": "speaker", "text": TEXT, "variant": {"scale": 3.0}}
        with ThreadPoolExecutor(4) as pool:
            looks = [pool.submit(client.post, "/api/looks", json=look) for _ in range(4)]
            texts = [client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(4)]
        assert texts == [wanted] * 4
        assert [each.result().status_code for each in looks] == [200] * 4
        assert list(client.get("/nowhere").json()) == ["error"]
        assert "message" in client.get("/v1/nowhere").json()["error"]
        assert client.get("/v1/completions").status_code == 405
    with serving_api({"speaker": models["speaker"]}) as served:
        assert httpx.get(f"{served.url}/").status_code == 404
