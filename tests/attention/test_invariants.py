"""What must hold for every mechanism on every backend. The capability table chooses: each of its entries is a test.

A capability without an exercise fails here, so nothing can be declared that is not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import Frame, Mechanism, XLRelative, attend, masks
from regard.attention.attend import prepare
from regard.attention.backends import (
    BACKENDS,
    CAPABILITIES,
    DEVICES,
    DIRECTIONS,
    FEATURES,
    Capability,
    capable_backends,
    features_of,
    missing_features,
)
from regard.attention.biases import Alibi, T5Bias
from regard.attention.cache import Cache, GrowingCache, RingCache, StaticCache

from .helpers import DEVICES_HERE, MECHANISMS, Problem, Sizes, formula, inputs, mechanism_named

Pair = tuple[str, str, str]
"""(backend, mechanism, device)."""
KIND_OF = {name: make(Sizes()).kind for name, make in MECHANISMS.items()}


class Case(NamedTuple):
    """A capability as one mechanism of its kind has it."""

    backend: str
    mechanism: str
    device: str
    direction: str
    feature: str

    @property
    def declared(self) -> bool:
        kind = KIND_OF.get(self.mechanism, self.mechanism)
        return Capability(self.backend, kind, self.device, self.direction, self.feature) in CAPABILITIES


CASES = sorted(
    Case(c.backend, mechanism, c.device, c.direction, c.feature)
    for c in CAPABILITIES
    for mechanism, kind in KIND_OF.items()
    if kind == c.kind
)


# ---- the exercise of each feature: how to ask for it


def some_mask(p: Problem) -> Problem:
    """Any matrix, different for each head, with a query that sees nothing."""
    draw = torch.Generator().manual_seed(3)
    allowed = torch.rand(p.q.shape[0], p.q.shape[1], p.q.shape[2], p.k.shape[2], generator=draw) < 0.6
    allowed[:, 0, -1] = False
    return p.with_(mask=both(p, masks.from_dense(allowed.to(p.q.device))))


def some_padding(p: Problem) -> Problem:
    """Each sequence shorter than the one before it."""
    lengths = [max(1, p.k.shape[2] - 1 - b) for b in range(p.q.shape[0])]
    return p.with_(mask=both(p, masks.padding(torch.tensor(lengths, device=p.q.device))))


def both(p: Problem, mask: masks.Mask) -> masks.Mask:
    return mask if p.mask is None else p.mask & mask


def some_bias(kind: Callable[..., torch.nn.Module]) -> Callable[[Problem], Problem]:
    def add(p: Problem) -> Problem:
        torch.manual_seed(5)
        bias = kind(p.q.shape[1]) if kind is not XLRelative else XLRelative(p.q.shape[1], p.q.shape[3], d_model=6)
        for parameter in bias.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return p.with_(bias=bias.to(device=p.q.device, dtype=p.q.dtype))

    return add


def some_sinks(p: Problem) -> Problem:
    """Another logit for each head."""
    sinks = torch.linspace(-1, 1, p.q.shape[1], dtype=p.q.dtype, device=p.q.device)
    return p.with_(sinks=sinks)


def shared_heads(p: Problem) -> Problem:
    """Half as many key heads as query heads."""
    half = p.q.shape[1] // 2
    return p.with_(k=p.k[:, :half].detach().clone(), v=p.v[:, :half].detach().clone())


ASK: dict[str, Callable[[Problem], Problem]] = {
    "plain": lambda p: p,
    "causal": lambda p: p.with_(mask=both(p, masks.causal())),
    "padding": some_padding,
    "mask": some_mask,
    "bias": some_bias(Alibi),
    "trainable bias": some_bias(T5Bias),
    "content bias": some_bias(XLRelative),
    "sinks": some_sinks,
    "gqa": shared_heads,
    "dropout": lambda p: p.with_(dropout=0.4),
    "seed": lambda p: p.with_(dropout=0.4, seed=11),
    "weights": lambda p: p.with_(weights=True),
}


def sizes_for(backend: str, device: str, **changes: int) -> Sizes:
    """Small; FlexAttention's kernel wants heads of at least 16."""
    return Sizes(**{"d": 16 if (backend, device) == ("flex", "cuda") else 3, **changes})


