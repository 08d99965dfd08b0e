"""A glossary: terms of the source language, and how they are to be translated.

A term applies to a text where its source side occurs: Latin and other words as whole words, Korean at the beginning of
a word, since particles follow it, Chinese and Japanese anywhere. Of two terms at one place the longer applies. A source
side in small letters also matches capitals.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from ..config import DataConfig
from ..data.examples import ReadReport
from ..data.table_files import read_lines
from ..errors import BadData
from ..text.tokenizer import Tokenizer
from .constrained_search import Term, Tokens

_NO_SPACES = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")  # kana and Han: words without spaces between them
_HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]")


class Glossary:
    """Terms with their translations, both in Unicode's composed form."""

    def __init__(self, terms: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        pairs = terms.items() if isinstance(terms, Mapping) else terms
        self.terms = {_clean(source): _clean(target) for source, target in pairs}
        for source, target in self.terms.items():
            if not source or not target:
                raise ValueError(f"the glossary has an empty side: {source!r} to {target!r}")
        by_length = sorted(self.terms, key=len, reverse=True)
        self._patterns = [(source.lower(), _pattern(source), self.terms[source]) for source in by_length]

    @classmethod
    def read(cls, path: str | Path) -> Glossary:
        """A file with a term and its translation on each line, a tab between them; blank lines are left out."""
        report, pairs = ReadReport(), []
        for number, line in read_lines(Path(path), report, DataConfig()):
            cells = [] if line is None else line.split("\t")
            if line is not None and not line.strip():
                continue
            if len(cells) != 2 or not all(cell.strip() for cell in cells):
                raise BadData(f"{path}:{number}: a term, a tab and its translation are needed, not {line!r:.60}")
            pairs.append((cells[0], cells[1]))
        return cls(pairs)

    def targets(self, text: str) -> list[str]:
        """The translations that must occur in that of a text, in the order of its terms."""
        text = _clean(text)
        lower, taken, found = text.lower(), list[range](), list[tuple[int, str]]()
        for source, pattern, target in self._patterns:
            for match in pattern.finditer(text) if source in lower else ():
                if not any(match.start() < part.stop and part.start < match.end() for part in taken):
                    taken.append(range(*match.span()))
                    found.append((match.start(), target))
        return list(dict.fromkeys(target for _, target in sorted(found)))


def _clean(text: str) -> str:
    """With single spaces, and composed."""
    return unicodedata.normalize("NFC", " ".join(text.split()))


def _pattern(source: str) -> re.Pattern[str]:
    """Where a source side occurs: not within a word, as far as its script tells words apart."""
    before = r"(?<!\w)" if source[0].isalnum() and not _NO_SPACES.match(source) else ""
    goes_on = _NO_SPACES.match(source[-1]) or _HANGUL.match(source[-1])
    after = r"(?!\w)" if source[-1].isalnum() and not goes_on else ""
    return re.compile(f"{before}{re.escape(source)}{after}", re.IGNORECASE if source == source.lower() else 0)


class TermEncoder:
    """Terms as tokens of the language they are written in."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encode, self.in_word = cache(self._encode), cache(self._in_word)

    def terms(self, targets: Sequence[str]) -> list[Term]:
        """Those that the tokenizer can write."""
        return [term for target in targets if (term := self.encode(target)) is not None]

    def _encode(self, target: str) -> Term | None:
        """With a space before it, or at the beginning of a text or after a bracket without one."""
        alone, (word, both) = self._ids(target), (self._ids("a"), self._ids(f"a {target}"))
        spaced = both[len(word) :] if both[: len(word)] == word else alone
        unknown = self.tokenizer.special_ids.get("unk")
        if not alone or not spaced or unknown in (*alone, *spaced):
            return None
        if spaced == alone:
            return Term((spaced,))
        return Term((spaced, alone)) if _NO_SPACES.match(target) else Term((spaced,), (alone,))

    def _ids(self, text: str) -> Tokens:
        return tuple(self.tokenizer.encode(text, special=False))

    def _in_word(self, token: int) -> bool:
        """Whether a token ends with a letter, a digit, or a part of a character."""
        text = self.tokenizer.decode([token, token])
        return bool(text) and (text[-1].isalnum() or text[-1] == "\ufffd")
