"""Who is trained how, Muon against torch's, joined matrices against separate ones, and exact continuation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention import MultiHeadAttention
from regard.config import TrainConfig
from regard.training.optimiser import Muon, Optimiser, build_optimiser, newton_schulz, orthogonal, product_dtype, roles

KINDS = ["adam", "adamw", "muon"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL: dict[str, dict[str, Any]] = {
    "llama-1b": {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 30},
    "transformer-tiny": {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24, "vocab_size": 30},
    "bert-base-masked": {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24, "vocab_size": 30, "max_len": 20},
    "vit-tiny": {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24},
    "t5-small": {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24, "vocab_size": 30},
    "luong-lstm": {"d_model": 16, "vocab_size": 30},
    "bahdanau-gru": {"d_model": 16, "vocab_size": 30},
}


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def small(name: str = "llama-1b", **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    return regard.build(name, **SMALL[name] | fields)


def recipe(kind: str, **fields: Any) -> TrainConfig:
    return TrainConfig.model_validate({"optimiser": kind, "lr": 0.01, "weight_decay": 0.1, **fields})


def give_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in net.parameters():
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.device)


def go(net: nn.Module, optimiser: Optimiser, steps: range) -> None:
    for step in steps:
        give_gradients(net, step)
        optimiser.set_lr(1 / (step + 1))
        optimiser.step()
        optimiser.zero_grad()


# ---------------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48), (1, 16), (16, 1)])
def test_muon_is_torchs_muon(shape: tuple[int, int], nesterov: bool) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no torch.optim.Muon to compare with")
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    optimisers = Muon([ours], 0.1, **options), torch.optim.Muon([theirs], lr=0.1, **options)
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    change = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * change  # torch's always goes through bf16


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_newton_schulz_gives_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    found = newton_schulz(x)
    assert found.dtype == x.dtype
    u2, s, v2 = torch.linalg.svd(found, full_matrices=False)
    assert s.min() > 0.6
    assert s.max() < 1.3
    torch.testing.assert_close(u2 @ v2, u @ v)  # the same directions
    assert not newton_schulz(torch.zeros(2, *shape)).any()


def test_batched_is_one_by_one_and_in_order() -> None:
    torch.manual_seed(0)
    shapes = [(8, 8), (24, 8), (8, 8), (8, 24), (24, 8), (8, 8)]
    matrices = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for matrix, together in zip(matrices, orthogonal(matrices), strict=True):
        alone = newton_schulz(matrix[None])[0] * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
        torch.testing.assert_close(together, alone)


def test_a_stack_too_large_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [torch.randn(8, 8, dtype=torch.float64) for _ in range(5)]
    whole = orthogonal(matrices)
    monkeypatch.setattr("regard.training.optimiser.MAX_STACK_ELEMENTS", 130)  # two at a time
    for one, other in zip(orthogonal(matrices), whole, strict=True):
        torch.testing.assert_close(one, other)


def test_joined_matrices_are_trained_like_separate_ones() -> None:
    torch.manual_seed(0)
    parts = [nn.Parameter(torch.randn(rows, 16, dtype=torch.float64)) for rows in (32, 8, 8)]
    whole = nn.Parameter(torch.cat([part.detach() for part in parts]))
    apart = Muon(parts, 0.1, weight_decay=0.1)
    joined = Muon([whole], 0.1, weight_decay=0.1, joined={whole: (32, 8, 8)})
    for _ in range(3):
        for part in parts:
            part.grad = torch.randn_like(part)
        whole.grad = torch.cat([part.grad for part in parts if part.grad is not None])
        apart.step()
        joined.step()
    torch.testing.assert_close(whole.detach(), torch.cat([part.detach() for part in parts]))


GPUS = torch.device("cuda", 0), torch.device("cuda", 1)


def test_doubles_stay_doubles() -> None:
    assert product_dtype(torch.device("cpu"), torch.float64) == torch.float64


def test_products_take_the_type_that_their_own_gpu_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs in one machine, only the first, which is the current one, has bf16."""
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: (9, 0) if device != GPUS[1] else (7, 5)
    )
    product_dtype.cache_clear()
    found = [product_dtype(gpu, torch.float32) for gpu in GPUS]
    product_dtype.cache_clear()
    assert found == [torch.bfloat16, torch.float32]


