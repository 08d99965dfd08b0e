"""A shell in which `regard` starts at once: a process that has imported everything forks for each command.

The commands of the documents run in a real bash, with its globs, pipes and loops. On the PATH stands a client named
`regard`; it hands its words, its folder and its three streams to the process that waits, and ends as the fork ends.
Where the client is killed, the fork and all that it started are killed too. Tests that need a process of their own, but
not its start, call the client by its path; `forked-python -c SCRIPT` runs a script the same way.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_START = 300  # seconds in which everything must be imported, on a busy machine
_END = 120  # seconds in which what was killed must be gone
# -S -E: the client needs the standard library alone, and starts in a fiftieth of a second.
_CLIENT = """#!{python} -SE
import array, json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
said = json.dumps({{"words": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ)}}).encode()
link.sendmsg([len(said).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
link.sendall(said)
process = int.from_bytes(link.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(process, number))
answer = link.recv(1)
sys.exit(answer[0] if answer else 1)  # nothing: the process that waits is gone
"""
# Imported once: what the commands of the documents need, heavy things first. Nothing here may start a thread.
_WARM = (
    *("torch", "torch._dynamo", "torch.onnx", "torch.utils.tensorboard", "matplotlib.pyplot", "sacrebleu", "rich.live"),
    *("onnx", "onnxscript", "onnxruntime", "transformers", "fastapi", "uvicorn", "PIL.Image", "tokenizers"),
    *("regard.cli", "regard.io", "regard.training.trainer", "regard.training.evaluation", "regard.lens.look"),
    *("regard.lens.render_html", "regard.lens.head_scores", "regard.export.export_model", "regard.export.engines"),
    *("quick_runs", "regard.web.server", "regard.data.describe", "regard.experiments.bench_attention"),
)


@dataclass(frozen=True)
class Shell:
    """Where commands are run."""

    path: Path

    @property
    def regard(self) -> str:
        """In place of `python -m regard`."""
        return str(self.path / "regard")

    @property
    def python(self) -> str:
        """In place of `python`, for `-c SCRIPT` alone."""
        return str(self.path / "forked-python")

    def environment(self) -> dict[str, str]:
        quiet = {"COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "REGARD_DEBUG": "1"}
        path = os.pathsep.join([str(self.path), str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, **quiet, "PATH": path}

    def run(self, command: str, folder: Path, seconds: float = 400) -> subprocess.CompletedProcess[str]:
        """One command, or several lines of them, as typed into bash; the first that fails ends it.

        After so many seconds everything that it started is killed, and TimeoutExpired raised.
        """
        words = ["bash", "-euo", "pipefail", "-c", command]
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:  # Ctrl-C too: it does not reach a session of its own
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=_END)  # its pipes close when the last one that writes is gone
            raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def start(self, words: list[str], folder: Path, exported: list[str]) -> subprocess.Popen[str]:
        """A command that does not end by itself."""
        named = dict(shlex.split(line)[1].split("=", 1) for line in exported)
        return subprocess.Popen(
            [self.regard, *words],
            cwd=folder,
            env={**self.environment(), **named},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextlib.contextmanager
def shell(folder: Path) -> Iterator[Shell]:
    """The process that waits, for as long as the block lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = str(folder / "s")
    if len(path) > 100:  # what a socket's name may have
        raise ValueError(f"the folder's name is too long for a socket: {path}")
    for name in ("regard", "forked-python"):
        client = folder / name
        client.write_text(_CLIENT.format(python=sys.executable, path=path), encoding="utf-8")
        client.chmod(0o755)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    }
    # -P: what lies beside this file is not to be imported for something else of the same name.
    waiting = subprocess.Popen([sys.executable, "-P", __file__, path], env=environment)
    try:
        last = time.monotonic() + _START
        while not os.path.exists(path):
            if waiting.poll() is not None:
                raise RuntimeError(f"the waiting process ended with {waiting.returncode}")
            if time.monotonic() > last:
                raise TimeoutError(f"the waiting process has not imported everything within {_START} s")
            time.sleep(0.02)
        yield Shell(folder)
    finally:
        waiting.kill()  # it holds nothing that would have to be put away
        waiting.wait()


# ------------------------------------------------------------------------------------- in the process that waits


def _serve(path: str) -> None:
    import importlib

    for name in _WARM:
        importlib.import_module(name)
    importlib.import_module("regard.cli").build_commands("en")
    _start_forks_of_sweeps()
    link = socket.socket(socket.AF_UNIX)
    link.bind(f"{path}.new")
    link.listen()
    os.rename(f"{path}.new", path)  # there once it can answer
    while True:
        connection, _ = link.accept()
        if os.fork() == 0:
            link.close()
            _answer(connection)
        connection.close()
        _bury()


def _start_forks_of_sweeps() -> None:
    """One process from which the runs of all sweeps are forked: each `regard ablate` would import torch for its own."""
    from multiprocessing import forkserver

    from regard.experiments import sweep_runner

    server = forkserver._forkserver  # type: ignore[attr-defined]
    server.set_forkserver_preload([*sweep_runner._PRELOAD, "quick_runs"])
    with sweep_runner._child_environment():
        server.ensure_running()
    server.ensure_running = lambda: None  # it is the child of this process alone, which is not asked for it again


def _bury() -> None:
    """Ask for those that have ended, so that none of them stays behind and their time is counted."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(connection: socket.socket) -> None:
    """In the first fork: a second one becomes the command, this one tells how it ended."""
    head, ancillary, *_ = connection.recvmsg(4, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i")
    streams.frombytes(ancillary[0][2])
    said = b""
    while len(said) < int.from_bytes(head, "big"):
        said += connection.recv(1 << 16)
    process = os.fork()
    if process == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _become(json.loads(said))
    for stream in streams:
        os.close(stream)
    connection.sendall(process.to_bytes(4, "big"))
    threading.Thread(target=_follow, args=(connection, process), daemon=True).start()
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(BrokenPipeError):  # killed with its client
        connection.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _follow(connection: socket.socket, process: int) -> None:
    """A client says nothing more: what can be read is that it is gone. Then its command goes, with all it started."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    for kill in (os.killpg, os.kill):  # the second where it has not become the head of a group yet
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)


def _become(asked: dict[str, Any]) -> None:
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    line_by_line = 1 if "PYTHONUNBUFFERED" in os.environ else -1
    sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", line_by_line, encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    code = 1
    try:
        code = _run(*asked["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(program: str, *words: str) -> int:
    if program.endswith("regard"):
        from regard.cli import main

        return main(words)
    _, script, *rest = words  # -c SCRIPT
    sys.argv[:], sys.path[:0] = ["-c", *rest], [""]
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1])
