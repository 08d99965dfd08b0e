"""What vLLM asks of a config.json, after its documentation and its model classes as of November 2026.

The list of text generation models: https://docs.vllm.ai/en/latest/models/supported_models.html. Whether a directory is
one of them is decided by ``architectures`` alone. The fields are those that vLLM reads for every decoder (longest
length, heads, vocabulary) and those that its classes assert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of vLLM's lists only the names that regard writes; an encoder-decoder is on neither.
OWN_IMPLEMENTATION = {
    *("GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "StableLmForCausalLM"),
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Exaone4ForCausalLM"),
    *("MambaForCausalLM", "Mamba2ForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"),
    "GptOssForCausalLM",
    *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
}
THROUGH_TRANSFORMERS = {"Olmo2ForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM"}
LENGTHS = ("max_position_embeddings", "n_positions")
WITHOUT_LENGTH = {"MambaForCausalLM", "Mamba2ForCausalLM"}  # a state space reads any length
# What the class ignores or asserts against.
MUST_BE_FALSE = {
    "GPT2LMHeadModel": ("add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
    "StableLmForCausalLM": ("use_parallel_residual", "qk_layernorm"),
}


def vllm_obstacles(fields: Mapping[str, Any]) -> list[str]:
    """Why vLLM would not run a directory with this config.json; empty where it would."""
    name = (fields.get("architectures") or ["none"])[0]
    if name not in OWN_IMPLEMENTATION | THROUGH_TRANSFORMERS:
        return [f"architectures={name} is not on vLLM's list of text generation models"]
    found = []
    if name not in WITHOUT_LENGTH and not any(isinstance(fields.get(length), int) for length in LENGTHS):
        found.append(f"none of {', '.join(LENGTHS)} says how long a text may be")
    heads = fields.get("num_attention_heads") or fields.get("n_head") or 1
    if heads % (fields.get("num_key_value_heads") or heads):
        found.append(f"{heads} heads cannot share {fields['num_key_value_heads']} of keys")
    found += [f"{field}=true is not computed" for field in MUST_BE_FALSE.get(name, ()) if fields.get(field)]
    found += [] if isinstance(fields.get("vocab_size"), int) else ["vocab_size is missing"]
    return found
