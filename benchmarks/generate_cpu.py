"""How fast does a Transformer base write on a CPU, in fp32 and in int8, beside transformers and CTranslate2?

python benchmarks/generate_cpu.py
python benchmarks/generate_cpu.py --rounds 10 --cases 32x4 --json
python benchmarks/generate_cpu.py --threads 1 --clock cpu              # on a machine that others use too

All have the same random weights, write 64 tokens about sources of 32, and take turns, each in a process of its own; the
best of the rounds counts. Asked of ours: in fp32 1.4 times transformers with the same tokens, in int8 3 times
transformers and 0.9 times CTranslate2's int8; of our CTranslate2 engine 0.9 times CTranslate2 used directly; of ONNX
graphs in int8 1.5 times those in fp32. Needs the extras ``hub`` and ``export``.
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

import regard
from regard.experiments.benchmarking import format_table

N_NEW, N_SOURCE, VOCAB = 64, 32, 32000
CASES = {"batch 1, greedy": (1, 1), "batch 1, beam 4": (1, 4), "batch 32, greedy": (32, 1), "batch 32, beam 4": (32, 4)}
ASKED = ("batch 1, greedy", "batch 32, beam 4")  # the cases that decide
Write = Callable[[list[list[int]], int], list[list[int]]]
"""From sources and a number of beams to texts."""


def sources(n: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(3, VOCAB, (n, N_SOURCE), generator=generator).tolist()


def model_with_something_to_say() -> regard.Model:
    """Random weights that do not repeat one token for ever, as a tied head does where layers add little to the token.

    The feed-forward networks are made loud. After a ReLU everything is positive, so their rows are made to sum to zero:
    what they add would else be the same vector for every text.
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
        model.token.weight[model.config.eos_id] = 0  # no text ends before it is full, whatever a runtime forbids
    return model


def ours(folder: Path, int8: bool) -> Write:
    from regard.generation import generate
    from regard.layers.quantised_linear import quantise

    model: Any = regard.load(folder / "hf").eval()
    if int8:
        model = quantise(model)

    def write(rows: list[list[int]], beam: int) -> list[list[int]]:
        made = generate(model, rows, beam=beam, min_new_tokens=N_NEW, max_new_tokens=N_NEW)
        return [texts[0].tokens for texts in made.hypotheses]

    return write


def transformers(folder: Path) -> Write:
    from transformers import MarianMTModel

    model = MarianMTModel.from_pretrained(folder / "hf").eval()

    def write(rows: list[list[int]], beam: int) -> list[list[int]]:
        fields = {"min_new_tokens": N_NEW, "max_new_tokens": N_NEW, "num_beams": beam, "do_sample": False}
        ids = torch.tensor(rows)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **fields)
        return made[:, 1:].tolist()

    return write


def ctranslate2(folder: Path, compute_type: str) -> Write:
    from ctranslate2 import Translator

    runtime = Translator(
        str(folder / "ct2"), device="cpu", compute_type=compute_type, intra_threads=torch.get_num_threads()
    )

    def write(rows: list[list[int]], beam: int) -> list[list[int]]:
        made = runtime.translate_batch(
            [[f"<{token}>" for token in row] for row in rows], **{"beam_size": beam, "max_decoding_length": N_NEW}
        )
        return [[int(token[1:-1]) for token in one.hypotheses[0]] for one in made]

    return write


def ctranslate2_engine(folder: Path) -> Write:
    """The same runtime behind our own functions."""
    from regard.export.engines import Ct2Engine

    config = regard.load(folder / "hf").config
    engine = Ct2Engine(folder / "ct2", config, None, compute_type="int8")
    return lambda rows, beam: engine.write(rows, beam=beam, max_new_tokens=N_NEW)


def onnx(folder: Path) -> Write:
    """ONNX Runtime computes the logits, our searches choose the tokens."""
    from regard.export.onnx_export import open_onnx
    from regard.generation import generate

    model = open_onnx(folder, threads=torch.get_num_threads())

    def write(rows: list[list[int]], beam: int) -> list[list[int]]:
        made = generate(model, rows, beam=beam, min_new_tokens=N_NEW, max_new_tokens=N_NEW)
        return [texts[0].tokens for texts in made.hypotheses]

    return write


