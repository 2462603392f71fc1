"""Linears whose weight and activations both have 8 bits: int8, and float8_e4m3fn with scales of tensors, channels or blocks.

Owns: linear_w8a8, linear_w8a8_fp8, and their prepares.
Reads: `codes` (packing), `linear_codes` (how a product is launched and its parts are joined), `cache.narrowed`.
Never: gives a token another scale because of its batch.

Legend: M rows of x, N outputs, K inputs, G runs of RUN inputs that share a scale, P programs that share an output's
inputs, COUNTERS as many tiles as may be shared.

A row's scale is its largest number over the largest code; a static scale is that of the checkpoint. Products are exact: of int8 in int32, of
float8 in float32 over at most 128 inputs, after which they are added in float32 (tensor cores keep 14 bits of longer sums).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from oarlock.backend_api.runtime import registry

from oarlock_triton_kernels import codes
from oarlock_triton_kernels.cache import E4M3, narrowed, widened
from oarlock_triton_kernels.codes import INT8, PackedCodes
from oarlock_triton_kernels.linear_codes import joined, launch_of
from oarlock_triton_kernels.stepwise import STEPWISE

log = logging.getLogger("oarlock.triton")
_INT8, _E4M3 = tl.constexpr(INT8), tl.constexpr(E4M3)
_TILE = 4096  # numbers of a program that rounds activations


@dataclass(frozen=True, slots=True)
class Packed8:
    """A weight of 8 bits for activations of 8 bits."""

    weight: PackedCodes  # of one run, or of runs of 32, 64 or 128
    input_scale: torch.Tensor | None  # [1] float32; None: of each token and run


def pack_int8(weight: dict[str, torch.Tensor]) -> Packed8:
    """Pack a w8a8 weight in core's common form (docs/backends.md, "Quantised weights")."""
    return Packed8(codes.pack_int8(weight), weight.get("input_scale"))


