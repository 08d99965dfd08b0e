"""What models in ONNX graphs have in common: sessions of ONNX Runtime, the cache, a decode step, attention maps.

Each model is its torch class on the meta device, which has every module and no numbers, with the forward passes
replaced by those of a graph. So ``generate``, beam search and streaming work with it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..attention import Frame, MultiHeadAttention, masks
from ..attention.attention_map import AttentionMap
from ..attention.biases import Bias
from ..attention.cache import CrossCache, GrowingCache, ModelCache
from ..attention.masks import Mask, ValidKeys
from ..attention.mechanisms import Mechanism
from ..attention.score_matrix import ScoreMatrix
from ..config import ModelConfig
from ..errors import BadModelFile, RegardError
from ..generation import GenerateConfig, Generated, generate
from ..generation.prompts import Rows
from ..models import Block, Memory, Model, Stack
from ..models.base_model import mask_from_padding
from ..models.heads import TokenHead
from .onnx_graphs import kv_shape


class OnnxSession:
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


def weighing_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What weights follow from beside q and k: biases and mechanisms, by their place in the model."""
    for place, module in model.named_modules():
        if isinstance(module, Bias | Mechanism):
            yield place, cast(nn.Module, module)


def stack_maps(
    name: str,
    stack: Stack,
    found: dict[str, Tensor],
    source_padding_mask: Tensor | None,
    positions: Tensor | None = None,
) -> dict[str, AttentionMap]:
    """The maps of a stack's layers. An encoder's keys are k_0 …; a decoder, which has ``positions``, caches its own.

    ``source_padding_mask`` is that of the encoder's source, for its self-attention and the decoder's cross-attention.
    """
    out = {}
    for layer in range(stack.n_layers):
        block = stack.blocks[layer % len(stack.blocks)]
        assert isinstance(block, Block)
        place = f"{name}.blocks.{layer}"
        if f"q_{layer}" in found and isinstance(block.attention, MultiHeadAttention):
            q = found[f"q_{layer}"]
            if positions is None:
                k, mask, frame = found[f"k_{layer}"], mask_from_padding(source_padding_mask), None
            else:
                k, mask, frame = found[f"present_k_{layer}"], None, Frame(q.shape[0], q.shape[1], positions, positions)
            bias = block.attention.position_bias if stack.position_bias is None else stack.position_bias
            own = _all_of(masks.causal() if stack.causal else None, mask, block.mask)
            mechanism = block.attention.mechanism
            out[f"{place}.attention"] = AttentionMap(q, k, own, bias, mechanism=mechanism, frame=frame)
        if f"cross_q_{layer}" in found and block.cross_attention is not None:
            q, k = found[f"cross_q_{layer}"], found[f"cross_k_{layer % len(stack.blocks)}"]
            mechanism = block.cross_attention.mechanism
            out[f"{place}.cross_attention"] = AttentionMap(
                q, k, mask_from_padding(source_padding_mask), mechanism=mechanism
            )
    return out


def recurrent_map(q: Tensor, k: Tensor, source_padding_mask: Tensor | None, mechanism: Mechanism) -> AttentionMap:
    """A recurrent decoder's looks, q (B, 1, T, D) and k (B, 1, S, D) as they are scored."""
    return AttentionMap.of(ScoreMatrix(q, k, mask_from_padding(source_padding_mask), None, mechanism, Frame.of(q, k)))


def _all_of(*some: Mask | None) -> Mask | None:
    """All masks at once; None where there is none."""
    joined = None
    for mask in some:
        joined = mask if joined is None else joined if mask is None else joined & mask
    return joined