def dtype_for(backend: str, device: str) -> torch.dtype:
    """Double wherever it exists, so that the tolerance can be tight."""
    in_single = device == "mps" or (device == "cuda" and backend in ("flex", "triton"))
    return torch.float32 if in_single else torch.float64


def problem_for(mechanism: str, device: str, dtype: torch.dtype, sizes: Sizes, *features: str) -> Problem:
    problem = Problem(*inputs(sizes, dtype=dtype, device=device), mechanism_named(mechanism, sizes, dtype, device))
    for feature in sorted(features, key=FEATURES.index):
        problem = ASK[feature](problem)
    return problem


def trainable(p: Problem) -> Problem:
    """The same problem, its inputs asking for gradients."""
    names = ("q", "k", "v") if p.sinks is None else ("q", "k", "v", "sinks")
    return p.with_(**{name: getattr(p, name).detach().clone().requires_grad_() for name in names})


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal up to rounding."""
    tolerance = 1e-9 if found.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


# ---- every declared capability


def exercise_forward(c: Case) -> None:
    """The backend gives what the formula gives."""
    p = problem_for(c.mechanism, c.device, dtype_for(c.backend, c.device), sizes_for(c.backend, c.device), c.feature)
    with torch.no_grad():
        assert_asks(p, c)
        if p.dropout:
            return exercise_dropout(p, c)
        found, (output, weights) = attend(p.q, p.k, p.v, backend=c.backend, **p.options), formula(p)
    close(found.output, output)
    assert (found.weights is not None) == p.weights
    if found.weights is not None:
        close(found.weights, weights.expand_as(found.weights))


def exercise_dropout(p: Problem, c: Case) -> None:
    """With the unit matrix for values the output is the weights: each is dropped, or scaled up to make good for it."""
    _, weights = formula(p)
    n_keys = weights.shape[-1]
    unit = torch.eye(n_keys, dtype=p.v.dtype, device=p.v.device)
    v = torch.linalg.pinv(p.mechanism.f) if c.mechanism == "linformer" else unit  # its own F v is then the unit matrix
    v = v.detach().expand(*p.v.shape[:2], -1, -1).contiguous()
    found = attend(p.q, p.k, v, backend=c.backend, **p.options).output
    dropped = found.abs() < 1e-9
    close(torch.where(dropped, 0, found), torch.where(dropped, 0, weights / (1 - p.dropout)))
    share = dropped.double().mean().item()
    assert abs(share - p.dropout) < 5 * (p.dropout * (1 - p.dropout) / dropped.numel()) ** 0.5
    again = attend(p.q, p.k, v, backend=c.backend, **p.options).output
    assert torch.equal(found, again) == (p.seed is not None), "a seed fixes the dropout, and nothing else does"


def exercise_backward(c: Case) -> None:
    """Its gradients, of inputs and parameters, are those of the formula and those of finite differences."""
    dtype, sizes = dtype_for(c.backend, c.device), sizes_for(c.backend, c.device, b=2, h=2, g=2, t=3, s=4)
    if c.feature == "plain":
        sizes = sizes_for(c.backend, c.device, b=1, h=2, g=2, t=4, s=3)
    p = trainable(problem_for(c.mechanism, c.device, dtype, sizes, c.feature))
    assert_asks(p, c)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(1)  # for dropout that draws from torch's own generator
        found = attend(p.q, p.k, p.v, backend=c.backend, **p.options)
        return (found.output,) if found.weights is None else (found.output, found.weights)

    if not p.dropout:
        outputs, wanted = run(), formula(p)[: 2 if p.weights else 1]
        assert_same_gradients(outputs, wanted, p.leaves)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(run, p.leaves, fast_mode=True)


def assert_same_gradients(outputs: tuple[Tensor, ...], wanted: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    draw = torch.Generator().manual_seed(2)
    upstream = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in outputs]
    ours = torch.autograd.grad(outputs, leaves, upstream)
    theirs = torch.autograd.grad([w.expand_as(x) for w, x in zip(wanted, outputs, strict=True)], leaves, upstream)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


def assert_asks(p: Problem, c: Case) -> None:
    """That this problem is about the capability it is meant to exercise."""
    call = prepare(p.q, p.k, p.v, p.mask, p.bias, None, p.mechanism, p.frame, p.dropout, p.seed, sinks=p.sinks)
    linformer_hides_padding = c.mechanism == "linformer" and c.feature == "padding"  # done before the call
    assert c.feature in features_of(call, p.weights) or linformer_hides_padding
    assert p.mechanism.name == c.mechanism
    assert p.q.device.type == c.device


EXERCISES: dict[str, Callable[[Case], None]] = {"forward": exercise_forward, "backward": exercise_backward}


def without_exercise(capabilities: frozenset[Capability]) -> list[Capability]:
    """Those for which nothing above says how to run them."""
    return [
        c
        for c in sorted(capabilities)
        if c.kind not in KIND_OF.values()
        or c.feature not in ASK
        or c.direction not in EXERCISES
        or c.device not in DEVICES
        or c.backend not in BACKENDS
    ]


def by_name(c: Capability | Case) -> str:
    return "-".join(c)


@pytest.mark.parametrize("case", [c for c in CASES if c.device in DEVICES_HERE], ids=by_name)
def test_capability(case: Case) -> None:
    EXERCISES[case.direction](case)


@pytest.mark.parametrize("device", DEVICES)
def test_device_is_here(device: str) -> None:
    """Capabilities are exercised on every device there is; those of the others are counted, not forgotten."""
    if device not in DEVICES_HERE:
        count = sum(c.device == device for c in CAPABILITIES)
        pytest.skip(f"no {device} device here: {count} capabilities not exercised")
    torch.zeros(1, device=device)


def test_every_capability_has_an_exercise() -> None:
    assert without_exercise(CAPABILITIES) == []


@pytest.mark.parametrize(
    "planted",
    [
        Capability("tiled", "dot", "cpu", "forward", "telepathy"),
        Capability("tiled", "hopfield", "cpu", "forward", "plain"),
        Capability("tiled", "dot", "cpu", "sideways", "plain"),
        Capability("tiled", "dot", "abacus", "forward", "plain"),
        Capability("palantir", "dot", "cpu", "forward", "plain"),
    ],
    ids=by_name,
)
def test_a_capability_without_exercise_is_noticed(planted: Capability) -> None:
    assert without_exercise(CAPABILITIES | {planted}) == [planted]


@pytest.mark.parametrize(
    "untrue",
    [
        Case("tiled", "linear", "cpu", "forward", "plain"),
        Case("sdpa", "dot", "cpu", "forward", "content bias"),
        Case("linear", "linear", "cpu", "forward", "mask"),
        Case("sdpa", "dot", "cpu", "forward", "weights"),
        Case("sdpa", "dot", "cpu", "forward", "seed"),
    ],
    ids=by_name,
)
def test_a_capability_that_does_not_exist_fails_its_exercise(untrue: Case) -> None:
    assert not untrue.declared
    with pytest.raises((ValueError, AssertionError)):
        EXERCISES[untrue.direction](untrue)


# ---- what is not declared is refused, by a sentence that says who can


UNDECLARED = sorted(
    case
    for backend in BACKENDS
    for mechanism in MECHANISMS
    for direction in DIRECTIONS
    for feature in FEATURES
    if not (case := Case(backend, mechanism, "cpu", direction, feature)).declared
)


def expected_on_cpu(kind: str, direction: str, feature: str) -> list[str]:
    """The backends that compute a feature on a CPU, written down without the capability table."""
    masked = feature in ("plain", "causal", "padding", "mask", "gqa")
    softmax, biased = kind in ("dot", "capped", "additive", "scores"), feature in ("bias", "trainable bias")
    padded = feature in ("plain", "padding", "gqa")
    dropped = feature in ("dropout", "seed")
    fits_summary = kind == "summary" and (padded or dropped or feature == "sinks")
    positive = kind in ("kernel", "shares") and (masked or dropped or feature == "weights")
    by_itself = kind == "sigmoid" and feature not in ("sinks", "weights")
    found = {
        "reference": softmax
        or by_itself
        or (kind, feature) == ("sigmoid", "weights")
        or positive
        or fits_summary
        or (kind == "summary" and feature == "weights"),
        "tiled": (softmax and feature != "weights") or by_itself or fits_summary,
        "sdpa": (kind == "dot" and (masked or biased or feature in ("sinks", "dropout")))
        or (kind == "summary" and (padded or feature in ("sinks", "dropout"))),
        "flex": kind == "dot" and direction == "forward" and (masked or biased or feature == "sinks"),
        "linear": kind == "kernel" and feature in ("plain", "causal", "padding", "gqa"),
    }
    return [backend for backend, able in found.items() if able]


@pytest.mark.parametrize(("backend", "mechanism"), sorted({(c.backend, c.mechanism) for c in UNDECLARED}))
def test_undeclared_capability_is_refused_and_those_that_can_are_named(backend: str, mechanism: str) -> None:
    for c in UNDECLARED:
        if (c.backend, c.mechanism) == (backend, mechanism):
            assert_refused(c)


def assert_refused(c: Case) -> None:
    p = problem_for(c.mechanism, "cpu", torch.float64, Sizes(), c.feature)
    if c.direction == "backward":
        p = trainable(p)
    with torch.set_grad_enabled(c.direction == "backward"), pytest.raises(ValueError) as refused:  # noqa: PT011
        attend(p.q, p.k, p.v, backend=c.backend, **p.options)
    if c.mechanism == "linformer" and c.feature in ("causal", "mask"):
        assert "can only be padding, got" in str(refused.value)
        return
    can = expected_on_cpu(KIND_OF[c.mechanism], c.direction, c.feature)
    assert str(refused.value).startswith(f"backend={c.backend!r} does not support ")
    assert str(refused.value).endswith(f"these do: {', '.join(can) or 'none'}")
    assert c.backend not in can


# ---- invariants of each (backend, mechanism, device)


def pairs_with(*features: str, direction: str = "forward") -> list[Any]:
    """All pairs that declare these features, for the devices that are here."""
    return [
        pytest.param((backend, mechanism, device), id=f"{backend}-{mechanism}-{device}")
        for backend in BACKENDS
        for mechanism in MECHANISMS
        for device in DEVICES_HERE
        if not missing_features(backend, KIND_OF[mechanism], device, direction, frozenset({"plain", *features}))
    ]


def setting(pair: Pair, *features: str, **sizes: int) -> Problem:
    backend, mechanism, device = pair
    shape = sizes_for(backend, device, **{"t": 6, "s": 6, **sizes})
    return problem_for(mechanism, device, dtype_for(backend, device), shape, *features)


def output(p: Problem, pair: Pair) -> Tensor:
    with torch.no_grad():
        return attend(p.q, p.k, p.v, backend=pair[0], **p.options).output


def differently(x: Tensor, start: int) -> Tensor:
    """x with everything from ``start`` on (along the length) replaced by other, larger numbers."""
    other = x.clone()
    other[:, :, start:] = 3 * x[:, :, start:].flip(-1) - 1
    return other


def normalised(pairs: list[Any]) -> list[Any]:
    """Sigmoid attention divides by no sum."""
    return [pair for pair in pairs if pair.values[0][1] != "sigmoid"]


@pytest.mark.parametrize("pair", normalised(pairs_with()))
def test_weights_sum_to_one(pair: Pair) -> None:
    """Averages of ones are ones. Linformer's F mixes the values first: there F v is made of ones."""
    p = setting(pair)
    ones = torch.ones_like(p.v)
    if pair[1] == "linformer":
        ones = torch.linalg.pinv(p.mechanism.f).sum(-1)[:, None].expand_as(p.v)
    close(output(p.with_(v=ones.detach()), pair), torch.ones_like(p.q))


