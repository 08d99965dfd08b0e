"""A recurrent decoder with a cache: step by step, ragged, in beams, with tokens taken back."""

from __future__ import annotations

import pytest
import torch

from regard.attention import record
from regard.models.recurrent_cells import StateCache

from .tiny_recurrent import PLACE, close, each_cell, each_decoder, lengths_to_keep, step_by_step, tiny, tokens


@each_cell
@each_decoder
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "in place"])
@torch.no_grad()
def test_decoding_with_a_cache_is_the_forward_pass(cell: str, alignment: str, feeds: bool, fixed: bool) -> None:
    model = tiny(cell=cell, alignment=alignment, input_feeding=feeds)
    source, target, keep = tokens(3, 5), tokens(3, 6, 1), lengths_to_keep([5, 2, 3], 5)
    with record(model) as whole:
        expected = model.decode(target, model.encode(source, padding_mask=keep))
    cache = model.new_cache(3, 16) if fixed else model.new_cache()
    for sizes in ([1] * 6, [3, 1, 2]):
        cache.reset()
        assert cache.length == 0
        with record(model) as steps:
            close(step_by_step(model, target, model.encode(source, padding_mask=keep), cache, sizes), expected)
        assert cache.length == 6
        assert cache.next_positions(2).tolist() == [[6, 7]] * 3
        if alignment != "none":
            close(steps.map(PLACE).tile(), whole.map(PLACE).tile())
    assert cache.memory() > 0


@each_cell
@pytest.mark.parametrize("alignment", ["none", "additive", "general"])
@torch.no_grad()
def test_ragged_prompts_do_not_see_each_other(cell: str, alignment: str) -> None:
    model = tiny(cell=cell, alignment=alignment)
    source, target = tokens(3, 5), tokens(3, 4, 1)
    keep = torch.tensor([[False, False, True, True], [True, True, False, False], [True, True, True, True]])
    cache, new = model.new_cache(), tokens(3, 2, 2)
    memory = model.encode(source)
    prompt = model.decode(target, memory, padding_mask=keep, cache=cache)
    assert cache.lengths.tolist() == [2, 2, 4]
    everything = torch.cat([keep, torch.ones(3, 1, dtype=torch.bool)], dim=1)  # a mask over the whole text will do
    after = [
        model.decode(new[:, :1], memory, padding_mask=everything, cache=cache),
        model.decode(new[:, 1:], None, cache=cache),
    ]
    for b in range(3):
        text = torch.cat([target[b][keep[b]], new[b]])[None]
        alone = model.decode(text, model.encode(source[b : b + 1]))[0]
        close(torch.cat([prompt[b][keep[b]], after[0][b], after[1][b]]), alone)


@each_cell
@each_decoder
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "in place"])
@torch.no_grad()
def test_beams_go_on_from_their_parents(cell: str, alignment: str, feeds: bool, fixed: bool) -> None:
    model = tiny(cell=cell, alignment=alignment, input_feeding=feeds)
    source, keep, target = tokens(2, 5), lengths_to_keep([5, 3], 5), tokens(4, 5, 1)
    cache = model.new_cache(2, 16) if fixed else model.new_cache()
    memory = model.encode(source, padding_mask=keep)
    model.decode(torch.ones(2, 1, dtype=torch.long), memory, cache=cache)
    cache.reorder(torch.tensor([0, 0, 1, 1]))  # two beams a sentence
    model.decode(target[:, :2], None, cache=cache)
    parents = torch.tensor([1, 1, 3, 2])
    cache.reorder(parents)
    out = model.decode(target[:, 2:], None, cache=cache)
    texts = torch.cat([torch.ones(4, 1, dtype=torch.long), target[parents, :2], target[:, 2:]], dim=1)
    expected = model.decode(texts, memory.rows(torch.tensor([0, 0, 1, 1])))
    close(out, expected[:, 3:])


