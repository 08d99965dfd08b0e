"""The common parts of models that run in ONNX Runtime: sessions, the cache, a decode step, attention maps.

Each model is an instance of its torch class on the meta device, with all modules and no weights, whose forward passes
run ONNX graphs. ``generate``, beam search and streaming therefore work with it unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ..attention import Frame, MultiHeadAttention, masks
from ..attention.attention_map import AttentionMap
from ..attention.biases import Bias
from ..attention.cache import CrossCache, GrowingCache, ModelCache
from ..attention.cache.static_cache import CacheDtype
from ..attention.masks import ValidKeys
from ..attention.mechanisms import Mechanism, Sinks
from ..config import ModelConfig
from ..errors import BadModelFile, RegardError
from ..foundation.plugins import import_optional
from ..models import Block, Memory, Model, Stack
from ..models.base_model import AttentionSite, mask_from_padding
from ..models.components import TokenHead
from ..models.recurrent_cells import MemoryCache, StateCache

Maps = dict[str, AttentionMap]  # by the name of the attention site


class OnnxSession:
    """A graph loaded into ONNX Runtime. CPU tensors are passed without a copy."""

    def __init__(self, path: Path, threads: int | None = None, providers: list[str] | None = None) -> None:
        onnxruntime = import_optional("onnxruntime", "running ONNX graphs", "export")
        if not path.is_file():
            raise BadModelFile(f"{path.parent} has no {path.name}; export the model to ONNX again")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
        options.inter_op_num_threads = 1
        # Between two runs, spinning threads would take the cores from the search, which torch computes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers or ["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise BadModelFile(f"{path} cannot be opened by ONNX Runtime: {error}") from None
        self.path = path
        self.inputs = {x.name: x.shape for x in self._session.get_inputs()}
        self.outputs = [x.name for x in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Tensor], names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The outputs called ``names``, by default all; inputs that the graph does not have are ignored."""
        missing = sorted(set(self.inputs) - set(inputs))
        if missing:
            raise ValueError(f"the graph {self.path.name} needs {', '.join(missing)}")
        names = self.outputs if names is None else list(names)
        feed = {name: inputs[name].detach().cpu().contiguous().numpy() for name in self.inputs}
        try:
            out = self._session.run(names, feed)
        except Exception as error:  # such as a token id outside the table; onnxruntime's exceptions have no common base
            raise RegardError(f"ONNX Runtime cannot run {self.path.name} on these inputs: {error}") from None
        return dict(zip(names, map(torch.from_numpy, out), strict=True))


