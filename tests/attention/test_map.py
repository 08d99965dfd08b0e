"""AttentionMap: whatever it is asked, its answer is that of the whole matrix, which it never makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.attention import Additive, Concat, Frame, General, Mechanism, explain, masks
from regard.attention.attend import prepare
from regard.attention.attention_map import AttentionMap
from regard.attention.biases import Alibi, Bias, DenseBias, Sum, T5Bias, XLRelative
from regard.attention.linear_attention import Linear, Performer
from regard.attention.mask import plan
from regard.attention.masks import Mask
from regard.attention.score_matrix import ScoreMatrix
from regard.attention.tiled import tiled_with_lse
from regard.attention.token_mixing import Linformer

B, H, G, T, S, D = 2, 4, 2, 19, 23, 6
GAPPY = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(1)) < 0.3
GAPPY[:, :, 3] = False  # a row without keys
MASKS: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "causal": masks.causal,
    "padding": lambda: masks.padding(torch.tensor([S, 5])),
    "causal & padding": lambda: masks.causal() & masks.padding(torch.tensor([S, 5])),
    "window": lambda: masks.window(3),
    "window ahead": lambda: masks.window(2, ahead=4),
    "prefix": lambda: masks.causal() | masks.prefix(6),
    "dilated": lambda: masks.dilated(3, 2),
    "strided": lambda: masks.strided(4),
    "fixed": lambda: masks.fixed(4),
    "blocks": lambda: masks.blocks(4, neighbours=1),
    "bigbird": lambda: masks.bigbird(4, 1, 20.0),
    "not causal": lambda: ~masks.causal(),
    "gappy": lambda: masks.from_dense(GAPPY),
}
BIASES: dict[str, Callable[[int, int, int, int, int], Bias]] = {
    "alibi": lambda b, h, t, s, d: Alibi(h),
    "t5": lambda b, h, t, s, d: T5Bias(h, n_buckets=8, max_distance=12),
    "dense": lambda b, h, t, s, d: DenseBias(heads(b, 1, t, s, seed=5)),
    "xl": lambda b, h, t, s, d: trained(XLRelative(h, d)),
    "sum": lambda b, h, t, s, d: Sum(trained(XLRelative(h, d)), Alibi(h)),
}
MECHANISMS: dict[str, Callable[[int, int, int, int], Mechanism]] = {
    "general": lambda h, g, s, d: General(h, d),
    "additive": lambda h, g, s, d: Additive(h, d),
    "concat": lambda h, g, s, d: Concat(h, d, d_hidden=d + 1),
    "linear": lambda h, g, s, d: Linear(),
    "performer": lambda h, g, s, d: Performer(d, n_features=9),
    "linformer": lambda h, g, s, d: Linformer(s, max(1, s // 2), n_heads=g),
}


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(bias: Bias) -> Bias:
    """A bias whose every parameter counts: some start at 0."""
    for n, p in enumerate(bias.parameters()):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(n))
    return bias


def double(x: Any) -> Any:
    return x.double() if isinstance(x, nn.Module) else x


@contextmanager
def blocks_of(height: int, width: int) -> Iterator[None]:
    """Blocks small enough that small maps have many."""
    with mock.patch.object(ScoreMatrix, "plan", lambda self: plan(self.mask, self.frame, (height, width))):
        yield


def weights_of(q: Tensor, k: Tensor, mask: Mask | None = None, bias: Bias | None = None, **options: Any) -> Tensor:
    return explain(q, k, k, mask=mask, bias=bias, **options).weights.detach()


def pooled(weights: Tensor, h: int, w: int, reduce: str) -> Tensor:
    cells = [row.tensor_split(w, -1) for row in weights.tensor_split(h, -2)]
    one = (lambda x: x.mean((-1, -2))) if reduce == "mean" else (lambda x: x.amax((-1, -2)))
    return torch.stack([torch.stack([one(cell) for cell in row], -1) for row in cells], -2)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def every_answer_is_that_of(weights: Tensor, make: Callable[[], AttentionMap]) -> None:
    """Each question to a fresh map, which knows no normalisers yet, and to one that has been asked before."""
    asked = make()
    n_queries, n_keys = weights.shape[-2:]
    assert asked.shape == weights.shape
    some = torch.tensor([n_queries - 1, 0, n_queries // 2, 0])
    few = max(1, n_keys // 3)
    for fresh in (True, False):

        def answer(fresh: bool = fresh) -> AttentionMap:
            return make() if fresh else asked

        close(answer().tile(some, slice(n_keys // 3, None)), weights[:, :, some, n_keys // 3 :])
        close(answer().row(n_queries // 2), weights[:, :, n_queries // 2])
        close(answer().entropy(), torch.special.entr(weights).sum(-1))
        close(answer().column_sums(), weights.sum(-2))
        x = heads(*weights.shape[:2], 2, n_queries).to(weights)
        close(answer().push(x), x @ weights)
        for reduce in ("mean", "max"):
            for h, w in ((1, 1), (n_queries, n_keys), (max(1, n_queries // 2), max(1, n_keys // 3))):
                close(answer().pooled(h, w, reduce), pooled(weights, h, w, reduce))
        ranked_like(weights, answer(), few)
        close(answer().dense(), weights)


def ranked_like(weights: Tensor, answer: AttentionMap, k: int) -> None:
    ranked = answer.top(k)
    close(ranked.values, weights.topk(k).values)
    # The dense matrix may hold the 1e-300s that a walk in units of the largest weight rounds away.
    assert torch.equal(ranked.indices == -1, ranked.values == 0)
    close(weights.gather(-1, ranked.indices.clamp(min=0)).masked_fill(ranked.indices == -1, 0), ranked.values)
    rows = torch.tensor([weights.shape[2] - 1, 0])
    close(answer.top(k, rows).values, ranked.values[:, :, rows])


# ---- every mask, bias and mechanism


@pytest.mark.parametrize("name", MASKS)
def test_under_every_mask(name: str) -> None:
    q, k, mask = heads(B, H, T, D), heads(B, G, S, D, seed=1), MASKS[name]()
    weights = weights_of(q, k, mask)
    with blocks_of(5, 7):
        every_answer_is_that_of(weights, lambda: AttentionMap(q, k, mask))


@pytest.mark.parametrize("mask", ["none", "causal", "gappy"])
@pytest.mark.parametrize("name", BIASES)
def test_with_every_bias(name: str, mask: str) -> None:
    q, k = heads(B, H, T, D), heads(B, G, S, D, seed=1)
    bias = double(BIASES[name](B, H, T, S, D))
    weights = weights_of(q, k, MASKS[mask](), bias)
    with blocks_of(5, 7):
        every_answer_is_that_of(weights, lambda: AttentionMap(q, k, MASKS[mask](), bias))


@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_of_every_mechanism(name: str, mask: str) -> None:
    q, k = heads(B, H, T, D), heads(B, G, S, D, seed=1)
    mechanism = double(MECHANISMS[name](H, G, S, D))
    weights = weights_of(q, k, MASKS[mask](), mechanism=mechanism)
    assert weights.shape[-1] == (S // 2 if name == "linformer" else S)
    with blocks_of(5, 7):
        every_answer_is_that_of(weights, lambda: AttentionMap(q, k, MASKS[mask](), mechanism=mechanism))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ragged_shapes(data: st.DataObject) -> None:
    sizes = st.integers(1, 30)
    b, group, g, t, s, d = (data.draw(st.integers(1, n)) for n in (2, 3, 2, 30, 30, 5))
    h = g * group
    q, k = heads(b, h, t, d), heads(b, g, s, d, seed=1)
    mask = data.draw(st.sampled_from([None, masks.causal(), masks.window(4), masks.padding(torch.full((b,), s // 2))]))
    bias = data.draw(st.sampled_from([None, *BIASES]))
    made = None if bias is None else double(BIASES[bias](b, h, t, s, d))
    with blocks_of(data.draw(sizes), data.draw(sizes)):
        every_answer_is_that_of(weights_of(q, k, mask, made), lambda: AttentionMap(q, k, mask, made))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_tile(data: st.DataObject) -> None:
    def pick(total: int) -> tuple[Any, list[int]]:
        """Some rows or columns, and the same ones counted out."""
        if data.draw(st.booleans()):
            indices = data.draw(st.lists(st.integers(-total, total - 1), max_size=5))
            as_given = data.draw(st.sampled_from([list, tuple, lambda x: torch.tensor(x, dtype=torch.long)]))
            return as_given(indices), [i % total for i in indices]
        ends = st.one_of(st.none(), st.integers(-total - 1, total + 1))
        some = data.draw(st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, -1])))
        return some, list(range(total))[some]

    q, k, bias = heads(B, H, T, D), heads(B, G, S, D, seed=1), double(trained(XLRelative(H, D)))
    (rows, i), (cols, j) = pick(T), pick(S)
    expected = weights_of(q, k, masks.causal(), bias)[:, :, i][..., j]
    with blocks_of(5, 7):
        close(AttentionMap(q, k, masks.causal(), bias).tile(rows, cols), expected)


def test_boolean_and_zero_dimensional_picks() -> None:
    q, k = heads(B, H, T, D), heads(B, H, S, D, seed=1)
    weights, odd = weights_of(q, k), torch.arange(T) % 2 == 1
    close(AttentionMap(q, k).tile(odd, torch.tensor(4)), weights[:, :, odd, 4:5])


@pytest.mark.parametrize("nothing", [slice(3, 3), [], torch.zeros(T, dtype=torch.bool)])
def test_picks_of_nothing(nothing: Any) -> None:
    attention = AttentionMap(heads(B, H, T, D), heads(B, H, T, D, seed=1))
    assert attention.tile(nothing).shape == (B, H, 0, T)
    assert attention.tile(cols=nothing).shape == (B, H, T, 0)
    assert attention.tile(nothing, nothing).shape == (B, H, 0, 0)


# ---- where queries and keys stand


@pytest.mark.parametrize("bias", [None, "t5", "xl"])
def test_slots_of_a_ring_cache(bias: str | None) -> None:
    q, k = heads(B, H, 3, D), heads(B, G, 8, D, seed=1)
    slots = torch.tensor([8, 9, 10, 3, 4, 5, 6, 7]).expand(B, -1).clone()
    slots[1, 2] = -1  # not written yet
    frame = Frame(B, H, torch.tensor([8, 9, 10]), slots, limit=12)
    made = None if bias is None else double(BIASES[bias](B, H, 3, 8, D))
    weights = weights_of(q, k, masks.window(6), made, frame=frame)
    assert (weights[1, :, :, 2] == 0).all()
    with blocks_of(2, 3):
        every_answer_is_that_of(weights, lambda: AttentionMap(q, k, masks.window(6), made, frame=frame))


def test_packed_documents() -> None:
    q, k = heads(B, H, T, D), heads(B, G, T, D, seed=1)
    documents = torch.stack([torch.arange(T) // 4, torch.arange(T) // 7])
    frame = Frame.of(q, k).with_documents(documents)
    mask = masks.document() & masks.causal()
    with blocks_of(5, 7):
        every_answer_is_that_of(weights_of(q, k, mask, frame=frame), lambda: AttentionMap(q, k, mask, frame=frame))


@pytest.mark.parametrize("level", [-3000.0, 3000.0])
def test_scores_far_from_zero(level: float) -> None:
    """exp of them is 0 or infinite; and under a window a row's first block may hold nothing to see."""
    q, k = heads(1, 1, T, D).float(), heads(1, 1, T, D, seed=1).float()
    bias = DenseBias(torch.full((T, T), level) + torch.arange(T) * 20.0)
    weights = weights_of(q, k, masks.window(9), bias)
    with blocks_of(8, 3):
        for map in (AttentionMap(q, k, masks.window(9), bias),) * 2:
            close(map.pooled(4, 5), pooled(weights, 4, 5, "mean"), 1e-5)
            close(map.pooled(4, 5, "max"), pooled(weights, 4, 5, "max"), 1e-5)
            close(map.entropy(), torch.special.entr(weights).sum(-1), 1e-5)
            close(map.column_sums(), weights.sum(-2), 1e-5)
            close(map.top(4).values, weights.topk(4).values, 1e-5)
            close(map.dense(), weights, 1e-5)


