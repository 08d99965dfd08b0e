"""The backend "triton": translates an attention call into arguments of the kernels in ``kernels``.

Causal masks, windows, lengths and documents are evaluated inside the kernels. Any other mask becomes a sparse plan: the
blocks that its ``bounds`` do not prove empty, each with a tile of bits computed by the mask's ``tile``. Equal tiles are
stored once, and plans are cached by the mask's type and fields.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..foundation.device import HAS_TRITON, SMALL_SHARED_MEMORY, shared_memory
from .biases import Alibi, Bias, DenseBias, RelativeBias, Sum, T5Bias, XLRelative
from .frame import Frame
from .mask import EMPTY, FULL, PARTIAL, And, Mask, plan
from .masks import Causal, Dense, Document, Everything, Lengths, Packed, ValidKeys, Window
from .mechanisms import CappedDot, Dot
from .reference import draw_seed
from .score_matrix import AttentionCall

if TYPE_CHECKING:
    from ..kernels.flash_ops import Options

_WIDEST = 256  # largest head width
_LONGEST_TRAINED_TABLE = 1024  # largest distance in the table of a trainable bias
F = TypeVar("F", bound=Callable[..., Any])
_HIDDEN = -(1 << 31)  # document id of keys that no query may attend to


def constant_in_graphs(function: F) -> F:
    """Like torch.compiler.assume_constant_result, but without importing the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by torch's compiler
    return function


constant_in_graphs(shared_memory)


def triton_is_fast(call: AttentionCall) -> bool:
    """Whether the kernels support this call and are the fastest: in half precision, or if only ``tiled`` competes."""
    if triton_obstacle(call) is not None:
        return False
    if torch.compiler.is_compiling() and not all(is_constant(part) for part in _split_mask(call.mask)[1]):
        return False  # a sparse plan from tensors would be built in every call
    only_tiled_competes = call.mechanism.kind != "dot" or isinstance(call.bias, XLRelative)
    return call.q.element_size() == 2 or only_tiled_competes


