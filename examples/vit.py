"""A Vision Transformer: a picture as a sentence of patches.

You learn: cut into patches, an image is read like a text, and only position embeddings say which patch stands where.
Asked in which corner a thing stands, a model without them can only guess: shuffled patches are all the same to it.

    python examples/vit.py [folder] [--steps 150]        a folder with one folder of images for each class
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import regard
from regard.data.corpora import open_corpus
from regard.recipes import run_config

MODEL = ["model.image_size=64", "model.patch_size=8", "model.n_channels=3", "model.pooling=mean", "model.n_layers=2"]
TRAIN = ["train.batch_tokens=2048", "train.eval_every=0", "train.warmup=20", "train.compile=off"]


def draw(folder: Path, n: int) -> Path:
    """Scenes of the embedded corpus with one thing in them, sorted by the corner it stands in."""
    pictures = map(open_corpus("shapes").example, ["train"] * 10 * n, range(10 * n))
    for picture in [picture for picture in pictures if len(picture.scene.things) == 1][:n]:
        thing = picture.scene.things[0]
        corner = folder / f"{'upper' if thing.y < 0.5 else 'lower'}-{'left' if thing.x < 0.5 else 'right'}"
        corner.mkdir(parents=True, exist_ok=True)
        picture.pillow().save(corner / f"{len(list(corner.iterdir()))}.png")
    return folder


def shuffled(pixels: torch.Tensor) -> torch.Tensor:
    """The same patches in another order."""
    return F.fold(F.unfold(pixels, 8, stride=8)[..., torch.randperm(64)], (64, 64), 8, stride=8)


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="unless given, scenes are drawn")
    parser.add_argument("--steps", type=int, default=150)
    args, found = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as place:
        source = args.folder or draw(Path(place, "images"), min(1000, 8 * args.steps))
        for positions in ("sinusoidal", "none"):
            words = [f"data.source={source}", f"model.positions={positions}", f"train.steps={args.steps}"]
            config = run_config("classify-images", [*MODEL, *TRAIN, *words, f"train.out={place}/{positions}"])
            right = regard.train(config, style="quiet").metrics["accuracy"]
            model, x = regard.load(config.train.out), torch.randn(4, 3, 64, 64)
            moved = (model(x) - model(shuffled(x))).abs().max().item()
            print(f"positions {positions:10} {100 * right:.1f} % right; shuffling moves its logits by {moved:.1g}")
            found[positions] = right, moved
    return found


if __name__ == "__main__":
    main()
