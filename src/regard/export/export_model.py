"""``export``: write a model in one or several formats into one directory, with a certificate.

path/
  config.json  model.safetensors  tokenizer.json  README.md      what regard.load and transformers open
  onnx/  ctranslate2/  model.gguf                                what the other engines run
  certificate.json  manifest.json                                differences from the model; checksums of all files
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from .. import hub
from ..config import ModelConfig
from ..errors import silence_warnings
from ..foundation.files import replace_directory, write_atomic
from ..foundation.jsonio import to_json
from ..hub.gguf_file import NAME as GGUF_FILE
from ..hub.gguf_file import FloatType, check_gguf, require_gguf, write_gguf
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import check_replaceable
from ..models import Model
from ..text import Processor
from ..text.gguf_vocabulary import gguf_vocabulary
from .certificate import NAME as CERTIFICATE
from .certificate import BoundBroken, Bounds, certify
from .ctranslate2_export import FOLDER as CT2_FOLDER
from .ctranslate2_export import export_ctranslate2, obstacles, require_ctranslate2
from .quantise import quantise, write_int8

Kind = Literal[
    "onnx", "onnx-int8", "hf", "ctranslate2", "gguf", "gguf-f16", "gguf-bf16", "gguf-q8_0", "int8", "safetensors"
]
_GGUF_TYPES = {"gguf": "f32", "gguf-f16": "f16", "gguf-bf16": "bf16", "gguf-q8_0": "q8_0"}


def export(
    model: Model,
    kind: Kind | Sequence[Kind],
    path: str | Path,
    *,
    check: str | Path | None = None,
    bounds: Bounds | None = None,
    n_shapes: int = 200,
    seed: int = 0,
    compiled: bool = True,
    beam: int = 4,
) -> Path:
    """Write the model as ``kind``, or as several kinds into one directory, and compare what was written with it.

    safetensors  what model.save writes; every export holds it, so that every directory can be loaded
    hf           the same, refused where transformers has no twin of the model
    int8         linear maps with int8 weights instead of those (regard.load, the torch engine)
    onnx, ctranslate2  beside them, for those engines; refused where they cannot run the model
    onnx-int8    ONNX graphs whose matrices are int8, which every ONNX runtime opens
    gguf         model.gguf for llama.cpp, Ollama and LM Studio, in float32; gguf-f16, gguf-bf16, gguf-q8_0 are smaller
    check        a file the metric is compared on too: pairs, texts, or labelled texts
    The directory appears whole or not at all. A bound that is broken is a BoundBroken, and nothing is left at ``path``.
    """
    kinds = _parse_kinds(kind)
    target = Path(path)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: it has no numbers to export")
    if "ctranslate2" in kinds:
        require_ctranslate2()
    gguf_type = next((cast(FloatType, float_type) for kind, float_type in _GGUF_TYPES.items() if kind in kinds), None)
    if gguf_type is not None:
        require_gguf()
    check_exportable(model.config, kinds, model.processor)
    check_replaceable(target, "exporting")
    own = model
    if model.training or {(p.dtype, p.device.type) for p in model.parameters()} != {(torch.float32, "cpu")}:
        own = copy.deepcopy(model).cpu().float().eval()
    with replace_directory(target) as folder:
        if "int8" in kinds:
            write_int8(quantise(own), folder)
        else:
            _save(model, folder)
        if "onnx" in kinds or "onnx-int8" in kinds:
            from .onnx_export import export_onnx

            export_onnx(own, folder, int8="onnx-int8" in kinds)
        if "ctranslate2" in kinds:
            export_ctranslate2(own, folder / CT2_FOLDER)
        if gguf_type is not None:
            write_gguf(own, folder / GGUF_FILE, gguf_type)
        document = certify(
            own, folder, n_shapes=n_shapes, seed=seed, check=check, bounds=bounds, compiled=compiled, beam=beam
        )
        if not document["passes"]:
            raise BoundBroken(document)
        write_atomic(folder / CERTIFICATE, to_json({"kinds": list(kinds), **document}))
        hub.Manifest.of(folder, model.training_record).write(folder)
    return target


def _parse_kinds(kind: Kind | Sequence[Kind]) -> tuple[Kind, ...]:
    given = (kind,) if isinstance(kind, str) else tuple(kind)
    known = get_args(Kind)
    if not given:
        raise ValueError(f"kind is empty; it is one or several of {', '.join(known)}")
    if unknown := [one for one in given if one not in known]:
        raise ValueError(f"kind={unknown[0]!r} is none of {', '.join(known)}")
    chosen = tuple(one for one in known if one in given)
    other = next((one for one in ("hf", "safetensors") if one in chosen), None)
    if "int8" in chosen and other is not None:
        raise ValueError(f"kind int8 and kind {other} both are the directory's weights; export them to two directories")
    for what, rivals in (("graphs", ("onnx", "onnx-int8")), ("model.gguf", tuple(_GGUF_TYPES))):
        if len(both := [one for one in chosen if one in rivals]) > 1:
            names = " and ".join(f"kind {one}" for one in both[:2])
            raise ValueError(f"{names} both are the directory's {what}; export them to two directories")
    return chosen


def check_exportable(config: ModelConfig, kinds: Sequence[str], processor: Processor | None = None) -> None:
    """Raise where a model of this config, with this processor, has no such form."""
    if "hf" in kinds and (reasons := hub.write_config(config).obstacles):
        others = "what is trained with model=transformer-tiny, gpt2 or bert-base has a twin"
        why = f"{'; '.join(reasons)}; onnx and int8 take every model, and {others}"
        raise ValueError(f"transformers has no twin of this model: {why}")
    if "ctranslate2" in kinds and (fields := obstacles(config)):
        raise ValueError(f"CTranslate2 cannot run a model with {', '.join(fields)}")
    if any(kind in _GGUF_TYPES for kind in kinds):
        check_gguf(config)
        if processor is not None and processor.sizes():
            gguf_vocabulary(processor.tokenizer, config)


def _save(model: Model, folder: Path) -> None:
    """Write what model.save writes into a folder that exists, without the manifest."""
    inner = folder / "model"
    with silence_warnings("regard.io"):  # whether transformers has a twin is no question here
        model.save(inner)
    (inner / MANIFEST).unlink()
    for file in inner.iterdir():
        shutil.move(str(file), folder / file.name)
    inner.rmdir()
