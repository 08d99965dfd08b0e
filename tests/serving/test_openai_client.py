"""The official ``openai`` client against a real server: every call of the table in docs/serve.md."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field

import regard
from generation.spoken import LINES
from regard.models import Model
from regard.web.requests import Limits
from trust.promises import ROOT

from .served_api import TEXT, ServedApi, serving_api

MESSAGES: Any = [{"role": "user", "content": "where is the cat?"}]


def test_models(api: ServedApi) -> None:
    names = [model.id for model in api.client.models.list()]
    assert "speaker" in names
    assert api.client.models.retrieve("translator").id == "translator"


def test_a_completion_is_what_generate_says(api: ServedApi, models: dict[str, Model]) -> None:
    answer = api.client.completions.create(model="speaker", prompt=TEXT, max_tokens=12, temperature=0)
    wanted = regard.generate(models["speaker"], TEXT, max_new_tokens=12)
    assert answer.choices[0].text == wanted[0]
    assert answer.choices[0].finish_reason == {"length": "length"}.get(wanted.finishes[0], "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_several_prompts_and_choices_in_order(api: ServedApi, models: dict[str, Model]) -> None:
    prompts = [TEXT, "a dog ran"]
    answer = api.client.completions.create(model="speaker", prompt=prompts, max_tokens=6, n=2, temperature=0.8, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for number, prompt in enumerate(prompts):
        wanted = regard.generate(models["speaker"], prompt, max_new_tokens=6, n_best=2, temperature=0.8, seed=5)
        assert {x.text for x in answer.choices[2 * number : 2 * number + 2]} == {x.text for x in wanted.n_best[0]}


def test_token_ids_as_a_prompt(api: ServedApi, models: dict[str, Model]) -> None:
    ids = models["speaker"].processor.tokenizer.encode(TEXT, special=False)  # type: ignore[union-attr]
    texts = [
        api.client.completions.create(model="speaker", prompt=prompt, max_tokens=5, temperature=0).choices[0].text
        for prompt in (TEXT, ids, [ids])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_stream_is_the_same_text(api: ServedApi) -> None:
    asked: Any = {"model": "speaker", "prompt": TEXT, "max_tokens": 20, "temperature": 0}
    whole = api.client.completions.create(**asked).choices[0].text
    chunks = list(api.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] is not None
    assert chunks[-1].usage is not None


def test_a_chat(api: ServedApi, models: dict[str, Model]) -> None:
    answer = api.client.chat.completions.create(model="chatty", messages=MESSAGES, max_tokens=8, temperature=0)
    wanted = regard.generate(models["chatty"], MESSAGES, max_new_tokens=8)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == wanted[0]


def test_a_chat_streams(api: ServedApi) -> None:
    asked: Any = {"model": "chatty", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    whole = api.client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(api.client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_chat_by_the_clients_own_stream(api: ServedApi) -> None:
    asked: Any = {"model": "chatty", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    whole = str(api.client.chat.completions.create(**asked).choices[0].message.content)
    asked["stop"] = whole[4]  # this way of the client raises where a text is cut at its length
    with api.client.chat.completions.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content == whole[: whole.index(whole[4])]


def test_many_at_once_from_an_asynchronous_client(api: ServedApi) -> None:
    asked: Any = {"model": "speaker", "max_tokens": 8, "temperature": 0}

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.completions.create(**asked, prompt=prompt) for prompt in LINES))
            chunks = [chunk async for chunk in await client.completions.create(**asked, prompt=TEXT, stream=True)]
            return [*(x.choices[0].text for x in answers), "".join(x.choices[0].text for x in chunks)]

    alone = [api.client.completions.create(**asked, prompt=prompt).choices[0].text for prompt in (*LINES, TEXT)]
    assert asyncio.run(ask_all()) == alone


def test_a_chat_without_a_template_is_refused(api: ServedApi) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        api.client.chat.completions.create(model="speaker", messages=MESSAGES)


@pytest.mark.parametrize("format_", ["float", "base64"])
def test_embeddings(api: ServedApi, models: dict[str, Model], format_: Any) -> None:
    texts = [TEXT, "a dog ran"]
    answer = api.client.embeddings.create(model="encoder", input=texts, encoding_format=format_)
    default = api.client.embeddings.create(model="encoder", input=texts)  # which asks for base64, and reads it
    for number, vector in enumerate(regard.embed(models["encoder"], texts).tolist()):
        assert answer.data[number].index == number
        assert default.data[number].embedding == pytest.approx(vector, abs=1e-5)
        if format_ == "float":
            assert answer.data[number].embedding == pytest.approx(vector, abs=1e-5)


def test_log_probs(api: ServedApi, models: dict[str, Model]) -> None:
    asked: Any = {"model": "speaker", "prompt": TEXT, "max_tokens": 5, "temperature": 0}
    logs = api.client.completions.create(**asked, logprobs=3).choices[0].logprobs
    assert logs is not None
    assert logs.tokens is not None
    assert logs.top_logprobs is not None
    assert logs.token_logprobs is not None
    assert len(logs.tokens) == len(logs.token_logprobs)
    for token, value, top in zip(logs.tokens, logs.token_logprobs, logs.top_logprobs, strict=True):
        assert top[token] == pytest.approx(value, abs=1e-6)  # greedy: the best of all
        assert max(top.values()) == pytest.approx(value, abs=1e-6)
    parts = [chunk.choices[0].logprobs for chunk in api.client.completions.create(**asked, logprobs=3, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [x for part in parts if part is not None for x in getattr(part, name)] == getattr(logs, name)
    wanted = regard.generate(models["speaker"], TEXT, max_new_tokens=5, length_penalty=0.0)
    if wanted.finishes[0] == "length":
        assert sum(logs.token_logprobs) == pytest.approx(wanted.scores[0], abs=1e-4)
    chat = api.client.chat.completions.create(
        model="chatty", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    assert all(len(item.top_logprobs) == 2 for item in chat.choices[0].logprobs.content or ())


def test_log_probs_of_the_prompt(api: ServedApi, models: dict[str, Model]) -> None:
    """As lm-evaluation-harness asks: token ids, a context with a continuation, and one new token that it drops."""
    tokenizer, n_context = models["speaker"].processor.tokenizer, 7  # type: ignore[union-attr]
    prompts = [tokenizer.encode(text, special=False) for text in (TEXT, " ".join(LINES), TEXT * 16)]
    asked: Any = {"model": "speaker", "prompt": prompts, "temperature": 0, "logprobs": 2, "echo": True}
    choices = api.client.completions.create(**asked, max_tokens=1).choices
    alone = api.client.completions.create(**asked, max_tokens=0).choices
    parts: list[list[float | None]] = [[] for _ in prompts]
    for chunk in api.client.completions.create(**asked, max_tokens=1, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
    for ids, choice, same, streamed in zip(prompts, choices, alone, parts, strict=True):
        logs = choice.logprobs
        assert logs is not None and logs.tokens and logs.token_logprobs and logs.top_logprobs and same.logprobs  # noqa: PT018
        assert streamed == logs.token_logprobs
        assert same.logprobs.token_logprobs == logs.token_logprobs[:-1]
        assert same.text == tokenizer.decode(ids)
        assert choice.text.startswith(same.text)
        with torch.no_grad():
            exact = models["speaker"](torch.tensor([ids[:-1]])).log_softmax(-1)[0]
        own = exact.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert logs.token_logprobs[0] is None
        assert logs.token_logprobs[1:-1] == pytest.approx(own, abs=1e-4)
        is_greedy = [
            value == max(top.values())
            for value, top in zip(logs.token_logprobs[n_context:-1], logs.top_logprobs[n_context:-1], strict=True)
        ]
        assert is_greedy == [best == token for best, token in zip(exact.argmax(-1).tolist(), ids[1:], strict=True)][6:]


SCHEMA: Any = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["animal", "age"],
    "additionalProperties": False,
}


def test_a_json_schema(api: ServedApi) -> None:
    format_: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    answer = api.client.chat.completions.create(
        model="chatty", messages=MESSAGES, max_tokens=200, seed=1, response_format=format_
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert found["animal"] in ("cat", "dog")
    assert 0 <= found["age"] <= 99


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    animal: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=99)]


def test_an_argument_of_none_is_the_default(api: ServedApi) -> None:
    """The client sends null for it, also where the default is not null, and for arguments that are not supported."""
    asked: Any = {"max_tokens": 4, "temperature": 0, "n": None, "stream": None, "logprobs": None}
    text: Any = {"model": "speaker", "prompt": TEXT, "echo": None, "suffix": None}
    chat: Any = {"model": "chatty", "messages": MESSAGES, "tools": None, "tool_choice": None}
    assert api.client.completions.create(**text, **asked).choices[0].finish_reason == "length"
    assert api.client.chat.completions.create(**chat, **asked).choices[0].finish_reason == "length"


def test_a_class_to_parse_into(api: ServedApi) -> None:
    answer = api.client.chat.completions.parse(
        model="chatty", messages=MESSAGES, max_tokens=200, seed=2, response_format=Pet
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_a_regular_expression(api: ServedApi) -> None:
    answer = api.client.completions.create(
        model="speaker",
        prompt=TEXT,
        max_tokens=60,
        seed=2,
        extra_body={"response_format": {"type": "regex", "pattern": "(cat|dog) [0-9]{3}"}},
    )
    text = answer.choices[0].text
    assert text[:4] in ("cat ", "dog ")
    assert len(text) == 7


def test_stop_bias_and_best_of(api: ServedApi, models: dict[str, Model]) -> None:
    free = api.client.completions.create(model="speaker", prompt=TEXT, max_tokens=20, temperature=0).choices[0].text
    stop = free[4]
    cut = api.client.completions.create(model="speaker", prompt=TEXT, max_tokens=20, temperature=0, stop=[stop])
    assert cut.choices[0].text == free[: free.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    token = models["speaker"].processor.tokenizer.encode("cat", special=False)[0]  # type: ignore[union-attr]
    answer = api.client.completions.create(
        model="speaker", prompt=TEXT, max_tokens=3, temperature=0, logit_bias={str(token): 100}, logprobs=1
    )
    assert answer.usage is not None
    forced = regard.generate(models["speaker"], TEXT, max_new_tokens=3, logit_bias={token: 100.0})
    assert answer.choices[0].text == forced[0]
    drawn: Any = {"model": "speaker", "prompt": TEXT, "max_tokens": 6, "seed": 3}
    four = api.client.completions.create(**drawn, n=4, logprobs=0).choices
    (best,) = api.client.completions.create(**drawn, n=1, best_of=4).choices
    logs = [choice.logprobs.token_logprobs or [] for choice in four if choice.logprobs is not None]
    means = [sum(map(float, own)) / len(own) for own in logs]  # type: ignore[arg-type]
    assert best.text == four[means.index(max(means))].text


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "not served here"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "x" * 300_000}, openai.BadRequestError, "prompt"),
        ({"prompt": "the cat " * 3000}, openai.BadRequestError, "tokens|characters"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "unknown token"),
        ({"extra_body": {"beams": 4, "temperature": 0.5}}, openai.BadRequestError, "beams"),
        ({"extra_body": {"colour": "red"}}, openai.BadRequestError, "colour"),
        ({"extra_body": {"response_format": {"type": "regex", "pattern": "("}}}, openai.BadRequestError, "format"),
        ({"model": "classifier"}, openai.BadRequestError, "does not generate text"),
    ],
)
def test_errors(api: ServedApi, fields: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        api.client.completions.create(**{"model": "speaker", "prompt": TEXT, "max_tokens": 4, **fields})
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.body is not None


def test_a_client_comes_back_when_it_is_told_to(models: dict[str, Model]) -> None:
    """A full queue is a RateLimitError; a client that may retry waits as long as Retry-After says, and is answered."""
    asked: Any = {"model": "speaker", "prompt": TEXT, "max_tokens": 2, "temperature": 0}
    with serving_api({"speaker": models["speaker"]}, Limits(waiting=1)) as api:
        gate, scheduler = threading.Event(), api.scheduler("speaker")
        scheduler.run(gate.wait)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(api.client.completions.create, **asked)
            while scheduler.statistics.accepted < 1:
                time.sleep(0.005)
            with pytest.raises(openai.RateLimitError, match="already waiting") as refused:
                api.client.completions.create(**asked)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            patient = pool.submit(api.client.with_options(max_retries=3).completions.create, **asked)
            while scheduler.statistics.refused < 2:
                time.sleep(0.005)
            gate.set()
            assert patient.result().choices[0].text == first.result().choices[0].text


def test_a_wrong_key(models: dict[str, Model]) -> None:
    with serving_api({"speaker": models["speaker"]}, api_key="right") as api:
        with pytest.raises(openai.AuthenticationError, match="needs a key"):
            api.client.models.list()
        assert api.client.with_options(api_key="right").models.retrieve("speaker").id == "speaker"


@pytest.mark.parametrize("page", ["docs/serve.md", "docs/ko/serve.md"])
def test_every_row_of_the_page_is_a_test(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text[text.index("test_openai_client.py") :].split("\n\n")[1]
    named = re.findall(r"\| `(test_\w+)` \|$", table, flags=re.MULTILINE)
    calls = {name for name in globals() if name.startswith("test_")} - {test_every_row_of_the_page_is_a_test.__name__}
    assert len(named) == len(set(named)) == len(table.splitlines()) - 2
    assert set(named) == calls
