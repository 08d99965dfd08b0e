"""The backend "triton": an attention call as arguments of the kernels in ``kernels``.

Causal masks, windows, lengths and documents are evaluated inside the kernels. Any other mask becomes a sparse plan: the
blocks its ``bounds`` do not prove empty, each with a tile of bits from the mask's own ``tile``. Equal tiles are stored
once, and plans are kept by what the mask is.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .biases import Alibi, Bias, DenseBias, RelativeBias, Sum, T5Bias, XLRelative
from .frame import Frame
from .mask import EMPTY, FULL, And, Mask, plan
from .masks import Causal, Dense, Document, Everything, Lengths, Packed, ValidKeys, Window
from .mechanisms import CappedDot, Dot
from .reference import draw_seed
from .score_matrix import AttentionCall

if TYPE_CHECKING:
    from ..kernels.flash_ops import Options

_WIDEST, _LONGEST_TRAINED_TABLE = 256, 1024
HAS_TRITON = find_spec("triton") is not None
F = TypeVar("F", bound=Callable[..., Any])
_HIDDEN = -(1 << 31)  # the document of a key that no query sees


def constant_in_graphs(function: F) -> F:
    """As torch.compiler.assume_constant_result, which imports the whole compiler where it is used."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by torch's compiler
    return function


def triton_is_fast(call: AttentionCall) -> bool:
    """Whether the kernels take this call and are the fastest: in half precision, or where only tiles compete."""
    if triton_obstacle(call) is not None:
        return False
    if torch.compiler.is_compiling() and not all(is_constant(part) for part in _split(call.mask)[1]):
        return False  # a sparse plan of tensors would be made in every call
    only_tiles_compete = call.mechanism.kind != "dot" or isinstance(call.bias, XLRelative)
    return call.q.element_size() == 2 or only_tiles_compete


def triton_obstacle(call: AttentionCall) -> str | None:
    """What the kernels cannot do in a call; None: nothing."""
    if not HAS_TRITON:
        return "triton is not installed"
    if call.q.dtype == torch.float64:
        return "float64"
    if max(call.q.shape[-1], call.v.shape[-1]) > _WIDEST:
        return f"heads wider than {_WIDEST}"
    if call.frame.may_have_gaps:
        return "positions that are not consecutive"
    parts = _bias_parts(call.bias)
    kinds = [_bias_kind(part) for part in parts]
    if "unknown" in kinds or len(set(kinds)) < len(kinds) or ("xl" in kinds and len(kinds) > 1):
        return "this bias"
    if "xl" in kinds and _split(call.mask)[1]:
        return "a block-sparse mask with a Transformer-XL bias"
    if "xl" in kinds and isinstance(call.mechanism, CappedDot):
        return "capped scores with a Transformer-XL bias"
    if parts and not _is_dot(call):
        return "a bias with this mechanism"
    for part in parts:
        if isinstance(part, RelativeBias) and part.trainable and _reach(part, call.frame) > _LONGEST_TRAINED_TABLE:
            return f"a trained bias that reaches over {_LONGEST_TRAINED_TABLE} positions"
        if isinstance(part, XLRelative) and _scale(call) == 0:
            return "a Transformer-XL bias with scale 0"
    return None


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
    return "dense" if isinstance(bias, DenseBias) else "xl" if isinstance(bias, XLRelative) else "unknown"


def triton(call: AttentionCall) -> Tensor:
    """The output (B, H, T, D) of a softmax attention."""
    from ..kernels.flash_ops import flash_attention

    if not _is_dot(call):
        from ..kernels.additive_attention import additive_attention

        return additive_attention(call.q, call.k, call.v, call.mechanism.operands(call.frame)[0], options(call))
    if isinstance(call.bias, XLRelative):
        from ..kernels.xl_attention import xl_attention

        made, (low, high) = options(call), call.frame.reach()
        distances = torch.arange(low, (high if made.right < 0 else min(high, made.right)) + 1, device=call.q.device)
        r, u, v = (x[call.frame.heads].to(call.q.dtype) for x in (call.bias.at(distances), call.bias.u, call.bias.v))
        if (ratio := call.bias.scale / made.scale) != 1:  # the kernel has one scale
            r, u = r * ratio, u * ratio
        return xl_attention(call.q, call.k, call.v, r, u, v, low, made)
    return flash_attention(call.q, call.k, call.v, options(call))


