"""Recurrent encoder-decoders against torch's own cells and the papers' equations written out, with any padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.attention import record
from regard.config import ModelConfig
from regard.models import build
from regard.models.block import Memory
from regard.models.recurrent import Recurrent
from regard.models.recurrent_cells import Recurrence
from regard.presets import preset

from .tiny_recurrent import (
    DECODERS,
    LSTM_TRACES,
    NO_LSTM_TRACE,
    PLACE,
    close,
    each_cell,
    each_decoder,
    lengths_to_keep,
    step_by_step,
    tiny,
    tokens,
)

# ---- the encoder is torch's


def torch_twin(ours: Recurrence, d_in: int) -> nn.LSTM | nn.GRU:
    kind = nn.LSTM if ours.cell == "lstm" else nn.GRU
    twin = kind(d_in, ours.n_units, ours.n_layers, batch_first=True, bidirectional=ours.back is not None)
    for stack, suffix in ((ours.ahead, ""), (ours.back or [], "_reverse")):
        for layer, gates in enumerate(stack):
            for their, our in (("weight_ih", "w_x"), ("weight_hh", "w_h"), ("bias_ih", "b_x"), ("bias_hh", "b_h")):
                getattr(twin, f"{their}_l{layer}{suffix}").data.copy_(getattr(gates, our))
    return twin


@each_cell
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("lengths", [[5, 1, 3], [2, 5, 5], [4, 4, 4]])
def test_a_padded_batch_is_read_as_torch_reads_a_packed_one(cell: str, bidirectional: bool, lengths: list[int]) -> None:
    ours = tiny(cell=cell, bidirectional=bidirectional).encoder
    twin = torch_twin(ours, 12)
    x = torch.randn(3, 5, 12)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    keep = lengths_to_keep(lengths, 5)

    out, final = ours.forward_padded(mine, keep)
    packed = pack_padded_sequence(theirs, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    packed_out, state = twin(packed)
    expected, _ = pad_packed_sequence(packed_out, batch_first=True, total_length=5)
    kinds = state if cell == "lstm" else (state,)
    expected_final = [
        torch.cat(list(kind.unflatten(0, (2, -1))[layer]), dim=-1) for kind in kinds for layer in range(2)
    ]

    close(out, expected)
    for ours_final, theirs_final in zip(final, expected_final, strict=True):
        close(ours_final, theirs_final)
    weigh = torch.randn_like(out)
    ((out * weigh).sum() + sum(part.sin().sum() for part in final)).backward()
    ((expected * weigh).sum() + sum(part.sin().sum() for part in expected_final)).backward()
    close(mine.grad, theirs.grad)
    assert not mine.grad[~keep].any()
    close(ours.ahead[0].w_h.grad, twin.weight_hh_l0.grad, 1e-5)


@each_cell
def test_steps_and_the_fused_kernel_agree(cell: str) -> None:
    rnn = tiny(cell=cell, alignment="none").decoder.rnn
    x = torch.randn(3, 4, 12)
    state = tuple(torch.randn(3, 12) for _ in range(4 if cell == "lstm" else 2))
    out, final = rnn(x, state)
    for t, gates in enumerate(rnn.project(x).unbind(1)):
        state = rnn.step(gates, state)
        close(out[:, t], state[1])
    for one, other in zip(final, state, strict=True):
        close(one, other)


# ---- the papers' equations, written out


def naive_cell(cell: str, gates: nn.Module, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = (gates.w_x, gates.w_h, gates.b_x, gates.b_h)
    if cell == "gru":
        return (torch.gru_cell(x, state[0], *weights),)
    return torch.lstm_cell(x, state, *weights)


def naive_score(model: Recurrent, s: Tensor, h: Tensor) -> Tensor:
    """One state (M,) against one annotation (M,)."""
    mechanism = model.decoder.cross_attention.mechanism
    if model.config.alignment == "dot":
        return s @ h
    if model.config.alignment == "general":
        return s @ mechanism.w[0] @ h
    joined = torch.cat([mechanism.w_q[0], mechanism.w_k[0]])  # W [s; h]
    return mechanism.v[0] @ torch.tanh(torch.cat([s, h]) @ joined)


def naive(model: Recurrent, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (T, V) and weights (T, S) of one sentence pair, one number after another."""
    config, decoder = model.config, model.decoder
    n_layers, lstm = config.n_layers, config.cell == "lstm"
    memory = model.encode(source[None])
    annotations = memory.states[0]
    bridged = [to_part(part[0]) for to_part, part in zip(model.bridge.maps, memory.final, strict=True)]
    layers = [(torch.tanh(bridged[i]), *((bridged[n_layers + i],) if lstm else ())) for i in range(n_layers)]
    fed = torch.zeros(config.d_model)
    logits, rows = [], []

    def attend(s: Tensor) -> Tensor:
        alpha = torch.stack([naive_score(model, s, h) for h in annotations]).softmax(0)
        rows.append(alpha)
        return alpha @ annotations

    for y in model.token.weight[target]:
        x, context = y, None
        if config.alignment == "additive":
            context = attend(layers[-1][0])
            x = torch.cat([y, context])
        elif config.input_feeding:
            x = torch.cat([y, fed])
        for i in range(n_layers):
            layers[i] = tuple(
                part[0]
                for part in naive_cell(config.cell, decoder.rnn.ahead[i], x[None], tuple(p[None] for p in layers[i]))
            )
            x = layers[i][0]
        s = layers[-1][0]
        if context is not None:
            read = decoder.readout.weight @ torch.cat([y, s, context]) + decoder.readout.bias
            out = torch.maximum(read[0::2], read[1::2])
        else:
            out = fed = torch.tanh(decoder.combine.weight @ torch.cat([attend(s), s]))
        logits.append(model.head.weight @ out)
    return torch.stack(logits), torch.stack(rows)


