"""Hugging Face model directories as regard models, and back, by lists of invertible steps."""

from .config_diff import behaviour, differences
from .families import BY_TYPE, FAMILIES
from .fitting import Fitting, fill, fit
from .gguf_file import GgufDirectory, find_gguf
from .hf_config import (
    ResolvedConfig,
    WrittenConfig,
    changed_fields,
    model_card,
    read_config,
    restore_token_ids,
    token_ids,
    training_summary,
    write_config,
)
from .hf_directory import Directory, Provenance, Weights, write_safetensors
from .manifest import Manifest
from .peft_adapter import Adapter, LowRank, is_adapter, write_adapter
from .sentence_transformers_files import read_embedding, write_embedding
from .weight_steps import to_ours, to_theirs

# fmt: off
__all__ = [
    "BY_TYPE", "FAMILIES", "Adapter", "Directory", "Fitting", "GgufDirectory", "LowRank", "Manifest", "Provenance",
    "ResolvedConfig", "Weights", "WrittenConfig", "behaviour", "changed_fields", "differences", "fill", "find_gguf",
    "fit", "is_adapter", "model_card", "read_config", "read_embedding", "restore_token_ids", "to_ours", "to_theirs",
    "token_ids", "training_summary", "write_adapter", "write_config", "write_embedding", "write_safetensors",
]
# fmt: on
