"""Mamba and Mamba-2 as mixers: chunks equal the recurrence, decoding in constant memory, weights in the lens, cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.attention.selective_scan import Mamba, scan_selective, scan_selective_recurrent
from regard.attention.state_space import Mamba2, StateSpaceCache, scan_chunked, scan_recurrent
from regard.attention.taps import record
from regard.config import ModelConfig
from regard.errors import RegardError
from regard.export.onnx_graphs import graphs_of
from regard.lens.compare import compare
from regard.lens.interventions import no_causal_mask, switch_off
from regard.models import Model, build
from regard.training.loss import Batch, Objective

from .small import SIZES, shaken

FIELDS: dict[str, Any] = {
    **{**SIZES, "architecture": "decoder", "positions": "none", "mixer": "mamba2", "mixer_size": 6},
    **{"d_head": 12, "d_ff": 0, "norm": "rms", "norm_place": "pre", "max_len": 512},
}


def model_of(**fields: Any) -> Model:
    torch.manual_seed(0)
    return shaken(build(ModelConfig(**FIELDS | fields))).eval()


def parts(length: int = 37, n_groups: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x, b, c = (torch.randn(2, length, n, 5, generator=generator) for n in (4, n_groups, n_groups))
    dt, a = torch.rand(2, length, 4, generator=generator), -8 * torch.rand(4, generator=generator)
    return x, dt, a, b, c


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunks_compute_the_recurrence(chunk: int) -> None:
    """Values, last state and gradients, from a state that was there before."""
    inputs = [x.requires_grad_() for x in (*parts(), torch.randn(2, 4, 5, 5))]
    slow, fast = scan_recurrent(*inputs), scan_chunked(*inputs, chunk=chunk)
    for one, other in zip(slow, fast, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    slopes = [torch.randn_like(x) for x in slow]
    grads = [
        torch.autograd.grad(sum((x * s).sum() for x, s in zip(y, slopes, strict=True)), inputs) for y in (slow, fast)
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_many_chunks_and_documents() -> None:
    """More chunks than are carried at once; packed texts know nothing of each other."""
    x, dt, a, b, c = parts(150)
    torch.testing.assert_close(
        scan_chunked(x, dt, a, b, c, chunk=2)[0], scan_recurrent(x, dt, a, b, c)[0], atol=1e-5, rtol=1e-5
    )
    documents = torch.zeros(2, 150, dtype=torch.int64)
    documents[:, 40:], documents[0, 43:], documents[1, 128:] = 1, 2, 3
    together = scan_chunked(x, dt, a, b, c, documents=documents, chunk=16)[0]
    for row, own in enumerate(documents):
        for number in own.unique():
            at = (own == number).nonzero()[:, 0]
            alone = scan_recurrent(*(part[row : row + 1, at] if part.dim() > 1 else part for part in (x, dt, a, b, c)))
            torch.testing.assert_close(together[row : row + 1, at], alone[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_packed_documents_are_read_as_if_alone() -> None:
    model, tokens = model_of(), torch.randint(3, 31, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    together = model(tokens, documents=documents)
    alone = torch.cat([model(tokens[:, :5]), model(tokens[:, 5:])], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_cache_of_constant_size_decodes_exactly() -> None:
    model, tokens = model_of(), torch.randint(3, 31, (2, 150))
    whole, cache, sizes = model(tokens), model.new_cache(), []
    steps = [model(tokens[:, :9], cache=cache)]
    for n in range(9, 150):
        steps.append(model(tokens[:, n : n + 1], cache=cache))
        sizes.append(cache.memory())
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-4)
    assert len(set(sizes)) == 1
    with pytest.raises(ValueError, match="cannot be truncated"):
        cache.truncate(100)
    cache.truncate(150)


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_nothing(left: bool) -> None:
    """Short texts beside long ones, on either side, and then goes on through the cache."""
    model, long, short = model_of(), [5, 6, 7, 8, 9, 10, 11], [12, 13]
    pads = [0] * (len(long) - len(short))
    tokens = torch.tensor([long, pads + short if left else short + pads])
    keep, cache = tokens != 0, model.new_cache()
    states = model(tokens, padding_mask=keep, cache=cache)
    torch.testing.assert_close(states[1][keep[1]], model(torch.tensor([short]))[0], atol=1e-5, rtol=1e-5)
    after = model(torch.tensor([[14], [15]]), cache=cache)
    torch.testing.assert_close(after[1], model(torch.tensor([[*short, 15]]))[0, -1:], atol=1e-5, rtol=1e-5)
    assert cache.lengths.tolist() == [8, 3]


@torch.no_grad()
@torch.no_grad()
def test_half_precision_decodes_token_by_token() -> None:
    model, tokens = model_of().bfloat16(), torch.randint(3, 31, (2, 9))
    cache = model.new_cache()
    steps = [model(tokens[:, n : n + 1], cache=cache) for n in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), atol=5e-2, rtol=5e-2)


def test_beams_and_texts_of_unlike_lengths() -> None:
    model = model_of()
    together = regard.generate(model, [[5, 6, 7, 8], [9, 10]], max_new_tokens=6, beam=3)
    alone = [regard.generate(model, [prompt], max_new_tokens=6, beam=3) for prompt in ([5, 6, 7, 8], [9, 10])]
    assert [own[0].tokens for own in together.hypotheses] == [own.hypotheses[0][0].tokens for own in alone]


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["mamba", "mamba2"])
def test_recorded_weights_do_not_cross_documents(mixer: str) -> None:
    sizes = {"n_heads": 48, "d_head": 1} if mixer == "mamba" else {}
    model, tokens = model_of(mixer=mixer, **sizes), torch.randint(3, 31, (1, 12))
    with record(model) as recorder:
        model(tokens, documents=torch.tensor([[0] * 5 + [1] * 7]))
    weights = recorder.map("decoder.blocks.1.attention").tile(slice(None), slice(None))[0]  # (H, T, T)
    assert weights[:, 5:, 5:].any()
    assert not weights[:, 5:, :5].any()


@torch.no_grad()
def test_its_weights_are_in_the_lens() -> None:
    """The implied matrix times the values, and the skip, is what the layer computes."""
    model, tokens = model_of(n_kv_heads=2), [5, 9, 3, 17, 4, 22]
    look = regard.look(model, tokens)
    layer = model.decoder.blocks[1].attention
    assert isinstance(layer, Mamba2)
    seen: dict[str, torch.Tensor] = {}
    layer.w_out.register_forward_pre_hook(lambda _, args: seen.update(output=args[0]))
    layer.w_in.register_forward_hook(lambda _, __, output: seen.update(product=output))
    model(torch.tensor([tokens]))
    gate, mixed, _ = seen["product"].split((layer.d_inner, len(layer.conv_bias), layer.n_heads), -1)
    values = layer._convolve(mixed, None, None, None)[0][..., : layer.d_inner].unflatten(-1, (layer.n_heads, -1))
    weights = torch.stack([look.weights(layer=1, head=h) for h in range(layer.n_heads)]).float()  # (H, T, T)
    assert not weights.triu(1).any()
    heads = torch.einsum("hts,shp->thp", weights, values[0]) + layer.skip[:, None] * values[0]
    output = layer.norm(heads.flatten(1) * torch.nn.functional.silu(gate[0]))
    torch.testing.assert_close(output, seen["output"][0], atol=1e-5, rtol=1e-5)
    before = model(torch.tensor([tokens]))
    with switch_off(model, [("self", 1, 0)]):
        assert not torch.allclose(model(torch.tensor([tokens])), before)


@torch.no_grad()
def test_shared_layers_are_several_to_an_intervention() -> None:
    shared, tokens = model_of(share_layers=True), torch.tensor([[5, 9, 3, 17]])
    apart = build(shared.config.with_(share_layers=False)).eval()
    own = shared.state_dict()
    apart.load_state_dict({name: own[name.replace("blocks.1.", "blocks.0.")] for name in apart.state_dict()})
    for layer in range(2):
        with switch_off(shared, [("self", layer, 1)]), switch_off(apart, [("self", layer, 1)]):
            torch.testing.assert_close(shared(tokens), apart(tokens))
    sites = [f"decoder.blocks.{layer}.attention.heads" for layer in range(2)]
    one, other = (regard.capture(model, tokens, sites=sites) for model in (shared, apart))
    for site in sites:
        torch.testing.assert_close(one[site], other[site])
    with pytest.raises(ValueError, match="it has no causal mask to remove"), no_causal_mask(shared):
        pass


def test_signed_weights_are_no_distribution() -> None:
    look = regard.look(model_of(), [1, 9, 3, 17, 4, 22])
    for read in (look.entropy, look.rollout, lambda: look.rollout(rows=[1]), lambda: compare(look, look)):
        with pytest.raises(ValueError, match="may have negative weights"):
            read()
    assert look.patterns().entropy.isnan().all()
    hidden = look.merged(words=False)  # without the first token, which is special
    torch.testing.assert_close(hidden.weights(head=0), look.weights(head=0)[1:, 1:])


def test_it_trains_with_a_feed_forward_network_beside_it_too() -> None:
    model = model_of(d_ff=16, n_layers=1).train()
    tokens = torch.randint(3, 31, (2, 9))
    Objective(model)(Batch((tokens,), tokens)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "encoder", "head": "none"}, "needs architecture='decoder'"),
        ({"positions": "rope"}, "positions='rope' acts inside attention"),
        ({"window": 4}, "window=4 is for attention"),
        ({"mixer": "dot", "mixer_size": None}, "d_ff=0 removes the feed-forward network"),
        ({"experts": 4}, "which needs mixer='mamba' or 'mamba2'"),
        ({"conv_size": 0}, "conv_size=0 must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**FIELDS | fields)


def test_it_is_not_written_as_onnx() -> None:
    with pytest.raises(RegardError, match="mixer='mamba2' has a recurrent state"):
        graphs_of(model_of())


@torch.no_grad()
def test_cost_knows_its_state() -> None:
    config = ModelConfig(**FIELDS | {"n_kv_heads": 2})
    short, long = (regard.cost(config, batch=1, length=n, cache="fp32") for n in (16, 512))
    assert short.kv_cache.total == long.kv_cache.total
    model = build(config)
    cache = model.new_cache()
    model(torch.randint(3, 31, (1, 20)), cache=cache)
    assert isinstance(cache.layers[0], StateSpaceCache)
    assert short.kv_cache.total == cache.memory()
    assert long.flops_forward.total == pytest.approx(32 * short.flops_forward.total)
    assert short.parameters.total == model.n_parameters
    products = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("w_in.weight", "w_out.weight")))
    assert short.flops_forward.parts["decoder projections"] == 2 * 16 * products


def selective_parts(length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x, b, c = (torch.randn(2, length, n, generator=generator) for n in (6, 5, 5))
    dt, a = torch.rand(2, length, 6, generator=generator), -8 * torch.rand(6, 5, generator=generator)
    return x, dt, a, b, c


@pytest.mark.parametrize("length", [2, 16, 37])
def test_a_selective_scan_is_its_recurrence(length: int) -> None:
    """Values, last state and gradients, from a state that was there before; then packed texts, each by itself."""
    inputs = [x.requires_grad_() for x in (*selective_parts(length), torch.randn(2, 6, 5))]
    slow, fast = scan_selective_recurrent(*inputs), scan_selective(*inputs)
    slopes = [torch.randn_like(x) for x in slow]
    grads = [
        torch.autograd.grad(sum((x * s).sum() for x, s in zip(y, slopes, strict=True)), inputs) for y in (slow, fast)
    ]
    for one, other in zip((*slow, *grads[0]), (*fast, *grads[1]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    x, dt, a, b, c = selective_parts(length)
    cut = length // 2
    documents = (torch.arange(length) >= cut).long().expand(2, -1)
    alone = [
        scan_selective_recurrent(x[:, part], dt[:, part], a, b[:, part], c[:, part])[0]
        for part in (slice(cut), slice(cut, None))
    ]
    packed = scan_selective(x, dt, a, b, c, documents=documents)[0]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_selective_scan_in_the_lens_and_in_the_cost() -> None:
    """The implied matrix of each channel times its values, and the skip, is what the layer computes."""
    fields = {"mixer": "mamba", "n_heads": 48, "d_head": 1}
    model, tokens = model_of(**fields), [5, 9, 3, 17, 4, 22]
    layer = model.decoder.blocks[1].attention
    assert isinstance(layer, Mamba)
    look = regard.look(model, tokens)
    seen: dict[str, torch.Tensor] = {}
    layer.w_out.register_forward_pre_hook(lambda _, args: seen.update(output=args[0]))
    layer.w_in.register_forward_hook(lambda _, __, output: seen.update(product=output))
    before = model(torch.tensor([tokens]))
    mixed, gate = seen["product"].chunk(2, -1)
    values = layer._convolve(mixed, None, None, None)[0][0]
    weights = torch.stack([look.weights(layer=1, head=h) for h in range(48)]).float()  # (C, T, T)
    assert not weights.triu(1).any()
    channels = torch.einsum("cts,sc->tc", weights, values) + layer.skip * values
    torch.testing.assert_close(channels * torch.nn.functional.silu(gate[0]), seen["output"][0], atol=1e-5, rtol=1e-5)
    with switch_off(model, [("self", 1, 0)]):
        assert not torch.allclose(model(torch.tensor([tokens])), before)
    cost = regard.cost(model.config, batch=1, length=20, cache="fp32")
    cache = model.new_cache()
    model(torch.randint(3, 31, (1, 20)), cache=cache)
    assert cost.kv_cache.total == cache.memory()
    assert cost.parameters.total == model.n_parameters
    names = ("w_in.weight", "w_out.weight", "w_select.weight", "w_step.weight")
    products = sum(p.numel() for name, p in model.named_parameters() if name.endswith(names))
    assert cost.flops_forward.parts["decoder projections"] == 2 * 20 * products


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_it_computes_the_same() -> None:
    model, tokens = model_of(d_ff=16), torch.randint(3, 31, (2, 300))
    expected = model(tokens)
    model, tokens = model.to("cuda"), tokens.to("cuda")
    torch.testing.assert_close(model(tokens).cpu(), expected, atol=1e-3, rtol=1e-3)
    cache = model.new_cache()
    steps = [model(tokens[:, :200], cache=cache), *(model(tokens[:, n : n + 1], cache=cache) for n in range(200, 300))]
    torch.testing.assert_close(torch.cat(steps, 1).cpu(), expected, atol=1e-3, rtol=1e-3)
    written = regard.generate(model, [[5, 6, 7, 8], [9, 10]], max_new_tokens=6)
    assert [len(own[0].tokens) > 0 for own in written.hypotheses] == [True, True]