def score_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the biases, mechanisms and sinks that, with q and k, determine attention weights, and their names."""
    for name, module in model.named_modules():
        if isinstance(module, Bias | Mechanism | Sinks):
            yield name, cast(nn.Module, module)


def stack_maps(
    name: str,
    stack: Stack,
    outputs: dict[str, Tensor],
    source_padding_mask: Tensor | None,
    positions: Tensor | None = None,
) -> Maps:
    """The attention maps of a stack's layers, from the outputs of its graph.

    An encoder graph returns its keys as k_0 …, a decoder graph as its cache. ``positions`` are those of a decoder's
    tokens, None for an encoder. ``source_padding_mask`` masks the encoder's self-attention and the decoder's
    cross-attention.
    """
    source_mask = mask_from_padding(source_padding_mask)
    maps = {}
    for layer, block in enumerate(stack.layers):
        site = f"{name}.blocks.{layer}"
        if f"q_{layer}" in outputs and isinstance(block.attention, MultiHeadAttention):
            q = outputs[f"q_{layer}"]
            if positions is None:
                k, mask, frame = outputs[f"k_{layer}"], source_mask, None
            else:
                k, mask = outputs[f"present_k_{layer}"], None
                frame = Frame(q.shape[0], q.shape[1], positions, positions)
            bias = block.attention.position_bias if stack.position_bias is None else stack.position_bias
            parts = [part for part in (masks.causal() if stack.causal else None, mask, block.mask) if part is not None]
            mask = reduce(operator.and_, parts) if parts else None
            mechanism, sinks = block.attention.mechanism, block.attention.sinks
            logits = None if sinks is None else sinks.logits
            maps[f"{site}.attention"] = AttentionMap(q, k, mask, bias, mechanism=mechanism, frame=frame, sinks=logits)
        if f"cross_q_{layer}" in outputs and block.cross_attention is not None:
            q, k = outputs[f"cross_q_{layer}"], outputs[f"cross_k_{layer % len(stack.blocks)}"]
            mechanism = block.cross_attention.mechanism
            maps[f"{site}.cross_attention"] = AttentionMap(q, k, source_mask, mechanism=mechanism)
    return maps


def _check_size(config: ModelConfig, sessions: Mapping[str, OnnxSession]) -> None:
    """Reject a config with more layers than the graph files can hold, before modules are built for them."""
    folder = next(iter(sessions.values())).path.parent
    n_bytes = sum(file.stat().st_size for file in folder.iterdir())
    n_layers = 1 if config.share_layers else config.n_layers + (config.n_decoder_layers or 0)
    d_ff = 1 if config.architecture == "recurrent" else min(config.d_ff, config.d_decoder_ff or config.d_ff)
    if n_layers * 2 * config.d_model * d_ff > n_bytes:  # at least one byte per feed-forward weight
        raise BadModelFile(f"{folder} holds {n_bytes:,} bytes, too few for the weights of {n_layers:,} layers")


class OnnxModel(Model):
    """Base of the models that run in ONNX Runtime. A subclass has its torch class as its second base."""

    graph_names: ClassVar[tuple[str, ...]]

    def __init__(self, config: ModelConfig, sessions: dict[str, OnnxSession]) -> None:
        _check_size(config, sessions)
        with torch.device("meta"):
            super().__init__(config)
        self.sessions, self.has_maps = sessions, False
        if not self.is_encoder_only and self.head is not None:
            self.head = GraphHead()
        for module in self.modules():
            if type(module) is Block:
                module.__class__ = GraphBlock  # it has no weights to compute with
        self.eval()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # of inputs and outputs, wherever the graphs run

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        if batch is not None or max_len is not None:
            sizes = f"batch={batch}, max_len={max_len}"
            raise ValueError(f"{sizes}: an ONNX model's cache grows and cannot be preallocated")
        if self.is_recurrent:
            return ModelCache([StateCache()], [MemoryCache()])
        n_layers = self.decoder_shape.n_layers
        cross = [CrossCache() for _ in range(n_layers)] if self.is_encoder_decoder else []
        return ModelCache([GraphCache() for _ in range(n_layers)], cross)

    def _refuse_positions(self, positions: Tensor | None) -> None:
        if positions is not None:
            raise ValueError("an encoder's ONNX graph takes no positions: its tokens are at 0, 1, 2 …")

    def embed(self, source: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
        if self.is_encoder_decoder or self.config.head != "none":
            raise ValueError("the ONNX graphs of this model return no states to embed: use the torch engine")
        return super().embed(source, padding_mask=padding_mask)

    def attention_sites(self) -> list[AttentionSite]:
        raise ValueError("the ONNX graphs of this model return no attention to look at: use the torch engine")

    def maps(
        self,
        source: Tensor,
        target: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> Maps:
        """The maps of one forward pass: "encoder.blocks.0.attention", "decoder.blocks.1.cross_attention" …

        source, target       the model's inputs; for a language model, its tokens as source
        padding_mask         which tokens of the source are real
        target_padding_mask  which tokens of the target are real
        Layers with shared weights are numbered as layers.
        """
        if not self.has_maps:
            raise ValueError("this model was exported without its queries and keys; export it with maps=True")
        if (target is None) != (len(self.graph_names) == 1):
            raise ValueError("target is required with an encoder-decoder model and not allowed with any other")
        return self._maps(source, source if target is None else target, padding_mask, target_padding_mask)

    def _maps(self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_mask: Tensor | None) -> Maps:
        raise NotImplementedError

    def load_score_parameters(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Load the parameters of biases, mechanisms and sinks, from which maps are computed."""
        for name, module in score_modules(self):
            module.to_empty(device="cpu")
            for key, x in module.state_dict().items():
                stored = tensors.get(f"{name}.{key}")
                if stored is None or stored.shape != x.shape:
                    raise BadModelFile(
                        f"{folder} has no tensor {name}.{key} of the right shape, which its attention maps need"
                    )
                x.copy_(stored)
        self.has_maps = True


class GraphBlock(Block):
    """Describes a layer whose weights are in a graph; no engine but ONNX Runtime can run it."""


class GraphHead(TokenHead):
    """The identity, because the graphs return logits."""

    def __init__(self) -> None:
        nn.Module.__init__(self)  # skips TokenHead, which would create weights

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x


