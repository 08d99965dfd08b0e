"""Responses in the format of OpenAI's API, whole and as chunks of a stream.

https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from typing import Any

from .choices import TextChoice, Writing
from .request_bodies import ChatBody, CompletionBody, OpenAIBody


class OpenAIDocument:
    """The response to a completion or chat request."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, body: OpenAIBody, writing: Writing) -> None:
        self.model, self.body, self.writing = writing.model, body, writing
        self.extras: dict[int, dict[str, Any]] = {}  # additional fields of each choice, by its index
        self._n_logged: dict[int, int] = {}  # number of tokens of each choice whose log P was sent

    @property
    def lists_prompt(self) -> bool:
        """Whether log P of the prompt is part of it: too much to write in the event loop."""
        return self.writing.choices[0].reading.n_top is not None

    def frame(self, kind: str | None = None) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.writing.id}",
            "object": kind or self.chunk_kind,
            "created": self.writing.created,
            "model": self.model.id,
        }

    def whole(self, choices: list[TextChoice]) -> dict[str, Any]:
        entries = [self.entry(choice) | self.extras.get(choice.index, {}) for choice in choices]
        return self.frame(self.kind) | {"choices": entries, "usage": self.writing.usage}

    def beginning(self) -> list[dict[str, Any]]:
        return []

    def piece(self, choice: TextChoice, piece: str) -> dict[str, Any] | None:
        """The chunk for a new piece of text; None if there is nothing to send yet."""
        if not piece and choice.finish_reason is None:
            return None
        start = self._n_logged.get(choice.index, 0)
        self._n_logged[choice.index] = choice.n_written
        return self.frame() | {"choices": [self.delta(choice, piece, start)]}

    def attention_chunk(self, choice: TextChoice) -> dict[str, Any]:
        start = max(1, choice.n_written)  # at 0 there is the prompt, which has been sent
        return self.frame() | {"choices": [self.delta(choice, "", start) | self.extras[choice.index]]}

    def entry(self, choice: TextChoice) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, choice: TextChoice, piece: str, start: int) -> dict[str, Any]:
        raise NotImplementedError

    def spell(self, token: int) -> tuple[str, bytes]:
        """The text of a token and its bytes; a part of a character is written as OpenAI does, ``bytes:\\xec``."""
        tokenizer = self.model.codec.target
        if (spelled := tokenizer.token_bytes(token)) is None:
            text = tokenizer.token(token) or f"<{token}>"
            return text, text.encode()
        try:
            return spelled.decode(), spelled
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled), spelled


class CompletionDocument(OpenAIDocument):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    body: CompletionBody

    def entry(self, choice: TextChoice) -> dict[str, Any]:
        return self.delta(choice, self._echo(choice) + choice.text, 0)

    def delta(self, choice: TextChoice, piece: str, start: int) -> dict[str, Any]:
        logs = None if self.body.logprobs is None else self._log_probs(choice, start)
        return {"index": choice.index, "text": piece, "logprobs": logs, "finish_reason": choice.finish_reason}

    def beginning(self) -> list[dict[str, Any]]:
        choices = [choice for choice in self.writing.choices if self._echo(choice)]
        entry = {"logprobs": None, "finish_reason": None}
        return [
            self.frame() | {"choices": [{"index": choice.index, "text": self._echo(choice), **entry}]}
            for choice in choices
        ]

    def _echo(self, choice: TextChoice) -> str:
        return self.model.codec.decode(choice.reading.row) if self.body.echo else ""

    def _log_probs(self, choice: TextChoice, start: int) -> dict[str, Any]:
        """log P of the tokens from ``start`` on; a stream sends each of them once.

        As with OpenAI, the chosen token is always among the likeliest, so there may be one more of them than requested.
        With ``echo`` the prompt's tokens come first, and an end token last: clients count on one entry for each token.
        """
        echo, prompt = self.body.echo, choice.reading.row
        tokens = (choice.tokens + choice.end_token if echo else choice.tokens)[start:]
        log_probs, texts = choice.log_probs[start : start + len(tokens)], [self.spell(token)[0] for token in tokens]
        n_before = len(self._echo(choice))
        offsets = [n_before + offset for offset in choice.offsets[start : start + len(tokens)]]
        if echo and start == 0:
            spans = self.model.codec.target.token_spans(prompt)
            offsets = [span.start for span in spans for _ in range(span.first, span.last)] + offsets
            texts, log_probs = [self.spell(token)[0] for token in prompt] + texts, choice.reading.log_probs + log_probs
        tops = [{self.spell(token)[0]: value for token, value in each.top} for each in log_probs]
        rows = zip(texts, log_probs, tops, strict=True)
        return {
            "tokens": texts,
            "token_logprobs": [each.value for each in log_probs],
            "top_logprobs": [None if each.value is None else {**top, text: each.value} for text, each, top in rows],
            "text_offset": offsets,
        }


class ChatDocument(OpenAIDocument):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    body: ChatBody

    def entry(self, choice: TextChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._log_probs(choice, 0),
            "finish_reason": choice.finish_reason,
        }

    def beginning(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        entry = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self.frame() | {"choices": [{"index": choice.index, **entry}]} for choice in self.writing.choices]

    def delta(self, choice: TextChoice, piece: str, start: int) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": {"content": piece} if piece else {},
            "logprobs": self._log_probs(choice, start),
            "finish_reason": choice.finish_reason,
        }

    def _log_probs(self, choice: TextChoice, start: int) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None

        def token_entry(token: int, value: float | None) -> dict[str, Any]:
            text, spelled = self.spell(token)
            return {"token": text, "logprob": value, "bytes": list(spelled)}

        log_probs = choice.log_probs[start : len(choice.tokens)]  # without that of the end token
        content = [
            token_entry(token, each.value) | {"top_logprobs": [token_entry(*one) for one in each.top]}
            for token, each in zip(choice.tokens[start:], log_probs, strict=True)
        ]
        return {"content": content, "refusal": None}
