"""``regard bench generate``: the speed of generation, by batch, beam and type of weights.

Prompts are random tokens, as the time of a step does not depend on them. Texts do not end early. The time of the first
token is that of a call for one token, including the prompt; the rest is divided among the further tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import torch

from ..generation.generate import generate
from ..layers.quantised_linear import quantise
from ..models import Model
from .benchmarking import format_table

WeightDtype = Literal["fp32", "bf16", "int8"]
WEIGHTS: tuple[WeightDtype, ...] = ("fp32", "bf16", "int8")
_ROUNDS = 3


@dataclass(frozen=True)
class GenerationSpeed:
    """One combination, as the best of a few calls."""

    weights: WeightDtype
    batch: int
    beam: int
    first_s: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class GenerateBench:
    name: str
    device: str
    threads: int
    n_prompt: int
    n_new: int
    cases: list[GenerationSpeed]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "torch": torch.__version__}

    def to_text(self) -> str:
        where = f"{self.device}, CPU threads: {self.threads}, torch {torch.__version__}"
        rows = [["weights, batch, beam", "first token, ms", "each further, ms", "tokens/s"]]
        for x in self.cases:
            times = f"{1e3 * x.first_s:,.1f}", f"{1e3 * x.step_s:,.2f}"
            rows.append([f"{x.weights}, {x.batch}, {x.beam}", *times, f"{x.tokens_per_s:,.0f}"])
        return f"{self.name} writes {self.n_new} tokens after {self.n_prompt}: {where}\n\n{format_table(rows)}"


def bench_generate(
    model: Model,
    name: str,
    *,
    batches: Sequence[int] = (1, 8),
    beams: Sequence[int] = (1, 4),
    weights: Sequence[WeightDtype] = ("fp32",),
    n_prompt: int = 16,
    n_new: int = 64,
    rounds: int = _ROUNDS,
    progress: Callable[[str], None] = lambda line: None,
) -> GenerateBench:
    """Tokens per second of every combination of weights, batch and beam; the model is not changed."""
    config = model.config
    if not getattr(model, "head", None) or config.source == "image" or config.head != "lm":
        raise ValueError(f"{name} does not generate text from text; this benchmark needs a model that does")
    limit = config.max_len if config.architecture == "decoder" else (config.max_target_len or config.max_len)
    length = n_prompt + n_new if config.architecture == "decoder" else n_new + 1
    if length > limit or n_prompt > config.max_len:
        raise ValueError(f"{n_prompt} tokens and {n_new} new ones do not fit into max_len={limit} of {name}")
    cases = []
    for kind in weights:
        ready: Any = model
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        if kind == "int8" or next(model.parameters()).dtype != dtype:
            ready = copy.deepcopy(model).to(dtype)
            ready = quantise(ready) if kind == "int8" else ready
        for batch, beam in product(batches, beams):
            progress(f"{kind}, batch {batch}, beam {beam}")
            cases.append(_measure_speed(ready, kind, batch, beam, n_prompt, n_new, rounds))
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return GenerateBench(name, device, torch.get_num_threads(), n_prompt, n_new, cases)


def _measure_speed(
    model: Any, kind: WeightDtype, batch: int, beam: int, n_prompt: int, n_new: int, rounds: int
) -> GenerationSpeed:
    generator = torch.Generator().manual_seed(batch)
    rows = torch.randint(3, model.config.vocab_size, (batch, n_prompt), generator=generator).tolist()
    on_cuda = model.device.type == "cuda"

    def seconds(n: int) -> float:
        fields: dict[str, Any] = {"cache": "static"} if on_cuda and beam == 1 else {}
        fields |= {"min_new_tokens": n} if model.config.eos_id is not None else {}
        if on_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        generate(model, rows, beam=beam, max_new_tokens=n, **fields)
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(n_new)  # warm-up: loads kernels, packs weights, captures graphs
    first, whole = (min(seconds(n) for _ in range(rounds)) for n in (1, n_new))
    step = max(whole - first, 0.0) / max(1, n_new - 1)
    return GenerationSpeed(kind, batch, beam, first, step, batch * n_new / whole)
