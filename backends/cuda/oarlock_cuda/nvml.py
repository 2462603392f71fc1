"""What the driver says of NVIDIA GPUs, through its management library by ctypes. Standard library only; some milliseconds.

Owns: the calls to NVML, and `Gpu`.
Reads: libnvidia-ml.so.1.
Never: imports torch; makes a CUDA context; leaves NVML initialised.

Return codes and names as in NVIDIA's nvml.h; each call is in every driver since R450.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Where the loader knows it; WSL; containers into which the driver is mounted.
LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1")
NOT_SUPPORTED, DRIVER_NOT_LOADED, VERSION_MISMATCH = 3, 9, 18
_TEXT = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE, NVML_DEVICE_UUID_V2_BUFFER_SIZE; a driver version takes 80


class NvmlError(Exception):
    """A call that failed. `code` is NVML's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one instance of a GPU that is cut into instances (MIG)."""

    name: str
    uuid: str  # "GPU-…" or "MIG-…"
    capability: tuple[int, int]  # compute capability, (9, 0)
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Board:
    """A GPU as the driver counts them, and what it is cut into."""

    gpu: Gpu
    is_cut: bool  # MIG mode is on: only its instances can be used
    instances: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class Driver:
    """What NVML says of this machine."""

    version: str  # "580.65.06"
    cuda: tuple[int, int]  # the newest CUDA that it serves
    boards: tuple[Board, ...]


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def load() -> Any | None:
    """The library; None where no driver brought it. Tests put another."""
    for name in LIBRARIES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


@contextlib.contextmanager
def _session(library: Any) -> Iterator[_Calls]:
    calls = _Calls(library)
    calls("nvmlInit_v2")
    try:
        yield calls
    finally:
        library.nvmlShutdown()


class _Calls:
    """Calls of one library by name; a code other than 0 is an NvmlError."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.nvmlErrorString.restype = ctypes.c_char_p

    def __call__(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise NvmlError(code, (self._library.nvmlErrorString(code) or b"").decode(errors="replace") or f"NVML error {code}")

    def text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self(name, *arguments, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode(errors="replace")

    def numbers(self, name: str, *arguments: Any, count: int = 1, kind: Any = ctypes.c_int) -> tuple[int, ...]:
        found = [kind() for _ in range(count)]
        self(name, *arguments, *map(ctypes.byref, found))
        return tuple(int(number.value) for number in found)

    def memory(self, handle: Any) -> int:
        found = _Memory()
        self("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(found))
        return int(found.total)


def ask(library: Any) -> Driver:
    """Everything, in one short session.

    Raises:
        NvmlError: the driver cannot answer; the code says why.
    """
    with _session(library) as calls:
        version = calls.text("nvmlSystemGetDriverVersion")
        (cuda,) = calls.numbers("nvmlSystemGetCudaDriverVersion_v2")
        (count,) = calls.numbers("nvmlDeviceGetCount_v2", kind=ctypes.c_uint)
        boards = [_board(calls, index) for index in range(count)]
    return Driver(version, (cuda // 1000, cuda % 1000 // 10), tuple(boards))


def _board(calls: _Calls, index: int) -> Board:
    handle = ctypes.c_void_p()
    calls("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    major, minor = calls.numbers("nvmlDeviceGetCudaComputeCapability", handle, count=2)
    name, uuid = (calls.text(f"nvmlDeviceGet{what}", handle) for what in ("Name", "UUID"))
    try:
        is_cut = calls.numbers("nvmlDeviceGetMigMode", handle, count=2, kind=ctypes.c_uint)[0] == 1
    except (NvmlError, AttributeError):
        is_cut = False  # NOT_SUPPORTED on most GPUs
    instances = tuple(_instances(calls, handle, (major, minor))) if is_cut else ()
    return Board(Gpu(name, uuid, (major, minor), calls.memory(handle)), is_cut, instances)


def _instances(calls: _Calls, handle: Any, capability: tuple[int, int]) -> Iterator[Gpu]:
    (most,) = calls.numbers("nvmlDeviceGetMaxMigDeviceCount", handle, kind=ctypes.c_uint)
    for index in range(most):
        instance = ctypes.c_void_p()
        try:
            calls("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index), ctypes.byref(instance))
        except NvmlError:
            continue  # no instance of this number
        yield Gpu(calls.text("nvmlDeviceGetName", instance), calls.text("nvmlDeviceGetUUID", instance), capability, calls.memory(instance))
