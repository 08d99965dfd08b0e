"""BART (Lewis et al. 2020) and Marian (Junczys-Dowmunt et al. 2018): the paper's encoder-decoder, with two kinds of
positions: BART's are learned, with two rows before position 0 and a norm after the sum, Marian's are sinusoids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...config import ModelConfig
from ...layers import Sinusoidal
from .. import hf_family as hf
from ..weight_steps import Fill, Join, Rename, Reshape, Step, Tensors, Tie

_CLASSES = {
    "bart": {"BartForConditionalGeneration": "lm", "BartModel": "none"},
    "marian": {"MarianMTModel": "lm", "MarianModel": "none"},
}


def read(theirs: hf.ForeignFields) -> ModelConfig:
    kind = theirs.model_type
    theirs.only("is_decoder", False)
    theirs.only("normalize_before", False)
    theirs.only("add_final_layer_norm", False)
    head = theirs.head(_CLASSES[kind])
    vocab_size, rate = theirs.need("vocab_size"), theirs.get("dropout", 0.1)
    separate = kind == "marian" and not theirs.get("share_encoder_decoder_embeddings", True)
    learned = kind == "bart"
    return ModelConfig(
        architecture="encoder-decoder",
        head=head,
        vocab_size=vocab_size,
        target_vocab_size=theirs.get("decoder_vocab_size", vocab_size) if separate else None,
        d_model=theirs.need("d_model"),
        n_layers=theirs.need("encoder_layers"),
        n_decoder_layers=theirs.need("decoder_layers"),
        n_heads=theirs.need("encoder_attention_heads"),
        n_decoder_heads=theirs.need("decoder_attention_heads"),
        d_ff=theirs.need("encoder_ffn_dim"),
        d_decoder_ff=theirs.need("decoder_ffn_dim"),
        max_len=theirs.need("max_position_embeddings"),
        positions="learned" if learned else "sinusoidal",
        sinusoid_layout="interleaved" if learned else "halves",
        position_offset=2 if learned else 0,
        embedding_norm=learned,
        scale_embeddings=theirs.get("scale_embedding", False),
        norm_place="post",
        activation=theirs.activation("activation_function", "gelu"),
        tie_head=theirs.get("tie_word_embeddings", True),
        head_bias=head == "lm" and theirs.get("final_logits_bias", True),
        dropout=rate,
        embedding_dropout=rate,
        attention_dropout=theirs.get("attention_dropout", 0.0),
        activation_dropout=theirs.get("activation_dropout", 0.0),
        bos_id=theirs.get("decoder_start_token_id", theirs.get("bos_token_id")),
        eos_id=theirs.token_id("eos_token_id"),
        pad_id=theirs.get("pad_token_id", 0),
        init_std=theirs.get("init_std", 0.02),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    kind = "bart" if config.positions == "learned" else "marian"
    fields: dict[str, Any] = {
        "model_type": kind,
        "architectures": hf.write_head(config, _CLASSES[kind])["architectures"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.n_layers,
        "decoder_layers": config.n_decoder_layers or config.n_layers,
        "encoder_attention_heads": config.n_heads,
        "decoder_attention_heads": config.n_decoder_heads or config.n_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_decoder_ff or config.d_ff,
        "max_position_embeddings": config.max_len,
        "scale_embedding": config.scale_embeddings,
        "activation_function": hf.from_our_activation(config.activation),
        "tie_word_embeddings": config.tie_head,
        "final_logits_bias": config.head_bias,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "decoder_start_token_id": config.bos_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "forced_eos_token_id": None,
        "pad_token_id": config.pad_id,
        "init_std": config.init_std if config.init_std is not None else 0.02,
    }
    if kind == "marian":
        fields["share_encoder_decoder_embeddings"] = config.target_vocab_size is None
        fields["decoder_vocab_size"] = config.output_vocab_size
    return fields


@dataclass(frozen=True)
class Sinusoids:
    """Marian's table of positions, which we compute. Only a model without a head is saved with it."""

    name: str
    max_len: int
    width: int
    written: bool

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        table = out.pop(self.name, None)
        if table is None or table.is_meta:
            return out
        # Its shape first: the table that is due takes memory, and max_len is only what a config claims.
        if table.shape != (self.max_len, self.width) or not torch.allclose(table.float(), self._table(), atol=1e-2):
            raise ValueError(f"{self.name} should hold the sinusoids of {self.max_len} positions, but does not")
        return out

    def undo(self, tensors: Tensors) -> Tensors:
        if not self.written:
            return tensors
        on_meta = any(x.is_meta for x in tensors.values())
        table = torch.empty(self.max_len, self.width, device="meta") if on_meta else self._table()
        return {**tensors, self.name: table}

    def _table(self) -> torch.Tensor:
        return Sinusoidal(self.width, layout="halves")(torch.arange(self.max_len), torch.float32)


