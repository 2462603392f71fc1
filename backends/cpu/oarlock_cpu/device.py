"""`CpuDevice`: the host's processor. Heavy: imports torch, in a worker only.

Owns: torch's thread count in this process, and the processors that the computing thread and its team keep to.
Reads: `oarlock.backend_api`, `host`.
Never: knows a model; chooses an implementation (core does).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device

from oarlock_cpu import host, native, plugin


class CpuDevice(Device):
    """The cpu. `options["threads"]` sets the compute threads; None or absent takes the allowed cores within the cgroup's quota.

    The `options["ranks"]` workers of one model divide them, and each keeps to one socket where that serves (`host.placement`).
    """

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        super().__init__(index, options)
        self._processor = host.read_processor()
        threads = self.options.get("threads")
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads is {threads!r}; it must be a whole number of at least 1")
        self._placement = host.placement(index, self.options.get("ranks", 1), threads)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        dtypes, fast = plugin.dtype_order(self._processor)
        return Capabilities(
            dtypes=dtypes,
            fast_dtypes=fast,
            # With neither tiles nor binary16, codes are multiplied in float32 whatever the dtype: nothing is rounded for nothing.
            gguf_dtype=None if native.problem() or native.isa() in ("amx", "avx512_fp16", "avx512_vnni") else "float32",
            kv_dtypes=plugin.KV_DTYPES,
            block_sizes=plugin.BLOCK_SIZES,
            host_is_device=True,
            kv_update="in_place",
            collectives=("gloo",),
            # Every op whose sums depend on more than its own row's order is a kernel of ours: see csrc/kernels.h.
            batch_invariant=() if native.problem() else plugin.KERNEL_DTYPES,
            default_swap_bytes=0,
        )

    def activate(self) -> None:
        torch.set_num_threads(self._placement.threads)
        if self._placement.cpus is not None:
            with contextlib.suppress(OSError):  # where it is forbidden, the system puts them
                os.sched_setaffinity(0, self._placement.cpus)  # of this thread and those that it will start: not of a user's other threads

    def memory_info(self) -> tuple[int, int]:
        found = host.memory()
        if found is None:
            raise NotImplementedError
        return found

    def describe(self) -> str:
        served = native.problem() or f"kernels {native.isa()}"
        return f"{self._processor.name}, {self._processor.isa}, {self._placement}, torch {torch.__version__}, {served}"
