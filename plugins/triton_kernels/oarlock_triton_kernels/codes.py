"""Weights made of codes: how they lie in memory for the kernels, and the product that multiplies them as they are.

Owns: `PackedCodes`, its packing once at load, and `product`, the inner loop of every linear and expert kernel.
Reads: `cache.widened` (8-bit floats).
Never: keeps a second form of a weight; rounds a scale.

Legend: N outputs, K inputs, G runs of RUN inputs that share a scale, BN outputs and BM rows of a program, STEP inputs of an iteration.

One numeric definition for every scheme, whatever the number of rows: codes are exact in the model's dtype, their products with x are summed in
float32 over a run, the sum is multiplied by the run's scale in float32, and the total is rounded once. Nothing is dequantised beforehand.

The weight is the left factor, [BN, STEP] times [STEP, BM]: tensor cores take that one from registers, where codes become numbers, and few rows
of x are a narrow tile on the right instead of a mostly empty one on the left.

int4 lies in words of 32 bits, so that two codes at a time become two numbers by one mask and one or:

    128 inputs  ->  16 words; word i, half h, bits 4j .. 4j + 3 of the half: input 32 j + 2 i + h
    (word >> 4 j) & 0x000F000F | 0x43004300  ->  two bfloat16 numbers 128 + code
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels.cache import PLAIN, kind_of, widened

INT4, INT8 = 4, 8  # kinds of codes beside cache's PLAIN, E4M3 and E4M3_BY_BITS
_PLAIN, _INT4, _INT8 = tl.constexpr(PLAIN), tl.constexpr(INT4), tl.constexpr(INT8)
_GRANULE = 128  # inputs of int4 that are packed together
_RUNS = (128, 64, 32)  # lengths of runs that kernels take
_INT4_ZERO = 8
COUNTERS = 1024
_PLAIN_STEP = 64  # inputs of an iteration over numbers
_ROWS = 4096  # outputs that are packed at a time: it takes 12 bytes an input


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A quantised weight as the kernels read it; experts before its other dimensions. Made once at load, in place of core's common form."""

    kind: int  # INT4, INT8, or cache's E4M3, E4M3_BY_BITS or PLAIN
    codes: torch.Tensor  # [..., N, K / 8] int32 for int4, else [..., N, K] int8 or uint8; K rounded up to whole granules
    scales: torch.Tensor  # [..., G, N] float32, or a 16-bit float that keeps every bit
    zeros: torch.Tensor | None  # [..., G, N] int16, subtracted from codes; None: `zero`
    offsets: torch.Tensor | None  # [..., G, N] float32, added to scaled codes
    zero: int
    run: int  # inputs that share a scale; 0: all
    order: torch.Tensor | None  # [K] int64: which column of x each input is, one past the last for none; None: as they are; of experts [E, K] int32
    in_size: int  # columns of x
    counters: torch.Tensor  # [COUNTERS] int32, 0 between launches: how many of the programs that share outputs are done; empty: they may not share

    @property
    def out_size(self) -> int:
        return self.codes.shape[-2]

    @property
    def width(self) -> int:
        """K."""
        return self.codes.shape[-1] * (8 if self.kind == INT4 else 1)


def pack_int4(weight: dict[str, torch.Tensor]) -> PackedCodes:
    """Pack an int4 weight in core's common form (docs/backends.md, "Quantised weights")."""
    halves = weight["codes"]
    columns = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
    in_size = weight["groups"].shape[-1] if "groups" in weight else columns.shape[-1]
    if in_size % weight["scales"].shape[-1]:  # an odd last column is paired with one that is none
        in_size -= 1
    zero = 0 if "offsets" in weight else _INT4_ZERO
    return _packed(INT4, columns[..., :in_size], weight, zero)


def pack_int8(weight: dict[str, torch.Tensor]) -> PackedCodes:
    """Pack an int8 weight."""
    return _packed(INT8, weight["codes"], weight, 0)


def pack_fp8(weight: dict[str, torch.Tensor]) -> PackedCodes:
    """Pack a float8_e4m3fn weight."""
    return _packed(kind_of(torch.float8_e4m3fn), weight["codes"].view(torch.uint8), weight, 0)


