"""`TpuDevice`: the chips of one worker. Heavy: imports torch and jax, in a worker only.

Owns: the device object, where tensors are placed, and which shapes are compiled.
Reads: `oarlock.backend_api`, `host`, `vendor`.
Never: knows a model.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device, few_buckets

from oarlock_tpu import chips, host, plugin, vendor
from oarlock_tpu.vendor import jax, jnp

_CHUNK_TOKENS = (64, 512)


class TpuDevice(Device):
    """Options: "tpu_chips", "tpu_compile_cache"."""

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        super().__init__(index, options)
        self._simulated = host.is_simulated()

    @property
    def torch_device(self) -> torch.device:
        return vendor.DEVICE

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            execution="compiled",
            dynamic_shapes=False,
            dtypes=plugin.DTYPES,
            block_sizes=plugin.BLOCK_SIZES,
            host_is_device=self._simulated,
            kv_update="functional",
            default_swap_bytes=0 if self._simulated else 4 << 30,
        )

    def activate(self) -> None:
        """Raises RuntimeError where JAX finds no TPU, or fewer chips than were asked for."""
        cache = self.options.get("tpu_compile_cache")
        if cache:
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        wanted, platform = self.options.get("tpu_chips", 1), "cpu" if self._simulated else "tpu"
        try:
            found = jax.local_devices(backend=platform)
        except RuntimeError as error:
            raise RuntimeError(f"JAX finds no TPU: {error}. Another process may hold the chips; look at JAX_PLATFORMS and libtpu too") from error
        if wanted > len(found):
            raise RuntimeError(f"--tpu-chips {wanted}: JAX finds {len(found)} {platform} device{'s' if len(found) > 1 else ''}")
        self._chips = chips.Chips(tuple(found[:wanted]), interpret=self._simulated)
        chips.use(self._chips)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return vendor.Context()

    def synchronise(self) -> None:
        """Launches are in order on each chip: a last one ends last."""
        for chip in self._chips.devices:
            (jax.device_put(jnp.zeros(()), chip) + 1).block_until_ready()

    def seed(self, value: int) -> None:
        torch.manual_seed(value)
        vendor.seed(value)

    def memory_info(self) -> tuple[int, int]:
        if self._simulated:
            return host.memory()
        stats = [chip.memory_stats() for chip in self._chips.devices]
        total = sum(s["bytes_limit"] for s in stats)
        return total - sum(s["bytes_in_use"] for s in stats), total

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host if isinstance(host, vendor.Tensor) else self._put(host, self._chips.whole)

    def place(self, name: str, tensor: torch.Tensor, shard: Any) -> torch.Tensor:
        return self._put(tensor, self._chips.weight(name, tuple(tensor.shape), shard))

    def _put(self, tensor: torch.Tensor, sharding: Any) -> torch.Tensor:
        array = vendor.to_numpy(tensor)
        if self._simulated:
            array = array.copy()  # JAX's CPU may share the host's memory
        return vendor.wrap(jax.device_put(array, sharding))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return vendor.from_numpy(vendor.unwrap(tensor)) if isinstance(tensor, vendor.Tensor) else tensor

    def verify(self) -> None:
        got = float((vendor.jnp.arange(4, dtype=jnp.float32) * 2).sum())
        if got != 12.0:
            raise RuntimeError(f"{self.describe()} computed 2 * (0 + 1 + 2 + 3) = {got}")

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        """Few sizes: each combination is compiled at start. A decode reads all weights, however many rows it has, and padded rows read no
        cache: one size of them serves up to a few tens.
        """
        return few_buckets(max_num_seqs, max_num_batched_tokens, max_blocks, decode_rows=(plugin.FEW_SEQS,), chunk_tokens=_CHUNK_TOKENS)

    def describe(self) -> str:
        if self._simulated:
            return f"simulated on JAX {jax.__version__}'s CPU, no TPU"
        return f"{self._chips.devices[0].device_kind}, {self._chips.count} chip{'s' if self._chips.count > 1 else ''}, JAX {jax.__version__}"
