"""Cached decoding equals uncached, for every mask, position scheme, cache, split of the text and backend."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import Additive, Concat, Frame, General, Mechanism, attend, masks
from regard.attention.backends import missing_features
from regard.attention.biases import Alibi, Bias, T5Bias, XLRelative
from regard.attention.cache import Cache, CrossCache, GrowingCache, ModelCache, RingCache, StaticCache
from regard.attention.cache.static_cache import Slots
from regard.attention.masks import Mask
from regard.layers.rope import Rope

B, H, G, L, D = 2, 4, 2, 14, 4
RING = 6
DOCUMENTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2])
LENGTHS = torch.tensor([L, 9])

WINDOWED: dict[str, Mask] = {  # masks that look back at most RING keys: those a ring cache is for
    "window": masks.window(5),
    "widest window": masks.window(RING),
    "window ahead": masks.window(3, ahead=2),
    "dilated": masks.dilated(3, 2),
    "window & padding": masks.window(RING) & masks.padding(LENGTHS),
    "window & document": masks.window(RING) & masks.document(),
}
ALL_MASKS: dict[str, Mask | None] = WINDOWED | {
    "none": None,
    "causal": masks.causal(),
    "strided": masks.strided(4),
    "fixed": masks.fixed(4),
    "blocks": masks.blocks(4, 1),
    "bigbird": masks.bigbird(4, 2, 30.0),
    "causal & bigbird": masks.causal() & masks.bigbird(4, 2, 30.0),
    "prefix": masks.prefix(3),
    "causal | prefix": masks.causal() | masks.prefix(3),
    "padding": masks.padding(LENGTHS),
    "causal & padding": masks.causal() & masks.padding(LENGTHS),
    "causal & document": masks.causal() & masks.document(),
    "causal & ~window": masks.causal() & ~masks.window(3),  # the first rows see nothing
}
SCHEMES = ("none", "rope", "alibi", "t5", "xl")
BACKENDS = ("reference", "sdpa", "tiled")
SPLITS = ((L,), (1,) * L, (5, 1, 7, 1))


class Tokens(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor

    def at(self, rows: slice, cols: slice) -> Tokens:
        return Tokens(*(x[rows, :, cols] for x in self))


def draw(batch: int = B, length: int = L, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, D) for heads in (H, G, G)]
    return Tokens(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


TOKENS = draw()


@functools.cache
def bias_of(scheme: str) -> Bias | None:
    torch.manual_seed(1)
    made: dict[str, Callable[[], Bias]] = {
        "alibi": lambda: Alibi(H),
        "t5": lambda: T5Bias(H, n_buckets=8, max_distance=10),
        "xl": lambda: XLRelative(H, D),
    }
    if scheme not in made:
        return None
    bias = made[scheme]().double().requires_grad_(False)
    for parameter in bias.parameters():
        parameter.normal_()
    return bias


ROPE = Rope(D)


def turned(tokens: Tokens, positions: Tensor, scheme: str) -> Tokens:
    """RoPE's share: q and k turned by where they stand."""
    if scheme != "rope":
        return tokens
    return Tokens(ROPE(tokens.q, positions), ROPE(tokens.k, positions), tokens.v)


def documented(frame: Frame) -> Frame:
    return frame.with_documents(DOCUMENTS[frame.q_pos.clamp(0, L - 1)], DOCUMENTS[frame.k_pos.clamp(0, L - 1)])


def uncached(tokens: Tokens, mask: Mask | None, scheme: str, mechanism: Mechanism | None = None) -> Tensor:
    length = tokens.q.shape[2]
    tokens = turned(tokens, torch.arange(length), scheme)
    frame = documented(Frame.of(tokens.q, tokens.k))
    options = {"mask": mask, "bias": bias_of(scheme), "mechanism": mechanism, "frame": frame}
    return attend(*tokens, **options, backend="reference").output


def feed(
    cache: Cache,
    tokens: Tokens,
    mask: Mask | None,
    scheme: str = "none",
    backend: str = "reference",
    positions: Tensor | None = None,
    mechanism: Mechanism | None = None,
) -> Tensor:
    """One cached step: what an attention layer does with its cache."""
    standing = cache.next_positions(tokens.q.shape[2]) if positions is None else positions
    q, k, v = turned(tokens, standing, scheme)
    k_all, v_all = cache.update(k, v, positions)
    frame = documented(cache.frame(H, q.shape[2]))
    options = {"mask": mask, "bias": bias_of(scheme), "mechanism": mechanism, "frame": frame}
    return attend(q, k_all, v_all, **options, backend=backend).output


def chunks(sizes: tuple[int, ...] | list[int]) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size


def decode(
    cache: Cache, sizes: tuple[int, ...], mask: Mask | None, scheme: str, backend: str
) -> Iterator[tuple[slice, Tensor]]:
    cache.reset()
    for cols in chunks(sizes):
        yield cols, feed(cache, TOKENS.at(slice(None), cols), mask, scheme, backend)


