"""Several processes do what one does: the same batches, the same gradients, the same checkpoints.

Worlds are gloo processes on this machine. They are forked from a server that has imported torch, so that starting one
takes a moment; their store is this process', so that no port is guessed; none outlives its test.
"""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from regard.config import ModelConfig, TrainConfig
from regard.errors import BadModelFile, RegardError
from regard.models import Model, build
from regard.training import optimiser as optimiser_module
from regard.training import shards
from regard.training.averaging import Ema
from regard.training.checkpoint import Checkpoint, Checkpoints
from regard.training.gradient_pass import broken_gradient
from regard.training.loop import seed_everything
from regard.training.loss import Batch, Objective
from regard.training.optimiser import build_optimiser
from regard.training.parallel import (
    Group,
    _units,
    clip_grad_norm,
    gather_parameters,
    gradient_sync,
    open_group,
    parallelise,
)
from regard.training.shards import is_sharded, local, local_region

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "numpy.random", "pytest"),
        *("regard.models", "regard.training.checkpoint", "regard.training.loss", "regard.training.optimiser"),
    ]
)
DEADLINE = 300.0  # seconds for a world to end by itself, on a busy machine

SMALL: dict[str, Any] = {"vocab_size": 37, "d_model": 12, "n_layers": 3, "n_heads": 2, "d_ff": 20, "max_len": 16}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"architecture": "decoder", "positions": "rope", "norm": "rms", "dropout": 0.1, "tie_head": True},
    "encoder-decoder": {"architecture": "encoder-decoder", "positions": "t5", "dropout": 0.1, "head_bias": True},
    "shared layers": {"architecture": "decoder", "share_layers": True, "positions": "learned"},
    "classifier": {"architecture": "encoder", "head": "classify", "n_classes": 2, "pooling": "attention"},
    "recurrent": {"architecture": "recurrent", "alignment": "additive", "n_layers": 1},
}
# Gradients summed in another order differ by fp32's rounding of a few sums: by at most this share, 8 times its unit
# 2⁻²³, of the largest number in a tensor's gradient. Seen are 2e-7.
BOUND = 8 * 2**-23


# ------------------------------------------------------------------------------------- a world of processes


def spread(world: int, work: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What ``work(group, …)`` returns on each of so many processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = SERVER.SimpleQueue()
    job = functools.partial(_call, work, args, options)
    started = [SERVER.Process(target=_rank, args=(i, world, store.port, job, queue)) for i in range(world)]
    for process in started:
        process.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + DEADLINE
    try:
        while len(found) < world:
            if not queue.empty():
                rank, result, fault = queue.get()
                assert fault is None, f"process {rank} of {world}:\n{fault}"
                found[rank] = pickle.loads(result)
            else:
                assert time.monotonic() < end, f"{world - len(found)} of {world} processes hang"
                time.sleep(0.01)
    finally:
        for process in started:
            process.join(5 if len(found) == world else 0.1)
            if process.is_alive():
                process.kill()
                process.join(5)
    return [found[rank] for rank in range(world)]


def _call(work: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], group: Group) -> Any:
    return work(group, *args, **options)


