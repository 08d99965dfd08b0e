"""Layers by hand: norms, residuals, dropouts each in its place, every mixer and every kind of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import attend, multihead, record
from regard.attention.mechanisms import CappedDot, Dot
from regard.config import ModelConfig, mixers
from regard.models import Block, Decoder, Encoder, EncoderDecoder, Memory, Model, build
from regard.models.block import LayerContext
from regard.models.components import Pooler
from regard.training.loss import Batch, batch_loss, token_losses

from .small import SIZES, decode, inputs_of, shaken, source_of, target_of

KINDS: dict[str, dict[str, Any]] = {
    "encoder": {"architecture": "encoder", "head": "masked-lm"},
    "decoder": {"architecture": "decoder"},
    "encoder-decoder": {"architecture": "encoder-decoder"},
}
MIXERS = tuple(mixers.MIXERS)
POSITIONS = ("none", "sinusoidal", "learned", "rope", "alibi", "t5", "xl")
CAUSAL_MIXERS = tuple(name for name, entry in mixers.MIXERS.items() if entry.causal)


def config_of(**fields: Any) -> ModelConfig:
    return ModelConfig(**SIZES | fields)


def model_of(**fields: Any) -> Model:
    torch.manual_seed(0)
    return shaken(build(config_of(**fields))).eval()


def close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# ---- one layer, written out


def block_of(cross: bool = False, **fields: Any) -> Block:
    torch.manual_seed(0)
    block = Block(config_of(**fields), 4, 32, cross=cross, mask=None, rope=None)
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return block.eval()


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four heads of width 6, (B, T, M) each: softmax(q kᵀ / √6) v."""
    q, k, v = (x.unflatten(-1, (4, 6)).transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(-1, -2) / 6**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def sublayers(block: Block, memory: Tensor | None) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Each sub-layer's norm and function, from the weights alone."""
    w = dict(block.named_parameters())

    def line(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def to_itself(x: Tensor) -> Tensor:
        return line(attention_by_hand(*line(x, "attention.w_qkv").chunk(3, -1)), "attention.w_o")

    def to_memory(x: Tensor) -> Tensor:
        k, v = line(memory, "cross_attention.w_kv").chunk(2, -1)
        return line(attention_by_hand(line(x, "cross_attention.w_query"), k, v), "cross_attention.w_o")

    def feed_forward(x: Tensor) -> Tensor:
        return line(line(x, "ff.w_in").relu(), "ff.w_out")

    middle = [] if memory is None else [(block.cross_norm, to_memory)]
    return [(block.attention_norm, to_itself), *middle, (block.ff_norm, feed_forward)]


@torch.no_grad()
@pytest.mark.parametrize("cross", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("place", ["pre", "post", "output", "both"])
def test_a_layer_by_hand(place: str, norm: str, residual: bool, cross: bool) -> None:
    block = block_of(cross, norm_place=place, norm=norm, residual=residual)
    x, memory = torch.randn(2, 5, 24), torch.randn(2, 7, 24) if cross else None

    def normed(y: Tensor, its_norm: nn.Module) -> Tensor:
        if norm == "layer":
            y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
            return y * its_norm.weight + its_norm.bias
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * its_norm.weight if norm == "rms" else y

    y = x
    output_norms = [block.attention_output_norm, block.cross_output_norm, block.ff_output_norm]
    for (its_norm, run), output_norm in zip(
        sublayers(block, memory), output_norms if cross else output_norms[::2], strict=True
    ):
        if place == "pre":
            y = (y if residual else 0) + run(normed(y, its_norm))
        elif place == "post":
            y = normed((y if residual else 0) + run(y), its_norm)
        elif place == "output":
            y = (y if residual else 0) + normed(run(y), its_norm)
        else:
            y = (y if residual else 0) + normed(run(normed(y, its_norm)), output_norm)
    context = LayerContext() if memory is None else LayerContext(memory=Memory(memory))
    close(block(x, context), y)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["two-norms", "one-norm"])
def test_a_parallel_layer_by_hand(kind: str) -> None:
    block = block_of(False, norm_place="pre", parallel_residual=kind, architecture="decoder")
    x = torch.randn(2, 5, 24)
    (attention_norm, attend), (ff_norm, feed_forward) = sublayers(block, None)
    y, z = attention_norm(x), attention_norm(x) if ff_norm is None else ff_norm(x)
    assert (ff_norm is None) == (kind == "one-norm")
    close(block(x, LayerContext()), x + attend(y) + feed_forward(z))


@pytest.mark.parametrize("place", ["pre", "post", "output", "both"])
def test_the_last_norm_follows_all_but_post_norm_layers(place: str) -> None:
    model = model_of(norm_place=place, architecture="decoder")
    assert isinstance(model, Decoder)
    assert (model.decoder.norm is not None) == (place != "post")


def test_positions_and_bases_differ_by_layer() -> None:
    rope = {"architecture": "decoder", "positions": "rope", "n_layers": 4, "window": 3, "window_layers": (0, 2)}
    model = model_of(**rope, rope_layers=(0, 1, 2), window_rope_base=50.0)
    assert isinstance(model, Decoder)
    ropes = [block.attention.rope for block in model.decoder.blocks]
    assert [None if x is None else x.base for x in ropes] == [50.0, 10000.0, 50.0, None]
    assert ropes[0] is ropes[2], "layers alike share a table"


@torch.no_grad()
def test_caps_bound_scores_and_logits() -> None:
    model = model_of(architecture="decoder", score_cap=0.5, logit_cap=2.0, init_std=3.0)
    logits = model(torch.arange(5)[None])
    assert 1.9 < logits.abs().max() <= 2.0
    q, k = torch.randn(1, 2, 6, 8) * 9, torch.randn(1, 2, 6, 8) * 9
    capped = CappedDot(0.5)
    close(capped.scores(q, k), 0.5 * torch.tanh(Dot().scores(q, k) / 0.5))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_capped_attention_and_its_gradients_by_hand(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weights = (0.5 * torch.tanh(q @ k.mT / 8**0.5 / 0.5)).softmax(-1)
    output = attend(q, k, v, mechanism=CappedDot(0.5), backend=backend).output
    close(output, weights @ v)
    expected = torch.autograd.grad((weights @ v).square().sum(), (q, k, v))
    for got, gradient in zip(torch.autograd.grad(output.square().sum(), (q, k, v)), expected, strict=True):
        close(got, gradient)


def test_a_capped_loss_is_the_cross_entropy_of_capped_logits() -> None:
    model = model_of(architecture="decoder", logit_cap=2.0)
    tokens = torch.tensor([[1, 5, 3, 7]])
    batch = Batch((tokens,), tokens.roll(-1, 1))
    expected = F.cross_entropy(model(tokens).flatten(0, 1), batch.targets.flatten(), reduction="sum")
    close(batch_loss(model, batch), expected)
    close(token_losses(model, batch)[0].sum(), expected)


def test_norm_fields_reach_every_norm() -> None:
    model = model_of(norm_eps=0.125, norm_bias=False, embedding_norm=True, norm_place="pre")
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    assert len(norms) == 2 + 2 * (2 + 3) + 2  # embeddings, layers, after the last layer
    assert all(n.eps == 0.125 and n.bias is None for n in norms)


# ---- dropout, each rate in its own place


class Probe(nn.Module):
    """Stands in for a dropout: keeps what it was given, and doubles it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return 2 * x


RATES = {
    "dropout": {"encoder.blocks.0.dropout"},
    "embedding_dropout": {"embeddings.dropout"},
    "activation_dropout": {"encoder.blocks.0.ff.dropout"},
    "classifier_dropout": {"classifier.dropout"},
    "attention_dropout": {"encoder.blocks.0.attention"},
}


@pytest.mark.parametrize("rate", RATES)
def test_each_rate_is_the_rate_of_one_place(rate: str) -> None:
    model = model_of(architecture="encoder", head="classify", n_layers=1, **{rate: 0.25})
    found = {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    found |= {name: m.dropout for name, m in model.named_modules() if isinstance(m, multihead.MultiHeadAttention)}
    assert {name for name, p in found.items() if p > 0} == RATES[rate]
    assert {p for p in found.values() if p > 0} == {0.25}
    tokens = source_of(model.config)
    still = model(tokens)
    close(still, model(tokens), 0.0)
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@torch.no_grad()
def test_sublayer_dropout_comes_before_the_sum() -> None:
    for place in ("pre", "post"):
        block = block_of(cross=True, norm_place=place)
        block.dropout = probe = Probe()
        x, memory = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
        y = x
        for its_norm, run in sublayers(block, memory):
            y = y + 2 * run(its_norm(y)) if place == "pre" else its_norm(y + 2 * run(y))
        close(block(x, LayerContext(memory=Memory(memory))), y)
        assert len(probe.seen) == 3


@torch.no_grad()
def test_embedding_dropout_comes_after_sum_and_norm() -> None:
    model = model_of(positions="learned", embedding_norm=True, n_segments=2, architecture="encoder", head="none")
    assert isinstance(model, Encoder)
    model.embeddings.dropout = probe = Probe()
    tokens, segments = source_of(model.config), source_of(model.config) % 2
    model(tokens, segments=segments)
    parts = model.embeddings
    summed = model.token.weight[tokens] + parts.segment.weight[segments] + parts.position.weight[:9]
    close(probe.seen[0], parts.norm(summed))


@torch.no_grad()
def test_activation_dropout_comes_after_the_activation() -> None:
    for activation, f in (("gelu", F.gelu), ("swiglu", lambda h: F.silu(h[..., :32]) * h[..., 32:])):
        block = block_of(activation=activation)
        block.ff.dropout = probe = Probe()
        x = torch.randn(2, 5, 24)
        block.ff(x)
        close(probe.seen[0], f(block.ff.w_in(x)))


@torch.no_grad()
def test_classifier_dropout_comes_after_pooling() -> None:
    model = model_of(architecture="encoder", head="classify", pooler="tanh", n_classes=3)
    assert isinstance(model, Encoder)
    model.classifier.dropout = probe = Probe()
    tokens = source_of(model.config)
    got = model(tokens)
    dense = model.classifier.pooler.dense
    pooled = torch.tanh(dense(model.hidden(tokens)[:, 0]))
    close(probe.seen[0], pooled)
    close(got, model.classifier.out(2 * pooled))


def test_attention_dropout_is_on_the_weights_and_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    real = multihead.prepare

    def watched(*args: Any, dropout: float, **named: Any) -> Any:
        rates.append(dropout)
        return real(*args, dropout=dropout, **named)

    monkeypatch.setattr(multihead, "prepare", watched)
    model = model_of(architecture="encoder-decoder", attention_dropout=0.4, n_layers=1)
    model(*inputs_of(model.config))
    assert rates == [0.0] * 3
    model.train()
    model(*inputs_of(model.config))
    assert rates[3:] == [0.4] * 3


# ---- one set of weights for all layers


@torch.no_grad()
def test_shared_layers() -> None:
    one = model_of(architecture="decoder", n_layers=1, share_layers=True, norm_place="pre")
    many = model_of(architecture="decoder", n_layers=4, share_layers=True, norm_place="pre")
    assert one.n_parameters == many.n_parameters
    assert isinstance(many, Decoder)
    many.load_state_dict(one.state_dict())
    tokens = source_of(many.config)
    apart = build(many.config.with_(share_layers=False)).eval()
    state = one.state_dict()
    copied = {name.replace("blocks.0.", f"blocks.{i}."): x for name, x in state.items() for i in range(4)}
    apart.load_state_dict(copied)
    close(many(tokens), apart(tokens))
    for cache in (many.new_cache(), many.new_cache(3, 12)):
        close(decode(many, (tokens,), cache), many(tokens))


# ---- every mixer and every kind of positions


def fall(model: Model) -> float:
    """How far a few steps bring the loss down, as a share of it."""
    torch.manual_seed(1)
    inputs = inputs_of(model.config)
    goal = torch.arange(inputs[-1].numel()) % 31
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(*inputs).flatten(0, 1), goal)
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return 1 - losses[-1] / losses[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_trains(mixer: str, kind: str) -> None:
    """In an encoder, where everything is allowed; in a decoder, those that can be causal."""
    if mixers.MIXERS[mixer].recurrent and kind != "decoder":
        with pytest.raises(ValueError, match=f"mixer='{mixer}' reads a text from its beginning"):
            config_of(**KINDS[kind], mixer=mixer)
        return
    if mixer not in CAUSAL_MIXERS and kind != "encoder":
        with pytest.raises(ValueError, match=f"mixer='{mixer}' mixes all tokens at once"):
            config_of(**KINDS[kind], mixer=mixer)
        return
    torch.manual_seed(0)
    model = build(config_of(**KINDS[kind], mixer=mixer, mixer_size=8 if mixers.MIXERS[mixer].size else None))
    assert fall(model) > 0.05
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_every_kind_of_positions_trains(positions: str, kind: str) -> None:
    torch.manual_seed(0)
    model = build(config_of(**KINDS[kind], positions=positions))
    assert fall(model) > 0.05
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


VARIANTS: dict[str, dict[str, Any]] = {
    **{f"mixer {mixer}": {"mixer": mixer} for mixer in CAUSAL_MIXERS if not mixers.MIXERS[mixer].recurrent},
    **{f"positions {positions}": {"positions": positions} for positions in POSITIONS},
    **{f"additive, {positions}": {"mixer": "additive", "positions": positions} for positions in ("t5", "xl")},
    "window": {"window": 3, "positions": "rope"},
    "window in one layer, alibi": {"window": 3, "window_layers": (1,), "positions": "alibi"},
    "window, xl": {"window": 3, "positions": "xl"},
    "window, t5": {"window": 3, "positions": "t5"},
    "window, additive": {"window": 3, "mixer": "additive"},
    "strided": {"sparsity": "strided", "sparsity_size": 3, "positions": "rope"},
    "bigbird": {"sparsity": "bigbird", "sparsity_size": 2, "sparsity_random": 30.0},
    "bigbird, additive": {"sparsity": "bigbird", "sparsity_size": 2, "mixer": "additive", "positions": "alibi"},
    "strided, linear": {"sparsity": "strided", "sparsity_size": 3, "mixer": "linear"},
    "grouped heads": {"n_kv_heads": 2, "positions": "rope"},
    "grouped heads, xl": {"n_kv_heads": 1, "positions": "xl"},
    "grouped heads, performer": {"n_kv_heads": 2, "mixer": "performer", "mixer_size": 8},
    "qk norm": {"qk_norm": True, "norm": "rms", "norm_place": "pre"},
    "partly rotated": {"positions": "rope", "d_head": 8, "rope_fraction": 0.5},
    "no residual": {"residual": False},
    "no norm": {"norm": "none"},
    "shared layers": {"share_layers": True},
    "narrow table": {"d_embed": 8, "tie_head": False},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_causal_and_cached(fields: dict[str, Any], kind: str) -> None:
    model = model_of(**KINDS[kind], **fields)
    *source, tokens = inputs_of(model.config)
    whole = model(*source, tokens)
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 7) % 28 + 3
    close(model(*source, other)[:, :4], whole[:, :4], 1e-5)
    if model.config.residual:  # without it, two layers leave hardly a trace of a token (Dong et al. 2021)
        assert (model(*source, other) - whole)[:, 4:].abs().max() > 1e-2
    for cache in (model.new_cache(), model.new_cache(3, 12)):
        close(decode(model, (*source, tokens), cache), whole, 5e-5)


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS)
def test_left_padding_in_a_cache(positions: str) -> None:
    """Rows of different length, padded left, decoded together as each would be alone."""
    model = model_of(architecture="decoder", positions=positions)
    tokens = source_of(model.config)
    keep = torch.arange(9) >= torch.tensor([0, 4, 2])[:, None]
    places = torch.where(keep, keep.long().cumsum(-1) - 1, -1)
    for cache in (model.new_cache(), model.new_cache(3, 12)):
        spans = [slice(0, 5), *(slice(i, i + 1) for i in range(5, 9))]
        got = torch.cat([model(tokens[:, at], positions=places[:, at], cache=cache) for at in spans], dim=1)
        for row in range(3):
            close(got[row][keep[row]][None], model(tokens[row][keep[row]][None]), 5e-5)


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS)
def test_order_matters_exactly_where_it_is_told(positions: str) -> None:
    model = model_of(architecture="encoder", head="none", positions=positions)
    tokens = source_of(model.config)
    order = torch.tensor([5, 1, 2, 3, 4, 0, 8, 7, 6])
    exchanged = model(tokens[:, order])
    if positions == "none":
        close(exchanged, model(tokens)[:, order])
    else:
        assert (exchanged - model(tokens)[:, order]).abs().max() > 1e-2


@pytest.mark.parametrize("positions", ["none", "xl"])
def test_the_scale_reaches_all_of_the_score(positions: str) -> None:
    """Transformer-XL scales q·k and what it adds alike: with scale 0 nothing of a score is left."""
    model = model_of(architecture="encoder", head="none", positions=positions, attention_scale=0.0, n_layers=1)
    with torch.no_grad(), record(model) as seen:
        model(source_of(model.config))
    close(seen.map("encoder.blocks.0.attention").dense(), torch.full((3, 4, 9, 9), 1 / 9))


@torch.no_grad()
def test_without_causal_the_future_is_seen() -> None:
    """The ablation that trains on what it must predict; a window then looks both ways."""
    for fields in ({}, {"window": 3}):
        for kind in ("decoder", "encoder-decoder"):
            model = model_of(**KINDS[kind], causal=False, **fields)
            *source, tokens = inputs_of(model.config)
            other = tokens.clone()
            other[:, 4] = 3 + (other[:, 4] - 2) % 28
            assert (model(*source, other) - model(*source, tokens))[:, 3].abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_window_looks_both_ways_in_an_encoder_and_back_in_a_decoder(kind: str) -> None:
    model = model_of(**KINDS[kind], n_layers=1, window=3, positions="none")
    tokens = source_of(model.config, batch=1)
    other = tokens.clone()
    other[:, 4] = 3 + (other[:, 4] - 2) % 28
    changed = (model(other) - model(tokens)).abs().amax(-1)[0] > 1e-6
    expected = range(2, 7) if kind == "encoder" else range(4, 7)
    assert changed.nonzero().flatten().tolist() == list(expected)


def test_window_layers() -> None:
    model = model_of(architecture="decoder", n_layers=3, window=4, window_layers=(0, 2))
    assert [block.mask is not None for block in model.stacks()[0].blocks] == [True, False, True]
    caches = model.new_cache(2, 10).layers
    assert [type(cache).__name__ for cache in caches] == ["RingCache", "StaticCache", "RingCache"]


@torch.no_grad()
def test_an_image_window_is_the_encoders_alone() -> None:
    """Its decoder reads text: nothing of the grid may narrow what that sees."""
    fields = {"source": "image", "image_size": 16, "patch_size": 4, "shifted_windows": 2}
    model = model_of(**fields)
    assert isinstance(model, EncoderDecoder)
    assert all(block.mask is not None for block in model.encoder.blocks)
    assert all(block.mask is None for block in model.decoder.blocks)
    with pytest.raises(ValueError, match=r"shifted_windows=2 needs images of image_size=16, got \(32, 16\)"):
        model(torch.randn(1, 3, 32, 16), target_of(model.config, 1))


@torch.no_grad()
def test_heads_that_differ_between_the_stacks() -> None:
    """Rotation and biases are made for each stack's own heads."""
    for positions in ("rope", "alibi", "t5", "xl"):
        model = model_of(n_heads=6, n_decoder_heads=2, n_decoder_layers=3, d_decoder_ff=20, positions=positions)
        source, target = inputs_of(model.config)
        cache = model.new_cache(3, 10)
        assert len(cache) == 3
        close(decode(model, (source, target), cache), model(source, target))


# ---- what a classifier reads


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["first", "mean", "attention"])
@pytest.mark.parametrize("pooler", ["none", "tanh", "relu"])
def test_pooling_ignores_padding(pooling: str, pooler: str) -> None:
    model = model_of(architecture="encoder", head="classify", pooling=pooling, pooler=pooler, n_classes=3)
    tokens = source_of(model.config)
    keep = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    got = model(tokens, padding_mask=keep)
    for row, length in enumerate((9, 4, 1)):
        close(got[row], model(tokens[row : row + 1, :length])[0])
    assert got.shape == (3, 3)


@torch.no_grad()
def test_pooling_by_hand() -> None:
    x = torch.randn(2, 5, 24)
    close(Pooler(config_of(pooling="first"))(x), x[:, 0])
    close(Pooler(config_of(pooling="mean"))(x), x.mean(1))
    pooler = Pooler(config_of(pooling="attention", pooler="relu"))
    weights = (x @ pooler.query / 24**0.5).softmax(-1)
    close(pooler(x), pooler.dense((weights[..., None] * x).sum(1)).relu())


# ---- regions with their boxes


@torch.no_grad()
@pytest.mark.parametrize("d_box", [4, 5])
def test_boxes_come_with_the_regions(d_box: int) -> None:
    model = model_of(source="regions", d_region=10, d_box=d_box)
    assert isinstance(model, EncoderDecoder)
    regions, target = torch.randn(2, 6, 10 + d_box), target_of(model.config, 2)
    embedded = regions[..., :10] @ model.embeddings.w_feature.weight.T + model.embeddings.w_feature.bias
    embedded = embedded + regions[..., 10:] @ model.embeddings.w_box.weight.T + model.embeddings.w_box.bias
    close(model.encode(regions).states, model.encoder(embedded))
    assert model(regions, target).shape == (2, 7, 31)
    with pytest.raises(ValueError, match=rf"regions have width 10, but d_region \+ d_box = {10 + d_box}"):
        model(regions[..., :10], target)
