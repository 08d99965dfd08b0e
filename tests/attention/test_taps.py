"""Looking inside: every tensor, of compiled and checkpointed models and while decoding; nothing when nobody looks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.attention import (
    AttentionMap,
    General,
    Linformer,
    MultiHeadAttention,
    XLRelative,
    attend,
    masks,
    record,
    tap,
)
from regard.attention.biases import Alibi, Bias, T5Bias
from regard.attention.cache import Cache, CrossCache, GrowingCache, RingCache, StaticCache
from regard.attention.masks import Mask
from regard.attention.taps import RecordedAttention
from regard.layers import Rope

B, T, S, M, H, G, D = 2, 7, 5, 24, 4, 2, 6
PLACES = ("layers.0.attention", "layers.0.cross", "layers.1.attention", "layers.1.cross")


class Layer(nn.Module):
    def __init__(self, bias: Bias | None, cross: bool) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(M, H, G, rope=Rope(D), position_bias=bias)
        self.cross = MultiHeadAttention(M, H, cross=True, d_memory=10) if cross else None

    def forward(self, x: Tensor, memory: Tensor, mask: Mask, caches: tuple[Cache, CrossCache] | None = None) -> Tensor:
        own, there = (None, None) if caches is None else caches
        x = x + self.attention(x, mask=mask, cache=own)
        if self.cross is not None:
            x = x + self.cross(x, memory, cache=there)
        return tap("output", x, self)


class Model(nn.Module):
    """One or two layers; masks are built in every forward pass, as models do."""

    def __init__(self, cross: bool = True, checkpointed: bool = False, n_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(T5Bias(H) if n == 0 else None, cross) for n in range(n_layers)])
        self.checkpointed = checkpointed
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        lengths: Tensor | None = None,
        caches: list[tuple[Cache, CrossCache]] | None = None,
    ) -> Tensor:
        mask = masks.causal() if lengths is None else masks.causal() & masks.padding(lengths)
        for n, layer in enumerate(self.layers):
            if self.checkpointed:
                x = checkpoint(layer, x, memory, mask, use_reentrant=False)
            else:
                x = layer(x, memory, mask, None if caches is None else caches[n])
        return x


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, M), torch.randn(B, S, 10)


def wanted_of(model: Model, x: Tensor, memory: Tensor, lengths: Tensor | None = None) -> dict[str, dict[str, Tensor]]:
    """q, k, v, output and weights of every attention, computed again from the parameters."""
    found, mask = {}, masks.causal() if lengths is None else masks.causal() & masks.padding(lengths)

    def heads(y: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return (y @ w.T + bias).unflatten(-1, (-1, D)).transpose(1, 2)

    for n, layer in enumerate(model.layers):
        own, cross = layer.attention, layer.cross
        at, joined = torch.arange(T), own.w_qkv.bias.split([H * D, G * D, G * D])
        q, k, v = (heads(x, w, b) for w, b in zip((own.w_q, own.w_k, own.w_v), joined, strict=True))
        q, k = own.rope(q, at), own.rope(k, at)
        result = attend(q, k, v, mask=mask, bias=own.position_bias, weights=True)
        found[f"layers.{n}.attention"] = {"q": q, "k": k, "v": v} | result._asdict()
        x = x + own.w_o(result.output.transpose(1, 2).flatten(2))
        if cross is not None:
            kv_bias = cross.w_kv.bias.chunk(2)
            q = heads(x, cross.w_q, cross.w_query.bias)
            k, v = (heads(memory, w, b) for w, b in zip((cross.w_k, cross.w_v), kv_bias, strict=True))
            result = attend(q, k, v, weights=True)
            found[f"layers.{n}.cross"] = {"q": q, "k": k, "v": v} | result._asdict()
            x = x + cross.w_o(result.output.transpose(1, 2).flatten(2))
        found[f"layers.{n}"] = {"output": x}
    return found


def close(found: Tensor | None, wanted: Tensor) -> None:
    assert found is not None
    assert not found.requires_grad
    # Rounding of one layer is multiplied by the next; a wrong key, step or mask is off by more than a tenth.
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-3, atol=2e-4)


def assert_saw_everything(model: Model, looked: Callable[[], object], *inputs: Tensor) -> None:
    """Record one forward pass and compare all of it."""
    with record(model) as rec:
        looked()
    wanted = wanted_of(getattr(model, "_orig_mod", model), *inputs)
    assert list(rec.attentions) == [place for place in wanted if place not in ("layers.0", "layers.1")]
    assert list(rec.tensors) == [f"{place}.output" for place in ("layers.0", "layers.1") if place in wanted]
    for place, seen in rec.attentions.items():
        (only,) = seen
        for name in ("q", "k", "v", "output"):
            close(getattr(only, name), wanted[place][name])
        close(rec.map(place).dense(), wanted[place]["weights"])
    for name, tensors in rec.tensors.items():
        (x,) = tensors
        close(x, wanted[name.removesuffix(".output")]["output"])


# ---- plain


def test_every_tensor_at_every_place() -> None:
    model, inputs = Model(), batch()
    assert_saw_everything(model, lambda: model(*inputs), *inputs)


def test_with_a_mask_made_inside_the_model() -> None:
    model, inputs = Model(), (*batch(), torch.tensor([T, 4]))
    assert_saw_everything(model, lambda: model(*inputs), *inputs)


def test_looking_changes_nothing() -> None:
    model, inputs = Model(), batch()
    with record(model):
        looked = model(*inputs)
    assert torch.equal(looked, model(*inputs))


def test_nothing_is_recorded_when_nobody_looks() -> None:
    model, inputs = Model(), batch()
    with record(model) as rec:
        pass
    model(*inputs)
    assert rec.attentions == {}
    assert rec.tensors == {}
    x = torch.randn(2)
    assert tap("x", x) is x


def test_calls_are_kept_in_order() -> None:
    model, inputs = Model(), [batch() for _ in range(3)]
    with record(model) as rec:
        for one in inputs:
            model(*one)
    for place in PLACES:
        assert len(rec.attentions[place]) == 3
        for step, one in enumerate(inputs):
            close(rec.map(place, step).dense(), wanted_of(model, *one)[place]["weights"])


def test_only_the_model_that_is_recorded_is_seen() -> None:
    model, other, inputs = Model(), Model(), batch()
    with record(model) as rec:
        other(*inputs)
        tap("mine", inputs[0])
    assert rec.attentions == {}
    assert list(rec.tensors) == ["mine"]


def test_other_models_are_let_go_of_at_once() -> None:
    model, other, inputs = Model(), Model(), batch()
    outputs = []
    with record(model), torch.no_grad():
        outputs.append(weakref.ref(other(*inputs).untyped_storage()))
        outputs.append(weakref.ref(model(*inputs).untyped_storage()))
        gc.collect()
        assert [output() is not None for output in outputs] == [False, True]


def in_another_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_other_threads_are_not_seen() -> None:
    model, inputs, others = Model(), batch(), batch()

    def both() -> None:
        in_another_thread(lambda: model(*others))
        model(*inputs)
        in_another_thread(lambda: tap("theirs", others[0]))

    assert_saw_everything(model, both, *inputs)


def test_a_model_that_is_one_attention() -> None:
    attention = MultiHeadAttention(M, H)
    with record(attention) as rec:
        attention(torch.randn(B, T, M))
    assert rec.map("attention").shape == (B, H, T, T)


def test_one_recorder_at_a_time() -> None:
    model = Model()
    with record(model), pytest.raises(RuntimeError, match=r"record\(\) is already active"), record(model):
        pass
    with record(model):  # and the refusal left nothing behind
        pass


def test_recording_ends_with_an_error() -> None:
    model = Model()
    with pytest.raises(ValueError, match="x must be"), record(model):
        model(torch.randn(B, T, M + 1), torch.randn(B, S, 10))
    with record(model):
        pass


def test_what_is_asked_for_has_to_be_there() -> None:
    model, inputs = Model(), batch()
    with record(model) as rec:
        model(*inputs)
        model(*inputs)
    with pytest.raises(KeyError, match=r"no attention was recorded at 'layers\.9'; recorded: layers\.0\.attention, "):
        rec.map("layers.9")
    with pytest.raises(ValueError, match=r"2 calls at 'layers\.0\.cross' do not share a cache; select one with step="):
        rec.map("layers.0.cross")


def test_recorded_tensors_let_go_of_the_graph() -> None:
    model, inputs = Model(), batch()
    with record(model) as rec:
        model(*inputs).sum().backward()
    seen: RecordedAttention = rec.attentions["layers.0.attention"][0]
    assert all(x is not None and x.grad_fn is None for x in (seen.q, seen.k, seen.v, seen.output))


@pytest.mark.parametrize("cached", [False, True])
def test_a_recording_does_not_follow_training(cached: bool) -> None:
    """Biases and mechanisms change after the block: maps made before and after are the same."""
    bias = T5Bias(H)
    model = nn.ModuleList(
        [MultiHeadAttention(M, H, H, mechanism=General(H, D), position_bias=bias), MultiHeadAttention(M, H)]
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    caches = [GrowingCache(), GrowingCache()] if cached else [None, None]
    with torch.no_grad(), record(model) as rec:
        for part in torch.randn(B, T, M).split([3, 4] if cached else [T], dim=1):
            for attention, cache in zip(model, caches, strict=True):
                attention(part, mask=masks.causal(), cache=cache, position_bias=bias)
        wanted = [rec.map(place).dense() for place in ("0", "1")]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-3)
    for place, before in zip(("0", "1"), wanted, strict=True):
        close(rec.map(place).dense(), before)
    assert len({id(seen.bias) for some in rec.attentions.values() for seen in some}) == 1, "copied once"
    assert rec.attentions["0"][0].bias is not bias


# ---- compiled


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch.no_grad()
def test_switched_on_after_compiling(backend: str) -> None:
    """Compile, run, and only then look: what hooks cannot do. Looking costs one more graph, ever."""
    n_layers = 1 if backend == "inductor" else 2  # compiling takes most of the time
    model, inputs = Model(cross=False, n_layers=n_layers), batch()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled(*inputs)
    before = graphs()
    assert_saw_everything(compiled, lambda: compiled(*inputs), *inputs)
    assert graphs() == before + 1
    others = batch()
    assert_saw_everything(compiled, lambda: compiled(*others), *others)
    with record(compiled) as rec:
        for _ in range(10):  # as many calls as it likes
            compiled(*inputs)
    assert [len(seen) for seen in rec.attentions.values()] == [10] * n_layers
    compiled(*inputs)  # and back to the graph that records nothing
    assert graphs() == before + 1


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_cross_attention_and_masks_made_inside_a_compiled_model() -> None:
    model, inputs = Model(n_layers=1), (*batch(), torch.tensor([T, 4]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(*inputs)
    assert_saw_everything(compiled, lambda: compiled(*inputs), *inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_layers_compiled_one_by_one_share_their_graphs() -> None:
    """A place is no constant of the graph: more layers than the compiler would put up with."""
    model = nn.ModuleList([Layer(None, cross=False) for _ in range(10)])
    for layer in model:
        layer.compile(fullgraph=True, backend="aot_eager")
    x, memory = batch()

    def run() -> None:
        for layer in model:
            layer(x, memory, masks.causal())

    run()
    before = graphs()
    with record(model) as rec:
        run()
    assert graphs() == before + 1
    assert list(rec.attentions) == [f"{n}.attention" for n in range(10)]


@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_of_a_compiled_model_under_a_recorder() -> None:
    model, inputs = Model(cross=False, n_layers=1), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with record(compiled) as rec:
        ours = torch.autograd.grad(compiled(*inputs).square().sum(), list(model.parameters()))
    wanted = torch.autograd.grad(model(*inputs).square().sum(), list(model.parameters()))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert [len(seen) for seen in rec.attentions.values()] == [1]


# ---- q and k alone


def test_without_values_only_q_and_k_stay_each_in_memory_of_its_own() -> None:
    model, inputs = Model(), batch()
    with record(model, values=False) as rec:
        model(*inputs)
    wanted = wanted_of(model, *inputs)
    assert rec.tensors == {}
    for place, (seen,) in rec.attentions.items():
        assert seen.v is None
        assert seen.output is None
        for kept, name in ((seen.q, "q"), (seen.k, "k")):
            close(kept, wanted[place][name])
            assert kept is not None
            assert kept.untyped_storage().nbytes() == kept.nbytes, "no view into the product of q, k and v"
        close(rec.map(place).dense(), wanted[place]["weights"])


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_without_values_decoding_is_one_map_too(kind: str) -> None:
    model, (x, memory), caches = Model(), batch(), new_caches(kind)
    with record(model, values=False) as rec:
        decode(model, x, memory, caches, [3, 1, 2, 1])
    wanted = wanted_of(model, x, memory)
    for place in PLACES:
        width = wanted[place]["weights"].shape[-1]
        close(rec.map(place).dense()[..., :width], wanted[place]["weights"])
        assert all(seen.output is None for seen in rec.attentions[place])


@pytest.mark.usefixtures("fresh_compiler")
def test_without_values_on_a_compiled_model() -> None:
    model, inputs = Model(cross=False, n_layers=1), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), record(compiled, values=False) as rec:
        compiled(*inputs)
    wanted = wanted_of(model, *inputs)
    assert rec.tensors == {}
    for place, (seen,) in rec.attentions.items():
        assert seen.v is None
        close(rec.map(place).dense(), wanted[place]["weights"])


# ---- checkpointed: computed twice, seen once


def test_checkpointed_is_seen_once() -> None:
    model, inputs = Model(checkpointed=True), batch()
    assert_saw_everything(model, lambda: model(*inputs).sum().backward(), *inputs)


def test_reentrant_checkpoint_is_seen_once() -> None:
    model, (x, memory) = Model(), batch()
    x.requires_grad_()
    with record(model) as rec:
        checkpoint(model, x, memory, use_reentrant=True).sum().backward()
    assert x.grad is not None
    assert all(len(rec.attentions[place]) == 1 for place in PLACES)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_checkpoints_inside_a_compiled_model_are_seen_once() -> None:
    model, inputs = Model(cross=False, checkpointed=True), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(*inputs).sum().backward()
    assert_saw_everything(compiled, lambda: compiled(*inputs).sum().backward(), *inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_model_inside_a_checkpoint_is_seen_once(reentrant: bool) -> None:
    model, inputs = Model(cross=False, n_layers=1), batch()
    inputs[0].requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def run() -> None:
        checkpoint(compiled, *inputs, use_reentrant=reentrant).sum().backward()

    assert_saw_everything(compiled, run, *inputs)


# ---- decoding with a cache


CACHES: dict[str, Callable[[], Cache]] = {
    "growing": GrowingCache,
    "static": lambda: StaticCache(B, G, T + 2, D),
    "ring": lambda: RingCache(B, G, T, D),
    "ring, keeping keys": lambda: RingCache(B, G, 3, D, keep_keys=T),
}


def new_caches(kind: str) -> list[tuple[Cache, CrossCache]]:
    return [(CACHES[kind](), CrossCache()) for _ in range(2)]


def decode(
    model: nn.Module, x: Tensor, memory: Tensor, caches: list[tuple[Cache, CrossCache]], split: list[int]
) -> None:
    with torch.no_grad():
        for part in x.split(split, dim=1):
            model(part, memory, None, caches)


@pytest.mark.parametrize("kind", ["growing", "static", "ring"])
@pytest.mark.parametrize("split", [[1] * T, [3, 1, 2, 1], [T]], ids=str)
def test_the_steps_of_decoding_are_one_map(kind: str, split: list[int]) -> None:
    model, (x, memory), caches = Model(), batch(), new_caches(kind)
    with record(model) as rec:
        decode(model, x, memory, caches, split)
    wanted = wanted_of(model, x, memory)
    for place in PLACES:
        width = wanted[place]["weights"].shape[-1]
        close(rec.map(place).dense()[..., :width], wanted[place]["weights"])
        q = torch.cat([seen.q for seen in rec.attentions[place]], dim=2)
        close(q, wanted[place]["q"])
        close(torch.cat([seen.output for seen in rec.attentions[place]], dim=2), wanted[place]["output"])
    assert all(seen.k is None and seen.v is None for seen in rec.attentions["layers.0.attention"]), "the cache has them"


def test_evicted_keys_can_still_be_looked_at() -> None:
    attention, x = MultiHeadAttention(M, H, G, rope=Rope(D)), torch.randn(B, T, M)
    cache, mask = RingCache(B, G, 3, D, keep_keys=T), masks.window(3)
    with torch.no_grad():
        with record(attention) as rec:
            for part in x.split(1, dim=1):
                attention(part, mask=mask, cache=cache)
        with record(attention) as uncached:
            attention(x, mask=mask)
    close(rec.map("attention").dense(), uncached.map("attention").dense())


def test_without_the_evicted_keys_there_is_no_map() -> None:
    attention, x, cache = MultiHeadAttention(M, H, G), torch.randn(B, T, M), RingCache(B, G, 3, D)
    with torch.no_grad(), record(attention) as rec:
        for part in x.split(1, dim=1):
            attention(part, mask=masks.window(3), cache=cache)
    with pytest.raises(ValueError, match=r"4 of the 7 keys are no longer in the cache; RingCache\(keep_keys=…\)"):
        rec.map("attention")


def test_one_step_of_a_decoding() -> None:
    model, (x, memory), caches = Model(), batch(), new_caches("growing")
    with record(model) as rec:
        decode(model, x, memory, caches, [3, 1, 3])
    wanted = wanted_of(model, x, memory)["layers.1.attention"]["weights"]
    close(rec.map("layers.1.attention", step=1).dense(), wanted[:, :, 3:4])


def test_a_recording_that_begins_in_the_middle() -> None:
    model, (x, memory), caches = Model(), batch(), new_caches("static")
    decode(model, x[:, :4], memory, caches, [4])
    with record(model) as rec:
        decode(model, x[:, 4:], memory, caches, [1, 2])
    wanted = wanted_of(model, x, memory)
    for place in ("layers.0.attention", "layers.1.attention"):
        close(rec.map(place).dense()[..., :T], wanted[place]["weights"][:, :, 4:])


def test_a_map_does_not_follow_the_cache_to_the_next_text() -> None:
    model, (x, memory), caches = Model(), batch(), new_caches("static")
    with record(model) as rec:
        decode(model, x, memory, caches, [4, 1, 2])
    for own, _ in caches:
        own.reset()
    decode(model, torch.randn(B, T, M), memory, caches, [T])
    wanted = wanted_of(model, x, memory)["layers.0.attention"]["weights"]
    close(rec.map("layers.0.attention").dense()[..., :T], wanted)


REWRITES: dict[str, Callable[[Cache], None]] = {
    "reorder": lambda cache: cache.reorder(torch.tensor([1, 0])),
    "truncate": lambda cache: cache.truncate(2),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("kind", ["growing", "static", "ring"])
def test_steps_before_a_rewrite_of_the_cache_have_no_map(kind: str, rewrite: str) -> None:
    """Their keys are elsewhere or gone; the steps since then have one, inside the block and after it."""
    attention, x, cache = MultiHeadAttention(M, H, G, rope=Rope(D)), torch.randn(B, T, M), CACHES[kind]()
    with torch.no_grad(), record(attention) as rec:
        attention(x[:, :3], mask=masks.causal(), cache=cache)
        first = rec.map("attention").dense()
        REWRITES[rewrite](cache)
        with pytest.raises(ValueError, match="after 1 of these 1 calls at 'attention', whose keys are gone"):
            rec.map("attention")
        attention(x[:, 3:4], mask=masks.causal(), cache=cache)
        attention(x[:, 4:5], mask=masks.causal(), cache=cache)
        since = rec.map("attention", slice(1, None)).dense()
    cache.reset()
    with pytest.raises(ValueError, match="was reordered, truncated or reset after 1 of these 3 calls at 'attention'"):
        rec.map("attention")
    with pytest.raises(ValueError, match="after 1 of these 1 calls"):
        rec.map("attention", 0)
    close(rec.map("attention", slice(1, None)).dense(), since)
    close(rec.map("attention", step=-1).dense(), since[:, :, 1:])
    close(first.sum(-1), torch.ones(B, H, 3))
    before = {"reorder": x[[1, 0], :3], "truncate": x[:, :2], "reset": x[:, :0]}[rewrite]
    again = torch.cat([before, x[:, 3:5]], dim=1)
    with torch.no_grad(), record(attention) as whole:
        attention(again, mask=masks.causal())
    close(since[..., : again.shape[1]], whole.map("attention").dense()[:, :, -2:])


def test_a_memory_is_looked_at_as_it_was_at_every_step() -> None:
    cross, x, cache = MultiHeadAttention(M, H, cross=True), torch.randn(B, 3, M), CrossCache()
    memory, swapped = torch.randn(B, S, M), torch.tensor([1, 0])
    with torch.no_grad():
        with record(cross) as rec:
            for n, part in enumerate(x.split(1, dim=1)):
                if n > 0:
                    cache.reorder(torch.tensor([0, 1]) if n == 1 else swapped)
                cross(part, memory, cache=cache)
        with record(cross) as uncached:
            cross(x, memory)
            cross(x, memory[swapped])
    wanted, other = (uncached.map("attention", n).dense() for n in (0, 1))
    for n in range(3):
        close(rec.map("attention", n).dense(), (wanted if n < 2 else other)[:, :, n : n + 1])
    close(rec.map("attention", slice(0, 2)).dense(), wanted[:, :, :2])
    first, second, third = (seen.memory for seen in rec.attentions["attention"])
    assert first is second, "beams of one source: kept once"
    assert first is not third
    with pytest.raises(
        ValueError, match="the memory is not the same in all 3 calls at 'attention'; select one with step="
    ):
        rec.map("attention")


def test_steps_have_to_be_there() -> None:
    attention, cache = MultiHeadAttention(M, H), GrowingCache()
    with torch.no_grad(), record(attention) as rec:
        attention(torch.randn(B, T, M), cache=cache)
    with pytest.raises(ValueError, match=r"selects none of the 1 calls at 'attention'"):
        rec.map("attention", slice(1, None))


def test_a_prompt_that_sees_itself_whole() -> None:
    """No mask: the prompt's tokens see each other both ways, later ones everything so far, none what came after."""
    attention, x, cache = MultiHeadAttention(M, H, G), torch.randn(B, T, M), GrowingCache()
    with torch.no_grad(), record(attention) as rec:
        for part in x.split([4, 1, 2], dim=1):
            attention(part, cache=cache)
    seen = rec.map("attention").dense() > 0
    wanted = torch.tensor([[4] * 4 + [5] + [7] * 2]).view(T, 1) > torch.arange(T)
    assert torch.equal(seen, wanted.expand(B, H, T, T))


