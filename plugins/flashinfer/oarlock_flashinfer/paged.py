"""`FlashInferAttention`: FlashInfer's paged kernels behind Oarlock's attention. Heavy: imports torch and flashinfer, in a worker only.

Owns: the cache's layout, the workspaces, one planned prefill.
Reads: `oarlock.backend_api`, flashinfer.
Never: plans a region that decodes, so that a graph may hold it.

    decodes   flashinfer.decode.trtllm_batch_decode_with_kv_cache: takes block tables and lengths on the device, as they are
    chunks    flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper: planned on the host from copies of both, once a step for all layers;
              a step with a chunk so waits once for what was launched before it, and is never captured

Signatures as in FlashInfer's documentation (0.6). Run over a stand-in in tests; never run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from oarlock.backend_api.runtime import Attention, AttentionParams

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends; its first use wants zeros
LAYOUT = "HND"  # [num_blocks, num_kv_heads, block_size, head_dim]


@dataclass(frozen=True, slots=True)
class Decodes:
    """A region whose token i is row i."""

    block_tables: torch.Tensor  # [num_rows, num_blocks] int32
    seq_lens: torch.Tensor  # [num_rows] int32, 1 where a row is padding: a kernel need not know of empty rows
    real: torch.Tensor  # [num_rows, 1, 1] bool


@dataclass(frozen=True, slots=True)
class Chunks:
    """A region with chunks, planned."""

    wrapper: Any


class FlashInferAttention(Attention):
    """Caches are written in place."""

    _workspaces: ClassVar[dict[tuple[torch.device, str], torch.Tensor]] = {}  # shared by all groups: their launches follow one another

    def __init__(self, block_size: int, dtype: torch.dtype, params: AttentionParams) -> None:
        super().__init__(block_size, dtype, params)
        self._wrapper: Any = None

    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        shape = (num_blocks, self.params.num_kv_heads, self.block_size, self.params.head_dim)
        return shape, shape

    def metadata(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int
    ) -> Decodes | Chunks:
        if max_q == 1:
            return Decodes(block_tables.contiguous(), seq_lens.clamp(min=1), (seq_lens > 0)[:, None, None])
        tables, lens, starts = block_tables.cpu(), seq_lens.cpu(), query_start_loc.cpu()
        if not int(starts[-1]):  # a warm-up: rows without tokens. One of a few, over the null block, so that FlashInfer makes its kernels now
            some = min(num_tokens, tables.shape[1] * self.block_size)
            lens, starts = torch.zeros_like(lens), torch.full_like(starts, some)
            lens[0], starts[0] = some, 0
        return Chunks(self._plan(tables, lens, starts, block_tables.device))

    def _plan(self, tables: torch.Tensor, lens: torch.Tensor, query_starts: torch.Tensor, device: torch.device) -> Any:
        """FlashInfer's table of pages, row after row without gaps: where each row's begin, which they are, how full the last is."""
        p, counts = self.params, (lens + self.block_size - 1) // self.block_size
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        used = torch.arange(tables.shape[1]) < counts[:, None]
        if self._wrapper is None:
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace(device, "chunks"), LAYOUT)
        self._wrapper.plan(
            qo_indptr=query_starts,
            paged_kv_indptr=starts,
            paged_kv_indices=tables[used].to(device),
            paged_kv_last_page_len=(lens - 1) % self.block_size + 1,
            num_qo_heads=p.num_heads,
            num_kv_heads=p.num_kv_heads,
            head_dim_qk=p.head_dim,
            page_size=self.block_size,
            causal=True,
            sm_scale=p.scale,
            window_left=self._window_left,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        return self._wrapper

    @property
    def _window_left(self) -> int:
        """FlashInfer counts the keys before the query's own; -1: all."""
        return -1 if self.params.window is None else self.params.window - 1

    def _workspace(self, device: torch.device, use: str) -> torch.Tensor:
        if (device, use) not in self._workspaces:
            self._workspaces[device, use] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[device, use]

    def write_kv(self, cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        block, offset = (slots // self.block_size).long(), (slots % self.block_size).long()
        for tensor, new in zip(cache, (key, value), strict=True):
            tensor[block, :, offset] = new.to(tensor.dtype)
        return cache

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], metadata: Decodes | Chunks, params: AttentionParams) -> torch.Tensor:
        if params.alibi_slopes is not None:
            raise NotImplementedError("alibi_slopes: this attention has none")
        query = query.contiguous()
        if isinstance(metadata, Chunks):
            if params.scale != self.params.scale:  # the plan has the first layer's
                query = query * (params.scale / self.params.scale)
            # What no row's chunk covers is padding, and must be finite.
            found: torch.Tensor = metadata.wrapper.run(query, tuple(cache), out=torch.zeros_like(query))
            return found
        decoded = trtllm_batch_decode_with_kv_cache(
            query=query,
            kv_cache=tuple(cache),
            workspace_buffer=self._workspace(query.device, "decodes"),
            block_tables=metadata.block_tables,
            seq_lens=metadata.seq_lens,
            max_seq_len=metadata.block_tables.shape[1] * self.block_size,
            bmm1_scale=params.scale,
            bmm2_scale=1.0,
            window_left=self._window_left,
            kv_layout=LAYOUT,
        )
        return torch.where(metadata.real, decoded, 0)

    def copy_blocks(self, cache: tuple[torch.Tensor, ...], source: torch.Tensor, destination: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for tensor in cache:
            tensor.index_copy_(0, destination.long(), tensor.index_select(0, source))
        return cache
