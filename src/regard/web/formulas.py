"""Converts the documents' LaTeX formulas to MathML, which browsers draw without a script.

Only the commands that the documents use are supported; any other one raises an error that names it.
"""

from __future__ import annotations

import re
from html import escape

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\S")
_SYMBOLS = {"alpha": "α", "theta": "θ", "delta": "δ", "lambda": "λ", "partial": "∂", "top": "⊤"}
_OPERATORS = {"cdot": "⋅", "circ": "∘", "sum": "∑", "leftarrow": "←"}
_FUNCTIONS = {"sin", "cos", "log", "ln", "exp", "min", "max"}
_SPACES = {",": 0.17, ";": 0.28}


def to_mathml(latex: str, display: str = "inline") -> str:
    """Convert LaTeX such as ``\\sqrt{d_k}`` to a <math> element; ``display`` is "inline" or "block"."""
    if display == "block" and r"\qquad" in latex:  # separate formulas, which need not fit on one line
        return "".join(f"<span>{to_mathml(part, display)}</span>" for part in latex.split(r"\qquad"))
    tokens = _TOKEN.findall(latex)[::-1]  # a stack: the parser pops the next token off its end
    content = "".join(_row(tokens, None))
    return f'<math xmlns="http://www.w3.org/1998/Math/MathML" display="{display}"><mrow>{content}</mrow></math>'


def _row(tokens: list[str], end: str | None) -> list[str]:
    """Parse elements, each with its sub- and superscript, up to the token ``end``."""
    row: list[str] = []
    while tokens and tokens[-1] != end:
        row.append(_scripts(_atom(tokens), tokens))
    if end is not None:
        if not tokens:
            raise ValueError(f"the formula ends before {end!r}")
        tokens.pop()
    return row


def _scripts(base: str, tokens: list[str]) -> str:
    scripts: dict[str, str] = {}
    while tokens and tokens[-1] in ("_", "^"):
        sign = tokens.pop()
        scripts[sign] = _atom(tokens)
    if not scripts:
        return base
    tag = {"_": "msub", "^": "msup", "_^": "msubsup"}["".join(sorted(scripts, reverse=True))]
    return f"<{tag}>{base}{''.join(scripts[sign] for sign in '_^' if sign in scripts)}</{tag}>"


def _atom(tokens: list[str]) -> str:
    token = tokens.pop()
    if token == "{":
        return f"<mrow>{''.join(_row(tokens, '}'))}</mrow>"
    if token.startswith("\\"):
        return _command(token[1:], tokens)
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if token.isalpha():
        return f"<mi>{token}</mi>"
    return f'<mo stretchy="false">{"−" if token == "-" else escape(token)}</mo>'


def _command(name: str, tokens: list[str]) -> str:
    if name in _SYMBOLS:
        return f"<mi>{_SYMBOLS[name]}</mi>"
    if name in _OPERATORS:
        return f"<mo>{_OPERATORS[name]}</mo>"
    if name in _FUNCTIONS:
        return f"<mi>{name}</mi>"
    if name in _SPACES:
        return f'<mspace width="{_SPACES[name]}em"/>'
    if name == "sqrt":
        return f"<msqrt>{_atom(tokens)}</msqrt>"
    if name == "frac":
        return f"<mfrac>{_atom(tokens)}{_atom(tokens)}</mfrac>"
    if name in ("mathrm", "text"):
        return f'<mi mathvariant="normal">{_letters(tokens)}</mi>'
    if name == "left":
        opening = tokens.pop()
        inner = "".join(_row(tokens, "\\right"))
        return f"<mrow><mo>{escape(opening)}</mo>{inner}<mo>{escape(tokens.pop())}</mo></mrow>"
    raise ValueError(f"no MathML for \\{name}: add it to {__name__}, or write the formula without it")


def _letters(tokens: list[str]) -> str:
    """Parse the letters between braces, verbatim."""
    word = ""
    tokens.pop()
    while tokens[-1] != "}":
        word += tokens.pop()
    tokens.pop()
    return escape(word)