def options(call: AttentionCall) -> Options:
    """A call's mask, bias and dropout as the kernels take them."""
    from ..kernels.flash_ops import Options

    assert call.frame.steady is not None
    seed = draw_seed(call.q.device) if call.dropout > 0 and call.seed is None else call.seed
    made = Options(
        scale=_scale(call) if _is_dot(call) else 1.0,
        offset=call.frame.steady[0] - call.frame.steady[1],
        seed=seed if call.dropout > 0 else None,
        dropout=call.dropout,
        cap=call.mechanism.cap if isinstance(call.mechanism, CappedDot) else 0.0,
    )
    return replace(made, **_mask_options(call.mask, call.frame), **_bias_options(call.bias, call.frame))


def _bias_options(bias: Bias | None, frame: Frame) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for part in _bias_parts(bias):
        if isinstance(part, Alibi):
            made["slopes"] = part.slopes[frame.heads]
        elif isinstance(part, RelativeBias):
            reach = _reach(part, frame)
            made["table"] = part.at(torch.arange(-reach, reach + 1, device=frame.device))[frame.heads]
        elif isinstance(part, DenseBias):
            made["dense"] = part.operands(frame)[0]
    return made


def _reach(bias: RelativeBias, frame: Frame) -> int:
    """The distance from which on a bias stays the same, or the longest there is."""
    longest = max(1, *(abs(d) for d in frame.reach()))
    return min(longest, bias.max_distance) if isinstance(bias, T5Bias) else longest


# ---- masks


def _split(mask: Mask | None) -> tuple[list[Mask], list[Mask]]:
    """The parts of a conjunction that the kernels evaluate, and the others."""
    parts = list(_conjuncts(mask))
    known = [part for part in parts if isinstance(part, Causal | Window | Lengths | Packed | Document | ValidKeys)]
    of_documents = [part for part in known if isinstance(part, Packed | Document)]
    others = [part for part in parts if part not in known and not isinstance(part, Everything)] + of_documents[1:]
    return [part for part in known if part not in of_documents[1:]], others


def _conjuncts(mask: Mask | None) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _conjuncts(mask.a)
        yield from _conjuncts(mask.b)
    elif mask is not None:
        yield mask


def _mask_options(mask: Mask | None, frame: Frame) -> dict[str, Any]:
    known, others = _split(mask)
    made: dict[str, Any] = {}
    near = [part for part in known if isinstance(part, Causal | Window)]
    if others:
        made.update(_sparse_options([*near, *others], frame))
    else:
        ahead = [part.ahead if isinstance(part, Window) else 0 for part in near]
        back = [part.size - 1 for part in near if isinstance(part, Window)]
        made.update({"right": min(ahead)} if ahead else {}, **({"left": min(back)} if back else {}))
    valid = None
    for part in known:
        if isinstance(part, Lengths):
            lengths = _of_batch(part.lengths, frame)
            lengths = lengths - _first_key(frame) if _first_key(frame) else lengths
            made["lengths"] = lengths if "lengths" not in made else torch.minimum(lengths, made["lengths"])
        elif isinstance(part, ValidKeys):
            real = _of_batch(part.valid, frame)
            valid = real if valid is None else valid & real
        elif isinstance(part, Packed):
            made["q_docs"] = made["k_docs"] = _of_batch(_as_int32(part.documents), frame)
        elif isinstance(part, Document):
            assert frame.q_doc is not None and frame.k_doc is not None
            sizes = (frame.n_batch, -1)
            made["q_docs"] = _as_int32(frame.q_doc).expand(sizes).contiguous()
            made["k_docs"] = _as_int32(frame.k_doc).expand(sizes).contiguous()
    if valid is not None:
        made.update(_hide_keys(valid, made, frame))
    return made


def _of_batch(x: Tensor, frame: Frame) -> Tensor:
    """The rows of a frame that is part of a larger one; else the tensor itself, as caches know it by identity."""
    return x if len(x) == frame.n_batch else x[frame.first_batch : frame.first_batch + frame.n_batch]


def _first_key(frame: Frame) -> int:
    assert frame.steady is not None
    return frame.steady[1]


def _hide_keys(valid: Tensor, made: dict[str, Any], frame: Frame) -> dict[str, Tensor]:
    """Documents in which the keys that are not valid belong to none; kept, as every layer asks for the same."""
    if "k_docs" in made:
        return {"k_docs": torch.where(valid, made["k_docs"], _HIDDEN)}

    def make() -> tuple[Tensor, Tensor]:
        q_docs = torch.zeros(frame.n_batch, frame.n_queries, dtype=torch.int32, device=valid.device)
        return q_docs, torch.where(valid, 0, _HIDDEN).to(torch.int32)

    q_docs, k_docs = _keep(valid, frame.n_queries, make)
    return {"q_docs": q_docs, "k_docs": k_docs}


