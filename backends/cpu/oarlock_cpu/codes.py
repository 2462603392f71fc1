"""The ops of int4 and int8 weights, activations of 8 bits included: codes and scales in the order in which the kernels read them, and never a second form.

Owns: the packing, once at load.
Reads: the loaded library; weights in core's common form (docs/backends.md, "Quantised weights").
Never: computes; rounds a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oarlock_cpu import native

if native.problem():
    raise ImportError(native.problem())

_linear, _pack, _rows = torch.ops.oarlock_cpu.linear_codes.default, torch.ops.oarlock_cpu.pack_codes.default, torch.ops.oarlock_cpu.code_rows.default
_PANEL, _STEP, _ROUND = 32, 8, 32  # outputs of a panel; columns that a group, and all of them, are rounded up to


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A quantised linear's weight, laid out as csrc/kernels.h says."""

    panels: torch.Tensor  # [ceil(out / 32), bytes of a panel] uint8
    scales: torch.Tensor  # [ceil(out / 32), groups, 32] float16 where that keeps every bit, else float32
    offsets: torch.Tensor | None  # as scales; None: -zero * scale
    ends: torch.Tensor  # [groups] int32
    exponents: torch.Tensor  # [ceil(out / 32), 32] float32: 2 to it brings an output's largest number to [1/2, 1)
    order: torch.Tensor | None  # [width] int64: which column of x each is, one past the last for none; None: as they are
    bits: int
    zero: float
    out_size: int
    in_size: int


@dataclass(frozen=True, slots=True)
class PackedW8A8:
    """A linear's weight whose activations are rounded to 8 bits."""

    codes: PackedCodes
    input_scale: torch.Tensor | None  # [1] float32; None: each token's own


def pack_w8a8(weight: dict[str, torch.Tensor]) -> PackedW8A8:
    """Pack a w8a8 weight."""
    return PackedW8A8(pack_int8({name: weight[name] for name in ("codes", "scales")}), weight.get("input_scale"))


def pack_int4(weight: dict[str, torch.Tensor]) -> PackedCodes:
    """Pack an int4 weight."""
    packed = weight["codes"]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    in_size = len(weight["groups"]) if "groups" in weight else codes.shape[1]
    if in_size % weight["scales"].shape[1]:  # an odd last column is paired with one that is none
        in_size -= 1
    return _packed(codes[:, :in_size], weight, 4, 8.0)


def pack_int8(weight: dict[str, torch.Tensor]) -> PackedCodes:
    """Pack an int8 weight."""
    return _packed(weight["codes"], weight, 8, 0.0)


def _packed(codes: torch.Tensor, weight: dict[str, torch.Tensor], bits: int, zero: float) -> PackedCodes:
    (out_size, in_size), scales = codes.shape, weight["scales"]
    order, ends = _columns(weight, in_size)
    if order is None:
        codes = torch.nn.functional.pad(codes, (0, int(ends[-1]) - codes.shape[1]))
    else:
        codes = torch.nn.functional.pad(codes, (0, 1))[:, order.clamp(max=codes.shape[1])]
    offsets = -weight["zeros"].float() * scales if "zeros" in weight else weight.get("offsets")
    of_zero = scales * -zero if offsets is None else offsets
    lowest, highest = (torch.addcmul(of_zero, scales, code) for code in _range(codes, ends))
    # Where all codes of a group are one, its scale may be any number: it must not be one that narrower numbers cannot hold.
    is_idle = (lowest == highest) & (scales.abs() > 4096 * torch.maximum(lowest.abs(), highest.abs()).amax(1, keepdim=True))
    if is_idle.any():
        scales = scales.masked_fill(is_idle, 0.0)
        offsets = None if offsets is None else torch.where(is_idle, lowest, offsets)
    tables = [t for t in (scales, offsets) if t is not None]
    if all(torch.equal(t.half().float(), t) for t in tables):
        tables = [t.half() for t in tables]
    tables = [_by_panel(t) for t in tables]
    return PackedCodes(_pack(codes.contiguous(), bits), tables[0], tables[1] if offsets is not None else None, ends, _exponents(lowest, highest), order, bits, zero, out_size, in_size)


