"""`TritonAttention`: the paged attention of this package, as core calls it.

Owns: the layout of the KV cache; which kernel serves which region.
Reads: `oarlock.backend_api.runtime`, the kernels.
Never: computes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from oarlock.backend_api.runtime import Attention, AttentionParams, HeadSteps, Ops

from oarlock_triton_kernels.attention_chunks import attend_chunks
from oarlock_triton_kernels.attention_decode import DecodePlan, attend_decodes, plan_decodes
from oarlock_triton_kernels.cache import as_stored, write_kv
from oarlock_triton_kernels.qkv import write_qkv


class Chunks(NamedTuple):
    """A region whose rows bring any number of tokens."""

    block_tables: torch.Tensor  # [num_rows, num_blocks] int32
    seq_lens: torch.Tensor  # [num_rows] int32
    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    max_q: int


class TritonAttention(Attention):
    """Keys and values lie as [num_blocks, num_kv_heads, block_size, head_dim] each, so that a head's part of a block is one piece.

    A step of decodes is planned once for all layers (`plan_decodes`); chunks need no plan.
    """

    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        shape = (num_blocks, self.params.num_kv_heads, self.block_size, self.params.head_dim)
        return shape, shape

    def metadata(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int
    ) -> DecodePlan | Chunks:
        if max_q == 1:
            return plan_decodes(block_tables, seq_lens, self.block_size, self.params.head_dim, self.dtype, self.params.window)
        return Chunks(block_tables, seq_lens, query_start_loc, max_q)

    def write_kv(self, cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        write_kv(cache, key, value, slots)
        return cache

    def write_qkv(
        self, ops: Ops, qkv: torch.Tensor, cache: tuple[torch.Tensor, ...], slots: torch.Tensor, params: AttentionParams, steps: HeadSteps
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        if steps.table is None:
            return super().write_qkv(ops, qkv, cache, slots, params, steps)
        return write_qkv(qkv, cache, slots, params.num_heads, steps), cache

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], metadata: DecodePlan | Chunks, params: AttentionParams) -> torch.Tensor:
        features = {"window": params.window, "softcap": params.softcap, "slopes": params.alibi_slopes}
        if isinstance(metadata, DecodePlan):
            return attend_decodes(query, cache, metadata, params.scale, **features)
        return attend_chunks(query, cache, *metadata, params.scale, **features)

    def copy_blocks(self, cache: tuple[torch.Tensor, ...], source: torch.Tensor, destination: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for held in cache:
            tensor = as_stored(held)  # torch copies no 8-bit floats by index
            tensor.index_copy_(0, destination.long(), tensor.index_select(0, source))
        return cache
