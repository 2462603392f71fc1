"""Which collectives a rank gets: a plugin's where it can serve, torch.distributed's elsewhere and under --disable-custom-all-reduce."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from oarlock.backend_api import Capabilities, CommunicatorSpec, Support
from oarlock.errors import UnsupportedByBackend
from oarlock.runtime import worker as worker_module
from oarlock.runtime.worker import Worker

MADE: list[tuple[Any, ...]] = []


def custom(*made_with: Any) -> str:
    """What the plugin's class would be."""
    MADE.append(made_with)
    return "the plugin's"


def spec(*reasons: str) -> CommunicatorSpec:
    return CommunicatorSpec("direct", f"{__name__}:custom", priority=10, supports=lambda device: Support(not reasons, reasons))


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(worker_module, "DistributedCommunicator", lambda *made_with: made_with)
    device = SimpleNamespace(capabilities=Capabilities(collectives=("gloo",)), describe=lambda: "a toy")
    return SimpleNamespace(size=2, rank=0, rendezvous="file:///nowhere", device=device)


def test_a_plugins_serves_where_it_can(rank):
    assert Worker._communicator(rank, [spec()]) == "the plugin's" and MADE[-1] == (0, 2, "file:///nowhere")


def test_where_it_cannot_the_log_says_why_and_torchs_serves(rank, caplog):
    with caplog.at_level(logging.INFO, "oarlock"):
        assert Worker._communicator(rank, [spec("GPU 0 cannot read the memory of GPU 1")]) == (0, 2, "gloo", "file:///nowhere")
    assert "collectives: served by gloo, not by direct: GPU 0 cannot read the memory of GPU 1" in caplog.text


def test_left_out_torchs_serves(rank):
    assert Worker._communicator(rank, []) == (0, 2, "gloo", "file:///nowhere")


def test_without_any_more_than_one_rank_is_refused(rank):
    rank.device.capabilities = Capabilities()
    with pytest.raises(UnsupportedByBackend, match="--tensor-parallel-size 2: a toy declares no collectives"):
        Worker._communicator(rank, [])
