"""Recurrent models as graphs: the encoder's LSTM or GRU over any length, and one step of the decoder.

encoder   source, keep → the state to start from, and the memory as attention looks at it, prepared once
decoder   one token and the state → logits and the next state
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models import Recurrent
from ..models.recurrent_cells import Alignment, MemoryView, State, StateCache
from .onnx_tracing import Axes, Graph, Notes, example_of, tokens_like

_B, _S = 2, 6  # as in onnx_graphs


class LastState(StateCache):
    """The state after the last token: all that a single step has to hand on."""

    def __init__(self) -> None:
        self.now: State = ()

    def push(self, state: State, real: Tensor | None = None) -> State:
        self.now = state
        return state


class RecurrentEncoderGraph(Graph):
    """source (B, S), keep (B, S) → state_0 … and memory_k, memory_v; one where they are the same."""

    def __init__(self, model: Recurrent) -> None:
        axes = {0: "batch", 1: "source"}
        keep = torch.ones(_B, _S, dtype=torch.bool)
        keep[1, _S // 2 :] = False
        super().__init__({"source": (tokens_like(model.config.vocab_size, _B, _S), axes), "keep": (keep, axes)})
        self.model = model

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        memory = self.model.encode(given["source"], keep=given["keep"])
        view, state = self.model._start(memory, given["source"].shape[0])
        out = {f"state_{i}": part for i, part in enumerate(state)}
        if view is None:
            return out
        own_keys = {} if view.k is view.v else {"memory_k": view.k}
        return out | own_keys | {"memory_v": view.v}


class RecurrentDecoderGraph(Graph):
    """tokens (B, 1), real (B, 1), state, memory and keep → logits (B, 1, V) and next_state_0 …"""

    def __init__(self, model: Recurrent, maps: bool) -> None:
        config = model.config
        with torch.no_grad():
            first = RecurrentEncoderGraph(model)
            given = first.compute(dict(zip(first.input_names, first.examples, strict=True)))
        inputs: dict[str, tuple[Tensor, Axes]] = {
            "tokens": (tokens_like(config.output_vocab_size, _B, 1), {0: "batch"}),
            "real": (torch.tensor([[True], [False]]), {0: "batch"}),
        }
        for name, example in given.items():
            axes = {0: "batch"} if name.startswith("state") else {0: "batch", 2: "source"}
            inputs[name] = (example_of(*example.shape), axes)
        if "memory_v" in given:
            inputs["keep"] = (first.examples[1], {0: "batch", 1: "source"})
        super().__init__(inputs)
        self.model = model
        self.n_states = sum(name.startswith("state") for name in given)
        self.notes = Notes()
        attention = model.decoder.cross_attention
        if maps and attention is not None:
            _watch(attention, self.notes)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        self.notes.pages = []
        model, last = self.model, LastState()
        table = model.token if model.target_token is None else model.target_token
        state = tuple(given[f"state_{i}"] for i in range(self.n_states))
        h = model.decoder.run_steps(table(given["tokens"]), state, self._view(given), given["real"], last)
        out = {"states": h} if model.head is None else {"logits": model.head(h, model.output_table)}
        return out | {f"next_state_{i}": part for i, part in enumerate(last.now)} | self.notes.named("cross_q")

    def _view(self, given: dict[str, Tensor]) -> MemoryView | None:
        if "memory_v" not in given:
            return None
        v = given["memory_v"]
        return MemoryView(given.get("memory_k", v), v, given["keep"])


def _watch(attention: Alignment, notes: Notes) -> None:
    """The decoder shows its looks, which are q as it is scored, to whoever records: here they are written down."""

    def record_attention(q: Tensor, contexts: Tensor, view: MemoryView, cache: object) -> None:
        notes.write(q, view.k)

    setattr(attention, "record_attention", record_attention)  # noqa: B010 - of this one object, the graph's own copy
