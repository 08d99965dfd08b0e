"""Checkpoints come back as they were written, are whole or not there, and a damaged one is never used."""

from __future__ import annotations

import builtins
import errno
import io
import json
import logging
import os
import random
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from forked_shell import Shell
from regard.errors import BadModelFile, RegardError
from regard.foundation.files import acquire_lock
from regard.training import shards
from regard.training.checkpoint import Checkpoint, Checkpoints, first_non_finite
from regard.training.shards import Index, TensorReader, TensorRegion, write_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
STATE: dict[str, Any] = {
    "micro": 2,
    "best": {"loss": 1.25, "step": 100},
    "notes": ["한글", None, True],
    "tokens": 10**15,
}


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=made)
    return {
        "model/token.weight": weight,
        "model/head.weight": weight,  # tied
        "model/askew": torch.randn(6, 8, generator=made)[::2].T,
        "optimiser/token.weight/exp_avg": torch.randn(7, 5, generator=made),
        "optimiser/token.weight/step": torch.tensor(3.0),
        "ema/token.weight": torch.randn(7, 5, generator=made).bfloat16(),
        "grad/empty": torch.zeros(0, 4),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        x.dtype == y.dtype and x.shape == y.shape and raw(x) == raw(y)
        for x, y in ((one[name], other[name]) for name in one)
    )


def raw(x: Tensor) -> bytes:
    return bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------- there and back


def test_it_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=2).write(200, some_tensors(), STATE)
    assert path == tmp_path / "step-000200"
    assert {file.name for file in path.iterdir()} == {
        *("model.safetensors", "optimiser.safetensors", "ema.safetensors"),  # nothing to write of grad/empty
        *("index.json", "state.json", "manifest.json"),
    }
    found = Checkpoints(tmp_path, keep=2).latest()
    assert found is not None
    assert found.step == 200
    tensors, state = found.tensors(), found.state
    assert same(tensors, some_tensors())
    assert state == STATE
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_tensors_by_prefix_are_named_without_it_and_stay_tied(tmp_path: Path) -> None:
    found = Checkpoint(Checkpoints(tmp_path, keep=1).write(1, some_tensors(), {}))
    model = found.tensors("model/")
    assert set(model) == {"token.weight", "head.weight", "askew"}
    assert model["token.weight"] is model["head.weight"]
    stored = load_file(found.path / "model.safetensors")
    assert set(stored) == {"model/token.weight", "model/askew"}  # once on disk too, and any safetensors reader opens it
    assert stored["model/askew"].equal(some_tensors()["model/askew"])
    assert found.names("optimiser/") == ["optimiser/token.weight/exp_avg", "optimiser/token.weight/step"]


def test_what_is_read_is_its_own_memory(tmp_path: Path) -> None:
    found = Checkpoint(Checkpoints(tmp_path, keep=1).write(1, some_tensors(), {}))
    before = everything(tmp_path)
    for x in found.tensors().values():
        x.add_(1)
    assert everything(tmp_path) == before
    assert same(found.tensors(), some_tensors())


