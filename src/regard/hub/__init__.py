"""Hugging Face directories to our models and back, as lists of invertible steps."""

from .config_diff import Difference, behaviour, differences
from .families import BY_TYPE, FAMILIES
from .fitting import Fitting, fill, fit
from .hf_config import (
    ResolvedConfig,
    WrittenConfig,
    changed_fields,
    model_card,
    read_config,
    restore_token_ids,
    token_ids,
    write_config,
)
from .hf_directory import Directory, Provenance, Weights, write_safetensors
from .hf_family import Family, ForeignFields
from .manifest import Manifest
from .weight_steps import Step, Tensors, to_ours, to_theirs

__all__ = [
    # files
    "Directory",
    "Manifest",
    "Provenance",
    "Weights",
    "write_safetensors",
    # configs
    "Difference",
    "ResolvedConfig",
    "WrittenConfig",
    "behaviour",
    "changed_fields",
    "differences",
    "restore_token_ids",
    "model_card",
    "read_config",
    "token_ids",
    "write_config",
    # tensors
    "BY_TYPE",
    "FAMILIES",
    "Family",
    "Fitting",
    "ForeignFields",
    "Step",
    "Tensors",
    "fill",
    "fit",
    "to_ours",
    "to_theirs",
]
