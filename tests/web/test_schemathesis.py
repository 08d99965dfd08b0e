"""Questions made up by a machine from the server's own description: whatever they are, no answer is a failure."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from starlette.testclient import TestClient

from generation.spoken import captioner, language_model, translator
from regard.web import explorer
from trust.promises import Tally, size

from .served import HOME, opened

APP = explorer({"speaker": language_model(), "translator": translator(), "captioner": captioner()})
SCHEMA = schemathesis.openapi.from_asgi("/api/openapi.json", APP, headers={"Host": "127.0.0.1"})
# Looks that exist: with made-up ids every answer would be the same 404.
LOOKS: list[str] = []


@pytest.fixture(autouse=True)
def looks() -> None:
    """Open them again for each endpoint: one that opens thousands of looks drives out all others."""
    search = {"beam": 3, "max_new_tokens": 5}
    asked = (("speaker", {}), ("translator", {"generate": search}), ("captioner", {}))
    with TestClient(APP, base_url=HOME) as client:
        LOOKS[:] = [opened(client, name, **fields)["id"] for name, fields in asked]
    APP.app.state.explorer.workers.open()  # type: ignore[attr-defined]  # which the end of that client has closed


def nearer(case: Any) -> None:
    """Most of what is made up is refused at the door; in three of four cases, let it name what is there."""
    seed = sum(map(ord, repr((case.path_parameters, case.query, case.body))))
    if seed % 4 == 0:
        return
    if "look_id" in case.path_parameters:
        case.path_parameters["look_id"] = LOOKS[seed % 3]
    for name, value in (case.query or {}).items():
        if name == "kind":
            case.query[name] = "self"
        elif isinstance(value, int) and name in ("layer", "head", "row", "col", "r0", "c0", "start"):
            case.query[name] = value % 4
        elif isinstance(value, int) and name in ("r1", "c1", "stop"):
            case.query[name] = 4 + value % 4
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = ["speaker", "translator", "captioner"][seed % 3]


@pytest.mark.slow
@pytest.mark.promise(6, "questions made up from the OpenAPI document, no server error")
@SCHEMA.parametrize()
@settings(max_examples=size(16, 5000), deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_no_question_breaks_the_server(case: Any, tally: Tally) -> None:
    tally.tried += 1
    nearer(case)
    answer = case.call(base_url=HOME)
    assert len(answer.content) <= 1_000_000
    case.validate_response(answer, checks=[not_a_server_error, status_code_conformance, content_type_conformance])
    tally.held += 1
