"""ELECTRA compared with masked language modelling at equal compute, on the embedded text, on a CPU.

    python benchmarks/electra.py OUT [--steps 600] [--width 128] [--layers 3] [--vocab 4096] [--seeds 0 1 2]

Both train the same encoder on `stdlib`; ELECTRA has fewer steps, because its generator takes time too. Then each, and
an encoder with random weights, is fine-tuned on few lines of Python to tag every word with its role (function, method,
attribute, parameter, variable, …); the held-out lines come from other modules. Prints a table, and writes
OUT/electra.json.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import statistics
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import regard
from regard.recipes import run_config

SMALL = ("train.device=cpu", "train.samples=0", "train.eval_every=0")
LENGTH = 64


def write_tags(out: Path, n_train: int, n_valid: int = 1000) -> tuple[Path, Path]:
    """Lines of code as CoNLL files, each word with its role; the modules of the two files differ."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda file: hashlib.sha256(file.name.encode()).hexdigest())
    paths = []
    for name, some, n_lines in (("train", files[::2], n_train), ("valid", files[1::2], n_valid)):
        lines = [line for file in some for line in tag_lines(file.read_text(encoding="utf-8", errors="ignore"))]
        lines.sort(key=lambda line: hashlib.sha256(line.encode()).hexdigest())
        paths.append(out / f"{name}.conll")
        paths[-1].write_text("\n".join(lines[:n_lines]), encoding="utf-8")
    return paths[0], paths[1]


def tag_lines(source: str) -> list[str]:
    """The logical lines of a module that hold a name, one word and its role per row."""
    roles: dict[tuple[int, int], str] = {}
    for node in ast.walk(ast.parse(source)):
        for place, role in find_roles(node):
            roles.setdefault(place, role)  # a call comes before the name that it calls
    lines: list[str] = []
    rows: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            if len(rows) > 3 and any(not row.endswith(" O\n") for row in rows):
                lines.append("".join(rows))
            rows = []
        elif token.string.strip() and not any(x.isspace() for x in token.string):
            line = token.line.encode()[: len(token.line[: token.start[1]].encode())]  # ast counts bytes
            rows.append(f"{token.string} {roles.get((token.start[0], len(line)), 'O')}\n")
    return lines


def find_roles(node: ast.AST) -> Iterator[tuple[tuple[int, int], str]]:
    """The places (line, byte) of the names in a node, and what each is there."""
    match node:
        case ast.Call(func=ast.Name() as name):
            yield (name.lineno, name.col_offset), "function"
        case ast.Call(func=ast.Attribute(end_lineno=int(line), end_col_offset=int(end), attr=attr)):
            yield (line, end - len(attr.encode())), "method"
        case ast.Attribute(end_lineno=int(line), end_col_offset=int(end), attr=attr):
            yield (line, end - len(attr.encode())), "attribute"
        case ast.Name(ctx=ast.Store()):
            yield (node.lineno, node.col_offset), "assigned"
        case ast.Name():
            yield (node.lineno, node.col_offset), "variable"
        case ast.arg():
            yield (node.lineno, node.col_offset), "parameter"
        case ast.keyword(arg=str()):
            yield (node.lineno, node.col_offset), "keyword"
        case ast.FunctionDef():
            yield (node.lineno, node.col_offset + len("def ")), "definition"
        case ast.ClassDef():
            yield (node.lineno, node.col_offset + len("class ")), "class"


def train_flops(width: int, n_layers: int, head: float) -> float:
    """Operations of a step for a row of text: three passes of the layers, and ``head`` multiplications a token."""
    sizes = {"d_model": width, "n_heads": max(1, width // 32), "d_ff": 4 * width, "n_layers": n_layers}
    config = regard.ModelConfig(architecture="encoder", head="none", positions="rope", max_len=LENGTH, **sizes)
    return 3 * float(regard.cost(config, batch=1, length=LENGTH).flops_forward.total) + 6 * LENGTH * head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    for name, default in (("width", 128), ("layers", 3), ("vocab", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tune-steps", type=int, default=300)
    parser.add_argument("--tune-lr", type=float, default=1e-3)
    parser.add_argument("--labelled", type=int, default=200, help="lines to fine-tune on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    train_file, valid_file = write_tags(out, args.labelled)
    # Masked LM computes logits of the 15 % masked tokens only; a discriminator needs one logit for every token.
    width, layers, vocab = args.width, args.layers, args.vocab
    sizes = [f"model.d_model={width}", f"model.n_heads={width // 32}", f"model.d_ff={4 * width}"]
    sizes += [f"model.n_layers={layers}", f"model.max_len={LENGTH}"]
    common = [*SMALL, f"data.max_len={LENGTH}", "train.batch_tokens=2048"]
    generator = width // 4
    mlm = train_flops(width, layers, 0.15 * width * (width + vocab))
    electra = train_flops(width, layers, width * (width + 1))
    electra += train_flops(generator, layers, 0.15 * width * (generator + vocab))
    steps = {"mlm": args.steps, "electra": round(args.steps * mlm / electra)}
    print(f"a step of ELECTRA costs {electra / mlm:.3f} of one of masked LM: steps {steps}", flush=True)

    def train(task: str, run: Path, *words: str) -> Path:
        if not (run / "model").is_dir():
            regard.train(run_config(task, [*common, *words, f"train.out={run}"]), style="quiet")
        return run

    accuracies: dict[str, list[float]] = {"mlm": [], "electra": [], "random": []}
    for seed in args.seeds:
        seeded = f"train.seed={seed}"
        first = out / f"mlm-{args.seeds[0]}" / "tokenizer.json"  # one tokenizer for all
        for start, each in accuracies.items():
            tokenizer = f"data.tokenizer={first}" if first.exists() else f"data.vocab_size={vocab}"
            begin = [*sizes, tokenizer]
            if start != "random":
                more = [f"model.generator_width={generator}"] if start == "electra" else []
                more += [f"train.steps={steps[start]}", "train.save_every=0", seeded]
                begin = [f"train.init={train(start, out / f'{start}-{seed}', *begin, *more)}"]
            words = [f"data={train_file}", f"data.valid={valid_file}", f"train.steps={args.tune_steps}", seeded]
            words += [f"train.lr={args.tune_lr}", "train.warmup=20"]
            tuned = train("tag", out / f"{start}-{seed}-tags", *begin, *words)
            each.append(float(regard.evaluate(tuned).metrics["accuracy"]))
            print(start, seed, each[-1], flush=True)
    rows = {
        start: {"each": each, "mean": statistics.mean(each), "sd": statistics.stdev(each) if len(each) > 1 else 0.0}
        for start, each in accuracies.items()
    }
    (out / "electra.json").write_text(json.dumps({"steps": steps, **rows}, indent=2), encoding="utf-8")
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
