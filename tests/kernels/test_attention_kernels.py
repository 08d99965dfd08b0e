"""The attention kernels against the formula: outputs and every gradient, on a GPU or in Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/kernels          # without a GPU, where triton is installed
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.attention import Additive, Frame, General, attend
from regard.attention.attend import prepare
from regard.attention.biases import Alibi, Bias, DenseBias, Sum, T5Bias, XLRelative
from regard.attention.mask import Mask
from regard.attention.masks import (
    bigbird,
    causal,
    dilated,
    document,
    from_dense,
    packed,
    padding,
    prefix,
    strided,
    valid_keys,
    window,
)
from regard.attention.mechanisms import CappedDot
from regard.attention.reference import reference
from regard.attention.score_matrix import AttentionCall
from regard.attention.triton_backend import sparse_plan, triton, triton_obstacle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytestmark = [] if INTERPRETED else gpu
DEVICE = "cpu" if INTERPRETED else "cuda"
B, H = 2, 2


@dataclass(frozen=True)
class Case:
    """An attention of T queries over S keys; masks and biases are made for these sizes."""

    mask: Callable[[Case], Mask | None] = lambda case: None
    bias: Callable[[Case], Bias | None] = lambda case: None
    mechanism: Callable[[Case], Any] = lambda case: None
    t: int = 70
    s: int = 70
    d: int = 16
    groups: int = 1
    dropout: float = 0.0
    documents: bool = False


def _documents(case: Case) -> Tensor:
    cuts = torch.tensor([[20, 53], [0, 41]], device=DEVICE) * case.t // 70
    return (torch.arange(case.t, device=DEVICE)[None, None] >= cuts[:, :, None]).sum(1)


def _lengths(case: Case, *shares: float) -> Tensor:
    return torch.tensor([int(case.s * share) for share in shares], device=DEVICE)


def _valid(case: Case) -> Tensor:
    return torch.rand(B, case.s, generator=torch.Generator().manual_seed(3)).gt(0.3).to(DEVICE)


def _dense_mask(case: Case, heads: int) -> Tensor:
    draw = torch.Generator().manual_seed(4)
    return torch.rand(B, heads, case.t, case.s, generator=draw).gt(0.5).to(DEVICE)


def _xl(case: Case) -> XLRelative:
    bias = XLRelative(H, case.d)
    for each in (bias.u, bias.v):
        nn.init.normal_(each)
    return bias


def _t5(case: Case, bidirectional: bool = False, **options: Any) -> T5Bias:
    bias = T5Bias(H, n_buckets=8, max_distance=options.pop("max_distance", 19), bidirectional=bidirectional)
    nn.init.normal_(bias.w)
    return bias


def _dense_bias(case: Case, batch: int) -> DenseBias:
    values = torch.randn(batch, H, case.t, case.s, generator=torch.Generator().manual_seed(5))
    return DenseBias(values.to(DEVICE).requires_grad_())


CASES = {
    "plain": Case(t=64, s=64),
    "cross": Case(t=33, s=75, d=24),
    "causal": Case(lambda c: causal(), groups=2),
    "cached": Case(lambda c: causal(), t=37, s=90),
    "before the first key": Case(lambda c: causal(), t=90, s=40),
    "window": Case(lambda c: window(21), t=130, s=130),
    "window ahead": Case(lambda c: window(21, 5), t=100, s=110),
    "lengths": Case(lambda c: padding(_lengths(c, 0.7, 0.0))),
    "causal lengths": Case(lambda c: causal() & padding(_lengths(c, 0.7, 0.4))),
    "valid keys": Case(lambda c: causal() & valid_keys(_valid(c))),
    "packed": Case(lambda c: causal() & packed(_documents(c))),
    "documents": Case(lambda c: causal() & document(), documents=True),
    "strided": Case(lambda c: strided(17), t=130, s=130),
    "bigbird": Case(lambda c: bigbird(16, 3, 20.0), t=130, s=130),
    "prefix": Case(lambda c: (causal() | prefix(9)) & padding(_lengths(c, 1.0, 0.5))),
    "dilated": Case(lambda c: dilated(5, 3), t=50, s=90),
    "dense mask": Case(lambda c: from_dense(_dense_mask(c, 1))),
    "dense mask by head": Case(lambda c: from_dense(_dense_mask(c, H))),
    "alibi": Case(lambda c: causal(), lambda c: Alibi(H)),
    "t5": Case(lambda c: causal(), _t5, t=130, s=130),
    "t5 both ways": Case(lambda c: None, lambda c: _t5(c, True), t=128, s=140),
    "t5 padded": Case(lambda c: padding(_lengths(c, 0.8, 0.3)), lambda c: _t5(c, True), t=128, s=128),
    "t5 window": Case(lambda c: window(70), _t5, t=200, s=200),
    "t5 packed": Case(lambda c: causal() & packed(_documents(c)), _t5),
    "t5 strided": Case(lambda c: strided(17), _t5),
    "t5 cached": Case(lambda c: causal(), _t5, t=37, s=90),
    "dense bias": Case(lambda c: causal(), lambda c: _dense_bias(c, B)),
    "dense bias shared": Case(lambda c: causal(), lambda c: _dense_bias(c, 1)),
    "biases": Case(lambda c: causal(), lambda c: Sum(Alibi(H), _t5(c), _dense_bias(c, 1))),
    "xl": Case(lambda c: causal(), _xl),
    "xl of another scale": Case(lambda c: causal(), _xl, mechanism=lambda c: General(H, c.d)),
    "xl memory": Case(lambda c: causal(), _xl, t=70, s=90),
    "xl both ways": Case(lambda c: None, _xl, t=40, s=50),
    "xl window": Case(lambda c: window(20), _xl),
    "xl padded": Case(lambda c: causal() & padding(_lengths(c, 0.9, 0.5)), _xl, dropout=0.2),
    "additive": Case(mechanism=lambda c: Additive(H, c.d, d_hidden=5), t=40, s=47, d=6),
    "additive causal": Case(lambda c: causal(), mechanism=lambda c: Additive(H, c.d), t=40, s=40, d=6),
    "additive padded": Case(
        lambda c: padding(_lengths(c, 0.0, 0.8)), mechanism=lambda c: Additive(H, c.d), t=40, s=40, d=6, dropout=0.2
    ),
    "additive strided": Case(lambda c: strided(7), mechanism=lambda c: Additive(H, c.d), t=50, s=50, d=6),
    "general": Case(lambda c: causal(), mechanism=lambda c: General(H, c.d)),
    "capped": Case(lambda c: causal(), mechanism=lambda c: CappedDot(1.5)),
    "capped t5": Case(lambda c: window(40), _t5, mechanism=lambda c: CappedDot(1.5)),
    "dropout": Case(lambda c: causal(), dropout=0.3),
}

if INTERPRETED:  # three blocks of 32 tell as much as four
    CASES = {name: replace(case, t=case.t * 3 // 5, s=case.s * 3 // 5) for name, case in CASES.items()}


def call_of(case: Case, dtype: torch.dtype, inputs: tuple[Tensor, ...]) -> tuple[AttentionCall, list[Tensor]]:
    """The prepared call in a dtype, and what gets a gradient."""
    q, k, v = (x.to(dtype).detach().requires_grad_() for x in inputs)
    torch.manual_seed(1)
    mechanism, bias = case.mechanism(case), case.bias(case)
    leaves = [q, k, v]
    for part in (mechanism, *(bias.parts if isinstance(bias, Sum) else [bias])):
        if isinstance(part, DenseBias):
            part.values = part.values.detach().to(dtype).requires_grad_()
            leaves.append(part.values)
        elif isinstance(part, nn.Module):
            leaves += [x for x in part.to(DEVICE, dtype).parameters() if x.requires_grad]
    frame = Frame.of(q, k)
    if case.documents:
        frame = frame.with_documents(_documents(case))
    seed = 7 if case.dropout else None
    return prepare(q, k, v, case.mask(case), bias, None, mechanism, frame, case.dropout, seed), leaves


def compute(compute_call: Callable[[AttentionCall], Tensor], case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients; every dtype sees the same numbers, rounded to bf16 once."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(B, H, case.t), (B, case.groups, case.s), (B, case.groups, case.s), (B, H, case.t)]
    *inputs, d_out = (torch.randn(*shape, case.d, generator=draw).bfloat16().to(DEVICE) for shape in shapes)
    call, leaves = call_of(case, dtype, tuple(inputs))
    assert compute_call is not triton or triton_obstacle(call) is None
    output = compute_call(call)
    return [output, *torch.autograd.grad(output, leaves, d_out.to(output.dtype))]


def formula(call: AttentionCall) -> Tensor:
    return reference(call)[0]


@pytest.mark.parametrize("name", CASES)
def test_in_float32(name: str) -> None:
    exact, found = compute(formula, CASES[name], torch.float64), compute(triton, CASES[name], torch.float32)
    for ours, wanted in zip(found, exact, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5 * max(1.0, float(wanted.abs().max())))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter computes half precision as float32")
@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_error_in_half_precision(name: str, dtype: torch.dtype, width: int) -> None:
    case = CASES[name]
    if width > 64 and "additive" in name:
        pytest.skip("the formula needs T · S · D numbers")
    check_error(replace(case, d=width, t=case.t * 3 + 1, s=case.s * 3 + 1), dtype)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("xl")])
def test_pairs_of_half_precision(name: str) -> None:
    """The kernels of Transformer-XL treat two numbers of half precision as one, in the interpreter too."""
    check_error(replace(CASES[name], d=24), torch.float16)


def check_error(case: Case, dtype: torch.dtype) -> None:
    """At most twice the error of the formula in that precision."""
    exact = compute(formula, case, torch.float32)
    plain, found = compute(plain_formula, case, dtype), compute(triton, case, dtype)
    for ours, theirs, wanted in zip(found, plain, exact, strict=True):
        assert torch.isfinite(ours).all()
        theirs_off, ours_off = float((theirs - wanted).norm()), float((ours - wanted).norm())
        assert ours_off <= 2 * theirs_off + 1e-6 * float(wanted.norm())


def plain_formula(call: AttentionCall) -> Tensor:
    """The formula with every intermediate in the inputs' precision, as a reader would type it."""
    from regard.attention.mechanisms import by_group, by_head
    from regard.attention.reference import dropout_tile

    own, of_bias = call.operands()
    scores = call.mechanism.tile(call.q, call.k, own)
    everything = slice(None)
    if call.bias is not None:
        scores = scores + call.bias.tile(everything, everything, call.frame, of_bias, call.q, call.k)
    allowed = call.allowed()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, -1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0)
    if call.dropout:
        assert call.seed is not None
        kept = dropout_tile(call.dropout, call.seed, everything, everything, call.frame)
        weights = weights * kept / (1 - call.dropout)
    return by_head(by_group(weights, call.v.shape[1]) @ call.v, weights.shape[1]).to(call.q.dtype)


