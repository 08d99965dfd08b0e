"""Tiny random models of transformers and their twins here, and both asked for the same texts."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from parity.common import tiny, twins
from regard.generation import Generated, Hypothesis
from regard.models import Model

VOCAB, PAD, BOS, EOS = 23, 0, 1, 2
_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_BART: dict[str, Any] = {
    **{"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 40},
    **{"decoder_start_token_id": BOS, "forced_eos_token_id": None, **_IDS},
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=40, tie_word_embeddings=False, **_IDS),
    ),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            **{"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 40, **_IDS},
        ),
    ),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(
            **{"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2},
            **{"num_heads": 2, "relative_attention_num_buckets": 8, "decoder_start_token_id": BOS, **_IDS},
        ),
    ),
    "bart": (BartForConditionalGeneration, BartConfig(**_BART)),
    "marian": (MarianMTModel, MarianConfig(**_BART)),
}
WRITERS = ("gpt2", "llama")


class Pair(NamedTuple):
    theirs: PreTrainedModel
    ours: Model


@cache
def pair(family: str, seed: int) -> Pair:
    """Both in float64: what they compute differs by rounding alone, and no rounding decides between two tokens."""
    model_class, config = FAMILIES[family]
    theirs = tiny(model_class, config, seed)
    if family == "marian":  # its positions are no parameters
        for stack in (theirs.model.encoder, theirs.model.decoder):
            stack.embed_positions.weight.data.copy_(stack.embed_positions.create_weight())
    if family in ("bart", "marian"):
        theirs.final_logits_bias[0, EOS] = 2.0
    with TemporaryDirectory() as folder:
        ours = twins(theirs, Path(folder)).ours
    return Pair(theirs.double(), ours.double())


def rows(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def padded(texts: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
    width = max(len(text) for text in texts)
    gaps = [[PAD] * (width - len(text)) for text in texts]
    ids = torch.tensor([gap + text if left else text + gap for gap, text in zip(gaps, texts, strict=True)])
    real = torch.tensor([len(text) for text in texts])[:, None] > torch.arange(width)
    return ids, real.flip(1) if left else real


class Text(NamedTuple):
    """A text of theirs: new tokens, its score, and the beams it went through."""

    tokens: list[int]
    score: float | None
    beams: list[int] | None


_NAMES = {"beam": "num_beams", "n_best": "num_return_sequences", "no_repeat_ngram": "no_repeat_ngram_size"}


def asked(theirs: PreTrainedModel, texts: list[list[int]], **fields: Any) -> list[list[Text]]:
    """What transformers writes for the fields of ours; ``texts`` are prompts or sources."""
    writes = not theirs.config.is_encoder_decoder
    ids, real = padded(texts, left=writes)
    extra = {}
    if prefix := fields.pop("prefix", ()):
        before = ids.shape[1] if writes else 1
        extra["prefix_allowed_tokens_fn"] = lambda _, text: list(prefix[len(text) - before :][:1]) or list(range(VOCAB))
    if bias := fields.pop("logit_bias", {}):
        fields["sequence_bias"] = {(token,): value for token, value in bias.items()}
    config = GenerationConfig(
        **{_NAMES.get(name, name): value for name, value in fields.items()},
        **{"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
        **{"decoder_start_token_id": BOS, **_IDS},
    )
    made = theirs.generate(ids, attention_mask=real.long(), generation_config=config, **extra)
    new = made.sequences[:, ids.shape[1] if writes else 1 :]
    beam, n_best = fields.get("beam", 1), fields.get("n_best", 1)
    found: list[Text] = []
    for row, tokens in enumerate(new.tolist()):
        if beam == 1:
            end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
            found.append(Text(tokens[:end], None, None))
        else:
            path = [b - row // n_best * beam for b in made.beam_indices[row].tolist() if b >= 0]
            found.append(Text(tokens[: len(path)], float(made.sequences_scores[row]), path))
    # Where a beam found fewer texts than asked for, they fill up with repetitions at -1e9.
    texts_of = [found[start : start + n_best] for start in range(0, len(found), n_best)]
    return [[text for text in some if text.score is None or text.score > -1e8] for some in texts_of]


def same(ours: Generated, theirs: list[list[Text]]) -> None:
    """Token for token, and for beams the scores and the way through them too."""
    assert len(ours) == len(theirs)
    for mine, told in zip(ours.hypotheses, theirs, strict=True):
        assert [text.tokens for text in mine] == [text.tokens for text in told]
        for text, other in zip(mine, told, strict=True):
            _same_way(text, other)


def _same_way(text: Hypothesis, other: Text) -> None:
    if other.score is not None:
        assert abs(text.score - other.score) < 1e-4 * max(1.0, abs(other.score))
        assert text.beams == other.beams