def test_fill_writes_into_the_tensors_of_a_model(tmp_path: Path) -> None:
    model, twin = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    tensors = {f"model/{name}": x for name, x in model.state_dict().items()}
    found = Checkpoint(Checkpoints(tmp_path, keep=1).write(1, tensors, {}))
    found.fill("model/", dict(twin.named_parameters()))
    assert twin.weight.equal(model.weight)
    assert twin.weight.requires_grad
    with pytest.raises(BadModelFile, match=r"of model/ it lacks gain and also has bias"):
        found.fill("model/", {"weight": twin.weight, "gain": twin.bias})
    with pytest.raises(BadModelFile, match=r"model/weight has shape \(2, 3\), the run needs \(3, 2\)"):
        found.tensor("model/weight", like=torch.empty(3, 2))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)),
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_a_file_of_any_tensors_is_safetensors(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[Any], seed: int
) -> None:
    torch.manual_seed(seed)
    tensors = {f"x/{i}": (9 * torch.randn(shape)).to(dtype) for i, (dtype, shape) in enumerate(shapes)}
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    entry = write_tensors(path, tensors)
    assert same(load_file(path), tensors)
    assert entry.size == path.stat().st_size
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_is_put_together_from_pieces(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut along one dimension into any number of files, read any region."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    folder = tmp_path_factory.mktemp("pieces")
    pieces = []
    for i, part in enumerate(x.tensor_split(data.draw(st.integers(1, 4)), dim)):
        if part.numel():
            write_tensors(folder / f"{i}.safetensors", {"x/x": part})
            offset = [0] * len(shape)
            offset[dim] = sum(region.size[dim] for _, region in pieces)
            pieces.append((f"{i}.safetensors", TensorRegion(tuple(offset), tuple(part.shape))))
    text = Index({"x/x": shards.StoredTensor(tuple(shape), x.dtype, tuple(pieces))}, {}).text()
    (folder / "index.json").write_bytes(text)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    region = TensorRegion(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    assert TensorReader(folder).read("x/x", region).equal(x[tuple(slice(a, b) for a, b in ends)])
    assert TensorReader(folder).read("x/x").equal(x)


# ------------------------------------------------------------------------------------- what is refused


def test_state_that_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Checkpoints(tmp_path / "new", keep=1).write(1, {}, {"best": {"loss": float("nan")}})
    assert not list(tmp_path.iterdir())


def test_tensors_that_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model/x is torch\.complex64"):
        Checkpoints(tmp_path / "new", keep=1).write(1, {"model/x": torch.zeros(1, dtype=torch.complex64)}, {})
    assert not [path for path in tmp_path.rglob("*") if path.name != "new"]


def test_a_step_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="no checkpoint of step 7; it has none"):
        Checkpoints(tmp_path, keep=1).at(7)


def test_first_non_finite() -> None:
    tensors = {"a": torch.ones(3), "i": torch.ones(2, dtype=torch.int64), "e": torch.zeros(0)}
    assert first_non_finite(tensors) is None
    assert first_non_finite({}) is None
    assert first_non_finite({**tensors, "b": torch.tensor([1.0, torch.inf]), "c": torch.tensor(torch.nan)}) == "b"


# ------------------------------------------------------------------------------------- which are kept, which is used


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 8):
        checkpoints.write(step, some_tensors(step), {"step": step})
        checkpoints.prune(best=2 if step >= 2 else None)
    assert checkpoints.steps() == [2, 6, 7]
    assert {path.name for path in tmp_path.iterdir()} == {"step-000002", "step-000006", "step-000007"}
    assert same(checkpoints.at(2).tensors(), some_tensors(2))


def test_a_step_is_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(1, some_tensors(1), {})
    checkpoints.write(1, some_tensors(2), {})
    assert same(checkpoints.at(1).tensors(), some_tensors(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "model.safetensors": flip,
    "index.json": flip,
    "manifest.json": flip,
    "state.json": Path.unlink,
    "optimiser.safetensors": lambda path: os.truncate(path, path.stat().st_size - 4),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_one_is_told_of_and_the_one_before_is_used(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (100, 200):
        checkpoints.write(step, some_tensors(step), {"step": step})
    DAMAGE[name](tmp_path / "step-000200" / name)
    with caplog.at_level(logging.WARNING):
        found = checkpoints.latest()
    assert found is not None
    assert found.step == 100
    assert same(found.tensors(), some_tensors(100))
    (record,) = caplog.records
    assert "step-000200" in record.getMessage()
    assert name in record.getMessage()
    with pytest.raises(BadModelFile, match=name.replace(".", r"\.")):
        checkpoints.at(200)
    # the whole one is not the one that goes, however late the damaged one is
    checkpoints.prune()
    assert 100 in checkpoints.steps()
    checkpoints.write(200, some_tensors(3), {})
    checkpoints.prune()
    assert checkpoints.steps() == [200]
    assert same(checkpoints.at(200).tensors(), some_tensors(3))


def test_one_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (Checkpoints(tmp_path, keep=1).write(1, some_tensors(), {}) / "manifest.json").unlink()
    with pytest.raises(BadModelFile, match=r"no undamaged checkpoint: .*manifest\.json"):
        Checkpoints(tmp_path, keep=1).latest()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda index: index["tensors"]["model/askew"]["pieces"].clear(), "pieces of model/askew hold 0 of 24"),
        (lambda index: index["tensors"]["model/askew"]["pieces"][0].update(offset=[1, 0]), "not the index"),
        (lambda index: index["tied"].update({"model/x": "model/y"}), "tied to model/y, which is missing"),
        (lambda index: index["tensors"]["model/askew"].update(dtype="X7"), "not the index"),
        (lambda index: index.update(regard_checkpoint=2), "not the index"),
        (lambda index: index["tensors"]["model/askew"]["pieces"][0].update(file="../x"), "leads out of the directory"),
        (
            lambda index: index["tensors"]["model/askew"]["pieces"][0].update(file="ema.safetensors"),
            "is missing or damaged",
        ),
    ],
)
def test_an_index_that_lies(tmp_path: Path, change: Callable[[Any], None], told: str) -> None:
    found = Checkpoint(Checkpoints(tmp_path, keep=1).write(1, some_tensors(), {}))
    path = found.path / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(BadModelFile, match=told):
        found.tensors()


