"""`CpuDevice`: the host's processor. Heavy: imports torch, in a worker only.

Owns: torch's thread count in this process.
Reads: `oarlock.backend_api`, `host`.
Never: knows a model; chooses an implementation (core does).
"""

from __future__ import annotations

from typing import Any

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device

from oarlock_cpu import host, native, plugin


class CpuDevice(Device):
    """The cpu. `options["threads"]` sets the compute threads; None or absent takes the allowed cores within the cgroup's quota.

    The `options["ranks"]` workers of one model divide them.
    """

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        super().__init__(index, options)
        self._processor = host.read_processor()
        threads = self.options.get("threads")
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads is {threads!r}; it must be a whole number of at least 1")
        self._threads = max(1, (threads or host.usable_threads()) // self.options.get("ranks", 1))

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        dtypes, fast = plugin.dtype_order(self._processor)
        return Capabilities(
            dtypes=dtypes,
            fast_dtypes=fast,
            # Without tiles, codes are multiplied in float32 whatever the dtype: nothing is rounded for nothing.
            gguf_dtype=None if native.problem() or native.isa() == "amx" else "float32",
            kv_dtypes=("auto", "fp8_e4m3", "fp8_e5m2"),
            block_sizes=plugin.BLOCK_SIZES,
            host_is_device=True,
            kv_update="in_place",
            collectives=("gloo",),
            # Every op whose sums depend on more than its own row's order is a kernel of ours: see csrc/kernels.h.
            batch_invariant=() if native.problem() else plugin.KERNEL_DTYPES,
            default_swap_bytes=0,
        )

    def activate(self) -> None:
        torch.set_num_threads(self._threads)

    def memory_info(self) -> tuple[int, int]:
        found = host.memory()
        if found is None:
            raise NotImplementedError
        return found

    def describe(self) -> str:
        problem = native.problem()
        served = problem or f"kernels {native.isa()}"
        return f"{self._processor.name}, {self._processor.isa}, {self._threads} thread{'s' if self._threads > 1 else ''}, torch {torch.__version__}, {served}"
