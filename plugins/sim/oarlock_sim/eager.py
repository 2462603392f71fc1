"""`sim-eager`: an accelerator with memory of its own, simulated operation by operation.

Owns: the device object over `tensor`'s torch device.
Reads: `oarlock.backend_api`, `tensor`.
Never: shares memory with the host as far as torch can tell.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device

from oarlock_sim import BLOCK_SIZES, DTYPES, KV_DTYPES, MEMORY_GIB, SWAP_BYTES
from oarlock_sim.counters import COUNT
from oarlock_sim.tensor import DEVICE_TYPE, MEMORY, SimMode, device_module

_active = threading.local()  # dispatch modes belong to a thread


class SimEagerDevice(Device):
    """Options: "sim_memory", the simulated size in GiB."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(DEVICE_TYPE, self.index)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            execution="eager",
            dtypes=DTYPES,
            kv_dtypes=KV_DTYPES,
            block_sizes=BLOCK_SIZES,
            collectives=("gloo",),
            default_swap_bytes=SWAP_BYTES,
        )

    def activate(self) -> None:
        MEMORY.total_bytes = int(self.options.get("sim_memory", MEMORY_GIB) * 2**30)
        device_module.set_device(self.index)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return _entered_once()

    def synchronise(self) -> None:
        COUNT["synchronise"] += 1

    def memory_info(self) -> tuple[int, int]:
        return MEMORY.total_bytes - MEMORY.used_bytes, MEMORY.total_bytes

    def verify(self) -> None:
        with self.context():
            super().verify()

    def describe(self) -> str:
        return f"simulated accelerator {self.torch_device}, {MEMORY.total_bytes >> 20} MiB, over CPU operators"


@contextlib.contextmanager
def _entered_once() -> Iterator[None]:
    """Enter the dispatch mode unless this thread is inside it: twice would count every operation twice."""
    if getattr(_active, "depth", 0):
        yield
        return
    _active.depth = 1
    try:
        with SimMode():
            yield
    finally:
        _active.depth = 0