# ------------------------------------------------------------------------------------- a full disk


class FullFile(io.FileIO):
    """A file on a disk with ``room`` bytes left for all files together."""

    room = 0

    def write(self, content: Any) -> int:
        left = min(FullFile.room, len(memoryview(content).cast("B")))
        FullFile.room -= left
        if left < len(memoryview(content).cast("B")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def full_after(patch: pytest.MonkeyPatch, room: int) -> None:
    FullFile.room = room
    real = io.open

    def opened(path: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        return io.BufferedWriter(FullFile(path, mode)) if mode in ("wb", "xb") else real(path, mode, *args, **more)

    for place in (io, builtins):  # Path.write_bytes opens with the one, our atomic writes with the other
        patch.setattr(place, "open", opened)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99])
def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    path = checkpoints.write(100, some_tensors(1), STATE)
    before = everything(tmp_path)
    total = sum(file.stat().st_size for file in path.iterdir())
    for step in (100, 200):
        with monkeypatch.context() as patch:
            full_after(patch, int(share * total))
            with pytest.raises(RegardError) as caught:
                checkpoints.write(step, some_tensors(2), STATE)
        told = str(caught.value)
        assert f"step-{step:06} could not be written (No space left on device)" in told
        needed = sum(x.nbytes for name, x in some_tensors().items() if "head" not in name)  # tied, so stored once
        assert f"it needs {needed + len(before['checkpoints/step-000100/state.json']):,} bytes" in told
        assert "are free" in told
        assert everything(tmp_path) == before
        assert [path.name for path in checkpoints.root.iterdir()] == ["step-000100"]


def test_a_disk_that_is_full_only_when_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems take every write and say at fsync that there is no room; each fsync once."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.write(1, some_tensors(1), STATE)
    before = everything(tmp_path)
    real, n_calls = os.fsync, 0

    def counted(handle: int) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", counted)
    fails_at = 0
    checkpoints.write(1, some_tensors(1), STATE)
    total = n_calls
    assert total >= 8  # three files of tensors, index, state and manifest, the folder after each, the folder above
    for fails_at in range(1, total):  # noqa: B007 (counted reads it); the last, after the rename, is another matter
        n_calls = 0
        with pytest.raises(RegardError, match="No space left"):
            checkpoints.write(2, some_tensors(2), STATE)
        assert everything(tmp_path) == before


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel itself refuses files over 4 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_a_limit_of_the_kernel(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.write(1, some_tensors(1), STATE)
    before = everything(tmp_path)
    with pytest.raises(RegardError, match="File too large"):
        checkpoints.write(2, {"model/large": torch.zeros(5000)}, STATE)
    assert everything(tmp_path) == before


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegardError, match="could not be written"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1).write(1, {}, {})