@each_cell
@pytest.mark.parametrize(("alignment", "feeds"), DECODERS[1:])
@pytest.mark.parametrize("bidirectional", [True, False])
@torch.no_grad()
def test_logits_and_recorded_weights_are_those_of_the_papers(
    cell: str, alignment: str, feeds: bool, bidirectional: bool
) -> None:
    model = tiny(cell=cell, alignment=alignment, input_feeding=feeds, bidirectional=bidirectional)
    source, target, lengths = tokens(3, 5), tokens(3, 4, 1), [5, 2, 3]
    keep = lengths_to_keep(lengths, 5)
    with record(model) as seen:
        logits = model(source, target, source_padding_mask=keep)
    weights = seen.map(PLACE).tile()
    assert weights.shape == (3, 1, 4, 5)
    for b, length in enumerate(lengths):
        expected, alpha = naive(model, source[b, :length], target[b])
        close(logits[b], expected, 1e-5)
        close(weights[b, 0, :, :length], alpha)
        assert not weights[b, 0, :, length:].any()


@each_cell
@torch.no_grad()
def test_without_attention_the_last_state_is_all_the_decoder_gets(cell: str) -> None:
    model = tiny(cell=cell, alignment="none")
    memory = model.encode(tokens(2, 5))
    memory.states.zero_()
    target = tokens(2, 4, 1)
    start = model.bridge(memory.final)
    state = torch.stack(start[:2]) if cell == "gru" else (torch.stack(start[:2]), torch.stack(start[2:]))
    expected, _ = torch_twin(model.decoder.rnn, 12)(model.token(target), state)
    close(model.decode(target, memory), expected)


@pytest.mark.parametrize(("n_layers", "n_decoder_layers", "partners"), [(3, 1, [2]), (1, 3, [0, 0, 0]), (2, 2, [0, 1])])
def test_the_bridge_pairs_layers_from_the_top(n_layers: int, n_decoder_layers: int, partners: list[int]) -> None:
    model = tiny(n_layers=n_layers, n_decoder_layers=n_decoder_layers)
    assert model.bridge.source == partners + [n_layers + layer for layer in partners]
    assert model(tokens(2, 3), tokens(2, 4)).shape == (2, 4, 13)


# ---- padding


