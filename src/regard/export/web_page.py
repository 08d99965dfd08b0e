"""Export a model as a static web page: the explorer, the graphs, and the libraries that run them.

OUT/
  index.html  static/            the explorer, with a strict content security policy
  page.json                      config, attentions, vocabulary, files with their SHA-256
  model/                         graphs and tokenizers, gzip-compressed
  runtime/                       onnxruntime-web and @huggingface/tokenizers
  service_worker.js              makes the page work offline from the second visit on
  certificate.json manifest.json differences from the model; checksums
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import RegardError
from ..foundation.files import write_atomic
from ..foundation.jsonio import to_json
from ..generation.prompts import max_text_length
from ..generation.text_generation import class_names
from ..models import Model
from ..text import Processor
from ..text.tokenizer import MarianTokenizer
from .onnx_export import round_weights
from .onnx_trace import write_graph
from .page_graphs import describe_attention, describe_vocabulary, page_graphs
from .web_runtime import PACKAGES, RUNTIME_FILES, find_runtime, runtime_versions

PAGE, WORKER = "page.json", "service_worker.js"
_VERSION = 1
# Nothing from other hosts; scripts only from the page's own files; WebAssembly allowed.
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data: blob:; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
_CONFIG = (
    *("architecture", "source", "head", "problem_type", "norm_place", "pad_id", "bos_id", "eos_id", "more_eos_ids"),
    *("forbidden_ids", "image_size", "patch_size"),
)
_NOT_SHIPPED = ("page/compare.mjs", f"page/{WORKER}")


def export_web(model: Model, folder: Path, *, int8: bool = False, runtime: str | Path | None = None) -> dict[str, Any]:
    """Write the page of a float32 model into an empty folder and return the contents of page.json.

    ``int8`` rounds matrices and token tables; ``runtime`` is a ``node_modules`` folder with the libraries.
    """
    _check_inputs(model)
    attention, libraries = describe_attention(model), find_runtime(runtime)
    packed: dict[str, dict[str, Any]] = {}
    graphs = {}
    for part, graph in page_graphs(model).items():
        path = folder / f"{part}.onnx"
        write_graph(graph, path)
        if int8:
            round_weights(path, graph)
        if path.with_name(f"{path.name}.data").exists():
            raise RegardError(f"the model has {model.n_parameters:,} parameters, more than a page can hold")
        graphs[part] = f"model/{part}.onnx.gz"
        packed[graphs[part]] = _write_packed(folder / graphs[part], path.read_bytes())
        path.unlink()
    for name_in_page, (package, file) in RUNTIME_FILES.items():
        content = (libraries / package / file).read_bytes()
        if name_in_page.endswith(".wasm"):
            compressed = f"runtime/{name_in_page}.gz"
            packed[compressed] = _write_packed(folder / compressed, content)
        else:
            _write(folder / "runtime" / name_in_page, content)
    _write_licences(folder, libraries)
    tokenizers = _write_tokenizers(model, folder, packed)
    page = {
        "regard_page": _VERSION,
        "weights": "int8" if int8 else "float32",
        **_describe(model),
        "config": page_config(model),
        "attention": attention,
        "tokenizers": tokenizers,
        "graphs": graphs,
        "files": packed,
        "runtime": runtime_versions(libraries),
    }
    _write_static(folder, page)
    return page


def _check_inputs(model: Model) -> None:
    processor = model.processor or Processor()
    if model.config.source == "image" and processor.image is None:
        raise RegardError("a page reads images, and this model has no image processor")
    if model.config.source == "regions":
        raise RegardError("a page reads texts and images; this model reads regions found by another model")
    if model.config.source == "text" and not processor.tokenizers:
        raise RegardError("a page reads texts, and this model has no tokenizer")
    if any(isinstance(tokenizer, MarianTokenizer) for tokenizer in processor.tokenizers.values()):
        raise RegardError("a page needs a tokenizer.json; Marian's pair of SentencePiece models has none")


def page_config(model: Model) -> dict[str, Any]:
    """The fields of a model's config that the page uses."""
    config: ModelConfig = model.config
    fields = {name: getattr(config, name) for name in _CONFIG}
    embeddings: Any = getattr(model, "embeddings", None)
    lengths = {"max_len": max_text_length(config), "max_target_len": max_text_length(config, target=True)}
    has_norm = any(getattr(embeddings, part, None) is not None for part in ("norm", "projection"))
    counts = {part: getattr(embeddings, part, 0) for part in ("n_class_tokens", "n_registers")}
    return {**fields, **lengths, **counts, "embedding_norm": has_norm}