def _rank(rank: int, world: int, port: int, job: Callable[[Group], Any], queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        group = open_group("cpu")
        result = job(group)
        group.barrier()
        group.close()
        queue.put((rank, pickle.dumps(result), None))  # in the message itself: tensors' shared memory goes with us
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


# ------------------------------------------------------------------------------------- a run


def make_objective(kind: str, seed: int = 1) -> Objective:
    torch.manual_seed(seed)
    return Objective(build(ModelConfig(**{**SMALL, **MODELS[kind]})), smoothing=0.1)


def make_batch(model: Model, number: int) -> Batch:
    """Micro-batch ``number`` of the run, ragged: batches have different numbers of targets."""
    made = torch.Generator().manual_seed(1000 + number)
    n_rows, length = 2 + number % 3, 5 + number % 4
    tokens = torch.randint(4, 37, (n_rows, length), generator=made)
    if model.config.architecture == "encoder":
        return Batch((tokens,), torch.randint(0, 2, (n_rows,), generator=made))
    targets = torch.randint(4, 37, (n_rows, length), generator=made)
    return Batch((tokens,) if model.config.architecture == "decoder" else (tokens, targets.roll(1, 1)), targets)


def run(
    group: Group,
    kind: str,
    parallel: str,
    *,
    batches_per_step: int = 4,
    steps: int = 1,
    optimiser: str | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    seed: int = 1,
) -> dict[str, Any]:
    """Steps of training as the loop makes them: what each read, the first step's gradients, the weights at the end."""
    # Another process' first numbers must not matter.
    objective = make_objective(kind, seed + group.rank)
    model = objective.model
    model.use_checkpointing(checkpointing)
    module = parallelise(objective, parallel, group, dtype)  # type: ignore[arg-type]
    recipe = TrainConfig(optimiser=optimiser or "adam", lr=1e-2, eps=1e-4, muon_lr=0.02)
    trained = build_optimiser(model, recipe)
    accumulate, rest = divmod(batches_per_step, group.world)
    assert rest == 0
    told: dict[str, Any] = {"read": [], "loss": [], "norm": []}
    for step in range(steps):
        numbers = [(step * accumulate + micro) * group.world + group.rank for micro in range(accumulate)]
        batches = [make_batch(model, number) for number in numbers]
        n_targets = float(group.sum(torch.tensor(float(sum(batch.n_targets for batch in batches)))))
        total = torch.zeros(())
        for micro, (number, batch) in enumerate(zip(numbers, batches, strict=True)):
            seed_everything(7, "batch", number)
            cast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
            with gradient_sync(module, last=micro == accumulate - 1):
                with cast:
                    loss = module(batch) * (group.world / n_targets)
                loss.backward()
            total += loss.detach() / group.world
        told["read"].append(numbers)
        told["loss"].append(float(group.sum(total)))
        told["norm"].append(float(clip_grad_norm(module.parameters(), 1.0 if optimiser else None)))
        if step == 0:
            told["grads"] = full_gradients(model)
        if optimiser:
            with mock.patch.object(
                optimiser_module, "product_dtype", lambda _, dtype: dtype
            ):  # in bf16 a last bit becomes 2⁻⁹
                trained.step()
        trained.zero_grad()
    told["weights"] = whole(model.state_dict())
    told["sharded"] = sum(is_sharded(p) for p in model.parameters())
    return told


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in grads.values()), [name for name, grad in grads.items() if grad is None]
    return whole({name: grad for name, grad in grads.items() if grad is not None})


