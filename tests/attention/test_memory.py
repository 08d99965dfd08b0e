"""Nothing T × T is ever held: what a process really takes for a long text, counted by the system, not by us."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUP = """
import resource, torch
from regard.attention import AttentionMap, attend, masks
from regard.attention.biases import T5Bias

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def inputs(length):
    torch.manual_seed(0)
    return [torch.randn(1, 2, length, 64, requires_grad=True) for _ in range(3)]

bias = T5Bias(2, bidirectional=False)
q, k, v = inputs(256)
attend(q, k, v, mask=masks.causal(), bias=bias, backend="tiled").output.sum().backward()
AttentionMap(q, k, masks.causal(), bias).pooled(8, 8)
q, k, v = inputs(LENGTH)
before = peak_mib()
"""
TRAINING = "attend(q, k, v, mask=masks.causal(), bias=bias, backend='tiled').output.sum().backward()"
LOOKING = """
seen = AttentionMap(q, k, masks.causal(), bias)
seen.tile(slice(-256, None), slice(100, 356)), seen.pooled(64, 64), seen.head(0, 1).entropy()
"""


def growth_mib(length: int, work: str) -> float:
    """Peak resident growth of a fresh process, in MiB."""
    code = f"{SETUP.replace('LENGTH', str(length))}\n{work}\nprint(peak_mib() - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
def test_training_at_length_8192_with_a_trained_bias_takes_little() -> None:
    """Gradients included; each of the formula's matrices would take 512 MiB."""
    assert growth_mib(8_192, TRAINING) < 192


@pytest.mark.slow
def test_looking_at_length_8192_takes_little() -> None:
    assert growth_mib(8_192, LOOKING) < 128
