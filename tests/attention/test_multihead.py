"""Multi-head attention: MHA, GQA and MQA, self and cross, causal and cached, and where its tokens stand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Additive, Dot, Frame, MultiHeadAttention, XLRelative, attend, masks
from regard.attention.biases import Alibi, Bias, T5Bias
from regard.attention.cache import Cache, CrossCache, GrowingCache, RingCache, StaticCache
from regard.layers import RMSNorm, Rope

B, T, M, H, D = 2, 9, 24, 4, 6


def tokens(length: int = T, width: int = M) -> Tensor:
    return torch.randn(B, length, width)


# ---- heads


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "auto"])
def test_as_many_key_heads_as_query_heads_is_mha_bit_for_bit(backend: str) -> None:
    plain, grouped = (MultiHeadAttention(M, H, n, backend=backend) for n in (None, H))
    grouped.load_state_dict(plain.state_dict())
    x = tokens().requires_grad_()
    outputs = [module(x, mask=masks.causal()) for module in (plain, grouped)]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(y.sum(), [x, *m.parameters()]) for y, m in zip(outputs, (plain, grouped), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "auto"])
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_shared_key_heads_equal_repeated_ones(backend: str, n_kv_heads: int) -> None:
    """GQA and MQA are MHA whose key and value weights repeat: group g serves query heads g·H/G … (g+1)·H/G - 1."""
    grouped = MultiHeadAttention(M, H, n_kv_heads, backend=backend)
    full = MultiHeadAttention(M, H, backend=backend)

    def repeated(w: Tensor) -> Tensor:
        return w.unflatten(0, (n_kv_heads, D)).repeat_interleave(H // n_kv_heads, 0).flatten(0, 1)

    with torch.no_grad():
        full.w_q.copy_(grouped.w_q)
        full.w_k.copy_(repeated(grouped.w_k))
        full.w_v.copy_(repeated(grouped.w_v))
        full.w_o.load_state_dict(grouped.w_o.state_dict())
    x = tokens()
    torch.testing.assert_close(grouped(x, mask=masks.causal()), full(x, mask=masks.causal()))
    assert grouped.w_qkv.weight.shape[0] == (H + 2 * n_kv_heads) * D


def test_equals_the_formula_of_the_paper() -> None:
    """MultiHead(x) = Concat(head_1 … head_H) W_o, one head at a time."""
    attention, x = MultiHeadAttention(M, H), tokens()
    nn.init.normal_(attention.w_qkv.bias)
    heads = []
    for h in range(H):
        own = slice(h * D, (h + 1) * D)
        biases = attention.w_qkv.bias.chunk(3)
        q, k, v = (
            x @ w[own].T + b[own] for w, b in zip((attention.w_q, attention.w_k, attention.w_v), biases, strict=True)
        )
        heads.append(torch.softmax(q @ k.transpose(1, 2) / D**0.5, -1) @ v)
    torch.testing.assert_close(attention(x), attention.w_o(torch.cat(heads, -1)))


def test_heads_of_any_width() -> None:
    attention = MultiHeadAttention(10, 3, d_head=7, qkv_bias=False, out_bias=False)
    assert attention(torch.randn(1, 4, 10)).shape == (1, 4, 10)
    assert {name: tuple(p.shape) for name, p in attention.named_parameters()} == {
        "w_qkv.weight": (63, 10),
        "w_o.weight": (10, 21),
    }


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", ["w_q", "w_k", "w_v"])
def test_the_three_matrices_are_views(name: str, cross: bool) -> None:
    attention = MultiHeadAttention(M, H, 2, cross=cross, d_memory=10 if cross else None)
    args = (tokens(), tokens(5, 10)) if cross else (tokens(),)
    before, view = attention(*args), getattr(attention, name)
    wide = 10 if cross and name != "w_q" else M
    assert view.shape == ((H if name == "w_q" else 2) * D, wide)
    with torch.no_grad():
        view.mul_(-2)
    assert not torch.allclose(attention(*args), before)
    assert any(view.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in attention.parameters())


def test_each_matrix_starts_with_the_spread_of_its_own_size() -> None:
    """Xavier's bound depends on a matrix's shape: joined in memory they would all get another."""
    attention = MultiHeadAttention(64, 8, 2)
    for w in (attention.w_q, attention.w_k, attention.w_v, attention.w_o.weight):
        bound = (6 / sum(w.shape)) ** 0.5
        assert 0.95 * bound < w.abs().max() <= bound
    assert (attention.w_qkv.bias == 0).all()


# ---- cross


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "auto"])
def test_looks_at_a_memory_of_other_width_and_length(backend: str) -> None:
    attention = MultiHeadAttention(M, H, 2, cross=True, d_memory=10, backend=backend)
    x, memory, lengths = tokens(), tokens(5, 10), torch.tensor([5, 3])
    q = (x @ attention.w_q.T).unflatten(-1, (H, D)).transpose(1, 2)
    k, v = ((memory @ w.T).unflatten(-1, (2, D)).transpose(1, 2) for w in (attention.w_k, attention.w_v))
    wanted = attend(q, k, v, mask=masks.padding(lengths), backend="reference").output.transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x, memory, mask=masks.padding(lengths)), attention.w_o(wanted))


def test_cross_attention_remembers_its_memory() -> None:
    attention, cache = MultiHeadAttention(M, H, cross=True, d_memory=10, qk_norm=RMSNorm), CrossCache()
    x, memory = tokens(), tokens(5, 10)
    wanted = attention(x, memory)
    steps = [attention(x[:, :3], memory, cache=cache), *(attention(x[:, i : i + 1], cache=cache) for i in range(3, T))]
    torch.testing.assert_close(torch.cat(steps, 1), wanted)


# ---- causal, cached


def attention_with(**options: Any) -> MultiHeadAttention:
    made = MultiHeadAttention(M, H, 2, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.eval()


SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "rope": {"rope": Rope(D)},
    "rope and norm": {"rope": Rope(D), "qk_norm": RMSNorm},
    "alibi": {"position_bias": Alibi(H)},
    "t5": {"position_bias": T5Bias(H, n_buckets=8, max_distance=6, bidirectional=False)},
    "xl": {"position_bias": XLRelative(H, D)},
    "additive": {"mechanism": Additive(H, D)},
}


def caches(dtype: torch.dtype = torch.float32) -> dict[str, Cache]:
    return {
        "growing": GrowingCache(),
        "static": StaticCache(B, 2, 12, D, dtype),
        "ring": RingCache(B, 2, T, D, dtype),
    }


def test_causal_means_that_later_tokens_change_nothing() -> None:
    attention, x = attention_with(rope=Rope(D)), tokens()
    changed = torch.cat([x[:, :5], tokens(T - 5)], 1)
    before, after = (attention(y, mask=masks.causal()) for y in (x, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", caches())
@pytest.mark.parametrize("split", [[1] * T, [4, 1, 1, 3], [T]], ids=str)
def test_cached_equals_uncached(scheme: str, kind: str, split: list[int]) -> None:
    attention, cache, x = attention_with(**copy.deepcopy(SCHEMES[scheme])), caches()[kind], tokens()
    with torch.no_grad():
        steps = [attention(part, mask=masks.causal(), cache=cache) for part in x.split(split, dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), attention(x, mask=masks.causal()), rtol=1e-4, atol=1e-5)


def test_ring_cache_equals_a_window() -> None:
    attention, cache, x = attention_with(rope=Rope(D)), RingCache(B, 2, 4, D), tokens()
    mask = masks.window(4)
    with torch.no_grad():
        steps = [attention(part, mask=mask, cache=cache) for part in x.split([2, 1, 1, 3, 2], dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), attention(x, mask=mask), rtol=1e-4, atol=1e-5)


def test_gradients_flow_through_a_growing_cache() -> None:
    attention, x = attention_with(rope=Rope(D)), tokens().requires_grad_()
    cache = GrowingCache()
    steps = [attention(part, mask=masks.causal(), cache=cache) for part in x.split([4, 5], dim=1)]
    whole = attention(x, mask=masks.causal())
    upstream = torch.randn_like(whole)
    ours, wanted = (torch.autograd.grad(y, x, upstream)[0] for y in (torch.cat(steps, 1), whole))
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


# ---- where tokens stand


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_marked_in_positions_changes_nothing(scheme: str, causal: bool) -> None:
    """-1 marks padding: a sequence padded on the left or the right gives what it gives alone."""
    attention, x = attention_with(**copy.deepcopy(SCHEMES[scheme])), tokens()
    positions = torch.tensor([[-1, -1, -1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, -1, -1, -1, -1]])
    mask = masks.causal() if causal else None
    with torch.no_grad():
        found = attention(x, positions=positions, mask=mask)
        for row in range(B):
            real = positions[row] >= 0
            alone = attention(x[row : row + 1, real], mask=mask)
            torch.testing.assert_close(found[row : row + 1, real], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "t5"])
def test_relative_schemes_do_not_care_where_the_text_begins(scheme: str) -> None:
    attention, x = attention_with(**copy.deepcopy(SCHEMES[scheme])), tokens()
    here, there = (attention(x, positions=torch.arange(T) + start, mask=masks.causal()) for start in (0, 50))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(here, attention(x, mask=masks.causal()), rtol=1e-4, atol=1e-5)


def test_a_frame_says_it_all() -> None:
    attention, x = attention_with(rope=Rope(D)), tokens()
    frame = Frame.aligned(B, H, T, T).with_documents(torch.arange(T) // 5)
    packed = attention(x, frame=frame, mask=masks.causal() & masks.document())
    parts = [attention(part, mask=masks.causal()) for part in x.split(5, dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-4, atol=1e-5)


def test_a_shared_bias_is_given_with_the_call() -> None:
    """T5's first layer owns the bias, the others are handed it."""
    bias: Bias = T5Bias(H)
    owner, other = MultiHeadAttention(M, H, position_bias=bias), MultiHeadAttention(M, H)
    other.load_state_dict({k: v for k, v in owner.state_dict().items() if "bias.w" not in k})
    x = tokens()
    assert torch.equal(owner(x), other(x, position_bias=bias))
    assert not torch.equal(owner(x), other(x))


