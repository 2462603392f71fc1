"""The Pallas kernel: paged attention over merged heads, for decode and for chunks.

Owns: the kernel, its grid and its block shapes.
Reads: `vendor` (JAX).
Never: sees a torch tensor; reads a block that no query of its row may see.

Legend
    R rows   Q queries a row (padded)   H heads   K KV heads, padded to whole lane groups   G heads a KV head   D head size
    B blocks of a table   S slots of a block   L lanes of a cache, K * D
    P KV heads that one program of the grid computes: a lane group of P * D lanes, a multiple of 128

A lane group cannot be cut below 128 lanes, so heads narrower than that are computed together, on block-diagonal queries: a query's
lanes outside its own head are zero, and of its result only its own head's lanes are kept. For decode the group is all heads at once: the
step is bound by reading the cache, and whole blocks are read best.

    cache     [blocks, S, L]                       one of keys, one of values
    queries   [R, L / (P * D), Q * P * G, P * D]   row i of the third axis is query i // (P * G)
    grid      (R, lane groups, blocks of queries, steps over the row's blocks); a step reads `pages` blocks

Source: online softmax over blocks, FlashAttention-2, Dao 2023, arXiv:2307.08691; block tables, PagedAttention, Kwon et al. 2023,
arXiv:2309.06180.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from oarlock_tpu.vendor import jax, jnp

LANES = 128
_MASKED = -1e30  # finite: no NaN where a query sees nothing
_KEYS_A_STEP = 256  # slots that one step of the grid reads
_QUERY_ROWS = 512  # rows of one block of queries, at most


@dataclass(frozen=True, slots=True)
class Shape:
    """What is constant for one call."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int | None
    softcap: float | None
    interpret: bool  # on a host without the chip

    @property
    def narrowest(self) -> int:
        """KV heads that fill whole lanes together."""
        return LANES // math.gcd(LANES, self.head_dim)

    @property
    def padded_heads(self) -> int:
        """KV heads of the cache: whole lane groups."""
        return -(-self.kv_heads // self.narrowest) * self.narrowest

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def lanes(self) -> int:
        return self.padded_heads * self.head_dim

    def blocks_seen(self, blocks: int, queries: int) -> int:
        """How many blocks of a row can hold a key that its queries see: static."""
        if self.window is None:
            return blocks
        # Queries s .. s+q-1 see keys s-window+1 .. s+q-1, at any alignment.
        return min(blocks, (self.window + queries - 3 + self.block_size) // self.block_size + 1)


def attend(shape: Shape, query: Any, keys: Any, values: Any, base: Any, tables: Any, seq_lens: Any, first: Any) -> Any:
    """Causal attention of padded rows.

    Shapes:
        query:        [R, Q, H, D]
        keys, values: [blocks, S, L]
        base:         [1] int32     added to every block id
        tables:       [R, B] int32
        seq_lens:     [R] int32     context; 0: a padded row
        first:        [R] int32     position of the row's first query
        result:       [R, Q, H, D]  query's dtype; 0 for rows and queries that are padding
    """
    rows, queries, _, _ = query.shape
    together = shape.padded_heads if queries == 1 else shape.narrowest
    packed = _pack(shape, query, together)
    size = packed.shape[2] // queries  # rows of one query
    part = _query_block(queries, size)
    seen = shape.blocks_seen(tables.shape[1], queries)
    pages = max(1, min(_KEYS_A_STEP // shape.block_size, seen))
    static = {"shape": shape, "pages": pages, "size": size, "part": part, "width": tables.shape[1]}
    lanes = together * shape.head_dim
    read = [pl.BlockSpec((1, shape.block_size, lanes), functools.partial(_page, n, **static)) for n in range(pages)]
    at = pl.BlockSpec((1, 1, part * size, lanes), lambda r, g, q, j, *_: (r, g, q, 0))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(rows, packed.shape[1], queries // part, -(-seen // pages)),
        in_specs=[at, *read, *read],
        out_specs=at,
        scratch_shapes=[pltpu.VMEM((part * size, 1), jnp.float32), pltpu.VMEM((part * size, 1), jnp.float32), pltpu.VMEM((part * size, lanes), jnp.float32)],
    )
    call = pl.pallas_call(
        functools.partial(_kernel, **static), grid_spec=spec, out_shape=jax.ShapeDtypeStruct(packed.shape, query.dtype), interpret=shape.interpret
    )
    out = call(base, tables.reshape(-1), seq_lens, first, packed, *[keys] * pages, *[values] * pages)
    return _unpack(shape, out, queries, together)


def _query_block(queries: int, size: int) -> int:
    """Queries of one block: a power of two that divides them."""
    part = queries
    while part * size > _QUERY_ROWS and part % 2 == 0:
        part //= 2
    return part


def _pack(shape: Shape, query: Any, together: int) -> Any:
    """Block-diagonal queries by lane group: [R, groups, Q * P * G, P * D]."""
    rows, queries, _, _ = query.shape
    groups = shape.padded_heads // together
    split = query.reshape(rows, queries, shape.kv_heads, shape.group, shape.head_dim)
    split = jnp.pad(split, ((0, 0), (0, 0), (0, shape.padded_heads - shape.kv_heads), (0, 0), (0, 0)))
    split = split.reshape(rows, queries, groups, together, shape.group, shape.head_dim).transpose(0, 2, 1, 3, 4, 5)
    if together > 1:
        own = jnp.eye(together, dtype=query.dtype)[:, None, :, None]
        split = split[..., None, :] * own
    return split.reshape(rows, groups, queries * together * shape.group, together * shape.head_dim)


def _unpack(shape: Shape, out: Any, queries: int, together: int) -> Any:
    """The diagonal of the blocks: [R, Q, H, D]."""
    rows, groups = out.shape[:2]
    split = out.reshape(rows, groups, queries, together, shape.group, together, shape.head_dim)
    own = jnp.eye(together, dtype=bool)[:, None, :, None]
    split = jnp.where(own, split, 0).sum(5) if together > 1 else split[..., 0, :]
    split = split.transpose(0, 2, 1, 3, 4, 5).reshape(rows, queries, shape.padded_heads, shape.group, shape.head_dim)
    return split[:, :, : shape.kv_heads].reshape(rows, queries, shape.heads, shape.head_dim)


def _lowest(shape: Shape, first: Any) -> Any:
    """The first block that any query of a row sees. Division as the chip has it: `//` asks which chip it is for."""
    return 0 if shape.window is None else jax.lax.div(jnp.maximum(first - shape.window + 1, 0), shape.block_size)


def _page(n: int, r: Any, g: Any, q: Any, j: Any, base: Any, tables: Any, seq_lens: Any, first: Any, *, shape: Shape, pages: int, width: int, **_: Any) -> Any:
    """Which block of the cache page `n` of step `j` is. Past the row's end it is the last one again, which is not read twice."""
    last = jax.lax.div(jnp.maximum(seq_lens[r] - 1, 0), shape.block_size)
    at = jnp.minimum(_lowest(shape, first[r]) + j * pages + n, last)
    return base[0] + tables[r * width + at], 0, g


def _kernel(base: Any, tables: Any, seq_lens: Any, first: Any, query: Any, *refs: Any, shape: Shape, pages: int, size: int, part: int, width: int) -> None:
    """One row, one lane group, one block of queries, `pages` blocks of keys and values."""
    keys, values, out, best, total, acc = refs[:pages], refs[pages : 2 * pages], *refs[2 * pages :]
    r, q, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    seq_len, first_query = seq_lens[r], first[r] + q * part
    start = (_lowest(shape, first[r]) + j * pages) * shape.block_size  # position of the first key of this step

    @pl.when(j == 0)
    def _() -> None:
        best[...] = jnp.full_like(best, _MASKED)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    # Some query of this block exists, and some key of this step is not after all of them, nor behind all their windows.
    is_needed = (first_query < seq_len) & (start < seq_len) & (start < first_query + part)
    if shape.window is not None:
        is_needed &= start + pages * shape.block_size > first_query - shape.window + 1

    @pl.when(is_needed)
    def _() -> None:
        key = jnp.concatenate([ref[0] for ref in keys], 0) if pages > 1 else keys[0][0]
        value = jnp.concatenate([ref[0] for ref in values], 0) if pages > 1 else values[0][0]
        precision = jax.lax.Precision.HIGHEST if key.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        scores = jax.lax.dot_general(query[0, 0], key, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
        scores = scores * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * jnp.tanh(scores / shape.softcap)
        position = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        asks = first_query + jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0), size)
        seen = (position <= asks) & (position < seq_len)
        if shape.window is not None:
            seen &= position > asks - shape.window
        scores = jnp.where(seen, scores, _MASKED)
        now = jnp.maximum(best[...], scores.max(1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
        shrink = jnp.exp(best[...] - now)
        # A stale slot, or one behind every window, may hold NaN, and 0 * NaN is NaN.
        slot = start + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0)
        real = slot < seq_len if shape.window is None else (slot < seq_len) & (slot > first_query - shape.window)
        value = jnp.where(real, value, jnp.zeros_like(value))
        product = jax.lax.dot_general(weights.astype(value.dtype), value, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
        total[...] = total[...] * shrink + weights.sum(1, keepdims=True)
        acc[...] = acc[...] * shrink + product
        best[...] = now

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        out[0, 0] = (acc[...] / jnp.where(total[...] > 0, total[...], 1.0)).astype(out.dtype)
