"""Parity with transformers: a tiny random model there, its twin here, and everything that must agree between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import regard
from regard.hub.families import BY_TYPE
from regard.hub.hf_family import Family, ForeignFields
from regard.hub.weight_steps import Tensors, to_ours, to_theirs
from regard.models import Model, build

TOLERANCE = 1e-5


def tiny(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0, **arguments: Any
) -> PreTrainedModel:
    """A model of theirs in which every parameter is random, so that nothing agrees by being a default."""
    model = model_class(config, **arguments).eval()
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() <= 1:  # around what they start from: norms around 1, or 0 where 1 is added, biases around 0
                p.copy_(0.3 * noise + p.mean().round())
            elif id(p) in embeddings or p.shape[0] == 1:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise / p[0].numel() ** 0.5)
    return model


@dataclass
class Twins:
    """A model of theirs as it lies on disk, and what we make of it."""

    theirs: PreTrainedModel
    folder: Path
    fields: dict[str, Any]
    tensors: Tensors
    ours: Model

    @property
    def family(self) -> Family:
        return BY_TYPE[self.fields["model_type"]]


def twins(theirs: PreTrainedModel, folder: Path, **fields: Any) -> Twins:
    """Save theirs and read it as ours; ``fields`` go into its config.json."""
    theirs.save_pretrained(folder)
    read = json.loads((folder / "config.json").read_text(encoding="utf-8")) | fields
    (folder / "config.json").write_text(json.dumps(read), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    return Twins(theirs, folder, read, tensors, ours_of(read, tensors))


def ours_of(fields: dict[str, Any], tensors: Tensors) -> Model:
    """Our model for a config.json and tensors; every tensor of ours must be there, and none be left over."""
    family = BY_TYPE[fields["model_type"]]
    config = family.read(ForeignFields(fields))
    model = build(config, device="meta").to_empty(device="cpu")
    state = to_ours(family.steps(config), tensors)
    model.load_state_dict({name: x.clone() for name, x in state.items()}, strict=True)
    return model.eval()


def theirs_of(
    ours: Model, family: Family, folder: Path, model_class: type[PreTrainedModel], **arguments: Any
) -> PreTrainedModel:
    """Our model written for them and opened by them, with no tensor missing, extra or misshapen."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.write(ours.config)), encoding="utf-8")
    tensors = to_theirs(family.steps(ours.config), ours.state_dict())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, told = model_class.from_pretrained(folder, output_loading_info=True, **arguments)
    assert not any(told.values()), told
    return model.eval()


def check_round_trips(
    pair: Twins, folder: Path, model_class: type[PreTrainedModel] | None = None, **arguments: Any
) -> PreTrainedModel:
    """Config and tensors survive every way there and back, bit for bit; returns what they make of our files."""
    family, ours = pair.family, pair.ours
    assert family.read(ForeignFields(family.write(ours.config))) == ours.config
    steps = family.steps(ours.config)
    written = to_theirs(steps, ours.state_dict())
    same_tensors(written, pair.tensors)
    same_tensors(to_ours(steps, written), ours.state_dict())
    back = theirs_of(ours, family, folder / "back", model_class or type(pair.theirs), **arguments)
    same_tensors(back.state_dict(), pair.theirs.state_dict())
    return back


def check_directories(pair: Twins, folder: Path, **arguments: Any) -> None:
    """The same through directories: load theirs, save it, open what was saved here and by their automatic class."""
    loaded = regard.load(pair.folder)
    saved = loaded.save(folder / "saved")
    for model in (loaded, regard.load(saved)):
        assert model.config == pair.ours.config
        same_tensors(model.state_dict(), pair.ours.state_dict())
    kind = (
        "Model" if "For" not in type(pair.theirs).__name__ else "ModelFor" + type(pair.theirs).__name__.split("For")[1]
    )
    back, told = getattr(transformers, f"Auto{kind}").from_pretrained(saved, output_loading_info=True, **arguments)
    assert not any(told.values()), told
    same_tensors(back.state_dict(), pair.theirs.state_dict())


def same_tensors(left: Tensors, right: Tensors) -> None:
    """The same names, and under each the same bits."""
    assert set(left) == set(right), f"only left {set(left) - set(right)}, only right {set(right) - set(left)}"
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


def close(ours: Tensor, theirs: Tensor, where: Tensor | None = None) -> None:
    """Equal up to rounding, where it counts; and varied enough for that to mean something."""
    assert ours.shape == theirs.shape
    if where is not None:
        ours, theirs = ours[where], theirs[where]
    assert theirs.numel() < 3 or theirs.std() > 0.02
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def padded(lengths: tuple[int, ...], vocab_size: int, pad_id: int, left: bool, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random tokens (B, T) of those lengths, padded on one side, and which of them are real (B, T)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(vocab_size - 1, (len(lengths), width), generator=generator)
    ids = ids + (ids >= pad_id)  # every id but pad_id
    place = torch.arange(width)
    if left:
        place = place.flip(0)
    keep = place < torch.tensor(lengths)[:, None]
    return torch.where(keep, ids, pad_id), keep


def check_every_tensor_counts(model: Model, run: Callable[[], Tensor]) -> None:
    """Each parameter, changed, changes what comes out: none of them could be wrong unnoticed."""
    before = run()
    for name, p in model.named_parameters():
        kept = p.detach().clone()
        with torch.no_grad():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
            assert (run() - before).abs().max() > 100 * TOLERANCE, f"{name} does not count"
            p.copy_(kept)


def refusal(fields: dict[str, Any]) -> str:
    """What reading that config.json is refused with."""
    try:
        BY_TYPE[fields["model_type"]].read(ForeignFields(fields))
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def check_defaults(config: PreTrainedConfig, *needed: str) -> None:
    """A config.json of only the needed fields means what transformers takes the missing ones to be."""
    fields = config.to_dict()
    family = BY_TYPE[fields["model_type"]]
    short = family.read(ForeignFields({name: fields[name] for name in ("model_type", *needed)}))
    # Nothing that is computed depends on these three; where nobody says them, they are unknown.
    unknown = {"init_std": None, "bos_id": None, "eos_id": None}
    assert short.with_(**unknown) == family.read(ForeignFields(fields)).with_(**unknown)
