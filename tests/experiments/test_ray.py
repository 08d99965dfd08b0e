"""A sweep on a Ray cluster of two nodes, both on this machine, comes to what it comes to here."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from generation.spoken import LINES, translator
from regard.cli import bulk_answers, main
from regard.errors import RegardError, UsageError
from regard.experiments.sweep_runner import JobFailed, RayRunner, open_runner
from trust.promises import Tally, size

from .ray_jobs import die, fail, node_and_process, wait_until_interrupted

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'regard[cluster]'")

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.slow
GRID = """
recipe = "en-ko"
seeds = 1
words = [
  "data.epoch_examples=200", "data.valid_rows=8", "data.tokenizer=chars", "data.max_len=64", "model.max_len=64",
  "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.d_ff=16", "train.optimiser=adam", "train.lr=1e-3",
  "train.steps=4", "train.batch_tokens=256", "train.eval_every=0", "train.save_every=0", "train.samples=0",
  "train.precision=fp32", "train.compile=off",
]
[grid]
"model.n_heads" = [1, 2]
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 lets workers starve on a busy machine
        nodes = Cluster(initialize_head=True, head_node_args=node)
        try:
            nodes.add_node(num_cpus=1, object_store_memory=80 << 20)
            nodes.wait_for_nodes()
            patch.setenv("RAY_ADDRESS", nodes.address)
            yield nodes.address
        finally:
            ray.shutdown()
            nodes.shutdown()


def table(out: Path) -> str:
    """The table without times, which no two machines share."""
    return re.sub(r"\d+ s \|", "s |", (out / "table.md").read_text("utf-8"))


def test_a_sweep_comes_to_the_same_on_ray_and_here(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    for place in ("local", "ray"):
        words = ["ablate", str(tmp_path / "grid.toml"), "--on", place, "--out", str(tmp_path / place), "--json"]
        assert main(words) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["finished"]
    assert not ray.is_initialized()  # who connected leaves
    assert table(tmp_path / "local") == table(tmp_path / "ray")
    results = sorted(file.relative_to(tmp_path / "ray") for file in (tmp_path / "ray").rglob("result.json"))
    assert len(results) == 2
    for file in results:
        here, there = (json.loads((tmp_path / place / file).read_bytes()) for place in ("local", "ray"))
        assert (here["metrics"], here["curve"]) == (there["metrics"], there["curve"])
    before = capsys.readouterr()
    assert main(["ablate", str(tmp_path / "ray"), "--on", "ray"]) == 0, before
    assert "2 of 2 runs are already done" in capsys.readouterr().err


def test_jobs_spread_over_nodes_each_in_a_process_of_its_own_and_fail_alone(cluster: str, tmp_path: Path) -> None:
    with RayRunner("ray") as runner:
        assert runner.workers == 2
        answers = [runner.submit(node_and_process, 1.0) for _ in range(3)]
        failures = runner.submit(die, None), runner.submit(fail, None)
        places = [answer.result() for answer in answers]
        assert len({node for node, _ in places}) == 2
        assert len(set(places)) == 3
        with pytest.raises(JobFailed, match="WorkerCrashedError"):
            failures[0].result()
        with pytest.raises(JobFailed, match="ValueError: length=0 is too short"):
            failures[1].result()
        with pytest.raises(JobFailed, match="longer than max_seconds=2"):
            runner.submit(node_and_process, 60.0, 2.0).result()
        file = tmp_path / "file"
        runner.submit(wait_until_interrupted, str(file))
        until = time.monotonic() + 300
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        runner.stop()
        while file.read_text() != "saved" and time.monotonic() < until:
            time.sleep(0.05)
        assert file.read_text() == "saved"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a worker: with more threads MKL adds up small products in another order."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.usefixtures("one_thread")
def test_a_file_is_answered_by_the_cluster_as_by_one_process(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = translator().save(tmp_path / "model")
    pq.write_table(pa.table({"en": [f"the cat {n}" if n % 7 else "" for n in range(60)]}), tmp_path / "in.parquet")
    monkeypatch.setattr(bulk_answers, "_LINES_AT_ONCE", 2)
    words = ["translate", str(model), "--file", str(tmp_path / "in.parquet"), "--max-new-tokens", "3", "--out"]
    for place in ("local", "ray"):
        assert main([*words, str(tmp_path / f"{place}.parquet"), "--on", place]) == 0, capsys.readouterr().err
    assert (tmp_path / "local.parquet").read_bytes() == (tmp_path / "ray.parquet").read_bytes()


PROGRAM = """
import sys
from regard.cli import bulk_answers, main
bulk_answers._LINES_AT_ONCE = int(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.promise(1, "lines translated on Ray, the job killed and started again, byte for byte those of one process")
def test_a_killed_job_goes_on_to_the_same_file(cluster: str, tmp_path: Path, tally: Tally) -> None:
    n_lines, at_once = size(320, 100_000), size(4, 512)
    model, words = translator().save(tmp_path / "model"), " ".join(LINES).split()
    draw = random.Random(20)
    lines = [" ".join(draw.choice(words) for _ in range(draw.randrange(1, 8))) for _ in range(n_lines)]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--file", str(tmp_path / "in.txt"), "--max-new-tokens", "12", "--beam", "1"]
    command = [sys.executable, "-c", PROGRAM, str(at_once), "translate", str(model), *options, "--out"]
    subprocess.run([*command, str(tmp_path / "one.txt")], check=True, capture_output=True)
    on_ray, partial = [*command, str(tmp_path / "ray.txt"), "--on", "ray"], tmp_path / "ray.txt.partial"
    with subprocess.Popen(on_ray, stderr=subprocess.DEVNULL) as killed:
        while killed.poll() is None and (not partial.exists() or partial.read_bytes().count(b"\n") < n_lines // 3):
            time.sleep(0.02)
        assert killed.poll() is None, "it ended before it could be killed"
        killed.kill()
    n_done = partial.read_bytes().count(b"\n")
    again = subprocess.run(on_ray, check=True, capture_output=True, text=True)
    assert "resuming after" in again.stderr
    written = [(tmp_path / f"{name}.txt").read_bytes().splitlines() for name in ("one", "ray")]
    assert len(written[0]) == len(written[1]) == n_lines
    tally.tried, tally.held = n_lines, sum(one == other for one, other in zip(*written, strict=True))
    tally.measured = f"killed after {n_done:,}"
    assert (tmp_path / "one.txt").read_bytes() == (tmp_path / "ray.txt").read_bytes()


@pytest.mark.filterwarnings("ignore:Ray Client connection timed out")
def test_a_place_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.client import worker

    with pytest.raises(UsageError, match="on=moon is not one of local, ray, ray://HOST:PORT"):
        open_runner("moon", 1, 1)
    for limit in ("INITIAL_TIMEOUT_SEC", "MAX_TIMEOUT_SEC"):
        monkeypatch.setattr(worker, limit, 0.2)
    with pytest.raises(RegardError, match="no Ray cluster answers"):
        RayRunner("ray://127.0.0.1:1")
