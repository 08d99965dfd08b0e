"""Edits: replace attention calls, head outputs and hidden states of a model inside a ``with use_edit(...)`` block.

Like taps, they are function calls in the forward pass; the model itself is not modified. Compiled models run eagerly
while an edit is active.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from .score_matrix import AttentionCall


class Edit:
    """Edits one model, in the thread that created the edit. Subclasses override methods; the defaults do nothing."""

    def __init__(self, model: nn.Module) -> None:
        model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
        self._modules = frozenset(model.modules())
        self._thread = threading.get_ident()

    def applies_to(self, owner: nn.Module) -> bool:
        return owner in self._modules and self._thread == threading.get_ident()

    def call(self, owner: nn.Module, call: AttentionCall) -> AttentionCall:
        """Replace an attention call before it is computed."""
        return call

    def heads(self, owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
        """Replace the heads' output (B, H, T, D) before w_o."""
        return output

    def states(self, owner: nn.Module, point: str, x: Tensor) -> Tensor:
        """Replace an activation (B, T, width) of a stack or layer; ``point`` names it ("input", "ff.neurons")."""
        return x


_edits: tuple[Edit, ...] = ()
_lock = threading.Lock()


def _unwrap_traced(owner: nn.Module) -> nn.Module:
    """The module itself, for which torch.export passes a proxy while tracing."""
    base = getattr(type(owner), "get_base", None)
    return owner if base is None else base(owner)


def apply_edits_to_call(owner: nn.Module, call: AttentionCall) -> AttentionCall:
    owner = _unwrap_traced(owner) if _edits else owner
    for edit in _edits_for(owner):
        call = edit.call(owner, call)
    return call


def apply_edits_to_heads(owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
    owner = _unwrap_traced(owner) if _edits else owner
    for edit in _edits_for(owner):
        output = edit.heads(owner, call, output)
    return output


def apply_edits_to_states(owner: nn.Module, point: str, x: Tensor) -> Tensor:
    owner = _unwrap_traced(owner) if _edits else owner
    for edit in _edits_for(owner):
        x = edit.states(owner, point, x)
    return x


def has_edits(model: nn.Module) -> bool:
    """Whether an edit of this model is active in this thread."""
    return bool(_edits) and bool(_edits_for(_unwrap_traced(model)))


def _edits_for(owner: nn.Module) -> list[Edit]:
    return [edit for edit in _edits if edit.applies_to(owner)] if _edits else []


@contextmanager
def use_edit(edit: Edit) -> Iterator[None]:
    """Apply an edit inside the ``with`` block; nested edits apply in the order they were entered."""
    _update_edits(lambda edits: (*edits, edit))
    try:
        yield
    finally:
        _update_edits(lambda edits: tuple(other for other in edits if other is not edit))


_eager = ExitStack()  # holds the eager stance while any thread has an edit; edits may end in any order


def _update_edits(update: Callable[[tuple[Edit, ...]], tuple[Edit, ...]]) -> None:
    """Update the active edits, and run compiled models eagerly while there are any."""
    global _edits
    with _lock:
        before, _edits = _edits, update(_edits)
        if _edits and not before and "torch._dynamo" in sys.modules:  # otherwise nothing is compiled; importing is slow
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        if before and not _edits:
            _eager.close()
