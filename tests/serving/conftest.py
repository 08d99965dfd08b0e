"""One server with small models for all tests of the API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from regard.models import Model

from .served_api import ServedApi, serving_api, small_models


@pytest.fixture(scope="session")
def models() -> dict[str, Model]:
    return small_models()


@pytest.fixture(scope="session")
def api(models: dict[str, Model]) -> Iterator[ServedApi]:
    with serving_api(models) as served:
        yield served