@each_cell
@pytest.mark.parametrize("alignment", ["none", "additive", "dot"])
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "in place"])
@torch.no_grad()
def test_tokens_can_be_taken_back(cell: str, alignment: str, fixed: bool) -> None:
    model = tiny(cell=cell, alignment=alignment)
    memory, target, other = model.encode(tokens(3, 4)), tokens(3, 7, 1), tokens(3, 4, 2)
    cache = model.new_cache(3, 16) if fixed else model.new_cache()
    model.decode(target, memory, cache=cache)
    cache.truncate(torch.tensor([6, 9, 4]))
    assert cache.lengths.tolist() == [6, 7, 4]
    model.decode(other[:, :2], None, cache=cache)
    cache.truncate(torch.tensor([7, 8, 2]))
    out = model.decode(other[:, 2:], None, cache=cache)
    texts = [
        torch.cat([target[0, :6], other[0, :1], other[0, 2:]]),
        torch.cat([target[1, :7], other[1, :1], other[1, 2:]]),
        torch.cat([target[2, :2], other[2, 2:]]),
    ]
    for b, text in enumerate(texts):
        close(out[b], model.decode(text[None], memory.rows(torch.tensor([b])))[0, -2:])
    cache.truncate(3)
    assert cache.lengths.tolist() == [3, 3, 3]


@torch.no_grad()
def test_what_is_no_longer_kept_cannot_be_taken_back() -> None:
    model = tiny()
    cache = model.new_cache()
    cache.truncate(3)  # an empty one has nothing to lose
    model.decode(tokens(2, 20), model.encode(tokens(2, 4)), cache=cache)
    cache.truncate(20 - (StateCache.n_states - 1))
    with pytest.raises(ValueError, match="length=3 removes 1 tokens, but only the last 16 states are kept"):
        cache.truncate(3)
    with pytest.raises(ValueError, match="length=-1 must not be negative"):
        cache.truncate(-1)


@each_cell
@torch.no_grad()
def test_a_fixed_cache_holds_one_text_longer_than_its_past(cell: str) -> None:
    model, target = tiny(cell=cell), tokens(1, 20, 1)
    memory, cache = model.encode(tokens(1, 5)), model.new_cache(1, 32)
    close(step_by_step(model, target, memory, cache, [1] * 20), model.decode(target, memory))
    assert cache.lengths.tolist() == [20]
    cache.truncate(12)
    close(step_by_step(model, target[:, 12:], memory, cache, [8]), model.decode(target, memory)[:, 12:])


@torch.no_grad()
def test_a_fixed_cache_stays_where_it_is() -> None:
    model = tiny()
    cache = model.new_cache(2, 16)
    held = []
    for seed in (0, 3):
        cache.reset()
        memory = model.encode(tokens(2, 4, seed))
        for token in tokens(2, 3, 1).split(1, dim=1):
            model.decode(token, memory, cache=cache)
            cache.reorder(torch.tensor([1, 0]))
            state = cache.layers[0]
            held.append([x.data_ptr() for x in (state._state, state._lengths, state._past, state._past_lengths)])
    assert all(places == held[0] for places in held)


def test_gradients_pass_through_a_growing_cache() -> None:
    model = tiny(alignment="general")
    source, target = tokens(2, 4), tokens(2, 3, 1)
    model(source, target).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    memory, cache = model.encode(source), model.new_cache()
    model.head(step_by_step(model, target, memory, cache, [1, 1, 1]), model.output_table).sum().backward()
    for name, p in model.named_parameters():
        close(p.grad, expected[name], 1e-5)


@torch.no_grad()
def test_keys_are_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(alignment="additive")
    mechanism = model.decoder.cross_attention.mechanism
    calls, keys = [], mechanism.keys
    monkeypatch.setattr(mechanism, "keys", lambda k: calls.append(k.shape) or keys(k))
    model(tokens(2, 4), tokens(2, 5))
    assert len(calls) == 1
    memory, cache = model.encode(tokens(2, 4)), model.new_cache()
    step_by_step(model, tokens(2, 5), memory, cache, [1] * 5)
    cache.reorder(torch.tensor([1, 0]))
    model.decode(tokens(2, 1), memory, cache=cache)
    assert len(calls) == 2