# ------------------------------------------------------------------------------------- killed

# One process imports torch and forks the writers: 20 kills in seconds instead of a minute.
WRITER = """
import os, signal, sys, time
import torch
from regard.training.checkpoint import Checkpoints

def say(word, step):
    os.write(1, f"{word} {step}\\n".encode())  # in one piece, whenever the kill comes

def write():
    checkpoints = Checkpoints(sys.argv[1], keep=2)
    step = checkpoints.latest().step
    while True:
        step += 1
        tensors = {f"model/{i}": x.fill_(step).clone() for i in range(4)}
        say("began", step)
        os.write(began, b".")
        checkpoints.write(step, tensors, {"step": step})
        say("wrote", step)
        checkpoints.prune(best=1)

x = torch.empty(200_000)
for line in sys.stdin:
    read, began = os.pipe()
    writer = os.fork()
    if not writer:
        write()
    os.close(began)
    n_saves, times = float(line), []
    while len(times) < n_saves and os.read(read, 1):
        times.append(time.perf_counter())
    os.close(read)
    time.sleep(n_saves % 1 * (times[-1] - times[-2]))  # within a save, however long a busy machine takes for one
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    say("killed", 0)
"""


@pytest.fixture
def killed_writer(bash: Shell, tmp_path: Path) -> Iterator[Callable[[float], dict[str, int]]]:
    """Kill a writer of checkpoints after so many saves; the last step that it began, and wrote."""
    process = subprocess.Popen(
        [bash.python, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def run(n_saves: float) -> dict[str, int]:
        last: dict[str, int] = {}
        print(n_saves, file=process.stdin, flush=True)
        while "killed" not in last:
            word, step = process.stdout.readline().split()
            last[word] = int(step)
        return last

    yield run
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.mark.slow
def test_twenty_kills_while_saving(tmp_path: Path, killed_writer: Callable[[float], dict[str, int]]) -> None:
    chance = random.Random(4)
    before = 1
    Checkpoints(tmp_path, keep=2).write(1, {f"model/{i}": torch.ones(9) for i in range(4)}, {"step": 1})
    unfinished = 0
    for _ in range(20):
        last = killed_writer(chance.uniform(2, 12))
        unfinished += any(path.name.startswith(".") for path in tmp_path.iterdir())
        checkpoints = Checkpoints(tmp_path, keep=2)
        found = checkpoints.latest()
        assert found is not None
        # told of as written it is there; begun it may be, the rename done and the word not yet spoken
        assert found.step in (last.get("wrote", before), last.get("began", before))
        assert found.step >= before
        before = found.step
        tensors, state = found.tensors(), found.state
        assert state == {"step": found.step}
        assert all(x.eq(found.step).all() for x in tensors.values())
        assert {path.name for path in tmp_path.iterdir()} == {f"step-{step:06}" for step in checkpoints.steps()}
        assert all(checkpoints.at(step) for step in checkpoints.steps())
    assert before > 20
    assert unfinished > 3  # else the kills came between saves and showed nothing


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).write(1, some_tensors(), {})
    for name in (".step-000005.0a1b2c3d.saving", ".step-000007.0a1b2c3d.saving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    alive = acquire_lock(tmp_path / ".step-000007.0a1b2c3d.saving", wait=False)
    assert alive is not None
    Checkpoints(tmp_path, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", ".step-000007.0a1b2c3d.saving"}
    os.close(alive)
    Checkpoints(tmp_path, keep=1).write(2, some_tensors(), {})
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", "step-000002"}


def test_a_swap_in_two_steps_that_was_cut_off(tmp_path: Path) -> None:
    """Where two directories cannot change places in one step the old one waits as .previous."""
    path = Checkpoints(tmp_path, keep=1).write(1, some_tensors(), {})
    path.rename(tmp_path / ".step-000001.previous")
    found = Checkpoints(tmp_path, keep=1).latest()
    assert found is not None
    assert same(found.tensors(), some_tensors())
