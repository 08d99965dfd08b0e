"""One token's path through a model, with the numbers of a look: embedding, one head, one layer, prediction.

x = token + position,   s_j = q · k_j / √D,   a = softmax(s),   o = Σ_j a_j v_j,
x ← x + [o_1 … o_H] W_o,   x ← x + FFN(x)                                                 (Vaswani et al. 2017)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.mechanisms import Dot
from ..lens.activations import ActivationRecord, capture_inputs
from ..lens.capture import attention_name
from ..lens.effects import logit_lens
from ..lens.residual import Place, text_embeddings
from .circuit_queries import last_stack, layered_model, pass_inputs, prediction, probabilities
from .look_queries import HeadView, check_index, merged_view
from .requests import RequestRefused
from .sessions import LookSession

_KEYS = 10  # keys with the largest weights
_NUMBERS = 48  # leading numbers of a vector
_WORDS = 6  # likeliest predictions
_FF = {"ff": "ff.output", "neurons": "ff.neurons", "after": "output"}
_SELF = {"before": "input", "attention": "attention.output", "between": "after_attention"}
_STEPS = {  # sites of a block in which an attention of this kind is followed
    "encoder": _SELF | _FF,
    "self": _SELF | {"cross": "cross_attention.output"} | _FF,
    "cross": {"before": "after_attention", "attention": "cross_attention.output", "between": "after_cross_attention"}
    | _FF,
}


def tell_story(session: LookSession, at: HeadView, row: int) -> dict[str, Any]:
    """The story of one row in one head and one layer; vectors are cut to their first numbers, keys to the largest."""
    model, look, view = layered_model(session), session.look, merged_view(session, at)
    check_index("row", row, len(view.rows))
    if model.config.mixing.recurrent:
        raise RequestRefused(422, f"model {session.served.id!r} has state spaces in place of queries and keys")
    stack = "encoder" if at.kind == "encoder" else "decoder"
    attention, block = attention_name(at.kind, at.layer), f"{stack}.blocks.{at.layer}"
    names = [stack, f"{attention}.heads", *(f"{block}.{site}" for site in _STEPS[at.kind].values())]
    with session.model_changes():
        sites = [name for name in names if name in model.sites()]
        record = capture_inputs(model, pass_inputs(look), sites=sites, positions=[row], keep_calls=True)
    position = row if stack == last_stack(model) else _predicting_row(session)
    return {
        "embedding": _embedding(record, Place(stack, 0, row)),
        "head": _head(session, record, at, row),
        "block": _block(record, block, at.kind, row),
        "norm_place": model.config.norm_place,
        "layers": _layers(session, position),
        "position": position,
        "predictions": _predictions(session, position),
    }


def _numbers(x: Tensor) -> list[float]:
    return [round(value, 6) for value in x.flatten()[:_NUMBERS].tolist()]


def _predicting_row(session: LookSession) -> int:
    """The row whose prediction a story about the encoder ends with: the least certain one."""
    return int(session.look.uncertainty().argmax()) if session.served.can_generate else 0


def _embedding(record: ActivationRecord, place: Place) -> dict[str, Any]:
    """The stack's input at a position, and the vectors it is the sum of."""
    parts: dict[str, list[float]] = {}
    is_normed = False
    if (embeddings := text_embeddings(record, place)) is not None:
        module, vectors = embeddings
        parts = {name: _numbers(vector) for name, vector in vectors.items()}
        is_normed = module.norm is not None or module.projection is not None
    whole = record.at(place.stack, 0, place.position)
    return {"parts": parts, "sum": _numbers(whole), "width": len(whole), "normed": is_normed}


def _head(session: LookSession, record: ActivationRecord, at: HeadView, row: int) -> dict[str, Any]:
    look, head = session.look, at.head or 0
    call = record.call(layer=at.layer, kind=at.kind)
    weights = look.weights(layer=at.layer, head=head, kind=at.kind, rows=[row])[0]
    one_head = look.map(layer=at.layer, kind=at.kind).head(0, head)
    walk = one_head._walk
    with torch.no_grad():
        scores = walk.scores(slice(row, row + 1), slice(0, len(weights)), True)[0, 0, 0]
    sink = None if walk.scoring.sinks is None else float(one_head.sink_shares()[0, 0, row])
    hidden = scores == float("-inf")
    visible = weights.masked_fill(hidden, -1).topk(min(_KEYS, int((~hidden).sum()))).indices.tolist()
    cols = sorted([*visible, *hidden.nonzero().flatten()[:1].tolist()])  # with one masked key as an example
    group = head * call.k.shape[1] // call.q.shape[1]
    q, k, v = call.q[0, head, row], call.k[0, group, cols], call.v[0, group, cols]
    is_dot = isinstance(call.mechanism, Dot) and call.mechanism.kind == "dot"
    heads = record.at(f"{attention_name(at.kind, at.layer)}.heads", 0, row)  # (H, D)
    return {
        "q": _numbers(q),
        "width": len(q),
        "normaliser": call.mechanism.normaliser,
        "factor": call.mechanism.factor(len(q)) if is_dot else None,  # type: ignore[attr-defined]
        "keys": [
            {
                "index": col,
                "k": _numbers(k[n]),
                "v": _numbers(v[n]),
                "dot": float(q.double() @ k[n].double()) if is_dot else None,
                "score": float(scores[col]),
                "weight": float(weights[col]),
            }
            for n, col in enumerate(cols)
        ],
        "others": int((~hidden).sum()) - len(visible),
        "rest": max(0.0, float(weights.sum() - weights[cols].sum())),
        "sink": sink,
        "output": _numbers(heads[head]),
        "heads": [_numbers(each)[:16] for each in heads],
    }


def _block(record: ActivationRecord, block: str, kind: str, row: int) -> dict[str, Any]:
    """The residual stream around an attention and after its layer, and what is added to it in between."""
    activations = {
        name: record.at(f"{block}.{site}", 0, row) for name, site in _STEPS[kind].items() if f"{block}.{site}" in record
    }
    neurons = activations.pop("neurons", None)
    vectors = {name: _numbers(x) for name, x in activations.items()}
    return vectors | ({} if neurons is None else {"neurons": len(neurons), "active": int((neurons > 0).sum())})


def _layers(session: LookSession, position: int) -> list[dict[str, Any]]:
    """The prediction after each layer, as if it were the last one."""
    with session.model_changes():
        layers = logit_lens(session.look, position, 1)
    return [{"layer": x.layer, "text": x.best[0].text, "probability": x.best[0].probability} for x in layers]


def _predictions(session: LookSession, position: int) -> list[dict[str, Any]]:
    chances = probabilities(session.look, position)
    return [prediction(session.look, chances, n) for n in chances.topk(min(_WORDS, len(chances))).indices.tolist()]
