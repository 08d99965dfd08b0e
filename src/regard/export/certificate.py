"""The certificate: how far an exported model is from the original, on random shapes and on a file.

The reference is the model with attention computed by the reference backend. The fused kernels, the cache, the compiled
graph, the directory read back and each engine in it are compared with it, by logits or, for an engine that returns
none, by the log probabilities of given tokens. The document does not depend on when or where it was made.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..attention import MultiHeadAttention
from ..errors import RegardError
from ..foundation.checks import check_not_negative, check_positive
from ..generation import GenerateConfig
from ..generation.generate import inference
from ..hub.gguf_file import NAME as GGUF_FILE
from ..hub.gguf_file import GgufDirectory
from ..models import Model
from ..text.gguf_vocabulary import PROBES
from .engines import (
    Ct2Engine,
    Engine,
    GgufEngine,
    TorchEngine,
    engines_in,
    has_llama_cpp,
    open_directory,
    open_engine,
    open_model,
)
from .parity_cases import BATCH, ParityCase, check_file, largest_sizes, make_cases, task_name
from .quantise import is_quantised

NAME = "certificate.json"
Reference = tuple[ParityCase, Tensor]  # a case and its logits, computed with the reference backend
_NEW_TOKENS = 16


@dataclass(frozen=True)
class Bounds:
    """How far an exported model may differ. None: the difference is measured but not bounded."""

    # Largest difference of a logit, or of a token's log probability, relative to the spread: the largest distance of a
    # logit from the mean of its row, at least 1. Not for int8.
    max_abs: float | None = 1e-4
    times_fp32: float | None = 4.0  # max_abs may rise to this multiple of the reference's float32 rounding error
    same_text: float | None = 0.99  # smallest share of greedy texts with identical tokens; not for int8
    delta: float | None = 0.2  # largest drop of the file's metric: points of BLEU, percent, perplexity; also for int8
    int8_same_text: float | None = None  # same_text for int8
    int8_loss: float | None = 0.01  # relative increase of perplexity under int8, on the model's own distribution

    def __post_init__(self) -> None:
        check_not_negative(**asdict(self))


class BoundBroken(RegardError):
    """An exported model exceeds its bounds; ``document`` is the certificate with the measurements."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        super().__init__("; ".join(broken_bounds(document)))


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

    check     a file of pairs, texts or labelled texts, on which the task's metric is compared too
    compiled  whether torch.compile is compared too; it takes up to a minute
    """
    check_positive(n_shapes=n_shapes)
    bounds, root = bounds or Bounds(), Path(exported)
    cases = make_cases(model.config, n_shapes, seed)
    with inference(model):
        with reference_attention(model):
            references = [(case, full_logits(model, case)) for case in cases]
            sizes = {"spread": _spread(references), "fp32_error": _fp32_error(model, references)}
        scaled_bounds = _scale_bounds(bounds, **sizes)
        comparisons = _compare_torch_paths(model, references, scaled_bounds, compiled)
        engines = _open_engines(root, scaled_bounds)
        comparisons += _compare_engines(model, engines, references)
        if "gguf" in engines_in(root) and not has_llama_cpp():
            comparisons.append(_skipped_row("llama.cpp", "llama-cpp-python is not installed"))
        file = None
        if check is not None:
            deltas = [(name, engine, limits.delta) for name, engine, limits in engines]
            file = check_file(TorchEngine(model), deltas, Path(check), beam)
            _bound_perplexity(file, [name for name, _, limits in engines if limits.max_abs is None], bounds.int8_loss)
    document: dict[str, Any] = {
        "task": task_name(model.config),
        "parameters": model.n_parameters,
        "shapes": {"count": n_shapes, "seed": seed, "most": largest_sizes(cases)},
        "bounds": asdict(bounds),
        "logits": sizes,
        "comparisons": comparisons,
        "file": file,
    }
    return {**document, "passes": not broken_bounds(document)}


def broken_bounds(document: Mapping[str, Any]) -> list[str]:
    """One message for each broken bound."""
    messages = []
    for row in document["comparisons"]:
        for name, bound in row.get("bounds", {}).items():
            value = row.get(name)
            if bound is None or value is None:
                continue
            if value < bound if name == "same_text" else value > bound:
                relation = "less than" if name == "same_text" else "more than"
                messages.append(f"{row['name']}: {name}={value:g} is {relation} the bound {bound:g}")
    file = document.get("file") or {}
    for row in file.get("engines", []):
        if row.get("worse_by") is not None and row.get("bound") is not None and row["worse_by"] > row["bound"]:
            worse = f"{file['metric']} is worse by {row['worse_by']:g}"
            messages.append(f"{row['name']}: {worse}, more than the bound {row['bound']:g}")
    return messages


def certificate_text(document: Mapping[str, Any]) -> str:
    """The certificate as a table for the terminal."""
    shapes = document["shapes"]
    of = f"{shapes['count']} random shapes (seed {shapes['seed']}), measured against the formula"
    if "program" in shapes:
        of = f"{shapes['count']} inputs, the page in {shapes['program']} measured against the model"
    lines = [
        f"{document['task']}, {document['parameters']:,} parameters, {of}",
        f"{'':18}{'max |difference|':>18}{'same text':>12}   of",
    ]
    for row in document["comparisons"]:
        if "skipped" in row:
            lines.append(f"{row['name']:18}not compared: {row['skipped']}")
            continue
        number = "—" if row["max_abs"] is None else f"{row['max_abs']:.3g}"
        text = "—" if row["same_text"] is None else f"{100 * row['same_text']:.1f} %"
        free = ", without a bound" if row["name"] in _without_bounds(document) else ""
        if row.get("loss") is not None and "int8" in row["name"]:
            free += f", perplexity {100 * row['loss']:+.2g} %"
        lines.append(f"{row['name']:18}{number:>18}{text:>12}   {row['of']}{free}")
    if document.get("file"):
        file = document["file"]
        lines.append(f"{file['file']}, {file['n']:,} examples: {file['metric']} {file['value']:.2f} in torch, float32")
        for row in file["engines"]:
            if "skipped" in row:
                lines.append(f"{row['name']:18}not compared: {row['skipped']}")
                continue
            text = "" if row["same_text"] is None else f", {100 * row['same_text']:.1f} % of the texts the same"
            lines.append(f"{row['name']:18}{row['value']:.2f}, {row['value'] - file['value']:+.2f}{text}")
    lines += [f"broken: {message}" for message in broken_bounds(document)] or [_passing_line(document)]
    return "\n".join(lines)


def _without_bounds(document: Mapping[str, Any]) -> list[str]:
    rows = document["comparisons"]
    return [row["name"] for row in rows if "skipped" not in row and set(row["bounds"].values()) == {None}]


def _passing_line(document: Mapping[str, Any]) -> str:
    rows = [row for row in document["comparisons"] if "skipped" not in row]
    if different := [row["name"] for row in rows if row["same_text"] == 0]:
        return f"the bounds that are set hold, but no text of {' or '.join(different)} is the same"
    free = [name for name in _without_bounds(document) if name != "ctranslate2 int8"]
    texts = [
        row["name"]
        for row in rows
        if "loss" in row["bounds"] and row["same_text"] is not None and row["bounds"].get("same_text") is None
    ]
    if not (free or texts) or document.get("file") or "program" in document["shapes"]:
        return "every bound holds"
    notes = [f"{' and '.join(free)} {'were' if len(free) > 1 else 'was'} measured, not held to a bound"] if free else []
    notes += [f"the texts of {' and '.join(texts)} were measured, not held to a bound"] if texts else []
    return f"{'; '.join(notes)}: --same-text 0.9 or --check FILE sets one; the others hold"


def full_logits(model: Model, case: ParityCase) -> Tensor:
    """Logits of every real token (N, V), all rows concatenated; the class logits (B, C) of a classifier."""
    return _engine_logits(TorchEngine(model), case)


def _engine_logits(engine: Engine, case: ParityCase) -> Tensor:
    return case.drop_padding(engine.token_logits(case.source, case.target, case.padding_mask))


def cached_logits(model: Model, case: ParityCase) -> Tensor:
    """The same logits, computed token by token with the cache."""
    cache = model.new_cache()
    if model.is_decoder_only:
        tokens = case.source
        out = [model(tokens[:, at : at + 1], cache=cache) for at in range(tokens.shape[1])]
        return case.drop_padding(torch.cat(out, 1))
    assert case.target is not None
    memory = model.encode(case.source, padding_mask=case.padding_mask)
    steps = [model.decode(case.target[:, at : at + 1], memory, cache=cache) for at in range(case.target.shape[1])]
    states = torch.cat(steps, 1)
    return case.drop_padding(states if model.head is None else model.head(states, model.output_table))


@contextmanager
def reference_attention(model: Model) -> Iterator[None]:
    """Context in which every attention layer uses the "reference" backend."""
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    before = [layer.backend for layer in layers]
    for layer in layers:
        layer.backend = "reference"
    try:
        yield
    finally:
        for layer, backend in zip(layers, before, strict=True):
            layer.backend = backend


def _compare_torch_paths(
    model: Model, references: list[Reference], bounds: Bounds, compiled: bool
) -> list[dict[str, Any]]:
    """Compare the model itself with fused kernels, with its cache, and compiled."""
    rows = []
    if any(isinstance(module, MultiHeadAttention) for module in model.modules()):
        rows.append(_compare("fused", full_logits, model, references, bounds))
    else:
        rows.append(_skipped_row("fused", "the model has no attention layer with a choice of kernels"))
    if model.config.architecture in ("encoder", "two-tower"):
        rows.append(_skipped_row("cached", "an encoder has no cache"))
    elif not model.config.mixing.causal or not model.config.causal:
        rows.append(_skipped_row("cached", "attention is not causal, so nothing can be cached"))
    elif not model.decodes_by_token:
        rows.append(_skipped_row("cached", "its mixer has no cache"))
    else:
        rows.append(_compare("cached", cached_logits, model, references, bounds))
    if compiled:
        rows.append(_compare_compiled(model, references, bounds))
    else:
        rows.append(_skipped_row("compiled", "not requested"))
    return rows


def _compare_compiled(model: Model, references: list[Reference], bounds: Bounds) -> dict[str, Any]:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return _skipped_row("compiled", "this machine has no C++ compiler for torch.compile")
    # torch.compile specialises on a size of 1, up to a minute for each; one graph serves all other sizes.
    references = [reference for reference in references if not reference[0].has_size_one]
    if not references:
        return _skipped_row("compiled", "every random shape has a size of 1, each of which is compiled separately")
    torch.compiler.reset()
    try:
        graph = cast(Model, torch.compile(model, dynamic=True, fullgraph=True))  # callable like the model
        return _compare("compiled", full_logits, graph, references, bounds)
    except Exception as error:  # a failure of the compiler says nothing about the export
        return _skipped_row("compiled", f"torch.compile failed: {type(error).__name__}")
    finally:
        torch.compiler.reset()


def _compare(
    name: str, run: Callable[[Model, ParityCase], Tensor], model: Model, references: list[Reference], bounds: Bounds
) -> dict[str, Any]:
    worst = max(largest_difference(run(model, case), wanted) for case, wanted in references)
    return comparison_row(name, len(references), worst, None, bounds, "logits")


def _spread(references: list[Reference]) -> float:
    """The largest distance of a logit from the mean of its row."""
    worst = max(float((logits - logits.mean(-1, keepdim=True)).abs().max()) for _, logits in references)
    return float(f"{worst:.3g}")


def _fp32_error(model: Model, references: list[Reference]) -> float:
    """Largest difference between the reference logits in float32 and in float64, over the first eight cases."""
    exact = copy.deepcopy(model).double()
    worst = 0.0
    for case, logits in references[:8]:
        source = case.source.double() if case.source.is_floating_point() else case.source
        worst = max(worst, float((full_logits(exact, replace(case, source=source)) - logits).abs().max()))
    return float(f"{worst:.3g}")


def _scale_bounds(bounds: Bounds, spread: float, fp32_error: float) -> Bounds:
    """The bounds with ``max_abs`` in units of these logits."""
    if bounds.max_abs is None:
        return bounds
    rounding = 0.0 if bounds.times_fp32 is None else bounds.times_fp32 * fp32_error
    return replace(bounds, max_abs=float(f"{max(bounds.max_abs * max(1.0, spread), rounding):.3g}"))


def _divergence(logits: Tensor, reference: Tensor) -> float:
    """KL(model ‖ engine), summed over the rows of logits (N, V)."""
    log_p, log_q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum().nan_to_num(nan=math.inf))


def _bound_perplexity(file: dict[str, Any], int8_names: list[str], loss: float | None) -> None:
    """Bound int8 by a share of the file's perplexity, since an absolute difference means little without its scale."""
    for row in file["engines"] if file["metric"] == "perplexity" and loss is not None else ():
        if row["name"] in int8_names and row.get("bound") is not None:
            row["bound"] = round(loss * file["value"], 4)