@functools.cache
def expected(mask_name: str, scheme: str) -> list[Tensor]:
    """Entry n: attention without a cache over the first n tokens. What decoding has seen so far is that much text."""
    mask = ALL_MASKS[mask_name]
    return [uncached(TOKENS.at(slice(None), slice(0, n)), mask, scheme) for n in range(1, L + 1)]


MAKE: dict[str, Callable[[int], Cache]] = {
    "growing": lambda batch: GrowingCache(),
    "static": lambda batch: StaticCache(batch, G, L + 2, D, torch.float64),
    "ring": lambda batch: RingCache(batch, G, RING, D, torch.float64),
    "spare ring": lambda batch: RingCache(batch, G, RING, D, torch.float64, spare=3, keep_keys=L),
}


def masks_for(kind: str) -> list[str]:
    return list(WINDOWED if "ring" in kind else ALL_MASKS)


def able(backend: str, scheme: str) -> bool:
    feature = {"alibi": "bias", "t5": "trainable bias", "xl": "content bias"}.get(scheme, "plain")
    return not missing_features(backend, "dot", "cpu", "forward", frozenset({feature, "mask", "gqa"}))


def covering_cases() -> Iterator[tuple[str, str, str, str]]:
    """Every (kind, mask, scheme), with backends in turn: each also meets every kind, mask and scheme it can do."""
    for n, kind in enumerate(("growing", "static", "ring")):
        for i, mask in enumerate(masks_for(kind)):
            for j, scheme in enumerate(SCHEMES):
                backends = [backend for backend in BACKENDS if able(backend, scheme)]
                yield kind, mask, scheme, backends[(n + i + j) % len(backends)]


EVERY = [pytest.param(*case, id="-".join(case).replace(" ", "")) for case in covering_cases()]


def check(kind: str, mask: str, scheme: str, backend: str, sizes: tuple[int, ...], atol: float = 1e-11) -> None:
    cache = MAKE[kind](B)
    steps = list(decode(cache, sizes, ALL_MASKS[mask], scheme, backend))
    wanted = [expected(mask, scheme)[cols.stop - 1][:, :, cols] for cols, _ in steps]
    torch.testing.assert_close(torch.cat([output for _, output in steps], 2), torch.cat(wanted, 2), rtol=0, atol=atol)
    assert cache.length == sum(sizes)


@pytest.mark.parametrize(("kind", "mask", "scheme", "backend"), EVERY)
def test_cached_equals_uncached(kind: str, mask: str, scheme: str, backend: str) -> None:
    for sizes in SPLITS:
        check(kind, mask, scheme, backend, sizes)