def triton_obstacle(call: AttentionCall) -> str | None:
    """Why the kernels cannot compute a call; None if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if call.q.dtype == torch.float64:
        return "float64"
    if max(call.q.shape[-1], call.v.shape[-1]) > _WIDEST:
        return f"heads wider than {_WIDEST}"
    if (widest := _widest_with_plan(call)) is not None and max(call.q.shape[-1], call.v.shape[-1]) > widest:
        return f"gradients with a block-sparse mask and {call.q.dtype} heads wider than {widest}"
    if call.frame.may_have_gaps:
        return "positions that are not consecutive"
    parts = _bias_parts(call.bias)
    kinds = [_bias_kind(part) for part in parts]
    if "unknown" in kinds or len(set(kinds)) < len(kinds) or ("xl" in kinds and len(kinds) > 1):
        return "this bias"
    if "xl" in kinds and _split_mask(call.mask)[1]:
        return "a block-sparse mask with a Transformer-XL bias"
    if "xl" in kinds and isinstance(call.mechanism, CappedDot):
        return "capped scores with a Transformer-XL bias"
    if parts and not _is_dot(call):
        return "a bias with this mechanism"
    for part in parts:
        if isinstance(part, RelativeBias) and part.trainable and _reach(part, call.frame) > _LONGEST_TRAINED_TABLE:
            return f"a trainable bias over more than {_LONGEST_TRAINED_TABLE} positions"
        if isinstance(part, XLRelative) and _scale(call) == 0:
            return "a Transformer-XL bias with scale 0"
    return None


def _widest_with_plan(call: AttentionCall) -> int | None:
    """The widest heads whose tiles the backward kernels can hold if there is a sparse plan, whose blocks have one size
    for all widths; None without a plan or gradients."""
    if not _is_dot(call) or not any(x.requires_grad for x in (call.q, call.k, call.v)) or not _split_mask(call.mask)[1]:
        return None
    n_bytes = 256 if shared_memory(call.q.device) < SMALL_SHARED_MEMORY else 512
    return n_bytes // call.q.element_size()


def _is_dot(call: AttentionCall) -> bool:
    return call.mechanism.kind in ("dot", "capped")


def _scale(call: AttentionCall) -> float:
    assert isinstance(call.mechanism, Dot)
    return call.mechanism.factor(call.q.shape[-1])


def _bias_parts(bias: Bias | None) -> list[Bias]:
    if isinstance(bias, Sum):
        return [part for each in bias._parts for part in _bias_parts(each)]
    return [] if bias is None else [bias]


def _bias_kind(bias: Bias) -> str:
    if isinstance(bias, Alibi):
        return "alibi"
    if isinstance(bias, RelativeBias):
        return "table"
    if isinstance(bias, DenseBias):
        return "dense"
    return "xl" if isinstance(bias, XLRelative) else "unknown"


def triton(call: AttentionCall) -> Tensor:
    """The output (B, H, T, D) of softmax attention."""
    from ..kernels.flash_ops import flash_attention

    if not _is_dot(call):
        from ..kernels.additive_attention import additive_attention

        return additive_attention(call.q, call.k, call.v, call.mechanism.operands(call.frame)[0], options(call))
    if isinstance(call.bias, XLRelative):
        from ..kernels.xl_attention import xl_attention

        xl_options, (low, high) = options(call), call.frame.reach()
        if xl_options.right >= 0:
            high = min(high, xl_options.right)
        distances = torch.arange(low, high + 1, device=call.q.device)
        r, u, v = (x[call.frame.heads].to(call.q.dtype) for x in (call.bias.at(distances), call.bias.u, call.bias.v))
        if (ratio := call.bias.scale / xl_options.scale) != 1:  # the kernel has one scale for scores and bias
            r, u = r * ratio, u * ratio
        return xl_attention(call.q, call.k, call.v, r, u, v, low, xl_options)
    return flash_attention(call.q, call.k, call.v, options(call))


def options(call: AttentionCall) -> Options:
    """The mask, bias and dropout of a call as options of the kernels."""
    from ..kernels.flash_ops import Options

    assert call.frame.steady is not None
    seed = None
    if call.dropout > 0:
        seed = draw_seed(call.q.device) if call.seed is None else call.seed
    return Options(
        scale=_scale(call) if _is_dot(call) else 1.0,
        offset=call.frame.steady[0] - call.frame.steady[1],
        seed=seed,
        dropout=call.dropout,
        cap=call.mechanism.cap if isinstance(call.mechanism, CappedDot) else 0.0,
        **_mask_options(call.mask, call.frame),
        **_bias_options(call.bias, call.frame),
    )


def _bias_options(bias: Bias | None, frame: Frame) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for part in _bias_parts(bias):
        if isinstance(part, Alibi):
            result["slopes"] = part.slopes[frame.heads]
        elif isinstance(part, RelativeBias):
            reach = _reach(part, frame)
            result["table"] = part.at(torch.arange(-reach, reach + 1, device=frame.device))[frame.heads]
        elif isinstance(part, DenseBias):
            result["dense"] = part.operands(frame)[0]
    return result


def _reach(bias: RelativeBias, frame: Frame) -> int:
    """The distance beyond which a bias is constant, or the longest in the frame if that is shorter."""
    longest = max(1, *(abs(d) for d in frame.reach()))
    return min(longest, bias.max_distance) if isinstance(bias, T5Bias) else longest


# ---- masks


def _split_mask(mask: Mask | None) -> tuple[list[Mask], list[Mask]]:
    """The parts of a conjunction that the kernels evaluate, and the rest, which needs a sparse plan."""
    parts = list(_conjuncts(mask))
    supported = [part for part in parts if isinstance(part, Causal | Window | Lengths | Packed | Document | ValidKeys)]
    rest = [part for part in parts if part not in supported and not isinstance(part, Everything)]
    extra_documents = [part for part in supported if isinstance(part, Packed | Document)][1:]  # kernels evaluate one
    return [part for part in supported if part not in extra_documents], [*rest, *extra_documents]


def _conjuncts(mask: Mask | None) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _conjuncts(mask.a)
        yield from _conjuncts(mask.b)
    elif mask is not None:
        yield mask


def _mask_options(mask: Mask | None, frame: Frame) -> dict[str, Any]:
    supported, rest = _split_mask(mask)
    result: dict[str, Any] = {}
    local = [part for part in supported if isinstance(part, Causal | Window)]
    if rest:
        result.update(_sparse_options([*local, *rest], frame))
    elif local:
        result["right"] = min([part.ahead if isinstance(part, Window) else 0 for part in local])
        if lefts := [part.size - 1 for part in local if isinstance(part, Window)]:
            result["left"] = min(lefts)
    valid = None
    for part in supported:
        if isinstance(part, Lengths):
            assert frame.steady is not None
            first_key = frame.steady[1]
            lengths = _select_batch(part.lengths, frame)
            lengths = lengths - first_key if first_key else lengths
            result["lengths"] = lengths if "lengths" not in result else torch.minimum(lengths, result["lengths"])
        elif isinstance(part, ValidKeys):
            part_valid = _select_batch(part.valid, frame)
            valid = part_valid if valid is None else valid & part_valid
        elif isinstance(part, Packed):
            result["q_docs"] = result["k_docs"] = _select_batch(_as_int32(part.documents), frame)
        elif isinstance(part, Document):
            assert frame.q_doc is not None and frame.k_doc is not None
            sizes = (frame.n_batch, -1)
            result["q_docs"] = _as_int32(frame.q_doc).expand(sizes).contiguous()
            result["k_docs"] = _as_int32(frame.k_doc).expand(sizes).contiguous()
    if valid is not None:
        result.update(_hide_keys(valid, result, frame))
    return result


def _select_batch(x: Tensor, frame: Frame) -> Tensor:
    """The batch entries of a frame that is part of a larger one; otherwise x itself, which caches know by identity."""
    return x if len(x) == frame.n_batch else x[frame.first_batch : frame.first_batch + frame.n_batch]


def _hide_keys(valid: Tensor, mask_options: dict[str, Any], frame: Frame) -> dict[str, Tensor]:
    """Document ids that hide the keys that are not valid; cached, because every layer needs the same."""
    if "k_docs" in mask_options:
        return {"k_docs": torch.where(valid, mask_options["k_docs"], _HIDDEN)}

    def compute() -> tuple[Tensor, Tensor]:
        q_docs = torch.zeros(frame.n_batch, frame.n_queries, dtype=torch.int32, device=valid.device)
        return q_docs, torch.where(valid, 0, _HIDDEN).to(torch.int32)

    q_docs, k_docs = _compute_once(valid, frame.n_queries, compute)
    return {"q_docs": q_docs, "k_docs": k_docs}


_document_cache: Any = WeakTensorKeyDictionary()


def _as_int32(documents: Tensor) -> Tensor:
    """A 32-bit copy, cached as long as the original lives."""
    if documents.dtype == torch.int32:
        return documents.contiguous()
    copy: Tensor = _compute_once(documents, None, lambda: documents.to(torch.int32).contiguous())
    return copy


def _compute_once(source: Tensor, key: int | None, compute: Callable[[], Any]) -> Any:
    """The result of ``compute``, cached as long as ``source`` lives unchanged; not cached in compiled graphs."""
    if torch.compiler.is_compiling():
        return compute()
    entry = _document_cache.get(source)
    if entry is None or entry[0] != (source._version, key):
        entry = _document_cache[source] = ((source._version, key), compute())
    return entry[1]


# ---- sparse plans


@dataclass(frozen=True)
class _Plan:
    rows: Tensor  # (B or 1, H or 1, blocks of queries, 1 + 2n): the count n, then n pairs (block of keys, tile)
    columns: Tensor  # the same for blocks of keys
    bits: Tensor  # (tiles, block, block / 32); tile 0 is full
    mask: Mask  # keeps the mask's tensors alive, because the cache key contains their ids


_plans: OrderedDict[Any, _Plan] = OrderedDict()
_MOST_PLANS = 32


def _sparse_options(parts: list[Mask], frame: Frame) -> dict[str, Any]:
    from ..kernels.flash_ops import PLAN_BLOCK

    mask = functools.reduce(And, parts)
    if torch.compiler.is_compiling() and is_constant(mask):
        assert frame.steady is not None
        sizes = (frame.n_queries, frame.n_keys)
        return {"plan": plan_name(mask_words(mask), sizes, frame.steady, str(frame.device), PLAN_BLOCK)}
    shape = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys, frame.first_batch, frame.first_head)
    documents = _tensor_key(frame.q_doc), _tensor_key(frame.k_doc)
    key = (_identity(mask), shape, frame.steady, frame.device, PLAN_BLOCK, documents)
    result = _plans.get(key)
    if result is None:
        with torch.no_grad():
            result = _plans[key] = sparse_plan(mask, frame, PLAN_BLOCK)
        if len(_plans) > _MOST_PLANS:
            _plans.popitem(last=False)
    return {"row_plan": result.rows, "column_plan": result.columns, "bits": result.bits}


def is_constant(mask: Mask) -> bool:
    """Whether all fields of a mask are plain numbers, so that it is the same in every call and batch row."""
    return not isinstance(mask, Document) and all(
        is_constant(x) if isinstance(x, Mask) else isinstance(x, int | float | bool) for x in _values(mask)
    )


def mask_words(mask: Mask) -> tuple[Any, ...]:
    """A constant mask as nested tuples of class names and numbers, which a compiled graph can hold as a constant."""
    return type(mask).__name__, *(mask_words(x) if isinstance(x, Mask) else x for x in _values(mask))


def _values(mask: Mask) -> list[Any]:
    names = type(mask).__dataclass_fields__  # type: ignore[attr-defined]  # every mask is a dataclass
    return [getattr(mask, name) for name in names]


def _mask_of(words: tuple[Any, ...]) -> Mask:
    """The inverse of ``mask_words``."""
    kind = next(cls for cls in _all_masks(Mask) if cls.__name__ == words[0])
    return kind(*(_mask_of(x) if isinstance(x, tuple) else x for x in words[1:]))


def _all_masks(cls: type[Mask]) -> Iterator[type[Mask]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _all_masks(subclass)


@constant_in_graphs
def plan_name(words: tuple[Any, ...], sizes: tuple[int, int], steady: tuple[int, int], device: str, block: int) -> str:
    """The key in ``PLANS`` of a constant mask's sparse plan, which is built while the graph is traced."""
    from ..kernels.flash_ops import PLANS

    name = repr((words, sizes, steady, device, block))
    if name not in PLANS:
        frame = Frame.aligned(1, 1, *sizes, device, q_start=steady[0], k_start=steady[1])
        with torch.no_grad():
            result = sparse_plan(_mask_of(words), frame, block)
        PLANS[name] = result.rows, result.columns, result.bits
    return name


