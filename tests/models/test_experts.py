"""Mixture of experts: dropless equals a loop over tokens, the router's losses, routing in the lens, curves and cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import regard
from regard.config import ModelConfig
from regard.lens.activations import capture
from regard.lens.interventions import patch, watch
from regard.models import Model, build
from regard.models.experts import Experts, grouped_product, take_router_losses
from regard.training.journal import draw_curves
from regard.training.loss import Batch, Objective

from .small import SIZES, shaken

ROUTED: dict[str, Any] = {**SIZES, "architecture": "decoder", "positions": "rope", "experts": 5}


def model_of(**fields: Any) -> Model:
    torch.manual_seed(0)
    return shaken(build(ModelConfig(**ROUTED | fields)))


def experts_of(**fields: Any) -> Experts:
    ff = model_of(**fields).decoder.blocks[0].ff
    assert isinstance(ff, Experts)
    return ff


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated without biases": {"activation": "swiglu", "ff_bias": False},
    "one expert": {"experts_per_token": 1, "renormalise_experts": False},
    "shared": {"experts_per_token": 3, "shared_experts": 2, "activation": "geglu"},
    "all": {"experts_per_token": 5},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_no_token_is_dropped(fields: dict[str, Any]) -> None:
    """Sorted by expert, values and gradients are those of the formula token by token."""
    ff, x = experts_of(**fields), torch.randn(2, 9, SIZES["d_model"], requires_grad=True)
    slope = torch.randn_like(x)
    parameters = [x, *ff.parameters()]
    fast, slow = ff(x), ff.reference(x)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    fast_grads = torch.autograd.grad((fast * slope).sum(), parameters)
    for one, other in zip(fast_grads, torch.autograd.grad((slow * slope).sum(), parameters), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_one_token_and_one_row_at_a_time() -> None:
    """A decode step is (rows, width); an expert may get no row at all."""
    ff, x = experts_of(), torch.randn(7, SIZES["d_model"])
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([ff(row[None]) for row in x]), ff(x), atol=1e-5, rtol=1e-5)


def test_a_form_whose_shapes_are_fixed_computes_the_same() -> None:
    ff, x = experts_of(shared_experts=0, activation="reglu"), torch.randn(9, SIZES["d_model"])
    routing = ff.route(ff.router(x))
    torch.testing.assert_close(ff._run_all(x, routing.experts, routing.weights), ff(x), atol=1e-5, rtol=1e-5)


def test_a_compiled_step_is_the_same() -> None:
    """With layers recomputed in the backward pass, where what a forward pass leaves behind is easily lost."""
    model = model_of(n_layers=1).train()
    model.use_checkpointing()
    objective, tokens = Objective(model), torch.randint(3, 31, (2, 8))
    batch, parameters = Batch((tokens,), tokens), list(model.parameters())
    torch._dynamo.reset()
    runs = []
    for step in (objective, torch.compile(objective, backend="eager")):
        loss = step(batch)
        runs.append((loss.detach(), *torch.autograd.grad(loss, parameters)))
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_the_routers_losses() -> None:
    """Switch Transformer's as transformers has it, ST-MoE's by its formula, as parts of the loss in training only."""
    model = model_of(n_layers=1, experts_per_token=2, balance_loss=0.5, router_z_loss=0.25)
    objective, tokens = Objective(model).train(), torch.randint(3, 31, (2, 8))
    targets = tokens.clone()
    targets[0, :3] = -100
    batch = Batch((tokens,), targets)
    trained, logits = objective(batch), []
    plain = objective.eval()(batch)
    model.decoder.blocks[0].ff.router.register_forward_hook(lambda _, __, output: logits.append(output))
    model(tokens)
    flat = logits[0].flatten(0, 1)
    balance = load_balancing_loss_func((flat,), 5, 2)
    z = flat.logsumexp(-1).square().mean()
    torch.testing.assert_close(trained - plain, 13 * (0.5 * balance + 0.25 * z))  # 13 targets
    assert take_router_losses(model) == []
    numbers = objective.router_numbers
    torch.testing.assert_close(numbers["router_loss"], (0.5 * balance + 0.25 * z).detach())
    shares = torch.bincount(flat.topk(2).indices.flatten(), minlength=5) / 32 * 5
    assert (numbers["expert_load_max"], numbers["expert_load_min"]) == (shares.max(), shares.min())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts_per_token": 6}, "experts_per_token=6 is more than experts=5"),
        ({"experts": None, "shared_experts": 1}, "shared_experts=1 needs experts"),
        ({"experts": 0}, "experts=0 must be at least 1"),
        ({"balance_loss": -1.0}, "balance_loss=-1.0 must not be negative"),
        ({"architecture": "recurrent", "positions": "none"}, "experts=5 does not apply to architecture='recurrent'"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**ROUTED | fields)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("experts")
    text = out / "text.txt"
    text.write_text("to be, or not to be, that is the question\n" * 60, encoding="utf-8")
    sizes = {"d_model": 16, "n_heads": 2, "d_ff": 16, "n_layers": 2, "max_len": 32, "experts": 4, "shared_experts": 1}
    quick = {"steps": 4, "log_every": 1, "samples": 0, "precision": "fp32", "compile": "off", "device": "cpu"}
    data = {"source": str(text), "tokenizer": "bytes", "max_len": 32}
    regard.train("lm", data=data, model=sizes, train={**quick, "out": str(out / "run")})
    return out / "run"


def test_the_load_of_experts_is_in_the_curves(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "expert_load_max" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["expert_load_max"] >= 1 >= line["expert_load_min"] >= 0 < line["router_loss"] for line in steps)
    drawn: list[list[str]] = []
    monkeypatch.setattr("regard.training.journal._draw_metrics", lambda panel, records, group, **_: drawn.append(group))
    draw_curves(run / "metrics.jsonl", tmp_path / "curves.png")
    assert ["expert_load_max", "expert_load_min"] in drawn


def test_routing_in_the_lens(run: Path) -> None:
    model = regard.load(run)
    look = regard.look(model, "to be, or not")
    for layer in (0, 1):
        routing = look.routing(layer=layer)
        assert routing.probabilities.shape == (len(look.rows()), 4)
        torch.testing.assert_close(routing.probabilities.sum(-1), torch.ones(len(look.rows())))
        assert torch.equal(routing.experts, routing.probabilities.topk(2).indices)
        torch.testing.assert_close(routing.weights.sum(-1), torch.ones(len(look.rows())))
    place, tokens = "decoder.blocks.1.ff.router", look.inputs[0]
    with torch.no_grad(), watch(model, [place]) as seen:
        before = model(tokens)
    torch.testing.assert_close(seen[place][0], look.routing(layer=1).probabilities)
    favourite = int(seen[place].mean((0, 1)).argmax())
    without = {place: lambda p: p.index_fill(-1, torch.tensor([favourite]), 0.0)}
    with torch.no_grad(), patch(model, without), watch(model, [place]) as seen:
        assert not torch.allclose(model(tokens), before)
    assert not seen[place][..., favourite].any()


def test_a_model_without_experts_has_no_routing() -> None:
    model = model_of(experts=None).eval()
    with pytest.raises(ValueError, match="this model has no experts"):
        regard.look(model, [3, 4, 5]).routing()
    with pytest.raises(ValueError, match=r"is not in model\.sites"), watch(model, ["decoder.blocks.0.ff.router"]):
        pass


def test_the_command_line_says_who_goes_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from regard.cli import main

    assert main(["look", str(run), "to be", "--experts", "--layer", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    routing = regard.look(str(run), "to be").routing(layer=0)
    assert [[x["expert"] for x in row["experts"]] for row in found["tokens"]] == routing.experts.tolist()
    assert main(["look", str(run), "to be", "--experts"]) == 0
    assert capsys.readouterr().out.count("expert ") == 2 * len(found["tokens"])


def test_cost_tells_active_from_total() -> None:
    config = ModelConfig(**ROUTED | {"activation": "swiglu", "ff_bias": False, "shared_experts": 1, "experts": 8})
    cost, dense = (regard.cost(x, batch=2, length=16) for x in (config, config.with_(experts=None, shared_experts=0)))
    d_model, d_ff, n_layers = 24, 32, 2
    network = 3 * d_model * d_ff
    assert cost.parameters.total == sum(p.numel() for p in build(config).parameters())
    assert cost.parameters.total - cost.active_parameters == n_layers * 6 * network
    assert dense.active_parameters == dense.parameters.total
    tokens, forward = 2 * 16, cost.flops_forward.parts
    assert forward["decoder feed-forward"] == 2 * tokens * n_layers * 3 * network  # two chosen and one shared
    assert forward["decoder router"] == 2 * tokens * n_layers * d_model * 8
    assert cost.flops_all_experts - cost.flops_forward.total == 2 * tokens * n_layers * 6 * network
    assert dense.flops_all_experts == dense.flops_forward.total
    assert cost.training is not None
    assert dense.training is not None
    assert cost.training.by_part["decoder feed-forward"] > 2 * dense.training.by_part["decoder feed-forward"]
    assert "2 of 8 experts per token" in cost.to_text()


def test_an_attribution_of_experts_is_whole() -> None:
    record = capture(model_of(shared_experts=1).eval(), torch.tensor([[3, 9, 4, 7]]))
    split = record.logit_attribution(5, position=2)
    assert split.total == pytest.approx(float(record.logits[0, 2, 5]), abs=1e-4)
    assert split.parts["ff"].abs().min() > 0


def test_compiled_experts_process_only_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 says of a compiled function that it is exported; its experts then all processed every token."""
    for name in ("is_exporting", "is_dynamo_compiling"):
        monkeypatch.setattr(torch.compiler, name, lambda: True)
    ff = build(ModelConfig(**ROUTED)).decoder.blocks[0].ff
    assert isinstance(ff, Experts)
    monkeypatch.setattr(Experts, "_run_all", None)
    x = torch.randn(2, 5, ff.router.in_features)
    torch.testing.assert_close(ff(x), ff.reference(x))


