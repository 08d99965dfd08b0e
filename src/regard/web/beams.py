"""A beam search as a tree: the texts it found, joined where they begin alike, each step with its log probability."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..generation.generate import Generated, Hypothesis, at_rest
from ..lens.labels import token_text
from ..models import Decoder, Model
from ..models.translating import SourceToTarget
from .sessions import Session


def tree(session: Session, made: Generated) -> dict[str, Any]:
    """Nodes with their parents; ``score`` is Σ log P of the tokens so far, ``final`` a whole text's score by length."""
    model, processor = session.served.model, session.served.model.processor
    tokenizer = None if processor is None else processor.target or processor.source
    with at_rest(model), session.under():
        scored = [_scores(model, session.look.inputs, made.prompts[0], found) for found in made.hypotheses[0]]
    nodes: list[dict[str, Any]] = [{"id": 0, "parent": None, "text": "", "score": 0.0, "best": True}]
    below: dict[tuple[int, int], int] = {}  # (node, token) → the node it leads to
    for rank, found in enumerate(made.hypotheses[0]):
        here = 0
        for token, score in zip(found.tokens, scored[rank], strict=True):
            if (here, token) not in below:
                below[here, token] = len(nodes)
                text = token_text(token, tokenizer, model.config)
                nodes.append({"id": len(nodes), "parent": here, "text": text, "score": score, "best": rank == 0})
            here = below[here, token]
        nodes[here] |= {"final": found.score, "rank": rank}
    return {"nodes": nodes}


def _scores(model: Model, inputs: tuple[Tensor, ...], prompt: list[int], found: Hypothesis) -> list[float]:
    """log P of a text after each of its tokens, by the model alone: one pass over the whole of it."""
    tokens, n_new = torch.tensor([[*prompt, *found.tokens]], device=model.device), len(found.tokens)
    if isinstance(model, Decoder):
        states, table = model.hidden(tokens[:, :-1]), model.token.weight
    else:
        assert isinstance(model, SourceToTarget)
        states, table = model.hidden(inputs[0], tokens[:, :-1]), model.output_table
    assert model.head is not None
    logits = model.head(states[:, -n_new:], table)[0].float()  # only where a token was chosen
    chosen = logits.log_softmax(-1).gather(-1, tokens[0, -n_new:, None])[:, 0]
    total: list[float] = chosen.double().cumsum(0).tolist()
    return total
