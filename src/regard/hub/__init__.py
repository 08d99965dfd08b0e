"""Hugging Face directories to our models and back, as lists of invertible steps."""

from .card import changed_fields, model_card
from .comparing import Difference, behaviour, differences
from .configs import Understood, Written, keeping_token_ids, read_config, token_ids, write_config
from .directory import Directory, Provenance
from .families import BY_TYPE, FAMILIES
from .family import Family, Foreign
from .fitting import Fitting, fill, fit
from .manifest import Manifest
from .steps import Step, Tensors, to_ours, to_theirs
from .weights import Weights, write_safetensors

__all__ = [
    # files
    "Directory",
    "Manifest",
    "Provenance",
    "Weights",
    "write_safetensors",
    # configs
    "Difference",
    "Understood",
    "Written",
    "behaviour",
    "changed_fields",
    "differences",
    "keeping_token_ids",
    "model_card",
    "read_config",
    "token_ids",
    "write_config",
    # tensors
    "BY_TYPE",
    "FAMILIES",
    "Family",
    "Fitting",
    "Foreign",
    "Step",
    "Tensors",
    "fill",
    "fit",
    "to_ours",
    "to_theirs",
]