def test_rows_without_keys_are_zero() -> None:
    map = AttentionMap(heads(1, 2, 7, D), heads(1, 2, 4, D), masks.causal())  # the first three queries precede all keys
    with blocks_of(2, 2):
        assert (map.dense()[:, :, :3] == 0).all()
        assert (map.dense()[:, :, 3:].sum(-1) - 1).abs().max() < 1e-12
        assert (map.entropy()[:, :, :4] == 0).all()
        assert (map.top(2, slice(0, 3)).indices == -1).all()
        assert map.top(2, 3).indices[0, 0, 0].tolist() == [0, -1]
        assert torch.isfinite(map.pooled(3, 2)).all()


# ---- a snapshot


def spoil(module: nn.Module | Mechanism) -> None:
    assert isinstance(module, nn.Module)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()


@pytest.mark.parametrize("name", ["t5", "xl", "sum"])
def test_training_the_bias_does_not_change_the_map(name: str) -> None:
    q, k, bias = heads(B, H, T, D), heads(B, G, S, D, seed=1), double(BIASES[name](B, H, T, S, D))
    weights = weights_of(q, k, bias=bias)
    map = AttentionMap(q, k, bias=bias)
    spoil(bias)
    close(map.dense(), weights)
    close(map.head(1, 2).dense(), weights[1:, 2:3])
    assert not torch.allclose(AttentionMap(q, k, bias=bias).dense(), weights)