def test_the_grouped_product_and_its_gradients_are_those_of_each_expert() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([5, 0, 20, 12])
    x = torch.randn(int(counts.sum()), 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 24, 16, dtype=torch.bfloat16, requires_grad=True)
    y = grouped_product(x, weight, counts.cumsum(0, dtype=torch.int32))
    wanted = torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(counts.tolist()), weight, strict=True)])
    slope = torch.randn_like(y)
    own, theirs = (torch.autograd.grad((out * slope).sum(), [x, weight]) for out in (y, wanted))
    torch.testing.assert_close((y, *own), (wanted, *theirs), atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_one_grouped_product_is_those_of_the_experts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ff = build(ModelConfig(**ROUTED | {"d_model": 64, "d_ff": 48, "activation": "swiglu"})).decoder.blocks[0].ff
    assert isinstance(ff, Experts)
    ff = ff.to("cuda", torch.bfloat16)
    x = torch.randn(3, 50, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameters, slope, runs = [x, *ff.parameters()], torch.randn_like(x), []
    for grouped in (True, False):
        if not grouped:
            monkeypatch.setattr("regard.models.experts.can_group", lambda x, weight: False)
        y = ff(x)
        runs.append((y, *torch.autograd.grad((y * slope).sum(), parameters)))
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_step_routes_as_a_whole_pass_does() -> None:
    model = model_of(max_len=64).to("cuda").eval()
    prompts = [[5, 9, 3, 17], [4, 8, 15, 16]]
    written = regard.generate(model, prompts, max_new_tokens=12)
    tokens = torch.tensor(prompts, device="cuda")
    for _ in range(12):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    for row, own in zip(tokens[:, 4:].tolist(), written.hypotheses, strict=True):
        assert own[0].tokens == row[: len(own[0].tokens)]
