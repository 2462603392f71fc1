"""Collectives between simulated devices: torch.distributed over the host, counted.

Owns: the keys "all_reduce", "all_gather" and "broadcast" of the counts.
Reads: `oarlock.backend_api`, `counters`.
Never: computes otherwise than core's own.
"""

from __future__ import annotations

import torch
from oarlock.backend_api.runtime import DistributedCommunicator

from oarlock_sim.counters import COUNT


class CountingCommunicator(DistributedCommunicator):
    """Core's, over gloo."""

    def __init__(self, rank: int, size: int, init_method: str) -> None:
        super().__init__(rank, size, "gloo", init_method)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        COUNT["all_reduce"] += 1
        return super().all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        COUNT["all_gather"] += 1
        return super().all_gather(tensor)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        COUNT["broadcast"] += 1
        return super().broadcast(tensor)