@each_cell
@each_decoder
@settings(max_examples=6, deadline=None)
@given(data=st.data())
@torch.no_grad()
def test_padding_anywhere_changes_nothing(cell: str, alignment: str, feeds: bool, data: st.DataObject) -> None:
    model = tiny(cell=cell, alignment=alignment, input_feeding=feeds)
    rows = data.draw(st.integers(1, 3), "rows")
    masks = []
    for name in ("source", "target"):
        length = data.draw(st.integers(1, 6), f"{name} length")
        bits = st.lists(st.booleans(), min_size=length, max_size=length).filter(any)
        masks.append(torch.tensor(data.draw(st.lists(bits, min_size=rows, max_size=rows), f"{name} keep")))
    keep, target_padding_mask = masks
    source, target = tokens(*keep.shape), tokens(*target_padding_mask.shape, 1)
    logits = model(source, target, source_padding_mask=keep, target_padding_mask=target_padding_mask)
    again = model(
        torch.where(keep, source, 0),
        torch.where(target_padding_mask, target, 0),
        source_positions=torch.where(keep, 0, -1),
        target_positions=torch.where(target_padding_mask, 0, -1),
    )
    for b in range(rows):
        alone = model(source[b][keep[b]][None], target[b][target_padding_mask[b]][None])
        close(logits[b][target_padding_mask[b]], alone[0])
        close(again[b][target_padding_mask[b]], alone[0])


@pytest.mark.parametrize("alignment", ["none", "additive", "dot"])
def test_a_source_of_padding_alone_gives_numbers_and_no_attention(alignment: str) -> None:
    model = tiny(alignment=alignment)
    keep = lengths_to_keep([0, 4], 4)
    with record(model) as seen:
        logits = model(tokens(2, 4), tokens(2, 3), source_padding_mask=keep)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if alignment != "none":
        assert not seen.map(PLACE).tile()[0].any()
        assert not seen.attentions[PLACE][0].output[0].any()


# ---- how it is computed


