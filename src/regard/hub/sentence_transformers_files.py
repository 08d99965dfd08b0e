"""The additional files of a sentence-transformers directory, which define a text's embedding.

modules.json                      the steps: Transformer, Pooling and optionally Normalize
1_Pooling/config.json             the pooling
sentence_bert_config.json         the maximum number of tokens
"""

from __future__ import annotations

import json
from typing import Any

from ..config import ModelConfig
from ..errors import BadModelFile
from ..foundation.jsonio import parse_json, to_json
from .hf_directory import Directory

MODULES, LENGTH = "modules.json", "sentence_bert_config.json"
_POOLINGS = {"pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_OTHER_POOLINGS = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_SHORT_NAMES = {"cls": "first", "mean": "mean", "lasttoken": "last"}  # values of "pooling_mode" in newer files


def read_embedding(directory: Directory) -> dict[str, Any]:
    """Our embedding fields; empty without a modules.json. Raises BadModelFile for an unsupported step or value."""
    if not directory.has(MODULES):
        return {}
    path = directory.path(MODULES)
    steps = _read_list(path.read_bytes(), str(path))
    kinds = [str(step.get("type", "")).rpartition(".")[2] for step in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or steps[0].get("path"):
        raise BadModelFile(
            f"{path} has the steps {', '.join(kinds)}; regard reads Transformer (in the directory itself), Pooling and "
            "optionally Normalize"
        )
    name = f"{steps[1].get('path') or '1_Pooling'}/config.json"
    fields: dict[str, Any] = {"embed_pooling": _pooling(directory, name), "embed_normalise": len(kinds) == 3}
    if directory.has(LENGTH):
        lengths = directory.json(LENGTH)
        if lengths.get("do_lower_case"):
            raise BadModelFile(f"{directory.root / LENGTH} has do_lower_case=true; regard does not lowercase texts")
        fields["embed_len"] = lengths.get("max_seq_length")
    return fields


def _read_list(content: bytes, name: str) -> list[dict[str, Any]]:
    steps = parse_json(b'{"steps": ' + content + b"}", name)["steps"]  # parse_json reads objects only
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        raise BadModelFile(f"{name} is not a list of steps")
    return steps


def _pooling(directory: Directory, name: str) -> str:
    fields = directory.json(name)
    if isinstance(mode := fields.get("pooling_mode"), str):
        modes = [_SHORT_NAMES.get(mode, mode)]
    else:
        modes = [ours for theirs, ours in _POOLINGS.items() if fields.get(theirs)]
        modes += [theirs for theirs in _OTHER_POOLINGS if fields.get(theirs)]
    if len(modes) != 1 or modes[0] not in _POOLINGS.values():
        raise BadModelFile(
            f"{directory.root / name} has the pooling {' and '.join(modes) or 'none'}; regard reads mean, cls or last"
        )
    return modes[0]


def write_embedding(config: ModelConfig) -> dict[str, bytes]:
    """The files with which sentence-transformers opens a saved model; none without ``embed_pooling``."""
    if config.embed_pooling is None:
        return {}
    kinds = ["Transformer", "Pooling", *(["Normalize"] if config.embed_normalise else [])]
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    steps = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    modes = {theirs: ours == config.embed_pooling for theirs, ours in _POOLINGS.items()}
    pooling = {"word_embedding_dimension": config.d_model, **modes, **dict.fromkeys(_OTHER_POOLINGS, False)}
    length = {"max_seq_length": config.embed_len or config.max_len, "do_lower_case": False}
    return {
        MODULES: json.dumps(steps, indent=2).encode(),
        "1_Pooling/config.json": to_json(pooling),
        LENGTH: to_json(length),
    }