def steps(config: ModelConfig) -> list[Step]:
    prefix = "" if config.head == "none" else "model."
    out: list[Step] = []
    if config.head == "lm":
        out += _head_steps(config, prefix)
    if config.target_vocab_size is None:
        # With a head of its own, transformers writes a copy of the table for each stack.
        for stack in ("encoder", "decoder"):
            second = f"{prefix}{stack}.embed_tokens.weight"
            out.append(Tie(second, f"{prefix}shared.weight", written=not config.tie_head))
        out.append(Rename(f"{prefix}shared.weight", "token.weight"))
    else:
        out.append(Rename(f"{prefix}encoder.embed_tokens.weight", "token.weight"))
        out.append(Rename(f"{prefix}decoder.embed_tokens.weight", "target_token.weight"))
    for stack, embeddings in (("encoder", "embeddings"), ("decoder", "target_embeddings")):
        out += _stack_steps(config, prefix, stack, embeddings)
    return out


def _head_steps(config: ModelConfig, prefix: str) -> list[Step]:
    vocab_size = config.output_vocab_size
    table = f"{prefix}shared.weight" if config.target_vocab_size is None else f"{prefix}decoder.embed_tokens.weight"
    out: list[Step] = [Tie("lm_head.weight", table) if config.tie_head else Rename("lm_head.weight", "head.weight")]
    if config.head_bias:
        return [*out, Rename("final_logits_bias", "head.bias"), Reshape("head.bias", (1, vocab_size), (vocab_size,))]
    return [*out, Fill("final_logits_bias", (1, vocab_size), 0.0)]


def _stack_steps(config: ModelConfig, prefix: str, stack: str, embeddings: str) -> list[Step]:
    width = config.d_model
    theirs, ours = f"{prefix}{stack}.layers.{{i}}.", f"{stack}.blocks.{{i}}."
    names = {
        "self_attn.out_proj": "attention.w_o",
        "self_attn_layer_norm": "attention_norm",
        "encoder_attn.q_proj": "cross_attention.w_query",
        "encoder_attn.out_proj": "cross_attention.w_o",
        "encoder_attn_layer_norm": "cross_norm",
        "fc1": "ff.w_in",
        "fc2": "ff.w_out",
        "final_layer_norm": "ff_norm",
    }
    positions = f"{prefix}{stack}.embed_positions.weight"
    out: list[Step] = [
        Rename(positions, f"{embeddings}.position.weight")
        if config.positions == "learned"
        else Sinusoids(positions, config.max_len, width, written=config.head == "none")
    ]
    for kind in ("weight", "bias"):
        self_parts = tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv")
        cross_parts = tuple(f"{theirs}encoder_attn.{x}_proj.{kind}" for x in "kv")
        out += [
            Rename(f"{prefix}{stack}.layernorm_embedding.{kind}", f"{embeddings}.norm.{kind}"),
            *(Rename(f"{theirs}{a}.{kind}", f"{ours}{b}.{kind}") for a, b in names.items()),
            Join(self_parts, f"{ours}attention.w_qkv.{kind}", (width, width, width)),
            Join(cross_parts, f"{ours}cross_attention.w_kv.{kind}", (width, width)),
        ]
    return out


BART = hf.Family(("bart", "marian"), read, write, steps)
