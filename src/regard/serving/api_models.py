"""One served model: builds requests for its scheduler, and classifies, embeds and looks at attention."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..generation.cached_engine import check_logits
from ..generation.generation_config import GenerateConfig
from ..generation.label_answers import label_answerer
from ..generation.prompts import (
    ModelInputs,
    default_output_length,
    image_pixels,
    max_text_length,
    read_inputs,
    source_tensors,
)
from ..generation.stop_conditions import Decode, decode_after
from ..generation.text_codec import ModelTokenizers, resolve_config
from ..generation.text_embeddings import check_can_embed, encode_to_embed
from ..lens import look
from ..lens.look import Look
from ..web.requests import Limits
from ..web.served_models import ServedModel, attention_sizes, decode_image, task_name
from ..web.sessions import WorkerPools
from .grammars import Grammars
from .request_bodies import AttentionOptions, OpenAIBody, SearchBody
from .running_text import TextEvent, TextRequest
from .scheduler import Scheduler

Result = TypeVar("Result")
_MAX_WEIGHTS = 250_000  # attention weights in one response


class ApiModel:
    """A served model with its scheduler, and the threads that look at its attention."""

    def __init__(self, served: ServedModel, limits: Limits, scheduler: Scheduler | None = None) -> None:
        self.served, self.id, self.model, self.limits = served, served.id, served.model, limits
        self.config, self.created = served.model.config, int(time.time())
        self.can_write = served.can_generate
        self.codec = ModelTokenizers(served.model)
        self.scheduler = scheduler or Scheduler(served.model, max_waiting=limits.waiting)
        self._lookers = WorkerPools(limits, readers=1)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and not self._lookers.is_busy

    def close(self) -> None:
        """Refuse new requests, and fail those that wait or run."""
        self.scheduler.close()
        self._lookers.close()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work between two decode steps. Running texts wait for it, so callers pass only a few inputs at a time."""
        return await asyncio.wrap_future(self.scheduler.run(work))

    @property
    def task(self) -> str:
        return task_name(self.config)

    def card(self) -> dict[str, Any]:
        """The model's entry in OpenAI's list of models, extended by its task and context length."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "regard",
            "task": self.task,
            "max_len": self.config.max_len,
        }

    # ------------------------------------------------------------------ texts

    def search_config(self, fields: dict[str, Any]) -> tuple[GenerateConfig, Any]:
        """The config and the stop strings for keyword arguments of ``generate``."""
        return resolve_config(self.model, None, fields, self.codec)

    def new_request(
        self,
        inputs: ModelInputs,
        fields: dict[str, Any],
        deliver: Callable[[TextEvent], None],
        reading: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> TextRequest:
        """The request for one input: ``reading`` are options of ``PromptReading``, ``options`` of ``TextRequest``."""
        config, strings = self.search_config(fields)
        prompt = self.scheduler.new_reading(inputs, config, **(reading or {}))
        return TextRequest(prompt, config, deliver, strings, **options)

    def read_texts(self, inputs: Any, fields: dict[str, Any]) -> list[ModelInputs]:
        """Encode and check texts, token ids or messages; returns one item per input."""
        config, _ = self.search_config(fields)
        self.check_length(inputs)
        checked = read_inputs(self.model, self.codec.encode_inputs(inputs), config)
        return [checked.select([index]) for index in range(len(checked.rows))]

    def read_images(self, images: Sequence[str], fields: dict[str, Any]) -> list[ModelInputs]:
        config, _ = self.search_config(fields)
        pixels = [image_pixels(self.model, decode_image(image, self.limits)) for image in images]
        return [read_inputs(self.model, each, config) for each in pixels]

    def check_length(self, inputs: list[Any]) -> None:
        """Refuse texts and chats that cannot fit into the context, before spending time on tokenising them."""
        most = min(self.limits.characters, max(self.config.max_len, 16) * self.limits.characters_per_token)
        chat = sum(len(message["content"]) for message in inputs if isinstance(message, dict))
        for n in (chat, *(len(text) for text in inputs if isinstance(text, str))):
            if n > most:
                raise ValueError(f"a text has {n:,} characters; model {self.id!r} reads at most {most:,}")

    def search_fields(self, body: SearchBody, default_tokens: int | None = None) -> dict[str, Any]:
        """The fields of a ``GenerateConfig``; as with OpenAI, the default is to sample at temperature 1."""
        target = not self.model.is_decoder_only
        longest = max_text_length(self.config, target)
        fields: dict[str, Any] = {"max_new_tokens": min(body.max_tokens or default_tokens or longest, longest)}
        names = ("repetition_penalty", "length_penalty", "stop")
        fields |= {name: getattr(body, name) for name in names if getattr(body, name) is not None}
        if body.logit_bias:
            fields["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        filters = {name: getattr(body, name) for name in ("top_p", "top_k", "min_p")}
        filters = {name: value for name, value in filters.items() if value is not None}
        if body.beams is not None and body.beams > 1:
            if filters or body.temperature:
                raise ValueError("beams cannot be combined with temperature, top_p, top_k or min_p")
            return fields | {"beam": body.beams, "n_best": min(body.n, body.beams)}
        if body.temperature == 0:
            return fields
        seed = {} if body.seed is None else {"seed": body.seed % 2**63}
        temperature = 1.0 if body.temperature is None else max(body.temperature, 1e-6)
        return fields | filters | seed | {"temperature": temperature, "n_best": body.n}

    def default_limit(self, inputs: ModelInputs) -> int:
        """The default ``max_tokens`` of a translation or caption."""
        if inputs.sources is None or self.config.source != "text":
            return max_text_length(self.config, target=True) - 1
        return default_output_length(self.config, len(inputs.sources[0]))

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.codec)

    def constraint_options(self, body: OpenAIBody) -> dict[str, Any]:
        if body.response_format is None or body.response_format.type == "text":
            return {}
        if body.beams is not None and body.beams > 1:
            raise ValueError("response_format cannot be combined with beams")
        return {"new_constraint": self.grammars.new_constraint(body.response_format)}

    def decode_for(self, inputs: ModelInputs) -> Decode:
        """The function from new token ids to text; a language model's text continues its prompt."""
        return decode_after(self.codec.decode, inputs.rows[0]) if self.model.is_decoder_only else self.codec.decode

    # ------------------------------------------------------------------ attention

    def check_attention(self, options: AttentionOptions | None) -> None:
        """Refuse layers and heads that the model does not have, before any token is generated."""
        if options is None:
            return
        sizes = attention_sizes(self.model)
        kind = _kind(options, tuple(sizes))
        for name in ("layers", "heads"):
            _pick(name, sizes[kind][name], options)

    async def attention(self, start_look: Callable[[], Look], options: AttentionOptions) -> dict[str, Any]:
        """The requested weights of the look that ``start_look`` returns.

        On a CPU it has a thread of its own. Decoding leaves a core idle much of the time, so a look beside it delays
        running texts by a third of its duration; between two steps it would delay them by all of it. On other devices
        it runs between two steps, because nothing else may use the device while a CUDA graph is captured.
        """
        run = self._lookers.run if self.model.device.type == "cpu" else self.run
        seen = await run(start_look)
        return await self._lookers.read(partial(attention_document, seen, options))

    def look_at_text(self, inputs: ModelInputs, content: list[int]) -> Look:
        """A look at a finished text; this runs the model once more."""
        if inputs.sources is None:
            return look(self.model, [*inputs.rows[0], *content])
        source = inputs.sources[0]
        source_input: Any = source.tolist() if self.config.source == "text" else source[None]
        prefix = [token for token in inputs.rows[0] if token != self.config.bos_id]
        return look(self.model, source_input, [*prefix, *content] or [self.config.bos_id])

    # ------------------------------------------------------------------ whole inputs

    def answerer(self, threshold: float | None, has_pairs: bool) -> Callable[[Any], list[dict[str, Any]]]:
        """What answers a list of inputs of a classifier or tagger, each with a document."""
        answer = label_answerer(self.model, threshold=threshold, has_pairs=has_pairs).answer
        return lambda inputs: [
            {"probabilities" if name == "all" else name: value for name, value in one.items()} for one in answer(inputs)
        ]

    def read_to_embed(self, inputs: Any) -> list[Tensor]:
        """The token ids of each text, encoded as ``regard.embed`` does."""
        check_can_embed(self.model)
        texts = all(isinstance(item, str) for item in inputs)
        rows = encode_to_embed(self.model, inputs)[0] if texts else self.codec.encode_inputs(inputs, "input")
        return source_tensors(rows, None, self.config, truncate=False)

    def embed(self, source: Tensor) -> Tensor:
        """Embed the token ids (T,) of one text; returns (M,)."""
        return check_logits(self.model.embed(source[None].to(self.model.device))[0].cpu(), "vectors")