class GraphCache(GrowingCache):
    """The keys and values returned by a graph.

    ``reorder`` writes into the same two buffers at every step: most of the time that copies into new memory take is
    spent on its page faults.
    """

    def reset(self) -> None:
        super().reset()
        self._buffers = [torch.empty(0), torch.empty(0)]

    def reorder(self, beam_index: Tensor) -> None:
        contents = self.contents()
        if contents is None:
            return
        k, v, positions = contents
        k, v = (self._copy_rows(n, x, beam_index) for n, x in enumerate((k, v)))
        self.store(k, v, positions if len(positions) == 1 else positions.index_select(0, beam_index))

    def _copy_rows(self, n: int, x: Tensor, rows: Tensor) -> Tensor:
        """x[rows] in the n-th buffer, or in a new one if that is too small or holds x."""
        buffer, size = self._buffers[n], len(rows) * x[0].numel()
        if buffer.numel() < size or buffer.data_ptr() == x.data_ptr():
            buffer = self._buffers[n] = x.new_empty(2 * size)  # at most log₂ T times
        return torch.index_select(x, 0, rows, out=buffer[:size].view(len(rows), *x.shape[1:]))

    def store(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        self._k, self._v, self._pos = k, v, positions

    def contents(self) -> tuple[Tensor, Tensor, Tensor] | None:
        return None if self._k is None or self._v is None or self._pos is None else (self._k, self._v, self._pos)


def run_decoder(
    model: OnnxModel,
    tokens: Tensor,
    positions: Tensor,
    cache: ModelCache,
    cross_inputs: dict[str, Tensor] | None = None,
    *,
    all_logits: bool,
    outputs: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Run new tokens through the decoder graph and store the keys and values it returns in the cache.

    ``all_logits=False`` requests the last token's logits only; ``outputs`` are name prefixes of further outputs.
    """
    session, shape = model.sessions["decoder"], model.decoder_shape
    layers = [layer for layer in cache.layers if isinstance(layer, GraphCache)]
    n_batch, n_new = tokens.shape
    empty = torch.zeros(n_batch, shape.n_kv_heads, 0, shape.d_head)
    past = [layer.contents() or (empty, empty, positions[:, :0]) for layer in layers]
    past_positions = past[0][2].expand(n_batch, -1)  # rows copied from one prompt may share one row of positions
    inputs = {"tokens": tokens.long(), "positions": positions, "past_positions": past_positions}
    inputs["wanted"] = torch.arange(n_new) if all_logits else torch.tensor([n_new - 1])
    inputs |= cross_inputs or {}
    names = ["logits" if "logits" in session.outputs else "states"]
    for i, (k, v, _) in enumerate(past):
        inputs |= {f"past_k_{i}": k, f"past_v_{i}": v}
        names += [f"present_k_{i}", f"present_v_{i}"]
    names += [name for name in session.outputs if name.startswith(outputs)]
    out = session.run(inputs, names)
    all_positions = torch.cat([past_positions, positions], dim=1)
    for i, layer in enumerate(layers):
        layer.store(out[f"present_k_{i}"], out[f"present_v_{i}"], all_positions)
    return out


def logits_or_states(outputs: dict[str, Tensor]) -> Tensor:
    """The logits, or the states if the model has no head."""
    return outputs["logits"] if "logits" in outputs else outputs["states"]


def token_positions(
    tokens: Tensor, padding_mask: Tensor | None, positions: Tensor | None, cache: ModelCache | None
) -> Tensor:
    """Positions (B, T) of new tokens, -1 for padding; they continue those in the cache unless ``positions`` is given.

    As in the torch models, padding takes up positions without a cache, but not with one.
    """
    if positions is not None:
        return positions.expand(tokens.shape).long()
    start = torch.zeros(1, dtype=torch.int64) if cache is None else cache.lengths
    columns = torch.arange(tokens.shape[1]).expand(tokens.shape)
    if padding_mask is None:
        return start[:, None] + columns
    real = padding_mask.bool()[:, -tokens.shape[1] :]
    return torch.where(real, start[:, None] + (columns if cache is None else real.long().cumsum(-1) - 1), -1)


def source_inputs(
    config: ModelConfig, source: Tensor, padding_mask: Tensor | None, segments: Tensor | None = None
) -> dict[str, Tensor]:
    """The inputs of an encoder graph; without a mask, all tokens are real."""
    if config.source == "image":
        return {"source": source.float()}
    padding_mask = torch.ones(source.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask.bool()
    segments = torch.zeros(source.shape[:2], dtype=torch.int64) if segments is None else segments.long()
    return {
        "source": source.long() if config.source == "text" else source.float(),
        "keep": padding_mask,
        "segments": segments,
    }


def memory_padding_mask(memory: Memory | None, n_batch: int, n_keys: int) -> Tensor:
    """Which of a memory's keys are real, (B, S)."""
    mask = None if memory is None else memory.mask
    return mask.valid if isinstance(mask, ValidKeys) else torch.ones(n_batch, n_keys, dtype=torch.bool)
