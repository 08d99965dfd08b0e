"""Chats as token ids: a model's chat template, written in Jinja, and which of the tokens are answers.

A template is data that came with a model, so it is rendered in a sandbox: it can read the messages and nothing else.
Each answer is encoded apart from what stands before it, so that a model learns to answer after exactly the tokens that
a prompt has when it is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import BadData, BadModelFile
from .tokenizer import EOS, Tokenizer, replace_surrogates

Message = tuple[str, str]  # who speaks (system, user, assistant) and what they say
ANSWERS = "assistant"
TEMPLATE_FILE = "chat_template.jinja"
# The role and a line of its own for what is said; an answer ends as documents do.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:\n"
    "{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)
# What stands for the special tokens while the template of a tokenizer learned here is rendered: such a tokenizer reads
# "<eos>" as five characters. Both are of Unicode's private use.
_MARKS = {"bos_token": "\ue000", "eos_token": "\ue001"}


@dataclass(frozen=True)
class EncodedChat:
    """Token ids, and which of them the model is to write itself."""

    ids: list[int]
    is_answer: list[bool]


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the tokenizer it is for."""

    template: str
    tokenizer: Tokenizer

    def encode(self, messages: Sequence[Message]) -> EncodedChat:
        """A chat to learn from: the answers are those of the assistant, each with the token that ends it.

        A template may write an answer otherwise once the chat goes on (without its thoughts): then the last one counts.
        """
        ids: list[int] = []
        is_answer: list[bool] = []
        text = ""  # of what is encoded so far
        for count, (role, _) in enumerate(messages):
            if role == ANSWERS:
                prompt, answered = (
                    self.render(messages[:count], ask=True),
                    self.render(messages[: count + 1], ask=False),
                )
                if not answered.startswith(prompt):
                    raise BadData("the chat template asks for an answer in another way than it writes one")
                if not prompt.startswith(text):
                    ids, is_answer, text = [], [], ""
                before, answer = self._encode_text(prompt[len(text) :]), self._encode_text(answered[len(prompt) :])
                n, answer = _with_end(answer, self._ids["eos_token"])
                ids += [*before, *answer]
                is_answer += [*[False] * len(before), *[True] * n, *[False] * (len(answer) - n)]
                text = answered
        return EncodedChat(ids, is_answer)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """What a model is asked: the chat so far and the beginning of its answer."""
        n_answered = max((n for n, (role, _) in enumerate(messages, start=1) if role == ANSWERS), default=0)
        before, text = self.encode(messages[:n_answered]).ids, self.render(messages[:n_answered], ask=False)
        prompt = self.render(messages, ask=True)
        goes_on = n_answered > 0 and prompt.startswith(text)
        return [*before, *self._encode_text(prompt[len(text) :])] if goes_on else self._encode_text(prompt)

    def render(self, messages: Sequence[Message], *, ask: bool) -> str:
        """The text of a chat; ``ask`` adds the beginning of an answer."""
        from jinja2 import TemplateError

        said = [{"role": role, "content": _without_marks(content)} for role, content in messages]
        try:
            return str(_compile(self.template).render(messages=said, add_generation_prompt=ask, **self._tokens))
        except TemplateError as error:
            raise BadData(f"the chat template refuses these messages: {error}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise BadData(f"the chat template cannot be rendered: {error}") from None

    @property
    def _ids(self) -> dict[str, int | None]:
        """Where a chat begins and where an answer ends; documents of a model made here begin with <eos>, too."""
        if self.tokenizer.is_native:
            return dict.fromkeys(_MARKS, EOS)
        return {f"{name}_token": self.tokenizer.special_ids.get(name) for name in ("bos", "eos")}

    @property
    def _has_marks(self) -> bool:
        """Whether special tokens in a text would be read as text: then characters of no text stand for them."""
        return self.tokenizer.is_native or self.tokenizer.has_literal_special_tokens

    @property
    def _tokens(self) -> dict[str, str]:
        if self._has_marks:
            return _MARKS
        return {name: self.tokenizer.token(index) or "" for name, index in self._ids.items()}

    def _encode_text(self, text: str) -> list[int]:
        """Without special tokens but those of the template."""
        ids: list[int] = []
        for part in re.split(f"({'|'.join(_MARKS.values())})", text) if self._has_marks else [text]:
            name = next((name for name, mark in _MARKS.items() if mark == part), None)
            new = self.tokenizer.encode(replace_surrogates(part), special=False) if name is None else [self._ids[name]]
            ids += [index for index in new if index is not None]
        return ids


def _with_end(ids: list[int], end: int | None) -> tuple[int, list[int]]:
    """An answer that has the end token, and how many of its tokens there are up to it."""
    if end is None:
        return len(ids), ids
    ids = ids if end in ids else [*ids, end]
    return len(ids) - ids[::-1].index(end), ids


def _without_marks(text: str) -> str:
    return text.translate(dict.fromkeys(map(ord, _MARKS.values())))


@cache
def _compile(template: str) -> Any:
    """A template with what those of Hugging Face models may use, and nothing beyond."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """``{% generation %} … {% endgeneration %}`` marks answers for transformers; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

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
    """``plain``, or the content of a Jinja file."""
    if name == "plain":
        return PLAIN
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise BadData(f"data.chat_template={name}: neither plain nor a Jinja file that can be read: {reason}") from None


def template_in(files: Mapping[str, bytes]) -> str | None:
    """The chat template among the files of a tokenizer, where transformers keeps it."""
    if (content := files.get(TEMPLATE_FILE)) is not None:
        return content.decode("utf-8", "replace")
    try:
        found = json.loads(files.get("tokenizer_config.json", b"{}")).get("chat_template")
    except (ValueError, AttributeError):
        return None
    if isinstance(found, list):  # several by name
        found = next((x.get("template") for x in found if isinstance(x, dict) and x.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def read_messages(value: Any) -> tuple[Message, ...] | None:
    """Messages from a list of ``{"role", "content"}``, of ShareGPT's ``{"from", "value"}``, or of pairs of the two;
    None where it is something else."""
    if not isinstance(value, list | tuple) or not value:
        return None
    messages = []
    for each in value:
        match each:
            case {"role": role, "content": content} | {"from": role, "value": content} | (role, content):
                pass
            case _:
                return None
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append((_ROLES.get(role, role), content))
    return tuple(messages)


_ROLES = {"human": "user", "gpt": ANSWERS, "model": ANSWERS, "bot": ANSWERS}
