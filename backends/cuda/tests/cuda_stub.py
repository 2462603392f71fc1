"""Stand-ins on the host: NVIDIA's management library with GPUs that a test describes, and torch.cuda over host tensors.

Owns: `FakeNvml`, `StubCuda`, putting both in place of the real ones.
Never: pretends to be hardware to anything but these tests.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oarlock.conformance.stand_in_graphs import StandInGraph

from oarlock_cuda import host, nvml, vendor
from oarlock_cuda.device import CudaDevice

MIB, GIB = 1 << 20, 1 << 30


@dataclass
class FakeGpu:
    """A GPU of `FakeNvml`; `parts`: memory of its MIG instances, None: not in that mode."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: int = 141 * GIB
    parts: list[int] | None = None
    knows_mig: bool = True


@dataclass
class FakeNvml:
    """The library as ctypes shows it: functions that fill what they are handed and return a code."""

    gpus: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    driver: str = "580.65.06"
    cuda: int = 13000
    init_code: int = 0
    is_open: bool = False

    def __post_init__(self) -> None:
        self.nvmlErrorString = lambda code: b"Unknown Error"  # an attribute, for ctypes' restype is set on it
        self.nvmlErrorString.restype = None  # type: ignore[attr-defined]

    def nvmlInit_v2(self) -> int:
        self.is_open = not self.init_code
        return self.init_code

    def nvmlShutdown(self) -> int:
        assert self.is_open, "shut down without being open"
        self.is_open = False
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = self.driver.encode()
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, out: Any) -> int:
        out._obj.value = self.cuda
        return 0

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        out._obj.value = 100 * (index.value + 1)
        return 0

    def _at(self, handle: Any) -> tuple[FakeGpu, int | None]:
        gpu, part = self.gpus[handle.value // 100 - 1], handle.value % 100
        return gpu, part - 1 if part else None

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        gpu, part = self._at(handle)
        buffer.value = (gpu.name if part is None else f"{gpu.name} MIG 1g").encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        number, part = handle.value // 100 - 1, self._at(handle)[1]
        buffer.value = (f"GPU-{number}" if part is None else f"MIG-{number}-{part}").encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        gpu, part = self._at(handle)
        out._obj.total = gpu.memory if part is None else (gpu.parts or [])[part]
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._at(handle)[0].capability
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        gpu = self._at(handle)[0]
        if not gpu.knows_mig:
            return nvml.NOT_SUPPORTED
        current._obj.value = pending._obj.value = int(gpu.parts is not None)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        out._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, out: Any) -> int:
        if index.value >= len(self._at(handle)[0].parts or []):
            return 6
        out._obj.value = handle.value + index.value + 1
        return 0


def machine(root: Path, monkeypatch: pytest.MonkeyPatch, library: Any | None, torch_built: tuple[str, tuple[int, int] | None] = ("2.13.0", (13, 0))) -> None:
    """An empty machine whose root is a folder, with this library or none, and a torch."""
    monkeypatch.setattr(host, "ROOT", root)
    monkeypatch.delenv(host.VISIBLE, raising=False)
    monkeypatch.setattr(nvml, "load", lambda: library)
    monkeypatch.setattr(host, "torch_cuda", lambda: torch_built)


def add_card(root: Path, vendor_id: str = "0x10de", kind: str = "0x030200") -> None:
    """A PCI function."""
    folder = root / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor_id), ("class", kind)):
        (folder / name).write_text(f"{text}\n")


