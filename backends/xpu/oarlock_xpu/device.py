"""`XpuDevice`: one Intel GPU. Heavy: imports torch, in a worker only.

Owns: the device object, and which shapes are captured.
Reads: `oarlock.backend_api`, `vendor`.
Never: calls torch.xpu itself (`vendor` does); knows a model.
"""

from __future__ import annotations

import functools
import logging

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device, decode_buckets

from oarlock_xpu import plugin, vendor

log = logging.getLogger("oarlock.xpu")


class XpuDevice(Device):
    """One card. Captures steps that only decode where that works; every other step runs as it is."""

    @property
    def torch_device(self) -> torch.device:
        return vendor.device(self.index)

    @functools.cached_property
    def _graph_problem(self) -> str:
        problem = vendor.graph_problem(self.index)
        if problem:
            log.warning("%s: programs run one operation at a time, for %s", self.torch_device, problem)
        return problem

    @functools.cached_property
    def _capabilities(self) -> Capabilities:
        return Capabilities(
            execution="eager" if self._graph_problem else "capture",
            dtypes=plugin.DTYPES,
            block_sizes=plugin.BLOCK_SIZES,
            pinned_memory=vendor.can_pin(),
            collectives=vendor.collectives(),
            triton=vendor.has_triton(),
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def activate(self) -> None:
        """Raises RuntimeError, with the remedy, where torch or the driver cannot use the card."""
        vendor.require(self.index)
        vendor.activate(self.index)

    def synchronise(self) -> None:
        vendor.synchronise(self.index)

    def seed(self, value: int) -> None:
        torch.manual_seed(value)
        vendor.seed(value)

    def memory_info(self) -> tuple[int, int]:
        try:
            return vendor.memory(self.index)
        except NotImplementedError as error:
            log.warning("%s cannot tell its free memory: %s", self.torch_device, error)
            raise

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        return {} if self._graph_problem else decode_buckets(max_num_seqs, max_blocks)

    def describe(self) -> str:
        return f"{vendor.describe(self.index)}, {'decodes captured' if not self._graph_problem else f'eager: {self._graph_problem}'}"
