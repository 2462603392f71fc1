"""`Attention`: cache layout, step metadata, KV write and paged attention, owned together by one implementation.

Owns: the protocol; its methods' shapes.
Reads: nothing else of ours.
Never: knows a model or a request. Models never assume a cache layout.

All methods are pure: `write_kv` returns the cache that later ops must use. An implementation that updates in place
returns the same tensors.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from oarlock.backend_api.runtime.device import CheckedOverrides


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What is constant for one layer's attention."""

    num_heads: int  # query heads on this rank
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # token i sees j when i - window < j <= i
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    alibi_slopes: Any = None  # room kept


class Attention(CheckedOverrides, abc.ABC):
    """One instance per KV cache group, made when the model is built."""

    _extension_base: ClassVar[bool] = True

    def __init__(self, block_size: int, dtype: torch.dtype, params: AttentionParams) -> None:
        """`block_size` in tokens, `dtype` of the cache, `params` of the group's first layer; kept under these names."""
        self.block_size = block_size
        self.dtype = dtype  # of the cache
        self.params = params  # of the group's first layer; layers of a group agree in heads, head size and window

    @abc.abstractmethod
    def kv_layout(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of one layer's cache tensors, first dimension num_blocks in each. Usually (keys, values)."""

    @abc.abstractmethod
    def metadata(
        self,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        max_q: int,
        num_tokens: int,
    ) -> Any:
        """What every layer's attention shares: made once a step, for one region, inside the program.

        Shapes:
            block_tables:    [num_rows, num_blocks]  int32, device; entries past a row's context are stale or 0
            seq_lens:        [num_rows]              int32, device; context after this step; 0 for a padded row
            query_start_loc: [num_rows + 1]          int32, device; relative to the region's first token
        `max_q` and `num_tokens` are static. `max_q == 1` means that token i is row i.
        """

    @abc.abstractmethod
    def write_kv(self, cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write new keys and values at their slots; returns the cache to use from now on.

        Shapes:
            key, value: [num_tokens, num_kv_heads, head_dim]  model dtype
            slots:      [num_tokens]  int32; block id * block_size + offset; padding points into block 0
        """

    @abc.abstractmethod
    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, ...], metadata: Any, params: AttentionParams) -> torch.Tensor:
        """Causal attention of one region's tokens over their rows' contexts.

        Shapes:
            query:  [num_tokens, num_heads, head_dim]
            result: the same; rows with seq_len 0 give finite values that nobody reads
        Null, stale and freed slots may hold NaN: mask scores *and* values.
        """

    def copy_blocks(self, cache: tuple[torch.Tensor, ...], source: torch.Tensor, destination: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy whole blocks inside one layer's cache; returns the cache to use from now on. int32 ids; padding copies 0 to 0."""
        return tuple(t.index_copy(0, destination.long(), t.index_select(0, source)) for t in cache)
