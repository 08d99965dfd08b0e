"""Branching keys hold each row's own past, whatever was selected."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.generation.cpu_engine import BeamKeyCache

LAYERS, GROUPS, WIDTH = 2, 3, 4


class Rows:
    """The same, row by row: lists of keys, copied at every step."""

    def __init__(self, prompts: list[list[float]], copies: int) -> None:
        self.texts = [list(prompt) for prompt in prompts for _ in range(copies)]

    def step(self, new: list[float]) -> None:
        for text, key in zip(self.texts, new, strict=True):
            text.append(key)

    def select(self, rows: list[int]) -> None:
        self.texts = [list(self.texts[row]) for row in rows]


def filled(numbers: Tensor, layer: int, sign: float) -> Tensor:
    """(B, n) numbers as keys (B, G, n, D), different in every layer and head."""
    heads = torch.arange(GROUPS).view(1, GROUPS, 1, 1) * 1000 + layer * 10000
    return (sign * (numbers[:, None, :, None] + heads)).expand(-1, -1, -1, WIDTH).clone()


def begin(prompts: list[list[float]], copies: int) -> BeamKeyCache:
    width = max(len(prompt) for prompt in prompts)
    numbers = torch.tensor([[0.5] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[i >= width - len(prompt) for i in range(width)] for prompt in prompts])
    held = [(filled(numbers, layer, 1), filled(numbers, layer, -1)) for layer in range(LAYERS)]
    return BeamKeyCache(held, None if real.all() else real, copies)


def check(keys: BeamKeyCache, rows: Rows, new: list[float]) -> None:
    """After a step every row sees its own past and nothing else, in order, in every layer and head."""
    keys.next_step()
    mask = keys.mask
    size = keys.size
    for layer in range(LAYERS):
        step = torch.tensor(new).view(-1, size)
        k, v = keys.update(layer, torch.cat([filled(step, layer, 1), filled(step, layer, -1)], 1))
        assert k.shape == v.shape == (len(new) // size, GROUPS, keys.end, WIDTH)
        for row, text in enumerate(rows.texts):
            seen = torch.ones(keys.end, dtype=torch.bool) if mask is None else mask[row // size, 0, row % size] == 0
            for head in range(GROUPS):
                told = torch.tensor(text) + head * 1000 + layer * 10000
                assert torch.equal(k[row // size, head, seen, 0], told)
                assert torch.equal(v[row // size, head, seen, 1], -told)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_row_sees_its_own_past(data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    counter = iter(range(1, 10**6))
    prompts = [[float(next(counter)) for _ in range(length)] for length in lengths]
    keys, rows = begin(prompts, copies), Rows(prompts, copies)
    for _ in range(data.draw(st.integers(1, 45))):
        new = [float(next(counter)) for _ in rows.texts]
        rows.step(new)
        check(keys, rows, new)
        index = chosen(data, len(rows.texts), keys.size)
        if index is not None:
            rows.select(index)
            keys.select(torch.tensor(index))
    assert keys.end <= max(len(text) for text in rows.texts) * keys.size + 64 * copies


def chosen(data: st.DataObject, n_rows: int, size: int) -> list[int] | None:
    """As beams select, as texts that end leave, or in any other way."""
    kind = data.draw(st.sampled_from(("none", "beams", "beams", "beams", "leave", "any")))
    if kind == "none":
        return None
    if kind == "any":
        return data.draw(st.lists(st.integers(0, n_rows - 1), min_size=1, max_size=n_rows))
    left = sorted(data.draw(st.sets(st.integers(0, n_rows // size - 1), min_size=1)))
    if kind == "beams":
        left = list(range(n_rows // size))
    return [prompt * size + data.draw(st.integers(0, size - 1)) for prompt in left for _ in range(size)]


def test_what_is_nobodys_past_goes() -> None:
    """Beams that all go on from the first: columns stay about as many as tokens, not four times that."""
    keys, rows = begin([[1.0], [2.0]], 4), Rows([[1.0], [2.0]], 4)
    for step in range(100):
        new = [float(10 + step * 8 + row) for row in range(8)]
        rows.step(new)
        check(keys, rows, new)
        rows.select([0, 0, 0, 0, 4, 4, 4, 4])
        keys.select(torch.tensor([0, 0, 0, 0, 4, 4, 4, 4]))
    assert keys.end < 101 + 16 * 4