def plain(weight: torch.Tensor) -> PackedCodes:
    """A weight of numbers, as one of codes without scales: its last dimension of stride 1."""
    none = weight.new_empty((*weight.shape[:-2], 0, 0))
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    return PackedCodes(PLAIN, weight, none, None, None, 0, 0, None, weight.shape[-1], none)


def _packed(kind: int, columns: torch.Tensor, weight: dict[str, torch.Tensor], zero: int) -> PackedCodes:
    in_size, count = columns.shape[-1], weight["scales"].shape[-1]
    run, order, of = _runs(weight.get("groups"), in_size, count, columns.device)
    width = order.shape[-1] if order is not None else in_size
    granule = _GRANULE if kind == INT4 else 64 if run == 0 and in_size > 32 else max(run, 32)
    missing = -width % granule
    if order is not None:
        columns = _picked(torch.nn.functional.pad(columns, (0, 1)), order, -1)
        order = torch.nn.functional.pad(order, (0, missing), value=in_size)
        order = order if order.dim() == 1 else order.to(torch.int32)
    columns = torch.nn.functional.pad(columns, (0, missing))
    tables = {name: weight[name].transpose(-1, -2) for name in ("scales", "zeros", "offsets") if name in weight}
    if run:
        of = torch.nn.functional.pad(of, (0, -(-columns.shape[-1] // run) - of.shape[-1]))
        tables = {name: _picked(table, of, -2) for name, table in tables.items()}
    return PackedCodes(
        kind,
        _words(columns) if kind == INT4 else columns.contiguous(),
        _narrowest(tables["scales"]),
        tables["zeros"].contiguous() if "zeros" in tables else None,
        tables["offsets"].contiguous() if "offsets" in tables else None,
        zero,
        run,
        order,
        in_size,
        torch.zeros(COUNTERS, dtype=torch.int32, device=columns.device),
    )


def _runs(groups: torch.Tensor | None, in_size: int, count: int, device: torch.device) -> tuple[int, torch.Tensor | None, torch.Tensor]:
    """(run, order, the group of each run) of columns in `count` groups, of experts where groups are [E, K]; runs are the longest that fit whole
    into every group.

    Groups that no run fits are filled up to whole ones by inputs that are none, and so are experts that have fewer runs than another.
    """
    if count == 1:
        return 0, None, torch.zeros(0, dtype=torch.int64, device=device)
    by = torch.arange(in_size) // (in_size // count) if groups is None else groups.cpu().long()
    outer = by.shape[:-1]
    sizes = torch.zeros((*outer, count), dtype=torch.int64).scatter_add_(-1, by, torch.ones_like(by))
    run = next((run for run in _RUNS if not (sizes % run).any()), _RUNS[-1])
    filled = -(-sizes // run) * run
    width = int(filled.sum(-1).max())
    of = torch.searchsorted((filled // run).cumsum(-1), torch.arange(width // run).expand(*outer, -1).contiguous(), right=True).clamp(max=count - 1)
    if groups is None and torch.equal(sizes, filled):
        return run, None, of.to(device)
    group, places = by.sort(dim=-1, stable=True)
    begins, firsts = filled.cumsum(-1) - filled, sizes.cumsum(-1) - sizes
    order = torch.full((*outer, width), in_size).scatter(-1, begins.gather(-1, group) + torch.arange(in_size) - firsts.gather(-1, group), places)
    return run, order.to(device), of.to(device)


def _picked(table: torch.Tensor, at: torch.Tensor, dim: int) -> torch.Tensor:
    """`table` at these places of a dimension; at [E, .] has places of its own for each expert."""
    if at.dim() == 1:
        return table.index_select(dim, at)
    return torch.stack([own.index_select(dim, places) for own, places in zip(table, at, strict=True)])


def _words(columns: torch.Tensor) -> torch.Tensor:
    """[..., N, K] of 0 .. 15 -> [..., N, K / 8] int32, K a multiple of 128."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=columns.device).view(2, 4).t()[:, None, :]  # of (j, h)
    packed = columns.new_empty((*columns.shape[:-1], columns.shape[-1] // 8), dtype=torch.int32)
    for rows, words in zip(columns.flatten(0, -2).split(_ROWS), packed.flatten(0, -2).split(_ROWS), strict=True):
        parts = rows.to(torch.int32).unflatten(-1, (-1, 4, 16, 2))  # granule, j, i, h
        words.copy_((parts << shifts).sum((-3, -1)).flatten(-2))
    return packed


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """The scales in 16 bits where that keeps every one of them."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow.contiguous()
    return scales.contiguous()


def columns_of(x: torch.Tensor, weight: PackedCodes) -> torch.Tensor:
    """x with its columns where the weight's inputs are, its last dimension of stride 1."""
    if weight.order is not None:
        return torch.nn.functional.pad(x, (0, 1)).index_select(1, weight.order)
    return x if x.stride(1) == 1 else x.contiguous()


def rows_of(weight: PackedCodes, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the weight, [num_ids, in_size] float32. A few thousand tokens a step at most: plain torch."""
    ids = ids.long()
    numbers = weight.codes[ids]
    if weight.kind == INT4:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=numbers.device).view(2, 4).t()[:, None, :]  # of (j, h), as in `_words`
        numbers = ((numbers.unflatten(-1, (-1, 1, 16, 1)) >> shifts) & 15).flatten(1)
    elif weight.kind != INT8:
        numbers = numbers.view(torch.float8_e4m3fn)
    numbers, width = numbers.float(), weight.width

    def spread(table: torch.Tensor) -> torch.Tensor:
        of_ids = table[:, ids].t().float()
        return of_ids.repeat_interleave(weight.run, 1)[:, :width] if weight.run else of_ids

    if weight.zeros is not None or weight.offsets is None:
        numbers = numbers - (weight.zero if weight.zeros is None else spread(weight.zeros))
    numbers = numbers * spread(weight.scales)
    if weight.offsets is not None:
        numbers = numbers + spread(weight.offsets)
    if weight.order is None:
        return numbers[:, : weight.in_size]
    plain = numbers.new_empty(len(ids), weight.in_size + 1)  # the last column takes what is none
    plain[:, weight.order] = numbers
    return plain[:, : weight.in_size]


def tables_of(weight: PackedCodes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales, zeros and offsets; the scales again for what the weight has not."""
    return weight.scales, weight.scales if weight.zeros is None else weight.zeros, weight.scales if weight.offsets is None else weight.offsets


def form_of(weight: PackedCodes, columns: int) -> dict[str, Any]:
    """What `product` has to know of a weight, for x with so many columns."""
    if weight.kind == PLAIN:
        step, is_even = _PLAIN_STEP, columns % _PLAIN_STEP == 0
    else:
        step = 128 if weight.kind == INT4 else next(step for step in _RUNS if not weight.width % step and not weight.run % step)
        is_even = columns == weight.width
    return {
        "KIND": weight.kind, "RUN": weight.run, "ZERO": weight.zero, "HAS_ZEROS": weight.zeros is not None, "HAS_OFFSETS": weight.offsets is not None,
        "EVEN": is_even, "STEP": step,
    }  # fmt: skip


# ---------------------------------------------------------------- the inner loop


@triton.jit
def _part(words, j: tl.constexpr, zero, dtype: tl.constexpr):
    """[BN, 16] words -> [BN, 32] numbers: code j of each half, less zero; zero [BN, 1] or [1, 1] float32."""
    HALF: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.bfloat16
    ABOVE: tl.constexpr = 1024.0 if dtype == tl.float16 else 128.0
    two = ((words >> (4 * j)) & 0x000F000F) | (0x64006400 if dtype == tl.float16 else 0x43004300)
    halves = tl.reshape(tl.join(two.to(tl.int16), (two >> 16).to(tl.int16)), [words.shape[0], 2 * words.shape[1]])
    return (halves.to(HALF, bitcast=True) - (zero + ABOVE).to(HALF)).to(dtype)


@triton.jit
def _beside(a, b):
    """[BN, W] and [BN, W] -> [BN, 2 W]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def _numbers(codes, PART: tl.constexpr, WIDTH: tl.constexpr, zero, KIND: tl.constexpr, dtype: tl.constexpr):
    """[BN, WIDTH] numbers, exact: part PART of what was loaded of an int4 weight, all of it of another."""
    if KIND == _INT4:
        if WIDTH == 32:
            numbers = _part(codes, PART, zero, dtype)
        elif WIDTH == 64:
            numbers = _beside(_part(codes, 2 * PART, zero, dtype), _part(codes, 2 * PART + 1, zero, dtype))
        else:
            low = _beside(_part(codes, 0, zero, dtype), _part(codes, 1, zero, dtype))
            numbers = _beside(low, _beside(_part(codes, 2, zero, dtype), _part(codes, 3, zero, dtype)))
    elif KIND == _INT8:
        numbers = (codes.to(tl.float32) - zero).to(dtype)
    else:
        numbers = widened(codes, KIND, dtype)
    return numbers


@triton.jit
def product(
    x_ptr, rows, codes_ptr, outs, scales_ptr, zeros_ptr, offsets_ptr, first, last, in_size, out_size, stride_cn,
    KIND: tl.constexpr, RUN: tl.constexpr, ZERO: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr, EVEN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """[BN, BM] float32: outputs `outs` of the weight times rows of x, over the inputs of the steps first .. last - 1.

    Shapes:
        x_ptr:      the model's dtype, last dimension of stride 1; rows [BM] int64: where each row begins
        codes_ptr:  [N, .] (stride_cn, 1): words of int4, int8, uint8 of e4m3, or numbers where KIND is PLAIN; outs [BN], all below N
        scales_ptr, zeros_ptr, offsets_ptr: [G, N]; one run, of everything, where RUN is 0
    EVEN: x has a column for every input, so that nothing needs a mask. STEP: 128 for int4, else it divides RUN.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    BN: tl.constexpr = outs.shape[0]
    BM: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = STEP if RUN == 0 or RUN > STEP else RUN  # inputs of one product
    LOADED: tl.constexpr = STEP // 8 if KIND == _INT4 else STEP
    lane, place = tl.arange(0, WIDTH), tl.arange(0, LOADED)
    total, seen = tl.zeros([BN, BM], tl.float32), tl.zeros([BM], tl.float32)
    weight_ptr = codes_ptr + outs.to(tl.int64)[:, None] * stride_cn + place[None, :]
    for step in range(first, last):
        if KIND == _PLAIN and not EVEN:
            codes = tl.load(weight_ptr + step * LOADED, mask=(step * STEP + place < in_size)[None, :], other=0.0)
        else:
            codes = tl.load(weight_ptr + step * LOADED)
        for part in tl.static_range(STEP // WIDTH):
            column = step * STEP + part * WIDTH + lane
            if EVEN:
                x = tl.load(x_ptr + rows[None, :] + column[:, None])
            else:
                x = tl.load(x_ptr + rows[None, :] + column[:, None], mask=(column < in_size)[:, None], other=0.0)
            at = outs if RUN == 0 else (step * STEP + part * WIDTH) // RUN * out_size + outs
            zero = tl.load(zeros_ptr + at).to(tl.float32)[:, None] if HAS_ZEROS else tl.full([1, 1], ZERO, tl.float32)
            numbers = _numbers(codes, part, WIDTH, zero, KIND, dtype)
            if HAS_OFFSETS:
                seen += tl.sum(x.to(tl.float32), 0)
            if RUN == 0:
                total = tl.dot(numbers, x, total, input_precision="ieee")
            else:
                total += tl.dot(numbers, x, input_precision="ieee") * tl.load(scales_ptr + at).to(tl.float32)[:, None]
                if HAS_OFFSETS:
                    total += tl.load(offsets_ptr + at)[:, None] * seen[None, :]
                    seen = tl.zeros([BM], tl.float32)
    if RUN == 0 and KIND != _PLAIN:
        total *= tl.load(scales_ptr + outs).to(tl.float32)[:, None]
        if HAS_OFFSETS:
            total += tl.load(offsets_ptr + outs)[:, None] * seen[None, :]
    return total