def pack_fp8(weight: dict[str, torch.Tensor]) -> Packed8 | dict[str, torch.Tensor]:
    """Pack a w8a8_fp8 weight; one of runs that are none of 32, 64 and 128 is left as it is, and that is logged."""
    count, width = weight["scales"].shape[-1], weight["codes"].shape[-1]
    packed = codes.pack_fp8(weight)
    if packed.order is None and packed.run in (0, width // count):
        return Packed8(packed, weight.get("input_scale"))
    _say_left(width // count)
    return weight


@functools.cache
def _say_left(run: int) -> None:
    log.warning("float8 weights with a scale for %d columns are multiplied by the plain reference, slowly: kernels take 32, 64, 128 or all", run)


@triton.jit(**STEPWISE)
def round_rows_kernel(
    out_ptr, scales_ptr, x_ptr, static_ptr, num_rows, in_size, run, width, stride_x,
    IS_STATIC: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(M / ROWS), G). Rounds activations to 8 bits: their largest number in a row and run becomes the largest code.

    out_ptr:    [M, K']  int8, or float8_e4m3fn as uint8; contiguous; K' >= K, filled up with zeros
    scales_ptr: [G, M]  float32, contiguous
    x_ptr:      [M, K]  strides (stride_x, 1)
    static_ptr: [1]  float32: the scale, where IS_STATIC
    WIDTH:      `run` inputs rounded up to a power of two

    Reference: the first lines of `linear_w8a8` and `linear_w8a8_fp8` of core's schemes; half to even, saturating.
    Cost: 15 M K operations; M K (1 + bytes of x) moved.
    Bound: memory; for few rows the latency of the launch.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    column = tl.program_id(1) * run + lane
    is_row, is_lane = row < num_rows, lane < run
    inside = is_row[:, None] & (is_lane & (column < in_size))[None, :]
    x = tl.load(x_ptr + (row.to(tl.int64) * stride_x)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    LARGEST: tl.constexpr = 127.0 if KIND == _INT8 else 448.0
    if IS_STATIC:
        scale = tl.zeros([ROWS], tl.float32) + tl.load(static_ptr)
    else:
        largest = tl.max(tl.abs(x), 1)
        scale = tl.where(largest > 0.0, tl.math.div_rn(largest, tl.full([ROWS], LARGEST, tl.float32)), 1.0)
    scaled = tl.math.div_rn(x, tl.zeros_like(x) + scale[:, None])
    if KIND == _INT8:
        rounded = (tl.clamp(scaled, -128.0, 127.0) + 12582912.0) - 12582912.0  # 1.5 * 2^23: half to even
        kept = rounded.to(tl.int8)
    else:
        kept = narrowed(scaled, KIND, tl.uint8)
    tl.store(out_ptr + (row.to(tl.int64) * width)[:, None] + column[None, :], kept, mask=is_row[:, None] & (is_lane & (column < width))[None, :])
    tl.store(scales_ptr + tl.program_id(1) * num_rows + row, scale, mask=is_row)


@triton.jit(**STEPWISE)
def linear_8bit_kernel(
    out_ptr, parts_ptr, counters_ptr, x_ptr, x_scales_ptr, codes_ptr, scales_ptr, bias_ptr,
    num_rows, out_size, width, steps,
    KIND: tl.constexpr, RUN: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SPLIT: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(M / BM), ceil(N / BN), P). Codes of x times codes of the weight, by tensor cores of 8 bits where the chip has those of the kind.

    out_ptr:      [M, N]  any float, contiguous
    parts_ptr:    [P, M, N]  float32, contiguous, scratch
    counters_ptr: [COUNTERS]  int32, 0 before and after
    x_ptr:        [M, K]  codes, contiguous
    x_scales_ptr: [G, M]  float32, contiguous
    codes_ptr:    [N, K]  codes, contiguous
    scales_ptr:   [G, N]  contiguous
    bias_ptr:     [N]

    Reference: `linear_w8a8` and `linear_w8a8_fp8` of core's schemes, after activations are rounded.
    Cost: 2 M N K FLOP; (M + N) K bytes and M N numbers moved.
    Bound: memory up to some 300 rows, then the matrix units.
    """
    outs = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    part, parts = tl.program_id(2), tl.num_programs(2)
    lane = tl.arange(0, STEP)
    of_weight = codes_ptr + tl.minimum(outs, out_size - 1).to(tl.int64)[:, None] * width + lane[None, :]
    of_x = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * width + lane[:, None]
    whole, total = tl.zeros([BN, BM], tl.int32), tl.zeros([BN, BM], tl.float32)
    for step in range(steps * part // parts, steps * (part + 1) // parts):
        weight, x = tl.load(of_weight + step * STEP), tl.load(of_x + step * STEP)
        if KIND == _INT8:
            whole = tl.dot(weight, x, whole, out_dtype=tl.int32)
        else:
            if KIND == _E4M3:
                product = tl.dot(weight.to(tl.float8e4nv, bitcast=True), x.to(tl.float8e4nv, bitcast=True))
            else:
                product = tl.dot(widened(weight, KIND, tl.float16), widened(x, KIND, tl.float16))
            if RUN > 0:
                run = step * STEP // RUN
                product *= tl.load(scales_ptr + run * out_size + outs, mask=outs < out_size, other=0.0).to(tl.float32)[:, None]
                product *= tl.load(x_scales_ptr + run * num_rows + row, mask=row < num_rows, other=0.0)[None, :]
            total += product
    if KIND == _INT8:
        total = whole.to(tl.float32)
    if RUN == 0:
        total *= tl.load(scales_ptr + outs, mask=outs < out_size, other=0.0).to(tl.float32)[:, None]
        total *= tl.load(x_scales_ptr + row, mask=row < num_rows, other=0.0)[None, :]
    at = row.to(tl.int64)[None, :] * out_size + outs[:, None]
    inside = (row < num_rows)[None, :] & (outs < out_size)[:, None]
    if IS_SPLIT:
        total, inside = joined(total, inside, at, parts_ptr, counters_ptr, num_rows * out_size)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outs, mask=outs < out_size, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear_int8(x: torch.Tensor, weight: Packed8, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's linear_w8a8."""
    return _multiply(x, weight, bias)


def linear_fp8(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's linear_w8a8_fp8; by its reference where a weight could not be packed."""
    if not isinstance(weight, Packed8):
        return registry()["linear_w8a8_fp8"].reference(x, weight, bias)
    return _multiply(x, weight, bias)


def rounded(x: torch.Tensor, packed: Packed8) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [M, K'] as the weight's, scales [G, M] float32) of activations; M > 0.

    Raises:
        RuntimeError: x does not fit the weight.
    """
    weight, (rows, in_size) = packed.weight, x.shape
    if in_size != weight.in_size:  # codes were rounded up, so that the kernel cannot tell
        raise RuntimeError(f"x [num_tokens, {in_size}] does not fit a weight of [{weight.out_size}, {weight.in_size}]")
    x = x if x.stride(1) == 1 else x.contiguous()
    run = weight.run or weight.width
    runs = weight.width // run
    kept = torch.empty((rows, weight.width), dtype=weight.codes.dtype, device=x.device)
    scales = torch.empty((runs, rows), dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(run)
    per_program = max(1, min(_TILE // size, triton.next_power_of_2(rows)))
    round_rows_kernel[(triton.cdiv(rows, per_program), runs)](
        kept, scales, x, scales if packed.input_scale is None else packed.input_scale, rows, in_size, run, weight.width, x.stride(0),
        IS_STATIC=packed.input_scale is not None, KIND=weight.kind, ROWS=per_program, WIDTH=size, num_warps=min(max(size * per_program // 512, 1), 16),
    )  # fmt: skip
    return kept, scales


def _multiply(x: torch.Tensor, packed: Packed8, bias: torch.Tensor | None) -> torch.Tensor:
    weight, rows = packed.weight, x.shape[0]
    out = torch.empty((rows, weight.out_size), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    kept, scales = rounded(x, packed)
    form = codes.form_of(weight, weight.width)
    grid, tile, parts = launch_of(rows, weight, weight.width, 1, form, out)
    linear_8bit_kernel[grid](
        out, parts, weight.counters, kept, scales, weight.codes, weight.scales, out if bias is None else bias,
        rows, weight.out_size, weight.width, triton.cdiv(weight.width, form["STEP"]),
        KIND=weight.kind, RUN=weight.run, HAS_BIAS=bias is not None, IS_SPLIT=grid[2] > 1, STEP=form["STEP"], **tile,
    )  # fmt: skip
    return out
