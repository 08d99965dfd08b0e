"""Order is a pure function: batches, packed rows, blocks, masks and token files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import token_files
from regard.data.batching import BatchPlan, mask_tokens, pad
from regard.data.hashing import bits, integers, permutation, stable_key, uniform
from regard.data.packing import PackedRows, TokenBlocks
from regard.data.token_files import Pieces, TokenFile, cached_tokens, open_tokens, whole_documents, write_tokens
from regard.errors import BadData

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=60)
pair_lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60)


# -------------------------------------------------------------------------------- hashes


def test_hashes_are_those_of_every_other_machine() -> None:
    assert stable_key("split", 0, "가") == 10089011824869056840
    assert bits(0, np.arange(2)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # splitmix64 from 0


def test_hashes_are_spread_evenly() -> None:
    x = uniform(stable_key("spread"), np.arange(20_000))
    assert abs(x.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.03
    counts = np.bincount(integers(1, np.arange(20_000), 7), minlength=7)
    assert counts.min() > 2600
    assert counts.max() < 3100
    assert sorted(permutation(5, 1000)) == list(range(1000))
    assert stable_key("ab", "c") != stable_key("a", "bc")


# -------------------------------------------------------------------------------- batches


@given(sizes=lengths | pair_lengths, tokens=st.integers(30, 90), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_every_example_once_and_no_batch_too_large(sizes: list[Any], tokens: int, seed: int, epoch: int) -> None:
    plan = BatchPlan(sizes, tokens, seed=seed)
    batches = [plan.batch(epoch, position) for position in range(plan.count())]
    assert sorted(np.concatenate(batches)) == list(range(len(sizes)))
    sides = np.asarray(sizes).reshape(len(sizes), -1)
    for batch in batches:
        assert (sides[batch].max(axis=0) * len(batch)).max() <= tokens


def test_a_batch_depends_on_seed_epoch_and_position_alone() -> None:
    sizes = np.random.default_rng(0).integers(1, 20, (500, 2))
    forward, backward = BatchPlan(sizes, 100), BatchPlan(sizes, 100)
    n = forward.count()
    there = [forward.batch(*forward.at(step)).tolist() for step in range(3 * n)]
    back = [backward.batch(*backward.at(step)).tolist() for step in reversed(range(3 * n))][::-1]
    assert there == back
    assert forward.at(n + 5) == (1, 5)
    assert there[:n] != there[n : 2 * n], "each epoch has its own order"
    assert BatchPlan(sizes, 100, seed=1).batch(0, 0).tolist() != there[0]
    composition = {frozenset(batch) for batch in there[:n]} & {frozenset(batch) for batch in there[n : 2 * n]}
    assert len(composition) < n / 4, "and its own batches"


def test_batches_of_unlike_lengths_come_in_another_order_each_epoch() -> None:
    """No two examples are of one length, so that only the order of the batches can differ."""
    plan = BatchPlan(np.arange(1, 41), 80)
    epochs = [[plan.batch(epoch, position).tolist() for position in range(plan.count())] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])


def test_buckets_waste_little_and_images_are_shuffled() -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(5, 40, 20_000)
    sizes = np.stack([source, np.clip(source + rng.integers(-3, 4, 20_000), 1, None)], axis=1)
    plan = BatchPlan(sizes, 4096)
    batches = [sizes[plan.batch(0, n)] for n in range(plan.count())]
    assert sizes.sum() > 0.92 * sum(int(batch.max(0).sum()) * len(batch) for batch in batches)
    plan = BatchPlan(np.ones(1000), 64)
    assert plan.count() == 16
    first = np.concatenate([plan.batch(0, n) for n in range(16)])
    assert sorted(first) == list(range(1000))
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1


def test_long_examples_are_refused_or_left_out_and_named() -> None:
    with pytest.raises(ValueError, match="an example has 50 tokens, but batch_tokens=40"):
        BatchPlan([3, 50, 4], 40)
    plan = BatchPlan([3, 50, 4], 40, max_len=10)
    assert sorted(plan.batch(0, 0)) == [0, 2]
    with pytest.raises(ValueError, match="every example is longer than max_len=2"):
        BatchPlan([3, 50, 4], 40, max_len=2)
    assert BatchPlan([1] * 10, 100, max_examples=4).count() == 3


def test_pad() -> None:
    assert pad([[1, 2, 3], [], [4]], 9).tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert pad([[1, 2, 3]], min_width=8).tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]]
    assert pad([[1, 2, 3]], min_width=2).shape == (1, 3)
    assert pad([]).shape == (0, 0)


# -------------------------------------------------------------------------------- packing

documents = st.lists(st.lists(st.integers(5, 99), max_size=12), min_size=1, max_size=10)


@given(texts=documents, context=st.integers(1, 9), epoch=st.integers(0, 2), shuffle=st.booleans())
def test_packed_rows_hold_every_token_once_and_never_cross_documents(
    texts: list[list[int]], context: int, epoch: int, shuffle: bool
) -> None:
    # A token says where it is from: document · 100 + place.
    marked = [[100 * n + place + 5 for place in range(len(text))] for n, text in enumerate(texts)]
    rows = PackedRows(TokenFile.of(marked, 100_000), context, seed=3, shuffle=shuffle)
    made = [rows.row(epoch, index) for index in range(len(rows))]
    real = [token for row in made for token, which in zip(row.tokens, row.documents, strict=True) if which >= 0]
    assert sorted(real) == sorted(token for text in marked for token in text)
    for row in made:
        for place, (token, target, which) in enumerate(zip(row.tokens, row.targets, row.documents, strict=True)):
            if which < 0:
                assert (token, target) == (0, -100)
                continue
            document, offset = divmod(int(token) - 5, 100)
            last = offset == len(marked[document]) - 1
            assert target == (-100 if last else token + 1)
            same = np.flatnonzero(row.documents == which)
            assert {(int(row.tokens[other]) - 5) // 100 for other in same} == {document}
            assert row.positions[place] == place - same[0]
    if not shuffle:
        assert real == [token for text in marked for token in text]


def test_packed_rows_differ_between_epochs_and_repeat_within() -> None:
    file = TokenFile.of([[n] * (n % 7 + 1) for n in range(5, 60)], 100)
    rows = PackedRows(file, 16)
    assert rows.row(0, 3).tokens.tolist() != rows.row(1, 3).tokens.tolist()
    assert rows.row(0, 3).tokens.tolist() == PackedRows(file, 16).row(0, 3).tokens.tolist()
    several = rows.batch(0, [3, 1])
    assert several.positions.shape == (2, 16)
    assert several.targets[1].tolist() == rows.row(0, 1).targets.tolist()


def test_blocks() -> None:
    blocks = TokenBlocks(np.arange(100, dtype=np.uint16), 10)
    x, y = blocks.random(seed=1, step=7, batch=64)
    assert x.shape == y.shape == (64, 10)
    assert x.dtype == np.int64
    assert (y == x + 1).all()
    again, _ = TokenBlocks(np.arange(100, dtype=np.uint16), 10).random(1, 7, 64)
    assert (x == again).all()
    assert not (x == blocks.random(1, 8, 64)[0]).all()
    starts = {int(row[0]) for step in range(100) for row in blocks.random(0, step, 64)[0]}
    assert starts == set(range(90)), "every place that has a next token, and no other"
    inputs, targets = blocks.sequential(0, 100)
    assert inputs.reshape(-1).tolist() == list(range(90))
    assert targets[-1, -1] == 90
    assert blocks.sequential(8, 5)[0].shape == (1, 10)


# -------------------------------------------------------------------------------- token files


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_token_files_come_back(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    texts = [[1, 2, vocab_size - 1], [], [7]]
    write_tokens(tmp_path / "x", whole_documents(texts), vocab_size, "key")
    found = open_tokens(tmp_path / "x")
    assert isinstance(found.tokens, np.memmap)
    assert found.tokens.dtype == dtype
    assert [found.tokens[a:b].tolist() for a, b in zip(found.starts, found.starts[1:], strict=False)] == texts
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.bin", "x.json", "x.starts.bin"]
    with pytest.raises(ValueError, match=f"but vocab_size={vocab_size}"):
        write_tokens(tmp_path / "y", whole_documents([[vocab_size]]), vocab_size)
    assert not list(tmp_path.glob("*y*")), "nothing is left of a file that failed"


def test_damaged_token_files_are_refused_and_made_again(tmp_path: Path) -> None:
    made = []

    def make() -> Pieces:
        made.append(1)
        return [([5], False), ([6], True), ([7], True)]

    for _ in range(2):
        found = cached_tokens(tmp_path, "source", "tokenizer", 100, make)
        assert found.tokens.tolist() == [5, 6, 7]
    assert len(made) == 1
    cached_tokens(tmp_path, "other source", "tokenizer", 100, make)
    assert len(made) == 2
    path = next(tmp_path.glob("*.json")).with_suffix("")
    raw = path.with_suffix(".bin").read_bytes()
    path.with_suffix(".bin").write_bytes(raw[:-1])
    with pytest.raises(BadData, match="has 5 bytes, but its header says 3 tokens in 2 documents"):
        open_tokens(path)
    path.with_suffix(".json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(BadData, match="is not a regard-tokens-1 header"):
        open_tokens(path)
    path.with_suffix(".json").unlink()
    with pytest.raises(BadData, match="cannot be read"):
        open_tokens(path)
    for name in ("source", "other source"):
        assert cached_tokens(tmp_path, name, "tokenizer", 100, make).tokens.tolist() == [5, 6, 7]
    assert len(made) == 3


def test_a_write_that_fails_half_way_leaves_nothing_to_be_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path / "x", whole_documents([[5, 6], [7]]), 100)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(token_files, "write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        write_tokens(tmp_path / "x", whole_documents([[8], [9, 9]]), 100)  # the old header would fit them
    with pytest.raises(BadData, match="cannot be read"):
        open_tokens(tmp_path / "x")


# -------------------------------------------------------------------------------- masks


def test_masks_have_berts_shares() -> None:
    ids = np.arange(5, 5 + 90)
    rows = [mask_tokens(ids, vocab_size=100, mask_id=4, index=n) for n in range(1500)]
    chosen = np.concatenate([row.targets != -100 for row in rows])
    inputs, original = np.concatenate([row.inputs for row in rows]), np.tile(ids, 1500)
    assert abs(chosen.mean() - 0.15) < 0.005
    assert abs((inputs[chosen] == 4).mean() - 0.8) < 0.01
    assert abs((inputs[chosen] == original[chosen]).mean() - 0.1) < 0.01
    assert (inputs[~chosen] == original[~chosen]).all()
    assert (np.concatenate([row.targets for row in rows])[chosen] == original[chosen]).all()
    assert not set(inputs[chosen].tolist()) & {0, 1, 2, 3}


@given(ids=st.lists(st.integers(0, 30), max_size=20), epoch=st.integers(0, 5), index=st.integers(0, 5))
def test_masks_repeat_and_spare_special_tokens(ids: list[int], epoch: int, index: int) -> None:
    first, second = (mask_tokens(ids, vocab_size=31, mask_id=4, epoch=epoch, index=index) for _ in range(2))
    assert (first.inputs == second.inputs).all()
    assert (first.targets == second.targets).all()
    chosen = first.targets != -100
    assert all(token >= 5 for token in np.asarray(ids)[chosen])
    assert chosen.any() == any(token >= 5 for token in ids)


def test_masks_differ_between_epochs_and_examples() -> None:
    ids = list(range(5, 60))
    places = [{"epoch": 0, "index": 0}, {"epoch": 1, "index": 0}, {"epoch": 0, "index": 1}]
    made = {tuple(mask_tokens(ids, vocab_size=60, mask_id=4, **place).inputs) for place in places}
    assert len(made) == 3
