"""`regard serve` as a process: it says where it is, answers, and ends when it is told to."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from forked_shell import Shell
from generation.spoken import language_model, translator
from regard import cli
from trust.promises import IS_FULL, size

SRC = Path(__file__).resolve().parents[2] / "src"
REGARD = (sys.executable, "-m", "regard")
SECONDS = 10 if IS_FULL else 30  # in which it ends; other tests run beside the short version


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("served")
    endless = language_model(max_len=4096, eos_id=None)
    return [endless.save(place / "speaker"), translator().save(place / "translator")]


@contextmanager
def serving(*words: Any, regard: tuple[str, ...] = REGARD) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address."""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [*regard, "serve", *map(str, words), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.fullmatch(r"regard: (http://127\.0\.0\.1:\d+/) \(press Ctrl-C to stop\)\n", said)
        assert found, said
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def fetched(url: str, body: dict[str, Any] | None = None, seconds: float = 60) -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.load(answer)


def addresses(process: subprocess.Popen[str], url: str) -> list[str]:
    """Where the port of this server is listened to."""
    port = int(url.rsplit(":", 1)[1].strip("/"))
    listening = Path(f"/proc/{process.pid}/net/tcp")
    if not listening.exists():
        pytest.fail("this test reads /proc/PID/net/tcp")
    states = [line.split() for line in listening.read_text().splitlines()[1:]]
    return [
        fields[1].partition(":")[0] for fields in states if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_answers_and_leaves_when_it_is_told(
    folders: list[Path], number: signal.Signals, code: int, bash: Shell
) -> None:
    regard = {"regard": (bash.regard,)} if number == signal.SIGINT else {}  # once as people start it
    with serving(*folders, **regard) as (process, url):
        assert addresses(process, url) == ["0100007F"], "only this machine is listened to"
        assert [each["id"] for each in fetched(f"{url}api/models")] == ["speaker", "translator"]
        sent = fetched(f"{url}api/looks", {"model": "translator", "text": "the cat sat"})
        assert list(sent["kinds"]) == ["encoder", "self", "cross"]
        process.send_signal(number)
        assert process.wait(SECONDS) == code
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.promise(6, "SIGTERM under load: ended within 10 s")
@pytest.mark.parametrize("number", range(size(1, 10)))
def test_it_leaves_in_the_middle_of_work(folders: list[Path], number: int, bash: Shell) -> None:
    with serving(folders[0], regard=(bash.regard,)) as (process, url):
        body = {"model": "speaker", "text": "the cat " * 20, "generate": {"beam": 16, "max_new_tokens": 1024}}

        def ask() -> None:
            with suppress(OSError):  # it is cut off, as it should be
                fetched(f"{url}api/looks", body)

        # Each takes about a second, one after the other: to answer all of them would take longer than ``SECONDS``.
        asking = [threading.Thread(target=ask) for _ in range(4 * SECONDS)]
        for thread in asking:
            thread.start()
        time.sleep(1.0 + 0.3 * number)
        process.terminate()
        assert process.wait(SECONDS) == 143
        for thread in asking:
            thread.join()


def test_what_is_wrong_is_said_before_anything_is_served(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", str(folders[0]), "--port", port, "--no-open"]) == 1
        assert f"cannot listen on port {port} of 127.0.0.1" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path / "nothing"), "--port", "0", "--no-open"]) == 3
    assert "nothing" in capsys.readouterr().err
    assert cli.main(["serve"]) == 2
    assert cli.main(["serve", str(folders[0]), "--port", "70000"]) == 2
    assert cli.main(["serve", str(folders[0]), "--port", "0", "--device", "abacus"]) == 2