@pytest.mark.parametrize("pair", normalised(pairs_with("weights")))
def test_returned_weights_sum_to_one(pair: Pair) -> None:
    p = setting(pair, "weights")
    weights = attend(p.q, p.k, p.v, backend=pair[0], **p.options).weights
    assert weights is not None
    assert (weights >= 0).all()
    close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("pair", pairs_with("causal"))
@pytest.mark.parametrize("now", [1, 3, 5])
def test_the_future_changes_nothing(pair: Pair, now: int) -> None:
    p = setting(pair, "causal")
    changed = p.with_(q=differently(p.q, now), k=differently(p.k, now), v=differently(p.v, now))
    before, after = output(p, pair), output(changed, pair)
    close(after[:, :, :now], before[:, :, :now])
    assert not torch.allclose(after[:, :, now:], before[:, :, now:]), "the change was one that shows"


@pytest.mark.parametrize("pair", pairs_with("padding"))
def test_padding_changes_nothing(pair: Pair) -> None:
    p = setting(pair, b=2).with_(mask=masks.padding(torch.tensor([4, 4], device=pair[2])))
    before = output(p, pair)
    close(output(p.with_(k=differently(p.k, 4), v=differently(p.v, 4)), pair), before)
    assert not torch.allclose(output(p.with_(v=differently(p.v, 3)), pair), before), "a real token does change it"


