"""The faults of tests/faults.py can still be planted; planting them takes long and is `make faults`."""

from __future__ import annotations

from faults import FAULTS, unplantable


def test_every_fault_finds_its_place_in_the_sources() -> None:
    assert unplantable() == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
