"""Frames: where queries and keys stand, asked for by tile or by pair, whole or in part."""

from __future__ import annotations

import itertools

import pytest
import torch

from regard.attention import Frame
from regard.attention.frame import as_range, span_length

ALL = slice(None)


def frames() -> dict[str, Frame]:
    rows = torch.tensor([[3, -1, 0, 1, 2], [0, 1, 2, 3, 4]])
    return {
        "aligned": Frame.aligned(2, 3, 5, 5),
        "decoding": Frame.aligned(2, 3, 1, 5),
        "moved": Frame.aligned(2, 3, 5, 4, q_start=7, k_start=2),
        "gaps": Frame(2, 3, torch.tensor([4, 9]), torch.tensor([8, -1, 3])),
        "rows": Frame(2, 3, rows, rows),
        "documents": Frame(2, 3, rows, rows).with_documents(rows // 2, torch.tensor([0, 0, 1, 1, 1])),
    }


def test_the_last_query_stands_at_the_last_key() -> None:
    frame = Frame.aligned(1, 1, 3, 5)
    assert frame.q_pos.tolist() == [2, 3, 4]
    assert frame.k_pos.tolist() == [0, 1, 2, 3, 4]
    assert frame.steady == (2, 0)
    heads = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
    same = Frame.of(*heads)
    assert (same.n_batch, same.n_heads, same.n_queries, same.n_keys) == (2, 4, 3, 5)


@pytest.mark.parametrize("name", frames())
def test_a_pair_stands_where_its_tile_says(name: str) -> None:
    frame = frames()[name]
    whole = frame.site()
    b, h, row, col = torch.tensor([1]), torch.tensor([2]), torch.tensor([frame.n_queries - 1]), torch.tensor([1])
    at = frame.site_at(b, h, row, col)
    sizes = (2, 3, frame.n_queries, frame.n_keys)
    for field in whole._fields:
        tile, pair = getattr(whole, field), getattr(at, field)
        assert (tile is None) == (pair is None)
        if tile is not None:
            assert pair == tile.expand(sizes)[b, h, row, col]


@pytest.mark.parametrize("name", frames())
def test_a_part_is_the_same_place_seen_through_a_smaller_window(name: str) -> None:
    frame = frames()[name]
    whole, part = frame.site(), frame.part(range(1, 2), range(1, 3)).site(slice(0, 2), slice(1, 3))
    sizes = (2, 3, frame.n_queries, frame.n_keys)
    for field in whole._fields:
        tile, some = getattr(whole, field), getattr(part, field)
        if tile is not None:
            wanted = tile.expand(sizes)[1:2, 1:3, 0:2, 1:3]
            assert torch.equal(some.expand_as(wanted), wanted)


@pytest.mark.parametrize("name", frames())
def test_no_distance_is_out_of_reach(name: str) -> None:
    frame = frames()[name]
    low, high = frame.reach()
    at = frame.site()
    distance = at.j - at.i
    assert low <= distance.min()
    assert distance.max() <= high
    assert Frame(1, 1, torch.arange(3), torch.arange(3), limit=9).reach() == (-9, 9)


def test_only_positions_that_run_on_from_zero_have_no_gaps() -> None:
    known = {name: frame.may_have_gaps for name, frame in frames().items()}
    assert known == {
        "aligned": False,
        "decoding": False,
        "moved": False,
        "gaps": True,
        "rows": True,
        "documents": True,
    }
    assert Frame.aligned(1, 1, 2, 2, q_start=0, k_start=-1).may_have_gaps


def test_contiguous_spans_are_ranges() -> None:
    ends = (None, -7, -2, 0, 1, 3, 9)
    for total, start, stop in itertools.product((1, 5), ends, ends):
        span = slice(start, stop)
        found = as_range(span, total)
        assert found is not None
        assert list(range(*found)) == list(range(total)[span])
        assert span_length(span, total) == len(range(total)[span])
    assert as_range(slice(0, 5, 2), 5) is None
    assert as_range(torch.tensor([1, 2]), 5) is None
    assert span_length(torch.tensor([4, 1]), 5) == 2
