"""What the tests of the text encoders share: one batch padded right and one padded left, through every output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from regard.models import Encoder, Model

from .common import check_directories, check_every_tensor_counts, check_round_trips, close, padded, tiny, twins

LENGTHS = (8, 5, 1, 7)


def inputs(model: Model, left: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, which of them are real, and segments where the model has them."""
    config = model.config
    tokens, keep = padded(LENGTHS, config.vocab_size, config.pad_id, left)
    generator = torch.Generator().manual_seed(2)
    segments = torch.randint(config.n_segments, tokens.shape, generator=generator) if config.n_segments else None
    return tokens, keep, segments


@torch.no_grad()
def compare(ours: Model, theirs: PreTrainedModel, left: bool) -> None:
    """States on real tokens, then whatever the head makes of them."""
    assert isinstance(ours, Encoder)
    tokens, keep, segments = inputs(ours, left)
    named = {} if segments is None else {"token_type_ids": segments}
    told = theirs(input_ids=tokens, attention_mask=keep.long(), output_hidden_states=True, **named)
    states = ours.hidden(tokens, padding_mask=keep, segments=segments)
    close(states, told.hidden_states[-1], keep)
    if ours.head is not None or ours.detector is not None:
        close(ours(tokens, padding_mask=keep, segments=segments), told.logits, keep)
        return
    # Padded left, the first place is padding: what a pooler reads there is nobody's, and RoBERTa's is ours no more.
    first_is_real = keep[:, 0] if ours.config.positions_skip_padding else torch.ones_like(keep[:, 0])
    if ours.config.head == "span":
        both = torch.stack([told.start_logits, told.end_logits], dim=-1)
        close(ours(tokens, padding_mask=keep, segments=segments), both, keep)
    elif ours.classifier is not None:
        where = keep if ours.config.head == "tag" else first_is_real
        close(ours(tokens, padding_mask=keep, segments=segments), told.logits, where)
    else:
        close(ours(tokens, padding_mask=keep, segments=segments), told.last_hidden_state, keep)
    if ours.pooler is not None:
        close(ours.pooled(states), told.pooler_output, first_is_real)


@torch.no_grad()
def settle_idle_bias(theirs: PreTrainedModel) -> None:
    """An untied masked-token head keeps a second bias and never reads it; we write it as a copy of the one it reads."""
    for module in theirs.modules():
        decoder = getattr(module, "decoder", None)
        if isinstance(decoder, nn.Linear) and isinstance(getattr(module, "bias", None), nn.Parameter):
            module.bias.copy_(decoder.bias)


def check(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    folder: Path,
    *,
    back_class: type[PreTrainedModel] | None = None,
    pooler: bool | None = None,
) -> Model:
    """Everything at once for one config: parity both ways, both paddings, and the round trips."""
    arguments: dict[str, Any] = {} if pooler is None else {"add_pooling_layer": pooler}
    theirs = tiny(model_class, config, **arguments)
    settle_idle_bias(theirs)
    pair = twins(theirs, folder / "theirs", **({} if pooler is None else {"has_pooler": pooler}))
    back = check_round_trips(pair, folder, back_class, **arguments)
    check_directories(pair, folder, **arguments)
    for left in (False, True):
        compare(pair.ours, theirs, left)
        compare(pair.ours, back, left)
    return pair.ours


@torch.no_grad()
def check_counts(model: Model) -> None:
    """No parameter of this model is idle."""
    assert isinstance(model, Encoder)
    tokens, keep, segments = inputs(model, left=False)

    def run() -> Tensor:
        out = model(tokens, padding_mask=keep, segments=segments)
        return out if model.pooler is None else torch.cat((out[:, 0], model.pooled(out)))

    check_every_tensor_counts(model, run)
