"""Every family the hub knows, found by the ``model_type`` of a config.json."""

from __future__ import annotations

from ..family import Family
from .bart import BART
from .gpt2 import GPT2
from .llama import LLAMA
from .t5 import T5

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA, T5, BART)
BY_TYPE: dict[str, Family] = {model_type: family for family in FAMILIES for model_type in family.model_types}
