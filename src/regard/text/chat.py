"""Chats as token ids, through a model's Jinja chat template, with a mask of the tokens that are answers.

A template is untrusted data that came with a model, so it is rendered in a sandbox with access to the messages only.
Each answer is encoded separately from the text before it, so that the prompt in training has exactly the tokens of the
prompt in generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import BadData, BadModelFile, UsageError
from .tokenizer import EOS, Tokenizer, replace_surrogates

Message = tuple[str, str]  # role (system, user, assistant) and content
ANSWERS = "assistant"  # the role whose messages are the answers to learn
TEMPLATE_FILE = "chat_template.jinja"
# The role, a newline, and the content; an answer ends with <eos>, as documents do.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:\n"
    "{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)
# Private-use characters that stand for special tokens while a template is rendered for a tokenizer that would encode
# "<eos>" as five characters.
_MARKS = {"bos_token": "\ue000", "eos_token": "\ue001"}


@dataclass(frozen=True)
class EncodedChat:
    """Token ids, and for each whether it belongs to an answer, which the model learns to write."""

    ids: list[int]
    is_answer: list[bool]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template and the tokenizer that encodes its output."""

    template: str
    tokenizer: Tokenizer

    def encode(self, messages: Sequence[Message]) -> EncodedChat:
        """Encode a chat for training: the answers are the assistant's messages, each with the token that ends it.

        Some templates render an earlier answer differently once the chat goes on, for example without its reasoning.
        Then only the answers from that point on are learned; the earlier ones become part of the prompt.
        """
        ids: list[int] = []
        is_answer: list[bool] = []
        text = ""  # the text encoded so far
        for n, (role, _) in enumerate(messages):
            if role != ANSWERS:
                continue
            prompt = self.render(messages[:n], ask=True)
            answered = self.render(messages[: n + 1], ask=False)
            if not answered.startswith(prompt):
                raise BadData("the chat template writes an answer differently from the prompt that asks for it")
            if not prompt.startswith(text):
                ids, is_answer, text = [], [], ""
            before, answer = self._encode_text(prompt[len(text) :]), self._encode_text(answered[len(prompt) :])
            n_learned, answer = _with_end(answer, self._ids["eos_token"])
            ids += [*before, *answer]
            is_answer += [*[False] * len(before), *[True] * n_learned, *[False] * (len(answer) - n_learned)]
            text = answered
        return EncodedChat(ids, is_answer)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode a chat for generation: the messages and the header of the answer to come."""
        n_answered = max((n for n, (role, _) in enumerate(messages, start=1) if role == ANSWERS), default=0)
        before, text = self.encode(messages[:n_answered]).ids, self.render(messages[:n_answered], ask=False)
        prompt = self.render(messages, ask=True)
        if n_answered > 0 and prompt.startswith(text):
            return [*before, *self._encode_text(prompt[len(text) :])]
        return self._encode_text(prompt)

    def render(self, messages: Sequence[Message], *, ask: bool) -> str:
        """The text of a chat; ``ask`` appends the header of the next answer."""
        from jinja2 import TemplateError

        fields = [{"role": role, "content": _without_marks(content)} for role, content in messages]
        try:
            return str(_compile(self.template).render(messages=fields, add_generation_prompt=ask, **self._tokens))
        except TemplateError as error:
            raise BadData(f"the chat template rejects these messages: {error}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise BadData(f"the chat template cannot be rendered: {error}") from None

    @property
    def _ids(self) -> dict[str, int | None]:
        """The ids of bos and eos; with a native tokenizer both are <eos>, which also separates documents."""
        if self.tokenizer.is_native:
            return dict.fromkeys(_MARKS, EOS)
        return {f"{name}_token": self.tokenizer.special_ids.get(name) for name in ("bos", "eos")}

    @property
    def _has_marks(self) -> bool:
        """Whether the tokenizer encodes special tokens in a text literally, so that ``_MARKS`` must stand for them."""
        return self.tokenizer.is_native or self.tokenizer.has_literal_special_tokens

    @property
    def _tokens(self) -> dict[str, str]:
        if self._has_marks:
            return _MARKS
        return {name: self.tokenizer.token(index) or "" for name, index in self._ids.items()}

    def _encode_text(self, text: str) -> list[int]:
        """Encode rendered text, adding no special tokens beyond those of the template."""
        ids: list[int] = []
        for part in re.split(f"({'|'.join(_MARKS.values())})", text) if self._has_marks else [text]:
            name = next((name for name, mark in _MARKS.items() if mark == part), None)
            if name is None:
                ids += self.tokenizer.encode(replace_surrogates(part), special=False)
            elif (special := self._ids[name]) is not None:
                ids.append(special)
        return ids


def _with_end(ids: list[int], end: int | None) -> tuple[int, list[int]]:
    """Append the end token if the answer has none; returns the number of tokens up to the last one, and the answer."""
    if end is None:
        return len(ids), ids
    ids = ids if end in ids else [*ids, end]
    return len(ids) - ids[::-1].index(end), ids


def _without_marks(text: str) -> str:
    return text.translate(dict.fromkeys(map(ord, _MARKS.values())))


@cache
def _compile(template: str) -> Any:
    """Compile a template with only the extensions that transformers provides to chat templates."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """``{% generation %} … {% endgeneration %}``, with which transformers marks answers, renders as its content."""

        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a mutable class attribute

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    extensions = ["jinja2.ext.loopcontrols", GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise BadModelFile(f"the chat template cannot be read: line {error.lineno}: {error.message}") from None


def read_template(name: str) -> str:
    """The template named ``plain``, or the content of a Jinja file."""
    if name == "plain":
        return PLAIN
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"data.chat_template={name} is neither plain nor a readable Jinja file: {reason}") from None


def template_in(files: Mapping[str, bytes]) -> str | None:
    """The chat template among a tokenizer's files: chat_template.jinja, or a field of tokenizer_config.json."""
    if (content := files.get(TEMPLATE_FILE)) is not None:
        return content.decode("utf-8", "replace")
    try:
        template = json.loads(files.get("tokenizer_config.json", b"{}")).get("chat_template")
    except (ValueError, AttributeError):
        return None
    if isinstance(template, list):  # several named templates
        named = [x for x in template if isinstance(x, dict)]
        template = next((x.get("template") for x in named if x.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def read_messages(value: Any) -> tuple[Message, ...] | None:
    """Messages from a list of ``{"role", "content"}``, ShareGPT's ``{"from", "value"}``, or (role, content) pairs;
    None if ``value`` is anything else."""
    if not isinstance(value, list | tuple) or not value:
        return None
    messages = []
    for item in value:
        match item:
            case {"role": role, "content": content} | {"from": role, "value": content} | (role, content):
                pass
            case _:
                return None
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append((_ROLES.get(role, role), content))
    return tuple(messages)


_ROLES = {"human": "user", "gpt": ANSWERS, "model": ANSWERS, "bot": ANSWERS}
