"""The table of mechanisms: what may mix tokens in a model, and what each of them is able to do.

A mechanism is a class in a file of its own and one entry here. Configs, models, generation, cost, shoot-out, explorer
and command line ask the entry for its facts and never look at a name. The class is imported when a model is built, so
that this file needs no torch. From outside the package the same entry is one line, ``MIXERS["mine"] = Mixer(…)``.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "REGARD_MIXERS"
"""Mechanisms of one's own, MODULE:CLASS separated by commas, that every command may meet in a model it opens."""


class Work(NamedTuple):
    """What one layer does for one token, as far as it decides what mixing costs."""

    n_heads: int
    d_head: int
    keys: float  # that a query meets, on average
    size: int  # mixer_size, or the mechanism's own


def pairs_flops(work: Work) -> float:
    """q·k and weight · v, a multiplication and an addition each, for every key that is met."""
    return 4 * work.n_heads * work.d_head * work.keys


def _additive_flops(work: Work) -> float:
    """W_q q and W_k k once a token; v · tanh(…) and weight · value for every pair."""
    return pairs_flops(work) + 4 * work.n_heads * work.d_head**2


def _linear_flops(work: Work) -> float:
    """φ(k) vᵀ is added to a D × D state, φ(q) is multiplied with it."""
    return 4 * work.n_heads * work.d_head**2


def _performer_flops(work: Work) -> float:
    """Features of q and k, D × m each, and a state of m × D."""
    return 8 * work.n_heads * work.d_head * work.size


def _linformer_flops(work: Work) -> float:
    """A column of E and of F for each token, and attention over the summaries."""
    return 8 * work.n_heads * work.d_head * min(work.size, work.keys)


def _no_flops(work: Work) -> float:
    """A Fourier transform has no matrix products."""
    return 0.0


@dataclass(frozen=True)
class Mixer:
    """One entry. The defaults describe attention by scores of token pairs, which can do everything."""

    make: str
    """``package.module:Class``: an ``attention.Mechanism``; without ``weights`` a module (B, T, M) → (B, T, M)."""
    summary: str = ""
    """One line for people."""
    causal: bool = True
    """Whether the future can be hidden from it, and any other pair of tokens; False: it mixes all tokens at once."""
    by_token: bool = True
    """Whether it can go token by token with a cache of keys and values; what is not causal never can."""
    pairs: bool = True
    """Whether it scores pairs of tokens, so that a position bias (alibi, t5, xl) has something to be added to."""
    weights: bool = True
    """Whether it is attention: queries, keys and weights to look at. False: a module that takes attention's place."""
    cross: bool = True
    """Whether it can look from one text at another; where it cannot, the scaled dot product stands in."""
    size: int | None = None
    """What mixer_size is unless given (random features, rank); None: mixer_size means nothing to it."""
    built_for_length: bool = False
    """Whether parameters are made for max_len tokens."""
    flops: Callable[[Work], float] = pairs_flops
    """Operations of one token in one layer, forward, beside the projections W_q, W_k, W_v and W_o."""

    def __post_init__(self) -> None:
        module, colon, name = self.make.partition(":")
        if not (module and colon and name):
            raise ValueError(f"make={self.make!r} is not of the form package.module:Class")
        if not self.causal or not self.weights:
            object.__setattr__(self, "by_token", False)
        if not self.weights:
            object.__setattr__(self, "pairs", False)
            object.__setattr__(self, "cross", False)

    @property
    def family(self) -> Any:
        """The class itself; its module is imported now."""
        module, _, name = self.make.partition(":")
        found = importlib.import_module(module)
        if not hasattr(found, name):
            raise ValueError(f"make={self.make!r}: {module} has no {name}")
        return getattr(found, name)

    def size_of(self, asked: int | None) -> int:
        """mixer_size as it is meant; 0 where there is none."""
        return (asked or self.size) if self.size is not None else 0


