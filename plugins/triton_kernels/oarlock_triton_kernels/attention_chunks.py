"""Attention of rows that bring any number of new tokens: chunks of prompts, and rows of one token among them.

Legend: T tokens, R rows, P parts of a context, H query heads, KV kv heads, G = H / KV, D head size, B blocks, S slots of a block, M query lines of
a program, N keys of a tile, L context of a row, W width of the block tables.

Owns: `attend_chunks`.
Reads: `chip`, `online`, `cache`.
Never: reads a tensor's values on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels.cache import PLAIN, as_stored, kind_of
from oarlock_triton_kernels.chip import chip
from oarlock_triton_kernels.online import HIDDEN, LOG2E, attend_tile, finished, joined, loaded_queries, new_parts, with_sink
from oarlock_triton_kernels.stepwise import STEPWISE

MOST_PARTS, LEAST_KEYS = 8, 256  # of a context that is cut; keys of a part, where the context is as long as it may be


@triton.jit
def row_of(starts_ptr, num_rows, at, STEP: tl.constexpr, RP: tl.constexpr):
    """The last r in 0 .. num_rows with starts[r] // STEP + r <= at, or with starts[r] <= at where STEP is 0; RP > num_rows, a power of two.

    PERF: one load of all starts, for halving would wait for some loads one after another. Not measured.
    """
    r = tl.arange(0, RP)
    start = tl.load(starts_ptr + r, mask=r <= num_rows, other=0)
    if STEP > 0:
        start = start // STEP + r
    return tl.sum(((r <= num_rows) & (start <= at)).to(tl.int32)) - 1


@triton.jit(**STEPWISE)
def attend_chunks_kernel(
    out_ptr, part_ptr, weight_ptr, q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, starts_ptr, slopes_ptr, sinks_ptr, scale, softcap, window,
    num_rows, num_tokens,
    stride_qt, stride_qh, stride_ot, stride_cb, stride_ch, stride_tr,
    G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, RP: tl.constexpr, KIND: tl.constexpr,
    DOT: tl.constexpr, IS_CUT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: (T // (M // G) + R + 1, KV, P). Causal attention of a step's new tokens over their rows' paged contexts.

    A program has M // G tokens of one row with all G query heads of one kv head, so that a tile of keys is read once for all of them. Row r
    starts at program starts[r] // (M // G) + r, whatever the lengths are: the grid needs no value from the device. What lies beyond the last
    row is one more row, which sees nothing. Long contexts come first. Tiles that every line sees whole have no mask. Where there are too few
    programs for the chip, as few new tokens over a long context make, each context is cut into P parts (IS_CUT), and attend_join_kernel joins them.

    out_ptr:   [T, H, D]  model dtype, strides (stride_ot, D, 1); tokens of padded rows and beyond the last row become 0
    part_ptr, weight_ptr: [T, P, H, D] and [T, P, H]  float32, contiguous; in place of out_ptr where IS_CUT
    q_ptr:     [T, H, D]  model dtype, strides (stride_qt, stride_qh, 1)
    k_ptr, v_ptr: [B, KV, S, D]  cache dtype, 8-bit floats as uint8; strides (stride_cb, stride_ch, D, 1)
    table_ptr: [R, W]  int32 block ids, strides (stride_tr, 1)
    seq_lens_ptr, starts_ptr: [R] and [R + 1]  int32
    slopes_ptr, sinks_ptr: [H]  float32
    DP, M, N:  D rounded up to a power of two; query lines of a program; keys of a tile
    RP:        a power of two above R
    KIND, DOT: how 8-bit floats are read; the dtype of products

    Reference: oarlock.runtime.reference.attention.ReferenceAttention.attend.
    Cost: 4 H D FLOP for each pair of a query and a key that it sees; 2 T H D + 2 L KV D ceil(T G / M) values, of which the keys come mostly from L2.
    Bound: the matrix units, from some 100 new tokens on: M = 128 lines do 4 M D FLOP for the 4 D bytes of a key and its value.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    TOKENS: tl.constexpr = M // G
    row = row_of(starts_ptr, num_rows, tile, TOKENS, RP)
    first = tl.load(starts_ptr + row)
    after = tl.load(starts_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    at = (tile - first // TOKENS - row) * TOKENS  # of the row's new tokens, the program's first
    if first + at < after:
        line = tl.arange(0, M)
        token = at + line // G
        head = kv_head * G + line % G
        inside = (line < TOKENS * G) & (first + token < after)
        query_pos = seq_len - (after - first) + token
        lowest_pos = seq_len - (after - first) + at
        q, unit = loaded_queries(q_ptr, (first + token).to(tl.int64) * stride_qt + head * stride_qh, inside, D, DP, DOT)
        factor = unit * scale if HAS_CAP else unit * (scale * LOG2E)
        slope = tl.load(slopes_ptr + head) * LOG2E if HAS_SLOPES else 0.0
        k_head, v_head, table = k_ptr + kv_head * stride_ch, v_ptr + kv_head * stride_ch, table_ptr + row.to(tl.int64) * stride_tr
        sums, peak, total = tl.zeros([M, DP], tl.float32), tl.full([M], HIDDEN, tl.float32), tl.zeros([M], tl.float32)
        end = tl.minimum(seq_len, lowest_pos + TOKENS)
        begin = tl.maximum(lowest_pos - window + 1, 0) if HAS_WINDOW else 0
        start, stop = begin // N * N, end  # of this part
        if IS_CUT:
            each = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), N), parts) * N
            start += part * each
            stop = tl.minimum(start + each, end)
        plain = start
        if not HAS_WINDOW:
            plain = tl.maximum(start, tl.minimum(stop, tl.maximum(lowest_pos + 1, 0) // N * N))
            for key in tl.range(start, plain, N):
                sums, peak, total = attend_tile(
                    q, sums, peak, total, key + tl.arange(0, N), query_pos, 0, end, k_head, v_head, table, factor, softcap, slope, window,
                    stride_cb, D, S, D, DP, KIND, 0, HAS_CAP, HAS_SLOPES, HAS_WINDOW,
                )  # fmt: skip
        for key in tl.range(plain, stop, N):
            sums, peak, total = attend_tile(
                q, sums, peak, total, key + tl.arange(0, N), query_pos, begin, end, k_head, v_head, table, factor, softcap, slope, window,
                stride_cb, D, S, D, DP, KIND, 2, HAS_CAP, HAS_SLOPES, HAS_WINDOW,
            )  # fmt: skip
        d = tl.arange(0, DP)
        stored = inside[:, None] & (d < D)[None, :]
        if not IS_CUT:
            sink = tl.load(sinks_ptr + head) * LOG2E if HAS_SINKS else 0.0
            to = (first + token).to(tl.int64) * stride_ot + head * D
            done = finished(sums, peak, total, sink, HAS_SINKS).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + to[:, None] + d[None, :], done, mask=stored)
        else:
            to = ((first + token).to(tl.int64) * parts + part) * (tl.num_programs(1) * G) + head
            tl.store(part_ptr + to[:, None] * D + d[None, :], finished(sums, peak, total, 0.0, False), mask=stored)
            tl.store(weight_ptr + to, tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), HIDDEN), mask=inside)


@triton.jit(**STEPWISE)
def attend_join_kernel(
    out_ptr, part_ptr, weight_ptr, sinks_ptr, parts, stride_ot, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, HAS_SINKS: tl.constexpr
):  # fmt: skip
    """Grid: (T, H). Joins the P parts of each token's head.

    out_ptr:  [T, H, D]  model dtype, strides (stride_ot, D, 1)
    part_ptr, weight_ptr: [T, P, H, D] and [T, P, H]  float32, contiguous
    sinks_ptr: [H]  float32
    DP, C:    D rounded up to a power of two; parts that are read at a time

    Reference: oarlock.runtime.reference.attention.ReferenceAttention.attend.
    Cost: 3 T P H D FLOP; 4 T P H D bytes, and w T H D of results of w bytes.
    Bound: memory, of some megabytes that are in L2.
    """
    token, head, heads, d = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.arange(0, DP)
    sums, peak, total = tl.zeros([DP], tl.float32), tl.full([], HIDDEN, tl.float32), tl.full([], 0.0, tl.float32)
    sums, peak, total = joined(sums, peak, total, part_ptr, weight_ptr, token * parts, parts, heads, head, D, DP, C)
    sums, total = with_sink(sums, peak, total, sinks_ptr, head, HAS_SINKS)
    done = (sums / tl.maximum(total, 1e-30)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * stride_ot + head * D + d, done, mask=d < D)


def row_lanes(num_rows: int) -> int:
    """RP: a power of two above num_rows. Few of them: each is a kernel of its own to compile, and lanes cost next to nothing."""
    return 128 if num_rows < 128 else max(1024, triton.next_power_of_2(num_rows + 1))


def sizes(head_width: int, group: int, query_bytes: int, key_bytes: int, tokens: int, *, is_cut: bool) -> dict[str, int]:
    """M, N, warps and stages for heads of `head_width` (a power of two), values of so many bytes, and `tokens` in the longest chunk.

    Whether contexts are cut counts for wide heads: to write parts takes registers.

    A chip with much shared memory takes larger tiles, and two of them in flight: Triton keeps one for each two stages, for keys wait for
    the table.
    """
    has_room, is_wide, least = chip().shared_bytes >= 200_000, head_width > 128, triton.next_power_of_2(group)
    if query_bytes == 4:  # no matrix units on most chips: sums and operands are in registers
        return {"M": max(32 if is_wide else 64, least), "N": 16, "num_warps": 8, "num_stages": 3}
    lines = max(64 if tokens * group <= 64 or (is_wide and (is_cut or not has_room)) else 128, least)
    keys = 64 if lines >= 128 and not is_wide and (key_bytes == 2 or has_room) else 32
    return {"M": lines, "N": keys, "num_warps": 8 if lines >= 128 or is_wide else 4, "num_stages": 5 if has_room and not is_wide else 3}


def attend_chunks(
    query: torch.Tensor, cache: tuple[torch.Tensor, ...], block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    max_q: int, scale: float, *, window: int | None = None, softcap: float | None = None, slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of any rows' new tokens.

    Shapes:
        query:           [num_tokens, num_heads, head_dim]  model dtype; the last dimension contiguous
        cache:           keys and values [num_blocks, num_kv_heads, block_size, head_dim]  model dtype or 8-bit floats, contiguous
        block_tables:    [num_rows, num_blocks of the longest]  int32; entries past a row's context are not read
        seq_lens:        [num_rows]      int32; 0 for a padded row, whose tokens give 0
        query_start_loc: [num_rows + 1]  int32
        slopes, sinks:   [num_heads]  float32, or None
        result:          as query, contiguous
    """
    num_tokens, heads, head_dim = query.shape
    keys, values = (as_stored(tensor) for tensor in cache)
    kv_heads, kind = keys.shape[1], kind_of(cache[0].dtype)
    group, width, num_rows = heads // kv_heads, max(triton.next_power_of_2(head_dim), 16), len(seq_lens)
    out = torch.empty((num_tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    if not num_tokens:
        return out
    most_keys = min(block_tables.shape[1] * keys.shape[2], (window or 1 << 40) + max_q)
    tiles = parts = 1
    for is_cut in (False, True):
        size = sizes(width, group, query.element_size(), keys.element_size(), max_q, is_cut=is_cut)
        tiles = num_tokens // (size["M"] // group) + num_rows + 1
        parts = num_parts(tiles * kv_heads, most_keys)
        if parts == 1:
            break
    part, weight = new_parts(out, num_tokens * parts) if parts > 1 else (out, out)
    attend_chunks_kernel[(tiles, kv_heads, parts)](
        out, part, weight, query, keys, values, block_tables, seq_lens, query_start_loc, slopes, sinks, scale, softcap or 1.0, window or 0, num_rows,
        num_tokens, *query.stride()[:2], out.stride(0), *keys.stride()[:2], block_tables.stride(0),
        G=group, S=keys.shape[2], D=head_dim, DP=width, RP=row_lanes(num_rows), KIND=kind, DOT=product_type(query.dtype, kind),
        IS_CUT=parts > 1, HAS_CAP=softcap is not None, HAS_SLOPES=slopes is not None, HAS_SINKS=sinks is not None, HAS_WINDOW=window is not None, **size,
    )  # fmt: skip
    if parts > 1:
        attend_join_kernel[(num_tokens, heads)](
            out, part, weight, sinks, parts, out.stride(0), D=head_dim, DP=width, C=MOST_PARTS, HAS_SINKS=sinks is not None, num_warps=1,
        )  # fmt: skip
    return out


def num_parts(programs: int, most_keys: int) -> int:
    """Into how many parts a context of at most `most_keys` is cut where this many programs would run: two a unit are enough."""
    return max(1, min(MOST_PARTS, 2 * chip().units // programs, most_keys // LEAST_KEYS))


def product_type(query: torch.dtype, kind: int) -> tl.dtype:
    """What products are of: the model's dtype; over 8-bit floats float16, but for float32."""
    plain = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[query]
    return plain if kind == PLAIN or plain == tl.float32 else tl.float16
