"""``regard`` with a simulated GPU: what a server takes beside the GPU, measured on a machine that has none.

Blocks of decode steps and passes over prompts take the time that they take an H200 with GPT-2 124M in bf16, during
which the host is free, and their results are meaningless. Everything else is the code that serves a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from regard.cli import run
from regard.generation import captured_reading, prompt_reading, slot_engine
from regard.generation.cuda_graph import BLOCK_STEPS
from regard.serving import scheduler, text_batches

N_TEXTS = scheduler._MAX_TEXTS["elsewhere"]
TOKENS_PER_SECOND = 98_487  # of ``generate`` with a batch of N_TEXTS
PROGRAM = ("-c", f"import runpy; runpy.run_path({__file__!r})['main']()")  # for start_server
BLOCK_SECONDS, PASS_SECONDS = N_TEXTS * BLOCK_STEPS / TOKENS_PER_SECOND, 1.5e-3


class Device:
    """Does what it is given one after the other."""

    idle_from = 0.0

    def start(self, seconds: float, result: Callable[[], Any]) -> Callable[[], Any]:
        """Start work that takes ``seconds``; returns a function that waits for its end."""
        self.idle_from = end = max(self.idle_from, time.monotonic()) + seconds

        def wait() -> Any:
            time.sleep(max(0.0, end - time.monotonic()))
            return result()

        return wait


DEVICE = Device()


class SimulatedSlots(slot_engine.GraphSlots):
    def _capture(self) -> None:
        self._greedy_steps = self._mixed_steps = lambda: None
        self._inverse = torch.zeros(self._decoder.shape.rows)
        state, vocab = self._decoder.state, self.model.config.vocab_size
        state.history.random_(vocab // 2, vocab)
        state.log_probs.fill_(-1.0)

    def start_block(self, draws: Any) -> slot_engine.TokenBlock | None:
        block = super().start_block(draws)
        return None if block is None else block._replace(read=DEVICE.start(BLOCK_SECONDS, block.read))


class SimulatedReading(captured_reading.CapturedReading):
    @cached_property
    def _logits(self) -> torch.Tensor:
        return torch.zeros(captured_reading.N_TEXTS, len(self._decoder.table.weight))

    def _compute(self) -> torch.Tensor:
        return self._logits

    def start(self, prompts: Any, sources: Any) -> Callable[[], Any]:
        return DEVICE.start(PASS_SECONDS, super().start(prompts, sources))


def main() -> None:
    """``regard`` with the arguments of this process, which the simulation changes for good."""
    torch.set_num_threads(1)
    for limits in (scheduler._MAX_ROWS, scheduler._MAX_TEXTS, scheduler._PROMPT_TOKENS):
        limits["cpu"] = limits["elsewhere"]
    text_batches.can_capture_slots = prompt_reading.can_capture = lambda model: True
    text_batches.open_slots = SimulatedSlots
    prompt_reading.CapturedReading = SimulatedReading
    run()
