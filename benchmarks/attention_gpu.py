"""How fast are the attention kernels on a GPU? Forward and backward in bf16, 16 heads of 64, beside torch's own.

    python benchmarks/attention_gpu.py
    python benchmarks/attention_gpu.py --lengths 4096

Milliseconds (median) of one forward and backward pass, and memory above what was held before it. Bars, as a share of
the time of torch's default on plain causal attention: window 256 at 4,096 ≤ 0.5 and at 16,384 ≤ 0.15, T5 ≤ 2, XL ≤ 3;
additive attention (batch 1, 4,096) ≤ 41.6 ms; at 16,384 everything under 2 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.attention import Additive, attend
from regard.attention.biases import Alibi, T5Bias, XLRelative
from regard.attention.masks import bigbird, causal, packed, padding, strided, window

HEADS, WIDTH, DTYPE = 16, 64, torch.bfloat16
Step = Callable[[], Any]


def heads(batch: int, length: int) -> list[Tensor]:
    return [torch.randn(batch, HEADS, length, WIDTH, device="cuda", dtype=DTYPE).requires_grad_() for _ in range(3)]


def training_step(output: Callable[..., Tensor], inputs: list[Tensor], parameters: list[Tensor]) -> Step:
    d_out = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(output(*inputs), [*inputs, *parameters], d_out)


def contenders(length: int, batch: int, backend: str) -> Iterator[tuple[str, Step]]:
    """Name and step of each."""
    inputs = heads(batch, length)

    def fused(kind: SDPBackend | None) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with contextlib.nullcontext() if kind is None else sdpa_kernel(kind):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    def ours(**options: Any) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(q, k, v, **{"backend": backend, **options}).output

    def trained(module: nn.Module) -> tuple[Any, list[Tensor]]:
        module = module.to("cuda", DTYPE)
        return module, list(module.parameters())

    yield "torch causal", training_step(fused(None), inputs, [])
    yield "torch causal, flash", training_step(fused(SDPBackend.FLASH_ATTENTION), inputs, [])
    yield "causal", training_step(ours(mask=causal()), inputs, [])
    yield "causal, auto", training_step(ours(mask=causal(), backend="auto"), inputs, [])
    yield "window 256", training_step(ours(mask=window(256)), inputs, [])
    yield "strided 128", training_step(ours(mask=strided(128)), inputs, [])
    yield "bigbird", training_step(ours(mask=causal() & bigbird(64, 64, 5.0)), inputs, [])
    lengths = torch.full((batch,), length * 3 // 4, device="cuda")
    yield "causal, 3/4 full", training_step(ours(mask=causal() & padding(lengths)), inputs, [])
    documents = (torch.arange(length, device="cuda") // 1024).expand(batch, -1).contiguous()
    yield "packed by 1,024", training_step(ours(mask=causal() & packed(documents)), inputs, [])
    yield "alibi", training_step(ours(mask=causal(), bias=Alibi(HEADS).cuda()), inputs, [])
    bias, parameters = trained(T5Bias(HEADS, bidirectional=False))
    yield "t5", training_step(ours(mask=causal(), bias=bias), inputs, parameters)
    bias, parameters = trained(XLRelative(HEADS, WIDTH))
    yield "xl", training_step(ours(mask=causal(), bias=bias), inputs, parameters)
    mechanism, parameters = trained(Additive(HEADS, WIDTH))
    yield "additive, batch 1", training_step(ours(mask=causal(), mechanism=mechanism), heads(1, length), parameters)


def measure(step: Step, runs: int = 20) -> tuple[float, float, float]:
    """Median milliseconds on the GPU with a cold L2 cache, milliseconds a step by the clock, GiB above what is held."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    above = torch.cuda.max_memory_allocated() - before
    began = time.perf_counter()
    for _ in range(runs):
        step()
    torch.cuda.synchronize()
    by_clock = (time.perf_counter() - began) / runs * 1000
    cache = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(runs):
        cache.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # so that launches are queued and not part of the time
        start.record()
        step()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events), by_clock, above / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--only", default="", help="those whose name contains this")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {HEADS} × {WIDTH}, batch {options.batch}")
    for length in options.lengths:
        plain = None
        print(f"\n| length {length:,} | GPU ms | of torch causal | ms by the clock | GiB |\n|---|---|---|---|---|")
        for name, step in contenders(length, options.batch, options.backend):
            if options.only not in name:
                continue
            took, by_clock, above = measure(step, 5 if "additive" in name else 20)
            plain = took if plain is None else plain
            print(f"| {name} | {took:.3f} | {took / plain:.2f} | {by_clock:.3f} | {above:.2f} |", flush=True)


if __name__ == "__main__":
    main()