def put_in_place(root: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> StubCuda:
    """A machine with one GPU, and the device over host tensors: what is copied to it counts as its memory."""
    made = StubCuda(capability=capability)
    machine(root, monkeypatch, FakeNvml([FakeGpu(capability=capability)]))
    monkeypatch.setattr(vendor, "TYPE", "cpu")
    monkeypatch.setattr(vendor, "is_built", lambda: True)
    monkeypatch.setattr(vendor, "module", lambda: made)
    for name in ("to_device", "place"):
        real = getattr(CudaDevice, name)
        monkeypatch.setattr(CudaDevice, name, lambda self, *args, real=real: made.own(real(self, *args)))
    monkeypatch.setattr(CudaDevice, "to_host", lambda self, tensor: tensor.clone())
    return made


class _NotedGraph(StandInGraph):
    """Replays are calls, too."""

    def __init__(self, stub: StubCuda) -> None:
        super().__init__()
        self._stub = stub

    def replay(self) -> None:
        self._stub._note("CUDAGraph.replay")
        super().replay()


class StubCuda:
    """What the backend uses of torch.cuda. `calls` lists (name, arguments, keyword arguments)."""

    def __init__(self, count: int = 1, total: int = 1024 * MIB, capability: tuple[int, int] = (9, 0)) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.count, self.total, self.capability, self.used, self.kept, self.peak, self.others = count, total, capability, 0, 0, 0, 0
        self.stream: object = "the default one"
        self.apart: set[tuple[int, int]] = set()  # GPUs of which the first cannot read the second's memory
        self.CUDAGraph = partial(_NotedGraph, self)

    def _note(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))

    def device_count(self) -> int:
        self._note("device_count")
        return self.count

    def set_device(self, device: Any) -> None:
        self._note("set_device", device)

    def synchronize(self, device: Any = None) -> None:
        self._note("synchronize", device)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self._note("mem_get_info", device)
        return self.total - self.used - self.kept - self.others, self.total

    def memory_reserved(self, device: Any = None) -> int:
        self._note("memory_reserved", device)
        return self.used + self.kept

    def memory_allocated(self, device: Any = None) -> int:
        self._note("memory_allocated", device)
        return self.used

    def max_memory_reserved(self, device: Any = None) -> int:
        self._note("max_memory_reserved", device)
        return self.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._note("reset_peak_memory_stats", device)
        self.peak = self.used + self.kept

    def empty_cache(self) -> None:
        self._note("empty_cache")
        self.kept = 0

    def get_device_properties(self, device: Any = None) -> Any:
        self._note("get_device_properties", device)
        major, minor = self.capability
        return SimpleNamespace(name="stub of an NVIDIA GPU", total_memory=self.total, major=major, minor=minor)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        self._note("get_device_capability", device)
        return self.capability

    def can_device_access_peer(self, device: int, peer_device: int) -> bool:
        return (device, peer_device) not in self.apart

    def get_arch_list(self) -> list[str]:
        self._note("get_arch_list")
        return ["sm_80", "sm_90"]

    def Event(self) -> Any:
        self._note("Event")
        return SimpleNamespace(record=lambda: self._note("Event.record"), synchronize=lambda: self._note("Event.synchronize"))

    def current_stream(self, device: Any = None) -> object:
        self._note("current_stream")
        return self.stream

    def set_stream(self, stream: object) -> None:
        self._note("set_stream", stream)
        self.stream = stream

    def graph_pool_handle(self) -> object:
        self._note("graph_pool_handle")
        return object()

    @contextlib.contextmanager
    def graph(self, cuda_graph: StandInGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        self._note("graph", cuda_graph, pool=pool, capture_error_mode=capture_error_mode)
        before, self.stream = self.stream, "of recordings"
        try:
            with cuda_graph.recording():
                yield
        except BaseException as error:
            raise RuntimeError("capture_end: the recording is invalid") from error  # as torch: the stream stays
        self.stream = before

    # ------------------------------------------------------------ memory of its own
    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that counts as the device's until it is freed."""
        made = tensor.clone(memory_format=torch.preserve_format)
        self._add(made.untyped_storage().nbytes())
        weakref.finalize(made, self._add, -made.untyped_storage().nbytes())
        return made

    def _add(self, size: int) -> None:
        self.used += size
        self.peak = max(self.peak, self.used + self.kept)
