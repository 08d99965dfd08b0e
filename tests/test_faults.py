"""Faults and weaknesses can still be planted; planting them takes long and is `make faults`, `make weaknesses`."""

from __future__ import annotations

from faults import FAULTS, ROOT, unplantable
from trust.weaknesses import WEAKNESSES


def test_every_fault_finds_its_place_in_the_sources() -> None:
    assert unplantable() == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
    assert unplantable(WEAKNESSES) == []
    assert len({fault.name for fault in WEAKNESSES}) == len(WEAKNESSES) >= 20


def test_the_tests_of_every_fault_are_there() -> None:
    missing = [name for fault in (*FAULTS, *WEAKNESSES) for name in fault.tests.split() if not (ROOT / name).exists()]
    assert not missing