MIXERS: dict[str, Mixer] = {
    "dot": Mixer("regard.attention.scores:Dot", "scaled dot product (Vaswani et al. 2017)"),
    "additive": Mixer(
        "regard.attention.scores:Additive", "v · tanh(W q + W k) (Bahdanau et al. 2015)", flops=_additive_flops
    ),
    "linear": Mixer(
        "regard.attention.linear:Linear",
        "φ(q)·φ(k) with φ = elu + 1, O(T) (Katharopoulos et al. 2020)",
        pairs=False,
        flops=_linear_flops,
    ),
    "performer": Mixer(
        "regard.attention.linear:Performer",
        "softmax's kernel by random features, O(T) (Choromanski et al. 2021)",
        pairs=False,
        size=256,
        flops=_performer_flops,
    ),
    "linformer": Mixer(
        "regard.attention.mixing:Linformer",
        "learned summaries of keys and values, O(T) (Wang et al. 2020)",
        causal=False,
        pairs=False,
        cross=False,
        size=256,
        built_for_length=True,
        flops=_linformer_flops,
    ),
    "fourier": Mixer(
        "regard.attention.mixing:Fourier",
        "Fourier transform instead of attention, FNet (Lee-Thorp et al. 2022)",
        causal=False,
        weights=False,
        flops=_no_flops,
    ),
}


def mixer(name: str) -> Mixer:
    """The entry of that name. Nothing is imported for a name that a file brings: only what was registered is known."""
    found = _find(name) or _find(name, mixers())
    if found is not None:
        return found
    if ":" in name:
        raise ValueError(
            f"mixer={name!r} is not registered, and code that a model names is never run unasked; if you trust it, "
            f"call regard.config.mixers.register({name!r}), or set {VARIABLE}={name}"
        )
    near = difflib.get_close_matches(name, MIXERS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"mixer={name!r} is none of {', '.join(MIXERS)}{hint}")


def mixers() -> dict[str, Mixer]:
    """The table, with what the environment adds to it."""
    for name in _named():
        register(name)
    return MIXERS


def names() -> list[str]:
    """What may be typed for ``mixer``. Nothing is imported, so what a module of one's own calls itself is not known."""
    made = {one.make for one in MIXERS.values()}
    return [*MIXERS, *(name for name in _named() if name not in made and name not in MIXERS)]


def _named() -> list[str]:
    """What the environment names."""
    return [name for part in os.environ.get(VARIABLE, "").split(",") if (name := part.strip())]


def register(name: str) -> Mixer:
    """Import ``module:Class``, from the working directory too, and enter it in the table, for child processes as well.

    What differs from the defaults is said by an entry the module itself makes, ``MIXERS["…"] = Mixer("module:Class",
    causal=False, …)``. This runs the module: call it for a name that a person gave, never for one read from a file.
    """
    if (known := _find(name)) is not None:
        return known
    module, colon, kind = name.partition(":")
    if not (module and colon and kind):
        raise ValueError(f"mixer={name!r} is not of the form module:Class")
    _import(module, name)
    if (found := _find(name)) is None:
        lines = (Mixer(name).family.__doc__ or "").strip().splitlines()
        found = MIXERS[name] = Mixer(name, lines[0] if lines else "")
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*_named(), name]))
    return found


def _find(name: str, table: dict[str, Mixer] = MIXERS) -> Mixer | None:
    """By its name, or by what it makes."""
    return table.get(name) or next((one for one in table.values() if one.make == name), None)


def _import(module: str, name: str) -> None:
    here, parts = Path.cwd(), module.split(".")
    is_here = here.joinpath(*parts).with_suffix(".py").is_file() or here.joinpath(*parts, "__init__.py").is_file()
    if is_here and not {"", str(here)} & set(sys.path):
        sys.path.insert(0, str(here))  # as python -m does; an installed command does not
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # its own import of something else
        raise ValueError(f"mixer={name!r}: there is no module {error.name!r}, here or on the path") from None
