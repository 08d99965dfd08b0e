"""What the hub's tests share: tiny random models, theirs and ours, what they say, and directories to break."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from regard.config import ModelConfig
from regard.models import Model, build

VOCAB = 40


def _gpt2() -> hf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def _decoder(kind: str, **fields: Any) -> Callable[[], hf.PreTrainedModel]:
    def make() -> hf.PreTrainedModel:
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 24}
        config = getattr(hf, f"{kind}Config")(**sizes, **heads, pad_token_id=0, **fields)
        return getattr(hf, f"{kind}ForCausalLM")(config)

    return make


def _t5() -> hf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


def _bart(kind: str) -> Callable[[], hf.PreTrainedModel]:
    def make() -> hf.PreTrainedModel:
        sizes = {"vocab_size": VOCAB, "d_model": 16, "max_position_embeddings": 24}
        layers = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _LAYER.items()}
        ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
        if kind == "Bart":
            return hf.BartForConditionalGeneration(hf.BartConfig(**sizes, **layers, **ids))
        return hf.MarianMTModel(hf.MarianConfig(**sizes, **layers, **ids, scale_embedding=True))

    return make


_LAYER = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}


def _encoder(kind: str, **fields: Any) -> Callable[[], hf.PreTrainedModel]:
    def make() -> hf.PreTrainedModel:
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "max_position_embeddings": 24}
        config = getattr(hf, f"{kind}Config")(**sizes, **heads, **fields)
        return getattr(hf, f"{kind}ForMaskedLM")(config)

    return make


def _distilbert() -> hf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
    return hf.DistilBertForMaskedLM(hf.DistilBertConfig(**sizes, max_position_embeddings=24))


def _vit() -> hf.PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    names = {0: "cat", 1: "dog", 2: "숲"}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=8, patch_size=4, id2label=names))


def _bert_classes() -> hf.PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = hf.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=24, num_labels=3)
    return hf.BertForSequenceClassification(config)


THEIRS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "gpt2": _gpt2,
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=6),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", tie_word_embeddings=True),
    "t5": _t5,
    "bart": _bart("Bart"),
    "marian": _bart("Marian"),
    "bert": _encoder("Bert"),
    "bert-classes": _bert_classes,
    "roberta": _encoder("Roberta", pad_token_id=1),
    "distilbert": _distilbert,
    "albert": _encoder("Albert", embedding_size=8),
    "vit": _vit,
}


def theirs(kind: str) -> hf.PreTrainedModel:
    """A tiny model of transformers with every parameter random, norms and biases too."""
    torch.manual_seed(7)
    model = THEIRS[kind]().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # Marian's sinusoids are parameters there, but not to be changed
                p.add_(0.1 * torch.randn_like(p))
    return model


def speaks(model: Any) -> Tensor:
    """What a model, theirs or ours, answers to a fixed question."""
    torch.manual_seed(3)
    tokens = torch.randint(5, VOCAB, (2, 11))
    ours = isinstance(model, Model)
    config = model.config
    with torch.no_grad():
        sees = (config.source == "image") if ours else config.model_type == "vit"
        writes = (config.architecture in ("encoder-decoder", "recurrent")) if ours else config.is_encoder_decoder
        given = (torch.randn(2, 3, 8, 8) if sees else tokens, *([tokens[:, 2:9]] if writes else []))
        if ours:
            return model(*given)
        names = ("pixel_values",) if config.model_type == "vit" else ("input_ids", "decoder_input_ids")
        return model(**dict(zip(names, given, strict=False))).logits


SMALL: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24, "max_len": 16}


def ours(**fields: Any) -> Model:
    """A tiny model of ours, all of it random."""
    torch.manual_seed(5)
    model = build(ModelConfig(**{"architecture": "decoder", **SMALL, **fields})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def edit_json(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    document = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps({name: x for name, x in document.items() if x is not None}), encoding="utf-8")


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """The same names, and under each the same type, shape and bits; NaN equals itself here."""
    return set(one) == set(other) and all(
        x.dtype == other[name].dtype and x.shape == other[name].shape and bits(x) == bits(other[name])
        for name, x in one.items()
    )


def bits(x: Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
