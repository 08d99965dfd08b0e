"""The routes of ``/v1``: completions, chat completions, embeddings and models as in OpenAI's API, and our own."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from torch import Tensor

from ..foundation.jsonio import to_jsonable
from ..generation.prompts import ModelInputs
from ..lens import look
from ..web.requests import Limits
from ..web.served_models import decode_image
from .api_errors import ApiError, error_document
from .api_models import ApiModel
from .choices import TextChoice, Writing
from .openai_documents import ChatDocument, CompletionDocument, OpenAIDocument
from .request_bodies import (
    ApiErrorBody,
    CaptionBody,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    EmbeddingBody,
    OpenAIBody,
    SearchBody,
    TranslateBody,
)

_DEFAULT_TOKENS = 16  # OpenAI's default max_tokens of a completion
_DEFAULT_BEAMS = 4  # for translations and captions, as in Vaswani et al. 2017
_SHORT_INPUTS, _SHORT_CHARACTERS = 8, 2000  # of a request that is read in the event loop
_CLASSIFY_BATCH = 8  # inputs classified between two decode steps, during which all running texts wait
_DONE = b"data: [DONE]\n\n"  # the last event of a stream
_LOG = logging.getLogger("uvicorn.error")  # where other internal errors are logged


@dataclass(eq=False)
class ServingState:
    """The models of one server by name."""

    models: dict[str, ApiModel]
    limits: Limits = field(default_factory=Limits)

    def find(self, name: str) -> ApiModel:
        if name not in self.models:
            message = f"model {name[:100]!r} is not served here; available: {', '.join(self.models)}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.models[name]


async def _state(request: Request) -> ServingState:  # async: FastAPI runs other functions in a thread
    state: ServingState = request.app.state.serving
    return state


State = Annotated[ServingState, Depends(_state)]
router = APIRouter(prefix="/v1", responses={"4XX": {"model": ApiErrorBody}, "5XX": {"model": ApiErrorBody}})


@router.get("/models")
async def models(state: State) -> dict[str, Any]:
    """List the served models."""
    return {"object": "list", "data": [model.card() for model in state.models.values()]}


@router.get("/models/{name}")
async def model_card(state: State, name: Annotated[str, Path(max_length=300)]) -> dict[str, Any]:
    return state.find(name).card()


@router.post("/completions")
async def completions(state: State, body: CompletionBody) -> Response:
    """Continue a prompt, or generate from it with an encoder-decoder model."""
    model = _writer(state, body.model)
    best_of = body.best_of or body.n
    if best_of < body.n:
        raise ApiError(400, f"best_of={best_of} must be at least n={body.n}", "best_of")
    if best_of > body.n and (body.stream or body.beams):
        raise ApiError(400, "best_of > n cannot be combined with stream or beams", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 needs echo: true, as there would be nothing to return", "max_tokens")
    if body.echo and body.logprobs is not None and not model.model.is_decoder_only:
        message = f"model {model.id!r} has an encoder, whose prompt has no log P: echo cannot be combined with logprobs"
        raise ApiError(400, message, "echo")
    n_top = body.logprobs if body.logprobs is not None else (0 if best_of > body.n else None)
    prompts = _as_list(body.prompt)
    build = partial(_new_writing, model, body, prompts, _DEFAULT_TOKENS, n_top, best_of)
    writing = await _build(build, prompts, body)
    return await _respond_as_openai(CompletionDocument(body, writing), best_of)


@router.post("/chat/completions")
async def chat_completions(state: State, body: ChatBody) -> Response:
    """Answer messages, which the model's own chat template writes as a prompt."""
    model = _writer(state, body.model)
    processor = model.model.processor
    if processor is None or processor.chat_template is None:
        hint = "use /v1/completions, or serve a directory with a chat_template.jinja"
        raise ApiError(400, f"model {model.id!r} has no chat template: {hint}", "model", "no_chat_template")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    n_top = (body.top_logprobs or 0) if body.logprobs else None
    body = body.model_copy(update={"max_tokens": body.max_completion_tokens or body.max_tokens})
    messages = [message.to_dict() for message in body.messages]
    build = partial(_new_writing, model, body, messages, None, n_top, body.n)
    writing = await _build(build, messages, body)
    return await _respond_as_openai(ChatDocument(body, writing), body.n)


