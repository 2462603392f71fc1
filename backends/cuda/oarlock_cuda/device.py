"""`CudaDevice`: one NVIDIA GPU. Heavy: imports torch, in a worker only.

Owns: the device object; how tensors travel between host and GPU.
Reads: `oarlock.backend_api`, `vendor`.
Never: calls torch.cuda itself (`vendor` does); knows a model; brings a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device, decode_buckets

from oarlock_cuda import plugin, vendor

PINNED_LIMIT = 32 << 20  # bytes: pinned memory is kept for its next use, and nothing as large as this is copied in every step


class CudaDevice(Device):
    """One GPU. Steps that only decode are captured; every other step runs as it is.

    Launching never waits: host inputs are copied into pinned memory and from there in the order of what was launched, results are read
    into pinned memory likewise, and a read waits for its own event alone.
    """

    @property
    def torch_device(self) -> torch.device:
        return vendor.device(self.index)

    @property
    def capabilities(self) -> Capabilities:
        chip = vendor.capability(self.index)
        dtypes = plugin.dtypes(chip)
        return Capabilities(
            execution="capture",
            dtypes=dtypes,
            fast_dtypes=tuple(name for name in dtypes if name != "float32"),
            kv_dtypes=plugin.kv_dtypes(chip),
            block_sizes=plugin.BLOCK_SIZES,
            pinned_memory=vendor.TYPE == "cuda",
            collectives=vendor.collectives(),
            triton=vendor.has_triton(),
        )

    def activate(self) -> None:
        """Raises RuntimeError, with the remedy, where torch or the driver cannot use the GPU."""
        vendor.require(self.index)
        vendor.activate(self.index)
        vendor.exact_sums()

    def synchronise(self) -> None:
        vendor.synchronise(self.index)

    def memory_info(self) -> tuple[int, int]:
        return vendor.memory(self.index)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        if host.nbytes > PINNED_LIMIT:
            return host.to(self.torch_device)
        return vendor.pinned(host).copy_(host).to(self.torch_device, non_blocking=True)

    def begin_read(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = vendor.pinned(tensor)
        host.copy_(tensor, non_blocking=True)
        wait = vendor.when_done()

        def result() -> torch.Tensor:
            wait()
            return host

        return result

    def place(self, name: str, tensor: torch.Tensor, shard: Literal["column", "row", "vocab", "expert", "none"]) -> torch.Tensor:
        """Weights are copied once, from where they lie: pinning gigabytes takes longer than it saves."""
        return tensor.to(self.torch_device)

    def verify(self) -> None:
        """Also a small product of matrices, so that libraries and kernels for this chip are there, and whether Triton can launch.

        Raises:
            RuntimeError: they are not, or the GPU computes nonsense.
        """
        super().verify()
        major, minor = vendor.capability(self.index)
        try:
            ones = torch.ones(16, 16, dtype=getattr(torch, plugin.dtypes((major, minor))[0]), device=self.torch_device)
            got = float(self.to_host((ones @ ones).float().sum()))
        except RuntimeError as error:
            raise RuntimeError(
                f"{vendor.describe(self.index)} multiplies no matrices: {error}. This torch has kernels for {', '.join(vendor.built_for())}; "
                f"if sm_{major}{minor} is not served by them, install another torch"
            ) from error
        if got != 16.0**3:
            raise RuntimeError(f"{self.torch_device} computed {got} as the sum of a product of ones, which is {16.0**3}")
        if vendor.has_triton() and plugin.has_kernels() and (problem := vendor.compile_problem()):
            raise RuntimeError(
                f"Triton cannot launch a kernel: {problem}. It needs a C compiler (gcc, or what CC names), Python's headers (python3-dev, as some "
                f"systems call them) and a folder to write to (TRITON_CACHE_DIR). Without kernels, plain torch serves: pip uninstall {plugin.KERNELS[0]}"
            )

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        return decode_buckets(max_num_seqs, max_blocks)

    def describe(self) -> str:
        return vendor.describe(self.index)
