"""The translator attention was invented for: a GRU that reads both ways, and an alignment it learns by itself.

You learn: additive attention (Bahdanau et al. 2015, §3.1), e = v·tanh(W s + U h), lets each Korean word look back at
the English words it comes from. Nobody told it the alignment; the corpus knows it, and says how good it has become.

    python examples/bahdanau_translator.py [pairs.tsv] [--steps 700]
"""

import argparse
import tempfile
from pathlib import Path

import regard
from regard.lens.head_scores import alignment_error
from regard.recipes import run_config


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a line a pair, a tab between; unless given, the embedded en-ko")
    parser.add_argument("--steps", type=int, default=700)
    args = parser.parse_args()
    words = ["model=bahdanau-gru", "model.d_model=128", "train.optimiser=adamw", "train.lr=4e-3", "train.compile=off"]
    words += [f"train.steps={args.steps}", "train.warmup=50", "train.samples=0", "train.eval_every=0"]
    words += [f"data.source={args.file}"] if args.file else ["data.epoch_examples=20000", "data.valid_rows=200"]
    with tempfile.TemporaryDirectory() as folder:
        result = regard.train(run_config("translate", [*words, f"train.out={folder}/run"]), style="quiet")
        model = regard.load(f"{folder}/run")
    print(f"after {result.steps} steps, {result.seconds:.0f} s: BLEU {result.metrics['bleu']:.1f} on what was held out")
    sentence = "[polite] The cat ate fish." if not args.file else Path(args.file).read_text().split("\t", 1)[0]
    seen = regard.look(model, sentence)
    print(f"{sentence} → {seen.target_text}")
    seen.print(kind="cross", words=True, specials=False)
    found = {"bleu": result.metrics["bleu"], "text": seen.target_text, "weights": seen.weights(layer=0, kind="cross")}
    if not args.file:
        score = alignment_error(model, 50)
        best, blind = score["best"]["value"], score["diagonal"]
        print(f"alignment error rate {100 * best:.0f} %; guessing the word at the same place: {100 * blind:.0f} %")
        found |= {"error": best, "blind": blind}
    return found


if __name__ == "__main__":
    main()