def _describe(model: Model) -> dict[str, Any]:
    """What the served explorer tells about a model, its class names, vocabularies and image preprocessing."""
    from ..web.served_models import name_models

    path = "model" if model.provenance is None else str(model.provenance.path)
    (served,) = name_models([(path, model)])
    processor = model.processor or Processor()
    sides = {"source": processor.source, "target": processor.target}
    vocabulary = {side: describe_vocabulary(tokenizer, model.config) for side, tokenizer in sides.items()}
    image = processor.image
    return {
        "model": served.to_dict(),
        "spells_examples": served._spells_examples,
        "classes": class_names(model) if model.config.head == "classify" else [],
        "vocabulary": vocabulary,
        "image": None if image is None else {field: getattr(image, field) for field in _IMAGE_FIELDS},
    }


_IMAGE_FIELDS = ("size", "mean", "std", "rescale", "resample", "crop")


def _write_tokenizers(model: Model, folder: Path, packed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write the tokenizer.json of each side; returns the facts about it that page.json lists."""
    processor, out = model.processor or Processor(), {}
    for side, tokenizer in processor.tokenizers.items():
        file = f"model/tokenizer.{side}.json.gz"
        packed[file] = _write_packed(folder / file, tokenizer.content)
        out[side] = {
            "file": file,
            "empty": tokenizer.encode(""),
            "special": sorted(tokenizer.all_special_ids),
            "unknown": tokenizer.special_ids.get("unk"),
            "literal": tokenizer.is_native or tokenizer.has_literal_special_tokens,
        }
    if "source" not in out and "target" in out:  # a captioner's only tokenizer
        out["source"] = out["target"]
    return out


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)


def _write_packed(path: Path, content: bytes) -> dict[str, Any]:
    packed = gzip.compress(content, 9, mtime=0)
    _write(path, packed)
    return {"bytes": len(packed), "sha256": hashlib.sha256(content).hexdigest()}


def _write_licences(folder: Path, libraries: Path) -> None:
    for package in PACKAGES:
        licence = json.loads((libraries / package / "package.json").read_bytes()).get("license", "")
        file = libraries / package / "LICENSE"
        text = file.read_text(encoding="utf-8") if file.is_file() else f"{package}: {licence} licence\n"
        _write(folder / "runtime" / f"LICENSE.{package.rpartition('/')[2]}.txt", text.encode())


def _write_static(folder: Path, page: dict[str, Any]) -> None:
    """Write the explorer's files, page.json, and the service worker, which lists all of them."""
    with as_file(files("regard").joinpath("web", "static")) as static:
        names = [path.relative_to(static).as_posix() for path in sorted(static.rglob("*")) if path.is_file()]
        for name in names:
            if name != "index.html" and name not in _NOT_SHIPPED:
                _write(folder / "static" / name, (static / name).read_bytes())
        _write(folder / "index.html", _index(static / "index.html", page["model"]["name"]).encode())
        worker = (static / "page" / WORKER).read_text(encoding="utf-8")
    written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in written}
    digest = hashlib.sha256(to_json({"page": page, "files": digests})).hexdigest()[:16]
    page["digest"] = digest
    _write(folder / PAGE, json.dumps(page, ensure_ascii=False, separators=(",", ":")).encode())
    listed = json.dumps([name for name in (*written, PAGE) if not name.endswith(".txt")])
    _write(folder / WORKER, worker.replace("@digest@", digest).replace('["@files@"]', listed).encode())


def _index(file: Path, name: str) -> str:
    """The explorer's index.html with the content security policy and the marker of an exported page."""
    page = file.read_text(encoding="utf-8")
    replacements = {
        '<meta charset="utf-8">': '<meta charset="utf-8">\n  <meta http-equiv="Content-Security-Policy" '
        f'content="{_POLICY}">\n  <meta name="regard" content="page">',
        "<title>regard</title>": f"<title>{html.escape(name)} · regard</title>",
    }
    for old, new in replacements.items():
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page
