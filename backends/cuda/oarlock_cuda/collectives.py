"""`SymmetricCommunicator`: NCCL, and small all-reduces in one launch through memory that every GPU reads directly.

Owns: the shared buffer; which all-reduce takes which way.
Reads: `oarlock.backend_api`, `vendor`.
Never: names a torch.cuda or torch.distributed call of its own (`vendor` and core do); serves where a peer cannot be read.

    one shot    every rank reads all of every rank's numbers and adds them up: least waiting, most traffic
    two shots   every rank adds up its part, then reads the others' sums: for what is larger
    NCCL        the rest: prompts, float16, odd sizes, all_gather and broadcast

All three are launches like any other, so a graph may hold them. The buffer is written again by the next all-reduce: torch's kernels end
when every rank has read what it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from oarlock.backend_api import Support
from oarlock.backend_api.runtime import DistributedCommunicator

from oarlock_cuda import vendor

BUFFER_BYTES = 8 << 20  # two shots up to here
# One shot below these sizes, by the number of ranks; 2 ranks read no more by it than by two shots. Sizes as vLLM's custom all-reduce has them.
ONE_SHOT_BYTES = {2: BUFFER_BYTES, 4: 512 << 10, 8: 256 << 10}
DTYPES = (torch.bfloat16, torch.float32)  # of torch's kernels
ALIGNED = 16  # bytes


def supports(device: Any) -> Support:
    """Whether the ranks of `device` can read each other's memory; asked before any of them has met another."""
    ranks, reasons = device.options.get("ranks", 1), []
    if ranks not in ONE_SHOT_BYTES:
        reasons.append(f"it serves {', '.join(map(str, ONE_SHOT_BYTES))} ranks, not {ranks}")
    elif problem := vendor.symmetric_problem(ranks):
        reasons.append(problem)
    return Support(not reasons, tuple(reasons))


class SymmetricCommunicator(DistributedCommunicator):
    """Made with (rank, size, init_method) after the device was activated: rank r is GPU r."""

    def __init__(self, rank: int, size: int, init_method: str) -> None:
        super().__init__(rank, size, vendor.BACKEND, init_method)
        self._buffer: torch.Tensor | None = vendor.symmetric_buffer(BUFFER_BYTES, vendor.device(rank))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.nbytes
        if self._buffer is None or tensor.dtype not in DTYPES or not 0 < size <= BUFFER_BYTES or size % (ALIGNED * self.size):
            return super().all_reduce(tensor)
        shared = self._buffer[:size].view(tensor.dtype).view(tensor.shape)
        if size <= ONE_SHOT_BYTES[self.size]:
            given = tensor.contiguous()
            return vendor.one_shot(shared, given if given.data_ptr() % ALIGNED == 0 else given.clone())
        shared.copy_(tensor)
        return vendor.two_shots(shared)

    def close(self) -> None:
        self._buffer = None
        super().close()
