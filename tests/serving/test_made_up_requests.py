"""Requests made up by a machine from the API's own description: whatever they are, no answer is a failure."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from regard.serving.app import new_application
from regard.web.requests import Limits
from trust.promises import Tally, size

from .served_api import ServedApi

SCHEMA = schemathesis.openapi.from_dict(new_application({}, Limits()).openapi())
MODELS = ("speaker", "chatty", "translator", "captioner", "classifier", "encoder")


def nearer(case: Any) -> None:
    """Most of what is made up is refused at the door; in three of four cases, let it name what is there."""
    seed = sum(map(ord, repr((case.path_parameters, case.body))))
    if seed % 4 == 0 or not isinstance(case.body, dict):
        return
    case.body["model"] = MODELS[seed % len(MODELS)]
    if "max_tokens" in case.body:
        case.body["max_tokens"] = 1 + seed % 5
    for name in ("prompt", "text", "input"):
        if name in case.body and seed % 4 > 1:
            case.body[name] = "the cat sat"


@pytest.mark.slow
@pytest.mark.promise(6, "the API: requests made up from the OpenAPI document, no server error")
@SCHEMA.parametrize()
@settings(max_examples=size(4, 3000), deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_no_request_breaks_the_api(case: Any, api: ServedApi, tally: Tally) -> None:
    tally.tried += 1
    nearer(case)
    answer = case.call(base_url=api.url, timeout=60)
    case.validate_response(answer, checks=[not_a_server_error, status_code_conformance])
    tally.held += 1
