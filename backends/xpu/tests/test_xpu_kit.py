"""The kit's quick cases over the stand-in: they show that this package keeps the contract and that capture and replay serve. Not hardware."""

from __future__ import annotations

import pytest
from oarlock.conformance import kit
from oarlock.plugins import select_device


@pytest.mark.parametrize("levels", ["0-1", "2", "3", "4"])
def test_levels(stub, levels):
    report = kit.run(select_device("xpu"), kit.Choice(kit.parse_levels(levels)))
    bad = [(r.id, r.detail) for r in report.results if r.status in ("fail", "error", "xpass")]
    assert not bad and sum(r.status == "pass" for r in report.results) >= 10
