"""Linears whose weight is codes and whose activations are not: int4, int8 and fp8; and the head, whose sums stay in float32.

Owns: linear_int4, linear_int8, linear_fp8, lm_head, embedding, and their prepares.
Reads: `codes` (the packing and the inner loop), `chip`.
Never: serves a plain linear: the device's own library does.

Legend: M rows of x, N outputs, K inputs, G runs of RUN inputs that share a scale, P programs that share an output's
inputs, COUNTERS as many tiles as may be shared.

Nothing is dequantised beforehand, and a scheme means the same for one row and for thousands: codes are exact in the model's dtype, their products
with x are summed in float32 over the inputs that share a scale, the sum is multiplied by that scale in float32, and the total is rounded once.
The weight is the left factor, which tensor cores take from registers, where codes become numbers: two int4 codes by one mask and one or, by the
layout of `codes`. One row of x is then a narrow tile on the right, not a mostly empty one on the left. The number of rows chooses the tile alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels import codes
from oarlock_triton_kernels.cache import E4M3_BY_BITS
from oarlock_triton_kernels.chip import chip
from oarlock_triton_kernels.codes import PackedCodes, product
from oarlock_triton_kernels.stepwise import STEPWISE

_MAX_SHARED = 0.9  # of the chip's shared memory, for the tiles in flight
_MAX_SPLITS = 16


@triton.jit
def joined(total, inside, at, parts_ptr, counters_ptr, size):
    """(sum of what the programs of one tile have found, where it is to be stored): to the last of them; the others store nothing.

    total: float32, any shape, and inside, at: where it belongs in a result of `size` numbers, fewer than 2^31 over all parts
    """
    part, parts = tl.program_id(2), tl.num_programs(2)
    counter_ptr = counters_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts_ptr + part * size + at, total, mask=inside)
    tl.debug_barrier()  # all of this program's stores come before its count, and its count before its loads
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1
    inside &= is_last
    if is_last:
        total = tl.zeros_like(total)
        for n in range(parts):
            total += tl.load(parts_ptr + n * size + at, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr, 0)
    return total, inside


@triton.jit(**STEPWISE)
def linear_kernel(
    out_ptr, parts_ptr, counters_ptr, x_ptr, codes_ptr, scales_ptr, zeros_ptr, offsets_ptr, bias_ptr,
    num_rows, in_size, out_size, steps, stride_x, stride_cn,
    KIND: tl.constexpr, RUN: tl.constexpr, ZERO: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, IS_SPLIT: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(M / BM), ceil(N / BN), P). x times a weight of codes, in float32 and rounded once.

    The rows' tiles of one tile of the weight run next to each other, so that each code is read from memory once. Where that gives fewer programs
    than the chip has places, P of them share an output's inputs; the last to finish adds up what all have left, in the order of inputs, so that a
    run repeats bit for bit.

    out_ptr:   [M, N]  any float, contiguous
    parts_ptr: [P, M, N]  float32, contiguous, scratch
    counters_ptr: [COUNTERS]  int32, 0 before and after
    x_ptr:     [M, K]  strides (stride_x, 1)
    codes_ptr: [N, K]  strides (stride_cn, 1), of words for int4: see `codes.product`
    scales_ptr, zeros_ptr, offsets_ptr: [G, N]  contiguous
    bias_ptr:  [N]

    Reference: `linear_int4`, `linear_int8`, `linear_fp8` of core's schemes, and `lm_head`.
    Cost: 2 M N K FLOP; N K codes, G N scales and M (N + K) numbers moved.
    Bound: memory up to some 100 rows, as long as an int4 code costs 3 instructions; then the matrix units.
    """
    outs = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    part, parts = tl.program_id(2), tl.num_programs(2)
    first, last = steps * part // parts, steps * (part + 1) // parts
    rows = tl.minimum(row, num_rows - 1).to(tl.int64) * stride_x  # beyond the last: the last again, and not stored
    total = product(
        x_ptr, rows, codes_ptr, tl.minimum(outs, out_size - 1), scales_ptr, zeros_ptr, offsets_ptr, first, last, in_size, out_size, stride_cn,
        KIND, RUN, ZERO, HAS_ZEROS, HAS_OFFSETS, EVEN, STEP,
    )  # fmt: skip
    at = row.to(tl.int64)[None, :] * out_size + outs[:, None]
    inside = (row < num_rows)[None, :] & (outs < out_size)[:, None]
    if IS_SPLIT:
        total, inside = joined(total, inside, at, parts_ptr, counters_ptr, num_rows * out_size)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outs, mask=outs < out_size, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's linear_int4, linear_int8 and linear_fp8."""
    return _multiply(x, weight, bias, x.dtype)