@pytest.mark.parametrize("name", ["general", "additive", "concat", "performer", "linformer"])
def test_training_the_mechanism_does_not_change_the_map(name: str) -> None:
    q, k, mechanism = heads(B, H, T, D), heads(B, G, S, D, seed=1), double(MECHANISMS[name](H, G, S, D))
    weights = weights_of(q, k, mechanism=mechanism)
    map = AttentionMap(q, k, mechanism=mechanism)
    if isinstance(mechanism, Performer):
        mechanism.redraw(1)
    else:
        spoil(mechanism)
    close(map.head(0, 3).dense(), weights[:1, 3:])
    close(map.dense(), weights)


def test_a_dense_bias_is_copied_when_it_can_be_trained_and_shared_when_not() -> None:
    q, k, values = heads(1, 1, T, D), heads(1, 1, S, D, seed=1), heads(T, S, seed=2)
    leaf = values.clone().requires_grad_()
    weights = weights_of(q, k, bias=DenseBias(values))
    for given_bias in (leaf, leaf * 1):  # a parameter, and the output of a layer
        map = AttentionMap(q, k, bias=given_bias)
        with torch.no_grad():
            given_bias.add_(heads(T, S, seed=3))
        close(map.dense(), weights)
        with torch.no_grad():
            given_bias.copy_(values)
    map = AttentionMap(q, k, bias=values)
    assert map._walk.operands[1][0].data_ptr() == values.data_ptr()


