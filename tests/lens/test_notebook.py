"""Every result of the lens shows itself in a notebook as HTML that is well formed and needs no script."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

from models.small import inputs_of, small
from regard.lens.activations import capture
from regard.lens.circuit import Circuit
from regard.lens.contributions import token_contributions
from regard.lens.head_history import HeadHistory
from regard.lens.head_roles import head_roles
from regard.lens.head_weights import qk_circuit
from regard.lens.notebook import table_html
from regard.lens.patching import PatchingResult
from regard.lens.residual_graph import Edge
from regard.lens.tuned_lens import TunedLensReport, layer_logits


class Balanced(HTMLParser):
    """Raises where tags do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    model = small("gpt2")
    record = capture(model, *inputs_of(model.config))
    effects = torch.tensor([[0.5, -0.25], [0.0, 1.0]])
    scores = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(0))
    return {
        "record": record,
        "attribution": record.logit_attribution(5),
        "why": record.why(layer=1, head=0, row=3, col=1),
        "sweep": PatchingResult(effects, ("layer", "position"), 1.0, 0.0),
        "by head and position": PatchingResult(effects[None], ("layer", "head", "position"), 1.0, 0.0),
        "circuit": Circuit({Edge("embedding", "self.0.1.k"): 0.5, Edge("self.0.1", "logits"): 0.4}, 50, 0.9, 0.8, 0.1),
        "history": HeadHistory("self", [1, 2, 3], {"induction": scores}, [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]),
        "roles": head_roles(model),
        "contributions": token_contributions(record),
        "lens": layer_logits(record),
        "tuned lens": TunedLensReport(None, [1.0, 0.5], [0.5, 0.25]),  # type: ignore[arg-type]
        "weights": qk_circuit(model, 0, 1),
    }


def test_every_result_shows_itself(results: dict[str, Any]) -> None:
    for name, result in results.items():
        page = result._repr_html_()
        parser = Balanced()
        parser.feed(page)
        assert not parser.open, name
        assert "script" not in parser.seen, name
        assert {"table", "svg"} & parser.seen, name
        assert len(page) > 100, name


def test_what_is_not_a_number_has_no_bar() -> None:
    table = table_html(("role", "score"), [("inhibition", math.nan), ("sink", 0.5)])
    assert "nan%" not in table
    assert "rgba(22,104,220,.25) 100%" in table


def test_names_are_escaped() -> None:
    odd = PatchingResult(torch.ones(1, 1), ("<b>", "x"), 1.0, 0.0)
    assert "&lt;b&gt; 0" in odd._repr_html_()
    assert "<b>" not in odd._repr_html_()