@functools.cache
def alone(kind: str, **options: Any) -> dict[str, Any]:
    """One process, the same batches."""
    return run(Group(), kind, "ddp", **options)


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two sets of tensors, as a share of the largest number in its tensor."""
    assert one.keys() == other.keys()
    return max(float((x - other[name]).abs().max() / x.abs().max().clamp_min(1e-4)) for name, x in one.items())


# ------------------------------------------------------------------------------------- the same as one process


@pytest.mark.parametrize(("parallel", "world"), [("ddp", 2), ("fsdp", 4)])
def test_gradients_are_those_of_one_process(parallel: str, world: int) -> None:
    everyone = spread(world, run_all, parallel)
    for kind in MODELS:
        compare(alone(kind), [told[kind] for told in everyone], parallel)


def run_all(group: Group, parallel: str) -> dict[str, Any]:
    return {kind: run(group, kind, parallel) for kind in MODELS}


def compare(expected: dict[str, Any], found: list[dict[str, Any]], parallel: str) -> None:
    assert sorted(number for told in found for number in told["read"][0]) == expected["read"][0] == [0, 1, 2, 3]
    for told in found:
        assert told["sharded"] == (len(expected["grads"]) if parallel == "fsdp" else 0)
        assert told["loss"] == found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert told["norm"] == found[0]["norm"] == pytest.approx(expected["norm"], rel=1e-6)
        assert farthest(expected["grads"], told["grads"]) < BOUND
        assert farthest(expected["weights"], told["weights"]) == 0  # all began with the main process' numbers


@pytest.mark.parametrize("optimiser", ["adam", "muon"])
@pytest.mark.parametrize(("parallel", "world"), [("ddp", 4), ("fsdp", 2)])
def test_steps_are_those_of_one_process(optimiser: str, parallel: str, world: int) -> None:
    options: dict[str, Any] = {"steps": 4, "optimiser": optimiser}
    expected = alone("decoder", **options)
    found = spread(world, run, "decoder", parallel, **options)
    assert farthest(expected["weights"], alone("decoder")["weights"]) > 0.05  # it has learned
    for step, numbers in enumerate(expected["read"]):
        assert sorted(number for told in found for number in told["read"][step]) == numbers
    for told in found:
        assert told["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert farthest(expected["weights"], told["weights"]) < 1e-4
        assert farthest(found[0]["weights"], told["weights"]) == 0


def test_recomputed_layers_are_gathered_again() -> None:
    found = spread(2, run, "encoder-decoder", "fsdp", checkpointing=True)
    assert farthest(alone("encoder-decoder")["grads"], found[0]["grads"]) < BOUND


def test_half_precision_weights_on_the_way_cost_no_more_than_half_precision() -> None:
    """Against fp32, FSDP that sends bf16 may be at most twice as far as one process under autocast (DESIGN.md, 2)."""
    exact = alone("decoder")["grads"]
    one = alone("decoder", dtype=torch.bfloat16)["grads"]
    several = spread(2, run, "decoder", "fsdp", dtype=torch.bfloat16)[0]["grads"]

    def error(grads: dict[str, Tensor]) -> float:
        return sum(float((grads[name] - x).square().sum()) for name, x in exact.items()) ** 0.5

    assert {x.dtype for x in several.values()} == {torch.float32}
    assert error(one) / 2 < error(several) < 2 * error(one)


# ------------------------------------------------------------------------------------- the group


def talk(group: Group) -> dict[str, Any]:
    x = torch.tensor([1.0, float(group.rank)])
    told = {
        "sum": group.sum(x).tolist(),
        "x": x.tolist(),
        "main": group.is_main,
        "object": group.broadcast_object({"rank": group.rank}),
        "objects": group.gather_objects((group.rank, None)),
    }
    group.barrier()
    return told


def test_a_group_of_one_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group = open_group("cpu")
    assert not dist.is_initialized()
    assert talk(group) == {
        **{"sum": [1.0, 0.0], "x": [1.0, 0.0], "main": True},
        **{"object": {"rank": 0}, "objects": [(0, None)]},
    }
    group.close()
    objective = make_objective("decoder")
    assert parallelise(objective, "fsdp", group) is objective


def test_a_group_of_three() -> None:
    for rank, told in enumerate(spread(3, talk)):
        assert told == {
            **{"sum": [3.0, 3.0], "x": [1.0, rank], "main": rank == 0},
            **{"object": {"rank": 0}, "objects": [(0, None), (1, None), (2, None)]},
        }


def test_what_no_group_can_be_opened_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="WORLD_SIZE=2 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        open_group("cpu")
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="device=mps"):
        open_group("mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="LOCAL_RANK=1 has no GPU: there are 1"):
        open_group("cuda")


def until_told(group: Group) -> int:
    """Steps until a signal, which one process alone receives."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    for step in range(100):
        if step == 5 and group.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if any(group.gather_objects(bool(told))):
            return step
    return -1


def test_a_signal_to_one_stops_all_at_the_same_step() -> None:
    assert spread(2, until_told) == [5, 5]


# ------------------------------------------------------------------------------------- gradients