def test_sequences_of_different_length() -> None:
    attention, x = MultiHeadAttention(M, H, G, rope=Rope(D), position_bias=Alibi(H)), torch.randn(B, T, M)
    positions, cache = torch.tensor([[-1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]]), GrowingCache()
    with torch.no_grad(), record(attention) as rec:
        for start, stop in ((0, 4), (4, 5), (5, 7)):
            attention(x[:, start:stop], mask=masks.causal(), cache=cache, positions=positions[:, start:stop])
    with torch.no_grad(), record(attention) as uncached:
        attention(x, mask=masks.causal(), positions=positions)
    close(rec.map("attention").dense(), uncached.map("attention").dense())


def test_masks_that_change_from_step_to_step() -> None:
    """Each row of the map keeps the mask its step was given."""
    attention, x, cache = MultiHeadAttention(M, H, G), torch.randn(B, T, M), GrowingCache()
    each = [masks.causal(), masks.window(2), None, masks.causal() & masks.padding(torch.tensor([5, 2]))]
    rows = []
    with torch.no_grad(), record(attention) as rec:
        for part, mask in zip(x.split([2, 2, 1, 2], dim=1), each, strict=True):
            attention(part, mask=mask, cache=cache)
            rows.append(attend(*(y for y in _last(rec, cache)), mask=mask, frame=cache.frame(H), weights=True).weights)
    padded = [nn.functional.pad(w, (0, T - w.shape[-1])) for w in rows if w is not None]
    close(rec.map("attention").dense(), torch.cat(padded, dim=2))


