"""Bad input gets one clear sentence that names the argument and both values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention import (
    Additive,
    Frame,
    General,
    Linear,
    Linformer,
    MultiHeadAttention,
    Performer,
    XLRelative,
    attend,
    explain,
    masks,
)
from regard.attention.biases import Alibi, DenseBias, T5Bias
from regard.attention.cache import CrossCache, GrowingCache

B, H, T, S, D = 2, 4, 5, 7, 6


def heads(**changes: Any) -> dict[str, Tensor]:
    """q, k and v that fit; a change replaces one of them."""
    fine = {"q": torch.randn(B, H, T, D), "k": torch.randn(B, H, S, D), "v": torch.randn(B, H, S, D)}
    return fine | changes


def ask(**options: Any) -> Callable[[], object]:
    inputs = {name: options.pop(name) for name in ("q", "k", "v") if name in options}
    return lambda: attend(**heads(**inputs), **options)


def module(x: Tensor, *args: Any, cross: bool = False, d_memory: int | None = None, **options: Any) -> object:
    return MultiHeadAttention(24, 4, cross=cross, d_memory=d_memory)(x, *args, **options)


X = torch.randn(B, T, 24)
META = torch.device("meta")
DOUBLE = torch.float64
INFINITE = torch.zeros(B, H, S, D)
INFINITE[1, 2, 3] = -math.inf

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    # widths
    "width not divisible": (
        lambda: MultiHeadAttention(10, 3),
        ValueError,
        "d_model=10 is not divisible by n_heads=3; pass d_head to choose the head width",
    ),
    "q and k of different width": (
        ask(k=torch.randn(B, H, S, 3)),
        ValueError,
        "q has head width 6 but k has 3",
    ),
    "linear, different width": (
        ask(k=torch.randn(B, H, S, 3), mechanism=Linear()),
        ValueError,
        "q has head width 6 but k has 3",
    ),
    "general for another width": (
        ask(mechanism=General(H, 5)),
        ValueError,
        "mechanism 'general' expects q of head width 5, got 6",
    ),
    "additive for another key width": (
        ask(mechanism=Additive(H, 6, d_key=2)),
        ValueError,
        "mechanism 'additive' expects k of head width 2, got 6",
    ),
    "performer for another width": (
        ask(mechanism=Performer(8)),
        ValueError,
        "Performer has d_head=8, got head width 6",
    ),
    "xl for another width": (
        ask(bias=XLRelative(H, 8)),
        ValueError,
        "bias XLRelative has d_head=8, but q has head width 6",
    ),
    "x of another width": (
        lambda: module(torch.randn(B, T, 20)),
        ValueError,
        "x must be (batch, length, 24), got shape (2, 5, 20)",
    ),
    "memory of another width": (
        lambda: module(X, torch.randn(B, S, 24), cross=True, d_memory=10),
        ValueError,
        "memory must be (batch, length, 10), got shape (2, 7, 24)",
    ),
    "d_memory without cross": (
        lambda: MultiHeadAttention(24, 4, d_memory=10),
        ValueError,
        "d_memory=10 applies to cross-attention only; pass cross=True",
    ),
    "not heads": (
        ask(q=torch.randn(T, D)),
        ValueError,
        "q must have 4 dimensions (batch, heads, length, width), got shape (5, 6)",
    ),
    # masks
    "dense mask that does not fit": (
        ask(mask=torch.ones(T, T, dtype=torch.bool)),
        ValueError,
        "mask from_dense(...) of shape (1, 1, 5, 5) does not fit (batch, heads, queries, keys) = (2, 4, 5, 7)",
    ),
    "dense mask of another batch": (
        ask(mask=torch.ones(3, 1, T, S, dtype=torch.bool)),
        ValueError,
        "mask from_dense(...) of shape (3, 1, 5, 7) does not fit (batch, heads, queries, keys) = (2, 4, 5, 7)",
    ),
    "mask of numbers": (
        ask(mask=torch.ones(T, S, dtype=torch.long)),
        ValueError,
        "from_dense needs booleans (True = may attend), got torch.int64",
    ),
    "mask of too many dimensions": (
        ask(mask=torch.ones(1, 1, 1, T, S, dtype=torch.bool)),
        ValueError,
        "from_dense needs 2 to 4 dimensions, got shape (1, 1, 1, 5, 7)",
    ),
    "padding of another batch": (
        ask(mask=masks.padding(torch.tensor([1, 2, 3]))),
        ValueError,
        "mask padding(lengths) has 3 lengths, but the batch size is 2",
    ),
    "a part that does not fit": (
        ask(mask=masks.causal() & ~masks.padding(torch.tensor([1, 2, 3]))),
        ValueError,
        "mask padding(lengths) has 3 lengths, but the batch size is 2",
    ),
    "keep that does not fit": (
        ask(mask=masks.valid_keys(torch.ones(B, T, dtype=torch.bool)) | masks.causal()),
        ValueError,
        "mask valid_keys(...) of shape (2, 5) does not fit (batch, keys) = (2, 7)",
    ),
    "fractional lengths": (
        lambda: masks.padding(torch.tensor([1.0, 2.0])),
        ValueError,
        "padding lengths must be integers of shape (B,), got torch.float32 of shape (2,)",
    ),
    "keep of numbers": (
        lambda: masks.valid_keys(torch.ones(2, 3)),
        ValueError,
        "valid_keys needs booleans of shape (B, S), got torch.float32 of shape (2, 3)",
    ),
    "documents unknown": (
        ask(mask=masks.document()),
        ValueError,
        "mask document() needs a frame with document ids: frame.with_documents(...)",
    ),
    "window of nothing": (lambda: masks.window(0), ValueError, "size=0 must be at least 1"),
    "window backwards": (lambda: masks.window(3, ahead=-1), ValueError, "window ahead=-1 must not be negative"),
    "negative neighbours": (lambda: masks.blocks(4, -1), ValueError, "blocks neighbours=-1 must not be negative"),
    "summary too long": (lambda: masks.fixed(4, 5), ValueError, "fixed summary=5 must lie between 1 and stride=4"),
    "more than all": (
        lambda: masks.random_blocks(4, 101.0),
        ValueError,
        "random_blocks percent=101.0 must lie between 0 and 100",
    ),
    # biases
    "bias that does not fit": (
        ask(bias=torch.zeros(H, S, T)),
        ValueError,
        "bias of shape (1, 4, 7, 5) does not fit (batch, heads, queries, keys) = (2, 4, 5, 7)",
    ),
    "bias of other heads": (ask(bias=Alibi(8)), ValueError, "bias Alibi has n_heads=8, but q has 4 heads"),
    "trainable bias of other heads": (ask(bias=T5Bias(2)), ValueError, "bias T5Bias has n_heads=2, but q has 4 heads"),
    "xl of other heads": (ask(bias=XLRelative(2, D)), ValueError, "bias XLRelative has n_heads=2, but q has 4 heads"),
    "bias of whole numbers": (
        lambda: DenseBias(torch.zeros(2, 2, dtype=torch.long)),
        ValueError,
        "DenseBias needs a floating-point tensor of 2 to 4 dimensions, got torch.int64 of shape (2, 2)",
    ),
    "odd buckets": (lambda: T5Bias(H, n_buckets=7), ValueError, "n_buckets=7 must be even and at least 4"),
    "max_distance too small": (
        lambda: T5Bias(H, n_buckets=32, max_distance=8),
        ValueError,
        "max_distance=8 must exceed the 8 exact buckets",
    ),
    # dtypes
    "mixed dtypes": (
        ask(k=torch.randn(B, H, S, D, dtype=DOUBLE)),
        TypeError,
        "q is torch.float32 but k is torch.float64; give them one dtype",
    ),
    "mixed dtype of v": (
        ask(v=torch.randn(B, H, S, D).half()),
        TypeError,
        "q is torch.float32 but v is torch.float16; give them one dtype",
    ),
    "whole numbers": (
        ask(q=torch.zeros(B, H, T, D, dtype=torch.long)),
        TypeError,
        "q must be floating point, got torch.int64",
    ),
    "mechanism of another dtype": (
        ask(mechanism=General(H, D).double()),
        TypeError,
        "q is torch.float32 but mechanism 'general' is torch.float64; give them one dtype",
    ),
    # devices
    "mixed devices": (
        ask(k=torch.randn(B, H, S, D, device=META)),
        ValueError,
        "q is on cpu but k is on meta; put them on one device",
    ),
    "device of v": (
        ask(v=torch.randn(B, H, S, D, device=META)),
        ValueError,
        "q is on cpu but v is on meta; put them on one device",
    ),
    "device of the mask": (
        ask(mask=masks.causal() & masks.padding(torch.tensor([1, 2], device=META))),
        ValueError,
        "mask padding(lengths) is on meta but q is on cpu; mask.to('cpu') moves it",
    ),
    "device of a dense mask": (
        ask(mask=torch.ones(T, S, dtype=torch.bool, device=META)),
        ValueError,
        "mask from_dense(...) is on meta but q is on cpu; mask.to('cpu') moves it",
    ),
    "device of keep": (
        ask(mask=masks.valid_keys(torch.ones(B, S, dtype=torch.bool, device=META))),
        ValueError,
        "mask valid_keys(...) is on meta but q is on cpu; mask.to('cpu') moves it",
    ),
    "device of the bias": (
        ask(bias=T5Bias(H).to(META)),
        ValueError,
        "q is on cpu but bias T5Bias is on meta; put them on one device",
    ),
    "device of a dense bias": (
        ask(bias=torch.zeros(T, S, device=META)),
        ValueError,
        "bias is on meta but q is on cpu; put them on one device",
    ),
    "device of the mechanism": (
        ask(mechanism=Additive(H, D).to(META)),
        ValueError,
        "q is on cpu but mechanism Additive is on meta; put them on one device",
    ),
    "device of the frame": (
        ask(frame=Frame.aligned(B, H, T, S, META)),
        ValueError,
        "q is on cpu but frame is on meta; put them on one device",
    ),
    # heads
    "heads that do not group": (
        ask(k=torch.randn(B, 3, S, D), v=torch.randn(B, 3, S, D)),
        ValueError,
        "q has 4 heads, which is not a multiple of the 3 key heads",
    ),
    "module heads that do not group": (
        lambda: MultiHeadAttention(24, 4, n_kv_heads=3),
        ValueError,
        "n_heads=4 is not divisible by n_kv_heads=3",
    ),
    "no heads": (lambda: MultiHeadAttention(24, 0), ValueError, "n_heads=0 must be at least 1"),
    "different heads in k and v": (ask(v=torch.randn(B, 2, S, D)), ValueError, "k has 4 heads but v has 2"),
    "general for other heads": (
        ask(mechanism=General(2, D)),
        ValueError,
        "mechanism 'general' has n_heads=2, but q has 4 heads",
    ),
    "additive for other heads": (
        ask(mechanism=Additive(8, D)),
        ValueError,
        "mechanism 'additive' has n_heads=8, but q has 4 heads",
    ),
    "linformer for other heads": (
        ask(mechanism=Linformer(S, 2, n_heads=3)),
        ValueError,
        "Linformer has n_heads=3, but k has 4 heads",
    ),
    # lengths and batches
    "no queries": (
        ask(q=torch.randn(B, H, 0, D)),
        ValueError,
        "q is empty: length is 0 in shape (2, 4, 0, 6)",
    ),
    "no keys": (
        ask(k=torch.randn(B, H, 0, D), v=torch.randn(B, H, 0, D)),
        ValueError,
        "k is empty: length is 0 in shape (2, 4, 0, 6)",
    ),
    "no width": (
        ask(q=torch.randn(B, H, T, 0), k=torch.randn(B, H, S, 0)),
        ValueError,
        "q is empty: width is 0 in shape (2, 4, 5, 0)",
    ),
    "no batch": (
        ask(q=torch.randn(0, H, T, D)),
        ValueError,
        "q is empty: batch is 0 in shape (0, 4, 5, 6)",
    ),
    "no tokens": (
        lambda: module(torch.randn(B, 0, 24)),
        ValueError,
        "q is empty: length is 0 in shape (2, 4, 0, 6)",
    ),
    "k and v of different length": (ask(v=torch.randn(B, H, T, D)), ValueError, "k has length 7 but v has 5"),
    "another batch": (
        ask(k=torch.randn(3, H, S, D), v=torch.randn(3, H, S, D)),
        ValueError,
        "q has batch size 2 but k has 3",
    ),
    "linformer too short": (
        ask(mechanism=Linformer(4, 2)),
        ValueError,
        "Linformer has length=4, but the keys need 7",
    ),
    "a frame for others": (
        ask(frame=Frame.aligned(B, H, T, T)),
        ValueError,
        "frame is for (batch, heads, queries, keys) = (2, 4, 5, 5), but q and k have (2, 4, 5, 7)",
    ),
    # numbers
    "NaN in q": (
        ask(q=torch.full((B, H, T, D), math.nan), check=True),
        ValueError,
        "q has 240 non-finite values; the first is nan at (0, 0, 0, 0)",
    ),
    "infinity in v": (
        ask(v=INFINITE, check=True),
        ValueError,
        "v has 6 non-finite values; the first is -inf at (1, 2, 3, 0)",
    ),
    "scale twice": (
        ask(mechanism=Linear(), scale=0.5),
        ValueError,
        "scale=0.5 applies only to the scaled dot product, not to mechanism='linear'",
    ),
    # backends
    "unknown backend": (
        ask(backend="tiledd"),
        ValueError,
        "backend='tiledd' is not one of reference, tiled, sdpa, triton, flex, linear, auto; did you mean 'tiled'?",
    ),
    "unlike any backend": (
        ask(backend="xyz"),
        ValueError,
        "backend='xyz' is not one of reference, tiled, sdpa, triton, flex, linear, auto",
    ),
    "weights from a backend that cannot": (
        ask(weights=True, backend="sdpa"),
        ValueError,
        "backend='sdpa' does not support weights (mechanism 'dot' on cpu, forward); these do: reference",
    ),
    "a bias that reads content": (
        lambda: attend(**heads(), bias=XLRelative(H, D).requires_grad_(False), backend="sdpa"),
        ValueError,
        "backend='sdpa' does not support content bias (mechanism 'dot' on cpu, forward); these do: reference, tiled",
    ),
    "a mechanism a backend does not know": (
        ask(mechanism=Linear(), backend="flex"),
        ValueError,
        "backend='flex' does not support this mechanism (mechanism 'linear' on cpu, forward);"
        " these do: reference, linear",
    ),
    "no backend at all": (
        ask(mechanism=Linear(), bias=Alibi(H)),
        ValueError,
        "no backend supports bias (mechanism 'linear' on cpu, forward)",
    ),
    "a seed where there is none": (
        ask(dropout=0.5, seed=1, backend="sdpa"),
        ValueError,
        "backend='sdpa' does not support seed (mechanism 'dot' on cpu, forward); these do: reference, tiled",
    ),
    # modules
    "memory for self-attention": (
        lambda: module(X, X),
        ValueError,
        "memory was given to self-attention; cross-attention needs cross=True",
    ),
    "no memory for cross-attention": (
        lambda: module(X, cross=True),
        ValueError,
        "cross-attention needs memory (B, S, d_memory), or a cache that already holds it",
    ),
    "frame and cache": (
        lambda: module(X, frame=Frame.aligned(B, 4, T, T), cache=GrowingCache()),
        ValueError,
        "frame and cache both define the positions; pass only one of them",
    ),
    "frame and positions": (
        lambda: module(X, frame=Frame.aligned(B, 4, T, T), positions=torch.arange(T)),
        ValueError,
        "frame and positions both define the positions; pass only one of them",
    ),
    "another cache for cross": (
        lambda: module(X, X, cross=True, cache=GrowingCache()),
        TypeError,
        "cache is a GrowingCache, but cross-attention keeps its memory in a CrossCache",
    ),
    "a cross cache for self": (
        lambda: module(X, cache=CrossCache()),
        TypeError,
        "cache is a CrossCache, which does not add new tokens; self-attention needs another cache",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_clear_sentence(name: str) -> None:
    call, kind, sentence = REFUSED[name]
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        call()


def test_numbers_are_looked_at_only_when_asked() -> None:
    q = torch.full((B, H, T, D), math.nan)
    for backend in ("reference", "tiled"):  # torch's own CPU kernel turns NaN into 0
        assert attend(**heads(q=q), backend=backend).output.isnan().all()
    attend(**heads(), check=True)


def test_explain_refuses_what_attend_refuses() -> None:
    with pytest.raises(ValueError, match="q has head width 6 but k has 3"):
        explain(**heads(k=torch.randn(B, H, S, 3)))


def test_autocast_is_no_mixture() -> None:
    """Under autocast parameters stay in fp32 while activations are halved; that is meant."""
    q, k, v = (x.bfloat16() for x in heads().values())
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(q, k, v, mechanism=General(H, D), bias=T5Bias(H)).output.dtype == torch.bfloat16