CONTENDERS: dict[str, Callable[[Path], Write]] = {
    "transformers fp32": transformers,
    "regard fp32": lambda folder: ours(folder, int8=False),
    "CTranslate2 fp32": lambda folder: ctranslate2(folder, "float32"),
    "regard int8": lambda folder: ours(folder, int8=True),
    "CTranslate2 int8": lambda folder: ctranslate2(folder, "int8"),
    "regard's engine for it": ctranslate2_engine,
    "ONNX fp32": lambda folder: onnx(folder / "onnx"),
    "ONNX int8": lambda folder: onnx(folder / "onnx-int8"),
}


def work(name: str, folder: Path, threads: int, clock: str) -> None:
    """A contender's process: a case a line in, its seconds and tokens out."""
    torch.set_num_threads(threads)
    now = time.process_time if clock == "cpu" else time.perf_counter
    write = CONTENDERS[name](folder)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        n, beam = CASES[line.strip()]
        start = now()
        texts = write(sources(n), beam)
        print(json.dumps([now() - start, texts]), flush=True)


class Contender:
    """The other end of ``work``."""

    def __init__(self, name: str, folder: Path, threads: int, clock: str) -> None:
        options = ["--worker", name, str(folder), "--threads", str(threads), "--clock", clock]
        command = [sys.executable, "-W", "ignore", __file__, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def ask(self, case: str) -> tuple[float, list[list[int]]]:
        assert self.process.stdin is not None
        print(case, file=self.process.stdin, flush=True)
        seconds, texts = self._answer()
        return seconds, texts

    def _answer(self) -> Any:
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
    """Of each case and contender the best seconds and the tokens."""
    found: dict[str, dict[str, Any]] = {case: {} for case in cases}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = model_with_something_to_say()
        model.save(folder / "hf")
        if any(name.startswith("CTranslate2") for name in names):
            from regard.export.ctranslate2_export import export_ctranslate2

            export_ctranslate2(model, folder / "ct2")
        for name, place in (("ONNX fp32", "onnx"), ("ONNX int8", "onnx-int8")):
            if name in names:
                from regard.export.onnx_export import export_onnx

                export_onnx(model, folder / place, int8=name == "ONNX int8")
        contenders = {name: Contender(name, folder, threads, clock) for name in names}
        for case in cases:
            for turn in range(rounds + 1):  # the first one warms up
                for name, contender in contenders.items():
                    seconds, texts = contender.ask(case)
                    best = found[case].get(name, (float("inf"), None))[0] if turn > 1 else float("inf")
                    found[case][name] = (min(best, seconds), texts)
                best_so_far = ", ".join(f"{name} {seconds:.2f} s" for name, (seconds, _) in found[case].items())
                print(f"{case}, turn {turn} of {rounds}: {best_so_far}", file=sys.stderr, flush=True)
        for contender in contenders.values():
            contender.close()
    return found


def same_share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Which share of the texts is the same, token for token."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(theirs)


def report(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tokens a second, and the ratios asked for."""
    result: dict[str, Any] = {}
    for case, times in found.items():
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


ASKED_RATIOS = {
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
    clocks = "wall, or the process's own time: with one thread, what else the machine does then does not count"
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=clocks)
    parser.add_argument("--cases", default=",".join(f"{n}x{b}" for n, b in CASES.values()), help="batch x beam")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], Path(options.worker[1]), options.threads, options.clock)
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
    passed = True
    for case in cases:
        for name, ratio in result[case]["ratios"].items():
            good = ratio >= ASKED_RATIOS[name]
            passed = passed and (good or case not in ASKED)
            line = f"{'PASS' if good else 'FAIL'}  {case}: {name} = {ratio:.2f}, asked {ASKED_RATIOS[name]}"
            print(line, file=sys.stderr if options.json else sys.stdout)
        if "same_texts" in result[case]:
            same = result[case]["same_texts"]
            passed = passed and same == 1.0
            line = f"{'PASS' if same == 1.0 else 'FAIL'}  {case}: {same:.0%} of the fp32 texts are transformers'"
            print(line, file=sys.stderr if options.json else sys.stdout)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
