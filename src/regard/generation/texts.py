"""Text in, text out: ``generate`` and ``translate``, for one text or for many at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor

from ..models import Model
from .batches import at_once
from .config import GenerateConfig
from .ending import Finish
from .generate import Generated, Hypothesis, config_of
from .generate import generate as generate_tokens
from .pieces import after, text_pieces
from .prompts import Rows, fitting_prompts, longest
from .speculative import Drafted
from .start import read
from .stop import StopStrings, first_end
from .words import Words, has_text

_ROOM_STEP = 32


@dataclass(frozen=True)
class Text:
    """One text: what is new in it, without what ends it."""

    text: str
    score: float
    """log P / penalty(length), as in ``Hypothesis``."""
    finish: Finish
    """The model's end token, a stop, or no room."""
    tokens: list[int]
    """What was generated, a stop string's tokens included, the end token not."""


class Texts(list[str]):
    """The best text of each prompt, a list of strings that knows more. Printed, it is the text."""

    def __init__(self, n_best: Sequence[list[Text]], drafted: Drafted | None = None) -> None:
        super().__init__(texts[0].text for texts in n_best)
        self.n_best = list(n_best)
        """For each prompt its texts, best first."""
        self.drafted = drafted
        """What a draft model was worth, where one helped."""

    @property
    def best(self) -> list[Text]:
        return [texts[0] for texts in self.n_best]

    @property
    def scores(self) -> list[float]:
        return [text.score for text in self.best]

    @property
    def tokens(self) -> list[list[int]]:
        return [text.tokens for text in self.best]

    @property
    def finishes(self) -> list[Finish]:
        return [text.finish for text in self.best]

    def __str__(self) -> str:
        return "\n".join(self)


@overload
def generate(model: Model, inputs: str | list[str], config: GenerateConfig | None = None, **fields: Any) -> Texts: ...
@overload
def generate(model: Model, inputs: Rows, config: GenerateConfig | None = None, **fields: Any) -> Generated: ...
def generate(
    model: Model,
    inputs: str | Rows,
    config: GenerateConfig | None = None,
    *,
    target: str | Rows | None = None,
    keep: Tensor | None = None,
    draft: Model | None = None,
    draft_tokens: int = 4,
    **fields: Any,
) -> Texts | Generated:
    """What follows a prompt, or what a model with an encoder writes about a source; for one or for several.

    inputs  text or token ids, or a list of either: text gives ``Texts``, token ids alone give ``Generated``; pixels
            (B, C, height, width) or regions (B, R, d_region) where the encoder reads those
    target  beside an encoder: how the texts begin
    keep    (B, T), which ids of a padded tensor are real
    draft   a small model of the same tokens that guesses draft_tokens at a time: the same texts, sooner (greedy alone)
    fields  those of GenerateConfig, instead of a config or on top of it; here ``stop`` may be a string or a list of
            them, ``prefix`` a string, and ``logit_bias`` may name tokens as they are written
    Many texts are cut into batches of similar length. No text depends on those beside it.
    """
    if draft is not None:
        _check_same_tokens(model, draft)
    helped: dict[str, Any] = {"draft": draft, "draft_tokens": draft_tokens}
    if not is_text(inputs):
        config, strings = understood(model, config, fields)
        target = Words(model).beginning(target) if isinstance(target, str) else target
        return generate_tokens(model, inputs, config, target=target, keep=keep, strings=strings, **helped)
    if keep is not None:
        raise ValueError("keep goes with token ids as a tensor; texts are as long as they are")
    words = text_reader(model)
    config, strings = understood(model, config, fields, words)
    rows = words.rows([inputs] if isinstance(inputs, str) else list(inputs), "prompt" if words.goes_on else "source")
    if target is not None:
        helped["target"] = words.beginning(target) if isinstance(target, str) else target
        if not isinstance(target, str):  # one beginning for each text: together, as they were given
            made = generate_tokens(model, rows, config, strings=strings, **helped)
            return Texts(told(made, words, strings), made.drafted)
    return _in_batches(model, words, rows, config, strings, [config.max_new_tokens] * len(rows), helped)


def translate(
    model: Model,
    texts: str | Sequence[str],
    config: GenerateConfig | None = None,
    *,
    beam: int | None = None,
    max_new_tokens: int | None = None,
    **fields: Any,
) -> Texts:
    """The translation of one text or of several, by beam search; beam 4 unless it or a config is given.

    Without max_new_tokens a translation has room for about twice its source. Fields as in ``generate``.
    """
    check_translates(model)
    words = text_reader(model)
    chosen = {"beam": beam, "max_new_tokens": max_new_tokens}
    fields |= {name: value for name, value in chosen.items() if value is not None}
    free = max_new_tokens is None and (config is None or "max_new_tokens" not in config.model_fields_set)
    helped: dict[str, Any] = {name: fields.pop(name) for name in ("target", "draft", "draft_tokens") if name in fields}
    if config is None and helped.get("draft") is None:
        fields = {"beam": usual_beam(fields), **fields}
    if helped.get("draft") is not None:
        _check_same_tokens(model, helped["draft"])
    config, strings = understood(model, config, fields, words)
    rows = words.rows([texts] if isinstance(texts, str) else texts, "source")
    limits = [_room(model, len(row)) if free else config.max_new_tokens for row in rows]
    if isinstance(helped.get("target"), str):
        helped["target"] = words.beginning(helped["target"])
    return _in_batches(model, words, rows, config, strings, limits, helped)