def break_gradient(group: Group, parallel: str) -> tuple[str | None, str | None, float, bool]:
    """A NaN in one number of a gradient that only the last process holds."""
    objective = make_objective("decoder")
    module = parallelise(objective, parallel, group)  # type: ignore[arg-type]
    module(make_batch(objective.model, 0)).backward()
    fine = next((x for x in group.gather_objects(broken_gradient(module)) if x), None)
    if group.rank == group.world - 1:
        for name, p in objective.model.named_parameters():
            if name.endswith("1.ff.w_in.weight") or name.endswith("2.ff.w_out.weight"):
                assert p.grad is not None
                local(p.grad)[-1, -1] = torch.nan
    before = {name: local(p.grad).clone() for name, p in objective.named_parameters() if p.grad is not None}
    norm = float(clip_grad_norm(module.parameters(), 1e-6))
    kept = all(local(p.grad).equal(before[n]) for n, p in objective.named_parameters() if "0.ff" in n)  # type: ignore[arg-type]
    return fine, next((x for x in group.gather_objects(broken_gradient(module)) if x), None), norm, kept


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_gradient_that_is_not_finite_is_named_on_all(parallel: str) -> None:
    norms = []
    for fine, name, norm, kept in spread(2, break_gradient, parallel):
        assert fine is None
        assert name == "the gradient of decoder.blocks.2.ff.w_out.weight and 1 before it"
        assert (norm != norm) == kept  # nothing is scaled by NaN
        norms.append(norm)
    assert norms[-1] != norms[-1]
    assert parallel == "ddp" or norms[0] != norms[0]  # a norm over shards is the same on all


def clipped(group: Group, parallel: str) -> tuple[float, float, float]:
    objective = make_objective("decoder")
    module = parallelise(objective, parallel, group)  # type: ignore[arg-type]
    module(make_batch(objective.model, 0)).backward()
    asked, first = float(clip_grad_norm(module.parameters(), None)), float(clip_grad_norm(module.parameters(), 0.5))
    return asked, first, float(clip_grad_norm(module.parameters(), None))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_norm_is_that_of_all_shards(parallel: str) -> None:
    asked, first, after = clipped(Group(), parallel)
    assert asked == first > 1
    assert after == pytest.approx(0.5, rel=1e-5)
    for found in spread(2, clipped, parallel):
        assert found == pytest.approx((asked, first, after), rel=1e-5)


