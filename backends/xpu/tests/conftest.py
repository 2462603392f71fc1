"""Fixtures of the xpu tests: a machine with a card in a folder, and a stand-in for torch.xpu."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oarlock_xpu import host, vendor

sys.path.insert(0, str(Path(__file__).parent))  # `import xpu_stub`

from xpu_stub import StubXpu


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`machine(device_id, …)` adds a PCI function to an otherwise empty machine, and returns its folder."""
    monkeypatch.setattr(host, "ROOT", tmp_path)
    count = iter(range(128, 160))

    def add(device_id: str = "0x56a0", vendor_id: str = "0x8086", kind: str = "0x030000", driver: str = "xe", node: bool = True) -> Path:
        number = next(count)
        folder = tmp_path / f"sys/bus/pci/devices/0000:{number - 125:02x}:00.0"
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor_id), ("device", device_id), ("class", kind)):
            (folder / name).write_text(f"{text}\n")
        if driver:
            (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(tmp_path / "drivers" / driver)
            (folder / f"drm/renderD{number}").mkdir(parents=True)
        if node:
            (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
            (tmp_path / f"dev/dri/renderD{number}").touch()
        return folder

    return add


@pytest.fixture
def stub(machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> StubXpu:
    """The device over host tensors: torch.xpu is a stand-in, and copies count as the card's memory."""
    from oarlock_xpu.device import XpuDevice

    made = StubXpu()
    machine()
    monkeypatch.setattr(host, "torch_problem", lambda: "")
    monkeypatch.setattr(vendor, "TYPE", "cpu")
    monkeypatch.setattr(vendor, "is_built", lambda: True)
    monkeypatch.setattr(vendor, "module", lambda: made)
    monkeypatch.setattr(XpuDevice, "to_device", lambda self, tensor: made.upload(tensor))
    monkeypatch.setattr(XpuDevice, "to_host", lambda self, tensor: tensor.clone())
    return made
