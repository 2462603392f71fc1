"""The chip: its memory and the account of it, its shapes.

Owns: the account of the chip's memory; the shapes that it computes.
Reads: `oarlock.backend_api`.
Never: computes anything of a model.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oarlock_quern import BLOCK_SIZES, DTYPES, MEMORY_BYTES, SWAP_BYTES

DECODE_ROWS = 8
CHUNK_ROWS = 2
CHUNK_TOKENS = 64


CHIP = torch.device("cpu", 0)  # the host's tensors are on "cpu": the number says which memory a tensor is made in


class Account(TorchDispatchMode):
    """Counts the storages that lie in the chip's memory, from the operation that makes one until nobody holds it.

    Torch keeps no number of a CPU tensor's device, so the account itself knows which storages are the chip's: those made for
    `CHIP`, and what is computed from them. Host tensors (staging, the host tier of the cache) are not on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {storage._cdata for storage in _storages((args, kwargs))}
        where = kwargs.get("device")
        if where == CHIP or (where is None and given & self._held):
            for storage in _storages(out):
                if storage._cdata not in given:
                    self.take(storage)
        return out

    def take(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._held:
            return
        size = storage.nbytes()
        if self.used + size > MEMORY_BYTES:
            raise torch.OutOfMemoryError(f"Quern Q1: {size} bytes asked, {MEMORY_BYTES - self.used} of {MEMORY_BYTES} free")
        self.used += size
        self._held.add(storage._cdata)
        weakref.finalize(storage, self._free, storage._cdata, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.used -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]


class Quern(Device):
    """One Quern Q1, or rather its simulation: tensors of the CPU, counted as if they lay in the chip's 1 GiB."""

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        super().__init__(index, options)
        self._account = Account()

    @property
    def torch_device(self) -> torch.device:
        return CHIP

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            execution="compiled", dynamic_shapes=False, dtypes=DTYPES, block_sizes=BLOCK_SIZES, default_swap_bytes=SWAP_BYTES
        )

    def activate(self) -> None:
        """Nothing to take: the chip is this process."""

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return self._account

    def memory_info(self) -> tuple[int, int]:
        return MEMORY_BYTES - self._account.used, MEMORY_BYTES

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        tensor = host.clone(memory_format=torch.contiguous_format)
        self._account.take(tensor.untyped_storage())
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():  # a copy for the host is not on the chip's account
            return tensor.clone(memory_format=torch.contiguous_format)

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        decode, rows, tokens = min(DECODE_ROWS, max_num_seqs), min(CHUNK_ROWS, max_num_seqs), min(CHUNK_TOKENS, max_num_batched_tokens)
        return {
            "decode_rows": (decode,),
            "chunk_rows": (rows,),
            "chunk_tokens": (tokens,),
            "chunk_lens": (tokens,),
            "blocks": (max_blocks,),
            "out_rows": (decode + rows,),
        }

    def describe(self) -> str:
        return f"Quern Q1 (simulated), 1 GiB, torch {torch.__version__}"
