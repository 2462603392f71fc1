"""Attention of rows that bring one token each. The contexts' tiles of all rows form one line, cut into equal parts, one for each program.

Legend: R rows, H query heads, KV kv heads, G = H / KV, D head size, B blocks, S slots of a block, M query lines of a program, N keys of a tile,
P programs for a kv head, Q parts of a shared prefix, L context of a row, W width of the block tables.

Owns: `plan_decodes`, `attend_decodes`.
Reads: `chip`, `online`, `cache`.
Never: reads a tensor's values on the host.

    rows      |--- 0 ---|- 1 -|------------ 2 ------------|- 3 -|    tiles of N keys each
    programs  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|

However lengths differ, programs have equal work, and how many there are depends on the chip alone. A row inside one program is finished
there. One that is cut leaves a part in each program that has some of it, `attend_merge_kernel` joins them. Program p keeps its part of row r at p + r, which
no two share.

Where the rows begin with the same blocks, those keys are read once for all of them (`attend_prefix_kernel`), and the rows' own
tiles begin after them.

Source: Flash-Decoding, Dao et al. 2023 (splitting the context); Stream-K, Osama et al. 2023, arXiv:2301.03598 (equal parts of one line of work);
Hydragen, Juravsky et al. 2024, arXiv:2402.05099 (shared prefixes).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels.attention_chunks import product_type, row_lanes, row_of
from oarlock_triton_kernels.cache import as_stored, kind_of
from oarlock_triton_kernels.chip import chip
from oarlock_triton_kernels.online import HIDDEN, LOG2E, attend_tile, finished, joined, loaded_queries, new_parts, with_sink
from oarlock_triton_kernels.stepwise import STEPWISE

LEAST_TILES = 2  # a program has no less work than this, else joining the parts costs more than it saves
PREFIX_ROWS = 8  # fewer rows are not worth looking for a shared prefix
PREFIX_KEYS = 256  # nor is a shorter one
PREFIX_PARTS = 16  # at most


class DecodePlan(NamedTuple):
    """Made once a step, for all layers of a group."""

    block_tables: torch.Tensor  # [num_rows, num_blocks of the longest] int32
    seq_lens: torch.Tensor  # [num_rows] int32
    numbers: torch.Tensor  # [num_rows + 2] int32: the rows' first tiles, their count, the shared prefix in keys
    keys: int  # of a tile
    has_prefix: bool  # whether a prefix was looked for


@triton.jit(**STEPWISE)
def plan_decodes_kernel(
    numbers_ptr, table_ptr, seq_lens_ptr, window, num_rows, num_blocks, stride_tr, RP: tl.constexpr, WP: tl.constexpr, S: tl.constexpr,
    N: tl.constexpr, LEAST: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_PREFIX: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). Where each row's tiles begin in the line of all tiles, and how many keys all rows share from the start.

    numbers_ptr:  [R + 2]  int32: first tile of each row, count of tiles, shared keys
    table_ptr:    [R, W]  int32 block ids, strides (stride_tr, 1)
    seq_lens_ptr: [R]  int32, 0 for a padded row
    RP, WP:       R rounded up to a power of two; columns of the table that are compared at a time
    N, LEAST:     keys of a tile; fewest shared keys that count

    Reference: the sums in tests/test_triton_attention.py; the mathematics is ReferenceAttention.metadata's.
    Cost: at most R W operations on 4 R W bytes; on 4 R WP where the first columns differ.
    Bound: latency, of one program once a step for all layers.
    """
    row = tl.arange(0, RP)
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    real = seq_len > 0
    prefix = 0
    if HAS_PREFIX:
        first = tl.min(tl.where(real, row, RP))  # a real row, with which the others are compared
        whole = tl.min(tl.where(real, (seq_len - 1) // S, num_blocks))  # blocks that every row has filled; its newest key stays its own
        whole = tl.where((tl.sum(real.to(tl.int32)) > 1) & (first < num_rows), whole, 0)
        shared, column = 0, tl.arange(0, WP)
        while shared < whole:
            here = shared + column
            mine = tl.load(table_ptr + row.to(tl.int64)[:, None] * stride_tr + here[None, :], mask=real[:, None] & (here < whole)[None, :], other=-1)
            one = tl.load(table_ptr + first.to(tl.int64) * stride_tr + here, mask=here < whole, other=-1)
            differs = tl.max(((mine != one[None, :]) & real[:, None]).to(tl.int32), 0) | (here >= whole).to(tl.int32)
            equal = tl.min(tl.where(differs != 0, column, WP))
            shared += equal
            whole = tl.where(equal < WP, shared, whole)
        prefix = tl.where(shared * S >= LEAST, shared * S, 0)
    begin = tl.maximum(seq_len - window, 0) if HAS_WINDOW else tl.minimum(seq_len, prefix)
    tiles = (seq_len - begin + N - 1) // N
    last = tl.cumsum(tiles, 0)
    tl.store(numbers_ptr + row, last - tiles, mask=row < num_rows)
    tl.store(numbers_ptr + num_rows, tl.sum(tiles))
    tl.store(numbers_ptr + num_rows + 1, prefix)


def plan_decodes(
    block_tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int, head_dim: int, cache: torch.dtype, window: int | None
) -> DecodePlan:  # fmt: skip
    """The plan of a step's decode rows, for block tables and contexts as `attend_decodes` takes them."""
    num_rows, width = block_tables.shape
    keys, has_prefix = tile_keys(head_dim, cache), num_rows >= PREFIX_ROWS and window is None
    numbers = torch.empty(num_rows + 2, dtype=torch.int32, device=seq_lens.device)
    rows = max(triton.next_power_of_2(num_rows), PREFIX_ROWS)
    plan_decodes_kernel[(1,)](
        numbers, block_tables, seq_lens, window or 0, num_rows, width, block_tables.stride(0), RP=rows, WP=max(4096 // rows, 4), S=block_size, N=keys,
        LEAST=PREFIX_KEYS, HAS_WINDOW=window is not None, HAS_PREFIX=has_prefix, num_warps=4,
    )  # fmt: skip
    return DecodePlan(block_tables, seq_lens, numbers, keys, has_prefix)


def tile_keys(head_dim: int, cache: torch.dtype) -> int:
    """N, for a cache of this dtype."""
    return (64 if head_dim <= 128 else 32) // (2 if cache.itemsize == 4 else 1)


@triton.jit(**STEPWISE)
def attend_split_kernel(
    out_ptr, part_ptr, weight_ptr, q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, numbers_ptr, slopes_ptr, sinks_ptr, scale, softcap, window, num_rows,
    stride_qr, stride_qh, stride_or, stride_cb, stride_ch, stride_tr,
    G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, RP: tl.constexpr, LEAST: tl.constexpr,
    KIND: tl.constexpr, DOT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: (P, KV). Attention of the tiles that a program has in the line of all rows' tiles, row after row.

    All G query heads of a kv head are computed at once, so that the cache is read once; G is padded to M = 16 lines for the matrix units.
    Every tile is masked: the mask is hidden behind the reads.

    out_ptr:    [R, H, D]  model dtype, strides (stride_or, D, 1)
    part_ptr:   [P + R, H, D]  float32, contiguous: attention over a part of a row's keys
    weight_ptr: [P + R, H]  float32, contiguous: log2 of the sum of exp of a part's scores
    q_ptr:      [R, H, D]  model dtype, strides (stride_qr, stride_qh, 1)
    k_ptr, v_ptr: [B, KV, S, D]  cache dtype, 8-bit floats as uint8; strides (stride_cb, stride_ch, D, 1)
    table_ptr:  [R, W]  int32 block ids, strides (stride_tr, 1)
    seq_lens_ptr, numbers_ptr: [R] and [R + 2]  int32, the latter made by plan_decodes_kernel
    slopes_ptr, sinks_ptr: [H]  float32
    DP, M, N, RP, LEAST: D rounded up to a power of two; lines and keys of a tile; a power of two above R; fewest tiles of a program
    KIND, DOT:  how 8-bit floats are read; the dtype of products

    Reference: oarlock.runtime.reference.attention.ReferenceAttention.attend.
    Cost: 4 H D sum(L) FLOP; 2 KV D sum(L) cache values, and at most 4 (P + R) H D bytes of parts.
    Bound: memory: a key and its value are 4 D bytes for 4 G D FLOP.
    """
    program, kv_head = tl.program_id(0), tl.program_id(1)
    prefix = tl.load(numbers_ptr + num_rows + 1)
    tiles = tl.load(numbers_ptr + num_rows)
    each = tl.maximum(tl.cdiv(tiles, tl.num_programs(0)), LEAST)
    tile = program * each
    last = tl.minimum(tile + each, tiles)
    line, d = tl.arange(0, M), tl.arange(0, DP)
    head, inside = kv_head * G + line, line < G
    store = inside[:, None] & (d < D)[None, :]
    k_head, v_head = k_ptr + kv_head * stride_ch, v_ptr + kv_head * stride_ch
    slope = tl.load(slopes_ptr + head, mask=inside, other=0) * LOG2E if HAS_SLOPES else 0.0
    sink = tl.load(sinks_ptr + head, mask=inside, other=0) * LOG2E if HAS_SINKS else 0.0
    row = row_of(numbers_ptr, num_rows, tile, 0, RP)
    while tile < last:
        first, after = tl.load(numbers_ptr + row), tl.load(numbers_ptr + row + 1)
        stop = tl.minimum(after, last)
        seq_len = tl.load(seq_lens_ptr + row)
        begin = tl.maximum(seq_len - window, 0) if HAS_WINDOW else tl.minimum(seq_len, prefix)
        q, unit = loaded_queries(q_ptr, row.to(tl.int64) * stride_qr + head * stride_qh, inside, D, DP, DOT)
        factor = unit * scale if HAS_CAP else unit * (scale * LOG2E)
        query_pos = tl.zeros([M], tl.int32) + (seq_len - 1)
        sums, peak, total = tl.zeros([M, DP], tl.float32), tl.full([M], HIDDEN, tl.float32), tl.zeros([M], tl.float32)
        for key in tl.range(begin + (tile - first) * N, begin + (stop - first) * N, N):
            sums, peak, total = attend_tile(
                q, sums, peak, total, key + tl.arange(0, N), query_pos, begin, seq_len, k_head, v_head, table_ptr + row.to(tl.int64) * stride_tr, factor, softcap, slope,
                window, stride_cb, D, S, D, DP, KIND, 1, HAS_CAP, HAS_SLOPES, HAS_WINDOW,
            )  # fmt: skip
        if (tile == first) & (stop == after) & (prefix == 0):
            done = finished(sums, peak, total, sink, HAS_SINKS).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row.to(tl.int64) * stride_or + (head * D)[:, None] + d[None, :], done, mask=store)
        elif tile < stop:
            at = (program + row).to(tl.int64) * (tl.num_programs(1) * G) + head
            tl.store(part_ptr + at[:, None] * D + d[None, :], finished(sums, peak, total, 0.0, False), mask=store)
            tl.store(weight_ptr + at, peak + tl.log2(total), mask=inside)
        tile = stop
        row += 1


@triton.jit(**STEPWISE)
def attend_prefix_kernel(
    part_ptr, weight_ptr, q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, numbers_ptr, slopes_ptr, scale, softcap, num_rows,
    stride_qr, stride_qh, stride_cb, stride_ch, stride_tr,
    G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr,
    DOT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(R / (M // G)), KV, Q). Attention of M // G rows at once over one of Q parts of the keys that all rows share.

    Where they share none, it ends at once. A tile has M = 64 lines, and its keys are read for all of them.

    part_ptr:   [R, Q, H, D]  float32, contiguous
    weight_ptr: [R, Q, H]  float32, contiguous
    q_ptr:      [R, H, D]  model dtype, strides (stride_qr, stride_qh, 1)
    k_ptr, v_ptr: [B, KV, S, D]  cache dtype, 8-bit floats as uint8; strides (stride_cb, stride_ch, D, 1)
    table_ptr:  [R, W]  int32 block ids, strides (stride_tr, 1)
    seq_lens_ptr, numbers_ptr: [R] and [R + 2]  int32
    slopes_ptr: [H]  float32

    Reference: oarlock.runtime.reference.attention.ReferenceAttention.attend.
    Cost: 4 H D R X FLOP for X shared keys; 2 KV D X ceil(R G / M) cache values, where rows by themselves read 2 KV D X R.
    Bound: memory while ceil(R G / M) is small, then the matrix units.
    """
    prefix = tl.load(numbers_ptr + num_rows + 1)
    if prefix > 0:
        ROWS: tl.constexpr = M // G
        kv_head, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
        line, d = tl.arange(0, M), tl.arange(0, DP)
        row, head = tl.program_id(0) * ROWS + line // G, kv_head * G + line % G
        inside = (line < ROWS * G) & (row < num_rows)
        seq_len = tl.load(seq_lens_ptr + row, mask=inside, other=0)
        real = tl.max(tl.where(seq_len > 0, row, 0))  # any real row's table: they are the same here; a program of padded rows reads row 0's
        each = tl.cdiv(tl.cdiv(prefix, parts), N) * N
        end = tl.minimum((part + 1) * each, prefix)
        end = tl.where(tl.max(seq_len) > 0, end, 0)
        q, unit = loaded_queries(q_ptr, row.to(tl.int64) * stride_qr + head * stride_qh, inside, D, DP, DOT)
        factor = unit * scale if HAS_CAP else unit * (scale * LOG2E)
        slope = tl.load(slopes_ptr + head) * LOG2E if HAS_SLOPES else 0.0
        sums, peak, total = tl.zeros([M, DP], tl.float32), tl.full([M], HIDDEN, tl.float32), tl.zeros([M], tl.float32)
        for key in tl.range(part * each, end, N):
            sums, peak, total = attend_tile(
                q, sums, peak, total, key + tl.arange(0, N), seq_len - 1, 0, end, k_ptr + kv_head * stride_ch, v_ptr + kv_head * stride_ch,
                table_ptr + real.to(tl.int64) * stride_tr, factor, softcap, slope, 0, stride_cb, D, S, D, DP, KIND, 1, HAS_CAP, HAS_SLOPES, False,
            )  # fmt: skip
        at = (row.to(tl.int64) * parts + part) * (tl.num_programs(1) * G) + head
        tl.store(part_ptr + at[:, None] * D + d[None, :], finished(sums, peak, total, 0.0, False), mask=inside[:, None] & (d < D)[None, :])
        tl.store(weight_ptr + at, tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), HIDDEN), mask=inside)


@triton.jit(**STEPWISE)
def attend_merge_kernel(
    out_ptr, part_ptr, weight_ptr, prefix_part_ptr, prefix_weight_ptr, numbers_ptr, sinks_ptr, num_rows, programs, parts, stride_or,
    D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, LEAST: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: (R, H). Joins the parts of a row that attend_split_kernel cut, and those of a shared prefix; a padded row becomes 0.

    out_ptr:    [R, H, D]  model dtype, strides (stride_or, D, 1)
    part_ptr, weight_ptr: [P + R, H, D] and [P + R, H]  float32, contiguous
    prefix_part_ptr, prefix_weight_ptr: [R, Q, H, D] and [R, Q, H]  float32, contiguous
    numbers_ptr, sinks_ptr: [R + 2]  int32; [H]  float32
    DP, C, LEAST: D rounded up to a power of two; parts that are read at a time; fewest tiles of a program

    Reference: oarlock.runtime.reference.attention.ReferenceAttention.attend.
    Cost: 3 (P + R Q) H D FLOP; 4 (P + R Q) H D bytes, and w R H D of results of w bytes.
    Bound: latency: C parts of a row are read at once.
    """
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, after = tl.load(numbers_ptr + row), tl.load(numbers_ptr + row + 1)
    prefix = tl.load(numbers_ptr + num_rows + 1) if HAS_PREFIX else 0
    each = tl.maximum(tl.cdiv(tl.load(numbers_ptr + num_rows), programs), LEAST)
    begin, end = first // each, (after - 1) // each  # the programs that have some of it
    if (first == after) | (begin < end) | (prefix > 0):
        sums, peak, total = tl.zeros([DP], tl.float32), tl.full([], HIDDEN, tl.float32), tl.full([], 0.0, tl.float32)
        if after > first:
            sums, peak, total = joined(sums, peak, total, part_ptr, weight_ptr, begin + row, end - begin + 1, heads, head, D, DP, C)
            if prefix > 0:
                sums, peak, total = joined(sums, peak, total, prefix_part_ptr, prefix_weight_ptr, row * parts, parts, heads, head, D, DP, C)
        sums, total = with_sink(sums, peak, total, sinks_ptr, head, HAS_SINKS)
        d = tl.arange(0, DP)
        done = (sums / tl.maximum(total, 1e-30)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row.to(tl.int64) * stride_or + head * D + d, done, mask=d < D)


def attend_decodes(
    query: torch.Tensor, cache: tuple[torch.Tensor, ...], plan: DecodePlan, scale: float, *, window: int | None = None, softcap: float | None = None,
    slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of one new token a row.

    Shapes:
        query:         [num_rows, num_heads, head_dim]  model dtype; the last dimension contiguous
        cache:         keys and values [num_blocks, num_kv_heads, block_size, head_dim]  model dtype or 8-bit floats, contiguous
        plan:          of these rows, made with the same window
        slopes, sinks: [num_heads]  float32, or None
        result:        as query, contiguous; 0 for a padded row
    """
    num_rows, heads, head_dim = query.shape
    keys, values = (as_stored(tensor) for tensor in cache)
    kv_heads, block_size, kind = keys.shape[1], keys.shape[2], kind_of(cache[0].dtype)
    group, width = heads // kv_heads, max(triton.next_power_of_2(head_dim), 16)
    out = torch.empty((num_rows, heads, head_dim), dtype=query.dtype, device=query.device)
    table, item = plan.block_tables, keys.element_size()
    programs = num_programs(kv_heads, num_rows * triton.cdiv(table.shape[1] * block_size, plan.keys))
    part, weight = new_parts(out, programs + num_rows)
    lines = {"G": group, "S": block_size, "D": head_dim, "DP": width, "N": plan.keys, "KIND": kind, "DOT": product_type(query.dtype, kind)}
    lines |= {"HAS_CAP": softcap is not None, "HAS_SLOPES": slopes is not None}
    steps = (*query.stride()[:2], *keys.stride()[:2], table.stride(0))
    attend_split_kernel[(programs, kv_heads)](
        out, part, weight, query, keys, values, table, plan.seq_lens, plan.numbers, slopes, sinks, scale, softcap or 1.0, window or 0, num_rows,
        *steps[:2], out.stride(0), *steps[2:], M=max(triton.next_power_of_2(group), 16), RP=row_lanes(num_rows), LEAST=LEAST_TILES, HAS_SINKS=sinks is not None,
        HAS_WINDOW=window is not None, num_stages=_stages(plan.keys, width, item), num_warps=4, **lines,
    )  # fmt: skip
    prefix_part, prefix_weight, parts = part, weight, 0
    if plan.has_prefix:
        most = 16 if query.dtype == torch.float32 else 64
        tile = max(triton.next_power_of_2(group), min(most, triton.next_power_of_2(num_rows * group)), 16)
        row_tiles = triton.cdiv(num_rows, tile // group)
        parts = max(1, min(PREFIX_PARTS, 2 * chip().units // (row_tiles * kv_heads)))
        prefix_part, prefix_weight = new_parts(out, num_rows * parts)
        attend_prefix_kernel[(row_tiles, kv_heads, parts)](
            prefix_part, prefix_weight, query, keys, values, table, plan.seq_lens, plan.numbers, slopes, scale, softcap or 1.0, num_rows, *steps,
            M=tile, num_stages=3, num_warps=8 if query.dtype == torch.float32 else 4, **lines,
        )  # fmt: skip
    attend_merge_kernel[(num_rows, heads)](
        out, part, weight, prefix_part, prefix_weight, plan.numbers, sinks, num_rows, programs, parts, out.stride(0),
        D=head_dim, DP=width, C=16, LEAST=LEAST_TILES, HAS_PREFIX=plan.has_prefix, HAS_SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    return out


def num_programs(kv_heads: int, most_tiles: int) -> int:
    """P: two programs a unit over all kv heads, and no more than there can be work for."""
    return max(1, min(2 * chip().units // kv_heads, triton.cdiv(most_tiles, LEAST_TILES)))


def _stages(keys: int, width: int, itemsize: int) -> int:
    """Two tiles in flight, or one where two programs a unit have no room for more. Triton keeps one for each two stages, for keys wait for the table."""
    return 1 + 2 * max(1, min(2, chip().shared_bytes // 2 // (2 * keys * width * itemsize)))
