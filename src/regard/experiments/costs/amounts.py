"""A quantity and the parts it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Amount:
    """``float(amount)`` is the sum, ``amount.parts`` what it is the sum of, ``amount["decoder"]`` those of one name."""

    parts: Mapping[str, float]
    unit: str = "bytes"

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __float__(self) -> float:
        return float(self.total)

    def __int__(self) -> int:
        return int(self.total)

    def __getitem__(self, name: str) -> float:
        """Of the parts that are called this, or begin with it."""
        found = [value for part, value in self.parts.items() if part == name or part.startswith(f"{name} ")]
        if not found:
            raise KeyError(name)
        return sum(found)

    def document(self) -> dict[str, object]:
        return {"total": self.total, "unit": self.unit, "parts": dict(self.parts)}


def bytes_text(n: float) -> str:
    """1536 → 1.50 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def count_text(n: float) -> str:
    """124439808 → 124.4 M."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n:.4g}"


def time_text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
