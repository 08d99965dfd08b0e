"""The table of token mixers: attention mechanisms and their replacements, what each can do and what it costs.

A mixer is a class in a file of its own and one entry here. All other modules read the properties of the entry and never
its name. The class is imported when a model is built, so this module needs no torch. Outside the package, an entry is
one line, ``MIXERS["mine"] = Mixer(…)``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..foundation.checks import did_you_mean
from ..foundation.plugins import MIXERS_VARIABLE, environment_names, import_class, unregistered_class

if TYPE_CHECKING:
    from .model_config import ModelConfig


class MixingWork(NamedTuple):
    """The sizes that determine the cost of mixing one token in one layer."""

    n_heads: int
    d_head: int
    keys: float  # per query, on average
    size: int  # mixer_size, or the mechanism's default
    n_kv_heads: int
    sources: float = 1.0  # source tokens, of which keys are made, per query


def pairs_flops(work: MixingWork) -> float:
    """q·k and weight · v for every key, each a multiplication and an addition per dimension."""
    return 4 * work.n_heads * work.d_head * work.keys


@dataclass(frozen=True)
class Mixer:
    """One entry. The defaults describe attention by scores of token pairs, which supports everything."""

    make: str  # package.module:Class, an attention.Mechanism; without weights, a module (B, T, M) → (B, T, M)
    summary: str = ""  # one line, for listings
    causal: bool = True  # the future, or any other pair of tokens, can be masked; False: mixes all tokens at once
    by_token: bool = True  # can decode token by token with a KV cache; requires causal
    pairs: bool = True  # scores pairs of tokens, so that a position bias (alibi, t5, xl) can be added
    recurrent: bool = False  # replaces attention by a module that carries a state from token to token
    softmax: bool = True  # its weights are a softmax of scores, to which sinks can be added
    weights: bool = True  # is attention, with queries, keys and weights; False: a module that replaces attention
    cross: bool = True  # can attend to another sequence; if not, cross-attention is the scaled dot product
    size: int | None = None  # default of mixer_size (random features, rank); None: mixer_size is not used
    built_for_length: bool = False  # has parameters for max_len tokens
    maps: int = 1  # attention maps per head; n_heads and n_kv_heads count maps and are multiples of it
    by_layer: bool = False  # for_model also takes the layer's number, from 0
    scaled: bool = True  # attention_scale is a factor on its scores
    backends: tuple[str, ...] | None = None  # backends that compute it; None: determined when it runs
    flops: Callable[[MixingWork], float] = pairs_flops  # forward, one token, one layer, without W_q, W_k, W_v and W_o
    products: Callable[[ModelConfig], int] | None = None  # if recurrent: weights multiplied per token
    keeps_states: bool = False  # if recurrent: training saves a state for each token, not for each chunk
    conv_width: Callable[[ModelConfig], int] | None = None  # if recurrent: channels of its convolution

    def __post_init__(self) -> None:
        if not all(self.make.partition(":")):
            raise ValueError(f"make={self.make!r} is not of the form package.module:Class")
        if not self.causal or not (self.weights or self.recurrent):
            object.__setattr__(self, "by_token", False)
        if not self.weights:
            object.__setattr__(self, "pairs", False)
            object.__setattr__(self, "cross", False)
            object.__setattr__(self, "softmax", False)

    @property
    def family(self) -> Any:
        """The class, imported on access."""
        module_name, _, name = self.make.partition(":")
        module = importlib.import_module(module_name)
        if not hasattr(module, name):
            raise ValueError(f"make={self.make!r}: {module_name} has no {name}")
        return getattr(module, name)

    def size_of(self, mixer_size: int | None) -> int:
        """The configured mixer_size or the default; 0 if the mixer has no size."""
        return (mixer_size or self.size) if self.size is not None else 0


def _mamba_products(config: ModelConfig) -> int:
    """Input projection of gate and values, output projection; Δ, B and C from the values, Δ through ``step_rank``."""
    inner, rank = config.n_heads * config.head_width, config.step_rank or -(-config.d_model // 16)
    return 3 * config.d_model * inner + inner * (2 * rank + 2 * config.mixing.size_of(config.mixer_size))


def _mamba2_width(config: ModelConfig) -> int:
    """Values, B and C."""
    shared = (config.n_kv_heads or 1) * config.mixing.size_of(config.mixer_size)
    return config.n_heads * config.head_width + 2 * shared


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
        # W_q q and W_k k once per token; v · tanh(…) and weight · value for every pair
        flops=lambda work: pairs_flops(work) + 2 * (1 + work.sources) * work.n_heads * work.d_head**2,
    ),
    "sigmoid": Mixer(
        "regard.attention.mechanisms:Sigmoid",
        "σ(q·k + b), each weight independent (Ramapuram et al. 2024)",
        softmax=False,
        backends=("reference", "tiled"),
    ),
    "differential": Mixer(
        "regard.attention.differential:Differential",
        "the difference of two maps per head (Ye et al. 2024)",
        maps=2,
        by_layer=True,
        backends=("reference", "sdpa", "flex", "tiled", "triton"),
        # q·k of every map, and its weights with values of twice the width
        flops=lambda work: 6 * work.n_heads * work.d_head * work.keys,
    ),
    "linear": Mixer(
        "regard.attention.linear_attention:Linear",
        "φ(q)·φ(k) with φ = elu + 1, O(T) (Katharopoulos et al. 2020)",
        pairs=False,
        softmax=False,
        scaled=False,
        backends=("reference", "linear"),
        # φ(k) vᵀ is added to a D × D state, φ(q) is multiplied with it
        flops=lambda work: 2 * (work.n_heads + work.sources * work.n_kv_heads) * work.d_head**2,
    ),
    "performer": Mixer(
        "regard.attention.linear_attention:Performer",
        "softmax's kernel by random features, O(T) (Choromanski et al. 2021)",
        pairs=False,
        softmax=False,
        scaled=False,
        backends=("reference", "linear"),
        size=256,
        # features of q and k, D × m each, and a state of m × D
        flops=lambda work: 4 * (work.n_heads + work.sources * work.n_kv_heads) * work.d_head * work.size,
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
    "mamba": Mixer(
        "regard.attention.selective_scan:Mamba",
        "selective state spaces, O(T), a state of constant size (Gu & Dao 2023)",
        recurrent=True,
        weights=False,
        scaled=False,
        size=16,
        backends=(),
        # x B is added to N states of a channel, which are multiplied with C
        flops=lambda work: 4 * work.n_heads * work.d_head * work.size,
        products=_mamba_products,
        keeps_states=True,
        conv_width=lambda config: config.n_heads * config.head_width,
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
        # gate, values, B, C and Δ in; the heads out
        products=lambda config: (
            config.d_model * (2 * config.n_heads * config.head_width + _mamba2_width(config) + config.n_heads)
        ),
        conv_width=lambda config: _mamba2_width(config),
    ),
}


def get_mixer(name: str) -> Mixer:
    """The entry of that name, built-in or registered; a name alone never causes an import."""
    entry = _lookup(name) or _lookup(name, all_mixers())
    if entry is not None:
        return entry
    if ":" in name:
        raise unregistered_class("mixer", name, "regard.config.mixers.register", MIXERS_VARIABLE)
    hint = did_you_mean(name, MIXERS, dotted=False, quoted=True)
    raise ValueError(f"mixer={name!r} is not one of {', '.join(MIXERS)}{hint}")


def all_mixers() -> dict[str, Mixer]:
    """The table, including the mechanisms named in the environment."""
    for name in environment_names(MIXERS_VARIABLE):
        register(name)
    return MIXERS


def mixer_names() -> list[str]:
    """The possible values of ``mixer``, for completion; imports nothing."""
    classes = {entry.make for entry in MIXERS.values()}
    return [
        *MIXERS,
        *(name for name in environment_names(MIXERS_VARIABLE) if name not in classes and name not in MIXERS),
    ]


def register(name: str) -> Mixer:
    """Import ``module:Class``, also from the working directory, and add it to the table, for child processes as well.

    If the defaults of ``Mixer`` do not fit, the module makes its own entry, ``MIXERS["…"] = Mixer("module:Class",
    causal=False, …)``. This runs the module: call it for a name given by the user, never for one read from a file.
    """
    if (entry := _lookup(name)) is not None:
        return entry
    mechanism = import_class("mixer", name, MIXERS_VARIABLE)
    if (entry := _lookup(name)) is None:
        lines = (mechanism.__doc__ or "").strip().splitlines()
        entry = MIXERS[name] = Mixer(name, lines[0] if lines else "")
    return entry


def _lookup(name: str, table: dict[str, Mixer] = MIXERS) -> Mixer | None:
    """An entry by its name or its class."""
    return table.get(name) or next((entry for entry in table.values() if entry.make == name), None)


def keys_per_query(config: ModelConfig, layer: int, length: int, *, causal: bool, has_memory: bool = False) -> float:
    """Keys that a query of this layer sees, averaged over a text; ``has_memory``: in an encoder-decoder's decoder."""
    if config.shifted_windows is not None and not has_memory:
        return min(config.shifted_windows**2, length)
    if config.sparsity == "strided":
        return _strided_keys(config.sparsity_size, length, causal)
    if config.sparsity == "bigbird":
        return _bigbird_keys(config.sparsity_size, config.sparsity_random / 100, length, causal)
    if config.sparsity == "end-blocks":
        return _end_blocks_keys(config.sparsity_size, config.sparsity_repeats, length)
    windowed = config.window is not None and (config.window_layers is None or layer in config.window_layers)
    window = min(config.window or length, length) if windowed else length
    past = window - window * (window - 1) / (2 * length)  # the first queries see fewer
    if causal or window == length:
        return past if causal else length
    return 2 * past - 1 + _global_keys(window, min(config.global_tokens, length), length)


def _global_keys(window: int, count: int, length: int) -> float:
    """Keys per query beyond its window if the first ``count`` tokens see all and are seen by all."""
    from_global = sum(length - min(i + window, length) for i in range(count))  # keys beyond the window of each
    to_global = [min(count, i - window + 1) for i in range(window, min(length, count + window)) if i >= count]
    return (from_global + sum(to_global) + count * max(0, length - count - window)) / length


def _end_blocks_keys(size: int, repeats: int, length: int) -> float:
    """Neighbouring blocks, the first and the last; short texts are seen whole."""
    if length <= (5 + 2 * repeats) * size:
        return float(length)
    blocks = [min(size, length - start) for start in range(0, length, size)]
    last, total = len(blocks) - 1, 0
    for row, n_queries in enumerate(blocks):
        near = range(last + 1) if row in (0, last) else {0, last, row - 1, row, row + 1}
        total += n_queries * sum(blocks[col] for col in near)
    return total / length


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
