"""Sentiment: what a classifier reads besides single words.

You learn: a Transformer classifier of a few hundred thousand parameters learns that "not" turns a sentence around,
also before words it never met there: half of the adjectives are never negated in training. Counting good and bad words
would get every negated sentence wrong.

    python examples/sentiment.py [reviews.csv] [--steps 200]        a text and a label in each line
"""

import argparse
import random
import tempfile
from pathlib import Path

import regard
from regard.recipes import run_config

GOOD = ["good", "wonderful", "funny", "moving", "brilliant", "charming", "superb", "lovely"]
BAD = ["bad", "terrible", "boring", "dull", "awful", "weak", "silly", "poor"]
THINGS = ["film", "story", "music", "cast", "ending", "script", "camera", "plot", "dialogue", "hero"]
FRAMES = ["the {} was {}", "honestly, the {} was {}", "i thought the {} was {}", "we all found that the {} was {}"]


def review(chosen: random.Random, adjective: str, negated: bool) -> str:
    opinion = f"{chosen.choice(['not', 'never', 'hardly'])} {adjective}" if negated else adjective
    label = "good" if (adjective in GOOD) != negated else "bad"
    return f"{chosen.choice(FRAMES).format(chosen.choice(THINGS), opinion)}	{label}"


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="CSV, TSV or JSONL; unless given, reviews are made up")
    parser.add_argument("--steps", type=int, default=200)
    args, chosen = parser.parse_args(), random.Random(0)
    may_negate = [*GOOD[:4], *BAD[:4]]  # the others are met only as they are
    seen = [*((word, False) for word in GOOD + BAD), *((word, True) for word in may_negate)]
    new = [(word, True) for word in GOOD + BAD if word not in may_negate]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "reviews.tsv")
        made.write_text("text\tlabel\n" + "".join(review(chosen, *seen[n % len(seen)]) + "\n" for n in range(4000)))
        words = [f"data.source={args.file or made}", f"train.steps={args.steps}", "train.batch_tokens=2048"]
        words += ["data.tokenizer=words", "train.eval_every=0", "train.compile=off", f"train.out={folder}/run"]
        result = regard.train(run_config("classify", words), style="quiet")
        model = regard.load(f"{folder}/run")
    accuracy = result.metrics["accuracy"]
    print(f"{result.steps} steps, {result.seconds:.0f} s: {100 * accuracy:.1f} % of held-out texts right")
    if args.file:
        return {"accuracy": accuracy}
    texts, labels = zip(*(review(chosen, *new[n % len(new)]).split("\t") for n in range(400)), strict=True)
    answers = regard.classify(model, list(texts))
    share = sum(one.label == label for one, label in zip(answers, labels, strict=True)) / len(labels)
    print(f"negated words it never saw negated: {100 * share:.1f} % right; counting good and bad words: 0 %")
    for text in ("the film was superb", "the film was not superb", "honestly, the plot was hardly awful"):
        print(f"  {text}: {regard.classify(model, text)[0].label}")
    return {"accuracy": accuracy, "negated": share}


if __name__ == "__main__":
    main()
