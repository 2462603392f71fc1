"""Pieces that the attention kernels share: one tile of the online softmax, its end, and how parts of it are joined.

Legend: M query lines of a program, N keys of a tile, D head size, DP the power of two that holds it, S slots of a block.

Owns: the scores' order (scale, soft cap, ALiBi, mask), and what a tile reads of the cache.
Reads: `cache.widened`.
Never: launches.

Scores are kept times log2(e), so that exp is exp2. Sums are float32. HIDDEN stands for minus infinity and is finite, so that a line that
has seen no key yet divides nothing by nothing. Slots that no query may see are not read: they may hold NaN.

Source: online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867; FlashAttention-2, Dao 2023, arXiv:2307.08691, section 3.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels.cache import widened

HIDDEN = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_tile(
    q, sums, peak, total, keys, query_pos, begin, end, k_ptr, v_ptr, table_ptr, scale, softcap, slope, window, stride_kb, stride_ks,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """(sums, peak, total) after one more tile of keys.

    Shapes:
        q: [M, DP] zero beyond D; sums: [M, DP], peak, total: [M] float32; query_pos, scale, slope: [M]
        keys: [N] positions of this tile; those outside begin .. end - 1 are not read
        k_ptr, v_ptr: one head of the cache [B, S, D] (stride_kb, stride_ks, 1); table_ptr: the row's block ids
    MASK says what may be hidden: 0 nothing, 1 keys outside begin .. end, 2 also those that causality or the window hides from a line.
    """
    d = tl.arange(0, DP)
    read = (keys >= begin) & (keys < end)
    inside = d < D
    if MASK == 0:
        block = tl.load(table_ptr + keys // S)
    else:
        block = tl.load(table_ptr + keys // S, mask=read, other=0)
    at = block.to(tl.int64) * stride_kb + (keys % S) * stride_ks
    if MASK != 0:
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=inside[:, None] & read[None, :], other=0)
    elif D == DP:
        k = tl.load(k_ptr + at[None, :] + d[:, None])
    else:
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=inside[:, None], other=0)
    s = tl.dot(q, widened(k, KIND, q.dtype), input_precision="ieee") * scale[:, None]
    if HAS_CAP:
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0)) * LOG2E  # softcap * tanh(s / softcap)
    if HAS_SLOPES:
        s += slope[:, None] * (keys[None, :] - query_pos[:, None]).to(tl.float32)
    if MASK == 1:
        s = tl.where(read[None, :], s, HIDDEN)
    if MASK == 2:
        seen = read[None, :] & (keys[None, :] <= query_pos[:, None])
        if HAS_WINDOW:
            seen = seen & (keys[None, :] > query_pos[:, None] - window)
        s = tl.where(seen, s, HIDDEN)
    new_peak = tl.maximum(peak, tl.max(s, 1))
    p = tl.exp2(s - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    if MASK != 0:
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=read[:, None] & inside[None, :], other=0)
    elif D == DP:
        v = tl.load(v_ptr + at[:, None] + d[None, :])
    else:
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=inside[None, :], other=0)
    sums = tl.dot(p.to(q.dtype), widened(v, KIND, q.dtype), sums * shrink[:, None], input_precision="ieee")
    return sums, new_peak, total * shrink + tl.sum(p, 1)


@triton.jit
def finished(sums, peak, total, sink, HAS_SINKS: tl.constexpr):
    """The result [M, DP]: sums over the total, to which a sink adds its weight and no value."""
    if HAS_SINKS:
        top = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - top)
        sums = sums * shrink[:, None]
        total = total * shrink + tl.exp2(sink - top)
    return sums / tl.maximum(total, 1e-30)[:, None]


@triton.jit
def loaded_queries(q_ptr, lines, inside, D: tl.constexpr, DP: tl.constexpr, dtype: tl.constexpr):
    """(queries [M, DP] as `dtype`, what their scores are to be multiplied by [M]); zeros outside.

    Over a cache of 8-bit floats products are of float16, which holds those exactly; bfloat16 queries have a wider range and are divided
    by their largest value first.
    """
    d = tl.arange(0, DP)
    q = tl.load(q_ptr + lines[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0)
    if q.dtype == dtype:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)
    wide = q.to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
    return (wide / top[:, None]).to(dtype), top


@triton.jit
def joined(sums, peak, total, part_ptr, weight_ptr, slot, count, stride, head, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr):
    """(sums [DP], peak, total) after `count` parts from `slot` on, `stride` heads apart, C at a time."""
    d = tl.arange(0, DP)
    for c in tl.range(0, count, C):
        at = (slot + c + tl.arange(0, C)).to(tl.int64) * stride + head
        here = c + tl.arange(0, C) < count
        weight = tl.load(weight_ptr + at, mask=here, other=HIDDEN)
        part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0)
        top = tl.maximum(peak, tl.max(weight, 0))
        share = tl.exp2(weight - top)
        sums = sums * tl.exp2(peak - top) + tl.sum(part * share[:, None], 0)
        total = total * tl.exp2(peak - top) + tl.sum(share, 0)
        peak = top
    return sums, peak, total


@triton.jit
def with_sink(sums, peak, total, sinks_ptr, head, HAS_SINKS: tl.constexpr):
    """(sums, total) of one head after its sink, which has weight and no value."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        top = tl.maximum(peak, sink)
        sums = sums * tl.exp2(peak - top)
        total = total * tl.exp2(peak - top) + tl.exp2(sink - top)
    return sums, total


def new_parts(out: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for parts of results as `out`: attention over some keys [count, num_heads, head_dim], and log2 of its weight [count, num_heads]."""
    made = torch.empty((count, *out.shape[1:]), dtype=torch.float32, device=out.device)
    return made, torch.empty((count, out.shape[1]), dtype=torch.float32, device=out.device)
