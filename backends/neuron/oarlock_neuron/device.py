"""`NeuronDevice`: one logical NeuronCore, or a simulation of it. Heavy: imports torch, in a worker only.

Owns: the device object and its padded shapes.
Reads: `oarlock.backend_api`, `vendor`, `host`.
Never: calls the vendor's packages itself (`vendor` does); lets a simulation pass for a device.
"""

from __future__ import annotations

from typing import Any

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device, few_buckets

from oarlock_neuron import host, plugin, vendor

_CHUNK_TOKENS = (128, 512)


class NeuronDevice(Device):
    """Options: "neuron_cache_dir", the folder of compiled programs."""

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        super().__init__(index, options)
        self._simulated = host.is_simulated()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self._simulated else vendor.device(self.index)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            execution="compiled",
            dynamic_shapes=False,
            dtypes=plugin.SIMULATED_DTYPES if self._simulated else plugin.DTYPES,
            block_sizes=plugin.BLOCK_SIZES,
            host_is_device=self._simulated,
            kv_update="functional",
            default_swap_bytes=0 if self._simulated else 4 << 30,
        )

    def activate(self) -> None:
        """Raises RuntimeError, with the remedy, where the vendor's packages or the driver cannot use the core."""
        if not self._simulated:
            vendor.require(self.index)
            vendor.activate(self.index)

    def synchronise(self) -> None:
        if not self._simulated:
            vendor.synchronise(self.index)

    def seed(self, value: int) -> None:
        torch.manual_seed(value)
        if not self._simulated:
            vendor.seed(value)

    def memory_info(self) -> tuple[int, int]:
        return (plugin.SIMULATED_BYTES, plugin.SIMULATED_BYTES) if self._simulated else vendor.memory(self.index)

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        """Few shapes: each is a program that takes minutes to compile. Two widths of context, because attention reads all of it."""
        return few_buckets(max_num_seqs, max_num_batched_tokens, max_blocks, chunk_tokens=_CHUNK_TOKENS)

    def describe(self) -> str:
        if self._simulated:
            return f"simulated on the host: a strict compiler in place of the vendor's, torch {torch.__version__}; no Neuron device"
        return vendor.describe(self.index)
