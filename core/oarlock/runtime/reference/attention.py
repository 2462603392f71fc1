"""The reference attention: a paged cache of [num_blocks, block_size, num_kv_heads, head_dim], gathered and masked.

Owns: the meaning of `Attention`.
Reads: `backend_api.runtime.Attention`.
Never: lets a null, stale or freed slot reach a result; needs a host read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from oarlock.backend_api.runtime import Attention, AttentionParams
from oarlock.runtime.reference.layers import wide

_MASKED = -1e30  # finite: a row without context gives zeros, not NaN


@dataclass(frozen=True, slots=True)
class RegionMetadata:
    """One region's masks. `context` = gathered blocks * block_size."""

    tables: torch.Tensor  # [num_rows * gathered] int32: the blocks to gather, row by row
    num_rows: int
    max_q: int
    valid: torch.Tensor  # [num_rows, 1, context, 1] bool: the slot holds a key of this row
    seen: torch.Tensor  # [num_rows, 1, 1, max_q, context] bool: query position sees key position
    pad: torch.Tensor | None  # [num_rows, max_q] int32: token of each (row, query); None when max_q is 1
    back: torch.Tensor | None  # [num_tokens] int32: (row, query) of each token, flattened


class ReferenceAttention(Attention):
    """Gathers each row's context once, whatever max_q; scores and sums in float32. The cache is written in place."""

    _in_place: ClassVar[bool] = True

    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        shape = (num_blocks, self.block_size, self.params.num_kv_heads, self.params.head_dim)
        return shape, shape

    def metadata(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int
    ) -> RegionMetadata:
        device, (num_rows, blocks) = seq_lens.device, block_tables.shape

        def count(n: int) -> torch.Tensor:
            return torch.arange(n, dtype=torch.int32, device=device)

        start, end = query_start_loc[:-1], query_start_loc[1:]
        first_query = seq_lens - (1 if max_q == 1 else end - start)  # position of each row's first new token
        window, offset = self.params.window, None
        if window is not None:
            # Queries s .. s+q-1 see keys s-window+1 .. s+q-1: that many blocks at most, at any alignment.
            needed = (window + max_q - 2 + self.block_size - 1) // self.block_size + 1
            if needed < blocks:
                offset = (first_query - window + 1).clamp(min=0) // self.block_size
                block_tables = block_tables.gather(1, (offset[:, None] + count(needed)).clamp(max=blocks - 1).long())
                blocks = needed
        keys = count(blocks * self.block_size)[None]  # position of each gathered slot
        if offset is not None:
            keys = keys + (offset * self.block_size)[:, None]
        valid = keys < seq_lens[:, None]
        queries = (first_query[:, None] + count(max_q))[..., None]
        seen = (keys[:, None] <= queries) & valid[:, None]
        if window is not None:
            seen = seen & (keys[:, None] > queries - window)
        pad = back = None
        if max_q > 1:
            tokens = count(num_tokens)
            pad = (start[:, None] + count(max_q)).clamp(max=num_tokens - 1)
            row = (tokens[:, None] >= end).sum(1).clamp(max=num_rows - 1).to(torch.int32)
            back = row * max_q + (tokens - start[row]).clamp(0, max_q - 1)
        return RegionMetadata(block_tables.reshape(-1), num_rows, max_q, valid[:, None, :, None], seen[:, None, None], pad, back)

    def write_kv(self, cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        written = []
        for tensor, new in zip(cache, (key, value), strict=True):
            flat = tensor.view(-1, *tensor.shape[2:])
            write = flat.index_put_ if self._in_place else flat.index_put
            written.append(write((slots,), new.to(tensor.dtype)).view(tensor.shape))
        return tuple(cache) if self._in_place else tuple(written)

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], metadata: RegionMetadata, params: AttentionParams) -> torch.Tensor:
        rows, kv_heads, head_dim = metadata.num_rows, params.num_kv_heads, params.head_dim
        group = params.num_heads // kv_heads
        # [num_rows, num_kv_heads, context, head_dim]
        key, value = (t.index_select(0, metadata.tables).view(rows, -1, kv_heads, head_dim).transpose(1, 2) for t in cache)
        value = torch.where(metadata.valid, wide(value), 0)  # 0 * NaN is NaN
        padded = query if metadata.pad is None else query[metadata.pad]
        # [num_rows, num_kv_heads, group * max_q, head_dim]
        padded = wide(padded).view(rows, metadata.max_q, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        padded = padded.reshape(rows, kv_heads, group * metadata.max_q, head_dim)
        scores = torch.matmul(padded * params.scale, wide(key).transpose(2, 3))
        scores = scores.view(rows, kv_heads, group, metadata.max_q, -1)
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        weights = torch.where(metadata.seen, scores, _MASKED).softmax(-1)
        out = torch.matmul(weights.flatten(2, 3), value).view(rows, kv_heads, group, metadata.max_q, head_dim)
        out = out.permute(0, 3, 1, 2, 4).reshape(rows * metadata.max_q, params.num_heads, head_dim).to(query.dtype)
        return out if metadata.back is None else out[metadata.back]

    def copy_blocks(self, cache: tuple[torch.Tensor, ...], source: torch.Tensor, destination: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self._in_place:
            return super().copy_blocks(cache, source, destination)
        for tensor in cache:
            tensor.index_copy_(0, destination.long(), tensor.index_select(0, source))
        return tuple(cache)


class FunctionalReferenceAttention(ReferenceAttention):
    """The same, but every write returns a new cache: for devices whose programs may not update their arguments."""

    _in_place: ClassVar[bool] = False
