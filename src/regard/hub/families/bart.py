"""The encoder-decoder of Vaswani et al. 2017 with learned or sinusoidal positions.

bart      learned positions after two unused rows, embedding norm (Lewis et al. 2020)
mbart     bart with norms before the sub-layers (Liu et al. 2020)
m2m_100   norms before the sub-layers, sinusoids (Fan et al. 2021; also NLLB)
marian    sinusoids (Junczys-Dowmunt et al. 2018)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...config import ModelConfig
from ...layers import Sinusoidal
from .. import hf_family as hf
from ..weight_steps import Drop, Fill, Rename, Reshape, Step, Tensors, Tie

_CLASSES = {
    "bart": {"BartForConditionalGeneration": "lm", "BartModel": "none"},
    "mbart": {"MBartForConditionalGeneration": "lm", "MBartModel": "none"},
    "m2m_100": {"M2M100ForConditionalGeneration": "lm", "M2M100Model": "none"},
    "marian": {"MarianMTModel": "lm", "MarianModel": "none"},
}
_FIELDS, _LAYER = hf.field_names("bart"), hf.layer_names("bart")


def read(theirs: hf.ForeignFields) -> ModelConfig:
    kind = theirs.model_type
    theirs.only("is_decoder", False)
    pre_norm = kind in ("mbart", "m2m_100")
    if not pre_norm:  # mbart and m2m_100 have both, and their old files set these fields
        theirs.only("normalize_before", False)
        theirs.only("add_final_layer_norm", False)
    head, ours = theirs.head(_CLASSES[kind]), hf.read_fields(theirs, _FIELDS)
    separate = kind == "marian" and not theirs.get("share_encoder_decoder_embeddings", True)
    learned = kind in ("bart", "mbart")
    layout: Any = {"marian": "halves", "m2m_100": "fairseq"}.get(kind, "interleaved")
    return ModelConfig(
        architecture="encoder-decoder",
        head=head,
        **ours,
        target_vocab_size=theirs.get("decoder_vocab_size", ours["vocab_size"]) if separate else None,
        positions="learned" if learned else "sinusoidal",
        sinusoid_layout=layout,
        position_offset={"marian": 0, "m2m_100": ours["pad_id"] + 1}.get(kind, 2),
        positions_skip_padding=kind == "m2m_100",
        embedding_norm=learned,
        norm_place="pre" if pre_norm else "post",
        activation=theirs.activation("activation_function", "gelu"),
        head_bias=head == "lm" and kind != "m2m_100" and theirs.get("final_logits_bias", True),
        embedding_dropout=ours["dropout"],
        bos_id=theirs.get("decoder_start_token_id", theirs.get("bos_token_id")),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    kind = "m2m_100" if config.sinusoid_layout == "fairseq" else "marian"
    if config.positions == "learned":
        kind = "mbart" if config.norm_place == "pre" else "bart"
    fields: dict[str, Any] = {
        **hf.write_decoder(config, kind, _CLASSES[kind], _FIELDS, "activation_function"),
        "is_encoder_decoder": True,
        "decoder_layers": config.n_decoder_layers or config.n_layers,
        "decoder_attention_heads": config.n_decoder_heads or config.n_heads,
        "decoder_ffn_dim": config.d_decoder_ff or config.d_ff,
        "final_logits_bias": config.head_bias,
        "decoder_start_token_id": config.bos_id,
        "bos_token_id": config.bos_id,
        "forced_eos_token_id": None,
    }
    if kind == "marian":
        fields["share_encoder_decoder_embeddings"] = config.target_vocab_size is None
        fields["decoder_vocab_size"] = config.output_vocab_size
    return fields


@dataclass(frozen=True)
class Sinusoids(Step):
    """Marian's table of sinusoids, which we compute; it is written only for a model without a head."""

    name: str
    max_len: int
    width: int
    written: bool

    def apply(self, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        table = out.pop(self.name, None)
        if table is None or table.is_meta:
            return out
        # The shape first: computing the expected table takes memory, and max_len comes from an untrusted config.
        if table.shape != (self.max_len, self.width) or not torch.allclose(table.float(), self._table(), atol=1e-2):
            raise ValueError(f"{self.name} does not hold the sinusoids of {self.max_len} positions")
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
    vocab_size, table = config.output_vocab_size, f"{prefix}shared.weight"
    if config.target_vocab_size is not None:
        table = f"{prefix}decoder.embed_tokens.weight"
    if config.head == "lm":
        out.append(hf.token_head(config, table))
        if config.head_bias:
            out += [Rename("final_logits_bias", "head.bias"), Reshape("head.bias", (1, vocab_size), (vocab_size,))]
        elif config.sinusoid_layout != "fairseq":
            out.append(Fill("final_logits_bias", (1, vocab_size), 0.0))
    if config.target_vocab_size is None:
        # If the head is untied, transformers writes a copy of the table for each stack.
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


def _stack_steps(config: ModelConfig, prefix: str, stack: str, embeddings: str) -> list[Step]:
    width = config.d_model
    theirs, ours = f"{prefix}{stack}.layers.{{i}}.", f"{stack}.blocks.{{i}}."
    positions = f"{prefix}{stack}.embed_positions.weight"
    first: Step = Sinusoids(positions, config.max_len, width, written=config.head == "none")
    if config.sinusoid_layout == "fairseq":
        first = Drop(f"{prefix}{stack}.embed_positions.weights")
    if config.positions == "learned":
        first = Rename(positions, f"{embeddings}.position.weight")
    return [
        first,
        *hf.modules({f"{prefix}{stack}.layernorm_embedding": f"{embeddings}.norm"}),
        *hf.modules({f"{prefix}{stack}.layer_norm": f"{stack}.norm"}),
        *hf.modules(_LAYER, theirs, ours),
        *hf.join_modules([f"{theirs}self_attn.{x}_proj" for x in "qkv"], f"{ours}attention.w_qkv", (width,) * 3),
        *hf.join_modules([f"{theirs}encoder_attn.{x}_proj" for x in "kv"], f"{ours}cross_attention.w_kv", (width,) * 2),
    ]


BART = hf.Family(("bart", "mbart", "m2m_100", "marian"), read, write, steps)
