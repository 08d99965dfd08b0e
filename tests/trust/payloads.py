"""Fifty files written with bad intent, and what opens them. Each would leave a mark if anything in it were run.

python -O tests/trust/payloads.py FOLDER       # one line for each that was not refused as it should be
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.cli import main
from regard.data.images import open_upright
from regard.data.sources import open_source
from regard.errors import RegardError
from regard.experiments.sweep_report import write_report
from regard.experiments.sweep_spec import Cell, Sweep
from regard.hub import Manifest
from regard.hub.manifest import NAME as MANIFEST
from regard.io import load

MARK = "code-ran"


class Payload:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


class Attack(NamedTuple):
    """``plant`` spoils a copy of something valid, given its folder and the mark; ``open`` does what its owner would."""

    name: str
    plant: Callable[[Path, Path], object]
    base: str
    open: Callable[[Path], object]
    harmless: bool = False  # rendered in a sandbox: it need not be refused


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def _pickles(mark: Path) -> dict[str, bytes]:
    payload = Payload(mark)
    zipped = io.BytesIO()
    torch.save({"x": payload}, zipped)
    legacy = io.BytesIO()
    torch.save({"x": payload}, legacy, _use_new_zipfile_serialization=False)
    array = io.BytesIO()
    np.save(array, np.array([payload], dtype=object), allow_pickle=True)
    return {
        "plain": pickle.dumps(payload),
        "torch": zipped.getvalue(),
        "old torch": legacy.getvalue(),
        "numpy": array.getvalue(),
    }


def _config(**fields: Any) -> Callable[[Path, Path], None]:
    return lambda folder, _: _edit(folder / "config.json", lambda document: document.update(fields))


def _file(name: str, **fields: Any) -> Callable[[Path, Path], None]:
    return lambda folder, _: _edit(folder / name, lambda document: document.update(fields))


def _replace(name: str, content: Callable[[Path], bytes]) -> Callable[[Path, Path], None]:
    def plant(folder: Path, mark: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content(mark))

    return plant


def _link(name: str, target: str) -> Callable[[Path, Path], None]:
    def plant(folder: Path, _: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return plant


def _shard_path(name: str) -> Callable[[Path, Path], None]:
    def plant(folder: Path, _: Path) -> None:
        (folder / "model.safetensors").rename(folder / "elsewhere.safetensors")
        shutil.copy(folder / "elsewhere.safetensors", folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))

    return plant


def _load(folder: Path) -> None:
    model = load(folder)
    if model.processor is not None and model.processor.chat is not None:
        model.processor.chat.render([("user", "x")], ask=True)
    if model.processor is not None and model.processor.source is not None:
        model.processor.source.decode(model.processor.source.encode("one two"))


def _load_pickle(folder: Path) -> None:
    load(folder, allow_pickle=True)


def _commands(*words: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        code = main([word.replace("FOLDER", str(folder)) for word in words])
        if code:
            raise RegardError(f"exit code {code}")

    return run


def _template(text: str) -> Callable[[Path, Path], None]:
    def plant(folder: Path, mark: Path) -> None:
        _edit(folder / "tokenizer_config.json", lambda x: x.update(chat_template=text.replace("MARK", str(mark))))

    return plant


def _bomb_png(_: Path) -> bytes:
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    )


def _bomb_zip(_: Path) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**8))
    return out.getvalue()


def _huge_header(_: Path) -> bytes:
    return struct.pack("<Q", 2**62) + b"{}"


EVIL_CALLS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
    "{{ self._TemplateReference__context }}{{ lipsum.__globals__['os'].mkdir('MARK') }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% include '/etc/passwd' %}",
)
JINJA = [Attack(f"chat template {n}", _template(text), "model", _load, True) for n, text in enumerate(EVIL_CALLS)]
NAMES = ("evil:Payload", "evil.Payload", "os:system", "builtins:eval", "../evil.py")
PATHS = ("../outside.safetensors", "/etc/passwd", "..\\outside.safetensors", "x/../../outside.safetensors", "a\0b")
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "evil.Payload", "r": 1, "lora_alpha": 1}
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n"


def _mixer_of_run(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, _: _edit(folder / "run.json", lambda x: x["model"].update(mixer=name))


def _mixer_of_cell(name: str) -> Callable[[Path, Path], None]:
    words = [f"model.mixer={name}"]
    return lambda folder, _: _edit(folder / "sweep.json", lambda x: x["cells"][0].update(words=words))


def _move_checkpoints(folder: Path, _: Path) -> None:
    shutil.move(folder / "checkpoints", folder.parent / "outside")
    (folder / "checkpoints").symlink_to(folder.parent / "outside")


def _zip_as_pickle(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(_bomb_zip(mark))


def _picture(folder: Path) -> None:
    open_upright(folder / "x.png")


def named_code() -> Iterator[Attack]:
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        yield Attack(f"auto_map in {name}", _file(name, auto_map={"AutoModel": "evil.Payload"}), "model", _load)
    for name in NAMES:
        yield Attack(f"mixer {name} in a model", _config(model_type="regard", regard={"mixer": name}), "model", _load)
    resume, go_on = _commands("train", "--resume", "FOLDER", "--quiet"), _commands("ablate", "FOLDER")
    for name in NAMES[:3]:
        yield Attack(f"mixer {name} in a run", _mixer_of_run(name), "run", _load)
        yield Attack(f"task {name} in a run", _file("run.json", task=name), "run", resume)
    for name in NAMES[:2]:
        yield Attack(f"measure {name} in a sweep", _file("sweep.json", measures=[name]), "sweep", go_on)
        yield Attack(f"mixer {name} in a sweep", _mixer_of_cell(name), "sweep", write_report)
    adapter = _replace("adapter_config.json", lambda _: json.dumps({**ADAPTER, "target_modules": ["x"]}).encode())
    yield Attack("an adapter of something else", adapter, "model", _load)


def paths_and_bombs() -> Iterator[Attack]:
    for name in PATHS:
        yield Attack(f"shard {name!r}", _shard_path(name), "model", _load)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        yield Attack(f"{name} is a link out", _link(name, "/etc/passwd"), "model", _load)
    yield Attack("checkpoints are a link out", _move_checkpoints, "run", _load)
    yield Attack("a link to itself", _link("config.json", "config.json"), "model", _load)
    yield Attack("a PNG of 3.6 gigapixels", _replace("x.png", _bomb_png), "empty", _picture)
    yield Attack("EPS as PNG", _replace("x.png", lambda _: EPS), "empty", _picture)
    packed = _replace("x.json.gz", lambda _: gzip.compress(b" " * (40 << 20)))
    yield Attack("JSON packed a thousandfold", packed, "empty", lambda folder: open_source(str(folder / "x.json.gz")))
    yield Attack("a header of 2^62 bytes", _replace("model.safetensors", _huge_header), "model", _load)
    page = _replace("model.safetensors", lambda _: b"<!doctype html>" * 100)
    yield Attack("weights that are a page", page, "model", _load)
    yield Attack("a zip bomb as a pickle", _zip_as_pickle, "model", _load_pickle)


def pickles() -> Iterator[Attack]:
    for name in ("plain", "torch", "old torch", "numpy"):

        def as_weights(folder: Path, mark: Path, name: str = name) -> None:
            (folder / "model.safetensors").write_bytes(_pickles(mark)[name])

        def as_pickle(folder: Path, mark: Path, name: str = name) -> None:
            (folder / "model.safetensors").unlink()
            (folder / "pytorch_model.bin").write_bytes(_pickles(mark)[name])

        def in_checkpoint(folder: Path, mark: Path, name: str = name) -> None:
            step = next((folder / "checkpoints").iterdir())
            (step / MANIFEST).unlink()
            (step / "model.safetensors").write_bytes(_pickles(mark)[name])
            Manifest.of(step).write(step)

        yield Attack(f"{name} pickle as safetensors", as_weights, "model", _load)
        yield Attack(f"{name} pickle, allowed", as_pickle, "model", _load_pickle)
        yield Attack(f"{name} pickle in a checkpoint", in_checkpoint, "run", _load)


def attacks() -> Iterator[Attack]:
    yield from (*pickles(), *named_code(), *paths_and_bombs(), *JINJA)


def make_bases(folder: Path) -> None:
    """Valid ones, without manifests: what a stranger writes has the checksums of a stranger."""
    from training.runs import train, write_data
    from trust.malformed import saved, small_model

    (folder / "empty").mkdir(parents=True)
    saved(small_model(), folder / "model")
    train("classify", folder / "run", write_data("classify", folder), "train.steps=2", "train.stop_at=1")
    (folder / "run" / MANIFEST).unlink()
    Sweep("tiny", "en-ko", ("train.steps=2",), (Cell("h=1", ("model.n_heads=1",)),), (0,), ("valid_loss",)).write(
        folder / "sweep"
    )


def try_all(folder: Path) -> dict[str, str]:
    """What went wrong with each attack: "" where it was refused and ran nothing."""
    make_bases(folder / "bases")
    home = folder / "home"
    home.mkdir()
    (home / "evil.py").write_text(f"import os\nos.mkdir({str(folder / MARK)!r})\nclass Payload: pass\n")
    os.chdir(home)
    sys.path.insert(0, str(home))
    pickle.loads(pickle.dumps(Payload(folder / MARK)))
    os.rmdir(folder / MARK)  # it is there: the trap works
    found = {}
    for attack in attacks():
        copy = home / "model"
        shutil.copytree(folder / "bases" / attack.base, copy, symlinks=True)
        attack.plant(copy, folder / MARK)
        fault = "" if attack.harmless else "it was taken as valid"
        try:
            attack.open(copy)
        except RegardError:
            fault = ""
        except BaseException as other:
            fault = f"{type(other).__name__}: {str(other)[:200]}"
        if (folder / MARK).exists():
            fault = "it ran"
            os.rmdir(folder / MARK)
        found[attack.name] = fault
        shutil.rmtree(copy)
        shutil.rmtree(home / "outside", ignore_errors=True)
        (home / "outside.safetensors").unlink(missing_ok=True)
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    for name, fault in try_all(Path(sys.argv[1])).items():
        print(json.dumps([name, fault]))
