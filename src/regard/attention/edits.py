"""Changing what passes through a model, at the place where it passes; nothing when nobody changes anything.

Taps show, edits replace. The model itself is never touched: an edit stands in a list beside it for as long as a
``with`` block lasts, so that afterwards, and after an exception, everything is as it was. Like taps, these are function
calls in the forward pass; a compiled model runs eagerly while it is edited.
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
    """What the thread that made it changes in one model. Each method returns what it is given; subclasses do not."""

    def __init__(self, model: nn.Module) -> None:
        model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
        self._modules = frozenset(model.modules())
        self._thread = threading.get_ident()

    def applies_to(self, owner: nn.Module) -> bool:
        """Other models, and what other threads compute with this one, stay as they are."""
        return owner in self._modules and self._thread == threading.get_ident()

    def call(self, owner: nn.Module, call: AttentionCall) -> AttentionCall:
        """How an attention is to be computed."""
        return call

    def heads(self, owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
        """What an attention's heads return, (B, H, T, D), before they are joined."""
        return output

    def states(self, owner: nn.Module, x: Tensor) -> Tensor:
        """What goes into a stack of layers, or comes out of one of them, (B, T, M)."""
        return x


_edits: tuple[Edit, ...] = ()
_lock = threading.Lock()


def apply_edits_to_call(owner: nn.Module, call: AttentionCall) -> AttentionCall:
    """An attention as whoever intervenes wants it computed."""
    if _edits:
        for edit in _edits_for(owner):
            call = edit.call(owner, call)
    return call


def apply_edits_to_heads(owner: nn.Module, call: AttentionCall, output: Tensor) -> Tensor:
    """The output of an attention's heads (B, H, T, D) as whoever intervenes wants it."""
    if _edits:
        for edit in _edits_for(owner):
            output = edit.heads(owner, call, output)
    return output


def apply_edits_to_states(owner: nn.Module, x: Tensor) -> Tensor:
    """The states (B, T, M) before a stack or behind a layer as whoever intervenes wants them."""
    if _edits:
        for edit in _edits_for(owner):
            x = edit.states(owner, x)
    return x


def has_edits(model: nn.Module) -> bool:
    """Whether anything this thread computes with a model may be changed on its way."""
    return bool(_edits) and any(edit.applies_to(model) for edit in _edits)


def _edits_for(owner: nn.Module) -> Iterator[Edit]:
    return (edit for edit in _edits if edit.applies_to(owner))


@contextmanager
def use_edit(edit: Edit) -> Iterator[None]:
    """Let an edit act inside the ``with`` block. Several may: they act in the order in which they were begun."""
    _update_edits(lambda edits: (*edits, edit))
    try:
        yield
    finally:
        _update_edits(lambda edits: tuple(other for other in edits if other is not edit))


_eager = ExitStack()  # held open while there are edits, by whichever thread's: they may end in any order


def _update_edits(update: Callable[[tuple[Edit, ...]], tuple[Edit, ...]]) -> None:
    """Compiled graphs know nothing of edits: while there are some, what was compiled runs as it was written."""
    global _edits
    with _lock:
        before, _edits = _edits, update(_edits)
        if _edits and not before and "torch._dynamo" in sys.modules:  # else nothing is compiled, and loading it is slow
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        if before and not _edits:
            _eager.close()