@pytest.mark.parametrize("pair", pairs_with("padding"))
def test_padding_equals_leaving_it_out(pair: Pair) -> None:
    p = setting(pair, b=1).with_(mask=masks.padding(torch.tensor([4], device=pair[2])))
    alone = p.with_(k=p.k[:, :, :4], v=p.v[:, :, :4], mask=None)
    close(output(p, pair), output(alone, pair))


def caches(p: Problem) -> dict[str, Cache]:
    (b, g, _, d), kind = p.k.shape, {"dtype": p.k.dtype, "device": p.k.device}
    return {"growing": GrowingCache(), "static": StaticCache(b, g, 9, d, **kind), "ring": RingCache(b, g, 6, d, **kind)}


@pytest.mark.parametrize(
    ("pair", "kind"),
    [
        pytest.param(*pair.values, kind, id=f"{kind}-{pair.id}")
        for pair in pairs_with("causal")
        for kind in ("growing", "static", "ring")
        if kind == "growing" or pair.values[0][0] != "flex"  # a second for each frame; test_cache has these caches
    ],
)
def test_cached_equals_uncached(pair: Pair, kind: str) -> None:
    p = setting(pair, "causal")
    cache, steps = caches(p)[kind], []
    with torch.no_grad():
        for some in (slice(0, 3), slice(3, 4), slice(4, 6)):
            k, v = cache.update(p.k[:, :, some], p.v[:, :, some])
            step = p.with_(q=p.q[:, :, some], k=k, v=v, frame=cache.frame(p.q.shape[1]))
            steps.append(output(step, pair))
    close(torch.cat(steps, dim=2), output(p, pair))


