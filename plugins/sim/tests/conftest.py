"""Fixtures of the simulated devices' tests."""

from __future__ import annotations

from collections.abc import Iterator

import oarlock_sim
import pytest
import torch
from oarlock_sim import counters


@pytest.fixture
def sim() -> Iterator[torch.device]:
    """The activated sim-eager device inside its context, with counters at zero."""
    probe = oarlock_sim.probe(needs_hook=True)
    if probe.status != "available":
        pytest.skip(f"sim-eager: {probe.reason}")
    from oarlock_sim.eager import SimEagerDevice

    device = SimEagerDevice()
    device.activate()
    with torch.no_grad(), device.context():
        counters.reset()
        yield device.torch_device
