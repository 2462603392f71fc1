"""The kit over the strict compiler: the package keeps the contract, and exported programs give the reference's answers. Not hardware.

Levels 0 and 1 whole, and a few cases of attention; the rest exports hundreds of programs: `make test-full`. That compiled programs of a
whole model serve is shown by tests/e2e/test_chip_backends.py.
"""

from __future__ import annotations

import pytest
from oarlock.conformance import kit
from oarlock.plugins import select_device


@pytest.mark.parametrize(
    ("levels", "pattern", "least"),
    [
        ("0-1", "", 20),
        ("3", r"float32,.*dim=64\b", 4),
        pytest.param("2-3", "", 100, marks=pytest.mark.full),
        pytest.param("4", r"float32,dense", 10, marks=pytest.mark.full),
    ],
)
def test_levels(simulated, levels, pattern, least):
    report = kit.run(select_device("neuron"), kit.Choice(kit.parse_levels(levels), pattern=pattern))
    bad = [(r.id, r.detail) for r in report.results if r.status in ("fail", "error", "xpass", "timeout")]
    assert not bad and sum(r.status == "pass" for r in report.results) >= least
