"""What each stage of the demo computes: plain functions from a model to a document that fits into JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..data.corpora.enko import REGISTERS, AlignedPair, EnKo, lookup_accuracy, realise
from ..foundation.files import write_atomic
from ..foundation.jsonio import parse_json
from ..models import Model

SPLIT = "combinations"
"""Held out by what sentences are made of."""
N_LOOKUP, N_ALIGNED, N_SHAPES = 200, 40, 24
# Places in the held-out split. One sentence is said at every level of politeness, then some that differ otherwise.
_IN_EVERY_REGISTER, _OTHERS = 6, (1, 13, 20)
_LOOKED_AT = 6


def sentences() -> list[AlignedPair]:
    """What is translated, with the grammar's own answer."""
    corpus = EnKo()
    structure = corpus.example(SPLIT, _IN_EVERY_REGISTER).structure
    said = [realise({**structure, "register": register}) for register in REGISTERS]
    return [*said, *(corpus.example(SPLIT, place) for place in _OTHERS)]


def train(config: RunConfig, command: Sequence[str], style: Any) -> dict[str, Any]:
    """A new run, or the rest of one."""
    from ..training import resume
    from ..training import train as begin

    assert config.train.out is not None
    run = Path(config.train.out)
    found = resume(run, style=style) if (run / "run.json").is_file() else begin(config, style=style, command=command)
    return found.document()


def judge(run: Path, n: int) -> dict[str, Any]:
    """Exact match and BLEU on held-out combinations, beside a dictionary's."""
    from ..training import evaluate

    metrics = evaluate(run, split=SPLIT, limit=n, beam=1).metrics
    found: dict[str, Any] = {
        name: metrics[name] for name in ("exact", "bleu", "chrf", "bleu_signature") if name in metrics
    }
    return {"split": SPLIT, "n": n, **found, "lookup_exact": lookup_accuracy(SPLIT, min(n, N_LOOKUP))}


def translate(model: Model) -> dict[str, Any]:
    """A few sentences, and whether they are what the grammar says."""
    from ..generation import translate as run

    pairs = sentences()
    made = run(model, [pair.source for pair in pairs], beam=4)
    return {
        "sentences": [
            {"source": pair.source, "text": text, "wanted": pair.target, "right": text == pair.target}
            for pair, text in zip(pairs, made, strict=True)
        ]
    }


def align(model: Model, page: Path, language: str) -> dict[str, Any]:
    """Which layer's mean of heads aligns best, and the page of one sentence."""
    from ..lens import look
    from ..lens.head_scores import alignment_error
    from ..lens.render_html import page_html

    error = alignment_error(model, N_ALIGNED, SPLIT)
    layers = error["together"]["written"]
    layer = min(range(len(layers)), key=layers.__getitem__)
    pair = EnKo().example(SPLIT, _LOOKED_AT)
    own = look(model, pair.source)
    right = own.target_text == pair.target
    seen = own if right else look(model, pair.source, pair.target)
    write_atomic(page, page_html(seen, layer=layer, kind="cross", language=language).encode())
    return {
        **{"source": pair.source, "target": pair.target, "right": right},
        **{"layer": layer, "heads": seen.heads(kind="cross"), "n": error["n"], "error": layers[layer]},
        "diagonal": error["diagonal"],
    }


def export(model: Model, path: Path) -> dict[str, Any]:
    """ONNX with its certificate: fewer shapes than `regard export` takes, and without compiling, for time's sake."""
    from ..export import export as run

    run(model, "onnx", path, n_shapes=N_SHAPES, compiled=False)
    certificate = parse_json((path / "certificate.json").read_bytes(), path / "certificate.json")
    row = next(row for row in certificate["comparisons"] if row["name"].startswith("onnx"))
    return {name: row[name] for name in ("max_abs", "same_text")} | {"n": N_SHAPES, "passes": certificate["passes"]}
