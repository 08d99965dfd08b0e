"""Request bodies as pydantic models; NaN and infinite numbers are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .request_limits import Limits

_LIMITS = Limits()


def _check_unicode(text: str) -> str:
    """Refuse half a surrogate pair: JSON can spell it ("\\ud800"), but UTF-8 and tokenizers cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as wrong:
        raise ValueError(f"character {wrong.start} is half of a surrogate pair") from None
    return text


ModelName = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_check_unicode)]
BodyText = Annotated[str, Field(max_length=_LIMITS.characters), AfterValidator(_check_unicode)]
BodyImage = Annotated[str, Field(max_length=_LIMITS.body_bytes)]  # base64 of an image file, or such a data: URL
Index = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SearchRequest(Body):
    """The fields of ``GenerateConfig`` that the page offers."""

    beam: Annotated[int, Field(ge=1, le=16)] = 1
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=_LIMITS.new_tokens)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    def fields(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class ModelChanges(Body):
    """Interventions on the model's attention."""

    causal: bool = True  # False removes the causal mask
    scale: Annotated[float, Field(ge=0, le=1000)] = 1.0  # a factor on the scores
    off: Annotated[list[tuple[ModelName, Index, Index]], Field(max_length=4096)] = []  # (kind, layer, head), ablated


class LookRequest(Body):
    model: ModelName
    text: BodyText = ""
    target: BodyText | None = None
    image: BodyImage | None = None
    generate: SearchRequest | None = None
    variant: ModelChanges | None = None


class WatchRequest(Body):
    """The cross-attention that is sent while a text is generated."""

    layer: Index = 0
    head: Index | None = None  # None: the mean of all heads


class StreamRequest(Body):
    model: ModelName
    text: BodyText = ""
    image: BodyImage | None = None
    generate: SearchRequest = SearchRequest()
    watch: WatchRequest | None = None
    variant: ModelChanges | None = None


class ErrorBody(BaseModel):
    error: str
