"""Fixtures of the neuron tests: a machine with chips in a folder, and the simulation with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oarlock_neuron import host


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(device_id, nodes)` adds a chip to an otherwise empty machine."""
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.delenv(host.SIMULATE, raising=False)
    (tmp_path / "dev").mkdir()

    def add(device_id: str = "0x7364", nodes: int = 1, vendor_id: str = "0x1d0f") -> None:
        folder = tmp_path / "sys/bus/pci/devices/0000:33:00.0"
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor_id), ("device", device_id), ("class", "0x088000")):
            (folder / name).write_text(f"{text}\n")
        for number in range(nodes):
            (tmp_path / f"dev/neuron{number}").touch()

    return add


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The strict compiler in place of a device; programs are kept in a folder of the test's."""
    monkeypatch.setenv(host.SIMULATE, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/oarlock/neuron"
