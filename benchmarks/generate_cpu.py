"""Generation with a Transformer base on a CPU, in fp32 and int8, compared with transformers and CTranslate2.

python benchmarks/generate_cpu.py
python benchmarks/generate_cpu.py --rounds 10 --cases 32x4 --json
python benchmarks/generate_cpu.py --threads 1 --clock cpu              # on a machine that others use too

All have the same random weights, generate 64 tokens from sources of 32, and take turns, each in its own process; the
best round counts. Bars: in fp32 1.4 times transformers with the same tokens, in int8 3 times transformers and 0.9 times
CTranslate2's int8; our CTranslate2 engine 0.9 times CTranslate2 used directly; ONNX graphs in int8 1.5 times those in
fp32. Needs the extras ``hub`` and ``export``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import print_verdict

import regard
from regard.experiments.benchmarking import format_table

N_NEW, N_SOURCE, VOCAB = 64, 32, 32000
CASES = {"batch 1, greedy": (1, 1), "batch 1, beam 4": (1, 4), "batch 32, greedy": (32, 1), "batch 32, beam 4": (32, 4)}
BINDING_CASES = ("batch 1, greedy", "batch 32, beam 4")  # a bar missed in another case does not fail
Generate = Callable[[list[list[int]], int], list[list[int]]]
"""From sources and a number of beams to token ids."""


def random_sources(n: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(3, VOCAB, (n, N_SOURCE), generator=generator).tolist()


def random_model() -> regard.Model:
    """A model with random weights that does not repeat one token, as it would with a tied head and weak layers.

    The output matrices of the feed-forward networks are scaled up, and their rows are centred: hidden values after a
    ReLU are positive, so the networks would otherwise add the same vector for every text.
    """
    torch.manual_seed(0)
    model = regard.build("transformer-base", vocab_size=VOCAB, max_len=256).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("decoder") and name.endswith("ff.w_out.weight"):
                p.sub_(p.mean(1, keepdim=True)).mul_(20)
            elif name.startswith("decoder") and name.endswith("w_o.weight"):
                p.mul_(0.3)
        assert model.token is not None
        assert model.config.eos_id is not None
        model.token.weight[model.config.eos_id] = 0  # no text ends early, even in a runtime that cannot forbid it
    return model


def search_with(model: Any) -> Generate:
    """Our searches over a model of torch or ONNX Runtime."""
    from regard.generation import generate

    def run(rows: list[list[int]], beam: int) -> list[list[int]]:
        generated = generate(model, rows, beam=beam, min_new_tokens=N_NEW, max_new_tokens=N_NEW)
        return [texts[0].tokens for texts in generated.hypotheses]

    return run


def ours(folder: Path, int8: bool) -> Generate:
    from regard.layers.quantised_linear import quantise

    model: Any = regard.load(folder / "hf").eval()
    return search_with(quantise(model) if int8 else model)


def transformers(folder: Path) -> Generate:
    from transformers import MarianMTModel

    model = MarianMTModel.from_pretrained(folder / "hf").eval()

    def run(rows: list[list[int]], beam: int) -> list[list[int]]:
        fields = {"min_new_tokens": N_NEW, "max_new_tokens": N_NEW, "num_beams": beam, "do_sample": False}
        ids = torch.tensor(rows)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **fields)[:, 1:].tolist()

    return run


def ctranslate2(folder: Path, compute_type: str) -> Generate:
    from ctranslate2 import Translator

    runtime = Translator(
        str(folder / "ct2"), device="cpu", compute_type=compute_type, intra_threads=torch.get_num_threads()
    )

    def run(rows: list[list[int]], beam: int) -> list[list[int]]:
        results = runtime.translate_batch(
            [[f"<{token}>" for token in row] for row in rows], **{"beam_size": beam, "max_decoding_length": N_NEW}
        )
        return [[int(token[1:-1]) for token in result.hypotheses[0]] for result in results]

    return run


def ctranslate2_engine(folder: Path) -> Generate:
    """The same runtime, called through our engine."""
    from regard.export.engines import Ct2Engine

    config = regard.load(folder / "hf").config
    engine = Ct2Engine(folder / "ct2", config, None, compute_type="int8")
    return lambda rows, beam: engine.write(rows, beam=beam, max_new_tokens=N_NEW)


def onnx(folder: Path) -> Generate:
    """ONNX Runtime computes the logits, our searches choose the tokens."""
    from regard.export.onnx_export import open_onnx

    return search_with(open_onnx(folder, threads=torch.get_num_threads()))


CONTENDERS: dict[str, Callable[[Path], Generate]] = {
    "transformers fp32": transformers,
    "regard fp32": lambda folder: ours(folder, int8=False),
    "CTranslate2 fp32": lambda folder: ctranslate2(folder, "float32"),
    "regard int8": lambda folder: ours(folder, int8=True),
    "CTranslate2 int8": lambda folder: ctranslate2(folder, "int8"),
    "regard's engine for it": ctranslate2_engine,
    "ONNX fp32": lambda folder: onnx(folder / "onnx"),
    "ONNX int8": lambda folder: onnx(folder / "onnx-int8"),
}


def run_worker(name: str, folder: Path, threads: int, clock: str) -> None:
    """The main loop of a contender's process: reads a case per line, writes its seconds and tokens."""
    torch.set_num_threads(threads)
    now = time.process_time if clock == "cpu" else time.perf_counter
    generate = CONTENDERS[name](folder)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        n, beam = CASES[line.strip()]
        start = now()
        texts = generate(random_sources(n), beam)
        print(json.dumps([now() - start, texts]), flush=True)