def comparison_row(
    name: str,
    n_shapes: int,
    worst: float | None,
    same: float | None,
    bounds: Bounds,
    of: str,
    loss: float | None = None,
) -> dict[str, Any]:
    limits = {"max_abs": bounds.max_abs, "same_text": bounds.same_text}
    if bounds.max_abs is None and bounds.int8_loss is not None:
        limits["loss"] = bounds.int8_loss
    max_abs = None if worst is None else float(f"{worst:.3g}")  # further digits depend on the processor
    row = {"name": name, "shapes": n_shapes, "max_abs": max_abs, "same_text": same, "of": of, "bounds": limits}
    return row if loss is None else {**row, "loss": float(f"{loss:.3g}")}


def _skipped_row(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "skipped": reason}


LARGEST_FLOAT = torch.finfo(torch.float32).max


def largest_difference(one: Tensor, other: Tensor) -> float:
    """max |one - other|; NaN counts as the largest float."""
    gap = (one.float() - other.float()).abs().nan_to_num(nan=LARGEST_FLOAT).amax().item()
    return min(gap, LARGEST_FLOAT)


def _open_engines(root: Path, bounds: Bounds) -> list[tuple[str, Engine, Bounds]]:
    """Every engine in a directory with its name and bounds; CTranslate2 also with int8 weights, without bounds."""
    from .onnx_export import has_int8_weights

    # int8 is bounded by the metric, not by logits, and by the texts only if int8_same_text is given.
    int8_bounds = replace(bounds, max_abs=None, same_text=bounds.int8_same_text)
    engines: list[tuple[str, Engine, Bounds]] = []
    for name in engines_in(root):
        if name == "onnx" and has_int8_weights(root):
            engines.append(("onnx int8", open_engine(root, name), int8_bounds))
        elif name == "gguf":
            engines += _open_gguf(root, bounds, replace(int8_bounds, int8_loss=None))
        elif name != "torch":
            engines.append((name, open_engine(root, name), bounds))
        else:
            engine = TorchEngine(open_model(root).float())  # whatever precision it will be used in
            is_int8 = is_quantised(root)
            engines.append(("int8" if is_int8 else "read back", engine, int8_bounds if is_int8 else bounds))
        if name == "ctranslate2":
            free = Bounds(max_abs=None, same_text=None, delta=None, int8_loss=None)
            engines.append(("ctranslate2 int8", open_engine(root, name, compute_type="int8"), free))
    return engines


