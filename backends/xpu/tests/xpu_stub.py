"""A stand-in for torch.xpu on host tensors: counts memory, records and replays command graphs, refuses what cannot be recorded.

Owns: `StubXpu`, with the calls it was given; a machine with cards in a folder; putting both in place of the real ones.
Never: pretends to be hardware to anything but these tests.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oarlock.conformance.stand_in_graphs import StandInGraph

from oarlock_xpu import host, vendor
from oarlock_xpu.device import XpuDevice

MIB = 1 << 20


class Machine:
    """An otherwise empty machine whose root is a folder; calling it adds a PCI function and returns its folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._numbers = root, count(128)
        monkeypatch.setattr(host, "ROOT", root)

    def __call__(self, device_id: str = "0x56a0", vendor_id: str = "0x8086", kind: str = "0x030000", driver: str = "xe", node: bool = True) -> Path:
        number = next(self._numbers)
        folder = self._root / f"sys/bus/pci/devices/0000:{number - 125:02x}:00.0"
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor_id), ("device", device_id), ("class", kind)):
            (folder / name).write_text(f"{text}\n")
        if driver:
            (self._root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(self._root / "drivers" / driver)
            (folder / f"drm/renderD{number}").mkdir(parents=True)
        if node:
            (self._root / "dev/dri").mkdir(parents=True, exist_ok=True)
            (self._root / f"dev/dri/renderD{number}").touch()
        return folder


def put_in_place(root: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool = True) -> StubXpu:
    """A machine with one card, and the device over host tensors: copies count as the card's memory."""
    made = StubXpu(graphs=graphs)
    Machine(root, monkeypatch)()
    monkeypatch.setattr(host, "torch_problem", lambda: "")
    monkeypatch.setattr(vendor, "TYPE", "cpu")
    monkeypatch.setattr(vendor, "is_built", lambda: True)
    monkeypatch.setattr(vendor, "module", lambda: made)
    monkeypatch.setattr(XpuDevice, "to_device", lambda self, tensor: made.upload(tensor))
    monkeypatch.setattr(XpuDevice, "to_host", lambda self, tensor: tensor.clone())
    return made


class StubXpu:
    """What the backend uses of torch.xpu. `calls` lists (name, arguments, keyword arguments)."""

    def __init__(self, count: int = 1, total: int = 1024 * MIB, graphs: bool = True) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.count, self.total, self.used = count, total, 0
        self.free_fails = self.free_is_stuck = False
        if graphs:
            self.XPUGraph, self.graph, self.graph_pool_handle = StandInGraph, self._graph, self._pool

    def _note(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))

    def device_count(self) -> int:
        self._note("device_count")
        return self.count

    def is_available(self) -> bool:
        self._note("is_available")
        return self.count > 0

    def set_device(self, device: Any) -> None:
        self._note("set_device", device)

    def synchronize(self, device: Any = None) -> None:
        self._note("synchronize", device)

    def manual_seed(self, seed: int) -> None:
        self._note("manual_seed", seed)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self._note("mem_get_info", device)
        if self.free_fails:
            raise RuntimeError("The device doesn't support querying the available free memory.")
        return self.total - (0 if self.free_is_stuck else self.used), self.total

    def memory_reserved(self, device: Any = None) -> int:
        self._note("memory_reserved", device)
        return self.used

    def get_device_properties(self, device: Any = None) -> Any:
        self._note("get_device_properties", device)
        return SimpleNamespace(name="stub of an Intel GPU", total_memory=self.total, driver_version="0")

    def _pool(self) -> object:
        self._note("graph_pool_handle")
        return object()

    @contextlib.contextmanager
    def _graph(self, xpu_graph: StandInGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
        self._note("graph", xpu_graph, pool=pool)
        with xpu_graph.recording():
            yield

    # ------------------------------------------------------------ memory of its own
    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy that counts as the device's until it is freed."""
        made = host.clone(memory_format=torch.preserve_format)
        self._add(made.untyped_storage().nbytes())
        weakref.finalize(made, self._add, -made.untyped_storage().nbytes())
        return made

    def _add(self, size: int) -> None:
        self.used += size
