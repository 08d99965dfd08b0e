"""Linear attention: the O(T) form equals the formula, under every mask it takes and wherever queries and keys stand."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from regard.attention import Frame, attend, masks
from regard.attention.linear_attention import Kernel, Linear, LinearState, Performer, orthogonal_gaussian
from regard.attention.masks import Mask
from regard.attention.score_matrix import ScoreMatrix
from regard.attention.token_mixing import approximation_error

linear_module = importlib.import_module("regard.attention.linear_attention")

MECHANISMS: dict[str, Callable[[int], Kernel]] = {
    "linear": lambda d_head: Linear(),
    "performer": lambda d_head: Performer(d_head, n_features=2 * d_head + 1).double(),
}
MASKS: dict[str, Callable[[Tensor], Mask | None]] = {
    "plain": lambda lengths: None,
    "causal": lambda lengths: masks.causal(),
    "padding": masks.padding,
    "causal & padding": lambda lengths: masks.causal() & masks.padding(lengths),
    "padding & causal & padding": lambda lengths: (
        masks.padding(lengths) & (masks.causal() & masks.padding(lengths.clamp(max=3)))
    ),
}
ragged = settings(max_examples=40, deadline=None)
sizes = st.integers(1, 23)


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    with mock.patch.object(linear_module, "CHUNK", size):
        yield


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(b: int, h: int, g: int, t: int, s: int, d: int, seed: int = 0) -> list[Tensor]:
    shapes = ((b, h, t, d), (b, g, s, d), (b, g, s, d + 1))
    return [heads(*shape, seed=seed + n).requires_grad_() for n, shape in enumerate(shapes)]


def output_and_gradients(backend: str, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, ...]:
    output = attend(q, k, v, backend=backend, **how).output
    return (output, *torch.autograd.grad(output, (q, k, v), heads(*output.shape, seed=9)))


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------- fast form = formula


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("mask", MASKS)
@ragged
@given(
    b=st.integers(1, 2),
    g=st.integers(1, 2),
    shared=st.integers(1, 3),
    t=sizes,
    s=sizes,
    d=st.integers(1, 5),
    data=st.data(),
)
def test_fast_form_is_the_formula(
    mechanism: str, mask: str, b: int, g: int, shared: int, t: int, s: int, d: int, data: st.DataObject
) -> None:
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, s), min_size=b, max_size=b)))
    q, k, v = inputs(b, g * shared, g, t, s, d)
    how = {"mask": MASKS[mask](lengths), "mechanism": MECHANISMS[mechanism](d)}
    with chunks_of(data.draw(st.sampled_from([1, 3, 8, 64]))):
        assert_same(output_and_gradients("linear", q, k, v, **how), output_and_gradients("reference", q, k, v, **how))


@pytest.mark.parametrize("mask", MASKS)
@ragged
@given(t=sizes, s=sizes, q_start=st.integers(-9, 30), k_start=st.integers(-4, 4), chunk=st.sampled_from([2, 5, 64]))
def test_any_steady_frame(mask: str, t: int, s: int, q_start: int, k_start: int, chunk: int) -> None:
    q, k, v = inputs(2, 2, 1, t, s, 3)
    frame = Frame.aligned(2, 2, t, s, q_start=q_start, k_start=k_start)
    how = {"mask": MASKS[mask](torch.tensor([s, s // 2])), "mechanism": Linear(), "frame": frame}
    with chunks_of(chunk):
        assert_same(output_and_gradients("linear", q, k, v, **how), output_and_gradients("reference", q, k, v, **how))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batched", [True, False])
def test_cache_slots_out_of_order_and_not_yet_written(mask: str, batched: bool) -> None:
    q, k, v = inputs(2, 4, 2, 3, 6, 4)
    k_pos = torch.tensor([[6, 7, 2, 3, 4, 5], [-1, 4, -1, 1, 0, 2]])
    q_pos = torch.tensor([[5, 6, 7], [0, 2, 4]])
    frame = Frame(2, 4, q_pos if batched else q_pos[1], k_pos if batched else k_pos[1])
    how = {"mask": MASKS[mask](torch.tensor([7, 3])), "mechanism": Linear(), "frame": frame}
    found = output_and_gradients("linear", q, k, v, **how)
    assert_same(found, output_and_gradients("reference", q, k, v, **how))
    assert (found[2][1, :, [0, 2]] == 0).all()  # slots where nothing stands


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("mask", MASKS)
def test_gradcheck(mechanism: str, mask: str) -> None:
    q, k, v = inputs(2, 2, 1, 5, 6, 2)
    how = {"mask": MASKS[mask](torch.tensor([5, 0])), "mechanism": MECHANISMS[mechanism](2), "backend": "linear"}
    with chunks_of(2):
        assert torch.autograd.gradcheck(lambda *x: attend(*x, **how).output, (q, k, v))


def test_gradients_of_gradients() -> None:
    q, k, v = inputs(1, 2, 1, 5, 5, 2)
    with chunks_of(2):
        assert torch.autograd.gradgradcheck(
            lambda *x: attend(*x, mask=masks.causal(), mechanism=Linear(), backend="linear").output, (q, k, v)
        )


def test_shared_key_heads_equal_repeated_ones() -> None:
    q, k, v = inputs(2, 6, 2, 70, 70, 4)
    how = {"mask": masks.causal(), "mechanism": Linear(), "backend": "linear"}
    repeated = attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), **how).output
    torch.testing.assert_close(attend(q, k, v, **how).output, repeated)


def test_auto_takes_the_fast_form_where_it_can() -> None:
    from regard.attention.attend import prepare
    from regard.attention.backends import choose

    q, k, v = inputs(1, 2, 2, 5, 5, 4)
    assert choose(prepare(q, k, v, masks.causal(), mechanism=Linear())) == "linear"
    assert choose(prepare(q, k, v, masks.window(2), mechanism=Linear())) == "reference"


# ------------------------------------------------------------------------- what must not matter


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("backend", ["linear", "reference"])
@pytest.mark.parametrize("cut", [1, 7, 64, 65, 128])
def test_the_future_changes_nothing(mechanism: str, backend: str, cut: int) -> None:
    q, k, v = (heads(1, 2, 130, 4, seed=n) for n in range(3))
    how = {"mask": masks.causal(), "mechanism": MECHANISMS[mechanism](4), "backend": backend}
    before = attend(q, k, v, **how).output[:, :, :cut]
    k[:, :, cut:], v[:, :, cut:] = 30 * heads(1, 2, 130 - cut, 4, seed=5), 1e6
    torch.testing.assert_close(attend(q, k, v, **how).output[:, :, :cut], before, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["linear", "reference"])
def test_no_key_to_come_makes_a_performer_forget_earlier_ones(backend: str) -> None:
    """With a maximum taken over all keys, the faint ones here would vanish in fp32 beside the strong one."""
    performer = Performer(64, 128)
    q, k, v = (heads(1, 1, 9, 64, seed=n, dtype=torch.float32) for n in range(3))
    k[:, :, :8] *= 4.5  # |k|²/2√D ≈ 80
    k[:, :, 8] = performer.omega[0] / performer.scale**0.5  # its first feature is as large as a feature can be
    how = {"mask": masks.causal(), "mechanism": performer, "backend": backend}
    before = attend(*(x[:, :, :8] for x in (q, k, v)), **how).output
    torch.testing.assert_close(attend(q, k, v, **how).output[:, :, :8], before)
    wide = attend(*(x[:, :, :8].double() for x in (q, k, v)), **how).output
    torch.testing.assert_close(before.double(), wide, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("backend", ["linear", "reference"])
@pytest.mark.parametrize("mask", ["padding", "causal & padding"])
def test_padding_changes_nothing(mechanism: str, backend: str, mask: str) -> None:
    q, k, v = (heads(2, 2, 70, 4, seed=n) for n in range(3))
    how = {"mask": MASKS[mask](torch.tensor([66, 3])), "mechanism": MECHANISMS[mechanism](4), "backend": backend}
    before = attend(q, k, v, **how).output
    for x in (k, v):
        x[0, :, 66:], x[1, :, 3:] = 50, -70
    torch.testing.assert_close(attend(q, k, v, **how).output, before, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("n_keys", [3, 80])
def test_rows_without_keys_are_zero_and_so_is_their_gradient(mechanism: str, n_keys: int) -> None:
    q, k, v = inputs(2, 2, 2, 9, n_keys, 4)
    mask = masks.causal() & masks.padding(torch.tensor([n_keys, 0]))
    output, d_q, d_k, d_v = output_and_gradients("linear", q, k, v, mask=mask, mechanism=MECHANISMS[mechanism](4))
    assert all(x.isfinite().all() for x in (output, d_q, d_k, d_v))
    assert all((x[1] == 0).all() for x in (output, d_q, d_k, d_v))  # no keys at all
    assert (output[0, :, : max(0, 9 - n_keys)] == 0).all()  # queries that stand before the first key
    assert (output[0, :, -1] != 0).all()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_implied_weights_sum_to_one_and_tiles_agree(mechanism: str) -> None:
    q, k, v = inputs(1, 4, 2, 12, 12, 4)
    kernel = MECHANISMS[mechanism](4)
    weights = attend(q, k, v, mask=masks.causal(), mechanism=kernel, weights=True).weights
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    recorded = ScoreMatrix(kernel.queries(q), kernel.keys(k), masks.causal(), None, kernel, Frame.of(q, k))
    tile = recorded.tile(slice(5, 9), slice(2, 7))
    assert (tile >= 0).all()
    torch.testing.assert_close(tile, recorded.tile()[:, :, 5:9, 2:7])
    torch.testing.assert_close(tile / recorded.tile(slice(5, 9)).sum(-1, keepdim=True), weights[:, :, 5:9, 2:7])


# ------------------------------------------------------------------------- one token at a time


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("bites", [[1] * 20, [7, 1, 1, 11], [20]], ids=str)
def test_state_decoding_equals_the_causal_form(mechanism: str, bites: list[int]) -> None:
    q, k, v = inputs(2, 4, 2, 20, 20, 4)
    kernel = MECHANISMS[mechanism](4)
    state = LinearState(kernel)
    assert state.state is None
    assert state.normaliser is None
    with chunks_of(4):
        output = torch.cat([state.update(*x) for x in zip(*(x.split(bites, 2) for x in (q, k, v)), strict=True)], 2)
    found = (output, *torch.autograd.grad(output, (q, k, v), heads(*output.shape, seed=9), retain_graph=True))
    assert_same(found, output_and_gradients("reference", q, k, v, mask=masks.causal(), mechanism=kernel))
    features = kernel.keys(k)
    torch.testing.assert_close(state.state, features.transpose(-1, -2) @ v)
    torch.testing.assert_close(state.normaliser, features.sum(2))


def test_state_refuses_what_does_not_fit() -> None:
    q, k, v = inputs(2, 2, 2, 3, 3, 4)
    with pytest.raises(TypeError, match="got Dot"):
        LinearState(importlib.import_module("regard.attention.mechanisms").Dot())
    state = LinearState(Linear())
    with pytest.raises(ValueError, match="q has 1 tokens but k has 3"):
        state.update(q[:, :, :1], k, v)
    state.update(q, k, v)
    with pytest.raises(ValueError, match=r"\(2, 2, 4, 6\), got \(1, 2, 4, 6\)"):
        state.update(q[:1], k[:1], v[:1])


# ------------------------------------------------------------------------- Performer's estimate


def test_random_features_are_orthogonal_within_a_block_and_gaussian() -> None:
    rows = orthogonal_gaussian(20, 8, torch.Generator().manual_seed(0))
    assert rows.shape == (20, 8)
    for block in rows.split(8):
        gram = block @ block.T
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()))
    many = orthogonal_gaussian(40_000, 8, torch.Generator().manual_seed(1))
    torch.testing.assert_close(many.T @ many / len(many), torch.eye(8).double(), atol=0.03, rtol=0)
    assert abs(float(many.norm(dim=1).square().var()) - 16) < 0.5  # chi-square with 8 degrees of freedom


def test_performer_is_unbiased_and_varies_no_more_than_it_says() -> None:
    q, k = 0.3 * heads(1, 1, 6, 8), 0.3 * heads(1, 1, 6, 8, seed=1)
    n_draws, m, root_scale = 2000, 32, 8**-0.25
    truth = torch.exp(q @ k.transpose(-1, -2) * root_scale**2)
    performer, draws = Performer(8, m).double(), []
    for seed in range(n_draws):
        performer.redraw(seed)
        draws.append(performer.features(q) @ performer.features(k).transpose(-1, -2))
    estimates = torch.stack(draws)
    z = (estimates.mean(0) - truth) / (estimates.std(0) / n_draws**0.5)
    assert z.abs().max() < 4.5
    assert 0.6 < z.square().mean().sqrt() < 1.5
    assert (estimates.mean(0) / truth - 1).abs().max() < 0.03
    together = (root_scale * (q[:, :, :, None] + k[:, :, None])).square().sum(-1)  # |q + k|²
    stated = ((together.exp() - 1) / m).sqrt()
    assert ((estimates.std(0) / truth) / stated).max() < 1.1


def small(n: int) -> Tensor:
    """q, k and v of the size Performer is for: half a standard deviation."""
    return (0.5 if n < 2 else 1.0) * heads(1, 2, 64, 16, seed=n)


def performer_error(n_features: int, mask: Mask | None = None, scale: float | None = None, times: float = 1.0) -> float:
    drawn = [Performer(16, n_features, scale, seed).double() for seed in range(12)]
    q, k, v = times * small(0), times * small(1), small(2)
    return sum(approximation_error(one, q, k, v, mask) for one in drawn) / len(drawn)


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["plain", "causal"])
def test_performer_error_falls_like_one_over_root_m(mask: Mask | None) -> None:
    errors = [performer_error(m, mask) for m in (64, 256, 1024, 4096)]
    assert all(1.6 < a / b < 2.6 for a, b in pairwise(errors)), errors
    assert errors[-1] < 0.06, errors


def test_performer_error_at_the_sizes_its_docstring_names() -> None:
    assert performer_error(1024) == pytest.approx(0.10, rel=0.2)
    assert performer_error(1024, times=2) == pytest.approx(0.9, rel=0.2)


def test_performer_estimates_softmax_of_its_own_scale() -> None:
    assert performer_error(1024, scale=0.1) < 0.06
    performer = Performer(16, 4096, scale=0.1).double()
    found = attend(small(0), small(1), small(2), mechanism=performer).output
    right, wrong = (attend(small(0), small(1), small(2), scale=scale).output for scale in (0.1, 0.3))
    assert (found - wrong).norm() > 5 * (found - right).norm()


def test_elu_is_a_kernel_of_its_own() -> None:
    """No width of features brings it nearer to softmax: it has none to choose."""
    assert approximation_error(Linear(), small(0), small(1), small(2)) > 3 * performer_error(4096)


def test_features_are_a_buffer_drawn_from_a_seed() -> None:
    a, b = Performer(8, 20, seed=3), Performer(8, 20, seed=4)
    assert not torch.equal(a.omega, b.omega)
    before = b.omega
    b.redraw(3)
    assert torch.equal(a.omega, b.omega)
    assert before.data_ptr() == b.omega.data_ptr()  # in place: optimisers, graphs and devices see the new ones
    assert list(a.state_dict()) == ["omega"]
    assert not list(a.parameters())


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 4.0, 20.0, 1e3])
@pytest.mark.parametrize("d_head", [16, 64, 256])
def test_performer_has_weights_and_gradients_in_fp32_whatever_the_size(size: float, d_head: int) -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in inputs(1, 1, 1, 70, 70, d_head))
    how = {"mask": masks.causal(), "mechanism": Performer(d_head, 128)}
    output = attend(size * q, size * k, v, backend="linear", **how).output
    output.sum().backward()
    assert all(x.isfinite().all() for x in (output, q.grad, k.grad, v.grad))
    weights = attend(size * q, size * k, v, weights=True, **how).weights
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    if size <= 4:
        wide = attend(*((size * x).double() for x in (q, k)), v.double(), **how).output
        torch.testing.assert_close(output.double(), wide, rtol=2e-3, atol=2e-3)


def test_a_query_that_shares_no_feature_with_any_key_has_gradients() -> None:
    performer = Performer(64, 128)
    away, there = performer.omega[:2] / performer.scale**0.5  # orthogonal
    q, k = ((size * x).expand(1, 1, 3, 64).clone().requires_grad_() for size, x in ((9, away), (1.5, there)))
    output = attend(q, k, torch.ones_like(k), mechanism=performer, backend="linear").output
    (output * heads(*output.shape, dtype=torch.float32)).sum().backward()
    torch.testing.assert_close(output, torch.ones_like(output))
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


# ------------------------------------------------------------------------- cost, dtypes, compilation


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["plain", "causal"])
def test_nothing_of_size_t_by_s_nor_t_by_d_squared_is_ever_held(mask: Mask | None) -> None:
    t, d = 4096, 32
    q, k, v = (heads(1, 1, t, d, seed=n, dtype=torch.float32).requires_grad_() for n in range(3))
    with _LargestTensor() as seen:
        attend(q, k, v, mask=mask, mechanism=Linear(), backend="linear").output.sum().backward()
    assert seen.numel <= t * 64 < t * d * d


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["plain", "causal"])
def test_work_is_proportional_to_length(mask: Mask | None) -> None:
    def flops(t: int) -> int:
        q, k, v = (heads(1, 1, t, 32, seed=n, dtype=torch.float32).requires_grad_() for n in range(3))
        with FlopCounterMode(display=False) as counter:
            attend(q, k, v, mask=mask, mechanism=Linear(), backend="linear").output.sum().backward()
        return counter.get_total_flops()

    assert flops(2048) == 2 * flops(1024) > 0


@pytest.mark.parametrize("mechanism", [Linear(), Performer(8, 32)], ids=["linear", "performer"])
def test_bfloat16_is_summed_in_fp32(mechanism: Kernel) -> None:
    q, k, v = (heads(1, 2, 300, 8, seed=n).bfloat16() for n in range(3))
    how = {"mask": masks.causal(), "mechanism": mechanism, "backend": "linear"}
    found = attend(q, k, v, **how).output
    assert found.dtype == torch.bfloat16
    exact = attend(q.double(), k.double(), v.double(), **how).output
    assert (found.double() - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("mechanism", [Linear(), Performer(8, 32)], ids=["linear", "performer"])
def test_autocast_does_not_round_what_is_summed(mechanism: Kernel) -> None:
    q, k, v = (heads(1, 2, 100, 8, seed=n, dtype=torch.float32) for n in range(3))
    how = {"mask": masks.causal(), "mechanism": mechanism, "backend": "linear"}
    plain, one_by_one = attend(q, k, v, **how).output, LinearState(mechanism)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attend(q, k, v, **how).output, plain)
        torch.testing.assert_close(one_by_one.update(q, k, v), plain)


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["plain", "causal"])
def test_traces_without_a_break(mask: Mask | None) -> None:
    performer = Performer(8, 16)

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = attend(q, k, v, mask=mask, mechanism=Linear()).output
        return attend(first, k, v, mask=mask, mechanism=performer).output

    x = [heads(1, 2, 70, 8, seed=n, dtype=torch.float32) for n in range(3)]
    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="eager")(*x), both(*x))


# ------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda q: attend(q, q[..., :2], q, mechanism=Linear()), ValueError, "q has head width 4 but k has 2"),
        (lambda q: attend(q, q, q, mechanism=Performer(8)), ValueError, "Performer has d_head=8, got head width 4"),
        (lambda q: attend(*[q.half()] * 3, mechanism=Performer(4)), TypeError, "range of float16"),
        (lambda q: Performer(4, n_features=0), ValueError, "n_features=0 must be at least 1"),
        (lambda q: Performer(4, scale=-1.0), ValueError, "scale=-1.0 must be positive"),
        (
            lambda q: attend(q, q, q, mask=masks.window(2), mechanism=Linear(), backend="linear"),
            ValueError,
            "'linear' does not support mask .* these do: reference",
        ),
        (lambda q: attend(q, q, q, scale=2.0, mechanism=Linear()), ValueError, "scale=2.0"),
    ],
)
def test_bad_input_gets_one_sentence(act: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act(heads(1, 2, 3, 4))


def test_a_part_of_a_batch_keeps_its_own_lengths() -> None:
    """The frame of a part says where it begins; padding's lengths are those of the whole batch."""
    q, k, v = (heads(3, 2, 5, 4, seed=n) for n in range(3))
    mask, whole = masks.padding(torch.tensor([5, 2, 3])), Frame.aligned(3, 2, 5, 5)
    wanted = attend(q, k, v, mask=mask, mechanism=Linear()).output[1:]
    call = importlib.import_module("regard.attention.attend").prepare(q, k, v, mask, mechanism=Linear(), frame=whole)
    part = replace(call, frame=whole.part(range(1, 3), range(2)), q=call.q[1:], k=call.k[1:], v=v[1:])
    torch.testing.assert_close(linear_module.linear(part), wanted)