def interrupted(group: Group, root: str) -> dict[str, Tensor]:
    """Gradients of two micro-batches a process, stored and read again between them."""
    checkpoints = Checkpoints(root, 1, group)
    for part in range(2):
        objective = make_objective("decoder")
        model = objective.model
        module = parallelise(objective, "fsdp", group)
        if part == 1:
            found = checkpoints.at(0)
            for name, p in model.named_parameters():
                p.grad = found.tensor(f"grad/{name}", like=p)
        number = part * group.world + group.rank
        seed_everything(7, "batch", number)
        with gradient_sync(module, last=part == 1):
            (module(make_batch(model, number)) * group.world).backward()
        if part == 0:
            grads = {f"grad/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
            checkpoints.write(0, grads, {"micro": 1})
    return full_gradients(model)


def test_sharded_gradients_are_stored_between_micro_batches(tmp_path: Path) -> None:
    objective = make_objective("decoder")
    for number in range(4):
        seed_everything(7, "batch", number)
        objective(make_batch(objective.model, number)).backward()
    expected = full_gradients(objective.model)
    for found in spread(2, interrupted, str(tmp_path)):
        assert farthest(expected, found) < BOUND


def test_what_is_sharded_on_its_own() -> None:
    """Layers that run once in a pass and share nothing; all else belongs to the root."""
    assert {kind: len(list(_units(make_objective(kind)))) for kind in MODELS} == {
        **{"decoder": 3, "encoder-decoder": 6, "classifier": 3},
        **{"shared layers": 0, "recurrent": 0},
    }
    objective = make_objective("decoder")
    blocks = objective.model.decoder.blocks
    blocks[1].ff = blocks[0].ff
    assert list(_units(objective)) == [blocks[2]]


def look_inside(group: Group, kind: str) -> dict[str, Any]:
    """Logits of the model itself, on the main process alone, before and between steps of training."""
    objective = make_objective(kind)
    model = objective.model
    module = parallelise(objective, "fsdp", group)
    batch = make_batch(model, 0)
    told: dict[str, Any] = {}
    for i in range(2):
        module.eval()
        with torch.no_grad(), gather_parameters(module):
            if group.is_main:
                told[f"logits {i}"] = model(*batch.inputs)
        assert not group.is_distributed or all(is_sharded(p) for p in model.parameters())
        module.train()
        seed_everything(7, "batch", 0)
        module(batch).backward()
        told[f"grads {i}"] = full_gradients(model)
        module.zero_grad()
    return told


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_gathered_weights_are_there_for_one_process(kind: str) -> None:
    expected = look_inside(Group(), kind)
    found = spread(2, look_inside, kind)[0]
    for i in range(2):
        assert farthest(expected[f"grads {i}"], found[f"grads {i}"]) < BOUND
        assert torch.allclose(expected[f"logits {i}"], found[f"logits {i}"], rtol=0, atol=1e-6)


def synced(group: Group) -> list[bool]:
    """Whether gradients are the same everywhere after a micro-batch that is not the last, and after one that is."""
    objective = make_objective("classifier")
    module = parallelise(objective, "ddp", group)
    found = []
    for last in (False, True):
        with gradient_sync(torch.compile(module), last):  # the loop holds the compiled one
            module(make_batch(objective.model, group.rank)).backward()
        grad = next(objective.parameters()).grad
        assert grad is not None
        found.append(group.sum(grad).equal(grad * group.world))
    return found


def test_gradients_travel_with_the_last_micro_batch_only() -> None:
    assert spread(2, synced) == [[False, True], [False, True]]


# ------------------------------------------------------------------------------------- checkpoints


def state_of(objective: Objective, trained: Any, ema: Ema) -> dict[str, Tensor]:
    tensors = {f"model/{name}": x for name, x in objective.model.state_dict().items()}
    tensors.update({f"optimiser/{name}": x for name, x in trained.state_tensors().items()})
    tensors.update({f"ema/{name}": x for name, x in ema.state_tensors().items()})
    return tensors


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.full_tensor().clone() if is_sharded(x) else x.clone() for name, x in tensors.items()}


def store(group: Group, kind: str, parallel: str, root: str) -> dict[str, Tensor]:
    """A step with Adam and a moving average, then a checkpoint; everything in it, whole."""
    objective = make_objective(kind)
    module = parallelise(objective, parallel, group)  # type: ignore[arg-type]
    trained, ema = build_optimiser(objective.model, TrainConfig(optimiser="adamw")), Ema(objective.model, 0.9)
    module(make_batch(objective.model, group.rank)).backward()
    trained.step()
    ema.update()
    tensors = state_of(objective, trained, ema)
    path = Checkpoints(root, 2, group).write(3, tensors, {"step": 3})
    assert path.is_dir()  # on every process, when it returns
    return whole(tensors)


def restore(group: Group, kind: str, root: str) -> dict[str, Tensor]:
    """The same run on this world, filled from the checkpoint, each process with its slices; everything, whole."""
    objective = make_objective(kind, seed=9)
    parallelise(objective, "fsdp", group)
    model = objective.model
    found = Checkpoints(root, 2, group).latest()
    assert found is not None
    assert found.state == {"step": 3}
    found.fill("model/", model.state_dict())
    trained, ema = build_optimiser(model, TrainConfig(optimiser="adamw")), Ema(model, 0.9)
    params = dict(model.named_parameters())
    state = {}
    for name in found.names("optimiser/"):
        _, key, param = name.removeprefix("optimiser/").split("/")
        state[name.removeprefix("optimiser/")] = found.tensor(name, like=None if key == "step" else params[param])
    trained.load_state_tensors(state)
    ema.load_state_tensors(found.tensors("ema/"))
    for x in (*model.parameters(), *(x for x in state.values() if x.dim())):
        assert not group.is_distributed or is_sharded(x)
    # What the layers compute with is what was filled in, not only what state_dict shows.
    objective.eval()
    loss = objective(make_batch(model, 0)).detach()
    return {**whole(state_of(objective, trained, ema)), "loss": loss}