def test_nothing_of_the_graph_is_kept() -> None:
    q, bias = heads(1, H, T, D).requires_grad_(), T5Bias(H).double()
    map = AttentionMap(q * 2, q * 3, masks.causal(), bias)
    assert not any(x.requires_grad for x in (map.dense(), map.entropy(), map.pooled(2, 2), map.head(0, 1).dense()))


def test_made_in_inference_mode_and_asked_outside_of_it_or_the_other_way_round() -> None:
    q, k, bias = heads(1, H, T, D), heads(1, H, T, D, seed=1), T5Bias(H).double()
    weights = weights_of(q, k, masks.causal(), bias)
    with torch.inference_mode():
        map = AttentionMap(q * 1, k * 1, masks.causal(), bias)
        head = map.head(0, 1)
        close(map.tile(slice(0, 5), slice(0, 5)), weights[:, :, :5, :5])
    close(head.dense(), weights[:, 1:2])
    close(map.pooled(3, 4), pooled(weights, 3, 4, "mean"))
    loss = (map.dense() * heads(1, H, T, T).requires_grad_()).sum()
    loss.backward()  # an answer is an ordinary constant
    with torch.inference_mode():
        close(AttentionMap(q, k, masks.causal(), bias).entropy(), torch.special.entr(weights).sum(-1))