@pytest.mark.parametrize(("alignment", "feeds"), [("none", True), ("dot", False), ("concat", False)])
def test_no_loop_over_time_where_none_is_needed(alignment: str, feeds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(alignment=alignment, input_feeding=feeds)
    monkeypatch.setattr(model.decoder, "step", lambda *_: pytest.fail("went step by step"))
    model(tokens(2, 4), tokens(2, 5), source_padding_mask=lengths_to_keep([4, 2], 4)).sum().backward()


@each_cell
@each_decoder
def test_every_parameter_learns(cell: str, alignment: str, feeds: bool) -> None:
    model = tiny(cell=cell, alignment=alignment, input_feeding=feeds, target_vocab_size=11, d_embed=6).train()
    target = torch.randint(3, 11, (2, 5))
    keep = lengths_to_keep([4, 2], 4)
    (model(tokens(2, 4), target, source_padding_mask=keep) * torch.randn(2, 5, 11)).sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still


@pytest.mark.parametrize(
    ("cell", "alignment", "feeds"), [("lstm", "general", True), ("gru", "additive", True), ("lstm", "concat", False)]
)
def test_it_compiles_whole_and_can_still_be_looked_into(cell: str, alignment: str, feeds: bool) -> None:
    if cell == "lstm" and not LSTM_TRACES:
        pytest.skip(NO_LSTM_TRACE)
    torch.compiler.reset()
    model = tiny(cell=cell, alignment=alignment, input_feeding=feeds, n_layers=1)
    source, target = tokens(2, 3), tokens(2, 2, 1)
    keeps = {"source_padding_mask": lengths_to_keep([3, 2], 3), "target_padding_mask": lengths_to_keep([1, 2], 2)}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with record(model) as seen:
        expected = model(source, target, **keeps)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with record(compiled) as seen_compiled:
        logits = compiled(source, target, **keeps)
    logits.square().sum().backward()
    close(logits, expected)
    close(seen_compiled.map(PLACE).tile(), seen.map(PLACE).tile())
    for name, p in model.named_parameters():
        close(p.grad, gradients[name], 1e-5)


@pytest.mark.parametrize("alignment", ["additive", "general"])
def test_checkpointing_changes_no_gradient_and_keeps_less(alignment: str) -> None:
    model = tiny(alignment=alignment).train()
    kept, gradients = [], []
    for on in (False, True):
        model.use_checkpointing(on)
        model.zero_grad()
        kept.append(0)

        def count(x: Tensor) -> Tensor:
            kept[-1] += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            loss = model(tokens(2, 9), tokens(2, 5)).square().sum()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert kept[1] < kept[0]
    for one, other in zip(*gradients, strict=True):
        close(one, other)


@pytest.mark.parametrize("name", ["dropout", "embedding_dropout", "attention_dropout"])
@pytest.mark.parametrize(("alignment", "feeds"), [("additive", True), ("dot", False)])
@torch.no_grad()
def test_dropout_acts_while_training_only(name: str, alignment: str, feeds: bool) -> None:
    model = tiny(alignment=alignment, input_feeding=feeds, **{name: 0.5})
    source, target = tokens(2, 4), tokens(2, 5)
    keep = lengths_to_keep([4, 2], 4)
    expected = tiny(alignment=alignment, input_feeding=feeds)(source, target, source_padding_mask=keep)
    assert torch.equal(model(source, target, source_padding_mask=keep), expected)
    model.train()
    drawn = [model(source, target, source_padding_mask=keep) for _ in range(2)]
    assert not torch.allclose(drawn[0], drawn[1])


@pytest.mark.parametrize(("alignment", "feeds"), [("none", True), ("additive", True), ("concat", False)])
def test_half_precision_and_autocast(alignment: str, feeds: bool) -> None:
    model = tiny(alignment=alignment, input_feeding=feeds)
    source, target, keep = tokens(2, 4), tokens(2, 5), lengths_to_keep([4, 2], 4)
    expected = model(source, target, source_padding_mask=keep)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(source, target, source_padding_mask=keep)
        mixed.float().sum().backward()
        cache = model.new_cache()
        memory = model.encode(source, padding_mask=keep)
        cached = model.head(step_by_step(model, target, memory, cache, [1] * 5), model.output_table)
    half = model.bfloat16()(source, target, source_padding_mask=keep)
    assert half.dtype == torch.bfloat16
    for logits in (mixed, cached, half):
        torch.testing.assert_close(logits.float(), expected, atol=0.25, rtol=0.1)


# ---- it learns


def sentences(n: int, reverse: bool, dice: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source, what is real in it, target in, target out: a copy or a reversal of 4 to 6 tokens."""
    lengths = torch.randint(4, 7, (n,), generator=dice)
    keep = torch.arange(6) < lengths[:, None]
    source = torch.randint(3, 12, (n, 6), generator=dice) * keep
    place = (lengths[:, None] - 1 - torch.arange(6)).clamp(min=0) if reverse else torch.arange(6).expand(n, 6)
    answer = source.gather(1, place) * keep
    return source, keep, torch.cat([torch.ones_like(answer[:, :1]), answer[:, :-1]], dim=1), answer


@pytest.mark.parametrize(("cell", "alignment", "reverse"), [("gru", "additive", False), ("lstm", "general", True)])
def test_it_learns_to_copy_and_to_reverse_by_looking_at_the_right_place(
    cell: str, alignment: str, reverse: bool
) -> None:
    torch.manual_seed(0)
    dice = torch.Generator().manual_seed(1)
    sizes = {"vocab_size": 12, "d_model": 32, "n_layers": 1, "bidirectional": False, "dropout": 0.0}
    model = build(preset("bahdanau-gru", cell=cell, alignment=alignment, **sizes))
    optimiser = torch.optim.Adam(model.parameters(), 2e-2)
    steps = 150
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    for _ in range(steps):
        source, keep, target, answer = sentences(32, reverse, dice)
        loss = F.cross_entropy(model(source, target, source_padding_mask=keep)[keep], answer[keep])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    source, keep, target, answer = sentences(200, reverse, dice)
    with torch.no_grad(), record(model) as seen:
        right = (model(source, target, source_padding_mask=keep).argmax(-1) == answer)[keep].float().mean()
    assert right > 0.95
    looked_at = seen.map(PLACE).top(1).indices[:, 0, :, 0]
    meant = keep.sum(1, keepdim=True) - 1 - torch.arange(6) if reverse else torch.arange(6).expand_as(keep)
    near = ((looked_at - meant).abs() <= 1)[keep].float().mean()
    assert near > 0.9


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"d_model": 15}, "d_model=15 must be even: bidirectional=True gives each direction half of it"),
        ({"alignment": "additive", "input_feeding": False}, "input_feeding=False needs alignment='dot'"),
        ({"source": "image"}, "architecture='recurrent' reads text, not source='image'"),
        ({"head": "classify"}, "architecture='recurrent' has head='lm' or 'none', not 'classify'"),
        ({"head": "masked-lm"}, "architecture='recurrent' has head='lm' or 'none', not 'masked-lm'"),
        ({"d_embed": 8, "tie_head": True}, "tie_head=True needs d_embed=8 to be as wide as d_model=16"),
        ({"positions": "rope"}, "positions='rope' does not apply to architecture='recurrent'"),
        ({"mixer": "linear"}, "mixer='linear' does not apply to architecture='recurrent'"),
        ({"share_layers": True}, "share_layers=True does not apply to architecture='recurrent'"),
        ({"cell": "rnn"}, "cell='rnn'"),
        ({"alignment": "luong"}, "alignment='luong'"),
        ({"n_layers": 0}, "n_layers=0 must be at least 1"),
    ],
)
def test_configs_that_cannot_be_are_refused_in_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence.replace("(", r"\(")) as refused:
        ModelConfig(architecture="recurrent", **{"d_model": 16, "tie_head": False, **fields})
    assert "\n" not in str(refused.value)


def test_an_odd_width_and_any_heads_are_fine_in_one_direction() -> None:
    assert tiny(d_model=15, bidirectional=False)(tokens(2, 3), tokens(2, 2)).shape == (2, 2, 13)


def test_bad_input_is_refused_in_a_sentence() -> None:
    model = tiny()
    source, target = tokens(2, 4), tokens(2, 3)
    with pytest.raises(
        ValueError, match=r"source must be \(batch, length\) with at least one token, got shape \(2, 0\)"
    ):
        model(source[:, :0], target)
    with pytest.raises(ValueError, match=r"target must be \(batch, length\) with at least one token, got shape \(3,\)"):
        model(source, target[0])
    with pytest.raises(ValueError, match=r"source padding_mask has shape \(2, 3\), but source has \(2, 4\)"):
        model(source, target, source_padding_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="target has batch size 1 but memory has 2"):
        model.decode(target[:1], model.encode(source))
    with pytest.raises(TypeError, match="memory must come from encode"):
        model.decode(target, Memory(torch.zeros(2, 4, 12)))
    with pytest.raises(TypeError, match="memory must come from encode"):
        model.decode(target, None, cache=model.new_cache())
    with pytest.raises(TypeError, match="this is not a recurrent model's cache"):
        model.decode(target, model.encode(source), cache=build("transformer-tiny").new_cache())
    with pytest.raises(ValueError, match="vocab_size=13"):
        model(source + 10, target)


# ---- building


@pytest.mark.parametrize("name", ["bahdanau-gru", "luong-lstm", "lstm-plain"])
def test_presets_build_without_memory_and_with_every_head(name: str) -> None:
    model = build(name, device="meta")
    assert isinstance(model, Recurrent)
    assert all(p.is_meta for p in model.parameters())
    small = build(name, vocab_size=9, d_model=8, target_vocab_size=7, tie_head=True)
    assert small(tokens(2, 4) % 9, tokens(2, 3) % 7).shape == (2, 3, 7)
    assert small.output_table is small.target_token.weight
    assert small.head.weight is None
    bare = build(name, vocab_size=13, d_model=8, head="none")
    assert bare(tokens(2, 4), tokens(2, 3)).shape == (2, 3, 8)


def test_parameters_are_counted_as_the_papers_would() -> None:
    m, v, e = 8, 11, 8

    def gru(d_in: int, units: int) -> int:
        return 3 * units * (d_in + units + 2)

    model = build("bahdanau-gru", d_model=m, vocab_size=v)
    embeddings, head = v * e, v * m
    encoder, bridge = 2 * gru(e, m // 2), m * m + m
    attention, decoder = 2 * m * m + m, gru(e + m, m)
    readout = 2 * m * (e + 2 * m) + 2 * m
    assert model.n_parameters == embeddings + head + encoder + bridge + attention + decoder + readout


def test_first_values() -> None:
    torch.manual_seed(0)
    model = build("luong-lstm", d_model=64, vocab_size=9)
    gates = model.encoder.ahead[0]
    assert not gates.b_h.any()
    assert gates.b_x.chunk(4)[1].eq(1).all()
    assert not torch.cat([gates.b_x.chunk(4)[i] for i in (0, 2, 3)]).any()
    bound = (6 / (64 + 64)) ** 0.5
    for weight in (gates.w_x, gates.w_h, model.decoder.cross_attention.mechanism.w[0]):
        assert 0.98 * bound < weight.abs().max() <= bound
    normal = build("luong-lstm", d_model=64, vocab_size=9, init_std=0.02)
    assert normal.encoder.ahead[0].w_h.std().item() == pytest.approx(0.02, rel=0.05)
