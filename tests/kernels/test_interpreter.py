"""Some of the kernels' tests at small shapes in Triton's interpreter, where there is no GPU but triton.

Triton decides when it is imported, so they run in a process of their own. ``make install`` puts triton, which torch's
CPU builds come without, into a directory of its own: there it changes nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

TRITON = Path(sys.prefix) / "share" / "triton"
HERE = Path(__file__).parent
FLASH = ("packed", "dense bias shared", "dropout")
OTHERS = ("xl padded", "additive padded", "capped t5")
MAPS = ("bigbird-t5",)
PRODUCTS = (
    "[40-20-layer-gelu_tanh-torch.float32-interpreted]",
    "_normalises_the_residual_too[rms-torch.float32-interpreted]",
    "_in_several_tiles[layer-torch.float32-interpreted]",
)
PARTS = (
    "attention[lines-4-4-nothing-torch.float32-interpreted]",
    "a_memory[tiles-torch.float32-interpreted]",
)
TILES = ("torch.float16-32-True", "torch.float32-16-False")
LOSSES = ("12-300-0.1-None-True-5", "7-129-0.0-2.0-True-None")  # rows, classes, smoothing, cap, bias, chunk


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' own tests run on the GPU")
@pytest.mark.skipif(not TRITON.exists() and find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_tritons_interpreter() -> None:
    tests = [f"{HERE / 'test_attention_kernels.py'}::test_in_float32[{name}]" for name in FLASH + OTHERS]
    tests.append(f"{HERE / 'test_attention_kernels.py'}::test_pairs_of_half_precision[xl memory]")
    tests.append(f"{HERE / 'test_attention_kernels.py'}::test_torch_compile_keeps_the_kernel[strided]")
    tests.append(f"{HERE / 'test_attention_kernels.py'}::test_tiles_fit_into_shared_memory[99]")
    tests.append(f"{HERE / 'test_attention_kernels.py'}::test_tiles_fit_into_shared_memory[163]")
    tests += [f"{HERE / 'test_map_kernels.py'}::test_every_reading_is_that_of_the_walk[{name}-40-40]" for name in MAPS]
    tiles = HERE / "test_xl_tiles.py"
    tests += [f"{tiles}::test_halves_are_joined_and_rows_rotated[{name}]" for name in TILES]
    loss = HERE / "test_token_loss.py"
    tests += [f"{loss}::test_it_is_plain_torch_within_twice_the_error_of_bf16[{name}]" for name in LOSSES]
    tests.append(f"{loss}::test_rows_without_a_target_have_no_gradient")
    tests.append(f"{loss}::test_with_fp8_the_gradient_of_hidden_is_a_product_in_eight_bits")
    rows = HERE / "test_scaled_rows.py"
    tests += [
        f"{rows}::test_{name}"
        for name in ("activated_rows[gelu_tanh]", "gradient_rows[gelu_tanh-True-True]", "joined_rows[widths1-True]")
    ]
    tests.append(f"{rows}::test_without_fp8_no_kernel_gets_a_tensor_in_e4m3")
    decoding = HERE.parent / "generation" / "test_cuda_graph.py"
    tests.append(f"{decoding}::test_the_tiles_of_wide_heads_fit_on_a_multiprocessor[256-interpreted]")
    tests.append(f"{decoding}::test_kernels_start_early_on_hopper_only[interpreted]")
    tests += [f"{decoding}::test_the_kernel_of_a_product{name}" for name in PRODUCTS]
    tests += [f"{decoding}::test_a_product_merges_the_parts_of_{name}" for name in PARTS]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TRITON)]))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(tests)} passed" in done.stdout
