"""Masks: each equals its definition written as a loop, combines like a set, and plans blocks it can answer for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import Frame, attend, masks
from regard.attention.frame import Site
from regard.attention.mask import EMPTY, FULL, PARTIAL
from regard.attention.masks import Mask, plan

Pair = Callable[[int, int], bool]
"""Whether the query at position i may look at the key at position j."""
ALL = slice(None)
QUICK = settings(max_examples=40, deadline=None, derandomize=True)

DENSE = torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) < 0.5

# Every mask of positions alone, beside its definition.
DEFINED: dict[str, tuple[Mask, Pair]] = {
    "everything": (masks.everything(), lambda i, j: True),
    "causal": (masks.causal(), lambda i, j: j <= i),
    "window": (masks.window(4), lambda i, j: j in (i, i - 1, i - 2, i - 3)),
    "window of one": (masks.window(1), lambda i, j: i == j),
    "window ahead": (masks.window(3, ahead=2), lambda i, j: -3 < j - i <= 2),
    "prefix": (masks.prefix(5), lambda i, j: j < 5),
    "dilated": (masks.dilated(3, 2), lambda i, j: i - j in (0, 2, 4)),
    "dilated by one": (masks.dilated(3, 1), lambda i, j: i - j in (0, 1, 2)),
    "strided": (masks.strided(4), lambda i, j: j <= i and (i - j < 4 or (i - j) % 4 == 0)),
    "strided both ways": (masks.strided(4, both_ways=True), lambda i, j: abs(i - j) < 4 or (i - j) % 4 == 0),
    "fixed": (masks.fixed(4), lambda i, j: j <= i and (i // 4 == j // 4 or j % 4 == 3)),
    "fixed, two": (masks.fixed(5, summary=2), lambda i, j: j <= i and (i // 5 == j // 5 or j % 5 in (3, 4))),
    "blocks": (masks.blocks(4), lambda i, j: i // 4 == j // 4),
    "blocks and neighbours": (masks.blocks(3, neighbours=1), lambda i, j: abs(i // 3 - j // 3) <= 1),
    "global": (masks.global_tokens(2), lambda i, j: i < 2 or j < 2),
    "grid": (masks.grid_windows(6, 3), lambda i, j: i < 0 or (i // 18, i % 6 // 3) == (j // 18, j % 6 // 3)),
    "grid, shifted": (
        masks.grid_windows(5, 2, shift=1, n_before=1),
        lambda i, j: (
            min(i, j) < 1
            or (((i - 1) // 5 + 1) // 2, ((i - 1) % 5 + 1) // 2) == (((j - 1) // 5 + 1) // 2, ((j - 1) % 5 + 1) // 2)
        ),
    ),
    "causal & window ahead": (masks.causal() & masks.window(3, ahead=2), lambda i, j: i - 3 < j <= i),
    "causal | prefix": (masks.causal() | masks.prefix(6), lambda i, j: j <= i or j < 6),
    "~window": (~masks.window(3), lambda i, j: not i - 3 < j <= i),
    "~(causal & blocks)": (~(masks.causal() & masks.blocks(4)), lambda i, j: j > i or i // 4 != j // 4),
}
# Those that need more than a position: a batch, documents, a hash.
OTHERS: dict[str, Mask] = {
    "padding": masks.padding(torch.tensor([9, 4])),
    "keep": masks.valid_keys(torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) < 0.6),
    "document": masks.document(),
    "from_dense": masks.from_dense(DENSE),
    "random blocks": masks.random_blocks(2, 40.0, seed=3),
    "bigbird": masks.bigbird(2, 1, 20.0),
}


def loop(pair: Pair, frame: Frame) -> Tensor:
    """(T, S), one pair at a time; an empty slot is seen by nobody."""
    rows = [[j >= 0 and pair(i, j) for j in frame.k_pos.tolist()] for i in frame.q_pos.tolist()]
    return torch.tensor(rows)


def whole(mask: Mask, frame: Frame) -> Tensor:
    sizes = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys)
    return mask.tile(ALL, ALL, frame).expand(sizes)


# ---- definitions


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(12, 12), (1, 9), (5, 12), (12, 5), (1, 1)])
def test_equals_its_definition(name: str, n_queries: int, n_keys: int) -> None:
    mask, pair = DEFINED[name]
    frame = Frame.aligned(1, 1, n_queries, n_keys)
    assert torch.equal(mask.dense(n_queries, n_keys)[0, 0], loop(pair, frame))


@pytest.mark.parametrize("name", DEFINED)
def test_reads_positions_not_indices(name: str) -> None:
    """Slots out of order, gaps and empty slots (a ring cache): the same predicate of the positions."""
    mask, pair = DEFINED[name]
    frame = Frame(1, 1, torch.tensor([9, 3, 11]), torch.tensor([8, -1, 10, 3, 4, -1, 6, 7, 30, 0]))
    assert torch.equal(whole(mask, frame)[0, 0], loop(pair, frame))


@pytest.mark.parametrize("name", [*DEFINED, *OTHERS])
def test_a_tile_is_a_part_of_the_whole(name: str) -> None:
    mask = DEFINED[name][0] if name in DEFINED else OTHERS[name]
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2])
    frame = Frame.aligned(2, 3, 12, 12).with_documents(documents)
    dense = whole(mask, frame)
    index = torch.tensor([7, 0, 3])
    for rows, cols in ((slice(2, 7), slice(5, 12)), (slice(11, 12), ALL), (index, slice(1, 4)), (index, index.flip(0))):
        wanted = dense[:, :, rows][..., cols]
        assert torch.equal(mask.tile(rows, cols, frame).expand_as(wanted), wanted)
    part = frame.part(range(1, 2), range(1, 3))
    assert torch.equal(mask.tile(ALL, ALL, part).expand(1, 2, 12, 12), dense[1:, 1:])


def test_padding_hides_what_follows_each_length() -> None:
    found = masks.padding(torch.tensor([3, 0, 5])).dense(2, 5, n_batch=3)
    assert found[:, 0, 0].tolist() == [[True] * 3 + [False] * 2, [False] * 5, [True] * 5]


def test_keep_hides_padding_wherever_it_stands() -> None:
    real = torch.tensor([[False, True, True], [True, False, True]])
    found = masks.valid_keys(real).dense(2, 3, n_batch=2, n_heads=2)
    assert torch.equal(found, real[:, None, None].expand(2, 2, 2, 3))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 5, 3, 4), (1, 5, 3, 4), (2, 1, 3, 4)])
def test_from_dense_takes_any_matrix(shape: tuple[int, ...]) -> None:
    given_mask = torch.rand(shape) < 0.5
    wanted = given_mask if len(shape) != 3 else given_mask[:, None]
    assert torch.equal(masks.from_dense(given_mask).dense(3, 4, n_batch=2, n_heads=5), wanted.expand(2, 5, 3, 4))


@pytest.mark.parametrize("per_row", [False, True])
def test_documents_see_themselves_only(per_row: bool) -> None:
    documents = torch.tensor([0, 0, 1, 1, 1, 2])
    if per_row:
        documents = torch.stack([documents, documents.flip(0)])
    frame = Frame.aligned(2, 1, 6, 6).with_documents(documents)
    rows = documents.expand(2, 6)
    assert torch.equal(whole(masks.document(), frame)[:, 0], rows[:, :, None] == rows[:, None, :])


def test_packed_documents_attend_as_if_alone() -> None:
    q, k, v = torch.randn(3, 1, 2, 7, 4)
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    frame = Frame.of(q, k).with_documents(documents)
    for backend in ("reference", "tiled", "sdpa"):
        packed = attend(q, k, v, mask=masks.causal() & masks.document(), frame=frame, backend=backend).output
        for part in (slice(0, 3), slice(3, 7)):
            alone = attend(q[:, :, part], k[:, :, part], v[:, :, part], mask=masks.causal(), backend=backend).output
            torch.testing.assert_close(packed[:, :, part], alone)


def test_queries_and_keys_of_different_documents() -> None:
    frame = Frame.aligned(1, 1, 2, 3).with_documents(torch.tensor([1, 0]), torch.tensor([0, 1, 1]))
    assert whole(masks.document(), frame)[0, 0].tolist() == [[False, True, True], [True, False, False]]


@pytest.mark.parametrize("percent", [0.0, 3.0, 25.0, 0.29, 100.0])
def test_random_blocks_are_as_dense_as_asked_and_always_the_same(percent: float) -> None:
    n = 300
    mask = masks.random_blocks(1, percent, seed=5)
    drawn = mask.dense(n)[0, 0]
    share, sigma = percent / 100, (percent / 100 * (1 - percent / 100)) ** 0.5 / n
    assert abs(drawn.double().mean().item() - share) <= 4 * sigma
    assert torch.equal(drawn, masks.random_blocks(1, percent, seed=5).dense(n)[0, 0])
    if 1 < percent < 100:
        assert not torch.equal(drawn, masks.random_blocks(1, percent, seed=6).dense(n)[0, 0])
        for lines in (drawn.double().mean(0), drawn.double().mean(1)):  # no row or column is favoured
            assert (lines - share).abs().max() < 5 * (share * (1 - share) / n) ** 0.5


def test_random_blocks_are_blocks() -> None:
    coarse = masks.random_blocks(1, 30.0, seed=2).dense(8)[0, 0]
    fine = masks.random_blocks(3, 30.0, seed=2).dense(24)[0, 0]
    assert torch.equal(fine, coarse.repeat_interleave(3, 0).repeat_interleave(3, 1))


def test_bigbird_is_its_three_parts() -> None:
    parts = (masks.blocks(4, 1), masks.global_tokens(3), masks.random_blocks(4, 10.0, 7))
    wanted = torch.stack([part.dense(40)[0, 0] for part in parts]).any(0)
    assert torch.equal(masks.bigbird(4, 3, 10.0, 7).dense(40)[0, 0], wanted)


@pytest.mark.parametrize("name", ["window", "padding", "from_dense", "document"])
def test_combines_like_sets(name: str) -> None:
    mask = DEFINED[name][0] if name in DEFINED else OTHERS[name]
    other = masks.blocks(3)
    frame = Frame.aligned(2, 1, 12, 12).with_documents(torch.arange(12) // 5)
    a, b = whole(mask, frame), whole(other, frame)
    assert torch.equal(whole(mask & other, frame), a & b)
    assert torch.equal(whole(mask | other, frame), a | b)
    assert torch.equal(whole(~mask, frame), ~a)
    assert torch.equal(whole(~(mask | ~other), frame), ~a & b)


def test_not_does_not_bring_empty_slots_back() -> None:
    frame = Frame(1, 1, torch.arange(3), torch.tensor([0, -1, 2]))
    assert not whole(~masks.window(1), frame)[..., 1].any()
    assert not whole(masks.everything(), frame)[..., 1].any()


def test_moves_to_a_device() -> None:
    mask = (
        (masks.padding(torch.tensor([3, 4])) | ~masks.from_dense(DENSE)) & masks.causal() & masks.valid_keys(DENSE[:2])
    )
    moved = mask.to("meta")
    frame = Frame.aligned(2, 1, 12, 12, "meta")
    assert moved.tile(ALL, ALL, frame).device.type == "meta"


# ---- one definition, every form


@pytest.mark.parametrize("name", [*DEFINED, *OTHERS])
def test_flex_sees_the_same_mask(name: str) -> None:
    """FlexAttention asks for single pairs by index, through vmap: the answers are the dense matrix."""
    mask = DEFINED[name][0] if name in DEFINED else OTHERS[name]
    for frame in (
        Frame.aligned(2, 3, 12, 12).with_documents(torch.arange(12) // 5),
        Frame(2, 3, torch.arange(12), torch.arange(12).flip(0) - 2).with_documents(torch.arange(24).view(2, 12) // 7),
    ):
        b, h, t, s = (torch.arange(n) for n in (2, 3, 12, 12))

        def mask_mod(b: Tensor, h: Tensor, row: Tensor, col: Tensor, frame: Frame = frame) -> Tensor:
            at = frame.site_at(b, h, row, col)
            return mask.allows(at) & (at.j >= 0)

        each = mask_mod
        for axis in (3, 2, 1, 0):
            each = torch.vmap(each, in_dims=tuple(0 if n == axis else None for n in range(4)))
        assert torch.equal(each(b, h, t, s), whole(mask, frame))


@pytest.mark.parametrize("name", [*DEFINED, *OTHERS])
def test_backends_see_the_same_mask(name: str) -> None:
    """With the same value for every key a backend returns it, wherever a key is seen, and 0 elsewhere."""
    mask = DEFINED[name][0] if name in DEFINED else OTHERS[name]
    q, k, v = torch.randn(3, 2, 3, 12, 8)
    frame = Frame.of(q, k).with_documents(torch.arange(12) // 5)
    wanted = attend(q, k, v, mask=whole(mask, frame)).output
    slow_one = ["flex"] if name in ("strided", "bigbird", "keep") else []  # the vmap above is what it does
    for backend in ("reference", "tiled", "sdpa", *slow_one):
        torch.testing.assert_close(attend(q, k, v, mask=mask, frame=frame, backend=backend).output, wanted)


# ---- plans


def assert_sound(mask: Mask | None, frame: Frame, block: tuple[int, int]) -> Tensor:
    """EMPTY and FULL are proofs. Returns what each block really is."""
    found = plan(mask, frame, block)
    dense = whole(masks.everything() if mask is None else mask, frame)
    truth = torch.empty_like(found.kinds)
    assert found.kinds.shape == (-(-frame.n_queries // block[0]), -(-frame.n_keys // block[1]))
    for a, rows in enumerate(dense.split(block[0], dim=2)):
        for b, tile in enumerate(rows.split(block[1], dim=3)):
            truth[a, b] = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
            kind = found.kinds[a, b]
            assert kind in (truth[a, b], PARTIAL), f"block {a}, {b} is called {kind}, but is {truth[a, b]}"
    walked = torch.full(dense.shape[2:], EMPTY)
    for rows, tiles in found.rows():
        for cols, needs_mask in tiles:
            walked[rows, cols] = PARTIAL if needs_mask else FULL
    grown = found.kinds.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert torch.equal(walked, grown[: frame.n_queries, : frame.n_keys])
    return truth


def any_mask(data: st.DataObject, n_queries: int, n_keys: int, depth: int = 2) -> Mask:
    """Any mask with any numbers, and combinations of them."""
    draw, few = data.draw, st.integers(1, 9)
    kinds: dict[str, Callable[[], Mask]] = {
        "everything": masks.everything,
        "causal": masks.causal,
        "window": lambda: masks.window(draw(few), ahead=draw(st.integers(0, 5))),
        "prefix": lambda: masks.prefix(draw(few)),
        "dilated": lambda: masks.dilated(draw(few), draw(few)),
        "strided": lambda: masks.strided(draw(few), draw(st.booleans())),
        "fixed": lambda: masks.fixed(draw(st.integers(3, 9)), draw(st.integers(1, 3))),
        "blocks": lambda: masks.blocks(draw(few), draw(st.integers(0, 2))),
        "global": lambda: masks.global_tokens(draw(few)),
        "random": lambda: masks.random_blocks(draw(few), draw(st.sampled_from([0.0, 5.0, 50.0, 95.0, 100.0]))),
        "grid": lambda: masks.grid_windows(draw(few), draw(st.integers(1, 4)), n_before=draw(st.integers(0, 2))),
        "padding": lambda: masks.padding(torch.tensor([draw(st.integers(0, n_keys)), draw(st.integers(0, n_keys))])),
        "keep": lambda: masks.valid_keys(_bits(data, 2, n_keys)),
        "document": masks.document,
        "from_dense": lambda: masks.from_dense(_bits(data, n_queries, n_keys)),
    }
    joins: dict[str, Callable[[Mask, Mask], Mask]] = {"and": Mask.__and__, "or": Mask.__or__}
    choices = [*kinds, *(["and", "or", "not"] if depth else [])]
    kind = draw(st.sampled_from(choices), label="mask")
    if kind == "not":
        return ~any_mask(data, n_queries, n_keys, depth - 1)
    if kind in joins:
        return joins[kind](any_mask(data, n_queries, n_keys, depth - 1), any_mask(data, n_queries, n_keys, depth - 1))
    return kinds[kind]()


def _bits(data: st.DataObject, *shape: int) -> Tensor:
    seed, share = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]))
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def any_frame(data: st.DataObject, n_queries: int, n_keys: int) -> Frame:
    """Aligned, moved, or like a cache: positions in any order with gaps, per row or not."""
    kind = data.draw(st.sampled_from(["aligned", "moved", "gaps", "rows"]), label="frame")
    if kind == "aligned":
        frame = Frame.aligned(2, 2, n_queries, n_keys)
    elif kind == "moved":
        q_start, k_start = (data.draw(st.integers(-5, 30)) for _ in range(2))
        frame = Frame.aligned(2, 2, n_queries, n_keys, q_start=q_start, k_start=k_start)
    else:
        rows = (2,) if kind == "rows" else ()
        draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        positions = torch.randint(-4, 40, (*rows, n_queries + n_keys), generator=draw).clamp(min=-1)
        if data.draw(st.booleans(), label="sorted"):
            positions = positions.sort(-1).values
        frame = Frame(2, 2, positions[..., :n_queries], positions[..., n_queries:])
    return frame.with_documents(frame.q_pos.clamp(min=0) // 7, frame.k_pos.clamp(min=0) // 7)


@pytest.mark.parametrize("name", [*DEFINED, *OTHERS])
@pytest.mark.parametrize("block", [(1, 1), (3, 4), (5, 2), (12, 12)], ids=str)
def test_a_plan_of_every_mask_and_its_opposite_is_true(name: str, block: tuple[int, int]) -> None:
    mask = DEFINED[name][0] if name in DEFINED else OTHERS[name]
    documents, cache = torch.arange(12) // 5, torch.tensor([8, -1, 10, 3, 4, -1, 6, 7, 30, 0, 1, 2])
    for frame in (Frame.aligned(2, 2, 12, 12), Frame(2, 2, torch.arange(12) + 3, cache)):
        for one in (mask, ~mask, ~(mask | masks.causal()), mask & ~masks.window(4)):
            assert_sound(one, frame.with_documents(documents), block)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_a_plan_says_of_a_block_is_true(data: st.DataObject) -> None:
    n_queries, n_keys = data.draw(st.integers(1, 40), label="T"), data.draw(st.integers(1, 40), label="S")
    frame = any_frame(data, n_queries, n_keys)
    mask = any_mask(data, n_queries, n_keys) if data.draw(st.booleans(), label="masked") else None
    assert_sound(mask, frame, (data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))))


TIGHT: dict[str, Callable[[st.DataObject], Mask]] = {
    "causal": lambda data: masks.causal(),
    "window": lambda data: masks.window(data.draw(st.integers(1, 20)), ahead=data.draw(st.integers(0, 9))),
    "blocks": lambda data: masks.blocks(data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2))),
    "prefix": lambda data: masks.prefix(data.draw(st.integers(1, 30))),
    "global": lambda data: masks.global_tokens(data.draw(st.integers(1, 30))),
    "padding": lambda data: masks.padding(torch.tensor([data.draw(st.integers(0, 30))] * 2)),
    "random": lambda data: masks.random_blocks(data.draw(st.integers(1, 9)), 20.0),
    "dense": lambda data: masks.from_dense(_bits(data, 30, 30)),
}


@pytest.mark.parametrize("name", TIGHT)
@QUICK
@given(data=st.data())
def test_a_plan_decides_every_block_that_can_be_decided(name: str, data: st.DataObject) -> None:
    """Where positions run on, these masks leave no block partial that is not."""
    frame, mask = Frame.aligned(2, 2, 30, 30, q_start=data.draw(st.integers(0, 12))), TIGHT[name](data)
    block = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    assert torch.equal(plan(mask, frame, block).kinds, assert_sound(mask, frame, block))


def computed(mask: Mask, length: int, block: int) -> float:
    return plan(mask, Frame.aligned(1, 1, length, length), (block, block)).density


def test_plans_skip_what_they_should() -> None:
    n, size = 4096, 64
    blocks = n // size
    assert computed(masks.everything(), n, size) == 1
    assert computed(masks.causal(), n, size) == pytest.approx((blocks + 1) / 2 / blocks)
    assert computed(masks.window(256), n, size) < 5 / blocks  # 256 keys back touch 5 blocks
    assert computed(masks.dilated(4, size), n, size) < 5 / blocks
    assert computed(masks.blocks(size, 1), n, size) < 3 / blocks
    assert computed(masks.window(128) | masks.global_tokens(64), n, size) < (3 + 2) / blocks


def truly_computed(mask: Mask, length: int, block: int) -> float:
    """The share of blocks in which somebody sees something."""
    dense = mask.dense(length)[0, 0]
    return dense.unflatten(0, (-1, block)).unflatten(2, (-1, block)).any(3).any(1).double().mean().item()


def test_strided_plan_skips_between_its_stripes() -> None:
    """The last 256 keys are 9 blocks of 32; of the keys before them only one block in 8 holds a stripe."""
    found = computed(masks.strided(256), 2048, 32)
    assert found == pytest.approx(truly_computed(masks.strided(256), 2048, 32))
    assert found < (9 + 64 / 8) / 64


def test_bigbird_plan_skips_the_blocks_it_has_not_drawn() -> None:
    mask = masks.bigbird(64, 64, percent=5.0)
    for block in (32, 64, 128):  # tiles larger than the mask's own blocks can be empty too
        assert computed(mask, 2048, block) == pytest.approx(truly_computed(mask, 2048, block))
    assert computed(mask, 2048, 64) < 0.25


def test_the_plan_of_too_many_random_blocks_is_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.attention.masks.MAX_COUNTED_BLOCKS", 3)
    frame = Frame.aligned(1, 1, 8, 8)
    assert (plan(masks.random_blocks(2, 50.0), frame, (4, 4)).kinds == PARTIAL).all()


def test_a_plan_of_empty_slots_is_empty() -> None:
    frame = Frame(1, 1, torch.arange(8), torch.tensor([0, 1, 2, 3, -1, -1, -1, -1]))
    assert plan(None, frame, (4, 4)).kinds.tolist() == [[FULL, EMPTY]] * 2


def test_a_new_mask_is_its_predicate() -> None:
    """Writing ``allows`` is enough: without bounds of its own a mask is right, only never skipped."""

    class Even(Mask):
        def allows(self, at: Site) -> Tensor:
            return (at.i + at.j) % 2 == 0

    frame = Frame.aligned(1, 1, 6, 6)
    assert_sound(Even(), frame, (2, 3))
    assert (plan(Even(), frame, (2, 3)).kinds == PARTIAL).all()
    q, k, v = torch.randn(3, 1, 1, 6, 4)
    wanted = attend(q, k, v, mask=Even().dense(6)).output
    torch.testing.assert_close(attend(q, k, v, mask=Even(), backend="tiled").output, wanted)
    with pytest.raises(NotImplementedError):
        Mask().dense(2)


SDPA_SHAPES = [
    (3, 4),
    (1, 4),
    (3, 1),
    (2, 1, 1, 4),
    (1, 1, 1, 4),
    (1, 5, 3, 4),
    (2, 1, 3, 4),
    (2, 5, 1, 4),
    (2, 1, 3, 1),
]


@pytest.mark.parametrize("kind", ["booleans", "numbers", "numbers and -inf"])
@pytest.mark.parametrize("shape", SDPA_SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "sdpa", "tiled", "auto"])
def test_attend_takes_the_masks_of_sdpa(shape: tuple[int, ...], kind: str, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, n, 6, generator=generator, dtype=torch.float64) for n in (3, 4, 4))
    may_look = torch.rand(shape, generator=generator) > 0.4
    may_look[..., 0] = True  # SDPA's rows without keys are not ours
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    both = numbers.masked_fill(~may_look, -torch.inf)
    mask = {"booleans": may_look, "numbers": numbers, "numbers and -inf": both}[kind]
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(attend(q, k, v, mask=mask, backend=backend).output, wanted)


def test_a_float_mask_keeps_its_gradient_adds_to_a_bias_and_gives_no_nan() -> None:
    q, k, v = (torch.randn(2, 5, n, 6, dtype=torch.float64) for n in (3, 4, 4))
    numbers = torch.randn(2, 1, 1, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 4, dtype=torch.float64)
    both = attend(q, k, v, mask=numbers, bias=bias).output
    torch.testing.assert_close(both, attend(q, k, v, bias=(numbers + bias).expand(2, 5, 3, 4)).output)
    (gradient,) = torch.autograd.grad(both.sum(), numbers)
    assert gradient.abs().sum() > 0
    nothing = attend(q, k, v, mask=torch.full((3, 4), -torch.inf, dtype=torch.float64)).output
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_a_combined_mask_takes_the_length_for_its_parts() -> None:
    ends, causal = masks.end_blocks(2), masks.causal()
    dense = ends.for_length(16).dense(16)
    assert not dense.all()
    for combined, expected in (
        (ends & causal, dense & causal.dense(16)),
        (~(ends | causal), ~(dense | causal.dense(16))),
    ):
        assert torch.equal(combined.for_length(16).dense(16), expected)
        assert torch.equal(combined.dense(16), expected)
