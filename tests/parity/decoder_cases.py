"""What the tests of decoders and encoder-decoders share: padding on either side, whole texts and texts step by step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

import regard
from regard.attention.cache import ModelCache
from regard.models import Decoder, EncoderDecoder, Model

from .common import Twins, check_round_trips, close, padded, same_tensors, tiny, twins

LENGTHS = (11, 6, 1, 9)
PROMPT = 4  # tokens taken in at once before decoding goes one by one


def positions_of(keep: Tensor) -> Tensor:
    """0, 1, 2 … over the real tokens of each row, -1 on padding."""
    return torch.where(keep, keep.long().cumsum(-1) - 1, -1)


def steps(length: int) -> Iterator[slice]:
    """A prompt, then one token at a time."""
    yield slice(0, PROMPT)
    yield from (slice(i, i + 1) for i in range(PROMPT, length))


def caches(model: Model, batch: int, length: int) -> Iterator[ModelCache]:
    """A growing one, and one preallocated for a little more than the text."""
    yield model.new_cache()
    yield model.new_cache(batch, length + 3)


def check_decoder(model_class: type[PreTrainedModel], config: PreTrainedConfig, folder: Path) -> Decoder:
    """Everything at once for one config: parity both ways, both paddings, cached, and the round trips."""
    theirs = tiny(model_class, config)
    pair = twins(theirs, folder / "theirs")
    ours = pair.ours
    assert isinstance(ours, Decoder)
    back = check_round_trips(pair, folder)
    opened = check_directories(pair, folder, AutoModelForCausalLM)
    for other, left in ((theirs, False), (theirs, True), (back, False), (opened, True)):
        compare_padded(ours, other, left)
    compare_placed_and_cached(ours, theirs)
    return ours


def check_directories(pair: Twins, folder: Path, auto_class: type) -> PreTrainedModel:
    """What they saved loads here; what we save opens there by their automatic classes, bit for bit."""
    loaded = regard.load(folder / "theirs")
    assert loaded.config == pair.ours.config
    same_tensors(loaded.state_dict(), pair.ours.state_dict())
    saved = loaded.save(folder / "saved")
    opened, told = (AutoModel if pair.ours.config.head == "none" else auto_class).from_pretrained(
        saved, output_loading_info=True
    )
    assert not any(told.values()), told
    same_tensors(opened.state_dict(), pair.theirs.state_dict())
    assert regard.load(saved).config == pair.ours.config
    return opened.eval()


def _told(answer: object) -> Tensor:
    logits = getattr(answer, "logits", None)
    return answer.last_hidden_state if logits is None else logits  # type: ignore[attr-defined]


@torch.no_grad()
def compare_padded(ours: Decoder, theirs: PreTrainedModel, left: bool) -> None:
    """Padding takes up places: both sides only mask it."""
    tokens, keep = padded(LENGTHS, ours.config.vocab_size, ours.config.pad_id, left)
    close(ours(tokens, padding_mask=keep), _told(theirs(input_ids=tokens, attention_mask=keep.long())), keep)


@torch.no_grad()
def compare_placed_and_cached(ours: Decoder, theirs: PreTrainedModel) -> None:
    """Left-padded prompts whose texts all start at 0, in one go and step by step through either cache."""
    tokens, keep = padded(LENGTHS, ours.config.vocab_size, ours.config.pad_id, left=True)
    positions = positions_of(keep)
    told = _told(theirs(input_ids=tokens, attention_mask=keep.long(), position_ids=positions.clamp(min=0)))
    close(ours(tokens, positions=positions), told, keep)
    for cache in caches(ours, *tokens.shape):
        parts = [ours(tokens[:, at], positions=positions[:, at], cache=cache) for at in steps(tokens.shape[1])]
        close(torch.cat(parts, dim=1), told, keep)
    told = _told(theirs(input_ids=tokens))
    for cache in caches(ours, *tokens.shape):  # without padding, and nobody saying where tokens stand
        parts = [ours(tokens[:, at], cache=cache) for at in steps(tokens.shape[1])]
        close(torch.cat(parts, dim=1), told)


@torch.no_grad()
def compare_both_cached(ours: Decoder, theirs: PreTrainedModel) -> None:
    """Step by step on both sides: where frequencies follow the length so far, a whole text is another computation."""
    tokens, _ = padded((LENGTHS[0],) * 2, ours.config.vocab_size, ours.config.pad_id, left=False)
    told, past = [], None
    for at in steps(tokens.shape[1]):
        answer = theirs(input_ids=tokens[:, at], past_key_values=past, use_cache=True)
        past = answer.past_key_values
        told.append(_told(answer))
    for cache in caches(ours, *tokens.shape):
        parts = [ours(tokens[:, at], cache=cache) for at in steps(tokens.shape[1])]
        close(torch.cat(parts, dim=1), torch.cat(told, dim=1))


SOURCE_LENGTHS = (9, 4, 1, 7)


def check_encoder_decoder(theirs: PreTrainedModel, folder: Path) -> EncoderDecoder:
    """The same for a sequence-to-sequence model of theirs, already made random."""
    pair = twins(theirs, folder / "theirs")
    ours = pair.ours
    assert isinstance(ours, EncoderDecoder)
    back = check_round_trips(pair, folder)
    opened = check_directories(pair, folder, AutoModelForSeq2SeqLM)
    for other, left in ((theirs, False), (theirs, True), (back, False), (opened, True)):
        compare_translation(ours, other, left)
    compare_cached_translation(ours, theirs)
    return ours


def _source(ours: EncoderDecoder, left: bool) -> tuple[Tensor, Tensor]:
    return padded(SOURCE_LENGTHS, ours.config.vocab_size, ours.config.pad_id, left, seed=3)


def _target(ours: EncoderDecoder, left: bool, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    return padded(lengths, ours.config.output_vocab_size, ours.config.pad_id, left, seed=4)


def _logits(ours: EncoderDecoder, states: Tensor) -> Tensor:
    return states if ours.head is None else ours.head(states, ours.output_table)


@torch.no_grad()
def compare_translation(ours: EncoderDecoder, theirs: PreTrainedModel, left: bool) -> None:
    """States of the encoder and logits of the decoder, with padding in source and target."""
    (source, source_padding_mask), (target, target_padding_mask) = _source(ours, left), _target(ours, left)
    told = theirs(
        input_ids=source,
        attention_mask=source_padding_mask.long(),
        decoder_input_ids=target,
        decoder_attention_mask=target_padding_mask.long(),
    )
    close(
        ours.encode(source, padding_mask=source_padding_mask).states,
        told.encoder_last_hidden_state,
        source_padding_mask,
    )
    got = ours(source, target, source_padding_mask=source_padding_mask, target_padding_mask=target_padding_mask)
    close(got, _told(told), target_padding_mask)


@torch.no_grad()
def compare_cached_translation(ours: EncoderDecoder, theirs: PreTrainedModel) -> None:
    """Step by step against their whole text: unpadded targets, then left-padded ones against each alone."""
    source, source_padding_mask = _source(ours, left=False)
    target, _ = _target(ours, left=False, lengths=(LENGTHS[0],) * len(LENGTHS))
    told = _told(theirs(input_ids=source, attention_mask=source_padding_mask.long(), decoder_input_ids=target))
    memory = ours.encode(source, padding_mask=source_padding_mask)
    for cache in caches(ours, *target.shape):
        parts = [_logits(ours, ours.decode(target[:, at], memory, cache=cache)) for at in steps(target.shape[1])]
        close(torch.cat(parts, dim=1), told)

    target, keep = _target(ours, left=True)
    positions = positions_of(keep)
    alone = [
        _told(
            theirs(
                input_ids=source[row][source_padding_mask[row]][None], decoder_input_ids=target[row][keep[row]][None]
            )
        )
        for row in range(len(LENGTHS))
    ]
    for cache in caches(ours, *target.shape):
        parts = [
            _logits(ours, ours.decode(target[:, at], memory, positions=positions[:, at], cache=cache))
            for at in steps(target.shape[1])
        ]
        got = torch.cat(parts, dim=1)
        for row, told in enumerate(alone):
            close(got[row][keep[row]][None], told)
