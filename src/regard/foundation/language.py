"""The language of the command line, and the translation of its output.

Commands, help and reports are written in English. When they are printed, `localise` looks them up in korean.toml, whose
keys are the English sentences with `{…}` for variable parts. A line without an entry is put together of those of its
clauses ("…; …") if all have one; any other text stays English.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

LANGUAGES = ("en", "ko")
_VARIABLES = ("REGARD_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_PARTICLE = re.compile(r"\{(\w+)\}(\W*)(이\(가\)|을\(를\)|은\(는\)|\(으\)로)")
_NUMBER = r"[-\d][\d,.]*(?: \w)?"  # what {n} and {total} stand for


def environment_language() -> str:
    """The language of REGARD_LANG, else of the standard locale variables: Korean ("ko"), or English for all others."""
    value = next((value for name in _VARIABLES if (value := os.environ.get(name))), "")
    return "ko" if value.lower().startswith("ko") else "en"


def localise(text: str, *, errors: bool = True) -> str:
    """English text in the user's language, line by line; indentation is kept.

    Without ``errors``, sentences of errors stay as they are: a report shows texts of people, which may be alike.
    """
    if environment_language() == "en":
        return text
    return "\n".join(_localise_line(line, load_catalog(errors)) for line in text.split("\n"))


class Catalog(NamedTuple):
    """The entries of a language: whole sentences, and patterns for sentences with variable parts."""

    sentences: dict[str, str]
    patterns: list[tuple[re.Pattern[str], str]]


@cache
def load_catalog(errors: bool = True) -> Catalog:
    """Read korean.toml, with or without its tables of errors."""
    import tomllib  # imported here, because English needs no catalog

    tables = tomllib.loads(files("regard.foundation").joinpath("korean.toml").read_text(encoding="utf-8"))
    names = [name for name in tables if errors or name not in ("program", "errors", "advice")]
    entries = {english: korean for name in names for english, korean in tables[name].items()}
    keys = [key for key in entries if _PLACEHOLDER.search(key)]
    keys.sort(key=lambda key: len(_PLACEHOLDER.sub("", key)), reverse=True)  # the most specific first
    return Catalog(entries, [(_pattern(key), entries[key]) for key in keys])


def _pattern(key: str) -> re.Pattern[str]:
    parts = _PLACEHOLDER.split(key)  # literal, name, literal, …
    kinds = {"n": _NUMBER, "total": _NUMBER}
    return re.compile(
        "".join(f"(?P<{part}>{kinds.get(part, '.*?')})" if n % 2 else re.escape(part) for n, part in enumerate(parts))
    )


def _localise_line(line: str, catalog: Catalog) -> str:
    text = line.strip()
    before, after = line[: len(line) - len(line.lstrip())], line[len(line.rstrip()) :]
    if not text or text in catalog.sentences:
        return f"{before}{catalog.sentences.get(text, '')}{after}"
    for pattern, korean in catalog.patterns:
        if match := pattern.fullmatch(text):
            # A variable part may be a sentence with its own entry; a single word is a name.
            values = {name: _localise_line(x, catalog) if " " in x else x for name, x in match.groupdict().items()}
            return before + _choose_particles(korean, values).format(**values) + after
    clauses = text.split("; ")
    localised = [_localise_line(clause, catalog) for clause in clauses] if len(clauses) > 1 else clauses
    is_known = all(one != other for one, other in zip(clauses, localised, strict=True))
    return f"{before}{'; '.join(localised)}{after}" if is_known else line


def _choose_particles(korean: str, values: dict[str, str]) -> str:
    """Particles for values that end with a syllable or a digit: {x}이(가) is {x}가 for 텐서, {x}이 for 3."""

    def choose(match: re.Match[str]) -> str:
        name, between, particle = match.groups()
        last = values[name].rstrip("'\"’”»)]}")[-1:]
        read = "영일이삼사오육칠팔구"[int(last)] if last in "0123456789" and last else last
        if not "가" <= read <= "힣":
            return match[0]
        final = (ord(read) - ord("가")) % 28  # the final consonant, 0 without one, 8 for ㄹ
        if particle == "(으)로":
            return f"{{{name}}}{between}{'로' if final in (0, 8) else '으로'}"
        return f"{{{name}}}{between}{particle[0] if final else particle[2]}"

    return _PARTICLE.sub(choose, korean)