@pytest.mark.parametrize("pair", pairs_with())
def test_last_query_of_a_cache_equals_uncached(pair: Pair) -> None:
    """Also for mechanisms that cannot be causal: the last query sees every key there is."""
    p, cache = setting(pair), GrowingCache()
    with torch.no_grad():
        cache.update(p.k[:, :, :5], p.v[:, :, :5])
        k, v = cache.update(p.k[:, :, 5:], p.v[:, :, 5:])
    last = output(p.with_(q=p.q[:, :, 5:], k=k, v=v, frame=cache.frame(p.q.shape[1])), pair)
    close(last, output(p, pair)[:, :, 5:])


@pytest.mark.parametrize("pair", pairs_with())
def test_order_of_keys_does_not_matter_without_positions(pair: Pair) -> None:
    p = setting(pair, s=7)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4], device=pair[2])
    wanted = output(p, pair)
    if pair[1] == "linformer":  # its E and F do know positions: they have to move along
        with torch.no_grad():
            p.mechanism.e.copy_(p.mechanism.e[:, order])
            p.mechanism.f.copy_(p.mechanism.f[:, order])
    close(output(p.with_(k=p.k[:, :, order], v=p.v[:, :, order]), pair), wanted)


@pytest.mark.parametrize("pair", pairs_with())
def test_queries_do_not_see_each_other(pair: Pair) -> None:
    p = setting(pair)
    order = torch.tensor([5, 2, 0, 4, 1, 3], device=pair[2])
    close(output(p.with_(q=p.q[:, :, order]), pair), output(p, pair)[:, :, order])