# --------------------------------------------------------------------------------------- roles


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_has_one_role(name: str) -> None:
    net = small(name)
    found = list(roles(net))
    assert {role.name: role.param for role in found} == dict(net.named_parameters())
    for role in found:
        assert sum(role.rows) == role.param.shape[0]
        if role.param.dim() < 2 or any(
            word in role.name for word in ("token", "position", "segment", "norm", "mechanism.v")
        ):
            assert not role.decays, role.name
        else:
            assert role.decays, role.name
        assert role.in_layer <= role.decays
        if role.name.endswith(("w_qkv.weight", "w_o.weight", "w_kv.weight", "w_in.weight", "w_out.weight", "w_h")):
            assert role.in_layer, role.name
        if role.name.startswith(("head", "classifier", "token", "embeddings")):
            assert not role.in_layer, role.name


def test_joined_matrices_are_those_of_the_views() -> None:
    net = small()
    rows = {role.param: role.rows for role in roles(net)}
    attention = next(module for module in net.modules() if isinstance(module, MultiHeadAttention))
    assert rows[attention.w_qkv.weight] == tuple(len(x) for x in (attention.w_q, attention.w_k, attention.w_v))
    feed_forward = net.get_submodule("decoder.blocks.0.ff")
    assert rows[feed_forward.w_in.weight] == (24, 24)  # type: ignore[index]
    lstm = {role.name: role.rows for role in roles(small("luong-lstm"))}
    assert lstm["encoder.ahead.0.w_x"] == (16,) * 4


@pytest.mark.parametrize("mixer", ["linformer", "additive"])
def test_tables_and_vectors_of_mechanisms(mixer: str) -> None:
    for role in roles(small("bert-base-masked", mixer=mixer, mixer_size=4 if mixer == "linformer" else None)):
        if "mechanism" in role.name:
            assert role.decays == (not role.name.endswith(".v"))
            assert not role.in_layer


def test_transformer_xl() -> None:
    found = {role.name.rpartition(".")[2]: role for role in roles(small(positions="xl", n_kv_heads=None))}
    assert found["w_r"].in_layer
    assert not found["u"].decays
    assert not found["v"].decays