@router.post("/translate")
async def translate(state: State, body: TranslateBody) -> Response:
    """Translate texts, by default with beam search."""
    model = _writer(state, body.model)
    if model.task != "translate":
        raise ApiError(400, f"model {model.id!r} does not translate: its task is {model.task}", "model")
    texts = _as_list(body.text)
    return await _respond_to_search(model, body, texts, partial(_read_sources, model, body, texts), "translation")


@router.post("/caption")
async def caption(state: State, body: CaptionBody) -> Response:
    """Caption images, by default with beam search."""
    model = _writer(state, body.model)
    if model.task != "caption":
        raise ApiError(400, f"model {model.id!r} does not caption images: its task is {model.task}", "model")
    images = _as_list(body.image)
    return await _respond_to_search(model, body, images, partial(model.read_images, images), "caption")


@router.post("/classify")
async def classify(state: State, body: ClassifyBody) -> Response:
    """Classify texts, pairs of texts or images: the classes, labels, number or tags of each, as ``regard classify``."""
    model = state.find(body.model)
    if model.config.head not in ("classify", "tag"):
        raise ApiError(400, f"model {model.id!r} does not classify: its task is {model.task}", "model")
    reads_images = model.config.source == "image"
    name, value, other = ("image", body.image, body.text) if reads_images else ("text", body.text, body.image)
    if value is None or other is not None:
        raise ApiError(400, f"model {model.id!r} reads {name}: give {name} and nothing else", name)
    model.check_attention(body.attention)
    answer, inputs = model.answerer(body.threshold, has_pairs=body.second is not None), _as_list(value)
    if body.second is not None:
        inputs = _text_pairs(inputs, _as_list(body.second), body)
    if reads_images:
        inputs = await asyncio.to_thread(lambda: [decode_image(item, state.limits) for item in inputs])
    else:
        model.check_length(inputs)
    results = []
    for start in range(0, len(inputs), _CLASSIFY_BATCH):
        results += await model.run(partial(answer, inputs[start : start + _CLASSIFY_BATCH]))
    if body.attention is not None:
        for item, result in zip(inputs, results, strict=True):
            result["attention"] = await model.attention(partial(look, model.model, item), body.attention)
    document = {"object": "classification", "model": model.id, "results": results}
    return await _respond(document, is_large=body.attention is not None)


def _text_pairs(first: list[str], second: list[str], body: ClassifyBody) -> list[str]:
    """Each text with the second of its pair, separated by a tab."""
    if len(first) != len(second):
        raise ApiError(400, f"there are {len(first)} texts and {len(second)} second texts", "second")
    if body.attention is not None:
        raise ApiError(400, "the attention of a pair of texts is not available", "attention")
    return ["\t".join(text.replace("\t", " ") for text in pair) for pair in zip(first, second, strict=True)]


@router.post("/embeddings")
async def embeddings(state: State, body: EmbeddingBody) -> Response:
    """Embed texts: one vector each, equal to ``regard.embed``'s."""
    model = state.find(body.model)
    sources = await asyncio.to_thread(model.read_to_embed, _as_list(body.input))
    # One text at a time: its vector does not depend on its neighbours, and running texts decode in between.
    vectors = [await model.run(partial(model.embed, source)) for source in sources]

    def encode_vector(vector: Tensor) -> Any:
        row = vector.numpy().astype("<f4")
        return base64.b64encode(row.tobytes()).decode() if body.encoding_format == "base64" else row.tolist()

    data = [{"object": "embedding", "index": i, "embedding": encode_vector(x)} for i, x in enumerate(vectors)]
    n_tokens = sum(map(len, sources))
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return await _respond({"object": "list", "model": model.id, "data": data, "usage": usage}, is_large=True)


# ---------------------------------------------------------------------- parts of the routes


def _writer(state: ServingState, name: str) -> ApiModel:
    model = state.find(name)
    if not model.can_write:
        raise ApiError(400, f"model {model.id!r} does not generate text: its task is {model.task}", "model")
    model.scheduler.check_room()  # refuse before spending time on the inputs
    return model


