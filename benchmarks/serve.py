"""The gain from batching requests in a server, measured with real servers over HTTP.

python benchmarks/serve.py cpu                        # Transformer base in int8, 32 clients against one after another
python benchmarks/serve.py gpu                        # GPT-2 124M in streams, Transformer base with beams; bf16
python benchmarks/serve.py host                       # 64 streams where only the GPU is simulated: what HTTP takes
python benchmarks/serve.py attention                  # how requests for attention weights slow others down

Bars: on a CPU of two cores, 32 clients get 4 times the tokens/s of one client with consecutive requests. On a GPU, 64
streams of GPT-2 get 80 % of the tokens/s of ``generate`` with a batch of 64, and 32 streams 8 times those of one; 64
concurrent translations with 4 beams take a third of the time of transformers in batches of 64. While another client
requests attention weights, requests take at most 5 % longer than while it requests the same text without them.
Contenders take turns, and the median of their ratios counts, since the load of the machine may change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import torch

import regard
from regard.experiments.bench_serve import LoadResult, bench_serve, client_processes, start_server
from regard.experiments.benchmarking import format_table
from regard.export.quantise import quantise, write_int8
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer

VOCAB, N_NEW = 32_000, 32
# On a GPU, as in generate_gpu.py: GPT-2 from a prompt of 128 tokens to a context of 512; 64 tokens from sources of 64.
N_PROMPT, N_CONTINUED, N_TRANSLATED = 128, 384, 64
SMALL: dict[str, Any] = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 128}


# ---- models and prompts


def library_lines(n_files: int = 150) -> list[str]:
    """Lines of Python's standard library, a text that every machine has."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:n_files]
    lines = [line.strip() for file in files for line in file.read_text("utf-8", "ignore").splitlines()]
    return [line for line in lines if 20 <= len(line) <= 80]


def without_end(model: regard.Model) -> regard.Model:
    """The model with an end token that is never chosen, so that every text reaches its maximum length."""
    assert model.token is not None
    with torch.no_grad():
        model.token.weight[model.config.eos_id] = 0
    return model.eval()


