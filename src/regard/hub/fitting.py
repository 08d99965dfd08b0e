"""Whether the tensors of a directory fit the model its config describes, and reading them into it.

All names and shapes are compared, in the directory's own names, before any number is read; all faults are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import BadModelFile
from ..models import Model, build
from .config_diff import behaviour
from .hf_directory import Weights
from .weight_steps import Step, Tensors, to_ours, to_theirs

# Sizes that are the size of some tensor too; max_len is one only where positions are learned.
_SIZES = (
    *("vocab_size", "target_vocab_size", "d_model", "n_heads", "n_decoder_heads", "n_kv_heads", "d_head", "d_embed"),
    *("d_ff", "d_decoder_ff", "n_segments", "t5_buckets", "mixer_size", "n_classes", "patch_size", "d_region"),
)


@dataclass(frozen=True)
class Fitting:
    """A model on the meta device, and under which of its family's names each tensor of the directory belongs there."""

    model: Model
    names: dict[str, str]


def fit(config: ModelConfig, steps: Sequence[Step], layout: Tensors) -> Fitting:
    """Compare; BadModelFile lists every tensor that is missing, unexpected or of another shape."""
    _check_sizes(config, layout)
    try:
        model = build(config, device="meta")
        ours = dict(model.state_dict())
        expected = to_theirs(steps, ours)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise BadModelFile(f"config.json describes no model that can be built: {error}") from None
    matches = _match_names(steps, expected, layout)
    wrong = [
        f"{name} is {_shape(x)} instead of {_shape(wanted)}"
        for name, x in layout.items()
        if name in matches and (wanted := expected.get(matches[name].stands_for or "")) is not None
        if x.shape != wanted.shape or x.is_floating_point() != wanted.is_floating_point()
    ]
    unexpected = [name for name in layout if name not in matches]
    # With the right shapes in place of those found, so that one wrong tensor does not hide a missing one.
    present = {match.stands_for for match in matches.values() if match.stands_for is not None}
    complete = set(to_ours(steps, {name: expected[name] for name in present})) == set(ours)
    missing = [] if complete else [name for name in expected if name not in present]
    faults = [
        f"{what} {', '.join(which)}"
        for what, which in (("missing:", missing), ("unexpected:", unexpected), ("misshapen:", wrong))
        if which
    ]
    if faults:
        raise BadModelFile(f"the tensors do not fit config.json; {'; '.join(faults)}")
    return Fitting(model, {name: match.name for name, match in matches.items()})


def fill(
    fitting: Fitting, steps: Sequence[Step], weights: Weights, device: torch.device, dtype: torch.dtype | None
) -> Model:
    """Read the numbers into the model."""
    model = fitting.model
    for module in model.modules():
        if module._non_persistent_buffers_set:  # not in any file; such a module computes them when it is moved
            module.to_empty(device=device, recurse=False)
    read = weights.read()
    try:
        tensors = to_ours(steps, {fitting.names[name]: x for name, x in read.items()})
    except ValueError as error:  # two that should be one differ, or a constant is another
        raise BadModelFile(f"the tensors do not fit config.json; {error}") from None
    files = {x.untyped_storage().data_ptr() for x in read.values()}
    state = {}
    for name, x in tensors.items():
        x = x.to(device=device, dtype=dtype if dtype is not None and x.is_floating_point() else x.dtype)
        # Away from the file's memory: later writes to the file must not change the model, and kernels round differently
        # on unaligned memory, as a file's is.
        state[name] = x.clone() if x.untyped_storage().data_ptr() in files else x
    model.load_state_dict(state, assign=True)
    kinds = {x.dtype for x in state.values() if x.is_floating_point()}
    return model.to(kinds.pop() if len(kinds) == 1 else None).eval()  # the buffers too, where there is one type


class NameMatch(NamedTuple):
    """Where a tensor of the directory belongs."""

    name: str  # as the steps know it
    stands_for: str | None  # the expected tensor that it is or stands for; None where the steps drop it


def _match_names(steps: Sequence[Step], expected: Tensors, layout: Tensors) -> dict[str, NameMatch]:
    """The match of each tensor in ``layout``; unknown ones have none.

    Two deviations are accepted: a second name of a tensor, or a buffer the model computes itself (the steps know
    both); and a name without the first word that the model with a head puts before it, as GPT-2 was first published.
    """
    if set(layout) == set(expected):
        return {name: NameMatch(name, name) for name in layout}
    known = {_name_after(steps, name, x): name for name, x in expected.items()}
    first_words = list(dict.fromkeys(name.split(".")[0] for name in expected))

    def match(name: str, x: Tensor) -> NameMatch | None:
        if name in expected:
            return NameMatch(name, name)
        after = _name_after(steps, name, x)
        if after is None:
            return NameMatch(name, None)
        return NameMatch(name, known[after]) if after in known and after != name else None

    matches = {}
    for name, x in layout.items():
        longer = (f"{word}.{name}" for word in first_words)
        candidates = (match(other, x) for other in (name, *longer) if other == name or other not in layout)
        if (first := next((one for one in candidates if one is not None), None)) is not None:
            matches[name] = first
    return matches


def _name_after(steps: Sequence[Step], name: str, x: Tensor) -> str | None:
    """What the steps make of one tensor's name on its own; None when they drop it."""
    try:
        return next(iter(to_ours(steps, {name: x})), None)
    except (RuntimeError, ValueError):  # a shape that a step cannot handle: nothing the steps know
        return name


def _check_sizes(config: ModelConfig, layout: Tensors) -> None:
    """Refuse sizes that the files cannot hold: building even an empty model of 10⁹ layers would never end."""
    numbers = sum(x.numel() for x in layout.values())
    fields = behaviour(config)
    for name in _SIZES:
        size = fields.get(name)
        if size is not None and size > numbers:
            raise BadModelFile(f"config.json has {name}={size}, but all tensors together hold {numbers} numbers")
    for name in ("n_layers", "n_decoder_layers"):
        size = 1 if config.share_layers else fields.get(name)
        if size is not None and size > len(layout):
            raise BadModelFile(f"config.json has {name}={size}, but there are only {len(layout)} tensors")


def _shape(x: Tensor) -> str:
    return f"{tuple(x.shape)}" if x.is_floating_point() else f"{tuple(x.shape)} of {x.dtype}"
