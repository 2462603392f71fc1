"""Attention of rows that bring any number of new tokens: chunks of prompts, and rows of one token among them.

Legend: T tokens, R rows, H query heads, K kv heads, G = H / K, D head size, B blocks, S slots of a block, M query lines of a program, N keys of a
tile, L context of a row.

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
from oarlock_triton_kernels.online import HIDDEN, LOG2E, attend_tile, finished, loaded_queries


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


@triton.jit
def attend_chunks_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, starts_ptr, slopes_ptr, sinks_ptr, scale, softcap, window, num_rows, num_tokens,
    stride_qt, stride_qh, stride_ot, stride_cb, stride_ch, stride_tr,
    G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, RP: tl.constexpr, KIND: tl.constexpr,
    DOT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: (T // (M // G) + R + 1, K). Causal attention of a step's new tokens over their rows' paged contexts.

    A program has M // G tokens of one row with all G query heads of one kv head, so that a tile of keys is read once for all of them. Row r
    starts at program starts[r] // (M // G) + r, whatever the lengths are: the grid needs no value from the device. What lies beyond the last
    row is one more row, which sees nothing. Long contexts come first. Tiles that every line sees whole have no mask.

    out_ptr:   [T, H, D]  model dtype, strides (stride_ot, D, 1); tokens of padded rows and beyond the last row become 0
    q_ptr:     [T, H, D]  model dtype, strides (stride_qt, stride_qh, 1)
    k_ptr, v_ptr: [B, K, S, D]  cache dtype, 8-bit floats as uint8; strides (stride_cb, stride_ch, D, 1)
    table_ptr: [R, W]  int32 block ids, strides (stride_tr, 1)
    seq_lens_ptr, starts_ptr: [R] and [R + 1]  int32
    slopes_ptr, sinks_ptr: [H]  float32
    DP, M, N:  D rounded up to a power of two; query lines of a program; keys of a tile
    RP:        a power of two above R
    KIND, DOT: how 8-bit floats are read; the dtype of products

    Reference: oarlock.runtime.reference.attention.ReferenceAttention.attend.
    Cost: 4 H D FLOP for each pair of a query and a key that it sees; 2 T H D + 2 L K D ceil(T G / M) values, of which the keys come mostly from L2.
    Bound: the matrix units, from some 100 new tokens on: M = 128 lines do 4 M D FLOP for the 4 D bytes of a key and its value.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
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
        begin, plain = 0, 0
        if HAS_WINDOW:
            begin = tl.maximum(lowest_pos - window + 1, 0)
        else:
            plain = tl.maximum(lowest_pos + 1, 0) // N * N
            for key in tl.range(0, plain, N):
                sums, peak, total = attend_tile(
                    q, sums, peak, total, key + tl.arange(0, N), query_pos, 0, plain, k_head, v_head, table, factor, softcap, slope, window,
                    stride_cb, D, S, D, DP, KIND, 0, HAS_CAP, HAS_SLOPES, HAS_WINDOW,
                )  # fmt: skip
        end = tl.minimum(seq_len, lowest_pos + TOKENS)
        for key in tl.range(tl.maximum(begin // N * N, plain), end, N):
            sums, peak, total = attend_tile(
                q, sums, peak, total, key + tl.arange(0, N), query_pos, begin, end, k_head, v_head, table, factor, softcap, slope, window,
                stride_cb, D, S, D, DP, KIND, 2, HAS_CAP, HAS_SLOPES, HAS_WINDOW,
            )  # fmt: skip
        sink = tl.load(sinks_ptr + head) * LOG2E if HAS_SINKS else 0.0
        out = finished(sums, peak, total, sink, HAS_SINKS).to(out_ptr.dtype.element_ty)
        d = tl.arange(0, DP)
        to = (first + token).to(tl.int64) * stride_ot + head * D
        tl.store(out_ptr + to[:, None] + d[None, :], out, mask=inside[:, None] & (d < D)[None, :])


def sizes(head_width: int, group: int, query_bytes: int, key_bytes: int, tokens: int) -> dict[str, int]:
    """M, N, warps and stages for heads of `head_width` (a power of two), values of so many bytes, and `tokens` in the longest chunk.

    A chip with much shared memory takes larger tiles, and two of them in flight: Triton keeps one for each two stages, for keys wait for
    the table.
    """
    has_room, is_wide, least = chip().shared_bytes >= 200_000, head_width > 128, triton.next_power_of_2(group)
    if query_bytes == 4:  # no matrix units on most chips: sums and operands are in registers
        return {"M": max(32 if is_wide else 64, least), "N": 16, "num_warps": 8, "num_stages": 3}
    lines = max(64 if tokens * group <= 64 or (is_wide and not has_room) else 128, least)
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
    size = sizes(width, group, query.element_size(), keys.element_size(), max_q)
    tiles = num_tokens // (size["M"] // group) + num_rows + 1
    attend_chunks_kernel[(tiles, kv_heads)](
        out, query, keys, values, block_tables, seq_lens, query_start_loc, slopes, sinks, scale, softcap or 1.0, window or 0, num_rows, num_tokens,
        *query.stride()[:2], out.stride(0), *keys.stride()[:2], block_tables.stride(0),
        G=group, S=keys.shape[2], D=head_dim, DP=width, RP=triton.next_power_of_2(num_rows + 1), KIND=kind, DOT=product_type(query.dtype, kind), HAS_CAP=softcap is not None,
        HAS_SLOPES=slopes is not None, HAS_SINKS=sinks is not None, HAS_WINDOW=window is not None, **size,
    )  # fmt: skip
    return out


def product_type(query: torch.dtype, kind: int) -> tl.dtype:
    """What products are of: the model's dtype; over 8-bit floats float16, but for float32."""
    plain = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[query]
    return plain if kind == PLAIN or plain == tl.float32 else tl.float16
