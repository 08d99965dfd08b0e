"""Two towers on photographs with captions, and captions by a frozen language model.

    python benchmarks/contrast.py pairs flickr8k --fashion fashion-mnist     # recall@1/5/10 both ways; classes by names
    python benchmarks/contrast.py pairs flickr8k --start runs/clip           # also a model that starts from this one
    python benchmarks/contrast.py captions flickr8k                          # CIDEr, also with a frozen language model

A folder holds train.tsv and valid.tsv, ``image TAB caption``, and images/; no photograph is in both. Fashion-MNIST is
read from LeCun's IDX files and classified zero-shot, by the names of its ten classes. ``--width``, ``--layers``,
``--image-size`` and ``--batch`` make it small enough for a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import regard
from regard.data.images import read_idx
from regard.experiments.benchmarking import format_table
from regard.recipes import run_config

CLASSES = ("t-shirt", "pair of trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
TEMPLATES = ("a photo of a {}", "a black and white photo of a {}", "a person with a {}")
TEXT = {"architecture": "decoder", "head": "none", "positions": "learned", "norm_place": "pre", "activation": "gelu"}
TEXT |= {"pooling": "end", "dropout": 0.2, "init_std": 0.02}


class Sizes(NamedTuple):
    """Sizes of the image tower; the text tower has two thirds of its width and layers."""

    width: int
    layers: int
    image_size: int
    batch: int
    steps: int

    def image(self) -> dict[str, Any]:
        return {"image_size": self.image_size, "patch_size": 8, "dropout": 0.1, **_tower(self.width, self.layers)}

    def text(self) -> dict[str, Any]:
        return {**TEXT, **_tower(self.width * 2 // 3, max(2, self.layers * 2 // 3))}


def _tower(width: int, n_layers: int) -> dict[str, int]:
    return {"d_model": width, "n_layers": n_layers, "n_heads": width // 64 or 1, "d_ff": 4 * width}


def train(task: str, folder: Path, out: Path, model: dict[str, Any], **fields: Any) -> regard.Model:
    """The model of a run on the folder's captions, trained unless the run exists."""
    data = {"source": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv"), "flip": True, "shift": 4}
    data |= {"tokenizer": "auto"} if "init" in fields else {"tokenizer": "bpe", "vocab_size": 4000, "max_len": 40}
    if not (out / "model").is_dir():
        regard.train(run_config(task, data=data, model=model, train={"out": str(out), "samples": 0, **fields}))
    return regard.load(out)


def metrics_of(out: Path, names: tuple[str, ...]) -> list[str]:
    (split,) = regard.evaluate(out).splits
    return [f"{split.metrics[name]:.4f}" for name in names]


def compare_losses(
    folder: Path, fashion: Path | None, out: Path, sizes: Sizes, losses: Sequence[str], start: Path | None
) -> None:
    """Recall with each loss, and the zero-shot accuracy on Fashion-MNIST."""
    names = tuple(f"{side}_recall_{k}" for side in ("text", "image") for k in (1, 5, 10))
    rows = [["loss", *names, "Fashion-MNIST"]]
    fields = {"steps": sizes.steps, "batch_size": sizes.batch, "batch_tokens": 1 << 20}
    for contrast in (*losses, *(() if start is None else ("start",))):
        here = out / contrast
        if contrast == "start":
            model = train("contrast", folder, here, {}, **fields, init=str(start))
        else:
            towers = {**sizes.image(), "text_model": sizes.text(), "d_shared": sizes.width * 2 // 3, "max_len": 40}
            model = train("contrast", folder, here, {**towers, "contrast": contrast}, **fields, lr=5e-4)
        rows.append(
            [contrast, *metrics_of(here, names), "–" if fashion is None else f"{zero_shot(model, fashion):.4f}"]
        )
        print(format_table(rows), flush=True)


@torch.no_grad()
def zero_shot(model: regard.Model, fashion: Path, n: int = 10_000) -> float:
    """Zero-shot accuracy on the first images."""
    images = read_idx(fashion / "train-images-idx3-ubyte.gz")[:n]
    labels = torch.from_numpy(read_idx(fashion / "train-labels-idx1-ubyte.gz")[:n].copy()).long()
    side = model.config.image_size
    pixels = torch.from_numpy(images.copy()).float()[:, None] / 127.5 - 1
    pixels = torch.nn.functional.interpolate(pixels, size=(side, side), mode="bilinear").expand(-1, 3, -1, -1)
    classifier = regard.zero_shot(model, CLASSES, TEMPLATES)
    logits = torch.cat([classifier(part.to(model.device)).cpu() for part in pixels.split(500)])
    return float((logits.argmax(1) == labels).float().mean())


def compare_captioners(folder: Path, out: Path, sizes: Sizes) -> None:
    """CIDEr of a captioner from scratch, and of one around a frozen language model of the captions."""
    names, rows = ("bleu_4", "cider", "loss"), [["captioner", "BLEU-4", "CIDEr", "loss"]]
    steps = sizes.steps
    fields = {"steps": steps, "beam": 3, "batch_size": sizes.batch, "batch_tokens": 1 << 20}
    train("caption", folder, out / "scratch", {**sizes.image(), "max_len": 64}, **fields)
    rows.append(["from scratch", *metrics_of(out / "scratch", names)])
    texts = out / "captions.txt"
    lines = (folder / "train.tsv").read_text(encoding="utf-8").splitlines()
    texts.write_text("\n".join(line.partition("\t")[2] for line in lines) + "\n", encoding="utf-8")
    data = {"source": str(texts), "documents": "line", "tokenizer": "bpe", "vocab_size": 4000, "max_len": 64}
    if not (out / "writer" / "model").is_dir():
        regard.train(run_config("lm", data=data, train={"out": str(out / "writer"), "steps": steps, "samples": 0}))
    fields |= {"language_model": str(out / "writer")}
    train("caption", folder, out / "frozen", {**sizes.image(), "resampler_tokens": 16}, **fields)
    rows.append(["around a frozen writer", *metrics_of(out / "frozen", names)])
    print(format_table(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pairs", "captions"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fashion", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/contrast"))
    parser.add_argument("--losses", nargs="+", choices=("softmax", "sigmoid"), default=("softmax", "sigmoid"))
    parser.add_argument("--start", type=Path, help="a run or a CLIP directory to go on from")
    for name, default in Sizes(384, 6, 64, 256, 2500)._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(*(getattr(args, name) for name in Sizes._fields))
    if args.what == "pairs":
        compare_losses(args.folder, args.fashion, args.out, sizes, args.losses, args.start)
    else:
        compare_captioners(args.folder, args.out, sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
