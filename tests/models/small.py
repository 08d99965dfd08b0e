"""Presets and configs at a size where everything runs in milliseconds, and inputs for whatever they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.attention.cache import ModelCache
from regard.config import ModelConfig
from regard.models import Decoder, Encoder, EncoderDecoder, Model, Recurrent, build
from regard.presets import PRESETS, preset

SIZES: dict[str, Any] = {
    **{"vocab_size": 31, "d_model": 24, "n_layers": 2, "n_heads": 4, "d_ff": 32, "max_len": 24},
    **{"pad_id": 0, "bos_id": 1, "eos_id": 2},
}
DECODING = tuple(name for name, fields in PRESETS.items() if fields["architecture"] != "encoder")


def small_config(name: str, **fields: Any) -> ModelConfig:
    """A preset, shrunk: every feature stays, every size goes."""
    own = PRESETS[name]
    sizes = dict(SIZES)
    tiny = {"n_kv_heads": 2, "d_head": 8, "window": 4, "shifted_windows": 2}
    sizes |= {field: size for field, size in tiny.items() if own.get(field) is not None}
    if own.get("source") == "image":
        sizes |= {"image_size": 16, "patch_size": 4}
    if own.get("source") == "regions":
        sizes |= {"d_region": 10}
    if own.get("head") == "classify":
        sizes |= {"n_classes": min(own["n_classes"], 5)}
    if "logit_scale" in own:
        sizes |= {"logit_scale": sizes["d_model"] ** -0.5}
    return preset(name, **sizes | fields)


def small(name: str, **fields: Any) -> Model:
    """That preset as a model whose parameters are all random, norms and biases too, without dropout."""
    torch.manual_seed(0)
    return shaken(build(small_config(name, **fields))).eval()


def shaken(model: Model, by: float = 0.2) -> Model:
    """Nothing stays at a value that would hide its part: biases leave 0, norms leave 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn(p.shape, generator=generator))
    return model


def source_of(config: ModelConfig, batch: int = 3, length: int = 9, seed: int = 2) -> Tensor:
    """What the encoder, or the only stack, reads."""
    generator = torch.Generator().manual_seed(seed)
    if config.source == "image":
        return torch.randn(batch, config.n_channels, config.image_size, config.image_size, generator=generator)
    if config.source == "regions":
        return torch.randn(batch, length, config.d_region, generator=generator)
    return torch.randint(3, config.vocab_size, (batch, length), generator=generator)


def target_of(config: ModelConfig, batch: int = 3, length: int = 7, seed: int = 3) -> Tensor:
    return torch.randint(3, config.output_vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(config: ModelConfig, batch: int = 3) -> tuple[Tensor, ...]:
    """The arguments of a call."""
    both = config.architecture in ("encoder-decoder", "recurrent")
    return (source_of(config, batch), target_of(config, batch)) if both else (source_of(config, batch),)


def decode(model: Model, inputs: tuple[Tensor, ...], cache: ModelCache, prompt: int = 3) -> Tensor:
    """The same logits as one call gives, step by step: a prompt, then token by token."""
    tokens = inputs[-1]
    spans = [slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, tokens.shape[1]))]
    if isinstance(model, Decoder):
        return torch.cat([model(tokens[:, at], cache=cache) for at in spans], dim=1)
    assert isinstance(model, EncoderDecoder | Recurrent)
    memory = model.encode(inputs[0])
    states = torch.cat([model.decode(tokens[:, at], memory, cache=cache) for at in spans], dim=1)
    return states if model.head is None else model.head(states, model.output_table)


def outputs_of(model: Model, inputs: tuple[Tensor, ...]) -> Tensor:
    """Everything a call gives, the pooled vector too where there is one."""
    out = model(*inputs)
    if isinstance(model, Encoder) and model.pooler is not None:
        return torch.cat((out.flatten(1), model.pooled(out)), dim=1)
    return out
