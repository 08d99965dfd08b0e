"""A glossary: terms of the source language and their required translations.

A term applies to a text if its source side occurs in it: as a whole word in Latin and most other scripts; at the
beginning of a word in Korean, where particles may follow; anywhere in Chinese and Japanese. Of two terms that overlap,
the longer one applies. A source side in lower case also matches upper case.
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

_NO_SPACES = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
)  # kana and Han, which have no spaces between words
_HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]")


class Glossary:
    """Terms with their translations, both in Unicode's composed form (NFC)."""

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
        """Read a file with a term, a tab and its translation on each line; blank lines are skipped."""
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
        """The translations that the translation of a text must contain, in the order of its terms."""
        text = _clean(text)
        lower, spans, targets = text.lower(), list[range](), list[tuple[int, str]]()
        for source, pattern, target in self._patterns:
            for match in pattern.finditer(text) if source in lower else ():
                if not any(match.start() < span.stop and span.start < match.end() for span in spans):
                    spans.append(range(*match.span()))
                    targets.append((match.start(), target))
        return list(dict.fromkeys(target for _, target in sorted(targets)))


def _clean(text: str) -> str:
    """In composed form, with single spaces."""
    return unicodedata.normalize("NFC", " ".join(text.split()))


def _pattern(source: str) -> re.Pattern[str]:
    """Matches a source side, not within a word if its script separates words."""
    before = r"(?<!\w)" if source[0].isalnum() and not _NO_SPACES.match(source) else ""
    word_may_continue = _NO_SPACES.match(source[-1]) or _HANGUL.match(source[-1])
    after = r"(?!\w)" if source[-1].isalnum() and not word_may_continue else ""
    return re.compile(f"{before}{re.escape(source)}{after}", re.IGNORECASE if source == source.lower() else 0)


class TermEncoder:
    """Terms as tokens of the target language."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encode, self.in_word = cache(self._encode), cache(self._in_word)

    def terms(self, targets: Sequence[str]) -> list[Term]:
        """The terms that the tokenizer can encode."""
        return [term for target in targets if (term := self.encode(target)) is not None]

    def _encode(self, target: str) -> Term | None:
        """The tokens of a term after a space, and without one at the beginning of a text or after a bracket."""
        alone, word, both = self._ids(target), self._ids("a"), self._ids(f"a {target}")
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
        """Whether a token ends with a letter, a digit, or an incomplete character."""
        text = self.tokenizer.decode([token, token])
        return bool(text) and (text[-1].isalnum() or text[-1] == "\ufffd")
