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
from oarlock.backend_api.runtime.ops import Ops


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What is constant for one layer's attention."""

    num_heads: int  # query heads on this rank
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # token i sees j when i - window < j <= i
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    alibi_slopes: torch.Tensor | None = None  # [num_heads] float32, device: scores get slope * (key's position - query's); no model of core's has them


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """What the heads of a step's new tokens go through before they are kept and attended with, in this order; of one layer."""

    positions: torch.Tensor  # [num_tokens] int32
    q_norm: torch.Tensor | None = None  # [head_dim]: an rms_norm of each query head, with k_norm for key heads; None: none
    k_norm: torch.Tensor | None = None
    eps: float = 0.0  # of the norms
    table: torch.Tensor | None = None  # [max_len, 2, rot / 2] float32, as the op rotary takes it, for queries and keys; None: no rotation
    interleaved: bool = False
    k_scale: float = 1.0  # key / k_scale and value / v_scale are kept, for an fp8 cache; AttentionParams.scale has k_scale in it already
    v_scale: float = 1.0  # the results of `attend` are multiplied by it afterwards


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

    def write_qkv(
        self, ops: Ops, qkv: torch.Tensor, cache: tuple[torch.Tensor, ...], slots: torch.Tensor, params: AttentionParams, steps: HeadSteps
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Take new tokens as a projection leaves them: (queries for `attend`, the cache to use from now on).

        The default is made of ops and `write_kv`. Override it to do in one launch what is several here.

        Shapes:
            qkv:     [num_tokens, num_heads + 2 * num_kv_heads, head_dim]  model dtype: queries, keys, values
            slots:   [num_tokens]  int32, as for write_kv
            queries: [num_tokens, num_heads, head_dim]
        """
        bound: Any = ops  # its ops are attributes by name
        q, k, v = torch.split(qkv, [params.num_heads, params.num_kv_heads, params.num_kv_heads], 1)
        if steps.q_norm is not None:
            q, k = (bound.rms_norm(x, weight, steps.eps) for x, weight in ((q, steps.q_norm), (k, steps.k_norm)))
            if steps.table is not None:
                q, k = (bound.rotary(x, steps.positions, steps.table, steps.interleaved) for x in (q, k))
        elif steps.table is not None:
            both = bound.rotary(qkv[:, : params.num_heads + params.num_kv_heads], steps.positions, steps.table, steps.interleaved)
            q, k = torch.split(both, [params.num_heads, params.num_kv_heads], 1)
        if steps.k_scale != 1.0:
            k = k / steps.k_scale
        if steps.v_scale != 1.0:
            v = v / steps.v_scale
        return q, self.write_kv(cache, k, v, slots)

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