def test_a_layer_around_a_frozen_one_is_no_matrix_of_muons() -> None:
    class LowRank(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = (nn.Parameter(torch.zeros(2, n)) for n in (base.in_features, base.out_features))

    net = small().requires_grad_(False)
    for module in list(net.modules()):
        if isinstance(module, MultiHeadAttention):
            module.w_qkv = LowRank(module.w_qkv)  # type: ignore[assignment]
    found = list(roles(net))
    assert {role.name.rpartition(".")[2] for role in found} == {"a", "b"}
    assert not any(role.in_layer for role in found)
    assert [type(one).__name__ for one in build_optimiser(net, recipe("muon")).optimisers] == ["AdamW"]


# ----------------------------------------------------------------------------------- optimiser


def test_frozen_parameters_are_left_out() -> None:
    net = small()
    net.get_submodule("decoder.blocks.0").requires_grad_(False)
    before = {name: param.clone() for name, param in net.named_parameters()}
    optimiser = build_optimiser(net, recipe("muon"))
    go(net, optimiser, range(2))
    for name, param in net.named_parameters():
        assert torch.equal(param, before[name]) == name.startswith("decoder.blocks.0."), name
    assert not any("blocks.0." in name for name in optimiser.state_tensors())
    with pytest.raises(ValueError, match="all are frozen"):
        build_optimiser(net.requires_grad_(False), recipe("adamw"))


@pytest.mark.parametrize("kind", KINDS)
def test_only_matrices_decay(kind: str) -> None:
    net = small("transformer-tiny")
    optimiser = build_optimiser(net, recipe(kind))
    decayed = {
        id(param)
        for one in optimiser.optimisers
        for group in one.param_groups
        for param in group["params"]
        if group["weight_decay"]
    }
    assert decayed == {id(role.param) for role in roles(net) if role.decays}
    names = [type(one).__name__.lower() for one in optimiser.optimisers]
    assert names == (["adamw", "muon"] if kind == "muon" else [kind])


def test_the_rate_is_a_factor_of_each_peak() -> None:
    optimiser = build_optimiser(small(), recipe("muon", lr=0.01, muon_lr=0.2))
    optimiser.set_lr(0.5)
    optimiser.set_lr(0.25)
    rates = {type(one).__name__: {group["lr"] for group in one.param_groups} for one in optimiser.optimisers}
    assert rates == {"AdamW": {0.0025}, "Muon": {0.05}}
    assert optimiser.optimisers[0].param_groups[0]["lr"] == 0.0025


def test_adamw_is_the_formula() -> None:
    """θ ← θ - lr (decay · θ + m̂ / (√v̂ + ε))   (Loshchilov & Hutter 2019, algorithm 2)"""
    net = small()
    weight = net.get_parameter("decoder.blocks.0.attention.w_o.weight")
    expected, m, v = weight.detach().double().clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    optimiser = build_optimiser(net, recipe("adamw", betas=(0.9, 0.98), eps=1e-9))
    for step in range(1, 4):
        give_gradients(net, step)
        assert weight.grad is not None
        m, v = 0.9 * m + 0.1 * weight.grad.double(), 0.98 * v + 0.02 * weight.grad.double() ** 2
        unbiased = (m / (1 - 0.9**step)) / ((v / (1 - 0.98**step)).sqrt() + 1e-9)
        expected -= 0.01 * (0.1 * expected + unbiased)
        optimiser.step()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_exactly(kind: str, device: str) -> None:
    straight = small().to(device)
    first = build_optimiser(straight, recipe(kind))
    go(straight, first, range(3))
    kept = {name: x.detach().cpu().clone() for name, x in first.state_tensors().items()}
    weights = {name: x.detach().clone() for name, x in straight.state_dict().items()}
    go(straight, first, range(3, 6))

    again = small().to(device)
    again.load_state_dict(weights)
    second = build_optimiser(again, recipe(kind))
    second.load_state_tensors(kept)
    go(again, second, range(3, 6))
    for (name, one), (_, other) in zip(straight.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    ends = first.state_tensors(), second.state_tensors()
    assert ends[0].keys() == ends[1].keys() == kept.keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in kept)


def test_names_of_the_state_and_no_aliases() -> None:
    net = small()
    optimiser = build_optimiser(net, recipe("muon"))
    assert optimiser.state_tensors() == {}
    go(net, optimiser, range(2))
    state = optimiser.state_tensors()
    inner = {role.name for role in roles(net) if role.in_layer}
    rest = {role.name for role in roles(net)} - inner
    assert set(state) == {f"muon/momentum/{name}" for name in inner} | {
        f"adamw/{key}/{name}" for name in rest for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert all(state[f"adamw/step/{name}"] == 2 for name in rest)
    given = {name: x.clone() for name, x in state.items()}
    optimiser.load_state_tensors(given)
    kept = {name: x.clone() for name, x in given.items()}
    go(net, optimiser, range(2, 3))
    assert all(torch.equal(given[name], kept[name]) for name in kept)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net = small()
    optimiser = build_optimiser(net, recipe("adamw"))
    go(net, optimiser, range(1))
    state = {name: x.clone() for name, x in optimiser.state_tensors().items()}
    with pytest.raises(ValueError, match=r"muon trains no parameter 'token\.weight'"):
        optimiser.load_state_tensors({**state, "muon/momentum/token.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"shape \(2,\), but its parameter \(30, 16\)"):
        optimiser.load_state_tensors({**state, "adamw/exp_avg/token.weight": torch.zeros(2)})
    after = optimiser.state_tensors()
    assert all(torch.equal(after[name], state[name]) for name in state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_scaler_skips_what_overflowed_and_unscales_the_rest(kind: str, device: str) -> None:
    plain, scaled = small().to(device), small().to(device)
    optimisers = [build_optimiser(net, recipe(kind)) for net in (plain, scaled)]
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    for overflow in (False, True, False):
        give_gradients(scaled, 5)
        scaler.scale(torch.zeros((), device=device))  # as the loss is, before its backward pass
        factor = scaler.get_scale()
        for param in scaled.parameters():
            assert param.grad is not None
            param.grad.mul_(torch.inf if overflow else factor)
        before = [param.detach().clone() for param in scaled.parameters()]
        for optimiser in optimisers[1].optimisers:
            scaler.step(optimiser)
        scaler.update()
        if overflow:
            assert all(torch.equal(x, y) for x, y in zip(before, scaled.parameters(), strict=True))
        else:
            give_gradients(plain, 5)
            optimisers[0].step()
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(kind: str) -> None:
    net = small()
    optimiser = build_optimiser(net, recipe(kind, lr=0.01, muon_lr=0.05, weight_decay=0.0))
    tokens = torch.randint(30, (4, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_zero_grad_lets_the_gradients_go() -> None:
    net = small()
    optimiser = build_optimiser(net, recipe("muon"))
    give_gradients(net, 0)
    optimiser.zero_grad()
    kept: list[Tensor | None] = [param.grad for param in net.parameters()]
    assert kept == [None] * len(kept)