# ---- ways to make one


@pytest.mark.parametrize("name", MECHANISMS)
def test_made_of_a_call_or_of_prepared_inputs(name: str) -> None:
    q, k, mechanism = heads(B, H, T, D), heads(B, G, S, D, seed=1), double(MECHANISMS[name](H, G, S, D))
    call = prepare(q, k, k, mechanism=mechanism)
    weights = weights_of(q, k, mechanism=mechanism)
    close(AttentionMap.of(call).dense(), weights)
    again = AttentionMap(call.q, call.k, mechanism=mechanism, frame=call.frame, prepared=True)
    close(again.dense(), weights)


def test_prepared_inputs_with_a_scale() -> None:
    q, k = heads(B, H, T, D), heads(B, G, S, D, seed=1)
    close(AttentionMap(q, k, scale=0.3, prepared=True).dense(), weights_of(q, k, scale=0.3))
    close(AttentionMap(q, k, scale=0.3).dense(), weights_of(q, k, scale=0.3))


@pytest.mark.parametrize("sign", [1, -1])
def test_normalisers_that_a_kernel_knows_are_not_computed_again(sign: int) -> None:
    q, k, bias = heads(B, H, T, D), heads(B, G, S, D, seed=1), T5Bias(H).double()
    mask = masks.from_dense(GAPPY)
    call = prepare(q, k, k, mask, bias)
    lse = tiled_with_lse(call)[1]
    assert torch.isinf(lse).any()
    lse = torch.where(torch.isinf(lse), sign * lse, lse)  # kernels differ in how they mark a row without keys
    map = AttentionMap.of(call, lse=lse)
    with scored_pairs() as pairs:
        close(map.tile(slice(3, 9), slice(2, 7)), weights_of(q, k, mask, bias)[:, :, 3:9, 2:7])
    assert sum(pairs) == 6 * 5
    every_answer_is_that_of(weights_of(q, k, mask, bias), lambda: AttentionMap.of(call, lse=lse))


