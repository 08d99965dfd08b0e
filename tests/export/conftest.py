"""For every export: torch's table of ONNX operations, which takes most of a second to make, is made once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_operations() -> Iterator[None]:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    made = functools.cache(ONNXRegistry.from_torchlib)

    def fresh(**options: int) -> ONNXRegistry:
        registry = copy.copy(made(**options))
        registry.functions = {operation: list(known) for operation, known in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(fresh))
        yield