def _last(rec: object, cache: Cache) -> tuple[Tensor, Tensor, Tensor]:
    k, _ = cache.keys()
    return rec.attentions["attention"][-1].q, k, k


@pytest.mark.parametrize("bias", [T5Bias(H), XLRelative(H, D)], ids=["t5", "xl"])
def test_biases_while_decoding(bias: Bias) -> None:
    attention, x, cache = MultiHeadAttention(M, H, G, position_bias=bias), torch.randn(B, T, M), StaticCache(B, G, T, D)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        with record(attention) as rec:
            for part in x.split([3, 1, 3], dim=1):
                attention(part, mask=masks.causal(), cache=cache)
        with record(attention) as uncached:
            attention(x, mask=masks.causal())
    close(rec.map("attention").dense(), uncached.map("attention").dense())


def test_mechanisms_while_decoding() -> None:
    """The cache holds raw keys; a map is made of prepared ones."""
    attention, x = MultiHeadAttention(M, H, G, mechanism=General(H, D)), torch.randn(B, T, M)
    cache = GrowingCache()
    with torch.no_grad():
        with record(attention) as rec:
            for part in x.split([3, 4], dim=1):
                attention(part, mask=masks.causal(), cache=cache)
        with record(attention) as uncached:
            attention(x, mask=masks.causal())
    close(rec.map("attention").dense(), uncached.map("attention").dense())


