"""The table of mechanisms: what may mix tokens in a model, what each can do and what it costs.

A mechanism is a class in a file of its own and one entry here. All other modules ask the entry for its facts and never
look at its name. The class is imported when a model is built, so this module needs no torch. From outside the package
the same entry is one line, ``MIXERS["mine"] = Mixer(…)``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..foundation.checks import nearest_name

if TYPE_CHECKING:
    from .model_config import ModelConfig

VARIABLE = "REGARD_MIXERS"  # environment variable with mechanisms of one's own, MODULE:CLASS separated by commas


class MixingWork(NamedTuple):
    """What decides the cost of mixing in one layer, for one token."""

    n_heads: int
    d_head: int
    keys: float  # per query, on average
    size: int  # mixer_size, or the mechanism's default


def pairs_flops(work: MixingWork) -> float:
    """q·k and weight · v for every key, a multiplication and an addition each."""
    return 4 * work.n_heads * work.d_head * work.keys


@dataclass(frozen=True)
class Mixer:
    """One entry. The defaults describe attention by scores of token pairs, which can do everything."""

    make: str  # package.module:Class, an attention.Mechanism; without weights a module (B, T, M) → (B, T, M)
    summary: str = ""  # one line for people
    causal: bool = True  # the future, or any other pair of tokens, can be masked; False: mixes all tokens at once
    by_token: bool = True  # can decode token by token with a KV cache; never without causal
    pairs: bool = True  # scores pairs of tokens, so that a position bias (alibi, t5, xl) can be added
    recurrent: bool = False  # a module in attention's place with a state that goes from token to token
    weights: bool = True  # is attention: has queries, keys and weights; False: a module in attention's place
    cross: bool = True  # can attend to another sequence; where it cannot, the scaled dot product is used there
    size: int | None = None  # default of mixer_size (random features, rank); None: mixer_size is not used
    built_for_length: bool = False  # has parameters for max_len tokens
    scaled: bool = True  # attention_scale is a factor on its scores
    backends: tuple[str, ...] | None = None  # which compute it, as in attention's table; None: found out when it runs
    flops: Callable[[MixingWork], float] = pairs_flops  # forward, one token, one layer, without W_q, W_k, W_v and W_o

    def __post_init__(self) -> None:
        if not all(self.make.partition(":")):
            raise ValueError(f"make={self.make!r} is not of the form package.module:Class")
        if not self.causal or not (self.weights or self.recurrent):
            object.__setattr__(self, "by_token", False)
        if not self.weights:
            object.__setattr__(self, "pairs", False)
            object.__setattr__(self, "cross", False)

    @property
    def family(self) -> Any:
        """The class itself; its module is imported now."""
        module_name, _, name = self.make.partition(":")
        module = importlib.import_module(module_name)
        if not hasattr(module, name):
            raise ValueError(f"make={self.make!r}: {module_name} has no {name}")
        return getattr(module, name)

    def size_of(self, mixer_size: int | None) -> int:
        """The configured mixer_size or the default; 0 where it is not used."""
        return (mixer_size or self.size) if self.size is not None else 0


MIXERS: dict[str, Mixer] = {
    "dot": Mixer(
        "regard.attention.mechanisms:Dot",
        "scaled dot product (Vaswani et al. 2017)",
        backends=("reference", "sdpa", "flex", "tiled", "triton"),
    ),
    "additive": Mixer(
        "regard.attention.mechanisms:Additive",
        "v · tanh(W q + W k) (Bahdanau et al. 2015)",
        scaled=False,
        backends=("reference", "tiled", "triton"),
        # W_q q and W_k k once a token; v · tanh(…) and weight · value for every pair
        flops=lambda work: pairs_flops(work) + 4 * work.n_heads * work.d_head**2,
    ),
    "linear": Mixer(
        "regard.attention.linear_attention:Linear",
        "φ(q)·φ(k) with φ = elu + 1, O(T) (Katharopoulos et al. 2020)",
        pairs=False,
        scaled=False,
        backends=("reference", "linear"),
        # φ(k) vᵀ is added to a D × D state, φ(q) is multiplied with it
        flops=lambda work: 4 * work.n_heads * work.d_head**2,
    ),
    "performer": Mixer(
        "regard.attention.linear_attention:Performer",
        "softmax's kernel by random features, O(T) (Choromanski et al. 2021)",
        pairs=False,
        scaled=False,
        backends=("reference", "linear"),
        size=256,
        # features of q and k, D × m each, and a state of m × D
        flops=lambda work: 8 * work.n_heads * work.d_head * work.size,
    ),
    "linformer": Mixer(
        "regard.attention.token_mixing:Linformer",
        "learned summaries of keys and values, O(T) (Wang et al. 2020)",
        causal=False,
        pairs=False,
        cross=False,
        size=256,
        built_for_length=True,
        backends=("reference", "sdpa", "tiled"),
        # a column of E and of F for each token, and attention over the summaries
        flops=lambda work: 8 * work.n_heads * work.d_head * min(work.size, work.keys),
    ),
    "fourier": Mixer(
        "regard.attention.token_mixing:Fourier",
        "Fourier transform instead of attention, FNet (Lee-Thorp et al. 2022)",
        causal=False,
        weights=False,
        scaled=False,
        backends=(),
        flops=lambda work: 0.0,  # no matrix products
    ),
    "mamba2": Mixer(
        "regard.attention.state_space:Mamba2",
        "state-space model, O(T), a state of constant size (Dao & Gu 2024)",
        recurrent=True,
        weights=False,
        scaled=False,
        size=128,
        backends=(),
        # x Bᵀ is added to a P × N state, which is multiplied with C
        flops=lambda work: 4 * work.n_heads * work.d_head * work.size,
    ),
}


def get_mixer(name: str) -> Mixer:
    """The entry of that name. Nothing is imported for it: only built-in and registered mechanisms are known."""
    entry = _lookup(name) or _lookup(name, all_mixers())
    if entry is not None:
        return entry
    if ":" in name:
        raise ValueError(
            f"mixer={name!r} is not registered, and code that a model names is never run unasked; if you trust it, "
            f"call regard.config.mixers.register({name!r}), or set {VARIABLE}={name}"
        )
    nearest = nearest_name(name, MIXERS, dotted=False)
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    raise ValueError(f"mixer={name!r} is none of {', '.join(MIXERS)}{hint}")


def all_mixers() -> dict[str, Mixer]:
    """The table, with the mechanisms that the environment names."""
    for name in _environment_names():
        register(name)
    return MIXERS


def mixer_names() -> list[str]:
    """What may be typed for ``mixer``, for completion: nothing is imported."""
    classes = {entry.make for entry in MIXERS.values()}
    return [*MIXERS, *(name for name in _environment_names() if name not in classes and name not in MIXERS)]


def _environment_names() -> list[str]:
    return [name for part in os.environ.get(VARIABLE, "").split(",") if (name := part.strip())]


def register(name: str) -> Mixer:
    """Import ``module:Class``, from the working directory too, and enter it in the table, for child processes as well.

    Where the defaults of ``Mixer`` do not fit, the module makes its own entry, ``MIXERS["…"] = Mixer("module:Class",
    causal=False, …)``. This runs the module: call it for a name that a person gave, never for one read from a file.
    """
    if (entry := _lookup(name)) is not None:
        return entry
    if not all(name.partition(":")):
        raise ValueError(f"mixer={name!r} is not of the form module:Class")
    here, module = Path.cwd(), name.partition(":")[0]
    place = here.joinpath(*module.split("."))
    is_here = place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
    if is_here and not {"", str(here)} & set(sys.path):
        sys.path.insert(0, str(here))  # as python -m does; an installed command does not
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # its own import of something else
        raise ValueError(f"mixer={name!r}: there is no module {error.name!r}, here or on the path") from None
    if (entry := _lookup(name)) is None:
        lines = (Mixer(name).family.__doc__ or "").strip().splitlines()
        entry = MIXERS[name] = Mixer(name, lines[0] if lines else "")
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*_environment_names(), name]))
    return entry


def _lookup(name: str, table: dict[str, Mixer] = MIXERS) -> Mixer | None:
    """An entry by its name or by its class."""
    return table.get(name) or next((entry for entry in table.values() if entry.make == name), None)


def keys_per_query(config: ModelConfig, layer: int, length: int, *, causal: bool, has_memory: bool = False) -> float:
    """Keys a query of this layer may look at, averaged over a text; ``has_memory``: in a decoder beside an encoder."""
    if config.shifted_windows is not None and not has_memory:
        return min(config.shifted_windows**2, length)
    if config.sparsity == "strided":
        return _strided_keys(config.sparsity_size, length, causal)
    if config.sparsity == "bigbird":
        return _bigbird_keys(config.sparsity_size, config.sparsity_random / 100, length, causal)
    windowed = config.window is not None and (config.window_layers is None or layer in config.window_layers)
    window = min(config.window or length, length) if windowed else length
    past = window - window * (window - 1) / (2 * length)  # the first queries see fewer
    return past if causal else 2 * past - 1 if window < length else length


def _strided_keys(stride: int, length: int, causal: bool) -> float:
    near = min(stride, length)
    past = near - near * (near - 1) / (2 * length)
    whole, rest = divmod(length, stride)
    far = (stride * whole * (whole - 1) / 2 + rest * whole) / length  # Σ ⌊i / stride⌋ / T
    return past + far if causal else 2 * (past + far) - 1


def _bigbird_keys(size: int, share: float, length: int, causal: bool) -> float:
    """The expected number: a random ``share`` of the other blocks is open."""
    blocks = [min(size, length - start) for start in range(0, length, size)]
    total = 0.0
    for row, n_queries in enumerate(blocks):
        last = row if causal else len(blocks) - 1
        near = {0, *range(max(0, row - 1), min(row + 1, last) + 1)} if row or causal else set(range(len(blocks)))
        keys = sum(blocks[col] * (1.0 if col in near else share) for col in range(last + 1))
        total += n_queries * (keys - (n_queries - 1) / 2 if causal else keys)
    return total / length