def _as_list(inputs: Any) -> list[Any]:
    """Several inputs as they are, and one (a string, or the token ids of one text) as a list of one."""
    return [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs


async def _build(build: Callable[[], Writing], inputs: list[Any], body: SearchBody) -> Writing:
    """Build the requests of ``inputs``: texts, token ids, messages or images.

    Few short texts are read here, since handing them to a thread takes longer than reading them. Other inputs, images
    (some hundred bytes may hold millions of pixels) and grammars are read in a thread, so that no stream waits.
    """
    n_characters = sum(len(item["content"] if isinstance(item, dict) else item) for item in inputs)
    is_short = len(inputs) <= _SHORT_INPUTS and n_characters <= _SHORT_CHARACTERS
    takes_long = isinstance(body, CaptionBody) or getattr(body, "response_format", None) is not None
    return build() if is_short and not takes_long else await asyncio.to_thread(build)


def _new_writing(
    model: ApiModel, body: OpenAIBody, inputs: Any, default_tokens: int | None, n_top: int | None, n_choices: int
) -> Writing:
    """Build the requests of a completion or chat, one per input."""
    if model.config.source != "text":
        raise ApiError(400, f"model {model.id!r} reads images: use /v1/caption", "model")
    model.check_attention(body.attention)
    fields = model.search_fields(body.model_copy(update={"n": n_choices}), default_tokens)
    if n_top is not None and body.beams is not None and body.beams > 1:
        raise ApiError(400, "logprobs cannot be combined with beams", "logprobs")
    lists_prompt = isinstance(body, CompletionBody) and body.echo and body.logprobs is not None
    reading = {"n_top": n_top if lists_prompt else None, "writes": body.max_tokens != 0}
    options = {"n_top": n_top, "priority": body.priority, "reading": reading, **model.constraint_options(body)}
    writing = Writing(model)
    for item in model.read_texts(inputs, fields):
        writing.add(item, fields, n_choices, **options)
    return writing


def _new_search(model: ApiModel, body: SearchBody, read: Callable[[dict[str, Any]], list[ModelInputs]]) -> Writing:
    """Build the requests of translations or captions: beam search unless sampling or greedy decoding is requested."""
    samples = any(getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p"))
    is_greedy = body.temperature == 0 and body.beams is None
    if not samples and not is_greedy:
        body = body.model_copy(update={"beams": max(body.beams or _DEFAULT_BEAMS, body.n), "temperature": None})
        body = body.model_copy(update={"temperature": 0} if body.beams == 1 else {})
    model.check_attention(body.attention)
    fields = model.search_fields(body)
    writing = Writing(model)
    for item in read(fields):
        limit = {} if body.max_tokens is not None else {"max_new_tokens": model.default_limit(item)}
        writing.add(item, fields | limit, body.n, priority=body.priority)
    return writing


def _read_sources(model: ApiModel, body: TranslateBody, texts: list[str], fields: dict[str, Any]) -> list[ModelInputs]:
    codec = model.codec
    model.check_length(texts)
    if body.target_language is not None:
        fields["prefix"] = (codec.language_id(body.target_language),)
    if body.source_language is None:
        return model.read_texts(texts, fields)
    language = codec.language_id(body.source_language)
    rows = [codec.with_language(row, language) for row in codec.encode_inputs(texts, "source")]
    return model.read_texts(rows, fields)


def _best_of(choices: list[TextChoice], best_of: int, n: int) -> list[TextChoice]:
    """Keep the n choices of each prompt with the highest mean log P."""
    kept: list[TextChoice] = []
    for start in range(0, len(choices), best_of):
        group = sorted(choices[start : start + best_of], key=lambda choice: -choice.mean_log_prob)
        kept += group[:n]
    for index, choice in enumerate(kept):
        choice.index = index
    return kept


async def _add_attention(
    model: ApiModel, choices: list[TextChoice], body: SearchBody, extras: dict[int, dict[str, Any]]
) -> None:
    """Add the requested attention weights of each finished text to ``extras``."""
    if body.attention is None:
        return
    for choice in choices:
        start_look = partial(model.look_at_text, choice.reading.inputs, choice.tokens)
        extras[choice.index] = {"attention": await model.attention(start_look, body.attention)}


async def _respond_to_search(
    model: ApiModel,
    body: SearchBody,
    inputs: list[str],
    read: Callable[[dict[str, Any]], list[ModelInputs]],
    kind: str,
) -> Response:
    """The response to translations and captions: the best text of each input, with alternatives if n > 1."""
    writing = await _build(partial(_new_search, model, body, read), inputs, body)
    choices = await writing.finish()
    extras: dict[int, dict[str, Any]] = {}
    await _add_attention(model, choices, body, extras)

    def entry(choice: TextChoice) -> dict[str, Any]:
        score = {} if choice.score is None else {"score": choice.score}
        return {"text": choice.text, "finish_reason": choice.finish_reason, **score, **extras.get(choice.index, {})}

    results = []
    for start in range(0, len(choices), body.n):
        best, *rest = choices[start : start + body.n]
        alternatives = {"alternatives": [entry(choice) for choice in rest]} if body.n > 1 else {}
        results.append(entry(best) | alternatives)
    document = {"object": kind, "model": model.id, f"{kind}s": results, "usage": writing.usage}
    return await _respond(document, is_large=body.attention is not None)


async def _respond(content: Any, is_large: bool) -> Response:
    """The JSON response. A large one is serialised in a thread: 250,000 weights would block the event loop, and with
    it every stream, for a tenth of a second."""

    def serialise() -> Response:
        return JSONResponse(to_jsonable(content), headers={"Cache-Control": "no-store"})

    return await asyncio.to_thread(serialise) if is_large else serialise()


async def _respond_as_openai(document: OpenAIDocument, best_of: int) -> Response:
    """The response to a completion or chat, whole or as a stream; of ``best_of`` texts per prompt the best are kept."""
    body, writing = document.body, document.writing
    if body.stream:
        return await _stream(document)
    choices = await writing.finish()
    if best_of > body.n:
        choices = _best_of(choices, best_of, body.n)
    await _add_attention(writing.model, choices, body, document.extras)
    is_large = body.attention is not None or document.lists_prompt
    whole = await asyncio.to_thread(document.whole, choices) if is_large else document.whole(choices)
    return await _respond(whole, is_large)


async def _stream(document: OpenAIDocument) -> Response:
    """Server-sent events: a chunk for each piece of text, then [DONE].

    The first event is awaited before the response starts, so that a full queue is still reported by a status.
    """
    following = document.writing.follow()
    first: list[tuple[TextChoice, str]] = await anext(following, [])
    events = _chunks(first, following, document)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return _EventStream(events, media_type="text/event-stream", headers=headers)


class _EventStream(StreamingResponse):  # type: ignore[misc]  # untyped without FastAPI
    """A stream without a task of its own that waits for the client to leave: ``RequestGuard`` cancels the request.

    The chunk that ends with ``_DONE`` is known to be the last: what a stream sends at its end is a single write.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self.body_iterator:
            await send({"type": "http.response.body", "body": chunk, "more_body": not chunk.endswith(_DONE)})


async def _chunks(
    changes: list[tuple[TextChoice, str]],
    following: AsyncIterator[list[tuple[TextChoice, str]]],
    document: OpenAIDocument,
) -> AsyncIterator[bytes]:
    """The events of a stream; those that are ready at the same time are one chunk."""
    body, writing = document.body, document.writing

    def write(changes: list[tuple[TextChoice, str]]) -> list[bytes]:
        return [_event(new) for change in changes if (new := document.piece(*change))]

    events = [_event(chunk) for chunk in document.beginning()]
    async with aclosing(following):  # type: ignore[type-var]  # an async generator
        try:
            while changes:
                events += await asyncio.to_thread(write, changes) if document.lists_prompt else write(changes)
                if events and (writing.n_unfinished or body.attention is not None):  # the next ones take time
                    yield b"".join(events)
                    events = []
                changes = await anext(following, [])
            if body.attention is not None:
                await _add_attention(writing.model, writing.choices, body, document.extras)
                events += [_event(document.attention_chunk(choice)) for choice in writing.choices]
            if body.stream_options is not None and body.stream_options.include_usage:
                events.append(_event(document.frame() | {"choices": [], "usage": writing.usage}))
        except Exception as failure:  # the status has been sent: report the error as an event
            status, content, _ = error_document(failure)
            if status == 500:
                _LOG.exception("a stream ended with an error")
            events.append(_event(content))
        yield b"".join([*events, _DONE])


def _event(content: Any) -> bytes:
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # infinite log probabilities, say
        text = json.dumps(to_jsonable(content), ensure_ascii=False)
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"