def blind_rows(pair: Pair) -> dict[str, tuple[Problem, Tensor]]:
    """Problems in which some rows see no key, and which rows those are, as far as the pair declares the mask."""
    cases = {}
    backend, mechanism, device = pair
    if not missing_features(backend, KIND_OF[mechanism], device, "forward", frozenset({"mask"})):
        p = setting(pair, "mask")
        assert p.mask is not None
        rows = ~p.mask.tile(slice(None), slice(None), Frame.of(p.q, p.k)).any(-1)
        cases["a row of a matrix"] = p, rows
        gone = Frame(2, 4, torch.arange(6, device=device), torch.full((6,), -1, device=device))
        cases["every slot empty"] = setting(pair).with_(frame=gone), torch.ones_like(rows)
    if not missing_features(backend, KIND_OF[mechanism], device, "forward", frozenset({"padding"})):
        p = setting(pair).with_(mask=masks.padding(torch.tensor([0, 3], device=device)))
        rows = torch.zeros(p.q.shape[:3], dtype=torch.bool, device=device)
        rows[0] = True
        cases["an empty sequence"] = p, rows
    if not missing_features(backend, KIND_OF[mechanism], device, "forward", frozenset({"causal"})):
        p = setting(pair, "causal", t=6, s=4)
        rows = torch.zeros(p.q.shape[:3], dtype=torch.bool, device=device)
        rows[:, :, :2] = True  # they stand before the first key
        cases["queries before all keys"] = p, rows
    return cases


@pytest.mark.parametrize("pair", pairs_with("padding"))
def test_rows_without_keys_give_zero(pair: Pair) -> None:
    for name, (p, rows) in blind_rows(pair).items():
        found = output(p, pair)
        assert rows.any(), name
        assert torch.isfinite(found).all(), name
        assert (found[rows] == 0).all(), name
        assert (found[~rows] != 0).all(), name


@pytest.mark.parametrize("pair", pairs_with("padding", direction="backward"))
def test_rows_without_keys_have_gradient_zero(pair: Pair) -> None:
    for name, (p, rows) in blind_rows(pair).items():
        p = trainable(p)
        found = attend(p.q, p.k, p.v, backend=pair[0], **p.options).output
        grads = torch.autograd.grad(found.sum(), p.leaves)
        assert all(torch.isfinite(g).all() for g in grads), name
        assert (grads[0][rows] == 0).all(), name


# ---- ragged shapes


