"""``export``: write a model in one or several formats into one directory, with a certificate.

path/
  config.json  model.safetensors  tokenizer.json  README.md      opened by regard.load and transformers
  onnx/  ctranslate2/  model.gguf                                run by the other engines
  certificate.json  manifest.json                                differences from the model; checksums of all files
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from .. import hub
from ..config import ModelConfig
from ..errors import UsageError, silence_warnings
from ..foundation.files import replace_directory, write_atomic
from ..foundation.jsonio import to_json
from ..hub.gguf_file import NAME as GGUF_FILE
from ..hub.gguf_file import FloatType, check_gguf, import_gguf, write_gguf
from ..hub.manifest import NAME as MANIFEST
from ..hub.manifest import check_replaceable
from ..models import Model
from ..models.build import check_has_numbers
from ..text import Processor
from ..text.gguf_vocabulary import gguf_vocabulary
from .certificate import NAME as CERTIFICATE
from .certificate import BoundBroken, Bounds, certify
from .ctranslate2_export import FOLDER as CT2_FOLDER
from .ctranslate2_export import export_ctranslate2, import_ctranslate2, obstacles
from .onnx_graphs import onnx_obstacle
from .quantise import quantise, write_int8

Kind = Literal[
    "onnx",
    "onnx-int8",
    "hf",
    "ctranslate2",
    "gguf",
    "gguf-f16",
    "gguf-bf16",
    "gguf-q8_0",
    "int8",
    "safetensors",
    "web",
    "web-int8",
]
_PAGES = ("web", "web-int8")
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
    runtime: str | Path | None = None,
) -> Path:
    """Write the model as one kind, or as several kinds into one directory, and compare the result with the model.

    safetensors  the files of model.save; part of every export, so that every directory can be loaded
    hf           the same files; an error if transformers has no equivalent of the model
    int8         linear layers with int8 weights instead (for regard.load and the torch engine)
    onnx, ctranslate2  additional files for these engines; an error if the engine cannot run the model
    onnx-int8    ONNX graphs with int8 matrices, which any ONNX runtime can open
    gguf         model.gguf for llama.cpp, Ollama and LM Studio, in float32; gguf-f16, gguf-bf16, gguf-q8_0 are smaller
    web          a page that runs the model in the visitor's browser, in a directory of its own; web-int8 is smaller

    check    a file on which the task's metric is compared too: pairs, texts, or labelled texts
    runtime  for web: a node_modules folder with onnxruntime-web and @huggingface/tokenizers; None: fetched with npm

    The directory is written completely or not at all. If a bound is broken, BoundBroken is raised and nothing is left
    at ``path``.
    """
    kinds, target = _parse_kinds(kind), Path(path)
    _check(model, kinds, target, check)
    reference = model
    if model.training or {(p.dtype, p.device.type) for p in model.parameters()} != {(torch.float32, "cpu")}:
        reference = copy.deepcopy(model).cpu().float().eval()
    if kinds[0] in _PAGES:
        return _export_page(reference, target, kinds[0], bounds, n_shapes, seed, runtime)
    with replace_directory(target) as folder:
        if "int8" in kinds:
            write_int8(quantise(reference), folder)
        else:
            _save(model, folder)
        if "onnx" in kinds or "onnx-int8" in kinds:
            from .onnx_export import export_onnx

            export_onnx(reference, folder, int8="onnx-int8" in kinds)
        if "ctranslate2" in kinds:
            export_ctranslate2(reference, folder / CT2_FOLDER)
        if (gguf_type := _gguf_type(kinds)) is not None:
            write_gguf(reference, folder / GGUF_FILE, gguf_type)
        document = certify(
            reference, folder, n_shapes=n_shapes, seed=seed, check=check, bounds=bounds, compiled=compiled, beam=beam
        )
        _write_certificate(folder, kinds, document, model)
    return target


def _check(model: Model, kinds: Sequence[Kind], target: Path, check: str | Path | None) -> None:
    """Raise an error for an export that cannot succeed, before anything is written."""
    if check is not None and not Path(check).is_file():
        raise UsageError(f"check: there is no file {check}")
    if check is not None and kinds[0] in _PAGES:
        raise UsageError(f"{kinds[0]} takes no file to check: a page is compared on the held-out data of the run")
    check_has_numbers(model, "export")
    if "ctranslate2" in kinds:
        import_ctranslate2()
    if _gguf_type(kinds) is not None:
        import_gguf()
    check_exportable(model.config, kinds, model.processor)
    check_replaceable(target, "exporting")


def _gguf_type(kinds: Sequence[Kind]) -> FloatType | None:
    return next((cast(FloatType, float_type) for kind, float_type in _GGUF_TYPES.items() if kind in kinds), None)


def _export_page(
    model: Model, target: Path, kind: Kind, bounds: Bounds | None, n_inputs: int, seed: int, runtime: str | Path | None
) -> Path:
    from .web_certificate import certify_page
    from .web_page import export_web

    int8 = kind == "web-int8"
    with replace_directory(target) as folder:
        export_web(model, folder, int8=int8, runtime=runtime)
        document = certify_page(model, folder, n_inputs=n_inputs, seed=seed, int8=int8, bounds=bounds)
        _write_certificate(folder, [kind], document, model)
    return target


def _write_certificate(folder: Path, kinds: Sequence[Kind], document: dict[str, Any], model: Model) -> None:
    """Write the certificate, then the manifest of the whole directory; BoundBroken if a bound does not hold."""
    if not document["passes"]:
        raise BoundBroken(document)
    write_atomic(folder / CERTIFICATE, to_json({"kinds": list(kinds), **document}))
    hub.Manifest.of(folder, model.training_record).write(folder)


def _parse_kinds(kind: Kind | Sequence[Kind]) -> tuple[Kind, ...]:
    """The requested kinds without duplicates, in the order of ``Kind``."""
    requested = (kind,) if isinstance(kind, str) else tuple(kind)
    known = get_args(Kind)
    if not requested:
        raise ValueError(f"kind is empty; it must be one or several of {', '.join(known)}")
    if unknown := [name for name in requested if name not in known]:
        raise ValueError(f"kind={unknown[0]!r} is not one of {', '.join(known)}")
    chosen = tuple(name for name in known if name in requested)
    if len(chosen) > 1 and (page := next((name for name in chosen if name in _PAGES), None)) is not None:
        raise ValueError(f"kind {page} needs a directory of its own: visitors download all of it; export it alone")
    other = next((name for name in ("hf", "safetensors") if name in chosen), None)
    if "int8" in chosen and other is not None:
        raise ValueError(f"kind int8 and kind {other} both write the weights; export them to two directories")
    for output, alternatives in (("the graphs", ("onnx", "onnx-int8")), ("model.gguf", tuple(_GGUF_TYPES))):
        if len(conflicting := [name for name in chosen if name in alternatives]) > 1:
            names = " and ".join(f"kind {name}" for name in conflicting[:2])
            raise ValueError(f"{names} both write {output}; export them to two directories")
    return chosen


def check_exportable(config: ModelConfig, kinds: Sequence[str], processor: Processor | None = None) -> None:
    """Raise ValueError if a model with this config and processor cannot be exported as ``kinds``."""
    if "hf" in kinds and (reasons := hub.write_config(config).obstacles):
        others = "models trained with model=transformer-tiny, gpt2 or bert-base have a twin"
        why = f"{'; '.join(reasons)}; onnx and int8 take every model, and {others}"
        raise ValueError(f"transformers has no twin of this model: {why}")
    if "ctranslate2" in kinds and (fields := obstacles(config)):
        raise ValueError(f"CTranslate2 cannot run a model with {', '.join(fields)}")
    if ("onnx" in kinds or "onnx-int8" in kinds) and (obstacle := onnx_obstacle(config)) is not None:
        raise ValueError(obstacle)
    if any(kind in _GGUF_TYPES for kind in kinds):
        check_gguf(config)
        if processor is not None and processor.sizes():
            gguf_vocabulary(processor.tokenizer, config)


def _save(model: Model, folder: Path) -> None:
    """Write the files of model.save, without the manifest, into a folder that exists."""
    inner = folder / "model"
    with silence_warnings("regard.io"):  # its warning about transformers is irrelevant here
        model.save(inner)
    (inner / MANIFEST).unlink()
    for file in inner.iterdir():
        shutil.move(str(file), folder / file.name)
    inner.rmdir()
