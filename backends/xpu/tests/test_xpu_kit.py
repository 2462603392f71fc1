"""The kit over the stand-in: the package keeps the contract, and captured programs give the reference's answers. Not hardware.

Levels 0 and 1 whole; of the others a few cases, for each program is recorded and replayed operation by operation here.
"""

from __future__ import annotations

import pytest
from oarlock.conformance import kit
from oarlock.plugins import select_device

SOME = {"3": r"float32,.*dim=64\b", "4": r"float32,dense,(greedy|swapped|copied|programs)"}


@pytest.mark.parametrize("levels", ["0-1", *SOME])
def test_levels(stub, levels):
    report = kit.run(select_device("xpu"), kit.Choice(kit.parse_levels(levels), pattern=SOME.get(levels, "")))
    bad = [(r.id, r.detail) for r in report.results if r.status in ("fail", "error", "xpass", "timeout")]
    assert not bad and sum(r.status == "pass" for r in report.results) >= (20 if levels == "0-1" else 2)
