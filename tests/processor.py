"""What the processor under the tests can do."""

from pathlib import Path

import pytest

_INFO = Path("/proc/cpuinfo")
# Without these instructions oneDNN, ONNX Runtime and CTranslate2 multiply eight-bit integers with a bit less, or let
# sums of two products overflow: int8 is then rougher than what the tests hold it to, and certificates say so.
HAS_VNNI = not _INFO.exists() or any(name in _INFO.read_text() for name in ("avx512_vnni", "avx_vnni", "asimddp"))
needs_vnni = pytest.mark.skipif(not HAS_VNNI, reason="int8 products round on a processor without VNNI")
