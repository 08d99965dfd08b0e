"""Decoding on a GPU: GPT-2 124M and Transformer base in bf16, against transformers in the same run.

    python benchmarks/generate_gpu.py --json FILE
    python benchmarks/generate_gpu.py --parts translation

Bars, for medians of whole calls of ``generate`` with its default cache: GPT-2 from a prompt of 128 to a context of 512,
at least 4,500 tokens/s at batch 1 and 98,000 at batch 64. Transformer base, 64 tokens from sources of 64: 8 times
transformers at batch 1 greedy, 4 times at batch 64 greedy, 3 times at batch 64 beam 4. Tokens equal eager's in fp32; in
bf16, with a model trained here for a few seconds, teacher-forced logits are at most twice as far from fp32's as eager
bf16's. Each part has its own process, because a CUDA process cannot continue after an illegal memory access.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import median_seconds, print_verdict, synchronised_time
from torch import Tensor

from regard import build
from regard.generation import GenerateConfig, generate
from regard.generation.cuda_graph import BLOCK_STEPS, GraphDecoder, GraphShape
from regard.generation.decode_step import TorchOps
from regard.models import Decoder, Model

BARS = {1: 4_500, 64: 98_000}
TRANSLATION = {(1, 1): 8, (1, 4): None, (64, 1): 4, (64, 4): 3}  # (batch, beam): how many times transformers
PARTS = {"ours": 120, "translation": 60, "peer": 75, "variants": 60, "compiled": 90}  # seconds each may take
SMALL: dict[str, Any] = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 128}


class Report:
    """Results by name; a measurement that fails is recorded with its error, and the others continue."""

    def __init__(self, until: float, file: Path) -> None:
        self.found: dict[str, Any] = {}
        self._until, self._file = until, file

    def attempt(self, name: str, measure: Callable[[], Any]) -> None:
        started = time.perf_counter()
        if started > self._until:
            self.found[name] = {"error": "no time left"}
            return
        try:
            self.found[name] = measure()
        except Exception as error:
            traceback.print_exc(limit=4)
            self.found[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(f"[{time.perf_counter() - started:5.1f} s] {name}: {json.dumps(self.found[name])[:1200]}", flush=True)
        self._file.write_text(json.dumps(self.found))  # after each measurement, in case the process dies


# ---- models and texts


def library_tokens(limit: int = 4_000_000) -> Tensor:
    """The text of the standard library as ids of words, the most frequent first."""
    folder, text = Path(sysconfig.get_paths()["stdlib"]), []
    for file in sorted(folder.glob("*.py")):
        text.append(file.read_text(encoding="utf-8", errors="ignore"))
    pieces = re.findall(r"\w+|\s+|[^\w\s]", "".join(text)[:limit])
    numbers = {word: n for n, (word, _) in enumerate(Counter(pieces).most_common(50_000))}
    return torch.tensor([numbers.get(piece, 50_000) for piece in pieces])


def model_of(args: argparse.Namespace, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    model = build("gpt2", eos_id=None, **(SMALL if args.quick else {})).to(args.device, dtype).eval()
    assert isinstance(model, Decoder)
    return model


def train(model: Decoder, args: argparse.Namespace, text: Tensor, seconds: float = 14.0) -> float:
    """Train for a few seconds, so that the logits differ from each other; returns the last loss."""
    length, batch = (32, 2) if args.quick else (256, 32)
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    generator, loss, until = torch.Generator().manual_seed(0), torch.zeros(()), time.perf_counter() + seconds
    for step in range(3 if args.quick else 250):
        for group in optimiser.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 30)
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).to(args.device)
        with torch.autocast(torch.device(args.device).type, torch.bfloat16):
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if time.perf_counter() > until:
            break
    return float(loss.detach())


def sample_prompts(text: Tensor, rows: int, length: int, seed: int = 1) -> list[list[int]]:
    starts = torch.randint(len(text) - length, (rows,), generator=torch.Generator().manual_seed(seed))
    return [text[s : s + length].tolist() for s in starts.tolist()]


def rate(n_tokens: int, run: Callable[[], Any], turns: int = 3) -> dict[str, float]:
    """Tokens per second of the median turn and of the best one."""
    times = [median_seconds(run, 1) for _ in range(turns)]
    return {"tokens/s": round(n_tokens / statistics.median(times), 1), "best": round(n_tokens / min(times), 1)}


# ---- ours


def measure_ours(args: argparse.Namespace, report: Report) -> None:
    text, exact = library_tokens(), model_of(args, torch.float32)
    report.attempt("trained", lambda: {"loss": round(train(exact, args, text), 3)})
    exact.eval()
    for rows in (1, 8):
        report.attempt(f"fp32 tokens, batch {rows}", lambda rows=rows: same_tokens(exact, text, rows, args))
    low = model_of(args, torch.bfloat16)
    low.load_state_dict(exact.state_dict())
    for rows in (1, 8, 64):
        report.attempt(
            f"bf16 error, batch {rows}", lambda rows=rows: teacher_forced_errors(exact, low, text, rows, args)
        )
    for rows in BARS:
        report.attempt(f"generate, batch {rows}", lambda rows=rows: time_calls(low, text, rows, args))
    for rows in BARS:
        report.attempt(f"profile, batch {rows}", lambda rows=rows: profile(low, rows, args))
    report.attempt("drawn, batch 64", lambda: time_calls(low, text, 64, args, top_k=50, seed=0))


def without_capture(model: Model, inputs: Any, **fields: Any) -> list[list[int]]:
    """Tokens of the eager search: the steps of a model with a hook are not captured."""
    handle = next(model.children()).register_forward_hook(lambda *_: None)
    try:
        return generate(model, inputs, **fields).tokens
    finally:
        handle.remove()


def same_tokens(model: Decoder, text: Tensor, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Compare greedy texts of ragged prompts, captured and eager; where they differ, the gap of the two best logits."""
    prompts = [row[: 32 - 3 * (n % 4)] for n, row in enumerate(sample_prompts(text, rows, 32))]
    n_new = 12 if args.quick else 192
    eager = without_capture(model, prompts, max_new_tokens=n_new)
    fast = generate(model, prompts, max_new_tokens=n_new).tokens
    gaps = []
    for prompt, one, other in zip(prompts, eager, fast, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is not None:
            with torch.no_grad():
                two = model(torch.tensor([prompt + one[:at]], device=args.device))[0, -1].topk(2).values
            gaps.append(float(two[0] - two[1]))
    distinct = len({token for row in eager for token in row})
    return {"equal": eager == fast, "tokens": rows * n_new, "distinct": distinct, "gaps where they differ": gaps}


@torch.no_grad()
def teacher_forced_errors(
    exact: Decoder, low: Decoder, text: Tensor, rows: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Root mean square error of teacher-forced logits against fp32: eager bf16 in one pass, cached, captured."""
    length = 16 if args.quick else 128
    tokens = torch.tensor(sample_prompts(text, rows, length, seed=2), device=args.device)
    expected = torch.cat([exact(part).float() for part in tokens.split(8)])
    eager = torch.cat([low(part).float() for part in tokens.split(8)])
    decoder = GraphDecoder(low, GraphShape(rows, 1, length))
    step = decoder.logit_step()
    decoder.begin(torch.zeros_like(decoder.state.lengths), torch.full_like(decoder.state.last, length))
    captured = torch.empty_like(expected)
    for n, column in enumerate(tokens.unbind(1)):
        decoder.state.tokens.copy_(column)
        out = step()
        assert out is not None
        captured[:, n] = out
    cache = low.new_cache()
    cached = torch.cat([low(tokens[:, n : n + 1], cache=cache).float() for n in range(length)], 1)

    def error(x: Tensor) -> float:
        return round(float((x - expected).square().mean().sqrt()), 6)

    def loss(x: Tensor) -> float:
        return round(float(F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())), 5)

    errors = {"eager": error(eager), "eager cached": error(cached), "captured": error(captured)}
    losses = {"loss fp32": loss(expected), "loss eager": loss(eager), "loss captured": loss(captured)}
    return {"form": decoder.step.form, **errors, **losses, "ratio": round(error(captured) / error(eager), 3)}


def time_calls(low: Decoder, text: Tensor, rows: int, args: argparse.Namespace, **fields: Any) -> dict[str, Any]:
    """Wall-clock time of ``generate`` from prompts to texts, to a context of 512."""
    found: dict[str, Any] = {}
    for n_prompt in (16,) if fields else (16, 128):
        prompts = sample_prompts(text, rows, n_prompt, seed=3)
        n_new = 24 if args.quick else 512 - n_prompt

        def run(prompts: list[list[int]] = prompts, n_new: int = n_new) -> None:
            generated = generate(low, prompts, max_new_tokens=n_new, **fields)
            assert all(len(row) == n_new for row in generated.tokens)

        before = synchronised_time()
        run()
        first = synchronised_time() - before
        found[f"prompt {n_prompt}"] = {**rate(rows * n_new, run), "first call s": round(first, 2)}
    return found


def profile(low: Decoder, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """The kernels in which a captured step spends its time, at a context of 300."""
    from torch.profiler import ProfilerActivity

    if torch.device(args.device).type != "cuda":
        return {}
    with torch.no_grad():
        decoder = graph_decoder(low, rows)
        step = decoder.token_steps(GenerateConfig(), None, 1)
        decoder.begin(torch.full_like(decoder.state.lengths, 300), torch.full_like(decoder.state.last, 200))
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                step()
            torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in seen.events():
        if str(event.device_type).endswith("CUDA"):
            spent.setdefault(event.name[:60], []).append(event.time_range.elapsed_us())
    table = {name: [round(sum(t) / 10, 1), len(t) // 10] for name, t in spent.items()}
    top = dict(sorted(table.items(), key=lambda one: -one[1][0])[:14])
    n_kernels, busy = sum(n for _, n in table.values()), round(sum(us for us, _ in table.values()), 1)
    return {"kernels a step": n_kernels, "busy µs": busy, "µs and launches a step": top}


# ---- variants of the captured step


def graph_decoder(model: Decoder, rows: int, **options: Any) -> GraphDecoder:
    return GraphDecoder(model, GraphShape(rows, 1, 512), **options)


def time_steps(
    args: argparse.Namespace, rows: int, make: Callable[[], GraphDecoder], n_prompt: int = 16
) -> dict[str, Any]:
    """Time of captured steps only, from a context of 16 to 512."""
    with torch.no_grad():
        started = synchronised_time()
        decoder = make()
        step, at_once = decoder.token_steps(GenerateConfig(), None), BLOCK_STEPS
        captured = synchronised_time() - started
        n_new = 24 if args.quick else 512 - n_prompt

        def run() -> None:
            decoder.begin(torch.full_like(decoder.state.lengths, n_prompt), torch.full_like(decoder.state.last, n_new))
            for _ in range(0, n_new, at_once):
                step()

        run()
        found = rate(rows * n_new, run)
    return {**found, "µs a step": round(rows * 1e6 / found["tokens/s"], 1), "to capture s": round(captured, 1)}


def measure_variants(args: argparse.Namespace, report: Report) -> None:
    low = model_of(args, torch.bfloat16)
    for rows in BARS:
        for form in ("few", "many", "plain"):
            if (rows, form) != (64, "few"):
                report.attempt(
                    f"{form} + kernels, batch {rows}",
                    lambda rows=rows, form=form: time_steps(args, rows, lambda: graph_decoder(low, rows, form=form)),
                )
        report.attempt(
            f"plain + torch sdpa, batch {rows}",
            lambda rows=rows: time_steps(args, rows, lambda: graph_decoder(low, rows, form="plain", ops=TorchOps)),
        )
    if torch.device(args.device).type == "cuda":
        compare_tiles(args, report, low)
        report.attempt("copy TB/s", copy_bandwidth)


def compare_tiles(args: argparse.Namespace, report: Report, low: Decoder) -> None:
    """The same steps with other tile sizes; the defaults in ``kernels.decoding`` were chosen from these times."""
    from regard.kernels import decode_attention, decoding

    attention, linear = decode_attention.dot_tile, decoding.linear_tile
    choices = {1: [(64, 4, 3), (128, 8, 3), (256, 8, 2)], 64: [(32, 4, 4), (64, 2, 3), (128, 4, 2)]}
    for rows, several in choices.items():
        for tile in several:
            decode_attention.dot_tile = lambda *_, tile=tile: tile
            name = f"attention tile {tile}, batch {rows}"
            report.attempt(name, lambda rows=rows: time_steps(args, rows, lambda: graph_decoder(low, rows)))
    decode_attention.dot_tile = attention
    for tile in ((2, 2, 1024), (2, 4, 1024), (4, 4, 1024), (4, 4, 4096), (8, 4, 1024)):  # inside layers
        decoding.linear_tile = lambda n, k, tile=tile: tile if n <= 8192 else linear(n, k)
        report.attempt(f"product tile {tile}, batch 1", lambda: time_steps(args, 1, lambda: graph_decoder(low, 1)))
    for tile in ((8, 4, 1024), (16, 4, 1024), (32, 8, 1024)):
        decoding.linear_tile = lambda n, k, tile=tile: tile if n > 8192 else linear(n, k)
        report.attempt(f"head tile {tile}, batch 1", lambda: time_steps(args, 1, lambda: graph_decoder(low, 1)))
    decoding.linear_tile = linear


def copy_bandwidth() -> float:
    """TB/s of a copy on the GPU, reading and writing."""
    x = torch.empty(2**30, dtype=torch.int8, device="cuda").random_()
    y = torch.empty_like(x)
    for _ in range(3):
        y.copy_(x)
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(20):
        y.copy_(x)
    torch.cuda.synchronize()
    return round(20 * 2 * 2**30 / (time.perf_counter() - before) / 1e12, 2)


def measure_compiled(args: argparse.Namespace, report: Report) -> None:
    import torch._inductor.config as inductor

    low = model_of(args, torch.bfloat16)
    for rows in (64, 1):
        inductor.coordinate_descent_tuning = rows == 1  # generates kernels for products with one row
        report.attempt(
            f"inductor + kernel, batch {rows}",
            lambda rows=rows: time_steps(args, rows, lambda: graph_decoder(low, rows, form="plain", compile=True)),
        )
        torch._dynamo.reset()


# ---- transformers


def measure_transformers(args: argparse.Namespace, report: Report) -> None:
    def load() -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4} if args.quick else {}
        return GPT2LMHeadModel(GPT2Config(**sizes)).to(args.device, torch.bfloat16).eval()

    def measure(model: Any, rows: int) -> dict[str, float]:
        ids = torch.randint(0, 50_000, (rows, 16), device=args.device)

        def run(n_new: int = 8 if args.quick else 128) -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=n_new,
                max_new_tokens=n_new,
                pad_token_id=0,
            )

        run(8)
        return rate(rows * (8 if args.quick else 128), run)

    models: list[Any] = []
    report.attempt("transformers", lambda: models.append(load()))
    for rows in BARS:
        if models:
            report.attempt(f"transformers, batch {rows}", lambda rows=rows: measure(models[0], rows))
    low = model_of(args, torch.bfloat16)
    for rows in BARS:
        prompts, n_new = torch.randint(0, 50_000, (rows, 16)).tolist(), 8 if args.quick else 64

        def run(prompts: list[list[int]] = prompts, n_new: int = n_new) -> None:
            without_capture(low, prompts, max_new_tokens=n_new)

        report.attempt(f"ours eager, growing cache, batch {rows}", lambda n=rows * n_new: rate(n, run, 2))


# ---- translation


def measure_translation(args: argparse.Namespace, report: Report) -> None:
    """Transformer base, and transformers' Marian of the same sizes; then our tokens in fp32, captured and eager."""
    sizes = {**SMALL, "vocab_size": 500} if args.quick else {"vocab_size": 37_000}
    n_new = n_source = 8 if args.quick else 64
    torch.manual_seed(0)
    exact = build("transformer-base", max_len=256, eos_id=None, **sizes).to(args.device).eval()
    low = build("transformer-base", max_len=256, eos_id=None, **sizes).to(args.device, torch.bfloat16).eval()
    sources = {n: torch.randint(3, sizes["vocab_size"], (n, n_source)) for n, _ in TRANSLATION}
    for rows, beam in TRANSLATION:
        inputs = sources[rows].tolist()
        fields: dict[str, Any] = {"beam": beam, "max_new_tokens": n_new}

        def run(inputs: list[list[int]] = inputs, fields: dict[str, Any] = fields) -> None:
            generate(low, inputs, **fields)

        def first_and_later(inputs: list[list[int]] = inputs, fields: dict[str, Any] = fields) -> dict[str, Any]:
            before = synchronised_time()
            generate(low, inputs, **fields)
            return {"first call s": round(synchronised_time() - before, 2), **rate(len(inputs) * n_new, run, 5)}

        report.attempt(f"regard, batch {rows} beam {beam}", first_and_later)
    peers: list[Any] = []
    report.attempt("marian", lambda: peers.append(marian(args, sizes)))
    for rows, beam in TRANSLATION:
        ids = sources[rows].to(args.device)

        def theirs(ids: Tensor = ids, beam: int = beam) -> None:
            lengths = {"min_new_tokens": n_new, "max_new_tokens": n_new}
            peers[0].generate(ids, attention_mask=torch.ones_like(ids), num_beams=beam, do_sample=False, **lengths)

        def measure(rows: int = rows, run: Callable[[], None] = theirs) -> dict[str, float]:
            run()
            return rate(rows * n_new, run)

        report.attempt(f"transformers, batch {rows} beam {beam}", measure)
    for rows, beam in TRANSLATION:
        inputs, fields = sources[rows].tolist(), {"beam": beam, "max_new_tokens": n_new}
        same = lambda g=inputs, f=fields: generate(exact, g, **f).tokens == without_capture(exact, g, **f)  # noqa: E731 — bound for this turn
        report.attempt(f"fp32 tokens equal eager's, batch {rows} beam {beam}", lambda same=same: {"equal": same()})


def marian(args: argparse.Namespace, sizes: dict[str, Any]) -> Any:
    from transformers import MarianConfig, MarianMTModel

    width, heads, inner, n_layers = (64, 4, 128, 2) if args.quick else (512, 8, 2048, 6)
    stacks = {"layers": n_layers, "attention_heads": heads, "ffn_dim": inner}
    config = MarianConfig(
        **{f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in stacks.items()},
        **{"vocab_size": sizes["vocab_size"], "d_model": width, "max_position_embeddings": 256, "pad_token_id": 0},
        **{"eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None},
    )
    return MarianMTModel(config).to(args.device, torch.bfloat16).eval()


# ---- all of it


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    """Whether each bar is met; a bar that was not measured is not."""

    def number(*path: str) -> float:
        at: Any = found
        for name in path:
            at = at.get(name, {}) if isinstance(at, dict) else {}
        return at if isinstance(at, int | float) else float("nan")

    met = {}
    for rows, bar in BARS.items():
        ours_rate = number("ours", f"generate, batch {rows}", "prompt 128", "tokens/s")
        theirs = number("peer", f"transformers, batch {rows}", "tokens/s")
        print(f"batch {rows}: {ours_rate:,.0f} tokens/s, transformers {theirs:,.0f}: {ours_rate / theirs:.1f} times")
        met[f"{bar:,} tokens/s at batch {rows}"] = ours_rate >= bar
    for rows in (1, 8):
        met[f"fp32 tokens equal at batch {rows}"] = number("ours", f"fp32 tokens, batch {rows}", "equal") == 1
    for rows in (1, 8, 64):
        ratio = number("ours", f"bf16 error, batch {rows}", "ratio")
        met[f"bf16 error within 2 × eager's at batch {rows}"] = ratio <= 2
    for (rows, beam), times in TRANSLATION.items():
        case = f"batch {rows} beam {beam}"
        ours_rate, theirs = (number("translation", f"{who}, {case}", "tokens/s") for who in ("regard", "transformers"))
        ratio = ours_rate / theirs
        print(f"translation, {case}: {ours_rate:,.0f} tokens/s, transformers {theirs:,.0f}: {ratio:.1f} times")
        if times is not None:
            met[f"{times} times transformers at {case}"] = ours_rate >= times * theirs
        equal = number("translation", f"fp32 tokens equal eager's, {case}", "equal") == 1
        met[f"fp32 tokens equal eager's at {case}"] = equal
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds all parts together may take")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens, to see whether it runs")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        functions = {"ours": measure_ours, "translation": measure_translation, "peer": measure_transformers}
        functions |= {"variants": measure_variants, "compiled": measure_compiled}
        functions[args.alone](args, Report(time.perf_counter() + args.budget, args.json))
        return 0
    ends, found = time.monotonic() + args.budget, {}
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts.split(","):
            seconds, file = min(PARTS[part], ends - time.monotonic()), Path(folder) / f"{part}.json"
            if seconds < 12:
                found[part] = {"error": "no time left"}
                continue
            command = [sys.executable, __file__, "--alone", part, "--json", str(file), "--device", args.device]
            command += ["--budget", str(seconds - 6)] + (["--quick"] if args.quick else [])
            print(f"== {part}", flush=True)
            try:
                subprocess.run(command, timeout=seconds, check=False)
            except subprocess.TimeoutExpired:
                print(f"{part} took longer than {seconds:.0f} s", flush=True)
            found[part] = json.loads(file.read_text()) if file.exists() else {"error": "it ended without a result"}
    return finish(args, found)


def finish(args: argparse.Namespace, found: dict[str, Any]) -> int:
    print("\n| what | tokens/s | µs a step |\n|---|---|---|")
    for part, results in found.items():
        for name, result in results.items():
            rows = {name: result} if not name.startswith("generate") else {f"{name}, {k}": v for k, v in result.items()}
            for label, one in rows.items():
                if isinstance(one, dict) and "tokens/s" in one:
                    print(f"| {part}: {label} | {one['tokens/s']:,.0f} | {one.get('µs a step', '')} |")
    met = verdict(found)
    for name, yes in met.items():
        print_verdict(yes, name)
    if args.json:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        args.json.write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "bars": met, **found}, indent=1))
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