def _open_gguf(root: Path, bounds: Bounds, rounded_bounds: Bounds) -> list[tuple[str, Engine, Bounds]]:
    """model.gguf, read back by regard and, if it is installed, by llama.cpp."""
    file = GgufDirectory(root / GGUF_FILE)
    limits = bounds if file.float_type == "f32" else rounded_bounds
    engines: list[tuple[str, Engine, Bounds]] = [("gguf", TorchEngine(open_directory(file).float()), limits)]
    return [*engines, ("llama.cpp", open_engine(root, "gguf"), limits)] if has_llama_cpp() else engines


def _compare_engines(
    model: Model, engines: list[tuple[str, Engine, Bounds]], references: list[Reference]
) -> list[dict[str, Any]]:
    writes = model.generates and model.config.source == "text"
    prompts = [case.first_prompt() for case, _ in references] if writes else []
    own_texts = _texts(TorchEngine(model), prompts)
    is_softmax = model.config.head != "none" and model.config.problem_type == "single_label"
    rows = []
    for name, engine, bounds in engines:
        if isinstance(engine, Ct2Engine):
            of, pairs = "log P of given tokens", (_log_probs(engine, case, logits) for case, logits in references)
        else:
            of, pairs = "logits", ((_engine_logits(engine, case), logits) for case, logits in references)
        has_loss = of == "logits" and is_softmax and bounds.max_abs is None
        worst, divergence, n_rows = 0.0, 0.0, 0
        for values, reference in pairs:
            worst = max(worst, largest_difference(values, reference))
            n_rows += len(reference)
            if has_loss:
                divergence += _divergence(values, reference)
        # exp(KL) is the ratio of the engine's perplexity to the model's, on tokens drawn from the model.
        loss = math.expm1(min(divergence / n_rows, 50.0)) if has_loss else None
        same = None
        if writes:
            same = sum(a == b for a, b in zip(_texts(engine, prompts), own_texts, strict=True)) / len(prompts)
        rows.append(comparison_row(name, len(references), worst, same, bounds, of, loss))
        if isinstance(engine, GgufEngine) and engine.processor is not None:
            encode, texts = engine.tokenizer("target").encode, [text for text in PROBES if text]
            same = sum(engine.encode(text) == encode(text) for text in texts) / len(texts)
            same_ids = Bounds(max_abs=None, same_text=1.0)  # rounding the weights does not affect the tokenizer
            rows.append(comparison_row("llama.cpp tokens", len(texts), None, same, same_ids, "token ids of texts"))
    return rows


def _log_probs(engine: Ct2Engine, case: ParityCase, logits: Tensor) -> tuple[Tensor, Tensor]:
    """log P of each row's tokens and its end token: from the engine, and from the reference logits."""
    texts = case.rows(case.source if case.target is None else case.target)
    next_tokens = [[*row[1:], engine.config.eos_id] for row in texts]
    theirs = engine.log_probs(case.sources(), texts if case.target is None else [row[1:] for row in texts])
    ids = torch.tensor([token for row in next_tokens for token in row])
    ours = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return torch.tensor([value for row in theirs for value in row]), ours


def _texts(engine: Engine, rows: list[list[int]]) -> list[list[int]]:
    config = GenerateConfig(max_new_tokens=_NEW_TOKENS)
    groups = (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))
    return [text for group in groups for text in engine.write(group, config)]
