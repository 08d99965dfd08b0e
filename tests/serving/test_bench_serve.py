"""`regard bench serve`: figures of a server under load, and what it says where there is none."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import simulated_gpu

from regard.cli import main
from regard.experiments.bench_serve import bench_serve, percentile, start_server
from regard.models import Model

from .served_api import ServedApi

Said = pytest.CaptureFixture[str]


def test_streams_and_searches_of_a_running_server(api: ServedApi, tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "prompts.txt").write_text("the cat\n\na dog ran\n", encoding="utf-8")
    words = ["bench", "serve", api.url, "--model", "speaker", "--clients", "1,4", "--requests", "6"]
    more = ["--max-tokens", "3", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out.json")]
    assert main([*words, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert [(x["clients"], x["requests"], x["errors"]) for x in found["results"]] == [(1, 6, {}), (4, 6, {})]
    for x in found["results"]:
        assert 0 < x["first_p50_s"] <= x["first_p99_s"]
        assert 0 < x["whole_p50_s"] <= x["whole_p99_s"]
        assert x["tokens_per_s"] == pytest.approx(3 * 6 / x["seconds"])
    few = ["--requests", "3", "--max-tokens", "3"]
    assert main(["bench", "serve", api.url, "--model", "translator", "--beams", "2", "--clients", "2", *few]) == 0
    said = capsys.readouterr().out
    assert "/v1/translate" in said
    assert "first p50, ms" in said


def test_clients_in_several_processes_are_counted_together(api: ServedApi) -> None:
    bench = bench_serve(api.url, model="speaker", clients=(1, 3), requests=7, max_tokens=2, processes=2)
    for n, result in zip((1, 3), bench.results, strict=True):
        assert (result.clients, result.requests, result.errors) == (n, 7, {})
        assert result.tokens_per_s == pytest.approx(7 * 2 / result.seconds)


def test_what_goes_wrong_is_counted_and_said(api: ServedApi, tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "prompts.txt").write_text(f"the cat\n{'the cat ' * 500}\n", encoding="utf-8")
    words = ["bench", "serve", api.url, "--model", "speaker", "--clients", "1", "--requests", "4", "--max-tokens", "2"]
    assert main([*words, "--prompts", str(tmp_path / "prompts.txt"), "--json"]) == 1
    (case,) = json.loads(capsys.readouterr().out)["results"]
    assert list(case["errors"].values()) == [2]
    assert next(iter(case["errors"])).startswith("400 ")
    assert main(["bench", "serve", api.url, "--model", "nobody"]) == 1
    assert "cannot serve these requests: 404 model 'nobody'" in capsys.readouterr().err
    assert main(["bench", "serve", "http://127.0.0.1:9"]) == 1
    assert "does not serve the API" in capsys.readouterr().err
    for address in ("http://127.0.0.1:99999", "http://[::1", "http://"):
        assert main(["bench", "serve", address]) == 1
        assert f"{address} is not the address of a server" in capsys.readouterr().err
    assert main(["bench", "serve", api.url, "--clients", "none"]) == 2


@pytest.mark.slow
def test_a_run_is_served_as_long_as_it_takes(models: dict[str, Model], tmp_path: Path, capsys: Said) -> None:
    path = models["speaker"].save(tmp_path / "speaker")
    assert main(["bench", "serve", str(path), "--clients", "2", "--requests", "2", "--max-tokens", "2"]) == 0
    assert "speaker at http://127.0.0.1:" in capsys.readouterr().out
    assert main(["bench", "serve", str(tmp_path / "none"), "--clients", "1"]) == 1
    assert "did not start" in capsys.readouterr().err


@pytest.mark.slow
def test_the_rest_of_a_server_with_a_simulated_gpu(models: dict[str, Model], tmp_path: Path) -> None:
    """The code that serves a GPU, for `benchmarks/serve.py host`: blocks, captured passes, and texts of any content."""
    path = models["speaker"].save(tmp_path / "speaker")
    with start_server(str(path), "cpu", simulated_gpu.PROGRAM) as url:
        (result,) = bench_serve(url, clients=(4,), requests=8, max_tokens=20).results
    assert result.errors == {}
    assert result.tokens_per_s * result.seconds == pytest.approx(8 * 20)
    assert result.whole_p50_s > 2 * simulated_gpu.BLOCK_SECONDS


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([1.0], 0.99) == 1
    assert [percentile(list(map(float, range(1, 101))), share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]


def test_a_server_that_says_much_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds after its address: it would wait for somebody to read."""
    done, program = tmp_path / "done", tmp_path / "python"
    script = f"""import pathlib, sys, time
print("at http://127.0.0.1:9/v1", file=sys.stderr, flush=True)
sys.stderr.write("x\\n" * 200_000)
pathlib.Path({str(done)!r}).touch()
time.sleep(600)
"""
    (tmp_path / "server.py").write_text(script, encoding="utf-8")
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'server.py'}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with start_server("run") as url:
        assert url == "http://127.0.0.1:9"
        end = time.monotonic() + 120
        while not done.exists():
            assert time.monotonic() < end
            time.sleep(0.1)
