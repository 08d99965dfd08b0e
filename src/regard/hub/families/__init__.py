"""Every family the hub knows, found by the ``model_type`` of a config.json."""

from __future__ import annotations

from ..hf_family import Family
from .bart import BART
from .bert import ALBERT, BERT, DISTILBERT, ELECTRA, ROBERTA
from .gpt import GPT2, GPT_NEOX, OPT, PHI, STABLELM, STARCODER2
from .llama import EUROBERT, LLAMA, PHI3
from .mamba import MAMBA2
from .t5 import T5
from .vit import VIT

FAMILIES: tuple[Family, ...] = (
    *(GPT2, LLAMA, PHI3, GPT_NEOX, PHI, OPT, STARCODER2, STABLELM, MAMBA2),
    *(T5, BART),
    *(BERT, ROBERTA, DISTILBERT, ALBERT, ELECTRA, EUROBERT),
    VIT,
)
BY_TYPE: dict[str, Family] = {model_type: family for family in FAMILIES for model_type in family.model_types}
