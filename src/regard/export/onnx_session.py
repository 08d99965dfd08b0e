"""One ONNX file in ONNX Runtime: torch tensors in and out, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadModelFile, RegardError


class Session:
    """A graph that can be run. Tensors are handed over without being copied."""

    def __init__(self, path: Path, threads: int | None = None, providers: list[str] | None = None) -> None:
        try:
            import onnxruntime
        except ImportError:
            wanted = 'pip install "regard[export]"'
            raise RegardError(f"ONNX graphs are run by onnxruntime, which is not installed: {wanted}") from None
        if not path.is_file():
            raise BadModelFile(f"{path.parent} has no {path.name}; export the model to ONNX again")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers or ["CPUExecutionProvider"])
        except Exception as error:  # its own exceptions share no base
            raise BadModelFile(f"{path} cannot be opened by ONNX Runtime: {error}") from None
        self.path = path
        self.inputs = {x.name: x.shape for x in self._session.get_inputs()}
        self.outputs = [x.name for x in self._session.get_outputs()]

    def run(self, given: Mapping[str, Tensor], wanted: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The outputs asked for, by default all; what the graph has no use for is left out of ``given``."""
        missing = sorted(set(self.inputs) - set(given))
        if missing:
            raise ValueError(f"the graph {self.path.name} needs {', '.join(missing)}")
        for name, shape in self.inputs.items():
            _check_shape(name, given[name], shape)
        names = self.outputs if wanted is None else list(wanted)
        feed = {name: given[name].detach().cpu().contiguous().numpy() for name in self.inputs}
        try:
            out = self._session.run(names, feed)
        except Exception as error:  # a token that no table has, say; its own exceptions share no base
            raise RegardError(f"ONNX Runtime cannot run {self.path.name} on these inputs: {error}") from None
        return dict(zip(names, map(torch.from_numpy, out), strict=True))


def _check_shape(name: str, x: Tensor, wanted: list[int | str]) -> None:
    """Raise where an axis has another length than the graph fixes; free axes are named by words."""
    fits = x.dim() == len(wanted) and all(isinstance(w, str) or n == w for n, w in zip(x.shape, wanted, strict=True))
    if not fits:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but the graph takes ({', '.join(map(str, wanted))})")
