"""`CpuAttention`: paged attention by the compiled kernels, with a cache layout of its own.

Owns: the layout of the KV cache on this device.
Reads: `backend_api.runtime`, the loaded library.
Never: reads a slot outside a row's context.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from oarlock.backend_api.runtime import Attention, AttentionParams

from oarlock_cpu import native

if native.problem():
    raise ImportError(native.problem())

_write_kv = torch.ops.oarlock_cpu.write_kv.default
_attend = torch.ops.oarlock_cpu.attend.default


class Region(NamedTuple):
    """One region of a step, as the model runner gave it."""

    block_tables: torch.Tensor  # [num_rows, num_blocks] int32
    seq_lens: torch.Tensor  # [num_rows] int32
    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    max_q: int


class CpuAttention(Attention):
    """Keys lie with their tokens side by side, values with pairs of tokens interleaved, so that products run along vectors.

    A unit is 32 bits: one float32 or two bfloat16 (`pack`). The head size is rounded up to 16 with zeros. 8-bit floats lie as bfloat16 do.

        keys    [num_blocks, num_kv_heads, head_dim / pack, block_size, pack]
        values  [num_blocks, num_kv_heads, block_size / pack, head_dim, pack]

    A query's bits depend neither on the batch, nor on how its prompt was cut into chunks, nor on the number of threads.
    """

    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        pack = 1 if self.dtype.itemsize == 4 else 2
        heads, head_dim = self.params.num_kv_heads, -(-self.params.head_dim // 16) * 16
        keys = (num_blocks, heads, head_dim // pack, self.block_size, pack)
        return keys, (num_blocks, heads, self.block_size // pack, head_dim, pack)

    def metadata(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int) -> Region:
        return Region(block_tables, seq_lens.contiguous(), query_start_loc.contiguous(), max_q)

    def write_kv(self, cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _write_kv(cache[0], cache[1], key, value, slots)
        return cache

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], metadata: Region, params: AttentionParams) -> torch.Tensor:
        if params.alibi_slopes is not None:
            raise NotImplementedError("alibi_slopes: this attention has none")
        return _attend(query, cache[0], cache[1], *metadata, params.scale, params.window or 0, params.softcap or 0.0)

    def copy_blocks(self, cache: tuple[torch.Tensor, ...], source: torch.Tensor, destination: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for held in cache:
            tensor = held.view(torch.uint8) if held.dtype.itemsize == 1 else held  # torch copies no 8-bit floats by index
            tensor.index_copy_(0, destination.long(), tensor.index_select(0, source))
        return cache