@pytest.mark.parametrize("mask", ["causal", "strided", "fixed", "dilated", "window", "causal & padding"])
def test_under_a_causal_mask_that_is_the_whole_text_at_once(mask: str) -> None:
    whole = expected(mask, "rope")[-1]
    steps = [output for _, output in decode(MAKE["static"](B), (1,) * L, ALL_MASKS[mask], "rope", "sdpa")]
    torch.testing.assert_close(torch.cat(steps, 2), whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", MAKE)
def test_only_the_last_of_the_new_tokens_may_ask(kind: str) -> None:
    """A prompt of which only the last token's logits are wanted."""
    tokens, cache = draw(), MAKE[kind](B)
    for cols in chunks((6, 5)):
        _, k, v = tokens.at(slice(None), cols)
        k_all, v_all = cache.update(k, v)
        frame = cache.frame(H, 2)
        q = tokens.q[:, :, cols.stop - 2 : cols.stop]
        output = attend(q, k_all, v_all, mask=masks.window(RING), frame=frame, backend="reference").output
        wanted = expected("widest window", "none")[-1][:, :, cols.stop - 2 : cols.stop]
        torch.testing.assert_close(output, wanted, rtol=0, atol=1e-11)
        biased = attend(q, k_all, v_all, mask=masks.window(RING), bias=bias_of("t5"), frame=frame).output
        wanted = expected("widest window", "t5")[-1][:, :, cols.stop - 2 : cols.stop]
        torch.testing.assert_close(biased, wanted, rtol=0, atol=1e-11)


def test_cases_cover_every_pair_of_choices() -> None:
    cases = set(covering_cases())
    assert {(mask, backend) for _, mask, _, backend in cases} == set(itertools.product(ALL_MASKS, BACKENDS))
    able_pairs = {(s, b) for s in SCHEMES for b in BACKENDS if able(b, s)}
    assert {(kind, scheme, backend) for kind, _, scheme, backend in cases} == {
        (kind, *pair) for kind in ("growing", "static", "ring") for pair in able_pairs
    }


def test_only_sdpa_with_content_bias_is_left_out() -> None:
    assert [(b, s) for b in BACKENDS for s in SCHEMES if not able(b, s)] == [("sdpa", "xl")]


@pytest.mark.parametrize(("kind", "scheme"), [("static", "t5"), ("ring", "none")])
def test_flex_reads_the_same_frames(kind: str, scheme: str) -> None:
    check(kind, "window", scheme, "flex", (5, 4, 1), atol=1e-9)


splits = st.lists(st.integers(1, 8), min_size=1, max_size=L).map(
    lambda sizes: [min(size, L - sum(sizes[:i])) for i, size in enumerate(sizes) if sum(sizes[:i]) < L]
)


@settings(max_examples=120, deadline=None)
@given(kind=st.sampled_from(list(MAKE)), sizes=splits, data=st.data())
def test_any_split(kind: str, sizes: list[int], data: st.DataObject) -> None:
    mask = data.draw(st.sampled_from(masks_for(kind)))
    scheme, backend = data.draw(st.sampled_from([(s, b) for s in SCHEMES for b in BACKENDS if able(b, s)]))
    check(kind, mask, scheme, backend, tuple(sizes))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("make", [General, Additive, Concat], ids=lambda make: make.__name__)
def test_other_mechanisms(make: type[General | Additive], kind: str, backend: str) -> None:
    torch.manual_seed(2)
    mechanism, mask, cache = make(H, D).double().requires_grad_(False), masks.window(RING), MAKE[kind](B)
    whole = uncached(draw(), mask, "alibi", mechanism)
    for cols in chunks((5, 1, 1, 4, 3)):
        output = feed(cache, draw().at(slice(None), cols), mask, "alibi", backend, mechanism=mechanism)
        torch.testing.assert_close(output, whole[:, :, cols], rtol=0, atol=1e-11)


@pytest.mark.parametrize("scheme", ["alibi", "xl"])
@pytest.mark.parametrize("kind", ["growing", "static", "ring"])
def test_texts_longer_than_a_block(kind: str, scheme: str) -> None:
    """Plans of many blocks: slots out of order, empty ones between, a prompt longer than the ring."""
    length, window = 900, 280
    made = {
        "growing": GrowingCache,
        "static": lambda: StaticCache(1, G, 1200, D, torch.float64),
        "ring": lambda: RingCache(1, G, window, D, torch.float64),
    }
    tokens, mask, cache = draw(1, length), masks.window(window), made[kind]()
    whole = uncached(tokens, mask, scheme)
    for cols in chunks((10, 620, 1, 260, 1, 8)):
        output = feed(cache, tokens.at(slice(None), cols), mask, scheme, "tiled")
        torch.testing.assert_close(output, whole[:, :, cols], rtol=0, atol=1e-10)


def test_rope_keys_are_held_turned() -> None:
    tokens = draw()
    for kind in ("growing", "static", "spare ring"):
        cache = MAKE[kind](B)
        for cols in chunks((6, 1, 5, 2)):
            feed(cache, tokens.at(slice(None), cols), masks.window(RING), "rope")
        keys, positions = cache.keys()
        assert torch.equal(keys[:, :, :L], ROPE(tokens.k, torch.arange(L)))
        assert positions[:L].tolist() == list(range(L))
        assert (positions[L:] == -1).all()


# Rows of different length


class Step(NamedTuple):
    """The tokens that each row gets in one update, and on which side the shorter rows are filled up."""

    counts: list[int]
    left: bool


def ragged(cache: Cache, rows: list[Tokens], steps: list[Step], mask: Mask, scheme: str, backend: str) -> None:
    """Feed the rows together, each at its own pace, and compare every token with its row attended to alone."""
    alone = [uncached(row, mask, scheme) for row in rows]
    done = [0] * len(rows)
    for counts, left in steps:
        width = max(counts)
        positions = torch.full((len(rows), width), -1)
        filled = [draw(1, width, seed=99)] * len(rows)  # padding is not zero: it must not be seen
        for r, count in enumerate(counts):
            cols = slice(width - count, width) if left else slice(0, count)
            positions[r, cols] = torch.arange(done[r], done[r] + count)
            filled[r] = Tokens(*(x.clone() for x in filled[r]))
            for x, source in zip(filled[r], rows[r], strict=True):
                x[:, :, cols] = source[:, :, done[r] : done[r] + count]
        tokens = Tokens(*(torch.cat(parts) for parts in zip(*filled, strict=True)))
        output = feed(cache, tokens, mask, scheme, backend, positions)
        for r, count in enumerate(counts):
            got = output[r, :, positions[r] >= 0]
            torch.testing.assert_close(got, alone[r][0, :, done[r] : done[r] + count], rtol=0, atol=1e-11)
            done[r] += count
    assert cache.lengths.tolist() == done


PROMPTS_THEN_STEPS = [Step([3, 8, 1], False), Step([1, 1, 1], False), Step([1, 0, 1], False), Step([2, 1, 0], True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MAKE)
def test_rows_of_different_length_are_as_if_alone(kind: str, scheme: str, backend: str) -> None:
    if not able(backend, scheme):
        backend = "tiled"
    rows = [draw(1, L, seed) for seed in range(3)]
    mask = masks.window(RING) if "ring" in kind else masks.causal()
    ragged(MAKE[kind](3), rows, PROMPTS_THEN_STEPS, mask, scheme, backend)


two_counts = st.lists(st.integers(0, 7), min_size=2, max_size=2)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(MAKE)),
    scheme=st.sampled_from(SCHEMES),
    steps=st.lists(st.builds(Step, two_counts, st.booleans()), min_size=1, max_size=5),
)
def test_rows_at_any_pace(kind: str, scheme: str, steps: list[Step]) -> None:
    kept: list[Step] = []
    for step in steps:
        if any(step.counts) and all(sum(s.counts[row] for s in [*kept, step]) <= L for row in (0, 1)):
            kept.append(step)
    assume(kept)
    mask = masks.window(RING) if "ring" in kind else masks.causal()
    ragged(MAKE[kind](2), [draw(1, L, seed) for seed in (3, 4)], kept, mask, scheme, "tiled")


