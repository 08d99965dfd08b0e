"""What the browser sends, checked field by field; a number that is none (NaN, 1e400) is refused like any other."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .request_limits import Limits

_LIMITS = Limits()


def _check_unicode(text: str) -> str:
    """JSON can spell half a character ("\\ud800"); no text file can hold it, and no tokenizer reads it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as wrong:
        raise ValueError(f"character {wrong.start} is half of a surrogate pair") from None
    return text


ModelName = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_check_unicode)]
BodyText = Annotated[str, Field(max_length=_LIMITS.characters), AfterValidator(_check_unicode)]
Index = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SearchRequest(Body):
    """How a text is written: the fields of ``GenerateConfig`` that the page offers."""

    beam: Annotated[int, Field(ge=1, le=16)] = 1
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=_LIMITS.new_tokens)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    def fields(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class ModelChanges(Body):
    """What is changed about the model's attention before it looks."""

    causal: bool = True  # False takes the causal mask away
    scale: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Times the model's own, 1/√D: 0 makes all keys alike, more makes rows sharper."""
    off: Annotated[list[tuple[ModelName, Index, Index]], Field(max_length=4096)] = []
    """Heads switched off, each as (kind, layer, head)."""


class LookRequest(Body):
    model: ModelName
    text: BodyText = ""
    target: BodyText | None = None
    image: Annotated[str, Field(max_length=_LIMITS.body_bytes)] | None = None
    """Base64 of a PNG, JPEG, WebP or GIF file, or such a data: URL."""
    generate: SearchRequest | None = None
    variant: ModelChanges | None = None


class WatchRequest(Body):
    """Whose cross-attention is told while a text is written."""

    layer: Index = 0
    head: Index | None = None  # None: the mean of all heads


class StreamRequest(Body):
    model: ModelName
    text: BodyText = ""
    image: Annotated[str, Field(max_length=_LIMITS.body_bytes)] | None = None
    generate: SearchRequest = SearchRequest()
    watch: WatchRequest | None = None
    variant: ModelChanges | None = None


class ErrorBody(BaseModel):
    """Why there is no answer."""

    error: str