class OnnxModel(Model):
    """What all of them have in common."""

    graph_names: ClassVar[tuple[str, ...]]
    sessions: dict[str, OnnxSession]
    has_maps: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # where tensors are handed over, wherever the graphs run

    def _open(self, sessions: dict[str, OnnxSession]) -> None:
        self.sessions, self.has_maps = sessions, False
        for module in self.modules():
            if type(module) is Block:
                module.__class__ = GraphBlock  # on the meta device there is nothing it could compute with
        self.eval()

    def generate(self, inputs: Rows, config: GenerateConfig | None = None, **fields: Any) -> Generated:
        """``regard.generate`` of this model."""
        return generate(self, inputs, config, **fields)

    def maps(
        self,
        source: Tensor,
        target: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> dict[str, AttentionMap]:
        """Every attention of one pass, by its place: "encoder.blocks.0.attention", "decoder.blocks.1.cross_attention".

        source, target  as the model is called, or the tokens of a language model
        padding_mask    what of the source (or of the tokens) is no padding; target_padding_mask the same of the target
        Where layers share their weights the number is the layer's.
        """
        if not self.has_maps:
            raise ValueError("this model was exported without its queries and keys; export it with maps=True")
        if (target is None) != (len(self.graph_names) == 1):
            raise ValueError("a target goes with a model that has an encoder and a decoder, and with no other")
        return self._maps(source, source if target is None else target, padding_mask, target_padding_mask)

    def _maps(
        self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_padding_mask: Tensor | None
    ) -> dict[str, AttentionMap]:
        raise NotImplementedError  # which stacks there are is what makes a kind of model

    def take_parts(self, parts: dict[str, Tensor], place: Path) -> None:
        """Fill in the biases and mechanisms, which maps are computed with."""
        for name, part in weighing_parts(self):
            part.to_empty(device="cpu")
            for key, x in part.state_dict().items():
                found = parts.get(f"{name}.{key}")
                if found is None or found.shape != x.shape:
                    raise BadModelFile(f"{place} has no {name}.{key} that fits, which its attention maps need")
                x.copy_(found)
        self.has_maps = True


class GraphBlock(Block):
    """A layer whose numbers lie in a graph: it says what it is made of, and cannot be run by itself."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        raise RuntimeError("the layers of an ONNX model run inside its graphs; call the model")


class GraphHead(TokenHead):
    """Stands where a model's head is: the graphs end in logits already."""

    @classmethod
    def instead_of(cls, head: TokenHead | None) -> TokenHead | None:
        if head is None:
            return None
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        return made

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x


class HeldCache(GrowingCache):
    """Keys and values as a graph returned them."""

    def put(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        self._k, self._v, self._pos = k, v, positions

    def contents(self) -> tuple[Tensor, Tensor, Tensor] | None:
        return None if self._k is None or self._v is None or self._pos is None else (self._k, self._v, self._pos)


def new_cache(config: ModelConfig, batch: int | None, max_len: int | None) -> ModelCache:
    if batch is not None or max_len is not None:
        raise ValueError(f"batch={batch}, max_len={max_len}: an ONNX model's cache grows and cannot be preallocated")
    beside = config.architecture == "encoder-decoder"
    n_layers = config.n_decoder_layers or config.n_layers if beside else config.n_layers
    return ModelCache([HeldCache() for _ in range(n_layers)], [CrossCache() for _ in range(n_layers)] if beside else [])


def step(
    session: OnnxSession,
    config: ModelConfig,
    tokens: Tensor,
    positions: Tensor,
    cache: ModelCache,
    more: dict[str, Tensor],
    all_logits: bool,
    also: list[str] | None = None,
) -> dict[str, Tensor]:
    """New tokens through the decoder's graph; the cache takes in what comes out, ``also`` names further outputs."""
    layers = [layer for layer in cache.layers if isinstance(layer, HeldCache)]
    (n_batch, n_new), (n_heads, width) = tokens.shape, kv_shape(config)
    nothing = torch.zeros(n_batch, n_heads, 0, width)
    before = [layer.contents() or (nothing, nothing, positions[:, :0]) for layer in layers]
    past_positions = before[0][2].expand(n_batch, -1)  # one row may stand for all that were copied from it
    given = {"tokens": tokens.long(), "positions": positions, "past_positions": past_positions, **more}
    given["wanted"] = torch.arange(n_new) if all_logits else torch.tensor([n_new - 1])
    names = ["logits" if "logits" in session.outputs else "states"]
    for i, (k, v, _) in enumerate(before):
        given |= {f"past_k_{i}": k, f"past_v_{i}": v}
        names += [f"present_k_{i}", f"present_v_{i}"]
    out = session.run(given, names + (also or []))
    all_positions = torch.cat([past_positions, positions], dim=1)
    for i, layer in enumerate(layers):
        layer.put(out[f"present_k_{i}"], out[f"present_v_{i}"], all_positions)
    return out


def places(tokens: Tensor, padding_mask: Tensor | None, positions: Tensor | None, cache: ModelCache | None) -> Tensor:
    """Where new tokens stand, (B, T), -1 for padding: after those in the cache unless ``positions`` says otherwise.

    As in the models themselves, padding takes up places where there is no cache, and is passed over where there is.
    """
    if positions is not None:
        return positions.expand(tokens.shape).long()
    start = torch.zeros(1, dtype=torch.int64) if cache is None else cache.lengths
    all_along = torch.arange(tokens.shape[1]).expand(tokens.shape)
    if padding_mask is None:
        return start[:, None] + all_along
    real = padding_mask.bool()[:, -tokens.shape[1] :]
    return torch.where(real, start[:, None] + (all_along if cache is None else real.long().cumsum(-1) - 1), -1)


def first_of(out: dict[str, Tensor]) -> Tensor:
    return next(iter(out.values()))


def source_inputs(
    config: ModelConfig, source: Tensor, padding_mask: Tensor | None, segments: Tensor | None = None
) -> dict[str, Tensor]:
    """The inputs of an encoder's graph; without a mask everything is real."""
    if config.source == "image":
        return {"source": source.float()}
    padding_mask = torch.ones(source.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask.bool()
    segments = torch.zeros(source.shape[:2], dtype=torch.int64) if segments is None else segments.long()
    return {
        "source": source.long() if config.source == "text" else source.float(),
        "keep": padding_mask,
        "segments": segments,
    }


def keep_of(memory: Memory | None, n_batch: int, n_keys: int) -> Tensor:
    """Which of a memory's keys are real."""
    mask = None if memory is None else memory.mask
    return mask.valid if isinstance(mask, ValidKeys) else torch.ones(n_batch, n_keys, dtype=torch.bool)