def _identity(mask: Mask) -> Any:
    """A hashable key of a mask: its type and fields, with tensors by id and version."""
    if not is_dataclass(mask):
        return id(mask)
    values = (getattr(mask, field.name) for field in fields(mask))
    return type(mask), *(
        _identity(x) if isinstance(x, Mask) else _tensor_key(x) if isinstance(x, Tensor) else x for x in values
    )


def _tensor_key(x: Tensor | None) -> Any:
    return None if x is None else (id(x), x.data_ptr(), x._version)


def sparse_plan(mask: Mask, frame: Frame, block: int) -> _Plan:
    """The blocks of queries and keys to compute, with the mask's bits in each; one stripe of queries at a time."""
    n_rows, n_cols = -(-frame.n_queries // block), -(-frame.n_keys // block)
    if any(isinstance(part, Dense) for part in _with_parts(mask)):  # its bounds cost more than its tiles
        kinds = torch.full((n_rows, n_cols), PARTIAL)
    else:
        kinds = plan(mask, frame, (block, block)).kinds
    tiles: dict[bytes, int] = {b"\xff" * (block * block // 8): 0}  # the number of each distinct tile
    entries: list[list[list[tuple[int, int]]]] = []  # by (batch and head), block of queries
    shape = (1, 1)
    for a, line in enumerate(kinds.tolist()):
        visible = [c for c, kind in enumerate(line) if kind != EMPTY]
        partial = [c for c in visible if line[c] != FULL or (c + 1) * block > frame.n_keys]
        stripe, shape = _stripe_bits(mask, frame, a, partial, block)
        entries = entries or [[] for _ in range(shape[0] * shape[1])]
        for index, tile_bits in enumerate(stripe):
            numbers = dict.fromkeys(visible, 0)
            for c, bits in zip(partial, tile_bits, strict=True):
                numbers[c] = -1 if not any(bits) else tiles.setdefault(bits, len(tiles))
            entries[index].append([(c, number) for c, number in numbers.items() if number >= 0])
    by_column = [_transpose(lines, n_cols) for lines in entries]
    bits_of_tiles = torch.frombuffer(bytearray(b"".join(tiles)), dtype=torch.int32).view(-1, block, block // 32)
    rows, columns = (_as_tensor(lists, shape).to(frame.device) for lists in (entries, by_column))
    return _Plan(rows, columns, bits_of_tiles.to(frame.device), mask)


def _with_parts(mask: Mask) -> Iterator[Mask]:
    """A mask and all masks it is composed of."""
    yield mask
    for x in vars(mask).values():
        if isinstance(x, Mask):
            yield from _with_parts(x)


def _stripe_bits(
    mask: Mask, frame: Frame, a: int, partial: list[int], block: int
) -> tuple[list[list[bytes]], tuple[int, int]]:
    """The mask's bits for query block a and some key blocks, and its (batch, heads), each 1 if the mask is shared."""
    rows = slice(a * block, min((a + 1) * block, frame.n_queries))
    device = frame.device
    cols = (torch.tensor(partial or [0], device=device)[:, None] * block + torch.arange(block, device=device)).flatten()
    allowed = mask.tile(rows, cols.clamp(max=frame.n_keys - 1), frame) & (cols < frame.n_keys)
    b, h, n_rows, _ = allowed.shape
    padded = allowed.new_zeros(b * h, block, len(cols))
    padded[:, :n_rows] = allowed.flatten(0, 1).expand(-1, n_rows, -1)
    bits = padded.view(b * h, block, -1, block // 8, 8).transpose(1, 2)
    octets = (bits.to(torch.uint8) << torch.arange(8, device=device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    data, size = octets.cpu().numpy().tobytes(), block * block // 8
    n = len(partial)
    return [[data[(w * max(n, 1) + i) * size :][:size] for i in range(n)] for w in range(b * h)], (b, h)


def _transpose(lines: list[list[tuple[int, int]]], n_columns: int) -> list[list[tuple[int, int]]]:
    """Lists of (column, tile) by row → lists of (row, tile) by column."""
    columns: list[list[tuple[int, int]]] = [[] for _ in range(n_columns)]
    for a, line in enumerate(lines):
        for c, number in line:
            columns[c].append((a, number))
    return columns


def _as_tensor(lists: list[list[list[tuple[int, int]]]], shape: tuple[int, int]) -> Tensor:
    """Lists of pairs by (batch and head), block → (B, H, blocks, 1 + 2n) int32: a count, then the pairs."""
    lines = [line for of_head in lists for line in of_head]
    longest = max(map(len, lines))
    rows = [[len(line), *itertools.chain(*line), *[0] * 2 * (longest - len(line))] for line in lines]
    return torch.tensor(rows, dtype=torch.int32).view(*shape, -1, 1 + 2 * longest)
