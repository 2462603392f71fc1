"""Paged attention over the chip's layout: keys [blocks, heads, head_dim, block], values [blocks, heads, block, head_dim].

Owns: the layout of the KV cache.
Reads: `oarlock.backend_api.runtime`.
Never: lets a key or value that no query of a row may see reach a result; it may be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from oarlock.backend_api.runtime import Attention, AttentionParams

Cache = tuple[torch.Tensor, ...]
MASKED = -1e30  # finite: the softmax of a row that sees nothing is no NaN


class Step(NamedTuple):
    """Of one region: R rows, Q queries of each row, C = num_blocks * block_size keys of each."""

    blocks: torch.Tensor  # [R, num_blocks] int32
    seen: torch.Tensor  # [R, Q, C] bool
    alive: torch.Tensor  # [R, C] bool: a query of the row sees it
    spread: torch.Tensor | None  # [R, Q] int32: the token of each query; None: one each
    gather: torch.Tensor | None  # [num_tokens] int32: the query, of R * Q, of each token


class QuernAttention(Attention):
    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        heads, dim, block = self.params.num_kv_heads, self.params.head_dim, self.block_size
        return (num_blocks, heads, dim, block), (num_blocks, heads, block, dim)

    def metadata(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int
    ) -> Step:
        def upto(n: int) -> torch.Tensor:
            return torch.arange(n, dtype=torch.int32, device=seq_lens.device)

        first = query_start_loc[:-1]
        fresh = torch.ones_like(seq_lens) if max_q == 1 else query_start_loc[1:] - first
        queries = (seq_lens - fresh)[:, None] + upto(max_q)  # positions [R, Q]
        keys = upto(block_tables.shape[1] * self.block_size)
        seen = (keys <= queries[..., None]) & (keys < seq_lens[:, None, None])
        if self.params.window is not None:
            seen = seen & (keys > queries[..., None] - self.params.window)
        if max_q == 1:
            return Step(block_tables, seen, seen.any(1), None, None)
        tokens = upto(num_tokens)
        row = (tokens[:, None] >= query_start_loc[1:]).sum(1).clamp(max=len(seq_lens) - 1)
        gather = row * max_q + (tokens - first[row]).clamp(0, max_q - 1)
        spread = (first[:, None] + upto(max_q)).clamp(max=num_tokens - 1)
        return Step(block_tables, seen, seen.any(1), spread, gather.to(torch.int32))

    def write_kv(self, cache: Cache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> Cache:
        keys, values = cache
        block, offset = slots // self.block_size, slots % self.block_size
        keys[block, :, :, offset] = key.to(keys.dtype)
        values[block, :, offset] = value.to(values.dtype)
        return cache

    def attend(self, query: torch.Tensor, cache: Cache, metadata: Step, params: AttentionParams) -> torch.Tensor:
        blocks, seen, alive, spread, gather = metadata
        rows, queries, context = seen.shape
        heads, dim = params.num_kv_heads, params.head_dim
        keys = cache[0][blocks].permute(0, 2, 3, 1, 4).reshape(rows, heads, 1, dim, context).float()
        values = cache[1][blocks].permute(0, 2, 1, 3, 4).reshape(rows, heads, 1, context, dim).float()
        keys = keys.masked_fill(~alive[:, None, None, None], 0.0)
        values = values.masked_fill(~alive[:, None, None, :, None], 0.0)
        each = query if spread is None else query[spread]
        each = each.float().reshape(rows, queries, heads, -1, dim).permute(0, 2, 3, 1, 4)  # [R, kv heads, heads of each, Q, dim]
        scores = (each * params.scale) @ keys
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        out = scores.masked_fill(~seen[:, None, None], MASKED).softmax(-1) @ values
        out = out.permute(0, 3, 1, 2, 4).reshape(rows * queries, params.num_heads, dim)
        return (out if gather is None else out[gather]).to(query.dtype)

    def copy_blocks(self, cache: Cache, source: torch.Tensor, destination: torch.Tensor) -> Cache:
        for tensor in cache:
            tensor.index_copy_(0, destination.long(), tensor[source])
        return cache
