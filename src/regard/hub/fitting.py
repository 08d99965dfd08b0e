"""Check that the tensors of a directory fit the model of its config, and load them into it.

All names and shapes are compared under the directory's own names before any tensor is read; all faults are reported at
once.
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

# Config fields that are also a dimension of some tensor; max_len is one only with learned positions.
_SIZES = (
    *("vocab_size", "target_vocab_size", "d_model", "n_heads", "n_decoder_heads", "n_kv_heads", "d_head", "d_embed"),
    *("d_ff", "d_decoder_ff", "n_segments", "t5_buckets", "mixer_size", "n_classes", "patch_size", "d_region"),
)


@dataclass(frozen=True)
class Fitting:
    """A model on the meta device, and the names of the tensors to load into it."""

    model: Model
    names: dict[str, str]  # name in the directory → name that the family's steps know


def fit(config: ModelConfig, steps: Sequence[Step], layout: Tensors) -> Fitting:
    """Match the tensors with the config; BadModelFile lists all that are missing, unexpected or of another shape."""
    _check_sizes(config, layout)
    try:
        model = build(config, device="meta")
        ours = dict(model.state_dict())
        expected = to_theirs(steps, ours)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise BadModelFile(f"the model of config.json cannot be built: {error}") from None
    matches = _match_names(steps, expected, layout)
    misshapen = [
        f"{name} is {_shape(x)} instead of {_shape(wanted)}"
        for name, x in layout.items()
        if name in matches and (wanted := expected.get(matches[name].stands_for or "")) is not None
        if x.shape != wanted.shape or x.is_floating_point() != wanted.is_floating_point()
    ]
    unexpected = [name for name in layout if name not in matches]
    # With the expected shapes instead of the actual ones, so that a misshapen tensor does not hide a missing one.
    present = {match.stands_for for match in matches.values() if match.stands_for is not None}
    complete = set(to_ours(steps, {name: expected[name] for name in present})) == set(ours)
    missing = [] if complete else [name for name in expected if name not in present]
    groups = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    faults = [f"{fault}: {', '.join(names)}" for fault, names in groups.items() if names]
    if faults:
        raise BadModelFile(f"the tensors do not fit config.json; {'; '.join(faults)}")
    return Fitting(model, {name: match.name for name, match in matches.items()})


def fill(
    fitting: Fitting, steps: Sequence[Step], weights: Weights, device: torch.device, dtype: torch.dtype | None
) -> Model:
    """Read the tensors and load them into the model."""
    model = fitting.model
    for module in model.modules():
        if module._non_persistent_buffers_set:  # not stored; the module computes them when it is moved
            module.to_empty(device=device, recurse=False)
    stored = weights.read()
    try:
        tensors = to_ours(steps, {fitting.names[name]: x for name, x in stored.items()})
    except ValueError as error:  # tied tensors differ, or a constant has another value
        raise BadModelFile(f"the tensors do not fit config.json; {error}") from None
    file_memory = {x.untyped_storage().data_ptr() for x in stored.values()}
    state = {}
    for name, x in tensors.items():
        x = x.to(device=device, dtype=dtype if dtype is not None and x.is_floating_point() else x.dtype)
        # Copy memory-mapped tensors: later writes to the file must not change the model, and the file's memory is
        # unaligned, on which kernels round differently.
        state[name] = x.clone() if x.untyped_storage().data_ptr() in file_memory else x
    model.load_state_dict(state, assign=True)
    dtypes = {x.dtype for x in state.values() if x.is_floating_point()}
    return model.to(dtypes.pop() if len(dtypes) == 1 else None).eval()  # converts the buffers if there is one dtype


class NameMatch(NamedTuple):
    """The expected tensor that a tensor of the directory belongs to."""

    name: str  # the name that the steps know
    stands_for: str | None  # the expected tensor; None if the steps drop this one


def _match_names(steps: Sequence[Step], expected: Tensors, layout: Tensors) -> dict[str, NameMatch]:
    """The match of each tensor in ``layout``; unknown tensors have none.

    Two deviations are accepted: a second name of a tensor or a buffer that the model computes itself, which the steps
    handle; and names of the base model without the prefix of the model with a head, as in the first GPT-2 files.
    """
    if set(layout) == set(expected):
        return {name: NameMatch(name, name) for name in layout}
    known = {_name_after(steps, name, x): name for name, x in expected.items()}
    prefixes = list(dict.fromkeys(name.split(".")[0] for name in expected))

    def match(name: str, x: Tensor) -> NameMatch | None:
        if name in expected:
            return NameMatch(name, name)
        after = _name_after(steps, name, x)
        if after is None:
            return NameMatch(name, None)
        return NameMatch(name, known[after]) if after in known and after != name else None

    matches = {}
    for name, x in layout.items():
        prefixed = (f"{prefix}.{name}" for prefix in prefixes)
        candidates = (match(other, x) for other in (name, *prefixed) if other == name or other not in layout)
        if (first := next((found for found in candidates if found is not None), None)) is not None:
            matches[name] = first
    return matches


def _name_after(steps: Sequence[Step], name: str, x: Tensor) -> str | None:
    """The name of one tensor after the steps; None if they drop it."""
    try:
        return next(iter(to_ours(steps, {name: x})), None)
    except (RuntimeError, ValueError):  # a step cannot handle this shape, so the tensor is unknown
        return name


def _check_sizes(config: ModelConfig, layout: Tensors) -> None:
    """Refuse sizes that the files cannot hold: building even an empty model of 10⁹ layers would take forever."""
    n_values = sum(x.numel() for x in layout.values())
    fields = behaviour(config)
    for name in _SIZES:
        size = fields.get(name)
        if size is not None and size > n_values:
            raise BadModelFile(f"config.json has {name}={size}, but all tensors together hold {n_values} numbers")
    for name in ("n_layers", "n_decoder_layers"):
        size = 1 if config.share_layers else fields.get(name)
        if size is not None and size > len(layout):
            raise BadModelFile(f"config.json has {name}={size}, but there are only {len(layout)} tensors")


def _shape(x: Tensor) -> str:
    return f"{tuple(x.shape)}" if x.is_floating_point() else f"{tuple(x.shape)} of {x.dtype}"
