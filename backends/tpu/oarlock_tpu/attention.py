"""`TpuAttention`: a cache of merged heads, written by XLA and read by the Pallas kernel.

Owns: the layout of the cache, the metadata of a step.
Reads: `oarlock.backend_api`, `paged`, `vendor`.
Never: lets a null, stale or freed slot reach a result.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from oarlock.backend_api.runtime import Attention, AttentionParams

from oarlock_tpu import chips, paged
from oarlock_tpu.chips import AXIS, P
from oarlock_tpu.vendor import jax, jnp, to_jax, to_torch


@dataclass(frozen=True, slots=True)
class Region:
    """One region's rows. JAX arrays, made once a step."""

    base: Any  # [1] int32: added to every block id, for layers that share a tensor
    tables: Any  # [rows, blocks] int32
    seq_lens: Any  # [rows] int32
    first: Any  # [rows] int32: position of the row's first query
    max_q: int
    pad: Any | None  # [rows, max_q] int32: token of each (row, query); None when max_q is 1
    back: Any | None  # [tokens] int32: (row, query) of each token, flattened

    def shifted(self, blocks: Any) -> Region:
        """The same rows over blocks that begin at block `blocks` of the tensor."""
        return replace(self, base=self.base + blocks)


class TpuAttention(Attention):
    """Keys and values lie in [num_blocks, block_size, lanes]: all KV heads side by side, padded to whole groups of 128 lanes.

    Over several chips each has its own heads' lanes, and computes its own heads.
    """

    def __init__(self, block_size: int, dtype: torch.dtype, params: AttentionParams) -> None:
        super().__init__(block_size, dtype, params)
        self._chips = chips.active()

    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        shape = (num_blocks, self.block_size, self._shape(self.params).lanes * self._chips.count)
        return shape, shape

    def metadata(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int) -> Region:
        tables, lens, starts = to_jax((block_tables, seq_lens, query_start_loc))
        base = jnp.zeros((1,), jnp.int32)
        if max_q == 1:
            return Region(base, tables, lens, lens - 1, 1, None, None)
        start, end = starts[:-1], starts[1:]
        pad = jnp.minimum(start[:, None] + jnp.arange(max_q, dtype=jnp.int32), num_tokens - 1)
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.minimum((tokens[:, None] >= end).sum(1, dtype=jnp.int32), lens.shape[0] - 1)
        back = row * max_q + jnp.clip(tokens - start[row], 0, max_q - 1)
        return Region(base, tables, lens, lens - (end - start), max_q, pad, back)

    def write_kv(self, cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        write = self._over_chips(_write, (P(None, None, AXIS), P(None, AXIS), P()), P(None, None, AXIS))
        at = to_jax(slots)
        return tuple(to_torch(write(to_jax(tensor), to_jax(new), at)) for tensor, new in zip(cache, (key, value), strict=True))

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], metadata: Region, params: AttentionParams) -> torch.Tensor:
        q, keys, values = to_jax((query, *cache))
        m, lanes, heads = metadata, P(None, None, AXIS), P(None, None, AXIS)
        compute = self._over_chips(functools.partial(paged.attend, self._shape(params)), (heads, lanes, lanes, P(), P(), P(), P()), heads)
        padded = q[:, None] if m.pad is None else q[m.pad]
        out = compute(padded, keys, values, m.base, m.tables, m.seq_lens, m.first)
        flat = out.reshape(-1, *q.shape[1:])
        return to_torch(flat if m.back is None else flat[m.back])

    def _shape(self, p: AttentionParams) -> paged.Shape:
        """Of one chip."""
        heads, kv_heads = p.num_heads // self._chips.count, p.num_kv_heads // self._chips.count
        return paged.Shape(heads, kv_heads, p.head_dim, self.block_size, p.scale, p.window, p.softcap, self._chips.interpret)

    def _over_chips(self, function: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        """Each chip computes its part."""
        if self._chips.count == 1:
            return function
        return jax.shard_map(function, mesh=self._chips.mesh, in_specs=inputs, out_specs=output, check_vma=False)


def _write(cache: Any, new: Any, slots: Any) -> Any:
    merged = new.reshape(new.shape[0], -1).astype(cache.dtype)
    merged = jnp.pad(merged, ((0, 0), (0, cache.shape[2] - merged.shape[1])))
    return cache.reshape(-1, cache.shape[2]).at[slots].set(merged).reshape(cache.shape)
