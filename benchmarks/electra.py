"""ELECTRA compared with masked language modelling at equal compute, on the embedded text, on a CPU.

    python benchmarks/electra.py OUT [--steps 600] [--width 128] [--layers 3] [--vocab 4096] [--seeds 0 1 2]

Both train the same encoder on `stdlib`; ELECTRA has fewer steps, because its generator takes time too. Then each, and
an encoder with random weights, is tuned on few labelled texts: six lines and the module they come from, one of 16 of
the standard library; other lines of the same modules are held out. Prints a table, and writes OUT/electra.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sysconfig
from pathlib import Path

import regard
from regard.recipes import run_config

SMALL = ("train.device=cpu", "train.samples=0", "train.eval_every=0")
LENGTH, N_MODULES, N_LINES = 64, 16, 6


def write_labels(out: Path, n_train: int) -> tuple[Path, Path]:
    """Passages of the largest modules, comments and docstrings included; every third is held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda file: (-file.stat().st_size, file.name))[:N_MODULES]
    rows: dict[str, list[str]] = {"train": [], "valid": []}
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        texts = [" ".join(lines[at : at + N_LINES]).replace("\t", " ") for at in range(0, len(lines), N_LINES)]
        texts = sorted((x for x in texts if len(x) > 40), key=lambda text: hashlib.sha256(text.encode()).hexdigest())
        rows["valid"] += [f"{text}\t{file.stem}\n" for text in texts[:40]]
        rows["train"] += [f"{text}\t{file.stem}\n" for text in texts[40 : 40 + n_train]]
    paths = out / "train.tsv", out / "valid.tsv"
    for path, name in zip(paths, rows, strict=True):
        path.write_text("".join(rows[name]), encoding="utf-8")
    return paths


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
    parser.add_argument("--tune-lr", type=float, default=2e-3)
    parser.add_argument("--labelled", type=int, default=20, help="texts of each module")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    train_file, valid_file = write_labels(out, args.labelled)
    # Masked LM computes logits of the 15 % masked tokens only; a discriminator needs one logit for every token.
    width, layers, vocab = args.width, args.layers, args.vocab
    sizes = [f"model.d_model={width}", f"model.n_heads={width // 32}", f"model.d_ff={4 * width}"]
    sizes += [f"model.n_layers={layers}", f"data.vocab_size={vocab}"]
    generator = width // 4
    mlm = train_flops(width, layers, 0.15 * width * (width + vocab))
    electra = train_flops(width, layers, width * (width + 1))
    electra += train_flops(generator, layers, 0.15 * width * (generator + vocab))
    steps = {"mlm": args.steps, "electra": round(args.steps * mlm / electra)}
    print(f"a step of ELECTRA is {electra / mlm:.3f} of one of masked LM: steps {steps}", flush=True)
    accuracies: dict[str, list[float]] = {"mlm": [], "electra": [], "none": []}
    for seed in args.seeds:
        for start in accuracies:
            run = out / f"{start}-{seed}"
            more = [f"model.generator_width={generator}"] if start == "electra" else []
            first = out / f"mlm-{args.seeds[0]}" / "tokenizer.json"
            more += [f"data.tokenizer={first}"] if first.exists() else []
            if start != "none" and not (run / "model").is_dir():
                lengths = [f"data.max_len={LENGTH}", f"model.max_len={LENGTH}", "train.batch_tokens=2048"]
                words = [*SMALL, *sizes, *lengths, *more, f"train.steps={steps[start]}", f"train.seed={seed}"]
                regard.train(run_config(start, [*words, f"train.out={run}", "train.save_every=0"]), style="quiet")
            words = [f"data={train_file}", f"data.valid={valid_file}", "data.kind=labelled", f"train.seed={seed}"]
            words += [*SMALL, f"train.steps={args.tune_steps}", f"train.lr={args.tune_lr}", "train.warmup=20"]
            words += ["train.batch_tokens=2048", f"data.max_len={LENGTH}"]
            words += [f"train.init={run}"] if start != "none" else [*sizes, *more, f"model.max_len={LENGTH}"]
            tuned = out / f"{start}-{seed}-tuned"
            if not (tuned / "model").is_dir():
                regard.train(run_config("classify", [*words, f"train.out={tuned}"]), style="quiet")
            accuracies[start].append(float(regard.evaluate(tuned).metrics["accuracy"]))
            print(start, seed, accuracies[start][-1], flush=True)
    rows = {
        start: {"each": each, "mean": statistics.mean(each), "sd": statistics.stdev(each) if len(each) > 1 else 0.0}
        for start, each in accuracies.items()
    }
    (out / "electra.json").write_text(json.dumps({"steps": steps, **rows}, indent=2), encoding="utf-8")
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
