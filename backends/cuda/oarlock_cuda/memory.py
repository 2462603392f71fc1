"""The GPU's memory, as core's plan looks at it while the largest steps run.

Owns: nothing.
Reads: `oarlock.backend_api`, `vendor`.
Never: names a torch.cuda call (`vendor` does).
"""

from __future__ import annotations

from oarlock.backend_api.runtime import MemoryProfiler

from oarlock_cuda import vendor


class CudaMemoryProfiler(MemoryProfiler):
    """The peak is of what torch's allocator took from the driver, not of what it handed out: pieces that do not fit together count."""

    def taken(self) -> int:
        return vendor.taken(self.device.index)

    def restart(self) -> None:
        vendor.restart_peak(self.device.index)

    def peak(self) -> int:
        return vendor.peak_reserved(self.device.index)

    def release(self) -> None:
        vendor.release()
