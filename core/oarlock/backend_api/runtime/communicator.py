"""`Communicator`: collectives between the ranks of one model.

Owns: the protocol, the identity (one rank) and torch.distributed's.
Reads: nothing else of ours.
Never: chooses a backend by device name (capabilities name the collectives).
"""

from __future__ import annotations

import abc
import gc
import importlib
from typing import ClassVar

import torch

from oarlock.backend_api.runtime.device import CheckedOverrides


class Communicator(CheckedOverrides, abc.ABC):
    """One instance per worker."""

    _extension_base: ClassVar[bool] = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; may reuse `tensor`."""

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's tensor along the last dimension, in rank order."""

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on every rank; may reuse `tensor`."""

    def close(self) -> None:
        """Leave the group."""


class IdentityCommunicator(Communicator):
    """One rank: nothing to do."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class DistributedCommunicator(Communicator):
    """torch.distributed over the backend that the device declares."""

    def __init__(self, rank: int, size: int, backend: str, init_method: str) -> None:
        super().__init__(rank, size)
        # Defaults of its functions keep whichever group lives when it is first imported: none yet.
        importlib.import_module("torch.distributed.nn.functional")
        torch.distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.broadcast(tensor, src=0)
        return tensor

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
            # torch leaves the group in a reference cycle. Its threads live until that is collected, and one that
            # drops the last reference to a tensor while the interpreter ends aborts the process.
            gc.collect()