_documents_of: Any = WeakTensorKeyDictionary()


def _as_int32(documents: Tensor) -> Tensor:
    """A copy in 32 bits, kept as long as the original."""
    if documents.dtype == torch.int32:
        return documents.contiguous()
    made: Tensor = _keep(documents, None, lambda: documents.to(torch.int32).contiguous())
    return made


def _keep(source: Tensor, key: int | None, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, kept as long as ``source`` lives unchanged; a compiled graph keeps its own."""
    if torch.compiler.is_compiling():
        return make()
    held = _documents_of.get(source)
    if held is None or held[0] != (source._version, key):
        held = _documents_of[source] = ((source._version, key), make())
    return held[1]


# ---- sparse plans


@dataclass(frozen=True)
class _Plan:
    rows: Tensor  # (B or 1, H or 1, blocks of queries, 1 + 2n): a count, then (block of keys, tile)
    columns: Tensor  # the same by blocks of keys
    bits: Tensor  # (tiles, block, block / 32); tile 0 is full
    mask: Mask  # kept, as the key may hold the identity of its tensors


_plans: OrderedDict[Any, _Plan] = OrderedDict()
_MOST_PLANS = 32


def _sparse_options(parts: list[Mask], frame: Frame) -> dict[str, Any]:
    from ..kernels.flash_ops import PLAN_BLOCK

    mask = functools.reduce(And, parts)
    if torch.compiler.is_compiling() and is_constant(mask):
        assert frame.steady is not None
        sizes = (frame.n_queries, frame.n_keys)
        return {"plan": plan_name(mask_words(mask), sizes, frame.steady, str(frame.device), PLAN_BLOCK)}
    whole = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys, frame.first_batch, frame.first_head)
    documents = _tensor_key(frame.q_doc), _tensor_key(frame.k_doc)
    key = (_identity(mask), whole, frame.steady, frame.device, PLAN_BLOCK, documents)
    made = _plans.get(key)
    if made is None:
        with torch.no_grad():
            made = _plans[key] = sparse_plan(mask, frame, PLAN_BLOCK)
        if len(_plans) > _MOST_PLANS:
            _plans.popitem(last=False)
    return {"row_plan": made.rows, "column_plan": made.columns, "bits": made.bits}


def is_constant(mask: Mask) -> bool:
    """Whether a mask is made of plain numbers, so that it is the same in every call and every batch row."""
    return not isinstance(mask, Document) and all(
        is_constant(x) if isinstance(x, Mask) else isinstance(x, int | float | bool) for x in _values(mask)
    )


def mask_words(mask: Mask) -> tuple[Any, ...]:
    """A constant mask as a tuple of names and numbers, which a compiled graph can be asked about."""
    return type(mask).__name__, *(mask_words(x) if isinstance(x, Mask) else x for x in _values(mask))


def _values(mask: Mask) -> list[Any]:
    return [getattr(mask, name) for name in type(mask).__dataclass_fields__]  # type: ignore[attr-defined]  # every mask is a dataclass


def _mask_of(words: tuple[Any, ...]) -> Mask:
    """The inverse of ``mask_words``."""
    kind = next(cls for cls in _all_masks(Mask) if cls.__name__ == words[0])
    return kind(*(_mask_of(x) if isinstance(x, tuple) else x for x in words[1:]))


def _all_masks(cls: type[Mask]) -> Iterator[type[Mask]]:
    for below in cls.__subclasses__():
        yield below
        yield from _all_masks(below)


@constant_in_graphs
def plan_name(words: tuple[Any, ...], sizes: tuple[int, int], steady: tuple[int, int], device: str, block: int) -> str:
    """The key under which the kernels find the sparse plan of a constant mask; it is made while a graph is traced."""
    from ..kernels.flash_ops import PLANS

    name = repr((words, sizes, steady, device, block))
    if name not in PLANS:
        frame = Frame.aligned(1, 1, *sizes, device, q_start=steady[0], k_start=steady[1])
        with torch.no_grad():
            made = sparse_plan(_mask_of(words), frame, block)
        PLANS[name] = made.rows, made.columns, made.bits
    return name


def _identity(mask: Mask) -> Any:
    """What a mask is: its type and fields, tensors by identity and version."""
    if not is_dataclass(mask):
        return id(mask)
    values = (getattr(mask, field.name) for field in fields(mask))
    return type(mask), *(
        _identity(x) if isinstance(x, Mask) else _tensor_key(x) if isinstance(x, Tensor) else x for x in values
    )


def _tensor_key(x: Tensor | None) -> Any:
    return None if x is None else (id(x), x.data_ptr(), x._version)


def sparse_plan(mask: Mask, frame: Frame, block: int) -> _Plan:
    """The blocks of queries and keys to compute, with the bits of the mask in each; one stripe of queries at a time."""
    known_kinds = not any(isinstance(part, Dense) for part in _leaves(mask))  # its bounds cost more than its tiles
    n_rows, n_cols = -(-frame.n_queries // block), -(-frame.n_keys // block)
    kinds = plan(mask, frame, (block, block)).kinds if known_kinds else torch.ones(n_rows, n_cols, dtype=torch.long)
    tiles: dict[bytes, int] = {b"\xff" * (block * block // 8): 0}
    entries: list[list[list[tuple[int, int]]]] = []  # by (batch and head), block of queries
    shape = (1, 1)
    for a, line in enumerate(kinds.tolist()):
        open_blocks = [c for c, kind in enumerate(line) if kind != EMPTY]
        partial = [c for c in open_blocks if line[c] != FULL or (c + 1) * block > frame.n_keys]
        words, shape = _stripe_bits(mask, frame, a, partial, block)
        entries = entries or [[] for _ in range(shape[0] * shape[1])]
        for which, of_blocks in enumerate(words):
            numbers = dict.fromkeys(open_blocks, 0)
            for c, bits in zip(partial, of_blocks, strict=True):
                numbers[c] = -1 if not any(bits) else tiles.setdefault(bits, len(tiles))
            entries[which].append([(c, number) for c, number in numbers.items() if number >= 0])
    by_column = [_transpose(lines, n_cols) for lines in entries]
    bits_of_tiles = torch.frombuffer(bytearray(b"".join(tiles)), dtype=torch.int32).view(-1, block, block // 32)
    rows, columns = (_as_tensor(lists, shape).to(frame.device) for lists in (entries, by_column))
    return _Plan(rows, columns, bits_of_tiles.to(frame.device), mask)


def _leaves(mask: Mask) -> Iterator[Mask]:
    yield mask
    for x in vars(mask).values():
        if isinstance(x, Mask):
            yield from _leaves(x)


def _stripe_bits(
    mask: Mask, frame: Frame, a: int, partial: list[int], block: int
) -> tuple[list[list[bytes]], tuple[int, int]]:
    """The bits of some blocks of keys against block a of queries, for each (batch, head) the mask tells apart."""
    rows = slice(a * block, min((a + 1) * block, frame.n_queries))
    device = frame.device
    cols = (torch.tensor(partial or [0], device=device)[:, None] * block + torch.arange(block, device=device)).flatten()
    seen = mask.tile(rows, cols.clamp(max=frame.n_keys - 1), frame) & (cols < frame.n_keys)
    b, h, n_rows, _ = seen.shape
    padded = seen.new_zeros(b * h, block, len(cols))
    padded[:, :n_rows] = seen.flatten(0, 1).expand(-1, n_rows, -1)
    bits = padded.view(b * h, block, -1, block // 8, 8).transpose(1, 2)
    octets = (bits.to(torch.uint8) << torch.arange(8, device=device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    data, size = octets.cpu().numpy().tobytes(), block * block // 8
    n = len(partial)
    return [[data[(w * max(n, 1) + i) * size :][:size] for i in range(n)] for w in range(b * h)], (b, h)


def _transpose(lines: list[list[tuple[int, int]]], n_columns: int) -> list[list[tuple[int, int]]]:
    columns: list[list[tuple[int, int]]] = [[] for _ in range(n_columns)]
    for a, line in enumerate(lines):
        for c, number in line:
            columns[c].append((a, number))
    return columns


def _as_tensor(lists: list[list[list[tuple[int, int]]]], shape: tuple[int, int]) -> Tensor:
    """Lists by (batch and head), block → (B, H, blocks, 1 + 2n) int32: a count, then the pairs."""
    longest = max(len(line) for lines in lists for line in lines)
    every_line = [line for lines in lists for line in lines]
    rows = [[len(line), *(x for pair in line for x in pair), *[0] * 2 * (longest - len(line))] for line in every_line]
    return torch.tensor(rows, dtype=torch.int32).view(*shape, -1, 1 + 2 * longest)
