"""A small GPT that writes, letter by letter: Shakespeare if you have it, Python's own library otherwise.

You learn: a decoder trained on nothing but "which letter comes next" first learns which letters are frequent, then
words, then layout. The loss in nats says how many letters it hesitates between: exp(loss).

    python examples/gpt_shakespeare.py [input.txt] [--steps 300] [--prompt "ROMEO:"]
"""

import argparse
import math
import tempfile
from pathlib import Path

import regard
from regard.data.corpora import open_corpus
from regard.recipes import run_config


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a text, such as Tiny Shakespeare's input.txt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt")
    args = parser.parse_args()
    prompt = args.prompt or ("ROMEO:\n" if args.file else "def ")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(args.file or f"{folder}/stdlib.txt")
        if not args.file:
            corpus = open_corpus("stdlib")
            source.write_text("".join(corpus.example("train", n).text for n in range(40)), encoding="utf-8")
        words = [f"data.source={source}", "data.max_len=256", "model.max_len=256", f"train.steps={args.steps}"]
        words += ["train.samples=0", "train.compile=off", f"train.out={folder}/run"]
        result = regard.train(run_config("lm", words, preset="shakespeare-small"), style="quiet")
        model = regard.load(f"{folder}/run")
    loss = result.metrics["valid_loss"]
    print(f"{model.n_parameters:,} parameters, {result.steps} steps, {result.seconds:.0f} s")
    print(
        f"loss {loss:.2f} nats a letter: it hesitates between {math.exp(loss):.1f} of {model.config.vocab_size} letters"
    )
    text = regard.generate(model, prompt, max_new_tokens=240, temperature=0.7, seed=0)[0]
    print(f"\n{prompt}{text}")
    return {"loss": loss, "letters": model.config.vocab_size, "text": text}


if __name__ == "__main__":
    main()
