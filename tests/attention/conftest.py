"""For every attention test: the same random numbers each time, and a fresh compiler where one is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Graphs are counted from zero, and what was compiled before does not use up the compiler's patience."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
