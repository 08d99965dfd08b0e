"""Captions: an encoder looks at patches of a picture, a decoder says what it sees.

You learn: with cross-attention a word of the caption looks at the patches it speaks of. In these drawn scenes the true
place of every thing is known, so where attention points can be scored, against a guess that never looks.

    python examples/captioning.py [captions.tsv] [--steps 400]       an image file and a caption in each line
"""

import argparse
import tempfile

import regard
from regard.data.corpora import open_corpus
from regard.lens.head_scores import pointing
from regard.recipes import run_config


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="unless given, the embedded scenes")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    words = [f"train.steps={args.steps}", "train.eval_every=0", "train.samples=0", "train.compile=off"]
    words += [f"data.source={args.file}"] if args.file else ["data.epoch_examples=4000", "data.valid_rows=100"]
    with tempfile.TemporaryDirectory() as folder:
        result = regard.train(run_config("caption", [*words, f"train.out={folder}/run"]), style="quiet")
        model = regard.load(f"{folder}/run")
    bleu = result.metrics["bleu_4"]
    print(f"{result.steps} steps, {result.seconds:.0f} s: BLEU-4 {bleu:.1f} on scenes that were held out")
    found = {"bleu": bleu}
    if args.file:
        return found
    corpus = open_corpus("shapes")
    for place in range(4):
        picture = corpus.example("valid", place)
        print(f"  {regard.caption(model, picture.pillow())[0]}\n    true: {picture.caption}")
    score = pointing(model, 30)
    best, chance = score["best"]["value"], score["chance"]
    print(f"a word's heaviest patch lies on its thing: {100 * best:.0f} % (best head), by chance {100 * chance:.0f} %")
    return {**found, "pointing": best, "chance": chance}


if __name__ == "__main__":
    main()