def usual_beam(fields: Mapping[str, Any]) -> int:
    """The paper's 4, unless tokens are to be drawn."""
    drawing = ("sample", "temperature", "top_k", "top_p", "min_p")
    return 1 if any(fields.get(name) is not None for name in drawing) else 4


def check_translates(model: Model) -> None:
    """Raise unless the model reads text with an encoder and writes text."""
    config = model.config
    if config.architecture not in ("encoder-decoder", "recurrent") or config.source != "text" or config.head != "lm":
        what = f"architecture={config.architecture!r}, source={config.source!r} and head={config.head!r}"
        raise ValueError(f"this model has {what}: it does not translate")


def check_texts(model: Model, texts: Sequence[str], truncate: bool = False) -> None:
    """Raise where one of many texts is too long or empty, before the first of them is written."""
    words, config = text_reader(model), GenerateConfig(truncate=truncate)
    _check_rows(model, words.rows(texts, "prompt" if words.goes_on else "source"), config)


def is_text(inputs: Any) -> bool:
    return isinstance(inputs, str) or (isinstance(inputs, list | tuple) and any(isinstance(x, str) for x in inputs))


def text_reader(model: Model) -> Words:
    """The model's words, where it reads words."""
    if model.config.source != "text":
        raise ValueError(f"this model reads source={model.config.source!r}, not text: regard.caption describes images")
    if model.config.architecture == "encoder":
        raise TypeError("a model with architecture='encoder' writes no text")
    return Words(model)


def understood(
    model: Model, config: GenerateConfig | None, fields: Mapping[str, Any], words: Words | None = None
) -> tuple[GenerateConfig, StopStrings | None]:
    """A config of tokens alone, and the stop strings."""
    if not has_text(fields):
        return config_of(config, dict(fields)), None
    words = words or Words(model)
    made, strings = words.fields(fields)
    config = config_of(config, made)
    return config, StopStrings(strings, words.decode, first_end(config)) if strings else None


def told(made: Generated, words: Words, strings: StopStrings | None) -> list[list[Text]]:
    """Tokens as text, each after its prompt."""
    return [
        [_text(hypothesis, prompt, words, strings) for hypothesis in hypotheses]
        for prompt, hypotheses in zip(made.prompts, made.hypotheses, strict=True)
    ]


def _text(made: Hypothesis, prompt: list[int], words: Words, strings: StopStrings | None) -> Text:
    decode = after(words.decode, prompt)
    stop, n_least = ((), 0) if strings is None else (strings.strings, strings.n_least)
    text = "".join(text_pieces(made.content, decode, stop, n_least)) if stop else decode(made.content)
    return Text(text, made.score, made.finish, made.content)


def _in_batches(
    model: Model,
    words: Words,
    rows: list[list[int]],
    config: GenerateConfig,
    strings: StopStrings | None,
    limits: list[int],
    helped: dict[str, Any],
) -> Texts:
    """The texts of many rows, in their order."""
    _check_rows(model, rows, config)
    found: list[list[Text]] = [[] for _ in rows]
    drafted = None
    for group in at_once(model, config, [len(row) for row in rows], limits):
        limited = config if limits[group[0]] == config.max_new_tokens else config.with_(max_new_tokens=limits[group[0]])
        made = generate_tokens(model, [rows[index] for index in group], limited, strings=strings, **helped)
        for index, texts in zip(group, told(made, words, strings), strict=True):
            found[index] = texts
        if made.drafted is not None:
            drafted = made.drafted if drafted is None else drafted + made.drafted
    return Texts(found, drafted)


def _check_rows(model: Model, rows: list[list[int]], config: GenerateConfig) -> None:
    """All of them, before the first batch: an error names a text by its place among all."""
    given = read(model, rows, config) if rows else None
    if given is not None and given.sources is None:
        fitting_prompts(given.rows, model.config, config, "prompt")


def _room(model: Model, n_source: int) -> int:
    """New tokens for a source of so many: a step function, so that sources of similar length share a batch."""
    room = -(-(2 * n_source + 20) // _ROOM_STEP) * _ROOM_STEP
    return min(room, longest(model.config, target=True) - 1)


def _check_same_tokens(model: Model, draft: Model) -> None:
    ours, theirs = (getattr(_tokenizer(each), "content", None) for each in (model, draft))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError("the draft has another tokenizer than the model: it would guess other words")


def _tokenizer(model: Model) -> Any:
    return None if model.processor is None else model.processor.target or model.processor.source
