"""The KV cache: how 8-bit floats lie in it, and the kernel that writes new keys and values.

Legend: T tokens of the step, KV kv heads, D head size, B blocks, S slots of a block.

Owns: `write_kv`, and the conversions `widened` and `narrowed` that every kernel over the cache uses.
Reads: `chip`.
Never: chooses a cache's dtype (core does); scales (core's layers do).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels.chip import chip
from oarlock_triton_kernels.stepwise import STEPWISE

# How a cache is stored, for kernels: plain, or bytes.
PLAIN, E4M3, E4M3_BY_BITS, E5M2 = 0, 1, 2, 3
_PLAIN, _E4M3, _E4M3_BY_BITS, _E5M2 = (tl.constexpr(kind) for kind in (PLAIN, E4M3, E4M3_BY_BITS, E5M2))


def kind_of(dtype: torch.dtype) -> int:
    """How kernels read a cache of `dtype`. A chip that does not convert e4m3 moves its bits."""
    if dtype == torch.float8_e4m3fn:
        return E4M3 if "fp8e4nv" in chip().fp8 else E4M3_BY_BITS
    return E5M2 if dtype == torch.float8_e5m2 else PLAIN


def as_stored(cache: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes: Triton takes e4m3 as an argument on some chips only."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


@triton.jit
def widened(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored values as `dtype`, exactly.

    e4m3 has the exponent's bias 7, float16 has 15: its bits in float16's place are the value over 2^8, subnormal ones too.
    """
    if KIND == _PLAIN:
        wide = x
    elif KIND == _E4M3:
        wide = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KIND == _E5M2:
        wide = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        moved = ((x.to(tl.int8, bitcast=True).to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True)
        wide = tl.where((x & 0x7F) == 0x7F, float("nan"), moved * 256.0)
    return wide.to(dtype)


@triton.jit
def narrowed(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """float32 as it is stored, rounded to nearest even; what an 8-bit float cannot hold becomes the largest that it can, NaN stays NaN."""
    if KIND == _PLAIN:
        kept = x.to(dtype)
    else:
        BITS: tl.constexpr = 2 if KIND == _E5M2 else 3  # of the mantissa
        BIAS: tl.constexpr = 15 if KIND == _E5M2 else 7
        TOP: tl.constexpr = 57344.0 if KIND == _E5M2 else 448.0
        LEAST: tl.constexpr = 2.0 ** (1 - BIAS)  # the smallest normal number
        GRID: tl.constexpr = 2.0 ** (BITS + BIAS - 1)  # one over the step between subnormal numbers
        DROP: tl.constexpr = 23 - BITS
        size = tl.minimum(tl.abs(x), TOP)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + (1 << (DROP - 1)) - 1 + ((bits >> DROP) & 1)) >> DROP) - ((127 - BIAS) << BITS)
        subnormal = (size * GRID + 8388608.0).to(tl.int32, bitcast=True) & 0xFF  # beyond 2^23 a float32's lowest bit is 1
        is_nan = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000
        code = tl.where(is_nan, 0x7F, tl.where(size < LEAST, subnormal, normal))
        kept = (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return kept


@triton.jit(**STEPWISE)
def write_kv_kernel(
    keys_ptr, values_ptr, k_ptr, v_ptr, slots_ptr, num_tokens, stride_kt, stride_kh, stride_vt, stride_vh, stride_cb, stride_ch,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LINES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(T / LINES), KV). Writes new keys and values into their slots, in place.

    keys_ptr, values_ptr: [B, KV, S, D]  cache dtype, 8-bit floats as uint8; strides (stride_cb, stride_ch, D, 1)
    k_ptr:     [T, KV, D]  model dtype, strides (stride_kt, stride_kh, 1)
    v_ptr:     [T, KV, D]  model dtype, strides (stride_vt, stride_vh, 1)
    slots_ptr: [T]  int32, block * S + offset; padding points into block 0, where writers may meet
    DP, LINES: D rounded up to a power of two; tokens of a program
    KIND:      how 8-bit floats are written

    Reference: oarlock.runtime.reference.attention.ReferenceAttention.write_kv.
    Cost: 0 FLOP; T KV D (2 m + 2 c) + 4 T bytes for m-byte activations and a c-byte cache.
    Bound: memory. A token's head is one line of D values in both places, so reads and writes are whole lines; a decode step moves so
    little that its launch outweighs it.
    """
    token = tl.program_id(0) * LINES + tl.arange(0, LINES)
    head = tl.program_id(1)
    d = tl.arange(0, DP)[None, :]
    inside = (token < num_tokens)[:, None] & (d < D)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=0)
    at = (slot // S).to(tl.int64) * stride_cb + head * stride_ch + (slot % S) * D
    line = token.to(tl.int64)
    k = tl.load(k_ptr + (line * stride_kt + head * stride_kh)[:, None] + d, mask=inside).to(tl.float32)
    v = tl.load(v_ptr + (line * stride_vt + head * stride_vh)[:, None] + d, mask=inside).to(tl.float32)
    tl.store(keys_ptr + at[:, None] + d, narrowed(k, KIND, keys_ptr.dtype.element_ty), mask=inside)
    tl.store(values_ptr + at[:, None] + d, narrowed(v, KIND, values_ptr.dtype.element_ty), mask=inside)


def write_kv(cache: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write this step's keys and values into their slots, in place.

    Shapes:
        cache:      keys and values [num_blocks, num_kv_heads, block_size, head_dim]  cache dtype, contiguous
        key, value: [num_tokens, num_kv_heads, head_dim]  model dtype; the last dimension contiguous
        slots:      [num_tokens]  int32; padding points into block 0
    """
    num_tokens, heads, head_dim = key.shape
    if not num_tokens:
        return
    keys, values = (as_stored(tensor) for tensor in cache)
    width = max(triton.next_power_of_2(head_dim), 16)
    lines = max(4096 // width, 1)
    write_kv_kernel[(triton.cdiv(num_tokens, lines), heads)](
        keys, values, key, value, slots, num_tokens, *key.stride()[:2], *value.stride()[:2], *keys.stride()[:2],
        S=keys.shape[2], D=head_dim, DP=width, LINES=lines, KIND=kind_of(cache[0].dtype), num_warps=4,
    )  # fmt: skip