def test_half_precision_is_read_in_single() -> None:
    q, k = heads(1, H, T, D).bfloat16(), heads(1, H, T, D, seed=1).bfloat16()
    bias = T5Bias(H)
    map = AttentionMap(q, k, masks.causal(), bias)
    assert map.dense().dtype == torch.float32
    close(map.dense(), weights_of(q.float(), k.float(), masks.causal(), bias), 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(AttentionMap(q, k, masks.causal(), bias).dense(), map.dense())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("bias", [None, *BIASES])
def test_on_a_gpu(bias: str | None) -> None:
    q, k = heads(B, H, T, D).cuda(), heads(B, G, S, D, seed=1).cuda()
    made = None if bias is None else double(BIASES[bias](B, H, T, S, D)).cuda()
    if isinstance(made, DenseBias):
        made = DenseBias(made.values.cuda())
    mask = (masks.causal() & masks.padding(torch.tensor([S, 5]))).to("cuda")
    weights = weights_of(q, k, mask, made)
    close(AttentionMap(q, k, mask, made).head(1, 2).dense(), weights[1:, 2:3])
    with blocks_of(5, 7):
        every_answer_is_that_of(weights, lambda: AttentionMap(q, k, mask, made))


# ---- fewer heads


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("bias", [None, "t5", "xl", "dense"])
def test_every_part(bias: str | None, key_heads: int) -> None:
    b, h = 3, 6
    q, k = heads(b, h, T, D), heads(b, key_heads, S, D, seed=1)
    made = None if bias is None else double(BIASES[bias](b, h, T, S, D))
    mask = masks.causal() & masks.padding(torch.tensor([S, 20, 7]))
    weights = weights_of(q, k, mask, made)
    map = AttentionMap(q, k, mask, made)
    for first in range(h):
        for last in range(first + 1, h + 1):
            close(map.part(batch=slice(1, 3), heads=range(first, last)).dense(), weights[1:, first:last])
    close(map.head(-1, -1).dense(), weights[2:, 5:])
    close(map.part(heads=slice(1, 5)).part(batch=2, heads=slice(1, 3)).dense(), weights[2:, 2:4])
    close(map.part().entropy(), torch.special.entr(weights).sum(-1))


def test_a_part_and_its_whole_share_what_they_know() -> None:
    map = AttentionMap(heads(B, H, T, D), heads(B, H, S, D, seed=1))
    for b in range(B):
        for h in range(H):
            map.head(b, h).entropy()
    assert map.head(0, 1) is map.head(0, 1)
    with scored_pairs() as pairs:
        map.tile(slice(0, 2), slice(0, 2))
    assert sum(pairs) == 4


# ---- work and memory


@contextmanager
def scored_pairs() -> Iterator[list[int]]:
    """How many (query, key) pairs are scored, tile by tile."""
    pairs: list[int] = []
    tile = ScoreMatrix.tile

    def counting(self: ScoreMatrix, *args: Any, **kwargs: Any) -> Tensor:
        made = tile(self, *args, **kwargs)
        pairs.append(made.shape[-1] * made.shape[-2])
        return made

    with mock.patch.object(ScoreMatrix, "tile", counting):
        yield pairs


class Largest(TorchDispatchMode):
    """The largest tensor that any operation hands back, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


LONG = 8192
QUESTIONS: dict[str, Callable[[AttentionMap], object]] = {
    "tile": lambda map: map.tile(slice(-256, None), slice(1000, 1256)),
    "row": lambda map: map.row(LONG // 2),
    "top": lambda map: map.top(5, slice(0, LONG // 2)),
    "top, scattered": lambda map: map.top(100, torch.arange(0, LONG, 64)),
    "entropy": lambda map: map.entropy(),
    "column_sums": lambda map: map.column_sums(),
    "pooled": lambda map: map.pooled(64, 64),
    "pooled, unevenly": lambda map: map.pooled(3, 700, "max"),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("bias", ["t5", "xl"])
def test_no_tensor_is_quadratic(bias: str, question: str) -> None:
    torch.manual_seed(0)
    mask = masks.window(300)
    map = AttentionMap(torch.randn(1, 1, LONG, 4), torch.randn(1, 1, LONG, 4), mask, BIASES[bias](1, 1, LONG, LONG, 4))
    with Largest() as largest:
        QUESTIONS[question](map)
    assert largest.elements <= LONG * LONG / 16  # 1 << 20 in a tile, 1 << 22 in this limit: 512 numbers a token


def test_blocks_that_the_mask_empties_are_not_scored() -> None:
    q = heads(1, 1, 1024, 2)
    for mask, share in ((None, 1.0), (masks.causal(), 0.6), (masks.window(64), 0.2)):
        for ask in (AttentionMap.entropy, lambda map: map.pooled(64, 64), AttentionMap.dense):
            with blocks_of(64, 64), scored_pairs() as pairs:
                map = AttentionMap(q, q, mask)
                map.lse()
                del pairs[:]
                ask(map)
            assert 0 < sum(pairs) <= share * 1024 * 1024


def test_a_pass_scores_each_pair_once() -> None:
    q = heads(1, 2, 200, 4)
    for ask in (
        lambda map: map.pooled(7, 11),
        lambda map: map.pooled(50, 3, "max"),
        lambda map: map.entropy(),
        lambda map: map.top(3),
        lambda map: map.lse(),
    ):
        with blocks_of(32, 16), scored_pairs() as pairs:
            ask(AttentionMap(q, q))
        assert sum(pairs) == 200 * 200


def test_what_starts_at_one_query_costs_one_stripe() -> None:
    q = heads(1, 1, 256, 4)
    x = F.one_hot(torch.tensor(100), 256).double().view(1, 1, 1, -1)
    with blocks_of(32, 32), scored_pairs() as pairs:
        close(AttentionMap(q, q).push(x)[0, 0], weights_of(q, q)[0, 0, 100:101])
    assert sum(pairs) == 2 * 32 * 256


# ---- bad input


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda map: map.row(T), f"rows={T} is out of range for size {T}"),
        (lambda map: map.tile(0, [0, -S - 1]), f"cols={-S - 1} is out of range for size {S}"),
        (
            lambda map: map.tile(torch.zeros(2, 2).long()),
            r"rows must be integers in one dimension, got .*\(2, 2\)",
        ),
        (lambda map: map.top(S + 1), f"top k={S + 1} must lie between 1 and the {S} keys"),
        (lambda map: map.pooled(T + 1, 1), f"pooled h={T + 1} must lie between 1 and the {T} queries"),
        (lambda map: map.pooled(1, 0), f"pooled w=0 must lie between 1 and the {S} keys"),
        (lambda map: map.pooled(1, 1, "median"), "reduce='median' is neither 'mean' nor 'max'"),
        (lambda map: map.head(B, 0), f"batch={B} is out of range for size {B}"),
        (lambda map: map.part(heads=slice(0, 0)), f"heads=.* must be one index or a contiguous range within {H}"),
        (lambda map: map.push(torch.zeros(B, H, T)), f"does not fit .* = \\({B}, {H}, any, {T}\\)"),
        (lambda map: map.push(torch.zeros(B, H, 1, T), stay=True), f"got {S} keys and {T} queries"),
    ],
)
def test_bad_questions(ask: Callable[[AttentionMap], object], sentence: str) -> None:
    map = AttentionMap(heads(B, H, T, D), heads(B, G, S, D))
    with pytest.raises(ValueError, match=sentence):
        ask(map)


def test_bad_maps() -> None:
    q, k = heads(B, H, T, D), heads(B, G, S, D)
    with pytest.raises(ValueError, match=r"lse of shape \(1,\) does not fit"):
        AttentionMap(q, k, lse=torch.zeros(1))
    with pytest.raises(ValueError, match="q has 4 heads, which is not a multiple of the 3 key heads"):
        AttentionMap(q, heads(B, 3, S, D))
    for prepared in (True, False):
        with pytest.raises(ValueError, match=r"scale=1\.0 applies only to the scaled dot product"):
            AttentionMap(q, k, scale=1.0, mechanism=Linear(), prepared=prepared)
    with pytest.raises(ValueError, match="mask from_dense"):
        AttentionMap(q, k, torch.ones(2, 2, dtype=torch.bool), prepared=True)

    class Mixing(Linear):
        name = "mixing"
        normaliser = "none"

    with pytest.raises(
        ValueError, match="mechanism 'mixing' has normaliser='none', which is not 'softmax' or 'linear'"
    ):
        AttentionMap(q, k, mechanism=Mixing())