def _multiply(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    odd = 1 if weight.kind == codes.INT4 else 0  # of an odd number of columns int4 holds one more
    if not 0 <= weight.in_size - x.shape[1] <= odd:  # codes were rounded up, so that the kernel cannot tell
        raise RuntimeError(f"x [num_tokens, {x.shape[1]}] does not fit a weight of [{weight.out_size}, {weight.in_size}]")
    x = codes.columns_of(x, weight)
    (rows, in_size), form = x.shape, codes.form_of(weight, x.shape[1])
    out = torch.empty((rows, weight.out_size), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    grid, tile, parts = launch_of(rows, weight, in_size, x.element_size(), form, out)
    linear_kernel[grid](
        out, parts, weight.counters, x, weight.codes, *codes.tables_of(weight), out if bias is None else bias,
        rows, in_size, weight.out_size, triton.cdiv(in_size, form["STEP"]), x.stride(0), weight.codes.stride(0),
        HAS_BIAS=bias is not None, IS_SPLIT=grid[2] > 1, **form, **tile,
    )  # fmt: skip
    return out


def launch_of(
    rows: int, weight: PackedCodes, in_size: int, item_bytes: int, form: dict[str, Any], out: torch.Tensor
) -> tuple[tuple[int, int, int], dict[str, int], torch.Tensor]:
    """(grid, tile, scratch for the parts) of a product of rows of x, `item_bytes` a number: programs share an output's inputs until every unit of the chip has two."""
    tile = tile_of(rows, item_bytes, form)
    grid = (triton.cdiv(rows, tile["BM"]), triton.cdiv(weight.out_size, tile["BN"]))
    tiles, steps = grid[0] * grid[1], triton.cdiv(in_size, form["STEP"])
    splits = max(1, min(2 * chip().units // tiles, steps // 2, _MAX_SPLITS)) if tiles <= weight.counters.numel() else 1
    parts = torch.empty((splits, rows, weight.out_size), dtype=torch.float32, device=out.device) if splits > 1 else out
    return (*grid, splits), tile, parts


def tile_of(rows: int, item_bytes: int, form: dict[str, Any]) -> dict[str, int]:
    """Rows and outputs of a program, its warps, and the stages of loads that fit beside each other: two at least, so that one is on its way."""
    limit, step = int(chip().shared_bytes * _MAX_SHARED), form["STEP"]
    code_bytes = {codes.INT4: 0.5, codes.PLAIN: item_bytes}.get(form["KIND"], 1.0)
    for most in (128, 64, 32, 16):
        rows_of = min(most, max(16, triton.next_power_of_2(rows)))
        outs = 128 if rows_of == 128 or form["KIND"] in (codes.INT4, codes.PLAIN) else 64
        stages = min(4, limit // int(step * (rows_of * item_bytes + outs * code_bytes)))
        # Several sums at a time, or e4m3 that becomes numbers by its bits, take too many registers for so many rows.
        if stages > 1 and not (rows_of == 128 and (0 < form["RUN"] < step or form["KIND"] == E4M3_BY_BITS)):
            break
    return {"BM": rows_of, "BN": outs, "num_warps": 4 if outs == 64 or rows_of < 64 else 8, "num_stages": stages}


# ---------------------------------------------------------------- the head, and the table that it may be


def lm_head(x: torch.Tensor, weight: torch.Tensor | PackedCodes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's lm_head: the sums of a linear in float32, of a plain weight or one of codes."""
    return _multiply(x, weight if isinstance(weight, PackedCodes) else codes.plain(weight), bias, torch.float32)


def head(weight: torch.Tensor | PackedCodes) -> Any:
    """A head's weight as `lm_head` takes it: as it is. None for what another package made of codes."""
    return weight if isinstance(weight, torch.Tensor | PackedCodes) else None


def embedding(ids: torch.Tensor, weight: torch.Tensor | PackedCodes) -> torch.Tensor:
    """As the registry's embedding; of a tied head's codes, its rows in float32."""
    return torch.nn.functional.embedding(ids, weight) if isinstance(weight, torch.Tensor) else codes.rows_of(weight, ids)


def table(weight: Any) -> Any:
    """A tied head's weight as `embedding` takes it; None for one of another package."""
    return weight if isinstance(weight, torch.Tensor | PackedCodes) else None
