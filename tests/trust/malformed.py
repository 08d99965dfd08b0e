"""Every kind of file that regard reads, in a valid form, with what reads it: test_malformed_files.py spoils them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

import regard
from regard.config.config_file import load_config_file, save_config_file
from regard.data.images import check_image, open_upright
from regard.data.record_files import open_records
from regard.data.sources import open_source
from regard.experiments.sweep_report import write_report
from regard.experiments.sweep_spec import Cell, Sweep, read_grid
from regard.foundation.jsonio import to_json
from regard.hub import Manifest
from regard.hub.manifest import NAME as MANIFEST
from regard.io import save
from regard.recipes import run_config
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer
from training.runs import resume, train, words_of, write_data

from .mutations import spoil_bytes, spoil_json, spoil_jsonl, spoil_safetensors

LINES = ["the cat sat on the mat.", "a dog ran, and the cat ran too.", "주의력만 있으면 됩니다.", "O Romeo, Romeo!"]
SIZES: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_ff": 12, "n_layers": 1, "max_len": 16, "dropout": 0.0}
IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}


@dataclass(frozen=True)
class Target:
    """A file to spoil, how, and what reads it. ``read`` gets the number of the case."""

    path: Path
    spoil: Callable[[bytes, random.Random], bytes]
    read: Callable[[int], object]


def small_model(kind: Any = "bpe", preset: str = "gpt2", **fields: Any) -> regard.Model:
    tokenizer = train_tokenizer(LINES, kind, 280 if kind in ("bpe", "unigram") else None)
    torch.manual_seed(0)
    model = regard.build(preset, **{**SIZES, **IDS, "vocab_size": tokenizer.size, **fields}).eval()
    model.processor = Processor(source=tokenizer)
    return model


def saved(model: regard.Model, folder: Path, **options: Any) -> Path:
    """Without a manifest, as others write directories: else nothing past the checksums would be tried."""
    save(model, folder, **options)
    (folder / MANIFEST).unlink()
    return folder


def use(folder: Path) -> None:
    """Load a model and say something with it."""
    model = regard.load(folder)
    tokenizer = None if model.processor is None else model.processor.source
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("the cat, 됩니다!")[:8])


def models(folder: Path) -> dict[str, Path]:
    return {
        "gpt2": saved(small_model(), folder / "gpt2"),
        "bert": saved(small_model("words", "bert-base"), folder / "bert"),
        "t5": saved(small_model("chars", "t5-small"), folder / "t5"),
        "transformer": saved(small_model("bpe", "transformer-base"), folder / "transformer"),
        "llama": saved(small_model("bpe", "llama-1b", n_kv_heads=1), folder / "llama"),
    }


def safetensors_files(folder: Path) -> list[Target]:
    return [
        Target(path / "model.safetensors", spoil_safetensors, lambda _, path=path: use(path))
        for path in list(models(folder).values())[:2]
    ]


def config_files(folder: Path) -> list[Target]:
    return [
        Target(path / "config.json", spoil_json, lambda _, path=path: use(path)) for path in models(folder).values()
    ]


def tokenizer_files(folder: Path) -> list[Target]:
    found = []
    for kind in ("bpe", "words", "chars", "unigram"):
        path = saved(small_model(kind), folder / kind)
        names = [x.name for x in path.iterdir() if x.name.startswith(("tokenizer", "special_tokens"))]
        found += [Target(path / name, spoil_json, lambda _, path=path: use(path)) for name in names]
    return found


def shard_indices(folder: Path) -> list[Target]:
    path = saved(small_model(), folder / "shards", most_shard_bytes=2000)
    return [Target(path / "model.safetensors.index.json", spoil_json, lambda _: use(path))]


def tables(folder: Path, suffix: str) -> list[Target]:
    pairs = [(f"source {n}, {text}", f"target {n} {text}") for n, text in enumerate(LINES * 6)]
    path = folder / f"pairs.{suffix}"
    spoil = spoil_bytes
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in pairs), encoding="utf-8")
        spoil = spoil_jsonl
    else:
        separator = {"tsv": "\t", "csv": ","}[suffix]
        lines = [f"source{separator}target", *(f'"{a}"{separator}"{b}"' for a, b in pairs)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def read(number: int) -> None:
        try:
            read_table(number)
        except ValueError as error:  # a wrong argument: the columns that were asked for, or none were
            if "column" not in str(error) or str(path) not in str(error):
                raise

    def read_table(number: int) -> None:
        if number % 3:
            bad_lines = "skip" if number % 2 else "error"
            source = open_source(str(path), bad_lines=bad_lines, kind="pairs")
            for examples in (source.train, source.valid):
                for index in range(len(examples)):
                    examples[index]
        else:
            list(open_records(path, "source").read())

    return [Target(path, spoil, read)]


def parquet_files(folder: Path) -> list[Target]:
    import pyarrow
    from pyarrow import parquet

    found = []
    for name, codec in (("plain", "none"), ("packed", "snappy"), ("zstd", "zstd")):
        path = folder / f"{name}.parquet"
        table = pyarrow.table({"text": LINES * 20, "n": list(range(80)), "more": [[x, 1.5] for x in range(80)]})
        parquet.write_table(table, path, compression=codec)
        found.append(Target(path, spoil_bytes, lambda _, path=path: list(open_records(path, "text").read())))
    return found


def images(folder: Path) -> list[Target]:
    found = []
    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    for suffix in ("png", "jpeg", "webp", "gif", "bmp", "tiff"):
        path = folder / f"image.{suffix}"
        Image.fromarray(pixels).save(path)

        def read(number: int, path: Path = path) -> None:
            if check_image(path, 10**6, decode=True) is None:  # as a folder of images is read
                open_upright(path, 1 if number % 2 else 3)

        found.append(Target(path, spoil_bytes, read))
    return found


def onnx_directories(folder: Path) -> list[Target]:
    from regard.export.onnx_export import export_onnx, open_onnx

    root = saved(small_model(preset="bert-base", head="classify", n_classes=2), folder / "onnx-model")
    model = regard.load(root)
    export_onnx(model, root)
    tokens = torch.tensor([[3, 4, 5]])

    def read(_: int) -> None:
        open_onnx(root, threads=1)(tokens)

    return [
        *(Target(path, spoil_bytes, read) for path in sorted((root / "onnx").glob("*.onnx"))),
        Target(root / "onnx" / "onnx.json", spoil_json, read),
    ]


def ctranslate2_directories(folder: Path) -> list[Target]:
    from export.translators import writer
    from regard.export.ctranslate2_export import export_ctranslate2
    from regard.export.engines import Ct2Engine

    model, root = writer(), folder / "ct2"
    export_ctranslate2(model, root)

    def read(_: int) -> None:
        Ct2Engine(root, model.config, model.processor, threads=1)

    return [Target(path, spoil_json, read) for path in sorted(root.glob("*.json"))]


def run_directories(folder: Path) -> list[Target]:
    import quick_runs  # noqa: F401  # a run that accepts its file goes on to its end, where it would draw its curves

    data, out = write_data("classify", folder), folder / "run"
    train("classify", out, data, "train.steps=3", "train.ema=0.9", "train.keep=1", "train.stop_at=2")
    (out / MANIFEST).unlink()
    step = out / "checkpoints" / "step-000002"

    def read(number: int) -> None:
        """What a manifest of the checkpoint says is as somebody wrote it who changed the file."""
        (step / MANIFEST).unlink(missing_ok=True)
        Manifest.of(step).write(step)
        (out / MANIFEST).unlink(missing_ok=True)
        regard.load(out)
        if number % 40 == 0:
            shutil.copytree(out, copy := folder / "copy")
            try:
                resume(copy)
            finally:
                shutil.rmtree(copy)

    names = ("run.json", "provenance.json", "choice.json", "labels.json", "tokenizer.json")
    found = [Target(out / name, spoil_json, read) for name in names]
    found += [Target(step / name, spoil_json, read) for name in ("state.json", "index.json")]
    return [
        *found,
        Target(step / "model.safetensors", spoil_safetensors, read),
        Target(out / "metrics.jsonl", spoil_jsonl, read),
    ]


def sweep_files(folder: Path) -> list[Target]:
    words = ("model.d_model=16", "model.n_layers=1", "model.n_heads=2", "train.steps=6")
    cells = (Cell("h=1", ("model.n_heads=1",), "A"), Cell("long", ("train.steps=9",)))
    out = folder / "sweep"
    Sweep("tiny", "en-ko", words, cells, (0, 1), ("valid_loss", "bleu")).write(out)
    metrics = {"valid_loss": 1.5, "bleu": 3.0}
    result = {"status": "done", "metrics": metrics, "reached": 6, "seconds": 1.0, "parameters": 1000, "curve": []}
    results = [
        out / "cells" / name / f"seed-{seed}" / "result.json" for name in ("base", "h=1", "long") for seed in (0, 1)
    ]
    for path in results:
        path.parent.mkdir(parents=True)
        path.write_bytes(to_json(result))
    grid = folder / "grid.toml"
    grid.write_text('recipe = "en-ko"\nseeds = [0, 1]\nwords = ["train.steps=5"]\n[grid]\n"model.n_heads" = [1, 2]\n')

    def report(_: int) -> None:
        with (
            mock.patch("regard.experiments.sweep_figures.draw_results"),
            mock.patch("regard.experiments.sweep_figures.draw_curves"),
        ):
            found = write_report(out)
        found.to_text()
        found.to_dict()

    return [
        Target(out / "sweep.json", spoil_json, report),
        Target(results[0], spoil_json, report),
        Target(grid, spoil_bytes, lambda _: read_grid(grid)),
    ]


def run_config_files(folder: Path) -> list[Target]:
    config = run_config("classify", words_of("classify", write_data("classify", folder)))
    found = []
    for suffix, spoil in ((".yaml", spoil_bytes), (".toml", spoil_bytes), (".json", spoil_json)):
        path = folder / f"config{suffix}"
        save_config_file(path, config)

        def read(_: int, path: Path = path) -> None:
            load_config_file(path)

        found.append(Target(path, spoil, read))
    return found


def gguf_files(folder: Path) -> list[Target]:
    from regard.hub.gguf_file import write_gguf

    path = folder / "model.gguf"
    write_gguf(small_model(preset="llama-1b", n_kv_heads=1), path, "f32")
    return [Target(path, spoil_bytes, lambda _: use(path))]


KINDS: dict[str, Callable[[Path], list[Target]]] = {
    "safetensors": safetensors_files,
    "config.json": config_files,
    "tokenizer.json": tokenizer_files,
    "shard index": shard_indices,
    "TSV": lambda folder: tables(folder, "tsv"),
    "CSV": lambda folder: tables(folder, "csv"),
    "JSONL": lambda folder: tables(folder, "jsonl"),
    "Parquet": parquet_files,
    "images": images,
    "ONNX": onnx_directories,
    "CTranslate2": ctranslate2_directories,
    "run directory": run_directories,
    "sweep files": sweep_files,
    "config files": run_config_files,
    "GGUF": gguf_files,
}
