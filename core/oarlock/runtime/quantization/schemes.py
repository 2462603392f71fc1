"""The schemes: how quantised weights lie in memory and what is computed with them, in plain torch.

Owns: linear_<scheme> and moe_experts_<scheme>; dequantisation and the quantisation of activations.
Reads: `runtime.reference` (layers, moe).
Never: branches on a value; knows a checkpoint's format.

A weight is a dict of tensors, or whatever a device's `prepare` made of it. Leading dimensions (experts) may stand before these:

    int4      codes [out, ceil(in / 2)] uint8, the lower half of a byte first; scales; zeros? or offsets?; groups?    weight of 16-bit activations
    int8      codes [out, in] int8; scales; zeros? or offsets?; groups?
    fp8       codes [out, in] float8_e4m3fn; scales
    codebook  codes [out, in] uint8; codebook [out, entries] float32; scales
    w8a8      as int8 with one group and no zeros; input_scale?    activations are int8: one scale for each token, or the static one
    w8a8_fp8  as fp8; input_scale?    activations are float8_e4m3fn: one scale for each token and group, or the static one

    scales [out, num_groups] float32; zeros [out, num_groups] int16 (absent: 8 for int4, else 0), taken from codes before they are scaled,
    or offsets [out, num_groups] float32, added to bare codes after they are scaled; groups [in] int32, the group of each
    column (absent: num_groups equal runs). Groups are explicit where activation order scattered them: the part of such a weight that
    a rank of a row-parallel linear holds has groups of unequal size, so that no order of columns makes them runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from oarlock.runtime.reference.layers import wide
from oarlock.runtime.reference.moe import grouped_experts

Weight = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT4_ZERO = 8


def unpack_int4(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """[..., out, ceil(columns / 2)] uint8 -> [..., out, columns] uint8 of 0 .. 15."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :columns]


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """The inverse; an odd last column is paired with 0."""
    if codes.is_meta:  # PERF: torch's shift of meta tensors is Python that imports its compiler first, a second at every start
        return codes.new_empty((*codes.shape[:-1], -(-codes.shape[-1] // 2)))
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _spread(values: torch.Tensor, columns: int, groups: torch.Tensor | None) -> torch.Tensor:
    """[..., out, num_groups] -> the value of each column, [..., out, columns] (or 1 column, where there is one group)."""
    if groups is not None:
        return values.gather(-1, groups.long()[..., None, :].expand(*values.shape[:-1], columns))
    if values.shape[-1] <= 1:
        return values
    return values[..., None].expand(*values.shape, columns // values.shape[-1]).flatten(-2)


def _dequantise(codes: torch.Tensor, weight: Weight, zero: int, dtype: torch.dtype) -> torch.Tensor:
    groups, columns = weight.get("groups"), codes.shape[-1]
    value = codes.to(dtype)
    if "offsets" in weight:
        return value * _spread(weight["scales"].to(dtype), columns, groups) + _spread(weight["offsets"].to(dtype), columns, groups)
    if "zeros" in weight:
        value = value - _spread(weight["zeros"].to(dtype), columns, groups)
    elif zero:
        value = value - zero
    return value * _spread(weight["scales"].to(dtype), columns, groups)


def dequantise_int4(weight: Weight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[..., out, columns] in `dtype`, float32 or float64."""
    return _dequantise(unpack_int4(weight["codes"], columns), weight, INT4_ZERO, dtype)


def dequantise_plain(weight: Weight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """int8 and fp8 weights, as `dequantise_int4`."""
    return _dequantise(weight["codes"], weight, 0, dtype)


def dequantise_codebook(weight: Weight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights of a codebook, as `dequantise_int4`."""
    value = weight["codebook"].to(dtype).gather(-1, weight["codes"].long())
    return value * _spread(weight["scales"].to(dtype), columns, weight.get("groups"))


Dequantise = Callable[[Weight, int, torch.dtype], torch.Tensor]
DEQUANTISE: dict[str, Dequantise] = {
    "int4": dequantise_int4,
    "int8": dequantise_plain,
    "w8a8": dequantise_plain,
    "fp8": dequantise_plain,
    "w8a8_fp8": dequantise_plain,
    "codebook": dequantise_codebook,
}


def _weight_only(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype), bias)


def linear_int4(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ dequantised.T + bias`, the weight rounded to x's dtype. x [num_tokens, in]; bias [out]; result [num_tokens, out]."""
    return _weight_only(x, dequantise_int4(weight, x.shape[-1], wide(x).dtype), bias)


def linear_int8(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `linear_int4`, of an int8 weight."""
    return _weight_only(x, dequantise_plain(weight, x.shape[-1], wide(x).dtype), bias)


def linear_fp8(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `linear_int4`, of a float8_e4m3fn weight."""
    return _weight_only(x, dequantise_plain(weight, x.shape[-1], wide(x).dtype), bias)


def linear_codebook(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `linear_int4`, of a codebook weight."""
    return _weight_only(x, dequantise_codebook(weight, x.shape[-1], wide(x).dtype), bias)


def _dynamic_scale(x: torch.Tensor, largest: float) -> torch.Tensor:
    """max |x| / largest over the last dimension, kept; 1 where every x is 0."""
    amax = x.abs().amax(-1, keepdim=True)
    return torch.where(amax > 0, amax / largest, 1.0)


def linear_w8a8(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Activations rounded to int8, -128 .. 127, half to even; sums of products in float32 or better, rounded once.

    Dynamic: the scale of a token is max |x| / 127, as int8 kernels have it. Shapes as `linear_int4`.

    Differs: compressed-tensors' own simulation divides by 127.5, which puts every token's largest number on a tie between two codes.
    """
    given = wide(x)
    scale = weight["input_scale"].to(given.dtype) if "input_scale" in weight else _dynamic_scale(given, 127.0)
    codes = (given / scale).round().clamp(-128, 127)
    out = F.linear(codes, weight["codes"].to(given.dtype)) * scale * weight["scales"].to(given.dtype).flatten()
    return (out if bias is None else out + wide(bias)).to(x.dtype)


def linear_w8a8_fp8(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Activations rounded to float8_e4m3fn, saturating at 448; sums in float32, rounded once.

    Dynamic: the scale of a token, for each group of columns where the weight has several, is max |x| / 448. Shapes as `linear_int4`.
    """
    given, num_groups = wide(x), weight["scales"].shape[-1]
    parts = given.view(x.shape[0], num_groups, x.shape[1] // num_groups)
    scale = weight["input_scale"].to(given.dtype) if "input_scale" in weight else _dynamic_scale(parts, FP8_MAX)
    rounded = (parts / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).to(given.dtype) * scale
    out = F.linear(rounded.view(x.shape), dequantise_plain(weight, x.shape[-1], given.dtype))
    return (out if bias is None else out + wide(bias)).to(x.dtype)


def _experts(dequantise: Dequantise, x: torch.Tensor, w13: Weight, w2: Weight, *routing: torch.Tensor) -> torch.Tensor:
    """Only the experts that tiles own are dequantised, to x's dtype."""

    def of(weight: Weight, columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def pick(owner: torch.Tensor) -> torch.Tensor:
            return dequantise({name: tensor[owner] for name, tensor in weight.items()}, columns, wide(x).dtype).to(x.dtype)

        return pick

    width = w13["scales"].shape[1] // 2
    return grouped_experts(x, w13["scales"].shape[0], of(w13, x.shape[1]), of(w2, width), *routing)


def moe_experts_int4(
    x: torch.Tensor, w13: Any, w2: Any, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """As `moe_experts`, w13 and w2 being int4 weights with the experts before their other dimensions."""
    return _experts(dequantise_int4, x, w13, w2, weights, ids, valid)


def moe_experts_int8(
    x: torch.Tensor, w13: Any, w2: Any, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """As `moe_experts_int4`, of int8 weights."""
    return _experts(dequantise_plain, x, w13, w2, weights, ids, valid)


def moe_experts_fp8(
    x: torch.Tensor, w13: Any, w2: Any, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """As `moe_experts_int4`, of float8_e4m3fn weights."""
    return _experts(dequantise_plain, x, w13, w2, weights, ids, valid)
