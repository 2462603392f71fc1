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

_MASKED = -1e30  # finite: no NaN when a query sees nothing


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` as the cache keeps it; what an 8-bit float cannot hold becomes the largest that it can."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


@dataclass(frozen=True, slots=True)
class RegionMetadata:
    """One region's indices and masks. `context` = gathered blocks * block_size."""

    index: torch.Tensor  # [num_rows * num_kv_heads * context] int32: rows of the cache seen as [-1, head_dim]
    num_rows: int
    max_q: int
    keys: torch.Tensor  # [context] or [num_rows, context] int32: positions of the gathered keys
    queries: torch.Tensor  # [num_rows, max_q, 1] int32: positions
    bias: torch.Tensor  # [num_rows, 1, 1, max_q, context] float32: 0 where a query sees a key, else _MASKED
    real: torch.Tensor  # [num_rows, 1, 1] bool: false for a padded row
    pad: torch.Tensor | None  # [num_rows, max_q] int32: token of each (row, query); None when max_q is 1
    back: torch.Tensor | None  # [num_tokens] int32: (row, query) of each token, flattened


class ReferenceAttention(Attention):
    """Gathers each row's context once, whatever max_q; scores and sums in float32. The cache is written in place.

    Slots that no query of the row may see are not read at all: their index is replaced by that of the row's newest
    key, which was written in this step. So NaN in null, stale or freed slots cannot reach a product.
    """

    _in_place: ClassVar[bool] = True

    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        shape = (num_blocks, self.block_size, self.params.num_kv_heads, self.params.head_dim)
        return shape, shape

    def metadata(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int
    ) -> RegionMetadata:
        device, num_rows, block_size = seq_lens.device, seq_lens.shape[0], self.block_size

        def count(n: int) -> torch.Tensor:
            return torch.arange(n, dtype=torch.int32, device=device)

        start, end = query_start_loc[:-1], query_start_loc[1:]
        first_query = seq_lens - (1 if max_q == 1 else end - start)  # position of each row's first new token
        keys = count(self._gathered(block_tables.shape[1], max_q) * block_size)  # positions of the gathered keys
        lowest = torch.zeros_like(seq_lens)  # the oldest position that any query of the row sees
        if self.params.window is not None:
            lowest = (first_query - self.params.window + 1).clamp(min=0)
            keys = keys + (lowest // block_size * block_size)[:, None]
        valid = (keys >= lowest[:, None]) & (keys < seq_lens[:, None])
        read = torch.where(valid, keys, (seq_lens - 1).clamp(min=0)[:, None])
        slots = block_tables.gather(1, (read // block_size).long()) * block_size + read % block_size
        heads = count(self.params.num_kv_heads)
        index = (slots[:, None] * self.params.num_kv_heads + heads[:, None]).reshape(-1)
        queries = (first_query[:, None] + count(max_q))[..., None]
        seen = (keys[..., None, :] <= queries) & valid[:, None]
        if self.params.window is not None:
            seen = seen & (keys[..., None, :] > queries - self.params.window)
        pad = back = None
        if max_q > 1:
            tokens = count(num_tokens)
            pad = (start[:, None] + count(max_q)).clamp(max=num_tokens - 1)
            row = (tokens[:, None] >= end).sum(1).clamp(max=num_rows - 1).to(torch.int32)
            back = row * max_q + (tokens - start[row]).clamp(0, max_q - 1)
        bias = (~seen[:, None, None]).float() * _MASKED
        return RegionMetadata(index, num_rows, max_q, keys, queries, bias, (seq_lens > 0)[:, None, None], pad, back)

    def _gathered(self, blocks: int, max_q: int) -> int:
        """How many blocks of a row can hold a key that its queries see: static, at most the width of the block tables."""
        if self.params.window is None:
            return blocks
        # Queries s .. s+q-1 see keys s-window+1 .. s+q-1, at any alignment.
        return min(blocks, (self.params.window + max_q - 3 + self.block_size) // self.block_size + 1)

    def write_kv(self, cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        written = []
        for tensor, new in zip(cache, (key, value), strict=True):
            flat = tensor.view(-1, *tensor.shape[2:])
            write = flat.index_put_ if self._in_place else flat.index_put
            written.append(write((slots,), narrowed(new, tensor.dtype)).view(tensor.shape))
        return tuple(cache) if self._in_place else tuple(written)

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], metadata: RegionMetadata, params: AttentionParams) -> torch.Tensor:
        rows, kv_heads, head_dim = metadata.num_rows, params.num_kv_heads, params.head_dim
        group = params.num_heads // kv_heads
        # [num_rows * num_kv_heads, context, head_dim]: batches of one head, so that products need no further copy
        key, value = (wide(t.view(-1, head_dim).index_select(0, metadata.index)).view(rows * kv_heads, -1, head_dim) for t in cache)
        padded = query if metadata.pad is None else query[metadata.pad]
        padded = wide(padded).view(rows, metadata.max_q, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        padded = padded.reshape(rows * kv_heads, group * metadata.max_q, head_dim)
        scores = torch.bmm(padded * params.scale, key.transpose(1, 2))
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        if params.alibi_slopes is not None:
            away = (metadata.keys[..., None, :] - metadata.queries)[:, None, None].to(scores.dtype)
            slopes = params.alibi_slopes.to(scores.dtype).view(kv_heads, group, 1, 1)
            scores = scores + (slopes * away).reshape(scores.shape)
        # PERF: adding a bias in place takes a quarter of the time of torch.where on a 512 x 512 chunk.
        weights = scores.view(rows, kv_heads, group, metadata.max_q, -1).add_(metadata.bias).softmax(-1)
        out = torch.bmm(weights.view(rows * kv_heads, group * metadata.max_q, -1), value)
        out = out.view(rows, kv_heads, group, metadata.max_q, head_dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(rows, metadata.max_q * params.num_heads, head_dim).to(query.dtype)
        out = torch.where(metadata.real, out, 0).view(rows * metadata.max_q, params.num_heads, head_dim)
        return out if metadata.back is None else out[metadata.back]

    def copy_blocks(self, cache: tuple[torch.Tensor, ...], source: torch.Tensor, destination: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self._in_place:
            return tuple(t.index_put((destination,), t.index_select(0, source)) for t in cache)
        for tensor in cache:
            tensor.index_put_((destination,), tensor.index_select(0, source))  # index_copy_ knows no 8-bit floats
        return tuple(cache)


class FunctionalReferenceAttention(ReferenceAttention):
    """The same, but every write returns a new cache: for devices whose programs may not update their arguments."""

    _in_place: ClassVar[bool] = False