@torch.inference_mode()
def attention_document(seen: Look, options: AttentionOptions) -> dict[str, Any]:
    """The requested weights as [layer][head][row][column], with the tokens of rows and columns."""
    kind = _kind(options, seen.kinds)
    n_rows, n_cols = len(seen.rows(kind=kind)), len(seen.cols(kind=kind))
    pick = partial(_pick, options=options)
    layers, heads = pick("layers", seen.layers(kind=kind)), pick("heads", seen.heads(kind=kind))
    rows = pick("tokens", n_rows)
    if (n := len(layers) * len(heads) * len(rows) * n_cols) > _MAX_WEIGHTS:
        raise ValueError(f"attention would be {n:,} weights; at most {_MAX_WEIGHTS:,} are sent: name layers or tokens")
    weights = [seen.map(layer=layer, kind=kind).tile(rows)[0, heads].tolist() for layer in layers]
    row_labels, col_labels = seen.rows(kind=kind), seen.cols(kind=kind)
    return {
        "kind": kind,
        "layers": layers,
        "heads": heads,
        "tokens": rows,
        "rows": [row_labels[row].text for row in rows],
        "columns": [label.text for label in col_labels],
        "weights": weights,
    }


def _kind(options: AttentionOptions, kinds: Sequence[str]) -> str:
    """The requested kind of attention; by default "self", or the model's first kind if it has no self-attention."""
    if not kinds:
        raise ValueError("this model has no attention weights in any of its layers")
    default = "self" if "self" in kinds else kinds[0]
    kind = default if options.kind is None else options.kind
    if kind not in kinds:
        raise ValueError(f"attention.kind={kind[:40]!r} is not one of {', '.join(kinds)}")
    return kind


def _pick(name: str, total: int, options: AttentionOptions) -> list[int]:
    """The requested layers, heads or tokens as non-negative indices; by default all of them."""
    indices = getattr(options, name)
    if indices is None:
        return list(range(total))
    for index in indices:
        if not -total <= index < total:
            raise ValueError(f"attention.{name} holds {index}; there are {total}: 0 to {total - 1}")
    return [index % total for index in indices]
