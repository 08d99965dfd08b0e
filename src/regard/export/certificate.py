"""The certificate: that what was exported computes what the model computes, in numbers, on random shapes and on a file.

The measure is the formula itself: the model with attention computed step by step, "eager". Against it stand the fused
kernels, the cache, the compiled graph, the directory read back, and each engine in it. Where logits cannot be had, log
probabilities of given tokens are compared. Nothing in the document depends on when or where it was made.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..attention import MultiHeadAttention
from ..errors import RegardError
from ..generation import GenerateConfig
from ..models import Model
from .engines import Ct2Engine, Engine, TorchEngine, engines_in, open_engine, open_model
from .parity_cases import ParityCase, check_file, make_cases, task_name
from .quantise import is_quantised

NAME = "certificate.json"
_NEW_TOKENS = 16
_AT_ONCE = 32


@dataclass(frozen=True)
class Bounds:
    """What an exported model may differ by. None: it is stated, whatever it is."""

    max_abs: float | None = 1e-4
    """Largest difference of a logit, or of a token's log probability; not asked of int8."""
    same_text: float | None = 0.99
    """Least share of greedy texts that are the same, token for token; not asked of int8."""
    delta: float | None = 0.2
    """Largest loss of the metric on a given file, in its points (BLEU, accuracy in percent, perplexity); int8 too."""

    def __post_init__(self) -> None:
        for name in ("max_abs", "same_text", "delta"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")

    def rounding(self) -> Bounds:
        """The same for int8: how far its logits are is a number to know, how good its texts are is to be kept."""
        return replace(self, max_abs=None, same_text=None)

    def document(self) -> dict[str, float | None]:
        return {"max_abs": self.max_abs, "same_text": self.same_text, "delta": self.delta}


class Opened(NamedTuple):
    """An engine by the name it has in the document, and what is asked of it."""

    name: str
    engine: Engine
    bounds: Bounds


class BoundBroken(RegardError):
    """What was exported is farther from the model than it may be; ``document`` is the certificate it did not get."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        super().__init__("; ".join(faults(document)))


def certify(
    model: Model,
    exported: str | Path,
    *,
    n_shapes: int = 200,
    seed: int = 0,
    check: str | Path | None = None,
    bounds: Bounds | None = None,
    compiled: bool = True,
    beam: int = 4,
) -> dict[str, Any]:
    """Compare a float32 model on the CPU with everything in an exported directory.

    check     a file of pairs, texts or labelled texts, on which the metric of the task is compared too
    compiled  whether torch.compile is among what is compared; it takes some of a minute
    """
    if n_shapes < 1:
        raise ValueError(f"n_shapes={n_shapes} must be at least 1")
    bounds, root = bounds or Bounds(), Path(exported)
    cases = make_cases(model.config, n_shapes, seed)
    with _still(model), torch.no_grad():
        measure = _measure(model, cases)
        comparisons = _own_paths(model, cases, measure, bounds, compiled)
        opened = _opened(root, bounds)
        comparisons += _engines(model, opened, cases, measure)
        file = None
        if check is not None:
            held = [(one.name, one.engine, one.bounds.delta) for one in opened]
            file = check_file(TorchEngine(model), held, Path(check), beam)
    document: dict[str, Any] = {
        "task": task_name(model.config),
        "parameters": model.n_parameters,
        "shapes": {"count": n_shapes, "seed": seed, "most": ParityCase.most(cases)},
        "bounds": bounds.document(),
        "comparisons": comparisons,
        "file": file,
    }
    return {**document, "passes": not faults(document)}


def faults(document: Mapping[str, Any]) -> list[str]:
    """Every bound that is broken, in words."""
    found = []
    for row in document["comparisons"]:
        for name, bound in row.get("bounds", {}).items():
            value = row.get(name)
            if bound is None or value is None:
                continue
            if value > bound if name == "max_abs" else value < bound:
                relation = "more than" if name == "max_abs" else "less than"
                found.append(f"{row['name']}: {name}={value:g} is {relation} the bound {bound:g}")
    file = document.get("file") or {}
    for row in file.get("engines", []):
        if row.get("worse_by") is not None and row.get("bound") is not None and row["worse_by"] > row["bound"]:
            found.append(
                f"{row['name']}: {file['metric']} is worse by {row['worse_by']:g}, more than the bound {row['bound']:g}"
            )
    return found


def certificate_text(document: Mapping[str, Any]) -> str:
    """The certificate for people."""
    shapes = document["shapes"]
    lines = [
        f"{document['task']}, {document['parameters']:,} parameters, "
        f"{shapes['count']} random shapes (seed {shapes['seed']}), measured against the formula",
        f"{'':18}{'max |difference|':>18}{'same text':>12}   of",
    ]
    for row in document["comparisons"]:
        if "skipped" in row:
            lines.append(f"{row['name']:18}not compared: {row['skipped']}")
            continue
        number = "—" if row["max_abs"] is None else f"{row['max_abs']:.3g}"
        text = "—" if row["same_text"] is None else f"{100 * row['same_text']:.1f} %"
        lines.append(f"{row['name']:18}{number:>18}{text:>12}   {row['of']}")
    if document.get("file"):
        file = document["file"]
        lines.append(f"{file['file']}, {file['n']:,} examples: {file['metric']} {file['value']:.2f} in torch, float32")
        for row in file["engines"]:
            if "skipped" in row:
                lines.append(f"{row['name']:18}not compared: {row['skipped']}")
                continue
            text = "" if row["same_text"] is None else f", {100 * row['same_text']:.1f} % of the texts the same"
            lines.append(f"{row['name']:18}{row['value']:.2f}, {row['value'] - file['value']:+.2f}{text}")
    broken = faults(document)
    lines += [f"broken: {fault}" for fault in broken] or ["every bound holds"]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- ways to compute


Compute = Callable[[Model, ParityCase], Tensor]


def plain(model: Model, case: ParityCase) -> Tensor:
    """Logits of every real place, all rows one after the other (N, V); class logits (B, C)."""
    if case.target is None:
        options = {} if case.padding_mask is None else {"padding_mask": case.padding_mask}
        return case.real(model(case.source, **options))
    return case.real(model(case.source, case.target, source_padding_mask=case.padding_mask))


def cached(model: Model, case: ParityCase) -> Tensor:
    """The same token by token through the cache, after a prompt of one token."""
    cache = model.new_cache()
    if model.is_decoder_only:
        tokens = case.source
        out = [model(tokens[:, at : at + 1], cache=cache) for at in range(tokens.shape[1])]
        return case.real(torch.cat(out, 1))
    assert case.target is not None
    memory = model.encode(case.source, padding_mask=case.padding_mask)
    steps = [model.decode(case.target[:, at : at + 1], memory, cache=cache) for at in range(case.target.shape[1])]
    states = torch.cat(steps, 1)
    return case.real(states if model.head is None else model.head(states, model.output_table))


@contextmanager
def formula(model: Model) -> Iterator[None]:
    """Attention computed step by step, as it is written, in every layer."""
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    before = [layer.backend for layer in layers]
    for layer in layers:
        layer.backend = "reference"
    try:
        yield
    finally:
        for layer, backend in zip(layers, before, strict=True):
            layer.backend = backend


def _measure(model: Model, cases: list[ParityCase]) -> list[Tensor]:
    with formula(model):
        return [plain(model, case) for case in cases]


def _own_paths(
    model: Model, cases: list[ParityCase], measure: list[Tensor], bounds: Bounds, compiled: bool
) -> list[dict[str, Any]]:
    """Fused, cached, compiled: the ways this very model can be run."""
    has_attention = any(isinstance(module, MultiHeadAttention) for module in model.modules())
    rows = [
        _row("fused", plain, model, cases, measure, bounds)
        if has_attention
        else _skipped("fused", "the model has no attention layer with a choice of kernels")
    ]
    if model.is_encoder_only:
        rows.append(_skipped("cached", "an encoder reads everything at once"))
    elif not model.config.mixing.by_token or not model.config.causal:
        rows.append(_skipped("cached", "every token sees those after it, so there is nothing to keep"))
    else:
        rows.append(_row("cached", cached, model, cases, measure, bounds))
    rows.append(_compiled(model, cases, measure, bounds) if compiled else _skipped("compiled", "not asked for"))
    return rows


def _compiled(model: Model, cases: list[ParityCase], measure: list[Tensor], bounds: Bounds) -> dict[str, Any]:
    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        return _skipped("compiled", "this machine has no C++ compiler for torch.compile")
    torch.compiler.reset()
    graph = torch.compile(model, dynamic=True, fullgraph=True)

    def run(_: Model, case: ParityCase) -> Tensor:
        return plain(cast(Model, graph), case)  # torch.compile returns a function of the same call

    # Every size of one is a graph of its own, and some of a minute to compile; one graph serves all other sizes.
    pairs = [pair for pair in zip(cases, measure, strict=True) if not pair[0].has_size_one]
    if not pairs:
        return _skipped("compiled", "every random shape has a size of one, which is a graph of its own")
    try:
        return _row("compiled", run, model, [case for case, _ in pairs], [wanted for _, wanted in pairs], bounds)
    except Exception as error:  # whatever a compiler raises is its own; it says nothing about the export
        return _skipped("compiled", f"torch.compile failed: {type(error).__name__}")
    finally:
        torch.compiler.reset()


def _row(
    name: str, run: Compute, model: Model, cases: list[ParityCase], measure: list[Tensor], bounds: Bounds
) -> dict[str, Any]:
    worst = max(_distance(run(model, case), wanted) for case, wanted in zip(cases, measure, strict=True))
    return _result(name, len(cases), worst, None, bounds, "logits")


def _result(
    name: str, n_shapes: int, worst: float | None, same: float | None, bounds: Bounds, of: str
) -> dict[str, Any]:
    held = {"max_abs": bounds.max_abs, "same_text": bounds.same_text}
    return {"name": name, "shapes": n_shapes, "max_abs": _digits(worst), "same_text": same, "of": of, "bounds": held}


def _skipped(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "skipped": reason}


def _distance(one: Tensor, other: Tensor) -> float:
    """Largest difference; what is not a number is as far as can be."""
    gap = (one.float() - other.float()).abs().nan_to_num(nan=torch.finfo(torch.float32).max).amax().item()
    return min(gap, torch.finfo(torch.float32).max)


def _digits(value: float | None) -> float | None:
    """Three digits: more would be a different document on another processor."""
    return None if value is None else float(f"{value:.3g}")


# ------------------------------------------------------------------------------------------------- what was exported


def _opened(root: Path, bounds: Bounds) -> list[Opened]:
    """Every engine of a directory, and CTranslate2 once more as it rounds when it is asked to, which is only stated."""
    held: list[Opened] = []
    for name in engines_in(root):
        rounds = name == "torch" and is_quantised(root)
        called = "int8" if rounds else "read back" if name == "torch" else name
        # Weights are compared as they were written; in what precision someone computes with them later is theirs.
        engine = TorchEngine(open_model(root).float()) if name == "torch" else open_engine(root, name)
        held.append(Opened(called, engine, bounds.rounding() if rounds else bounds))
        if name == "ctranslate2":
            rounding = open_engine(root, name, compute_type="int8")
            held.append(Opened("ctranslate2 int8", rounding, Bounds(None, None, None)))
    return held


def _engines(
    model: Model, opened: list[Opened], cases: list[ParityCase], measure: list[Tensor]
) -> list[dict[str, Any]]:
    writes = model.config.architecture != "encoder" and model.config.source == "text" and model.config.head == "lm"
    rows = [case.first() for case in cases] if writes else []
    wanted = _texts(TorchEngine(model), rows)
    out = []
    for name, engine, bounds in opened:
        of, worst = _engine_distance(engine, cases, measure)
        same = None
        if writes:
            same = sum(a == b for a, b in zip(_texts(engine, rows), wanted, strict=True)) / len(rows)
        out.append(_result(name, len(cases), worst, same, bounds, of))
    return out


def _engine_distance(engine: Engine, cases: list[ParityCase], measure: list[Tensor]) -> tuple[str, float]:
    if isinstance(engine, TorchEngine):
        pairs = ((plain(engine.model, case), wanted) for case, wanted in zip(cases, measure, strict=True))
        return "logits", max(_distance(one, other) for one, other in pairs)
    assert isinstance(engine, Ct2Engine)
    gaps = [_distance(*_log_probs(engine, case, wanted)) for case, wanted in zip(cases, measure, strict=True)]
    return "log P of given tokens", max(gaps)


def _log_probs(engine: Ct2Engine, case: ParityCase, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """log P of each row's tokens and its end: the engine's, and from the logits of the measure."""
    read = case.rows(case.source if case.target is None else case.target)
    follows = [[*row[1:], engine.config.eos_id] for row in read]
    theirs = engine.log_probs(case.sources(), read if case.target is None else [row[1:] for row in read])
    ids = torch.tensor([token for row in follows for token in row])
    ours = wanted.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return torch.tensor([value for row in theirs for value in row]), ours


def _texts(engine: Engine, rows: list[list[int]]) -> list[list[int]]:
    config = GenerateConfig(max_new_tokens=_NEW_TOKENS)
    groups = (rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE))
    return [text for group in groups for text in engine.write(group, config)]


@contextmanager
def _still(model: Model) -> Iterator[None]:
    """In eval mode, and afterwards as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
