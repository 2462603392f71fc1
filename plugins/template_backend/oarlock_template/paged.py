"""Paged attention with a layout of its own: heads before tokens, so that the context of one head lies in few pieces.

Owns: the layout of the KV cache on this device.
Reads: `oarlock.backend_api.runtime`.
Never: lets a slot outside a row's context reach a result; those may hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from oarlock.backend_api.runtime import Attention, AttentionParams

MASKED = -1e30  # finite: a row that sees nothing must not divide zero by zero


@dataclass(frozen=True, slots=True)
class Region:
    """What all layers of a step share. context = blocks of the table * block_size."""

    blocks: torch.Tensor  # [num_rows, num_blocks] int32
    outside: torch.Tensor  # [num_rows, context] bool: no query of this row sees the key, which may be NaN
    hidden: torch.Tensor  # [num_rows, max_q, context] bool: the query must not see the key
    take: torch.Tensor | None  # [num_rows, max_q] int32: the token of each query; None where token i is row i
    back: torch.Tensor | None  # [num_tokens] int32: where each token went, in num_rows * max_q


class TemplateAttention(Attention):
    """Gathers each row's context, and masks scores and values. Written in place."""

    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        shape = (num_blocks, self.params.num_kv_heads, self.block_size, self.params.head_dim)
        return shape, shape

    def metadata(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int
    ) -> Region:
        def count(n: int) -> torch.Tensor:
            return torch.arange(n, dtype=torch.int32, device=seq_lens.device)

        start, end = query_start_loc[:-1], query_start_loc[1:]
        new = torch.ones_like(seq_lens) if max_q == 1 else end - start  # tokens of each row in this step
        keys, queries = count(block_tables.shape[1] * self.block_size), (seq_lens - new)[:, None] + count(max_q)
        hidden = (keys >= seq_lens[:, None])[:, None] | (keys > queries[..., None])
        if self.params.window is not None:
            hidden = hidden | (keys <= queries[..., None] - self.params.window)
        outside = hidden.all(1)  # blocks that lie before every query's window are freed too
        if max_q == 1:
            return Region(block_tables, outside, hidden, None, None)
        take = (start[:, None] + count(max_q)).clamp(max=num_tokens - 1)
        row = (count(num_tokens)[:, None] >= end).sum(1).clamp(max=len(end) - 1)  # of each token
        back = row * max_q + (count(num_tokens) - start[row]).clamp(0, max_q - 1)
        return Region(block_tables, outside, hidden, take, back.to(torch.int32))

    def write_kv(
        self, cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        block, offset = slots // self.block_size, slots % self.block_size
        for tensor, new in zip(cache, (key, value), strict=True):
            tensor[block, :, offset] = new.to(tensor.dtype)
        return cache

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], metadata: Region, params: AttentionParams) -> torch.Tensor:
        num_rows, max_q, context = metadata.hidden.shape
        heads, head_dim = params.num_kv_heads, params.head_dim

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            """[num_rows, num_kv_heads, 1, context, head_dim] float32, zero outside the row's context."""
            lines = tensor[metadata.blocks].transpose(1, 2).reshape(num_rows, heads, context, head_dim)
            return lines.float().masked_fill(metadata.outside[:, None, :, None], 0.0)[:, :, None]

        padded = query if metadata.take is None else query[metadata.take]
        # [num_rows, num_kv_heads, query heads of each, max_q, head_dim]
        grouped = padded.float().view(num_rows, max_q, heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        scores = (grouped * params.scale) @ gather(cache[0]).transpose(-1, -2)
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        weights = scores.masked_fill(metadata.hidden[:, None, None], MASKED).softmax(-1)
        out = (weights @ gather(cache[1])).permute(0, 3, 1, 2, 4).reshape(num_rows * max_q, params.num_heads, head_dim)
        return (out if metadata.back is None else out[metadata.back]).to(query.dtype)