@pytest.mark.parametrize("kind", MAKE)
def test_rows_part_ways_and_go_on_without_positions(kind: str) -> None:
    """After a ragged prompt, positions left out mean: each row goes on where it stands."""
    rows, mask, cache = [draw(1, L, seed) for seed in (0, 1)], masks.window(4), MAKE[kind](2)
    both = Tokens(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    feed(cache, both.at(slice(None), slice(0, 5)), mask, positions=torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]]))
    next_tokens = Tokens(*(torch.cat([a[:, :, 5:7], b[:, :, 3:5]]) for a, b in zip(*rows, strict=True)))
    output = feed(cache, next_tokens, mask, "none")
    torch.testing.assert_close(output[0], uncached(rows[0], mask, "none")[0, :, 5:7], rtol=0, atol=1e-11)
    torch.testing.assert_close(output[1], uncached(rows[1], mask, "none")[0, :, 3:5], rtol=0, atol=1e-11)
    assert cache.next_positions(1).tolist() == [[7], [5]]


# Compiled


def compiled_step(
    mask: Mask, scheme: str, backend: str = "aot_eager"
) -> tuple[Callable[..., Tensor], Callable[[], int]]:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    bias = bias_of(scheme)
    counter = CompileCounterWithBackend(backend)

    def step(cache: Cache, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        standing = cache.next_positions(q.shape[2]) if positions is None else positions
        q, k, v = turned(Tokens(q, k, v), standing, scheme)
        k, v = cache.update(k, v, positions)
        return attend(q, k, v, mask=mask, bias=bias, frame=cache.frame(H)).output

    return torch.compile(step, fullgraph=True, backend=counter), lambda: counter.frame_count


@pytest.mark.parametrize(("kind", "scheme"), [("static", "xl"), ("ring", "t5")])
def test_a_compiled_step_is_compiled_once(kind: str, scheme: str) -> None:
    step, n_graphs = compiled_step(masks.window(RING), scheme)
    tokens, cache, whole = draw(), MAKE[kind](B), uncached(draw(), masks.window(RING), scheme)
    for _ in range(2):  # the second time through a cache that was emptied
        feed(cache, tokens.at(slice(None), slice(0, 4)), masks.window(RING), scheme)
        outputs = [step(cache, *tokens.at(slice(None), slice(t, t + 1)), None) for t in range(4, L)]
        torch.testing.assert_close(torch.cat(outputs, 2), whole[:, :, 4:], rtol=0, atol=1e-11)
        assert n_graphs() == 1
        assert cache.length == L
        cache.reset()


def test_a_compiled_prompt_and_its_steps() -> None:
    step, n_graphs = compiled_step(masks.causal(), "rope")
    tokens, cache, whole = draw(), MAKE["static"](B), uncached(draw(), masks.causal(), "rope")
    for cols in chunks((5,) + (1,) * (L - 5)):
        output = step(cache, *tokens.at(slice(None), cols), None)
        torch.testing.assert_close(output, whole[:, :, cols], rtol=0, atol=1e-11)
    assert n_graphs() == 2, "one for the prompt, one for the steps"


def test_a_compiled_ragged_step_is_compiled_once() -> None:
    step, n_graphs = compiled_step(masks.causal(), "none", "eager")
    rows, cache = [draw(1, L, seed) for seed in (0, 1)], MAKE["static"](2)
    both = Tokens(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    feed(
        cache, both.at(slice(None), slice(0, 4)), masks.causal(), positions=torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]])
    )
    for t in range(2, 9):
        tokens = Tokens(*(torch.cat([a[:, :, t + 2 : t + 3], b[:, :, t : t + 1]]) for a, b in zip(*rows, strict=True)))
        paused = t % 3 == 0  # the first row gets nothing now and then; its token is then taken back
        output = step(cache, *tokens, torch.tensor([[-1 if paused else t + 2], [t]]))
        torch.testing.assert_close(
            output[1], uncached(rows[1], masks.causal(), "none")[0, :, t : t + 1], rtol=0, atol=1e-11
        )
        if paused:
            feed(cache, tokens, masks.causal(), positions=torch.tensor([[t + 2], [-1]]))
        else:
            alone = uncached(rows[0], masks.causal(), "none")[0, :, t + 2 : t + 3]
            torch.testing.assert_close(output[0], alone, rtol=0, atol=1e-11)
    assert n_graphs() == 1


