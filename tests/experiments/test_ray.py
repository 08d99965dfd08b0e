"""A sweep on a Ray cluster of two nodes, both on this machine, comes to what it comes to here."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.cli import main
from regard.errors import RegardError, UsageError
from regard.experiments.sweep_runner import JobFailed, RayRunner, open_runner

from .ray_jobs import die, fail, node_and_process, wait_until_interrupted

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'regard[cluster]'")

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
    assert "2 of 2 runs are done already" in capsys.readouterr().err


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
        until = time.monotonic() + 60
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        runner.stop()
        while file.read_text() != "saved" and time.monotonic() < until:
            time.sleep(0.05)
        assert file.read_text() == "saved"


@pytest.mark.filterwarnings("ignore:Ray Client connection timed out")
def test_a_place_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.client import worker

    with pytest.raises(UsageError, match="on=moon is none of local, ray, ray://HOST:PORT"):
        open_runner("moon", 1, 1)
    for limit in ("INITIAL_TIMEOUT_SEC", "MAX_TIMEOUT_SEC"):
        monkeypatch.setattr(worker, limit, 0.2)
    with pytest.raises(RegardError, match="no Ray cluster answers"):
        RayRunner("ray://127.0.0.1:1")
