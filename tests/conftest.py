"""For every test: random numbers that are the same in every run, and no test marked ``gpu`` without a CUDA device."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import quick_runs  # noqa: F401  # makes them quick
from forked_shell import Shell, shell
from trust.promises import (  # noqa: F401
    IS_FULL,
    pytest_pyfunc_call,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    tally,
)

os.environ["REGARD_LANG"] = "en"  # whatever the developer reads
os.environ["XDG_STATE_HOME"] = os.devnull  # a developer's progress in the course is not ours to write
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun by a script with `&`: processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `make test` tries the same examples in every run, `make trust` new ones; a slow machine is no fault of an example.
settings.register_profile(
    "regard", derandomize=not IS_FULL, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("regard")


def seed_by(name: str) -> None:
    """Draw the same random numbers from here on in every run, whichever tests this process has run before."""
    seed = crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    seed_by(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed_by(item.nodeid)


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
