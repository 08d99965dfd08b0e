"""Rotary embedding: equal to transformers for every scaling kind, and true to what rotation promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.config import RopeScalingConfig
from regard.layers import Rope, rotate

D_HEAD = 16
MAX_LEN = 64
SHORT = [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.2, 3.0]
LONG = [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0]

# ours → the same in transformers' words (original_max_len is called original_max_position_embeddings there)
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"kind": "linear", "factor": 4.0},
    "dynamic": {"kind": "dynamic", "factor": 2.0},
    "dynamic-1.7": {"kind": "dynamic", "factor": 1.7},
    "yarn": {"kind": "yarn", "factor": 4.0, "original_max_len": 16},
    "yarn-original-from-max_len": {"kind": "yarn", "factor": 4.0},
    "yarn-betas": {"kind": "yarn", "factor": 8.0, "original_max_len": 32, "beta_fast": 4.0, "beta_slow": 0.5},
    "yarn-attention": {"kind": "yarn", "factor": 8.0, "original_max_len": 32, "attention_factor": 0.7},
    "yarn-mscale": {"kind": "yarn", "factor": 8.0, "original_max_len": 32, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {"kind": "yarn", "factor": 8.0, "original_max_len": 32, "mscale": 0.7},
    "yarn-truncated": {"kind": "yarn", "factor": 8.0, "original_max_len": 32, "truncate": True},
    "yarn-untruncated": {"kind": "yarn", "factor": 8.0, "original_max_len": 32, "truncate": False},
    "llama3": {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_len": 64,
    },
    "longrope": {"kind": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_len": 16},
    "longrope-factor": {
        "kind": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_len": 16,
        "factor": 3.0,
    },
    "longrope-attention": {
        "kind": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_len": 16,
        "attention_factor": 1.25,
    },
}
# Around every original length (16, 32, 64): below it, exactly at it, one past it, and far beyond.
REACHES = {
    "short": (0, 12),
    "at-16": (0, 16),
    "past-16": (0, 17),
    "at-64": (0, 64),
    "past-64": (0, 65),
    "middle": (20, 60),
    "past": (0, 200),
    "far": (100_000, 100_050),
}


def theirs(scaling: dict[str, Any] | None, base: float, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    words = dict(scaling or {})
    if words:
        words["rope_type"] = words.pop("kind")
    if "original_max_len" in words:
        words["original_max_position_embeddings"] = words.pop("original_max_len")
    config = LlamaConfig(
        hidden_size=2 * D_HEAD,
        num_attention_heads=2,
        max_position_embeddings=MAX_LEN,
        rope_theta=base,
        rope_scaling=words or None,
    )
    rotary = LlamaRotaryEmbedding(config)
    position_ids = positions if positions.ndim == 2 else positions.unsqueeze(0)
    return apply_rotary_pos_emb(x, x, *rotary(x, position_ids))[0]


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("name", SCALINGS)
def test_equals_transformers(name: str, reach: str) -> None:
    words = SCALINGS[name]
    positions = torch.arange(*REACHES[reach])
    x = torch.randn(2, 3, len(positions), D_HEAD)
    for base in (10000.0, 500000.0):
        rope = Rope(D_HEAD, base, RopeScalingConfig(**words) if words else None, max_len=MAX_LEN)
        torch.testing.assert_close(rope(x, positions), theirs(words, base, x, positions), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [name for name, words in SCALINGS.items() if words])
def test_the_kinds_differ_from_plain_rope_somewhere(name: str) -> None:
    """Guards the parity above: a scaling that both sides ignored would pass it."""
    words = SCALINGS[name] or {}
    x, positions = torch.ones(1, 1, 200, D_HEAD), torch.arange(200)
    scaled = Rope(D_HEAD, scaling=RopeScalingConfig(**words), max_len=MAX_LEN)(x, positions)
    assert (scaled - Rope(D_HEAD)(x, positions)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["default", "dynamic", "longrope"])
def test_per_row_positions_equal_transformers(name: str) -> None:
    words = SCALINGS[name]
    positions = torch.stack((torch.arange(30), torch.arange(50, 80)))
    x = torch.randn(2, 3, 30, D_HEAD)
    rope = Rope(D_HEAD, scaling=RopeScalingConfig(**words) if words else None, max_len=MAX_LEN)
    torch.testing.assert_close(rope(x, positions), theirs(words, 10000.0, x, positions), atol=1e-6, rtol=0)


def test_partial_rotation_is_phis() -> None:
    from transformers import PhiConfig
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding, apply_rotary_pos_emb

    config = PhiConfig(hidden_size=2 * D_HEAD, num_attention_heads=2, partial_rotary_factor=0.5)
    x, positions = torch.randn(2, 2, 9, D_HEAD), torch.arange(9)
    turned = apply_rotary_pos_emb(x[..., :8], x[..., :8], *PhiRotaryEmbedding(config)(x, positions[None]))[0]
    expected = torch.cat((turned, x[..., 8:]), dim=-1)
    torch.testing.assert_close(Rope(D_HEAD, fraction=0.5)(x, positions), expected, atol=1e-6, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    i=st.integers(0, 400),
    j=st.integers(0, 400),
    shift=st.integers(0, 400),
    pairs=st.integers(1, 8),
    seed=st.integers(0, 999),
)
def test_scores_depend_on_the_distance_alone(i: int, j: int, shift: int, pairs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 1, 2 * pairs, generator=generator)
    rope = Rope(2 * pairs)

    def score(a: int, b: int) -> torch.Tensor:
        return (rope(q, torch.tensor([a])) * rope(k, torch.tensor([b]))).sum()

    torch.testing.assert_close(score(i, j), score(i + shift, j + shift), atol=2e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(1, 9),
    pairs=st.integers(1, 9),
    fraction=st.sampled_from([1.0, 0.5]),
    start=st.integers(-1, 10**5),
)
def test_rotation_keeps_the_norm(batch: int, heads: int, length: int, pairs: int, fraction: float, start: int) -> None:
    d_head = 2 * pairs if fraction == 1.0 else 4 * pairs
    x = torch.randn(batch, heads, length, d_head)
    turned = Rope(d_head, fraction=fraction)(x, torch.arange(start, start + length))
    assert turned.shape == x.shape
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5, rtol=1e-5)


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 1, 8)
    assert torch.equal(Rope(8)(x, torch.tensor([0])), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_angles_stay_fp32_whatever_x_is(dtype: torch.dtype) -> None:
    rope = Rope(8).to(dtype)
    assert rope.short.dtype == torch.float32
    x, positions = torch.randn(1, 2, 5, 8, dtype=dtype), torch.arange(50_000, 50_005)
    out = rope(x, positions)
    assert out.dtype == dtype
    expected = Rope(8)(x.float(), positions)
    torch.testing.assert_close(out.float(), expected, atol=torch.finfo(dtype).eps * 8 + 1e-6, rtol=0)


def test_a_fixed_length_fixes_the_frequencies() -> None:
    scaling = RopeScalingConfig(kind="dynamic", factor=2.0)
    rope = Rope(8, scaling=scaling, max_len=16)
    x = torch.randn(1, 1, 100, 8)
    whole = rope(x, torch.arange(100))
    one = rope(x[:, :, 40:41], torch.tensor([40]))
    assert (one - whole[:, :, 40:41]).abs().max() > 1e-3  # alone, position 40 is taken for the end of the text
    for length in (100, torch.tensor(100)):
        torch.testing.assert_close(rope(x[:, :, 40:41], torch.tensor([40]), length=length), whole[:, :, 40:41])


def test_shared_angles_equal_the_module() -> None:
    rope = Rope(8, scaling=RopeScalingConfig(kind="yarn", factor=2.0), fraction=0.5, max_len=32)
    x, positions = torch.randn(2, 3, 7, 8), torch.randint(-1, 40, (2, 7))
    assert torch.equal(rotate(x, *rope.angles(positions)), rope(x, positions))


def test_gradient_is_the_inverse_rotation() -> None:
    rope, positions = Rope(6), torch.arange(4)
    x = torch.randn(1, 1, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: rope(t, positions), (x,))


@pytest.mark.parametrize("name", ["default", "longrope"])
def test_survives_meta_and_assigned_weights(name: str) -> None:
    words = SCALINGS[name]
    scaling = RopeScalingConfig(**words) if words else None
    x, positions = torch.randn(1, 2, 40, D_HEAD), torch.arange(40)
    expected = Rope(D_HEAD, scaling=scaling, max_len=MAX_LEN)(x, positions)
    with torch.device("meta"):
        rope = Rope(D_HEAD, scaling=scaling, max_len=MAX_LEN)
    assert all(buffer.is_meta for buffer in rope.buffers())
    assert rope(x.to("meta"), positions.to("meta")).is_meta
    assert torch.equal(rope(x, positions), expected)  # as after load_state_dict(assign=True), which skips buffers
    with torch.device("meta"):
        rope = Rope(D_HEAD, scaling=scaling, max_len=MAX_LEN)
    assert torch.equal(rope.to_empty(device="cpu")(x, positions), expected)
    assert not rope.state_dict()


BAD_SCALINGS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "lama3"}, r"kind='lama3': input should be 'linear', .*'llama3'"),
    ({"kind": "linear"}, "'linear' needs factor"),
    ({"kind": "llama3", "factor": 8.0}, "'llama3' needs high_freq_factor, low_freq_factor"),
    ({"kind": "linear", "factor": 2.0, "beta_fast": 3.0}, "'linear' does not take beta_fast"),
    ({"kind": "dynamic", "factor": 2.0, "original_max_len": 3}, "'dynamic' does not take original_max_len"),
    ({"kind": "linear", "factor": 0.5}, "factor=0.5 must be at least 1"),
    ({"kind": "linear", "factor": float("nan")}, "factor=nan must be at least 1"),
    ({"kind": "yarn", "factor": 2.0, "attention_factor": 0.0}, "attention_factor=0.0 must be greater than 0"),
    ({"kind": "yarn", "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast=1.0 must not be less than beta_slow=2.0"),
    (
        {"kind": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        "high_freq_factor=4.0 must be greater than low_freq_factor=4.0",
    ),
]


@pytest.mark.parametrize(("words", "message"), BAD_SCALINGS)
def test_bad_scaling_is_refused_by_name(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rope(8, scaling=RopeScalingConfig(**words), max_len=MAX_LEN)


def test_scaling_is_frozen_and_hashable() -> None:
    scaling = RopeScalingConfig(kind="longrope", short_factor=SHORT, long_factor=LONG)  # type: ignore[arg-type]
    assert scaling.short_factor == tuple(SHORT)
    assert len({scaling, RopeScalingConfig(kind="longrope", short_factor=tuple(SHORT), long_factor=tuple(LONG))}) == 1
    with pytest.raises(ValueError, match="frozen"):
        scaling.kind = "linear"  # type: ignore[misc]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"d_head=7 times fraction=1\.0 gives 7 rotated dimensions"):
        Rope(7)
    with pytest.raises(ValueError, match=r"fraction=1\.5 must lie in"):
        Rope(8, fraction=1.5)
    with pytest.raises(ValueError, match="base=1 must be greater than 1"):
        Rope(8, base=1)
    with pytest.raises(ValueError, match="'dynamic' needs Rope's max_len"):
        Rope(8, scaling=RopeScalingConfig(kind="dynamic", factor=2.0))
    with pytest.raises(ValueError, match="'dynamic' needs more than 2 rotated dimensions, not 2"):
        Rope(2, scaling=RopeScalingConfig(kind="dynamic", factor=2.0), max_len=8)
    with pytest.raises(ValueError, match="'yarn' needs original_max_len"):
        Rope(8, scaling=RopeScalingConfig(kind="yarn", factor=2.0))
    with pytest.raises(ValueError, match="'yarn' needs factor"):
        Rope(8, scaling=RopeScalingConfig(kind="yarn", original_max_len=8))
    with pytest.raises(ValueError, match="short_factor has 8 numbers, but 8 rotated dimensions need 4"):
        Rope(8, scaling=RopeScalingConfig(**SCALINGS["longrope"]), max_len=MAX_LEN)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x has heads of width 6, but d_head=8"):
        Rope(8)(torch.zeros(1, 1, 2, 6), torch.arange(2))
    with pytest.raises(ValueError, match="positions have length 3, but x has length 2"):
        Rope(8)(torch.zeros(1, 1, 2, 8), torch.arange(3))
