"""A process that a test starts and that never outlives it: subprocess.Popen's own ``with`` waits for its end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def child_process(words: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(words, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()