def test_eager_and_compiled_steps_take_turns_until_the_end() -> None:
    step, _ = compiled_step(masks.causal(), "none", "eager")
    cache, tokens = StaticCache(B, G, 6, D, torch.float64), draw()
    whole = uncached(tokens, masks.causal(), "none")
    for t in range(6):
        token = tokens.at(slice(None), slice(t, t + 1))
        output = step(cache, *token, None) if t % 2 else feed(cache, token, masks.causal())
        torch.testing.assert_close(output, whole[:, :, t : t + 1], rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="1 new tokens would make 7 in total, but the cache has max_len=6"):
        feed(cache, token, masks.causal())
    with pytest.raises(IndexError, match="out of"):  # a compiled step fails too, if in other words
        step(cache, *token, None)


# Beams, drafts, what is kept


@pytest.mark.parametrize("ragged_rows", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", MAKE)
def test_reorder_follows_the_beams(kind: str, ragged_rows: bool) -> None:
    generator, mask, cache, batch = torch.Generator().manual_seed(5), masks.window(4), MAKE[kind](3), 3
    history = [draw(1, 0, r) for r in range(batch)]
    tokens = draw(batch, L, 6)
    for t in range(L - 2):
        token = tokens.at(slice(None), slice(t, t + 1))
        ended = ragged_rows and t == 4  # one row sits this step out
        positions = cache.next_positions(1).reshape(-1, 1).expand(batch, 1).clone() if ended else None
        if positions is not None:
            positions[1] = -1
        output = feed(cache, token, mask, "alibi", "tiled", positions)
        for r in range(batch):
            if ended and r == 1:
                continue
            joined = zip(history[r], token.at(slice(r, r + 1), slice(None)), strict=True)
            history[r] = Tokens(*(torch.cat(pair, 2) for pair in joined))
            torch.testing.assert_close(
                output[r, :, -1], uncached(history[r], mask, "alibi")[0, :, -1], rtol=0, atol=1e-11
            )
        index = torch.randint(batch, (batch,), generator=generator)
        cache.reorder(index)
        history = [history[i] for i in index.tolist()]
    assert sorted(set(cache.lengths.tolist())) == sorted({h.q.shape[2] for h in history})


def test_growing_and_cross_caches_grow_to_the_beams() -> None:
    tokens, index = draw(), torch.tensor([0, 0, 0, 1, 1])
    growing, cross = GrowingCache(), CrossCache()
    growing.update(tokens.k, tokens.v)
    cross.update(tokens.k, tokens.v)
    for cache in (growing, cross):
        cache.reorder(index)
        assert torch.equal(cache.keys()[0], tokens.k[index])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["rope", "t5"])
@pytest.mark.parametrize("kind", ["growing", "static", "spare ring"])
def test_truncate_takes_drafts_back(kind: str, scheme: str, backend: str) -> None:
    """Speculation: four drafted tokens at a time, of which 0, 1 … 4 turn out right."""
    tokens, mask, cache = draw(), masks.window(RING), MAKE[kind](B)
    whole, done = uncached(tokens, mask, scheme), 0
    for turn, right in enumerate((1, 3, 0, 4, 1, 2)):
        draft = draw(B, 4, seed=50 + turn)
        for mine, true in zip(draft, tokens, strict=True):
            mine[:, :, :right] = true[:, :, done : done + right]
        output = feed(cache, draft, mask, scheme, backend)
        torch.testing.assert_close(output[:, :, :right], whole[:, :, done : done + right], rtol=0, atol=1e-11)
        done += right
        cache.truncate(done)
        assert cache.length == done