def new_model(preset: str, lines: list[str], args: argparse.Namespace, **fields: Any) -> regard.Model:
    """A model with random weights, and a tokenizer trained on ``lines``."""
    template: Any = "none" if preset == "gpt2" else "eos"
    tokenizer = train_tokenizer(lines, "bpe", 1000 if args.quick else VOCAB, template)
    torch.manual_seed(0)
    sizes = SMALL if args.quick else {}
    ids = {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
    model = regard.build(preset, vocab_size=tokenizer.size, **ids, **(sizes | fields))
    model.processor = Processor(source=tokenizer)
    return without_end(model)


def prompts_of(lines: list[str]) -> list[str]:
    return lines[:: max(1, len(lines) // 64)][:64]


def long_prompts_of(lines: list[str], model: regard.Model, n_tokens: int) -> list[str]:
    """64 prompts of about ``n_tokens`` tokens."""
    assert model.processor is not None
    encode, prompts = model.processor.tokenizer.encode, list[str]()
    rows = iter(lines)
    for _ in range(64):
        prompt = next(rows)
        while len(encode(longer := f"{prompt} {next(rows)}")) <= n_tokens:
            prompt = longer
        prompts.append(prompt)
    return prompts


# ---- requests


Pair = tuple[LoadResult, LoadResult]


class Row(NamedTuple):
    """One comparison: the median ratio, its lower bar, and the figures behind it."""

    what: str
    ratio: float
    bar: float
    figures: str


def load_in_turns(
    args: argparse.Namespace, url: str, prompts: list[str], counts: tuple[int, int], **load: Any
) -> list[Pair]:
    """Measure two numbers of clients in turns, with 64 requests of many clients and 8 of one."""
    pairs = []
    for number in range(args.rounds):
        pair = [measure_load(url, prompts, n, requests=min(64, 8 * n), **load) for n in counts]
        for result in pair:
            rate = f"{result.tokens_per_s:,.0f} tokens/s, first token p99 {1e3 * result.first_p99_s:,.0f} ms"
            print(f"round {number + 1}, {result.clients} clients: {rate}", file=sys.stderr, flush=True)
        pairs.append((pair[0], pair[1]))
    return pairs


def measure_load(
    url: str, prompts: list[str], clients: int, requests: int, max_tokens: int = N_NEW, **load: Any
) -> LoadResult:
    (result,) = bench_serve(
        url,
        clients=(clients,),
        requests=requests,
        prompts=prompts,
        max_tokens=max_tokens,
        processes=client_processes(),
        **load,
    ).results
    if result.errors:
        raise SystemExit(f"{clients} clients: {result.errors}")
    return result


def throughput_row(name: str, pairs: list[Pair], bar: float) -> Row:
    ratios = [many.tokens_per_s / few.tokens_per_s for few, many in pairs]
    few, many = ([round(pair[side].tokens_per_s) for pair in pairs] for side in (0, 1))
    first = [round(1e3 * pair[1].first_p99_s) for pair in pairs]
    return Row(name, statistics.median(ratios), bar, f"{few} and {many} tokens/s; first token, p99: {first} ms")


# ---- the parts


def measure_cpu(args: argparse.Namespace, folder: Path) -> list[Row]:
    lines = library_lines()
    write_int8(quantise(new_model("transformer-base", lines, args, max_len=256)), folder)
    with start_server(str(folder), args.device) as url:
        pairs = load_in_turns(args, url, prompts_of(lines), (1, 32))
    return [throughput_row("Transformer base int8: 32 clients / one after another", pairs, 4.0)]


def measure_gpu(args: argparse.Namespace, folder: Path) -> list[Row]:
    lines = library_lines()
    speaker, translator = (
        new_model(preset, lines, args, **fields).to(torch.bfloat16)
        for preset, fields in (("gpt2", {}), ("transformer-base", {"max_len": 256}))
    )
    prompts = long_prompts_of(lines, speaker, N_PROMPT)
    sources = long_prompts_of(lines, translator, N_TRANSLATED)
    texts: dict[str, Any] = {"max_tokens": N_CONTINUED}
    rows = []
    with start_server(str(speaker.save(folder / "speaker")), args.device) as url:
        pairs = load_in_turns(args, url, prompts, (1, 32), **texts)
        rows.append(throughput_row("GPT-2: 32 streams / one", pairs, 8.0))
        offline = generate_offline(speaker.to(args.device), prompts, args.rounds)
        served = [measure_load(url, prompts, 64, 512, **texts).tokens_per_s for _ in range(args.rounds)]
    share = statistics.median(served) / statistics.median(offline)
    figures = f"{_rounded(served)} and {_rounded(offline)} tokens/s"
    rows.append(Row("GPT-2: 64 streams / generate with a batch of 64", share, 0.8, figures))
    with start_server(str(translator.save(folder / "translator")), args.device) as url:
        texts = {"max_tokens": N_TRANSLATED, "beams": 4}
        served = [measure_load(url, sources, 64, 512, **texts).tokens_per_s for _ in range(args.rounds)]
    theirs = generate_with_transformers(translator, sources, args)
    times = statistics.median(served) / statistics.median(theirs)
    figures = f"{_rounded(served)} and {_rounded(theirs)} tokens/s"
    rows.append(Row("Transformer base, 4 beams: 64 requests / transformers in batches of 64", times, 3.0, figures))
    return rows


def measure_host(args: argparse.Namespace, folder: Path) -> list[Row]:
    """What is left of a GPU's tokens/s when its texts are streamed over HTTP."""
    import simulated_gpu

    lines = library_lines()
    model = new_model("gpt2", lines, args, **SMALL)
    prompts = long_prompts_of(lines, model, N_PROMPT)
    with start_server(str(model.save(folder)), args.device, simulated_gpu.PROGRAM) as url:
        measure_load(url, prompts, 64, 64, N_CONTINUED)
        rates = [measure_load(url, prompts, 64, 512, N_CONTINUED).tokens_per_s for _ in range(args.rounds)]
    rate = simulated_gpu.TOKENS_PER_SECOND
    return [Row("64 streams / the simulated GPU", statistics.median(rates) / rate, 0.8, f"{_rounded(rates)} tokens/s")]


def _rounded(rates: list[float]) -> list[int]:
    return [round(rate) for rate in rates]


def generate_offline(model: regard.Model, prompts: list[str], rounds: int) -> list[float]:
    """Tokens a second of ``generate`` with all prompts in one batch, after two to warm up and to capture."""

    def tokens_per_second() -> float:
        start = time.perf_counter()
        written = regard.generate(model, prompts, max_new_tokens=N_CONTINUED)
        return sum(map(len, written.tokens)) / (time.perf_counter() - start)

    for _ in range(2):
        tokens_per_second()
    return [tokens_per_second() for _ in range(rounds)]


def generate_with_transformers(model: regard.Model, prompts: list[str], args: argparse.Namespace) -> list[float]:
    """The same for transformers' Marian of the same sizes, with 4 beams."""
    from generate_gpu import marian

    processor = model.processor
    assert processor is not None
    ids = [processor.tokenizer.encode(prompt)[:N_TRANSLATED] for prompt in prompts]
    width = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=args.device)
    theirs, mask = marian(args, {"vocab_size": model.config.vocab_size}), (tokens > 0).long()

    def tokens_per_second() -> float:
        start = time.perf_counter()
        lengths = {"min_new_tokens": N_TRANSLATED, "max_new_tokens": N_TRANSLATED}
        theirs.generate(tokens, attention_mask=mask, num_beams=4, do_sample=False, **lengths).cpu()
        return len(prompts) * N_TRANSLATED / (time.perf_counter() - start)

    tokens_per_second()
    return [tokens_per_second() for _ in range(args.rounds)]


def measure_attention(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Seven clients, and an eighth that requests attention weights in half of the rounds."""
    lines = library_lines()
    prompts = prompts_of(lines)
    write_int8(quantise(new_model("transformer-base", lines, args, max_len=256)), folder)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with start_server(str(folder), args.device) as url:
        for number in range(2 * args.rounds):
            has_attention = number % 4 in (1, 2)  # without, with, with, without
            with eighth_client(url, prompts, {"kind": "cross", "layers": [-1]} if has_attention else None):
                result = measure_load(url, prompts, 7, requests=28)
            seconds[has_attention].append(result.whole_p50_s)
            print(f"attention {has_attention}: {result.whole_p50_s:.2f} s", file=sys.stderr, flush=True)
    without, with_attention = (seconds[x] for x in (False, True))
    ratio = statistics.median(without) / statistics.median(with_attention)
    figures = f"p50 of the others: {without} s without, {with_attention} s with it"
    return [Row("time of others while one client does not / does ask for attention", ratio, 1 / 1.05, figures)]


@contextmanager
def eighth_client(url: str, prompts: list[str], attention: dict[str, Any] | None) -> Iterator[None]:
    """A client that sends one request after the other while the block runs."""
    over = threading.Event()
    body = {"model": _served_name(url), "max_tokens": N_NEW, "temperature": 0, "attention": attention}

    def send_requests() -> None:
        for prompt in cycle(prompts):
            if over.is_set():
                return
            content = json.dumps({**body, "prompt": prompt}).encode()
            urlopen(Request(f"{url}/v1/completions", content, {"Content-Type": "application/json"})).read()

    client = threading.Thread(target=send_requests)
    client.start()
    try:
        yield
    finally:
        over.set()
        client.join()


def _served_name(url: str) -> str:
    with urlopen(f"{url}/v1/models") as response:
        return str(json.loads(response.read())["data"][0]["id"])


PARTS: dict[str, tuple[Callable[[argparse.Namespace, Path], list[Row]], str]] = {
    "cpu": (measure_cpu, "cpu"),
    "gpu": (measure_gpu, "cuda"),
    "host": (measure_host, "cpu"),
    "attention": (measure_attention, "cpu"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", help="cpu, but of the part gpu cuda, unless given")
    parser.add_argument("--quick", action="store_true", help="small models: whether it runs, not how fast")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    measure, device = PARTS[args.part]
    args.device = args.device or device
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    if args.json:
        print(json.dumps([row._asdict() for row in rows]))
    else:
        table = [["", "ratio", "bar", "", "figures"]]
        table += [
            [x.what, f"{x.ratio:.2f}", f"{x.bar:.2f}", "PASS" if x.ratio >= x.bar else "FAIL", x.figures] for x in rows
        ]
        print(format_table(table))
    return int(any(row.ratio < row.bar for row in rows))


if __name__ == "__main__":
    sys.exit(main())