class Contender:
    """A process that runs ``run_worker``."""

    def __init__(self, name: str, folder: Path, threads: int, clock: str) -> None:
        options = ["--worker", name, str(folder), "--threads", str(threads), "--clock", clock]
        command = [sys.executable, "-W", "ignore", __file__, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def measure(self, case: str) -> tuple[float, list[list[int]]]:
        assert self.process.stdin is not None
        print(case, file=self.process.stdin, flush=True)
        seconds, texts = self._read()
        return seconds, texts

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(cases: list[str], names: list[str], rounds: int, threads: int, clock: str) -> dict[str, dict[str, Any]]:
    """The best seconds and the tokens of each contender, by case."""
    measured: dict[str, dict[str, Any]] = {case: {} for case in cases}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = random_model()
        model.save(folder / "hf")
        if any(name.startswith("CTranslate2") for name in names):
            from regard.export.ctranslate2_export import export_ctranslate2

            export_ctranslate2(model, folder / "ct2")
        for name, subfolder in (("ONNX fp32", "onnx"), ("ONNX int8", "onnx-int8")):
            if name in names:
                from regard.export.onnx_export import export_onnx

                export_onnx(model, folder / subfolder, int8=name == "ONNX int8")
        contenders = {name: Contender(name, folder, threads, clock) for name in names}
        for case in cases:
            for turn in range(rounds + 1):  # the first is a warm-up
                for name, contender in contenders.items():
                    seconds, texts = contender.measure(case)
                    best = measured[case].get(name, (float("inf"), None))[0] if turn > 1 else float("inf")
                    measured[case][name] = (min(best, seconds), texts)
                best_so_far = ", ".join(f"{name} {seconds:.2f} s" for name, (seconds, _) in measured[case].items())
                print(f"{case}, turn {turn} of {rounds}: {best_so_far}", file=sys.stderr, flush=True)
        for contender in contenders.values():
            contender.close()
    return measured


def same_share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of texts with the same tokens."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(theirs)


def report(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tokens per second, and the ratios that have bars."""
    result: dict[str, Any] = {}
    for case, times in measured.items():
        speed = {name: CASES[case][0] * N_NEW / seconds for name, (seconds, _) in times.items()}
        result[case] = {"tokens_per_second": speed}
        pairs = (
            ("regard fp32", "transformers fp32"),
            ("regard int8", "transformers fp32"),
            ("regard int8", "CTranslate2 int8"),
            ("regard's engine for it", "CTranslate2 int8"),
            ("ONNX int8", "ONNX fp32"),
        )
        result[case]["ratios"] = {f"{a} / {b}": speed[a] / speed[b] for a, b in pairs if a in speed and b in speed}
        if "regard fp32" in times and "transformers fp32" in times:
            result[case]["same_texts"] = same_share(times["regard fp32"][1], times["transformers fp32"][1])
    return result


BARS = {
    "regard fp32 / transformers fp32": 1.4,
    "regard int8 / transformers fp32": 3.0,
    "regard int8 / CTranslate2 int8": 0.9,
    "regard's engine for it / CTranslate2 int8": 0.9,
    "ONNX int8 / ONNX fp32": 1.5,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--threads", type=int, default=2)
    clocks = "wall, or the process's own time, which other programs do not change if it has one thread"
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=clocks)
    parser.add_argument("--cases", default=",".join(f"{n}x{b}" for n, b in CASES.values()), help="batch x beam")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker[0], Path(options.worker[1]), options.threads, options.clock)
        return 0
    wanted = {tuple(int(x) for x in word.split("x")) for word in options.cases.split(",")}
    cases = [case for case, sizes in CASES.items() if sizes in wanted]
    result = report(measure(cases, options.only.split(","), options.rounds, options.threads, options.clock))
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        names = options.only.split(",")
        speeds = [[f"{result[case]['tokens_per_second'][name]:,.0f}" for case in cases] for name in names]
        table = [["tokens/s", *cases, ""], *([name, *speed, ""] for name, speed in zip(names, speeds, strict=True))]
        print(format_table(table), end="\n\n")
    passed, output = True, sys.stderr if options.json else sys.stdout
    for case in cases:
        for name, ratio in result[case]["ratios"].items():
            good = print_verdict(ratio >= BARS[name], f"{case}: {name} = {ratio:.2f}, bar {BARS[name]}", output)
            passed = passed and (good or case not in BINDING_CASES)
        if "same_texts" in result[case]:
            same = result[case]["same_texts"]
            passed &= print_verdict(same == 1.0, f"{case}: {same:.0%} of the fp32 texts are transformers'", output)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
