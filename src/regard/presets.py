"""Model presets: well-known models with the sizes of the originals, as fields of ModelConfig."""

from __future__ import annotations

from typing import Any

from .config import ModelConfig
from .foundation.suggestions import nearest_name

_PAPER: dict[str, Any] = {  # Vaswani et al. 2017, table 3
    "architecture": "encoder-decoder",
    "vocab_size": 37000,
    "positions": "sinusoidal",
    "sinusoid_layout": "halves",  # as in the authors' own code; it is also what Marian, the twin on the hub, does
    "scale_embeddings": True,
    "norm_place": "post",
    "activation": "relu",
    "dropout": 0.1,
    "embedding_dropout": 0.1,
}
_GPT2: dict[str, Any] = {  # Radford et al. 2019
    "architecture": "decoder",
    "vocab_size": 50257,
    "max_len": 1024,
    "positions": "learned",
    "norm_place": "pre",
    "activation": "gelu_tanh",
    "init_std": 0.02,
    "pad_id": 50256,
    "bos_id": 50256,
    "eos_id": 50256,
}
_LLAMA: dict[str, Any] = {  # Touvron et al. 2023
    "architecture": "decoder",
    "vocab_size": 32000,
    "positions": "rope",
    "norm": "rms",
    "norm_place": "pre",
    "norm_eps": 1e-5,
    "activation": "swiglu",
    "qkv_bias": False,
    "out_bias": False,
    "ff_bias": False,
    "tie_head": False,
    "init_std": 0.02,
}
_BERT: dict[str, Any] = {  # Devlin et al. 2019
    "architecture": "encoder",
    "vocab_size": 30522,
    "max_len": 512,
    "positions": "learned",
    "n_segments": 2,
    "embedding_norm": True,
    "norm_place": "post",
    "norm_eps": 1e-12,
    "activation": "gelu",
    "init_std": 0.02,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "embedding_dropout": 0.1,
    "bos_id": 101,
    "eos_id": 102,
}
_BERT_BASE: dict[str, Any] = {**_BERT, "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 3072}
_T5: dict[str, Any] = {  # Raffel et al. 2020
    "architecture": "encoder-decoder",
    "vocab_size": 32128,
    "max_len": 512,
    "positions": "t5",
    "norm": "rms",
    "norm_place": "pre",
    "norm_eps": 1e-6,
    "activation": "relu",
    "qkv_bias": False,
    "out_bias": False,
    "ff_bias": False,
    "attention_scale": 1.0,
    "dropout": 0.1,
    "bos_id": 0,
    "eos_id": 1,
}
_VIT: dict[str, Any] = {  # Dosovitskiy et al. 2021
    "architecture": "encoder",
    "source": "image",
    "head": "classify",
    "n_classes": 1000,
    "positions": "learned",
    "norm_place": "pre",
    "norm_eps": 1e-12,
    "activation": "gelu",
    "init_std": 0.02,
}
_CAPTIONER: dict[str, Any] = {
    "architecture": "encoder-decoder",
    "vocab_size": 8000,
    "d_model": 256,
    "n_layers": 3,
    "n_heads": 4,
    "d_ff": 1024,
    "norm_place": "pre",
    "activation": "gelu",
    "dropout": 0.1,
    "embedding_dropout": 0.1,
    "max_len": 64,
}
_RNN: dict[str, Any] = {"architecture": "recurrent", "vocab_size": 30000, "tie_head": False, "dropout": 0.2}

PRESETS: dict[str, dict[str, Any]] = {
    "transformer-tiny": {**_PAPER, "vocab_size": 8000, "d_model": 128, "n_layers": 2, "n_heads": 4, "d_ff": 512},
    "transformer-base": {**_PAPER, "d_model": 512, "n_layers": 6, "n_heads": 8, "d_ff": 2048},
    "transformer-big": {
        **_PAPER,
        **{"d_model": 1024, "n_layers": 6, "n_heads": 16, "d_ff": 4096, "dropout": 0.3, "embedding_dropout": 0.3},
    },
    "gpt2": {**_GPT2, "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 3072},
    "gpt2-medium": {**_GPT2, "d_model": 1024, "n_layers": 24, "n_heads": 16, "d_ff": 4096},
    "gpt2-large": {**_GPT2, "d_model": 1280, "n_layers": 36, "n_heads": 20, "d_ff": 5120},
    "gpt2-xl": {**_GPT2, "d_model": 1600, "n_layers": 48, "n_heads": 25, "d_ff": 6400},
    "llama-7b": {**_LLAMA, "d_model": 4096, "n_layers": 32, "n_heads": 32, "d_ff": 11008, "max_len": 4096},
    "llama-1b": {  # the sizes of TinyLlama, Zhang et al. 2024
        **_LLAMA,
        **{"d_model": 2048, "n_layers": 22, "n_heads": 32, "n_kv_heads": 4, "d_ff": 5632, "max_len": 2048},
    },
    "mistral-7b": {  # Jiang et al. 2023
        **_LLAMA,
        **{"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14336},
        **{"max_len": 32768, "window": 4096},
    },
    "bert-base": {**_BERT_BASE, "head": "none", "pooler": "tanh"},
    "bert-base-masked": {**_BERT_BASE, "head": "masked-lm", "head_transform": True, "head_bias": True},
    "sentiment": {  # a small three-class classifier to train from scratch
        "architecture": "encoder",
        "head": "classify",
        **{"vocab_size": 16000, "d_model": 256, "n_layers": 4, "n_heads": 4, "d_ff": 1024, "max_len": 256},
        **{"n_classes": 3, "pooling": "mean", "norm_place": "pre", "activation": "gelu"},
        **{"dropout": 0.1, "embedding_dropout": 0.1, "classifier_dropout": 0.1},
    },
    "t5-small": {**_T5, "d_model": 512, "n_layers": 6, "n_heads": 8, "d_ff": 2048, "logit_scale": 512**-0.5},
    "t5-base": {**_T5, "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 3072, "logit_scale": 768**-0.5},
    "t5-v1.1-small": {
        **_T5,
        **{"d_model": 512, "n_layers": 8, "n_heads": 6, "d_head": 64, "d_ff": 1024},
        **{"activation": "geglu_tanh", "tie_head": False},
    },
    "vit-base-16": {**_VIT, "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 3072},
    "vit-tiny": {
        **_VIT,
        **{"d_model": 128, "n_layers": 4, "n_heads": 4, "d_ff": 384, "image_size": 28, "patch_size": 4},
        **{"n_channels": 1, "n_classes": 10, "norm_eps": 1e-6, "dropout": 0.1},
    },
    "swin-tiny": {  # local windows that shift every other layer
        **_VIT,
        **{"d_model": 128, "n_layers": 4, "n_heads": 4, "d_ff": 384, "image_size": 32, "patch_size": 2},
        **{"n_classes": 10, "norm_eps": 1e-6, "dropout": 0.1, "shifted_windows": 4},
    },
    "captioner": {**_CAPTIONER, "source": "image", "image_size": 112, "patch_size": 16},
    "captioner-regions": {**_CAPTIONER, "source": "regions"},
    "bahdanau-gru": {  # Bahdanau et al. 2015
        **_RNN,
        **{"cell": "gru", "alignment": "additive", "d_model": 512, "n_layers": 1, "bidirectional": True},
    },
    "luong-lstm": {  # Luong et al. 2015
        **_RNN,
        **{"cell": "lstm", "alignment": "general", "d_model": 512, "n_layers": 2, "bidirectional": False},
    },
    "lstm-plain": {**_RNN, "cell": "lstm", "alignment": "none", "d_model": 512, "n_layers": 2, "bidirectional": False},
}


def preset(name: str, **fields: Any) -> ModelConfig:
    """The config of that name, any field overridden."""
    if name not in PRESETS:
        nearest = nearest_name(name, PRESETS, dotted=False)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise ValueError(f"there is no preset {name!r}{hint} (all: {', '.join(PRESETS)})")
    return ModelConfig(**{**PRESETS[name], **fields})
