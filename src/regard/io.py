"""Loading and saving of models: ``load`` opens our directories and those of Hugging Face, ``save`` writes for both."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import hub
from .config import ModelConfig
from .errors import BadModelFile
from .export.quantise import check_int8, is_quantised, open_int8
from .foundation.files import replace_directory, write_atomic
from .foundation.jsonio import to_json, wrong_values_as_bad_file
from .hub.hf_directory import INDEX
from .hub.hf_family import label_fields
from .hub.manifest import check_replaceable
from .models import Model, build
from .models.build import check_has_numbers
from .text import Processor, read_processor
from .training.finetuning import start_from
from .training.run_directory import find_run

__all__ = ["Description", "describe", "load", "save"]

_log = logging.getLogger(__name__)
_MOST_SHARD_BYTES = 5 * 10**9  # as in transformers
GENERATION = "generation_config.json"
_MAX_TRIES = 20  # attempts to read a directory that is being replaced
T = TypeVar("T")


def load(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    allow_pickle: bool = False,
    verify: bool = True,
) -> Model:
    """Load a model in eval mode, with ``.config``, ``.processor`` and ``.provenance``.

    ``path`` is a directory written by ``model.save`` or transformers; a LoRA adapter of ``peft``, which is merged into
    the model it belongs to; or a training run, whose averaged, else best, else last weights are loaded ("RUN@1200":
    those of step 1200). A GGUF file of LLaMA, Mistral, Qwen 2 or Qwen 3, alone or in its own directory, works too.

    No code from the directory is executed. If it has a manifest, every file is verified first; otherwise
    ``model.provenance.verified`` is "unverified". ``dtype`` converts the weights; by default they keep theirs.
    ``allow_pickle`` reads pytorch_model.bin if there is no safetensors file. Any fault raises BadModelFile.
    """
    float_type = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(float_type, torch.dtype) and float_type.is_floating_point):
        raise ValueError(f"dtype={dtype!r} is not a floating type such as float32 or bfloat16")
    device = torch.get_default_device() if device is None else torch.device(device)

    if (run_and_step := find_run(path)) is not None:
        run, step = run_and_step
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
            weights_dtype = float_type or files.directory.dtype
            model = hub.fill(files.fitting, files.resolved.steps, files.weights, device, weights_dtype)
        model.processor, model.provenance = processor, files.provenance
        model.training_record = files.directory.training_record
        return model

    return _retry_if_replaced(path, read)


def _load_adapted(path: Path, verify: bool) -> Model:
    """The base model of an adapter with its additions merged. An adapter of ours has a config.json and may have its own
    head; adapters of peft have none and keep the base model as it is."""
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
    """The content of a model directory, without its weights having been read."""

    provenance: hub.Provenance
    config: ModelConfig
    n_parameters: int
    dtypes: tuple[str, ...]
    files: dict[str, int]  # file name → size in bytes
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
            "verified": "verified: every file matches manifest.json",
            "unverified": "unverified: not checked against a manifest.json, so damage to a file may go unnoticed",
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
    """Check a directory as ``load`` does and describe it, without reading the weights; of a run, its final model."""
    if (run_and_step := find_run(path)) is not None:
        run, step = run_and_step
        run.check_step(step)
        if not run.model_folder.is_dir():
            raise BadModelFile(f"{path} is an unfinished run: it has no model yet, only checkpoints")
        path = run.model_folder
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
    """Write a directory that ``load`` opens and, if transformers has an equivalent architecture, transformers too.

    The directory is written atomically: a crash leaves the previous one. Only a directory written by ``save`` is
    replaced. Without an equivalent, a warning and the model card name the fields that transformers does not support.
    """
    check_has_numbers(model, "save")
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
        fields |= label_fields(labels)
    with replace_directory(target) as folder:
        index = hub.write_safetensors(folder, tensors, most_shard_bytes)
        files = {} if model.processor is None else model.processor.files(model.config)
        if origin is not None and origin.generation_config is not None:
            files[GENERATION] = origin.generation_config
        if index is not None:
            files[INDEX] = to_json(index)
        files["config.json"] = to_json(dict(sorted(fields.items())))  # sorted as in transformers
        files["README.md"] = hub.model_card(model, written, model.n_parameters).encode()
        files |= {} if written.obstacles else hub.write_embedding(model.config)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_atomic(folder / name, content)
        hub.Manifest.of(folder, model.training_record).write(folder)
    return target


@dataclass(frozen=True)
class _CheckedDirectory:
    """A directory that has passed every check that does not read the weights."""

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
        # Foreign configs do not say whether a pooler was saved with the encoder.
        fields.setdefault("has_pooler", any("pooler." in name for name in weights.layout))
        resolved = hub.read_config(fields, directory.json(GENERATION) if directory.has(GENERATION) else None)
        if embedding := hub.read_embedding(directory):
            with wrong_values_as_bad_file(directory.root / "modules.json"):
                resolved = replace(resolved, config=resolved.config.with_(**embedding))
        fitting = hub.fit(resolved.config, resolved.steps, weights.layout)
    return _CheckedDirectory(directory, fields, resolved, weights, fitting)


def _retry_if_replaced(path: str | Path, read: Callable[[], T]) -> T:
    """Call ``read()`` again if another process replaces the directory meanwhile: files of two saves must not mix."""
    for _ in range(_MAX_TRIES):
        identity = _identity(path)
        try:
            result = read()
        except (BadModelFile, OSError):
            if _identity(path) == identity:
                raise
        else:
            if _identity(path) == identity:
                return result
    raise BadModelFile(f"{path} was replaced {_MAX_TRIES} times while it was being read")


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _directory_in_errors(root: Path) -> Iterator[None]:
    """Add the directory to the message of a BadModelFile that does not name it."""
    try:
        yield
    except BadModelFile as error:
        raise BadModelFile(str(error) if str(root) in str(error) else f"{root}: {error}") from None


def _tensors(model: Model, written: hub.WrittenConfig) -> dict[str, Tensor]:
    """The state dict with the names of transformers, without shared memory; checked to load again."""
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