@pytest.mark.parametrize("kind", ["growing", "static", "spare ring"])
def test_rows_accept_different_numbers_of_drafts(kind: str) -> None:
    tokens, mask, cache = draw(), masks.window(RING), MAKE[kind](B)
    whole = uncached(tokens, mask, "alibi")
    feed(cache, tokens.at(slice(None), slice(0, 8)), mask, "alibi", "tiled")
    cache.truncate(torch.tensor([5, 7]))
    assert cache.lengths.tolist() == [5, 7]
    rest = Tokens(*(torch.stack([x[0, :, 5:9], x[1, :, 7:11]]) for x in tokens))
    output = feed(cache, rest, mask, "alibi", "tiled")
    for row, start in ((0, 5), (1, 7)):
        torch.testing.assert_close(output[row], whole[row, :, start : start + 4], rtol=0, atol=1e-11)


def test_a_ring_takes_back_as_many_as_it_has_spare_and_one() -> None:
    tokens, mask = draw(), masks.window(RING)
    whole = uncached(tokens, mask, "xl")
    for spare in (0, 2):
        cache = RingCache(B, G, RING, D, torch.float64, spare=spare)
        for cols in chunks((7, 5)):
            feed(cache, tokens.at(slice(None), cols), mask)
        with pytest.raises(ValueError, match=f"removes {spare + 2} tokens .* spare={spare} allows {spare + 1}"):
            cache.truncate(12 - spare - 2)
        cache = RingCache(B, G, RING, D, torch.float64, spare=spare)
        feed(cache, tokens.at(slice(None), slice(0, 12)), mask, "xl")
        cache.truncate(11 - spare)
        for t in range(11 - spare, L):  # far from the start: an empty slot is many positions away
            output = feed(cache, tokens.at(slice(None), slice(t, t + 1)), mask, "xl")
            torch.testing.assert_close(output, whole[:, :, t : t + 1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", MAKE)
def test_truncate_to_nothing_and_beyond_the_end(kind: str) -> None:
    tokens, mask, cache = draw().at(slice(None), slice(0, 4)), masks.window(RING), MAKE[kind](B)
    first = feed(cache, tokens, mask)
    cache.truncate(100)
    assert cache.length == 4
    cache.truncate(0)
    assert cache.length == 0
    torch.testing.assert_close(feed(cache, tokens, mask), first, rtol=0, atol=1e-12)


def test_evicted_keys_can_still_be_looked_at() -> None:
    tokens, mask = draw(), masks.window(3)
    cache = RingCache(B, G, 3, D, torch.float64, keep_keys=L)
    for cols in chunks((5, 1, 1, 4, 1, 2)):
        feed(cache, tokens.at(slice(None), cols), mask)
    keys, positions = cache.keys()
    assert torch.equal(keys, tokens.k)
    assert torch.equal(positions, torch.arange(L))
    with pytest.raises(ValueError, match=f"1 new tokens would make {L + 1} in total, but the cache has keep_keys={L}"):
        feed(cache, tokens.at(slice(None), slice(0, 1)), mask)


@pytest.mark.parametrize(
    "positions", [None, torch.tensor([list(range(L)), [-1, *range(L - 1)]])], ids=["even", "ragged"]
)
def test_no_slot_is_written_twice_at_once(positions: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two writes to one slot wins is left to chance on a GPU, so a long prompt must not ask that."""
    seen: list[list[int]] = []
    write = Slots.write

    def watched(self: Slots, slots: Tensor, *others: Tensor) -> None:
        seen.extend([slot for slot in row if slot < self.n_slots] for row in slots.tolist())
        write(self, slots, *others)

    monkeypatch.setattr(Slots, "write", watched)
    RingCache(B, G, RING, D, torch.float64).update(draw().k, draw().v, positions)
    assert seen
    assert all(sorted(row) == list(range(RING)) for row in seen)


def test_a_ring_stays_as_small_as_its_window() -> None:
    cache, small = RingCache(B, G, 4, D, torch.float64), []
    for _ in range(50):
        tokens = draw(B, 3)
        cache.update(tokens.k, tokens.v)
        small.append(cache.memory())
    assert len(set(small)) == 1
    assert cache.length == 150
    keys, positions = cache.keys()
    assert sorted(positions.tolist()) == [146, 147, 148, 149]
    assert torch.equal(keys[:, :, 149 % 4], draw(B, 3).k[:, :, 2])


def test_memory_is_what_is_held() -> None:
    tokens = draw()
    growing = GrowingCache()
    assert growing.memory() == 0
    growing.update(tokens.k, tokens.v)
    assert growing.memory() == 2 * B * G * L * D * 8
    static = StaticCache(B, G, 31, D, torch.bfloat16)
    assert static.memory() == 2 * B * G * 32 * D * 2 + 32 * 8 + 8  # one slot more for padding, and the positions


@pytest.mark.parametrize("kind", MAKE)
def test_reset_leaves_nothing_behind(kind: str) -> None:
    cache, tokens = MAKE[kind](B), draw().at(slice(None), slice(0, 5))
    broken = Tokens(*(torch.full_like(x, float("inf")) for x in tokens))
    cache.update(broken.k, broken.v, torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]]))
    cache.reset()
    assert (cache.length, cache.lengths.shape) == (0, (1,))
    for cols in chunks((3, 1, 1)):
        output = feed(cache, tokens.at(slice(None), cols), masks.window(RING))
        torch.testing.assert_close(output, uncached(tokens, masks.window(RING), "none")[:, :, cols], rtol=0, atol=1e-12)


# Gradients


def test_gradients_flow_through_a_growing_cache() -> None:
    tokens = Tokens(*(x.requires_grad_() for x in draw()))
    whole = torch.autograd.grad(uncached(tokens, masks.causal(), "t5").pow(2).sum(), tokens)
    cache = GrowingCache()
    parts = [feed(cache, tokens.at(slice(None), cols), masks.causal(), "t5", "tiled") for cols in chunks((5, 1, 8))]
    split = torch.autograd.grad(torch.cat(parts, 2).pow(2).sum(), tokens)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("by_row", [False, True], ids=["shared positions", "positions by row"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_ring_is_the_memory_of_transformer_xl(size: int, by_row: bool) -> None:
    """New keys carry gradients, remembered ones do not."""
    before, now = draw(B, 5, seed=1), Tokens(*(x.requires_grad_() for x in draw(B, size, seed=2)))
    cache, mask = RingCache(B, G, RING, D, torch.float64), masks.window(RING)
    feed(cache, before, mask)
    positions = torch.arange(5, 5 + size).expand(B, -1) if by_row else None
    got = torch.autograd.grad(feed(cache, now, mask, "xl", "tiled", positions).sum(), now)
    joined = Tokens(*(torch.cat(pair, 2) for pair in zip(before, now, strict=True)))
    wanted = torch.autograd.grad(uncached(joined, mask, "xl")[:, :, 5:].sum(), now)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
    assert not cache.keys()[0].requires_grad


def test_a_static_cache_refuses_gradients() -> None:
    tokens = Tokens(*(x.requires_grad_() for x in draw()))
    with pytest.raises(ValueError, match=r"requires a gradient, but StaticCache.*no_grad"):
        MAKE["static"](B).update(tokens.k, tokens.v)
    with torch.no_grad():
        MAKE["static"](B).update(tokens.k, tokens.v)


# Cross-attention and whole models


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["plain", "padding mask", "positions"])
def test_cross_attention_is_computed_once(how: str, backend: str) -> None:
    memory, tokens = draw(B, 9, seed=8), draw(B, 5, seed=9)
    lengths = torch.tensor([9, 6])
    mask = None if how == "plain" else masks.padding(lengths)
    whole = attend(tokens.q, memory.k, memory.v, mask=mask, backend="reference").output
    cache = CrossCache()
    assert not cache.is_filled
    positions = torch.arange(9).expand(B, -1).masked_fill(torch.arange(9) >= lengths[:, None], -1)
    cache.update(memory.k, memory.v, positions if how == "positions" else None)
    for cols in chunks((2, 1, 1, 1)):
        assert cache.is_filled
        k, v = cache.update(draw(B, 9, seed=77).k, draw(B, 9, seed=77).v)  # ignored: it is filled
        q = tokens.q[:, :, cols]
        mine = mask if how == "padding mask" else None
        output = attend(q, k, v, mask=mine, frame=cache.frame(H, q.shape[2]), backend=backend).output
        torch.testing.assert_close(output, whole[:, :, cols], rtol=0, atol=1e-11)
        cache.truncate(1)
    assert cache.length == 9
    assert cache.memory() >= 2 * B * G * 9 * D * 8
    cache.reset()
    assert not cache.is_filled


def test_reordering_beams_of_the_same_source_copies_nothing() -> None:
    memory, cache = draw(2, 9, seed=8), CrossCache()
    cache.update(memory.k, memory.v, torch.arange(18).view(2, 9))
    cache.reorder(torch.tensor([0, 0, 1, 1]))
    k, version = cache.keys()[0], cache.version
    cache.reorder(torch.tensor([1, 0, 3, 3]))
    assert cache.keys()[0] is k
    assert cache.version is version
    cache.reorder(torch.tensor([3, 0]))
    assert torch.equal(cache.keys()[0], memory.k.flip(0))
    assert torch.equal(cache.keys()[1], torch.arange(18).view(2, 9).flip(0))
    cache.reset()
    cache.update(memory.k, memory.v)
    cache.reorder(torch.tensor([1, 0]))
    assert torch.equal(cache.keys()[0], memory.k.flip(0)), "reset forgets the sources"


def test_a_model_cache_forwards_to_every_layer() -> None:
    tokens = draw()
    layers = [GrowingCache(), MAKE["static"](B), MAKE["spare ring"](B)]
    cache = ModelCache(layers, cross=[CrossCache() for _ in layers])
    for layer, cross in zip(cache, cache.cross, strict=True):
        layer.update(tokens.k, tokens.v)
        cross.update(tokens.k[:, :, :3], tokens.v[:, :, :3])
    assert (len(cache), cache[1], cache.layers[2]) == (3, layers[1], layers[2])
    assert (cache.length, cache.lengths.tolist(), cache.next_positions(2).tolist()) == (L, [L], [L, L + 1])
    assert cache.memory() == sum(x.memory() for x in (*cache.layers, *cache.cross))
    cache.truncate(L - 1)
    assert [x.length for x in cache.layers] == [L - 1] * 3
    with pytest.raises(ValueError, match="removes"):
        cache.truncate(2)
    assert [x.length for x in cache.layers] == [L - 1] * 3, "all or none"
    cache.reorder(torch.tensor([1, 1]))
    for x in (*cache.layers, *cache.cross):
        assert torch.equal(x.keys()[0][0], x.keys()[0][1])
    cache.reset()
    assert [x.length for x in (*cache.layers, *cache.cross)] == [0] * 6


# What is refused


def updated(kind: str, *shape: int, dtype: torch.dtype = torch.float64) -> Cache:
    cache = MAKE[kind](B)
    cache.update(draw().k, draw().v)
    x = torch.zeros(shape, dtype=dtype)
    cache.update(x, x)
    return cache


@pytest.mark.parametrize("kind", MAKE)
def test_tokens_that_do_not_belong_here(kind: str) -> None:
    for shape, message in (
        ((3, G, 1, D), "k has batch size 3, but the cache has batch size 2"),
        ((B, 3, 1, D), "k has heads 3, but the cache has heads 2"),
        ((B, G, 1, 5), "k has head width 5, but the cache has head width 4"),
        ((B, G, 0, D), r"k is empty: length is 0 in shape \(2, 2, 0, 4\)"),
        ((B, G, D), r"k must have 4 dimensions .* got shape \(2, 2, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            updated(kind, *shape)
    with pytest.raises(TypeError, match=r"k is torch.float32, but the cache holds torch.float64"):
        updated(kind, B, G, 1, D, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"k has .* \(2, 2, 14\) but v has \(2, 2, 13\)"):
        MAKE[kind](B).update(draw().k, draw().v[:, :, 1:])
    for positions in (torch.zeros(L - 1, dtype=torch.int64), torch.zeros(3, L, dtype=torch.int64), torch.zeros(L)):
        with pytest.raises(ValueError, match=r"positions must be integers of shape \(14,\) or \(2, 14\)"):
            MAKE[kind](B).update(draw().k, draw().v, positions)


def test_no_room() -> None:
    cache, tokens = StaticCache(B, G, 5, D, torch.float64), draw()
    with pytest.raises(ValueError, match="14 new tokens would make 14 in total, but the cache has max_len=5"):
        cache.update(tokens.k, tokens.v)
    assert cache.length == 0, "a refused write leaves no trace"
    tokens = tokens.at(slice(None), slice(0, 2))
    cache.update(tokens.k, tokens.v)
    with pytest.raises(ValueError, match="2 new tokens would make 6 in total, but the cache has max_len=5"):
        cache.update(tokens.k, tokens.v, torch.tensor([4, 5]))
    cache.update(tokens.k, tokens.v, torch.tensor([2, 3]))
    cache.truncate(3)
    cache.update(tokens.k, tokens.v)
    assert cache.length == 5


def test_other_refusals() -> None:
    cache = StaticCache(B, G, 5, D)
    with pytest.raises(ValueError, match=r"frame.* call update\(k, v\) first"):
        cache.frame(H)
    with pytest.raises(ValueError, match=r"beam_index of shape \(3,\) does not fit batch=2"):
        cache.reorder(torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="length=-1 must not be negative"):
        cache.truncate(-1)
    cache.update(torch.zeros(B, G, 2, D), torch.zeros(B, G, 2, D))
    with pytest.raises(ValueError, match="n_queries=3 must lie between 1 and the 2 tokens"):
        cache.frame(H, 3)
    for arguments, message in (((0, G, 5, D), "batch=0"), ((B, G, 0, D), "max_len=0"), ((B, G, 5, -1), "d_head=-1")):
        with pytest.raises(ValueError, match=message):
            StaticCache(*arguments)
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        RingCache(B, G, 0, D)
    with pytest.raises(ValueError, match="spare=-1 must not be negative"):
        RingCache(B, G, 2, D, spare=-1)
    with pytest.raises(ValueError, match="an empty CrossCache needs k and v"):
        CrossCache().frame(H, 1)
    with pytest.raises(ValueError, match="empty GrowingCache"):
        GrowingCache().keys()
    with pytest.raises(ValueError, match=r"layers=.* is empty"):
        ModelCache([])
    with pytest.raises(ValueError, match="cross has 1 caches but layers has 2"):
        ModelCache([GrowingCache(), GrowingCache()], [CrossCache()])