def test_empty_rows_are_zero_with_zero_gradients() -> None:
    case = CASES["before the first key"]
    output, d_q, *_ = compute(triton, case, torch.float32)
    assert output[:, :, : case.t - case.s].eq(0).all()
    assert d_q[:, :, : case.t - case.s].eq(0).all()


def test_heads_and_rows_of_transformer_xl_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory: few rows at a time, and few heads at a time."""
    from regard.kernels import xl_attention

    case = replace(CASES["xl padded"], t=40, s=40, groups=2)
    whole = compute(triton, case, torch.float32)
    monkeypatch.setattr(xl_attention, "_MOST_BYTES", 1)
    for ours, wanted in zip(compute(triton, case, torch.float32), whole, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory", [99, 163, 227])  # KiB: RTX 4090, A100, H200
def test_tiles_fit_into_shared_memory(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels import flash_ops

    monkeypatch.setattr(flash_ops, "TRITON_INTERPRETED", False)
    monkeypatch.setattr(flash_ops, "shared_memory", lambda device: memory << 10)
    no_mask = flash_ops.Options(1.0, 0)
    for dtype, width in product((torch.bfloat16, torch.float32), (16, 64, 80, 128, 256)):
        q = torch.empty(1, 1, 1, width, dtype=dtype, device=DEVICE)
        n_bytes = flash_ops.padded_width(width) * q.element_size()
        for kernel, o in product(("forward", "queries", "keys"), (no_mask, replace(no_mask, left=9))):
            rows, keys, _, stages = flash_ops.tile_sizes(kernel, q, q, o)
            # Blocks in flight, and those that stay: queries or keys, in the backward pass with a second tensor.
            loaded, n_kept = max(1, stages - 1) * 2, 1 if kernel == "forward" else 2
            n_blocks = loaded * rows + n_kept * keys if kernel == "keys" else loaded * keys + n_kept * rows
            assert n_blocks * n_bytes <= memory << 10, (kernel, dtype, width)


def test_plan_keeps_equal_tiles_once() -> None:
    frame = Frame.aligned(1, 1, 512, 512, DEVICE)
    made = sparse_plan(strided(32), frame, 64)
    assert len(made.bits) <= 4  # full, the diagonal, and what lies before it
    assert made.rows.shape[2] == made.columns.shape[2] == 8


COMPILED = ["causal", "t5", "xl", "additive causal", "strided", "t5 strided", "bigbird", "additive strided"]


@pytest.mark.parametrize("name", ["strided"] if INTERPRETED else COMPILED)
def test_torch_compile_keeps_the_kernel(name: str) -> None:
    case = CASES[name]
    torch.compiler.reset()
    exact = compute(formula, case, torch.float64)
    backend = "aot_eager" if INTERPRETED else "inductor"
    compiled = compute(torch.compile(triton, fullgraph=True, backend=backend), case, torch.float32)
    for ours, wanted in zip(compiled, exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5 * max(1.0, float(wanted.abs().max())))


@pytest.mark.skipif(INTERPRETED, reason="auto chooses kernels on a GPU only")
def test_a_sparse_mask_stays_sparse_in_a_compiled_graph() -> None:
    q = torch.randn(1, 2, 2048, 64, dtype=torch.bfloat16, device=DEVICE)
    called: list[str] = []

    def note_calls(graph: Any, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()  # two plans in one graph:
    both = torch.compile(
        lambda x: attend(attend(x, x, x, mask=strided(64)).output, x, x, mask=causal() & bigbird(64, 64, 5.0)).output,
        backend=note_calls,
        fullgraph=True,
    )
    both(q)
    assert sum("flash_forward" in name for name in called) == 2
    assert not any("scaled_dot_product" in name for name in called)
