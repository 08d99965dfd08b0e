"""Strings that end a text, wherever tokens are cut: found while many texts are being written side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import GenerateConfig
from .pieces import Decode, after, stops


def first_end(config: GenerateConfig) -> int:
    """The new token from which on a string may end a text: its forced beginning and least length are past."""
    return max(config.min_new_tokens, len(config.prefix) + 1)


class StopStrings:
    """Ends a text with the token that completes one of ``strings``, counting from new token number ``n_least`` on."""

    def __init__(self, strings: Sequence[str], decode: Decode, n_least: int = 0) -> None:
        self.strings, self.decode, self.n_least = tuple(strings), decode, n_least
        self._last = {string[-1] for string in strings} | {"\ufffd"}
        self._may_end: dict[int, bool] = {}

    def found(self, tokens: Tensor, texts: Tensor, n_new: int) -> Tensor:
        """Which of ``tokens`` (R,) complete a string after ``texts`` (R, L), whose last n_new - 1 tokens are new."""
        found = [False] * len(tokens)
        n_prompt = texts.shape[1] - (n_new - 1)
        for row, token in enumerate(tokens.tolist()):
            if n_new >= self.n_least and self._can_end(token):
                ids = texts[row].tolist()
                prompt = [index for index in ids[:n_prompt] if index >= 0]
                found[row] = stops([*ids[n_prompt:], token], after(self.decode, prompt), self.strings, self.n_least)
        return torch.tensor(found, device=tokens.device)

    def _can_end(self, token: int) -> bool:
        """Whether a string's last letter may come with this token. Few can, and only then is a text decoded.

        It is decoded behind itself, where it keeps its space; a part of a character may be the end of any letter.
        """
        if token not in self._may_end:
            self._may_end[token] = not self._last.isdisjoint(self.decode([token, token]))
        return self._may_end[token]
