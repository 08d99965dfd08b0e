"""For every test: what is marked ``gpu`` is skipped, with its reason, on a machine without a CUDA device."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch

import quick_runs  # noqa: F401  # makes them quick
from forked_shell import Shell, shell
from trust.promises import pytest_pyfunc_call, pytest_runtest_makereport, pytest_terminal_summary, tally  # noqa: F401

os.environ["REGARD_LANG"] = "en"  # whatever the developer reads
os.environ["XDG_STATE_HOME"] = os.devnull  # a developer's progress in the course is not ours to write
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun by a script with `&`: processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell in which `regard` starts at once."""
    with shell(tmp_path_factory.mktemp("sh")) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end: the garbage collector need not walk them again and again."""
    gc.collect()
    gc.freeze()
