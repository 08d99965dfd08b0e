"""Resumes a stream of OpenAI events after its replica was lost, from another replica that starts it over.

The text of each choice is the same, but how it is cut into events, and the order of choices, depend on timing. So
progress is counted in characters and log probabilities of each choice, and an event may be sent in part.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

_END = b"data: [DONE]"


class ResumedStream:
    """``rest_of`` removes from the new replica's events what is already in ``sent``."""

    def __init__(self, sent: bytes) -> None:
        self._sent, self._seen = _Progress(), _Progress()
        self._frame: dict[str, Any] = {}  # the id and creation time that all events of the stream share
        for document in map(_document, _events(sent)):
            if document is not None:
                self._sent.add(document)
                self._frame = {name: document[name] for name in ("id", "created") if name in document}

    def rest_of(self, body: bytes) -> bytes:
        return b"".join(self._rest(event) for event in _events(body))

    def _rest(self, event: bytes) -> bytes:
        document = _document(event)
        if document is None:
            return event + b"\n\n"
        is_new = bool(self._seen.marks(document) - self._sent.single)
        for choice in document.get("choices", ()):
            index = choice["index"]
            n_letters = self._sent.letters[index] - self._seen.letters[index]
            n_tokens = self._sent.tokens[index] - self._seen.tokens[index]
            self._seen.add_choice(choice)
            is_new |= _trim(choice, max(0, n_letters), max(0, n_tokens))
        if not is_new:
            return b""
        return b"data: " + json.dumps(document | self._frame, ensure_ascii=False).encode() + b"\n\n"


class _Progress:
    """How far a stream has come: characters and log probabilities of each choice, and the marks seen."""

    def __init__(self) -> None:
        self.letters: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()
        self.single: set[tuple[str, int]] = set()

    def add(self, document: dict[str, Any]) -> None:
        self.single |= self.marks(document)
        for choice in document.get("choices", ()):
            self.add_choice(choice)

    def add_choice(self, choice: dict[str, Any]) -> None:
        self.letters[choice["index"]] += len(_text(choice))
        self.tokens[choice["index"]] += max(map(len, _log_probs(choice).values()), default=0)

    @staticmethod
    def marks(document: dict[str, Any]) -> set[tuple[str, int]]:
        """The fields of an event that a stream has once: role, end and attention of each choice, usage, error."""
        marks = {(name, -1) for name in ("usage", "error") if document.get(name)}
        for choice in document.get("choices", ()):
            fields = {
                "role": "role" in choice.get("delta", {}),
                "attention": "attention" in choice,
                "end": choice.get("finish_reason") is not None,
            }
            marks |= {(name, choice["index"]) for name, is_present in fields.items() if is_present}
        return marks


def _trim(choice: dict[str, Any], n_letters: int, n_tokens: int) -> bool:
    """Cut characters and log probabilities off the beginning of a choice; returns whether any are left."""
    text = _text(choice)[n_letters:]
    if "text" in choice:
        choice["text"] = text
    elif "content" in choice.get("delta", {}):
        choice["delta"]["content"] = text
    logs = _log_probs(choice)
    for name, values in logs.items():
        choice["logprobs"][name] = values[n_tokens:]
    return bool(text) or any(len(values) > n_tokens for values in logs.values())


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def _log_probs(choice: dict[str, Any]) -> dict[str, list[Any]]:
    """The lists under "logprobs" with one entry per token, for completions and for chats."""
    return {name: values for name, values in (choice.get("logprobs") or {}).items() if isinstance(values, list)}


def _events(body: bytes) -> Iterator[bytes]:
    return (event for event in body.split(b"\n\n") if event)


def _document(event: bytes) -> dict[str, Any] | None:
    """The JSON of an event; None for the final [DONE]."""
    return None if event.startswith(_END) else dict(json.loads(event.removeprefix(b"data: ")))
