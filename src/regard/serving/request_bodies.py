"""The request bodies of ``/v1``: the fields of OpenAI's API that apply here, and our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from ..web.requests import Body, BodyImage, BodyText, Limits, ModelName

MAX_INPUTS = 256  # per request
MAX_CHOICES = 64
_LIMITS = Limits()

# fail_fast: collecting an error for each of 100,000 bad items would take a third of a second.
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=_LIMITS.tokens, fail_fast=True)
]
Texts = Annotated[list[BodyText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Prompts = (
    BodyText | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
)
StopString = Annotated[str, Field(min_length=1, max_length=200)]
Position = Annotated[int, Field(gt=-(2**31), lt=2**31)]


def _check_bias(bias: dict[str, float]) -> dict[str, float]:
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"{token[:40]!r} is not a token id; the keys of logit_bias are token ids")
    return bias


def _as_number(value: Any) -> Any:
    """Refuse booleans, which Python would accept as integers."""
    if isinstance(value, bool):
        raise ValueError("is a boolean, not a number")
    return value


Count = Annotated[int, BeforeValidator(_as_number)]
Number = Annotated[float, BeforeValidator(_as_number)]


class AttentionOptions(Body):
    """Which attention weights of the finished text the response includes; None means all."""

    kind: Annotated[str, Field(max_length=40)] | None = None  # self, cross or encoder
    layers: Annotated[list[Position], Field(min_length=1, max_length=1024)] | None = None
    heads: Annotated[list[Position], Field(min_length=1, max_length=1024)] | None = None
    tokens: Annotated[list[Position], Field(min_length=1, max_length=16_384)] | None = None  # positions of the rows


class SearchBody(Body):
    """How tokens are chosen; common to all routes that generate text."""

    model: ModelName
    max_tokens: Annotated[Count, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None  # 0: greedy
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Count, Field(ge=1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Count, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=1024), AfterValidator(_check_bias)
        ]
        | None
    ) = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    n: Annotated[Count, Field(ge=1, le=MAX_CHOICES)] = 1
    beams: Annotated[Count, Field(ge=1, le=16)] | None = None
    length_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None  # for beam search
    priority: Annotated[Count, Field(ge=-100, le=100)] = 0
    attention: AttentionOptions | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None  # accepted for compatibility, ignored


class JsonSchema(Body):
    name: Annotated[str, Field(max_length=200)] = ""
    description: Annotated[str, Field(max_length=10_000)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    pattern: Annotated[str, Field(max_length=10_000)] | None = None  # for type "regex"


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class OpenAIBody(SearchBody):
    """The fields that completions and chats share."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    presence_penalty: Annotated[Number, Field(ge=0, le=0)] | None = None  # only 0: repetition_penalty replaces both
    frequency_penalty: Annotated[Number, Field(ge=0, le=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, fields: Any) -> Any:
        """In OpenAI's API null is the default of every optional field: its client sends it for an argument of None."""
        return {name: x for name, x in fields.items() if x is not None} if isinstance(fields, dict) else fields


class CompletionBody(OpenAIBody):
    prompt: Prompts
    max_tokens: Annotated[Count, Field(ge=0, lt=2**31)] | None = None  # 0 with echo: nothing but the prompt
    best_of: Annotated[Count, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[Count, Field(ge=0, le=20)] | None = None
    echo: bool = False


class TextPart(Body):
    type: Literal["text"]
    text: BodyText


class ChatMessage(Body):
    role: Annotated[str, Field(min_length=1, max_length=40)]
    content: BodyText | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_INPUTS)]
    name: Annotated[str, Field(max_length=200)] | None = None

    def to_dict(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatBody(OpenAIBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
    max_completion_tokens: Annotated[Count, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Count, Field(ge=0, le=20)] | None = None


class EmbeddingBody(Body):
    model: ModelName
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    user: Annotated[str, Field(max_length=1000)] | None = None


class TranslateBody(SearchBody):
    text: BodyText | Texts
    source_language: Annotated[str, Field(max_length=40)] | None = None
    target_language: Annotated[str, Field(max_length=40)] | None = None


class CaptionBody(SearchBody):
    image: BodyImage | Annotated[list[BodyImage], Field(min_length=1, max_length=16)]


class ClassifyBody(Body):
    model: ModelName
    text: BodyText | Texts | None = None
    image: BodyImage | Annotated[list[BodyImage], Field(min_length=1, max_length=16)] | None = None
    second: BodyText | Texts | None = None
    threshold: Annotated[Number, Field(ge=0, le=1)] | None = None
    attention: AttentionOptions | None = None


class ApiErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ApiErrorBody(BaseModel):
    """The body of every error response."""

    error: ApiErrorDetail
