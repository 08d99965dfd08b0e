"""Models to disk and back: ``load`` a directory of ours or of Hugging Face's, ``save`` one that both can open."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import hub
from .config import ModelConfig
from .errors import BadModelFile
from .export.quantise import check_int8, is_quantised, open_int8
from .foundation.files import replace_directory, write_atomic
from .foundation.jsonio import to_json
from .hub.hf_directory import INDEX
from .hub.manifest import check_replaceable
from .models import Model, build
from .text import Processor, read_processor
from .training.finetuning import start_from
from .training.run_directory import find_run

__all__ = ["Description", "describe", "load", "save"]

_log = logging.getLogger(__name__)
_MOST_SHARD_BYTES = 5 * 10**9  # what transformers does
GENERATION = "generation_config.json"
_MOST_TRIES = 20
T = TypeVar("T")


def load(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    allow_pickle: bool = False,
    verify: bool = True,
) -> Model:
    """The model in a directory, ready to be used: in eval mode, with ``.config``, ``.processor`` and ``.provenance``.

    The directory is one that ``model.save`` or transformers wrote, a LoRA adapter as ``peft`` writes it (then the model
    it belongs to with the additions merged), or a training run: then its model is the averaged one, else the best, else
    the last, and "RUN@1200" is that of step 1200. A GGUF file of a LLaMA, Mistral, Qwen 2 or Qwen 3 is read too, by its
    own path or that of a directory that holds nothing else.

    No code of the directory is run. Where it has a manifest every file is compared with it first; otherwise
    ``model.provenance.verified`` is "unverified". ``dtype`` converts the weights, which otherwise keep theirs.
    ``allow_pickle`` reads pytorch_model.bin where there is no safetensors file. Anything wrong is a BadModelFile.
    """
    float_type = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(float_type, torch.dtype) and float_type.is_floating_point):
        raise ValueError(f"dtype={dtype!r} is not a floating type such as float32 or bfloat16")
    device = torch.get_default_device() if device is None else torch.device(device)

    if (found := find_run(path)) is not None:
        run, step = found
        if step is None and run.model_folder.is_dir():
            return load(run.model_folder, device=device, dtype=float_type)
        model, _ = run.model(step)
        return model.to(device, float_type)
    if hub.is_adapter(path):
        return _load_adapted(Path(path), verify=verify).to(device, float_type)
    if is_quantised(path):
        return open_int8(path, verify=verify).to(device)

    def read() -> Model:
        files = _check_directory(path, allow_pickle, verify)
        with _directory_in_errors(files.directory.root):
            processor = files.processor()
            wanted = float_type or files.directory.dtype
            model = hub.fill(files.fitting, files.resolved.steps, files.weights, device, wanted)
        model.processor, model.provenance = processor, files.provenance
        model.training_record = files.directory.training_record
        return model

    return _retry_if_replaced(path, read)


def _load_adapted(path: Path, verify: bool) -> Model:
    """The model an adapter belongs to, with its additions. With a config.json the adapted model has a head of its own;
    peft writes none, and the model stays as it is."""
    if verify and (manifest := hub.Manifest.read(path)) is not None:
        manifest.check(path)
    adapter = hub.Adapter.read(path)
    model = load(adapter.base)
    if (path / "config.json").is_file():
        directory, base = hub.Directory(path, verify=False), model
        fields = directory.config()
        with _directory_in_errors(path):
            model = build(hub.read_config(fields).config)
            model.processor = read_processor(directory, fields, model.config)
        start_from(model, str(adapter.base), base)
    adapter.add_to(model)
    model.provenance = hub.Provenance(path, hub.write_config(model.config).model_type, "unverified")
    return model.eval()


@dataclass(frozen=True)
class Description:
    """What a directory holds, without its numbers having been read."""

    provenance: hub.Provenance
    config: ModelConfig
    n_parameters: int
    dtypes: tuple[str, ...]
    files: dict[str, int]  # every file and its size
    processor: Processor | None
    training_record: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        labels = None if self.processor is None else self.processor.labels
        return {
            "path": str(self.provenance.path),
            "model_type": self.provenance.model_type,
            "verified": self.provenance.verified == "verified",
            "architecture": self.config.architecture,
            "source": self.config.source,
            "head": self.config.head,
            "parameters": self.n_parameters,
            "dtypes": list(self.dtypes),
            "config": hub.changed_fields(self.config),
            "tokens": None if self.processor is None else self.processor.sizes(),
            "labels": None if labels is None else list(labels),
            "training": self.training_record,
            "files": self.files,
        }

    def to_text(self) -> str:
        config, sizes = self.config, {} if self.processor is None else self.processor.sizes()
        checked = {
            "verified": "verified: every file is as manifest.json says",
            "unverified": "unverified: checked against no manifest.json, so damage to a file may go unnoticed",
        }
        lines = [
            str(self.provenance.path),
            f"  {self.provenance.model_type}: {config.architecture}, reads {config.source}, head {config.head}",
            f"  {self.n_parameters:,} parameters, {', '.join(self.dtypes)}",
            *(f"  {name} tokenizer, {size:,} tokens" for name, size in sizes.items()),
            *([] if self.training_record is None else [f"  trained: {hub.training_summary(self.training_record)}"]),
            f"  {checked[self.provenance.verified]}",
            "config, where it differs from the defaults",
            *(f"  {name} = {value!r}" for name, value in hub.changed_fields(config).items()),
            "files",
            *(f"  {name}  {size:,} bytes" for name, size in self.files.items()),
        ]
        return "\n".join(lines)


def describe(path: str | Path, *, allow_pickle: bool = False, verify: bool = True) -> Description:
    """Everything that ``load`` would check, and what it would find; of a training run, in the model it came to."""
    if (run := find_run(path)) is not None:
        if not run[0].model_folder.is_dir():
            raise BadModelFile(f"{path} is a run that has not come to its end: it has no model yet, only checkpoints")
        path = run[0].model_folder
    if hub.is_adapter(path):
        model = load(path, verify=verify)
        dtypes = tuple(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
        sizes = {file.name: file.stat().st_size for file in sorted(Path(path).iterdir()) if file.is_file()}
        assert model.provenance is not None
        return Description(model.provenance, model.config, model.n_parameters, dtypes, sizes, model.processor)
    if is_quantised(path):
        int8 = check_int8(path, verify=verify)
        model, dtypes, sizes = int8.model, _dtypes(int8.weights), int8.directory.files()
        facts = (model.provenance, model.config, int8.n_parameters, dtypes, sizes, model.processor)
        return Description(*facts, int8.directory.training_record)

    def read() -> Description:
        files = _check_directory(path, allow_pickle, verify)
        with _directory_in_errors(files.directory.root):
            processor = files.processor()
        n_parameters, sizes = files.fitting.model.n_parameters, files.directory.files()
        config, dtypes = files.resolved.config, _dtypes(files.weights)
        record = files.directory.training_record
        return Description(files.provenance, config, n_parameters, dtypes, sizes, processor, record)

    return _retry_if_replaced(path, read)


def _dtypes(weights: hub.Weights) -> tuple[str, ...]:
    return tuple(sorted({str(x.dtype).removeprefix("torch.") for x in weights.layout.values()}))


def save(model: Model, path: str | Path, *, most_shard_bytes: int = _MOST_SHARD_BYTES) -> Path:
    """Write a directory that ``load`` opens and, where the architecture has a twin there, transformers too.

    The directory appears whole or not at all: a crash leaves what was there before. It may replace one that ``save``
    wrote, nothing else. Without a twin a warning in the log, and the card, say which fields stand in the way.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: it has no numbers to save")
    target = Path(path)
    check_replaceable(target, "saving")
    written, origin = hub.write_config(model.config), model.provenance
    if not written.obstacles and origin is not None and origin.model_type == written.model_type:
        written = hub.restore_token_ids(written, origin.token_ids)
    if written.obstacles:
        _log.warning("%s: transformers has no twin of this model: %s", target, "; ".join(written.obstacles))
    tensors = _tensors(model, written)
    fields = {**written.fields, "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    labels = None if model.processor is None else model.processor.labels
    if labels is not None:
        if len(labels) != model.config.n_classes:
            raise ValueError(f"the processor has {len(labels)} labels, but n_classes={model.config.n_classes}")
        fields["id2label"] = {str(index): label for index, label in enumerate(labels)}
        fields["label2id"] = {label: index for index, label in enumerate(labels)}
    with replace_directory(target) as folder:
        index = hub.write_safetensors(folder, tensors, most_shard_bytes)
        files = {} if model.processor is None else model.processor.files(model.config)
        if origin is not None and origin.generation_config is not None:
            files[GENERATION] = origin.generation_config
        if index is not None:
            files[INDEX] = to_json(index)
        files["config.json"] = to_json(dict(sorted(fields.items())))  # the order in which transformers writes them
        files["README.md"] = hub.model_card(model, written).encode()
        for name, content in files.items():
            write_atomic(folder / name, content)
        hub.Manifest.of(folder, model.training_record).write(folder)
    return target


@dataclass(frozen=True)
class _CheckedDirectory:
    """A directory that has passed every check short of reading its numbers."""

    directory: hub.Directory
    fields: dict[str, Any]
    resolved: hub.ResolvedConfig
    weights: hub.Weights
    fitting: hub.Fitting

    @property
    def provenance(self) -> hub.Provenance:
        return hub.Provenance(
            self.directory.root,
            self.resolved.model_type,
            self.directory.verified,
            hub.token_ids(self.fields),
            self.directory.bytes(GENERATION) if self.directory.has(GENERATION) else None,
        )

    def processor(self) -> Processor | None:
        return read_processor(self.directory, self.fields, self.resolved.config)


def _check_directory(path: str | Path, allow_pickle: bool, verify: bool) -> _CheckedDirectory:
    file = hub.find_gguf(path)
    directory = hub.Directory(path, verify=verify) if file is None else hub.GgufDirectory(file)
    with _directory_in_errors(directory.root):
        fields = directory.config()
        weights = directory.weights(allow_pickle=allow_pickle)
        # No foreign config says whether a pooler was saved with the encoder.
        fields.setdefault("has_pooler", any("pooler." in name for name in weights.layout))
        resolved = hub.read_config(fields, directory.json(GENERATION) if directory.has(GENERATION) else None)
        fitting = hub.fit(resolved.config, resolved.steps, weights.layout)
    return _CheckedDirectory(directory, fields, resolved, weights, fitting)


def _retry_if_replaced(path: str | Path, read: Callable[[], T]) -> T:
    """Read again when another process has saved over the directory meanwhile, so that files of two saves never mix."""
    for _ in range(_MOST_TRIES):
        before = _identity(path)
        try:
            result = read()
        except (BadModelFile, OSError):
            if _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return result
    raise BadModelFile(f"{path} was saved over {_MOST_TRIES} times while it was being read")


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _directory_in_errors(root: Path) -> Iterator[None]:
    """Put the directory into the message of a BadModelFile that does not name it."""
    try:
        yield
    except BadModelFile as error:
        raise BadModelFile(str(error) if str(root) in str(error) else f"{root}: {error}") from None


def _tensors(model: Model, written: hub.WrittenConfig) -> dict[str, Tensor]:
    """The state in the twin's names, each tensor with memory of its own; checked to fit when loaded again."""
    state = {name: x.detach() for name, x in model.state_dict().items()}
    theirs = hub.to_theirs(written.steps, state)
    seen: set[int] = set()
    out = {}
    for name, x in theirs.items():
        x = x.cpu().contiguous()
        out[name] = x.clone() if x.data_ptr() in seen or x.nbytes < x.untyped_storage().nbytes() else x
        seen.add(x.data_ptr())
    hub.fit(model.config, written.steps, {name: x.to("meta") for name, x in out.items()})
    return out
