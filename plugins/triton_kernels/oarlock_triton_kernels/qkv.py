"""From a projection to the cache in one launch: norms of heads, rotation, scales, and the keys and values written where they stay.

Legend: T tokens of the step, H query heads, KV kv heads, D head size, HALF pairs of it that are rotated, B blocks, S slots of a
block.

Owns: `write_qkv`.
Reads: `cache`.
Never: rounds between its steps: in float32 from the projection to what is stored.

PERF: a launch in place of two, of five where heads have norms; a decode step waits for launches more than for these bytes. Not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from oarlock.backend_api.runtime import HeadSteps

from oarlock_triton_kernels.cache import as_stored, kind_of, narrowed
from oarlock_triton_kernels.stepwise import STEPWISE

TILE = 2048  # numbers of a program


@triton.jit(**STEPWISE)
def qkv_kernel(
    q_ptr, keys_ptr, values_ptr, qkv_ptr, slots_ptr, positions_ptr, table_ptr, q_norm_ptr, k_norm_ptr, eps, k_scale, v_scale, num_tokens,
    stride_t, stride_h, stride_p, stride_cb, stride_ch,
    H: tl.constexpr, KV: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    LINES: tl.constexpr, KIND: tl.constexpr, HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(T / LINES), H + 2 KV). One head of some tokens: a query goes to q_ptr, a key or a value into its slot.

    q_ptr:     [T, H, D]  model dtype, contiguous
    keys_ptr, values_ptr: [B, KV, S, D]  cache dtype, 8-bit floats as uint8; strides (stride_cb, stride_ch, D, 1)
    qkv_ptr:   [T, H + 2 KV, D]  model dtype, strides (stride_t, stride_h, 1): queries, keys, values
    slots_ptr, positions_ptr: [T]  int32
    table_ptr: [max_len, 2, HALF]  float32, strides (stride_p, HALF, 1): cosines, then sines, of pairs (i, i + HALF), or (2i, 2i + 1)
    q_norm_ptr, k_norm_ptr: [D]  model dtype or float32
    PAIRS, REST: HALF rounded up to a power of two; D - 2 HALF, which is not rotated, likewise, or 0
    LINES, KIND: tokens of a program; how 8-bit floats are written

    Reference: oarlock.backend_api.runtime.Attention.write_qkv.
    Cost: 7 T (H + KV) D FLOP; T (H + 2 KV) D m + T H D m + 2 T KV D c bytes for m-byte activations and a c-byte cache.
    Bound: memory, and for a step of decodes its launch.
    """
    token, head = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.program_id(1)
    is_token = token < num_tokens
    line, pair = token.to(tl.int64), tl.arange(0, PAIRS)
    slot = tl.load(slots_ptr + token, mask=is_token, other=0)
    first, apart = (2 * pair, 1) if INTERLEAVED else (pair, HALF)
    rest = 2 * HALF + tl.arange(0, REST if REST > 0 else 1)
    inside, is_rest = is_token[:, None] & (pair < HALF)[None, :], is_token[:, None] & (rest < D)[None, :]
    source = qkv_ptr + (line * stride_t + head * stride_h)[:, None]
    a = tl.load(source + first[None, :], mask=inside, other=0).to(tl.float32)
    b = tl.load(source + (first + apart)[None, :], mask=inside, other=0).to(tl.float32)
    c = tl.load(source + rest[None, :], mask=is_rest, other=0).to(tl.float32)
    if head < H + KV:
        if HAS_NORM:
            weight = tl.where(head < H, q_norm_ptr, k_norm_ptr)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)) / D + eps)[:, None]
            a *= scale * tl.load(weight + first, mask=pair < HALF, other=0).to(tl.float32)[None, :]
            b *= scale * tl.load(weight + first + apart, mask=pair < HALF, other=0).to(tl.float32)[None, :]
            c *= scale * tl.load(weight + rest, mask=rest < D, other=0).to(tl.float32)[None, :]
        angle = table_ptr + (tl.load(positions_ptr + token, mask=is_token, other=0).to(tl.int64) * stride_p)[:, None] + pair[None, :]
        cosine, sine = tl.load(angle, mask=inside, other=0), tl.load(angle + HALF, mask=inside, other=0)
        a, b = a * cosine - b * sine, b * cosine + a * sine
    if head < H:
        query = q_ptr + ((line * H + head) * D)[:, None]
        tl.store(query + first[None, :], a.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(query + (first + apart)[None, :], b.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(query + rest[None, :], c.to(q_ptr.dtype.element_ty), mask=is_rest)
    else:
        is_key = head < H + KV
        unit = tl.where(is_key, 1.0 / k_scale, 1.0 / v_scale)
        at = (slot // S).to(tl.int64) * stride_cb + (head - H - tl.where(is_key, 0, KV)) * stride_ch + (slot % S) * D
        to = tl.where(is_key, keys_ptr, values_ptr) + at[:, None]
        tl.store(to + first[None, :], narrowed(a * unit, KIND, keys_ptr.dtype.element_ty), mask=inside)
        tl.store(to + (first + apart)[None, :], narrowed(b * unit, KIND, keys_ptr.dtype.element_ty), mask=inside)
        tl.store(to + rest[None, :], narrowed(c * unit, KIND, keys_ptr.dtype.element_ty), mask=is_rest)


def write_qkv(qkv: torch.Tensor, cache: tuple[torch.Tensor, ...], slots: torch.Tensor, num_heads: int, steps: HeadSteps) -> torch.Tensor:
    """The queries [num_tokens, num_heads, head_dim] to attend with; keys and values are in their slots. `steps` has a table.

    Shapes:
        qkv:   [num_tokens, num_heads + 2 * num_kv_heads, head_dim]  model dtype; the last dimension contiguous
        cache: keys and values [num_blocks, num_kv_heads, block_size, head_dim]  cache dtype, contiguous
        slots: [num_tokens]  int32; padding points into block 0
    """
    num_tokens, all_heads, head_dim = qkv.shape
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return query
    assert steps.table is not None
    keys, values = (as_stored(tensor) for tensor in cache)
    half = steps.table.shape[-1]
    rest = head_dim - 2 * half
    lines = max(1, min(TILE // triton.next_power_of_2(head_dim), triton.next_power_of_2(num_tokens)))
    qkv_kernel[(triton.cdiv(num_tokens, lines), all_heads)](
        query, keys, values, qkv, slots, steps.positions, steps.table, steps.q_norm, steps.k_norm, steps.eps, steps.k_scale, steps.v_scale, num_tokens,
        *qkv.stride()[:2], steps.table.stride(0), *keys.stride()[:2],
        H=num_heads, KV=keys.shape[1], S=keys.shape[2], D=head_dim, HALF=half, PAIRS=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0, LINES=lines, KIND=kind_of(cache[0].dtype), HAS_NORM=steps.q_norm is not None,
        INTERLEAVED=steps.interleaved, num_warps=4,
    )  # fmt: skip
    return query
