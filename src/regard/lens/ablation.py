"""Ablation at any hook site: by zero, by the mean over a data set, or by the activation of another text (resampling).

Zero is a value that the model may never have seen. The mean removes what an activation says about this text and keeps
what is common to all texts; resampling also keeps its distribution (Chan et al. 2022).

    with ablate(model, "decoder.blocks.3.ff.output", by="mean", data=texts):
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..attention.attention_map import Pick, as_span
from ..attention.frame import ALL
from ..models import Model
from .activations import ActivationRecord, capture, select_sites
from .capture import Head, attention_name, attention_site, hook_site
from .interventions import patch

AblationMethod = Literal["zero", "mean", "resample"]
Replace = Callable[[Tensor], Tensor]  # an activation → the one that replaces it


@contextmanager
def ablate(
    model: Model,
    places: str | Head | Iterable[str | Head],
    *,
    by: AblationMethod = "zero",
    data: Any = None,
    target: Any = None,
    positions: Pick | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Ablate activations inside the ``with`` block; blocks may be nested.

    places        names or patterns of ``model.sites()``, and heads (kind, layer, head)
    data, target  for "mean" and "resample": texts (and targets) as ``regard.capture`` reads them, or a record of them
    positions     only at these tokens
    seed          for "resample", which draws one text for each row of a batch
    """
    if by not in ("zero", "mean", "resample"):
        raise ValueError(f"by={by!r} is not one of zero, mean, resample")
    listed: Any = [places] if isinstance(places, str) or _is_head(places) else list(places)
    heads: list[Head] = [place for place in listed if not isinstance(place, str)]
    patterns = [place for place in listed if isinstance(place, str)]
    names = list(dict.fromkeys(name for pattern in patterns for name in _patchable(model, pattern)))
    for kind, layer, head in heads:
        attention_site(model, kind, layer, head)
    if by == "zero":
        changes: dict[str | Head, Any] = dict.fromkeys([*names, *heads], torch.zeros_like)
    else:
        if data is None:
            raise ValueError(f"by={by!r} needs data=, the texts whose activations replace the ablated ones")
        sites = [*names, *(f"{attention_name(kind, layer)}.heads" for kind, layer, _ in heads)]
        record = data if isinstance(data, ActivationRecord) else capture(model, data, target, sites=sites)
        make = _mean_change if by == "mean" else partial(_resampling_change, seed, positions)
        positions = positions if by == "mean" else None  # the resampling change selects them itself
        changes = {name: make(record, name, None) for name in names}
        changes |= {head: make(record, f"{attention_name(*head[:2])}.heads", head[2]) for head in heads}
    with patch(model, changes, positions):
        yield


def _patchable(model: Model, pattern: str) -> list[str]:
    """The sites of a pattern that are not derived; if all are, ``hook_site`` raises and says what to ablate instead."""
    sites = select_sites(model, pattern)
    return [site.name for site in sites if not site.is_derived] or [hook_site(model, sites[0].name).name]


def _is_head(place: Any) -> bool:
    return isinstance(place, tuple) and len(place) == 3 and isinstance(place[0], str) and isinstance(place[1], int)


def _rows(record: ActivationRecord, name: str, head: int | None) -> list[Tensor]:
    """The activation of every prompt without its padding, (…, T, width)."""
    x = record[name] if head is None else record[name][:, head]
    is_memory = name.endswith(("cross_attention.k", "cross_attention.v"))
    lengths = record.inputs.lengths_in("encoder" if is_memory else name)
    return [row[..., :length, :] for row, length in zip(x, lengths, strict=True)]


def _mean_change(record: ActivationRecord, name: str, head: int | None) -> Replace:
    """Every token's activation becomes the mean over all tokens of the data."""
    mean = torch.cat(_rows(record, name, head), dim=-2).mean(-2, keepdim=True)
    return lambda x: mean.to(x).expand_as(x)


def _resampling_change(
    seed: int, positions: Pick | None, record: ActivationRecord, name: str, head: int | None
) -> Replace:
    """Each row of a batch becomes one text of the data, repeated if it is shorter than the row."""
    rows = _rows(record, name, head)

    def resample(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)  # draws the same texts at every site of a pass
        drawn = torch.randint(len(rows), (len(x),), generator=generator).tolist()
        at = torch.arange(x.shape[-2], device=x.device)
        other = torch.stack([rows[n][..., at % rows[n].shape[-2], :] for n in drawn]).to(x)
        span = as_span(ALL if positions is None else positions, len(at), "positions", x.device)
        x = x.clone()
        x[..., span, :] = other[..., span, :]
        return x

    return resample