LENGTHS = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 63, 65, 128, 257, 511, 512, 513]))
UNRULY = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def drawn_problem(data: st.DataObject, pair: Pair, direction: str) -> Problem:
    """Any shape and any combination of the features that the pair declares for this direction."""
    backend, mechanism, device = pair
    declared = [
        f for f in FEATURES[1:] if not missing_features(backend, KIND_OF[mechanism], device, direction, frozenset({f}))
    ]
    wanted = data.draw(st.sets(st.sampled_from(declared), max_size=4), label="features") - {"dropout", "seed", "gqa"}
    biases = [f for f in wanted if f.endswith("bias")]
    wanted -= set(biases[1:])  # one bias at a time
    g = data.draw(st.integers(1, 2), label="G")
    shared = data.draw(st.integers(1, 3), label="H / G") if "gqa" in declared else 1
    t, s = data.draw(LENGTHS, label="T"), data.draw(LENGTHS, label="S")
    if mechanism in ("additive", "concat"):  # D numbers a pair: the formula needs them all at once
        t, s = min(t, 128), min(s, 128)
    if (backend, device) == ("flex", "cpu"):  # not tiled there; its blocks of the mask are 128 long
        t, s = min(t, 129), min(s, 129)
    d = 16 if (backend, device) == ("flex", "cuda") else data.draw(st.integers(1, 5), label="D")
    sizes = Sizes(b=data.draw(st.integers(1, 2), label="B"), h=g * shared, g=g, t=t, s=s, d=d)
    return problem_for(mechanism, device, dtype_for(backend, device), sizes, *wanted)


@pytest.mark.parametrize("pair", pairs_with())
@settings(max_examples=8, **UNRULY)
@given(data=st.data())
def test_any_shape_and_combination_equals_the_formula(pair: Pair, data: st.DataObject) -> None:
    p = drawn_problem(data, pair, "forward")
    with torch.no_grad():
        close(output(p, pair), formula(p)[0])


@pytest.mark.parametrize("pair", pairs_with(direction="backward"))
@settings(max_examples=6, **UNRULY)
@given(data=st.data())
def test_gradients_of_any_shape_and_combination_equal_the_formulas(pair: Pair, data: st.DataObject) -> None:
    p = trainable(drawn_problem(data, pair, "backward").with_(weights=False))
    found = attend(p.q, p.k, p.v, backend=pair[0], **p.options).output
    assert_same_gradients((found,), (formula(p)[0],), p.leaves)


@pytest.mark.parametrize("length", [511, 512, 513])
@pytest.mark.parametrize("mechanism", ["dot", "additive"])
def test_tiles_meet_at_their_borders(mechanism: str, length: int) -> None:
    """Where rows and columns of tiles end, against the reference, with everything on at once."""
    sizes = Sizes(b=1, h=2, g=1, t=length, s=length + 1, d=2)
    p = trainable(problem_for(mechanism, "cpu", torch.float64, sizes, "causal", "trainable bias"))
    p = p.with_(dropout=0.2, seed=3)
    ours, theirs = (attend(p.q, p.k, p.v, backend=b, **p.options).output for b in ("tiled", "reference"))
    close(ours, theirs)
    assert_same_gradients((ours,), (theirs,), p.leaves)


# ---- auto


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("feature", FEATURES)
def test_auto_finds_a_backend_wherever_one_is_declared(mechanism: str, feature: str) -> None:
    p = problem_for(mechanism, "cpu", torch.float64, Sizes(), feature)
    declared = capable_backends(KIND_OF[mechanism], "cpu", "forward", frozenset({feature}))
    if not declared:
        with pytest.raises(ValueError, match=r"^no backend supports |can only be padding"):
            attend(p.q, p.k, p.v, **p.options)
        return
    with torch.no_grad():
        found = attend(p.q, p.k, p.v, **p.options).output
        if not p.dropout:
            close(found, formula(p)[0])


def test_a_new_mechanism_is_its_score() -> None:
    """The base class leaves exactly one thing open."""
    with pytest.raises(NotImplementedError):
        Mechanism().tile(*inputs(Sizes())[:2], ())