def _exponents(lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """[panels, 32] of outputs whose numbers lie between those [out, groups]."""
    largest = torch.maximum(lowest.abs(), highest.abs()).amax(1)
    return _by_panel(-torch.frexp(largest).exponent.float()[:, None]).flatten(1)


def _range(codes: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest code of each group, [out, groups] float32."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    if len(set(sizes)) == 1:
        groups = codes.unflatten(1, (len(sizes), sizes[0]))
        return groups.amin(-1).float(), groups.amax(-1).float()
    parts = [torch.aminmax(part, dim=1) for part in codes.split(sizes, 1)]
    return torch.stack([part.min for part in parts], 1).float(), torch.stack([part.max for part in parts], 1).float()


def _by_panel(table: torch.Tensor) -> torch.Tensor:
    """[out, groups] -> [ceil(out / 32), groups, 32]."""
    out_size, groups = table.shape
    panels = -(-out_size // _PANEL)
    return torch.nn.functional.pad(table, (0, 0, 0, panels * _PANEL - out_size)).view(panels, _PANEL, groups).transpose(1, 2).contiguous()


def _columns(weight: dict[str, torch.Tensor], in_size: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(order, ends): columns by group, each group rounded up to whole steps, and the last to what dense panels need."""
    groups, count = weight.get("groups"), weight["scales"].shape[1]
    of = torch.arange(in_size) * count // in_size if groups is None else groups.long()
    sizes = torch.bincount(of, minlength=count)
    rounded = -(-sizes // _STEP) * _STEP
    rounded[sizes == 0] = _STEP  # of a rank that holds no column of a group: a step of nothing
    rounded[-1] += -int(rounded.sum()) % _ROUND
    ends = rounded.cumsum(0).to(torch.int32)
    if groups is None and torch.equal(sizes[:-1], rounded[:-1]):
        return None, ends
    order = torch.full((int(ends[-1]),), in_size, dtype=torch.int64)
    sorted_columns = of.argsort(stable=True)
    starts, firsts = ends - rounded, sizes.cumsum(0) - sizes
    for start, first, size in zip(starts.tolist(), firsts.tolist(), sizes.tolist(), strict=True):
        order[start : start + size] = sorted_columns[first : first + size]
    return order, ends


def linear(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's linear_int4 and linear_int8."""
    return multiply(x, weight, bias, False)


def linear_w8a8(x: torch.Tensor, weight: PackedW8A8, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's, by the kernels of int8 weights: x's dtype holds the codes of activations."""
    given, scale = x.float(), weight.input_scale
    if scale is None:
        largest = given.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest / 127.0, 1.0)
    rounded = (given / scale).round_().clamp_(-128, 127).to(x.dtype)
    out = multiply(rounded, weight.codes, None, True, is_whole=True).mul_(scale)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def multiply(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None, out_f32: bool, is_whole: bool = False) -> torch.Tensor:
    """A linear whose sums may be kept in float32. is_whole: x holds whole numbers of 8 bits, which are not rounded again."""
    if weight.in_size - x.shape[1] not in ((0, 1) if weight.bits == 4 else (0,)):  # of an odd number of columns int4 holds one more
        raise RuntimeError(f"linear_int{weight.bits}: x [num_tokens, {x.shape[1]}] does not fit a weight of [{weight.out_size}, {weight.in_size}]")
    if weight.order is not None:
        x = torch.nn.functional.pad(x, (0, 1))[:, weight.order]
    return _linear(x, weight.panels, weight.scales, weight.offsets, weight.ends, weight.exponents, weight.bits, weight.out_size, weight.zero, bias, out_f32, is_whole)


def rows(ids: torch.Tensor, weight: PackedCodes) -> torch.Tensor:
    """Rows of the weight, [num_ids, in] float32."""
    found = _rows(ids, weight.panels, weight.scales, weight.offsets, weight.ends, weight.bits, weight.out_size, weight.zero)
    if weight.order is None:
        return found[:, : weight.in_size]
    plain = found.new_empty(len(ids), weight.in_size + 1)  # the last column takes what is none
    plain[:, weight.order.clamp(max=weight.in_size)] = found
    return plain[:, : weight.in_size]
