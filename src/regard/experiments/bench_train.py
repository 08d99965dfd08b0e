"""``regard bench train``: the speed of a training step, compared with plain torch and transformers.

Tokens are random, as the time of a step does not depend on them. A step is forward, backward, gradient clipping and
AdamW; times are medians after a warm-up. The other contenders follow common practice, with autocast in half precision:
a decoder like nanoGPT's (vocabulary padded to a multiple of 64), an encoder-decoder around ``nn.Transformer``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig, TrainConfig
from ..errors import first_line
from ..hub.hf_config import transformers_twin
from ..models.build import build
from ..models.model_flops import training_flops
from ..training.compilation import Compiled, compiler_options
from ..training.gradient_pass import GradientPass, WorkingWeights, should_capture, uses_working_weights
from ..training.loss import Batch, Objective
from ..training.optimiser import Schedule, build_optimiser
from ..training.parallel import Group, clip_grad_norm
from ..training.precision import Precision, PrecisionName, supported_precisions
from .benchmarking import format_table

Contender = Literal["regard", "torch", "transformers"]
CONTENDERS: tuple[Contender, ...] = ("regard", "torch", "transformers")
_RECIPE = TrainConfig(lr=6e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
Step = Callable[[Batch], Tensor]  # runs one training step and returns the loss, still on the device


@dataclass(frozen=True)
class TrainingSpeed:
    """One contender: its median step time and peak GPU memory; ``note`` says why it could not be measured."""

    contender: str
    step_s: float | None = None
    tokens_per_s: float | None = None
    memory: int | None = None
    note: str = ""


@dataclass(frozen=True)
class TrainBench:
    name: str
    device: str
    batch: int
    length: int
    precision: str
    compiled: bool
    cases: list[TrainingSpeed]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "torch": torch.__version__}

    def to_text(self) -> str:
        how = f"{self.precision}, {'compiled' if self.compiled else 'eager'}, {self.device}, torch {torch.__version__}"
        rows = [["step of", "ms", "tokens/s", "of regard's", "GPU memory, GiB"]]
        ours = next((x.tokens_per_s for x in self.cases if x.contender == "regard"), None)
        for x in self.cases:
            if x.step_s is None or x.tokens_per_s is None:
                rows.append([x.contender, x.note, "", "", ""])
                continue
            share = "" if ours is None else f"{x.tokens_per_s / ours:.2f}"
            memory = "" if x.memory is None else f"{x.memory / 2**30:.1f}"
            rows.append([x.contender, f"{1e3 * x.step_s:,.1f}", f"{x.tokens_per_s:,.0f}", share, memory])
        return f"{self.name}, {self.batch} × {self.length} tokens: {how}\n\n{format_table(rows)}"


def bench_train(
    config: ModelConfig,
    name: str,
    *,
    batch: int = 8,
    length: int = 64,
    precision: PrecisionName | Literal["auto"] = "auto",
    compile: bool | None = None,
    contenders: Sequence[Contender] = CONTENDERS,
    steps: int = 10,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] = lambda line: None,
) -> TrainBench:
    """Tokens per second of each contender at one shape; an encoder-decoder has sources of the same length, not counted.

    ``precision="auto"`` is bf16 on a GPU that supports it, else fp32. ``compile=None`` compiles on a GPU only.
    """
    if config.head != "lm" or config.source != "text" or config.architecture not in ("decoder", "encoder-decoder"):
        raise ValueError(f"{name} is not a decoder or encoder-decoder of text, which this benchmark needs")
    if length > config.max_len:
        raise ValueError(f"{length} tokens do not fit into max_len={config.max_len} of {name}")
    device, cases = torch.device(device), []
    on_gpu = device.type == "cuda"
    if precision == "auto":
        precision = "bf16" if on_gpu and "bf16" in supported_precisions(device) else "fp32"
    compile, how = on_gpu if compile is None else compile, Precision(precision, device)
    inputs = random_batch(config, batch, length).to(device)
    for contender in contenders:
        progress(f"{contender}, {batch} × {length}")
        torch.manual_seed(0)
        try:
            with how.settings():
                seconds, memory = measure_steps(STEPS[contender](config, how, compile), inputs, device, steps)
            cases.append(TrainingSpeed(contender, seconds, batch * length / seconds, memory))
        except (ImportError, ValueError, torch.OutOfMemoryError) as error:
            cases.append(TrainingSpeed(contender, note=first_line(error)))
    where = torch.cuda.get_device_name(device) if on_gpu else device.type
    return TrainBench(name, where, batch, length, precision, compile, cases)


def random_batch(config: ModelConfig, batch: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(batch)
    source, target = (torch.randint(3, config.vocab_size, (batch, length + 1), generator=generator) for _ in range(2))
    inputs: tuple[Tensor, ...] = (target[:, :-1].contiguous(),)
    if config.architecture == "encoder-decoder":
        inputs = (source[:, :-1].contiguous(), *inputs)
    return Batch(inputs, target[:, 1:].contiguous(), n_tokens=batch * length)


def measure_steps(step: Step, batch: Batch, device: torch.device, steps: int) -> tuple[float, int | None]:
    """The median seconds of a step, and the peak GPU memory. On a GPU, events time the steps without synchronising."""
    if device.type == "cuda":  # before the warm-up: replaying a CUDA graph does not count its memory
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step(batch)
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start)
        return statistics.median(times), None
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step(batch)
        event.record()
    torch.cuda.synchronize()
    gaps = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    return statistics.median(gaps), torch.cuda.max_memory_allocated()


# ---- the contenders


def regard_step(config: ModelConfig, precision: Precision, compile: bool, schedule: Schedule | None = None) -> Step:
    """The step of the training loop without the loop: an upper limit of the speed of ``regard train``.

    ``schedule`` gives the factor on the learning rate at each step; by default it is 1.
    """
    model = build(config).to(precision.device)
    objective = Objective(model).train()
    working = None
    if uses_working_weights(precision, Group(device=precision.device)):
        working = WorkingWeights(objective, fp8=precision.name == "fp8")
    inner = objective if working is None else working.objective
    gradient_pass: GradientPass | None = None
    optimiser, numbers = build_optimiser(model, _RECIPE), itertools.count(1)

    def step(batch: Batch) -> Tensor:
        nonlocal gradient_pass
        if gradient_pass is None:
            flops = len(batch.targets) * training_flops(config, batch.targets.shape[1])
            module = Compiled(inner, options=compiler_options(flops, precision.device)) if compile else inner
            gradient_pass = GradientPass(module, precision, working, should_capture(objective, flops, working, 1))
        loss = gradient_pass.run(batch, 1 / batch.targets.numel())
        clip_grad_norm(model.parameters(), 1.0)
        if schedule is not None:
            optimiser.set_lr(schedule(next(numbers)))
        optimiser.step()
        optimiser.zero_grad()
        if working is not None:
            working.refresh()
        return loss

    return step


def plain_step(module: nn.Module, precision: Precision, compile: bool, schedule: Schedule | None = None) -> Step:
    """A step as in nanoGPT's ``train.py``: fp32 weights, autocast, fused AdamW. ``schedule``: see ``regard_step``."""
    module.to(precision.device).train()
    run: Any = torch.compile(module) if compile else module
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups: Any = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, _RECIPE.lr, (0.9, 0.95), fused=precision.device.type == "cuda")
    forward: Callable[[], AbstractContextManager[Any]] = precision.forward
    numbers = itertools.count(1)

    def step(batch: Batch) -> Tensor:
        with forward():
            loss = run(*batch.inputs, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        if schedule is not None:
            factor = schedule(next(numbers))
            for group in adam.param_groups:
                group["lr"] = _RECIPE.lr * factor
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class PlainDecoderLayer(nn.Module):
    """A layer of GPT-2 in plain torch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.n_heads = config.n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.gelu = nn.Linear(width, config.d_ff), nn.Linear(config.d_ff, width), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (h.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for h in self.qkv(self.norm_1(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(self.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """GPT-2 like nanoGPT's: tied head, vocabulary padded to a multiple of 64.   tokens, targets (B, T) → mean loss"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n_tokens = -(-config.vocab_size // 64) * 64
        self.token, self.position = nn.Embedding(n_tokens, config.d_model), nn.Embedding(config.max_len, config.d_model)
        self.layers = nn.ModuleList(PlainDecoderLayer(config) for _ in range(config.n_layers))
        self.norm, self.head = nn.LayerNorm(config.d_model), nn.Linear(config.d_model, n_tokens, bias=False)
        self.head.weight = self.token.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class PlainTranslator(nn.Module):
    """``nn.Transformer`` with a shared, tied table.   source, target, targets (B, T) → mean loss"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, n_heads = config.d_model, config.n_heads
        n_layers, n_decoder_layers = config.n_layers, config.n_decoder_layers or config.n_layers
        self.token, self.position = nn.Embedding(config.vocab_size, width), nn.Embedding(config.max_len, width)
        nn.init.normal_(self.token.weight, std=width**-0.5)
        self.dropout, self.scale = nn.Dropout(config.embedding_dropout), width**0.5
        self.body = nn.Transformer(
            width, n_heads, n_layers, n_decoder_layers, config.d_ff, config.dropout, batch_first=True
        )

    def forward(self, source: Tensor, target: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        states = self.body(self._embed(source), self._embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(F.linear(states, self.token.weight).flatten(0, 1), targets.flatten())

    def _embed(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) * self.scale + self.position(positions))


class HuggingFaceLoss(nn.Module):
    """A transformers model with the mean loss of its logits; its own loss would shift the labels a second time."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.body = transformers_twin(config)

    def forward(self, *tokens: Tensor) -> Tensor:
        *inputs, targets = tokens
        names = ("input_ids",) if len(inputs) == 1 else ("input_ids", "decoder_input_ids")
        logits = self.body(**dict(zip(names, inputs, strict=True)), use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_step(config: ModelConfig, precision: Precision, compile: bool) -> Step:
    plain = PlainGPT if config.architecture == "decoder" else PlainTranslator
    return plain_step(plain(config), precision, compile)


STEPS: dict[Contender, Callable[[ModelConfig, Precision, bool], Step]] = {
    "regard": regard_step,
    "torch": torch_step,
    "transformers": lambda config, precision, compile: plain_step(HuggingFaceLoss(config), precision, compile),
}