def test_summaries_that_change_have_no_common_map() -> None:
    attention, cache = MultiHeadAttention(M, H, mechanism=Linformer(T, 3)), GrowingCache()
    with torch.no_grad(), record(attention) as rec:
        for part in torch.randn(B, T, M).split([3, 4], dim=1):
            attention(part, cache=cache)
    with pytest.raises(ValueError, match="'linformer' summarises its keys anew at every step"):
        rec.map("attention")


def test_a_bias_that_changes_has_no_common_map() -> None:
    attention, cache = MultiHeadAttention(M, H), GrowingCache()
    with torch.no_grad(), record(attention) as rec:
        for part in torch.randn(B, T, M).split([3, 4], dim=1):
            attention(part, cache=cache, position_bias=Alibi(H))
    with pytest.raises(ValueError, match="the bias is not the same in all 2 steps"):
        rec.map("attention")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_decoding_is_compiled_once_and_seen_step_by_step() -> None:
    """A preallocated cache, one token at a time, switched on after the first tokens."""
    model, (x, memory), caches = Model(cross=False, n_layers=1), batch(), new_caches("static")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    decode(compiled, x[:, :2], memory, caches, [1, 1])
    with record(compiled) as rec:
        decode(compiled, x[:, 2:4], memory, caches, [1, 1])
        before = graphs()
        decode(compiled, x[:, 4:], memory, caches, [1, 1, 1])
        assert graphs() == before
    wanted = wanted_of(model, x, memory)
    place = "layers.0.attention"
    close(rec.map(place).dense()[..., :T], wanted[place]["weights"][:, :, 2:])
    assert isinstance(rec.map(place), AttentionMap)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_rewritten_cache_and_other_threads_need_no_other_graph() -> None:
    """What the cache held, and who ran the graph, is known when it runs, not when it is compiled."""
    attention, x, cache = MultiHeadAttention(M, H, G), torch.randn(B, T, M), StaticCache(B, G, T, D)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        attention(x[:, :2], mask=masks.causal(), cache=cache)
        with record(attention) as rec:
            compiled(x[:, 2:3], mask=masks.causal(), cache=cache)
            compiled(x[:, 3:4], mask=masks.causal(), cache=cache)
            before = graphs()
            for _ in range(3):
                cache.reorder(torch.tensor([1, 0]))
                compiled(x[:, 4:5], mask=masks.causal(), cache=cache)
                cache.truncate(4)
            compiled(x[:, 4:5], mask=masks.causal(), cache=cache)
            compiled(x[:, 5:6], mask=masks.causal(), cache=cache)
            assert graphs() == before
            in_another_thread(lambda: torch.no_grad()(compiled)(x[:, 6:], mask=masks.causal(), cache=cache))
    assert len(rec.attentions["attention"]) == 7
    with pytest.raises(ValueError, match="after 5 of these 7 calls"):
        rec.map("attention")
    again = torch.cat([x[[1, 0], :4], x[:, 4:6]], dim=1)
    with torch.no_grad(), record(attention) as whole:
        attention(again, mask=masks.causal())
    close(rec.map("attention", slice(-2, None)).dense()[..., :6], whole.map("attention").dense()[:, :, -2:])
