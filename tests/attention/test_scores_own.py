"""Mechanisms that change one thing of another: no backend goes on computing what they were derived from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention import Dot, Mechanism
from regard.attention.attend import attend
from regard.attention.backends import BACKENDS
from regard.attention.biases import Bias
from regard.attention.frame import Frame, Span
from regard.attention.linear_attention import Linear
from regard.attention.masks import causal
from regard.attention.mechanisms import Operands
from regard.config import MIXERS, Mixer


class Positive(Dot):
    """Shares of squashed products: positive, divided by their sum."""

    normaliser = "linear"

    def queries(self, q: Tensor) -> Tensor:
        return q.sigmoid()

    def keys(self, k: Tensor) -> Tensor:
        return k.sigmoid()


class Sharper(Linear):
    """A kernel under a softmax."""

    normaliser = "softmax"


class Again(Positive):
    """Back under a softmax."""

    normaliser = "softmax"


class Shared:
    """Knows nothing of mechanisms."""

    normaliser = "linear"


class MixedIn(Shared, Dot):
    def queries(self, q: Tensor) -> Tensor:
        return q.exp()

    def keys(self, k: Tensor) -> Tensor:
        return k.exp()


class Halved:
    """A score of its own, from outside."""

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        return Dot(0.5).tile(q, k).tanh()


class Bounded(Halved, Dot):
    """Its gradients are no longer those of the product."""


class Turned(Dot):
    """Looks from its own corner, and is built as the scaled dot product is."""

    def queries(self, q: Tensor) -> Tensor:
        return q.flip(-1)


class Unscaled(Turned):
    scale = 1.0


class Plain(Mechanism):
    """Nothing but a score."""

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        return -(q[:, :, :, None] - k[:, :, None]).abs().sum(-1)


class PlainModule(nn.Module, Plain):
    """The same, as a module."""


class PerHead(nn.Module, Dot):
    """A projection of the shared keys for each head."""

    def __init__(self, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(n_heads, d_head, d_head, generator=torch.Generator().manual_seed(5)))

    def keys(self, k: Tensor) -> Tensor:
        return k.repeat_interleave(len(self.w) // k.shape[1], 1) @ self.w.to(k.dtype)


KINDS = {
    Positive: "shares",
    Sharper: "scores",
    Again: "scores",
    MixedIn: "shares",
    Bounded: "scores",
    Turned: "dot",
    Unscaled: "dot",
    Plain: "scores",
    PlainModule: "scores",
}
OWN = list(KINDS)


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (*OWN, PerHead):
        monkeypatch.setitem(
            MIXERS, own.__name__, Mixer(f"{__name__}:{own.__name__}", pairs=own.normaliser == "softmax")
        )


def small(mixer: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 24, "n_layers": 1, "n_heads": 3, "d_ff": 16, "max_len": 16, "vocab_size": 40}
    made: Any = regard.build("gpt2", **sizes, mixer=mixer, **fields)
    with torch.no_grad():  # new models look everywhere nearly alike, whatever the mechanism
        made.decoder.blocks[0].attention.w_qkv.weight.mul_(20)
    return made


def unless_refused(compute: Callable[[], Any], backend: str, own: type[Mechanism]) -> Any:
    """None where the backend says that it cannot do this mechanism."""
    try:
        return compute()
    except ValueError as error:
        said = str(error)
    assert f"backend={backend!r} does not support" in said
    assert f"mechanism {own.name!r}" in said
    return None


@pytest.mark.parametrize("own", OWN, ids=lambda own: own.__name__)
def test_the_kind_follows_what_is_changed(own: type[Mechanism]) -> None:
    assert own.kind == KINDS[own]


@pytest.mark.parametrize("own", OWN, ids=lambda own: own.__name__)
def test_every_backend_gives_the_same_or_refuses(own: type[Mechanism]) -> None:
    torch.manual_seed(1)
    heads = [torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    seen = {}
    for backend in ("auto", *BACKENDS):
        run = functools.partial(attend, *heads, mask=causal(), mechanism=own(), backend=backend)
        attended = unless_refused(run, backend, own)
        if attended is None:
            continue
        output = attended.output
        seen[backend] = (output, *torch.autograd.grad(output.square().sum(), heads))
    assert {"auto", "reference"} <= set(seen)
    assert ("tiled" in seen) == (own.normaliser == "softmax")
    for backend, found in seen.items():
        for x, wanted in zip(found, seen["reference"], strict=True):
            torch.testing.assert_close(x, wanted, msg=lambda said, backend=backend: f"{backend}: {said}")


@pytest.mark.parametrize("own", OWN, ids=lambda own: own.__name__)
@torch.no_grad()
def test_a_model_built_with_it_gives_the_same_with_every_backend(own: type[Mechanism]) -> None:
    tokens = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(2))
    wanted = small(own.__name__, attention_backend="reference").eval()(tokens)
    plain = small("dot").eval()(tokens)
    assert (wanted - plain).abs().max() > 1e-3
    for backend in ("auto", "tiled", "sdpa"):
        model = small(own.__name__, attention_backend=backend).eval()
        found = unless_refused(functools.partial(model, tokens), backend, own)
        if found is not None:
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


class Weighted(nn.Module, Plain):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def tile(self, q: Tensor, k: Tensor, operands: Operands = ()) -> Tensor:
        return super().tile(q, k) * (operands[0] if operands else self.w)


class Declared(Weighted):
    def operands(self, frame: Frame) -> Operands:
        return (self.w,)


class Slope(Bias):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        at = frame.site(rows, cols)
        return (at.j - at.i) * self.w


def test_parameters_that_a_tile_reads_are_trained_or_refused() -> None:
    heads = [torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    gradients = []
    for backend in ("reference", "tiled"):
        own = Declared()
        attend(*heads, mechanism=own, backend=backend).output.square().sum().backward()
        gradients.append(own.w.grad)
    torch.testing.assert_close(*gradients)
    heads[0].requires_grad_()
    for options in ({"mechanism": Weighted()}, {"bias": Slope()}):
        output = attend(*heads, **options, backend="tiled").output  # type: ignore[arg-type]  # one of the two
        with pytest.raises(ValueError, match=r"tile reads a parameter that \w+\.operands does not return"):
            output.sum().backward()


def test_a_scale_is_the_configs_or_the_classes() -> None:
    def scale_of(mixer: str, **fields: Any) -> float:
        return float(small(mixer, **fields).decoder.blocks[0].attention.mechanism.factor(8))

    assert scale_of("Turned") == pytest.approx(8**-0.5)
    assert scale_of("Turned", attention_scale=0.25) == 0.25
    assert scale_of("Unscaled") == 1.0
    assert scale_of("Unscaled", attention_scale=0.25) == 0.25
    assert scale_of("PerHead") == pytest.approx(8**-0.5)
    assert scale_of("PerHead", attention_scale=0.25) == 0.25
    with pytest.raises(ValueError, match=r"attention_scale=0\.25 is not read by PlainModule\.for_model"):
        small("PlainModule", attention_scale=0.25)


class OneKeyHead(Dot):
    """Multi-query keys from grouped ones."""

    def keys(self, k: Tensor) -> Tensor:
        return k.mean(1, keepdim=True)


@pytest.mark.parametrize("backend", ["auto", "tiled", "sdpa"])
@torch.no_grad()
def test_fewer_key_heads_than_value_heads(backend: str) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    wanted = attend(q, k, v, mask=causal(), mechanism=OneKeyHead(), backend="reference").output
    output = attend(q, k, v, mask=causal(), mechanism=OneKeyHead(), backend=backend).output
    torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["tiled", "sdpa", "flex"])
@pytest.mark.parametrize("sinks", [False, True])
@torch.no_grad()
def test_more_key_heads_than_value_heads(backend: str, sinks: bool) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    own, logits = PerHead(4, 8), torch.randn(4) if sinks else None
    scores = q @ own.keys(k).mT * 8**-0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    last = torch.full((2, 4, 9, 1), -torch.inf) if logits is None else logits[:, None, None].expand(2, 4, 9, 1)
    wanted = torch.cat([scores, last], -1).softmax(-1)[..., :9] @ v.repeat_interleave(2, 1)
    output = attend(q, k, v, mask=causal(), mechanism=own, backend=backend, sinks=logits).output
    torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)