# ---- options


def test_norms_come_before_rope() -> None:
    attention, x = MultiHeadAttention(M, H, rope=Rope(D), qk_norm=RMSNorm), tokens()
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    nn.init.uniform_(attention.q_norm.weight)
    q, k, v = (y.transpose(1, 2) for y in attention.w_qkv(x).unflatten(-1, (3, H, D)).unbind(2))
    q, k = (F.rms_norm(y, (D,), n.weight, n.eps) for y, n in ((q, attention.q_norm), (k, attention.k_norm)))
    rope, at = attention.rope, torch.arange(T)
    wanted = attend(rope(q, at), rope(k, at), v).output.transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x), attention.w_o(wanted))


def test_a_scale_is_the_mechanisms() -> None:
    attention = MultiHeadAttention(M, H, mechanism=Dot(scale=0.0))
    x = tokens()
    mean = (x @ attention.w_v.T).mean(1, keepdim=True).expand(-1, T, -1)  # scores of 0: everyone sees everyone alike
    torch.testing.assert_close(attention(x), attention.w_o(mean))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("options", [{"cross": True}, {"rope": Rope(D)}, {"position_bias": T5Bias(H)}])
def test_builds_on_meta_and_compiles_whole(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        MultiHeadAttention(M, H, **copy.deepcopy(options))
    attention = MultiHeadAttention(M, H, 2, **options)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    args = (tokens(), tokens(5)) if attention.cross else (tokens(),)
    torch.testing.assert_close(compiled(*args, mask=masks.causal()), attention(*args, mask=masks.causal()))


def test_prints_what_it_is() -> None:
    assert "4/2 heads of 6, backend=auto, cross" in repr(MultiHeadAttention(M, H, 2, cross=True))
    assert "4 heads of 6, backend=tiled" in repr(MultiHeadAttention(M, H, backend="tiled"))
