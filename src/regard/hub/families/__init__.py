"""All supported families, by the ``model_type`` of config.json."""

from __future__ import annotations

from ..hf_family import Family
from .bart import BART
from .bert import ALBERT, BERT, BIG_BIRD, DISTILBERT, ELECTRA, FNET, LONGFORMER, ROBERTA
from .clip import CLIP
from .gpt import GPT2, GPT_NEOX, OPT, PHI, STABLELM, STARCODER2
from .llama import EUROBERT, LLAMA, PHI3
from .mamba import MAMBA, MAMBA2
from .modernbert import MODERNBERT
from .t5 import T5
from .vit import DEIT, DINO, SWIN, VIT

FAMILIES: tuple[Family, ...] = (
    *(GPT2, LLAMA, PHI3, GPT_NEOX, PHI, OPT, STARCODER2, STABLELM, MAMBA, MAMBA2),
    *(T5, BART),
    *(BERT, ROBERTA, DISTILBERT, ALBERT, ELECTRA, EUROBERT, MODERNBERT, LONGFORMER, BIG_BIRD, FNET),
    *(VIT, DEIT, DINO, SWIN),
    CLIP,
)
BY_TYPE: dict[str, Family] = {model_type: family for family in FAMILIES for model_type in family.model_types}