# 2 classes, 1 head query: some shards of 3 and 4 are empty
@pytest.mark.parametrize(("kind", "others"), [("decoder", [3]), ("classifier", [3, 4])])
def test_sharded_on_two_read_on_any_number(kind: str, others: list[int], tmp_path: Path) -> None:
    expected, other = spread(2, store, kind, "fsdp", str(tmp_path))
    assert same(expected, other)
    files = {path.name for path in (tmp_path / "step-000003").iterdir()}
    assert files == {
        *("shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"),
        *("index.json", "state.json", "manifest.json"),
    }
    assert same(Checkpoint(tmp_path / "step-000003").tensors(), expected)
    on_one = restore(Group(), kind, str(tmp_path))
    loss = on_one.pop("loss")
    assert same(on_one, expected)
    for world in others:
        for found in spread(world, restore, kind, str(tmp_path)):
            assert torch.allclose(found.pop("loss"), loss, rtol=1e-6)
            assert same(found, expected)


def test_copies_are_written_once_and_read_by_shards(tmp_path: Path) -> None:
    expected, other = spread(2, store, "decoder", "ddp", str(tmp_path))
    assert same(expected, other)
    files = {path.name for path in (tmp_path / "step-000003").iterdir()}
    assert files == {
        *("model.safetensors", "optimiser.safetensors", "ema.safetensors"),
        *("index.json", "state.json", "manifest.json"),
    }
    for found in spread(2, restore, "decoder", str(tmp_path)):
        del found["loss"]
        assert same(found, expected)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(x.equal(other[name]) for name, x in one.items())


def full_disk(group: Group, root: str, broken: int) -> str:
    """The disk of one process is full."""
    objective = make_objective("decoder")
    parallelise(objective, "fsdp", group)
    checkpoints = Checkpoints(root, 2, group)
    tensors = {f"model/{name}": x for name, x in objective.model.state_dict().items()}
    checkpoints.write(1, tensors, {})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if group.rank == broken:
        shards.write_tensors = full  # type: ignore[assignment]
    try:
        checkpoints.write(2, tensors, {})
    except RegardError as error:
        return str(error)
    return "written"


@pytest.mark.parametrize("broken", [0, 1])
def test_a_full_disk_on_one_is_told_on_all(tmp_path: Path, broken: int) -> None:
    for told in spread(2, full_disk, str(tmp_path), broken):
        assert "step-000002 could not be written (No space left on device)" in told
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def open_damaged(group: Group, root: str) -> tuple[int | None, str]:
    checkpoints = Checkpoints(root, 2, group)
    found = checkpoints.latest()
    try:
        checkpoints.at(3)
    except BadModelFile as error:
        return None if found is None else found.step, str(error)
    return None, ""


def test_all_take_the_same_checkpoint(tmp_path: Path) -> None:
    for step in (2, 3):
        Checkpoints(tmp_path, 2).write(step, {"model/x": torch.ones(3)}, {})
    (tmp_path / "step-000003" / "model.safetensors").write_bytes(b"")
    for step, told in spread(2, open_damaged, str(tmp_path)):
        assert step == 2
        assert "model.safetensors has 0 bytes" in told


def test_what_is_a_shard() -> None:
    x = torch.zeros(3, 2)
    assert not is_sharded(x)
    assert local_region(x).size == (3, 2)
