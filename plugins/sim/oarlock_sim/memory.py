"""The simulated accelerator's memory, as core's plan looks at it while the largest steps run.

Owns: nothing.
Reads: `tensor`'s account.
Never: counts anything itself.
"""

from __future__ import annotations

from oarlock.backend_api.runtime import MemoryProfiler

from oarlock_sim.tensor import MEMORY


class SimMemoryProfiler(MemoryProfiler):
    """There is no cache of freed memory, and nobody else."""

    def taken(self) -> int:
        return MEMORY.used_bytes

    def restart(self) -> None:
        MEMORY.peak_bytes = MEMORY.used_bytes

    def peak(self) -> int:
        return MEMORY.peak_bytes
