"""Every step and its inverse, bit for bit, on whatever tensors hypothesis thinks of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.hub import BY_TYPE, FAMILIES, to_ours, to_theirs
from regard.hub.families.bart import Sinusoids
from regard.hub.hf_family import OldEnding
from regard.hub.weight_steps import Drop, Fill, Join, Rename, Reshape, Step, Tensors, Tie, Transpose, matches, translate
from regard.models import build
from regard.presets import PRESETS, preset

from .helpers import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
sizes = st.integers(0, 4)


@st.composite
def tensor(draw: st.DrawFn, *shape: int) -> Tensor:
    """Any bits, so NaN and both zeros too: a step moves numbers, it does not compute."""
    dtype = draw(st.sampled_from(DTYPES))
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = draw(st.binary(min_size=n_bytes, max_size=n_bytes))
    flat = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[:n_bytes]
    return flat.clone().view(dtype).reshape(shape)


@st.composite
def others(draw: st.DrawFn) -> Tensors:
    """Tensors a step has nothing to do with."""
    names = draw(
        st.lists(st.sampled_from(["x", "h.0", "h.0.w.bias", "h..w", "ah.1.w", "h.one.w", "h.1.wb"]), unique=True)
    )
    return {name: draw(tensor(2)) for name in names}


def there_and_back(step: Step, theirs: Tensors) -> Tensors:
    """Check both directions from one side; returns ours."""
    before = dict(theirs)
    ours = step.apply(theirs)
    assert same_bits(theirs, before), "a step must not change what it is given"
    assert same_bits(step.undo(ours), theirs)
    assert same_bits(step.apply(step.undo(ours)), ours)
    return ours


@given(others(), st.sets(st.integers(0, 120), max_size=4), st.data())
def test_rename(rest: Tensors, layers: set[int], data: st.DataObject) -> None:
    theirs = rest | {f"h.{i}.w": data.draw(tensor(2, 3)) for i in layers}
    ours = there_and_back(Rename("h.{i}.w", "decoder.blocks.{i}.weight"), theirs)
    assert set(ours) == set(rest) | {f"decoder.blocks.{i}.weight" for i in layers}


@given(others(), sizes, sizes, st.data())
def test_transpose(rest: Tensors, rows: int, cols: int, data: st.DataObject) -> None:
    w = data.draw(tensor(rows, cols))
    ours = there_and_back(Transpose("h.{i}.w"), rest | {"h.3.w": w})
    assert ours["h.3.w"].shape == (cols, rows)
    assert ours["h.3.w"].is_contiguous()
    assert all(ours[name] is rest[name] for name in rest)


@given(others(), st.integers(1, 4), st.integers(1, 4), st.data())
def test_reshape(rest: Tensors, n: int, m: int, data: st.DataObject) -> None:
    ours = there_and_back(Reshape("h.{i}.w", (1, n, m), (n, m)), rest | {"h.0.w": data.draw(tensor(1, n, m))})
    assert ours["h.0.w"].shape == (n, m)


@given(others(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([(), (3,)]), st.data())
def test_join(rest: Tensors, rows: list[int], width: tuple[int, ...], data: st.DataObject) -> None:
    names = tuple(f"h.{{i}}.part{n}" for n in range(len(rows)))
    theirs = dict(rest)
    dtype = data.draw(st.sampled_from(DTYPES))
    for layer in (0, 11):
        for name, n in zip(names, rows, strict=True):
            theirs[name.format(i=layer)] = data.draw(tensor(n, *width)).to(dtype)
    ours = there_and_back(Join(names, "decoder.{i}.joined", tuple(rows)), theirs)
    assert ours["decoder.11.joined"].shape == (sum(rows), *width)
    assert set(ours) == {*rest, "decoder.0.joined", "decoder.11.joined"}


def test_join_leaves_an_incomplete_set_alone() -> None:
    step = Join(("a.{i}.q", "a.{i}.k"), "b.{i}.qk", (2, 2))
    alone = {"a.0.q": torch.ones(2, 2)}
    assert step.apply(alone) == alone


@given(others(), st.data())
def test_tie_keeps_one_and_refuses_two_that_differ(rest: Tensors, data: st.DataObject) -> None:
    step, w = Tie("head", "table"), data.draw(tensor(2, 2)).float().nan_to_num()
    for theirs in (rest | {"table": w}, rest | {"head": w}, rest | {"table": w, "head": w.clone()}):
        assert same_bits(step.apply(theirs), rest | {"table": w})
    ours = rest | {"table": w}
    assert same_bits(step.apply(step.undo(ours)), ours)
    with pytest.raises(ValueError, match="head and table are tied by the config, but differ"):
        step.apply(rest | {"table": w, "head": torch.where(w == 0, 1.0, 0.0)})


@given(others(), st.integers(0, 99), st.data())
def test_drop(rest: Tensors, layer: int, data: st.DataObject) -> None:
    step = Drop("h.{i}.mask")
    assert same_bits(step.apply(rest | {f"h.{layer}.mask": data.draw(tensor(2))}), rest)
    assert same_bits(step.apply(step.undo(rest)), rest)


@given(others(), sizes, st.sampled_from([0.0, 1.5]))
def test_fill(rest: Tensors, n: int, value: float) -> None:
    step = Fill("constant", (1, n), value)
    ours = there_and_back(step, rest | {"constant": torch.full((1, n), value)})
    assert same_bits(ours, rest)
    assert same_bits(step.apply(rest), rest)
    if n:
        with pytest.raises(ValueError, match="every element of constant must be"):
            step.apply({"constant": torch.full((1, n), value + 1)})


@given(others(), st.data())
def test_old_ending(rest: Tensors, data: st.DataObject) -> None:
    step, w = OldEnding(".gamma", ".weight"), data.draw(tensor(3))
    for theirs in (rest | {"norm.gamma": w}, rest | {"norm.weight": w}):
        assert same_bits(step.apply(theirs), rest | {"norm.weight": w})
    ours = rest | {"norm.weight": w}
    assert same_bits(step.apply(step.undo(ours)), ours)


@given(others(), st.data())
def test_second_name_that_is_written_but_not_checked(rest: Tensors, data: st.DataObject) -> None:
    step, w = Tie("bias", "decoder.bias", checked=False, written=True), data.draw(tensor(3))
    ours = there_and_back(step, rest | {"decoder.bias": w, "bias": w.clone()})
    assert same_bits(ours, rest | {"decoder.bias": w})
    assert same_bits(step.apply(rest | {"bias": w}), ours)
    assert same_bits(step.apply(rest | {"decoder.bias": w, "bias": torch.zeros(3)}), ours)


@given(others(), st.data())
def test_second_name_that_is_written(rest: Tensors, data: st.DataObject) -> None:
    step, w = Tie("decoder.table", "table", written=True), data.draw(tensor(2, 2)).float().nan_to_num()
    ours = there_and_back(step, rest | {"table": w, "decoder.table": w.clone()})
    assert same_bits(ours, rest | {"table": w})
    assert same_bits(step.apply(rest | {"decoder.table": w}), ours)
    with pytest.raises(ValueError, match=r"decoder\.table and table differ"):
        step.apply(rest | {"table": w, "decoder.table": torch.where(w == 0, 1.0, 0.0)})


@given(others(), st.integers(1, 6), st.integers(1, 4))
def test_sinusoids(rest: Tensors, max_len: int, half: int) -> None:
    written = Sinusoids("positions", max_len, 2 * half, written=True)
    theirs = written.undo(rest)
    angle = torch.arange(max_len)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    torch.testing.assert_close(theirs["positions"], torch.cat([angle.sin(), angle.cos()], dim=1))
    assert same_bits(there_and_back(written, theirs), rest)
    unwritten = Sinusoids("positions", max_len, 2 * half, written=False)
    assert same_bits(unwritten.apply(theirs), rest)
    assert same_bits(unwritten.undo(rest), rest)
    for wrong in (theirs["positions"] + 1, torch.zeros(max_len + 1, 2 * half)):
        with pytest.raises(ValueError, match="does not hold the sinusoids"):
            written.apply(rest | {"positions": wrong})
    on_meta = Sinusoids("positions", 10**12, 2 * half, written=True).undo({"x": torch.empty(1, device="meta")})
    assert on_meta["positions"].shape == (10**12, 2 * half), "a claim costs no memory"


@given(st.text("ah.0123{}w", max_size=12))
def test_a_pattern_matches_whole_numbers_and_nothing_else(name: str) -> None:
    parts = name.split(".")
    right = len(parts) == 3 and parts[0] == "h" and parts[2] == "w" and parts[1].isdecimal()
    assert matches(name, "h.{i}.w") is right
    assert (
        (translate(name, "h.{i}.w", "b.{i}") == f"b.{parts[1]}") if right else not translate(name, "h.{i}.w", "b.{i}")
    )


TINY: dict[str, Any] = {"d_model": 8, "n_layers": 2, "n_heads": 2, "d_ff": 12, "vocab_size": 11}
WITH_TWIN = {
    "gpt2": "gpt2",
    "llama-1b": "llama",
    "mistral-7b": "mistral",
    "bert-base": "bert",
    "bert-base-masked": "bert",
    "t5-small": "t5",
    "t5-v1.1-small": "t5",
    "transformer-base": "marian",
    "vit-tiny": "vit",
}


@pytest.mark.parametrize("name", WITH_TWIN)
def test_a_familys_steps_undo_each_other(name: str) -> None:
    changes = TINY | {"n_kv_heads": 1} if PRESETS[name].get("n_kv_heads") else TINY
    config = preset(name, **changes)
    steps = BY_TYPE[WITH_TWIN[name]].steps(config)
    state = dict(build(config).state_dict())
    theirs = to_theirs(steps, state)
    assert len(set(theirs) - set(state)) > len(state) / 2  # nearly every tensor has another name there
    assert same_bits(to_ours(steps, theirs), state)
    assert same_bits(to_theirs(steps, to_ours(steps, theirs)), theirs)


def test_every_model_type_belongs_to_one_family() -> None:
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(types) == len(set(types)) == len(BY_TYPE)
