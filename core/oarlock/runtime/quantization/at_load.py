"""Plain checkpoints in 8 or 4 bits: each linear is quantised when it is read. What --quantization int8 and int4 are.

Owns: which linears become what, and how codes and scales are found.
Reads: `backend_api.runtime`.
Never: sees more than one tensor, or an activation.
"""

from __future__ import annotations

from typing import Any

import torch

from oarlock.backend_api.runtime import LinearFormat, Quantization, QuantizedWeight, StoredTensor
from oarlock.backend_api.runtime.quantization import Scheme

_CHUNK = 1 << 20  # numbers quantised at once: few enough for a processor's cache, and many enough for its threads
_GROUP4 = 32
_PASSES = 4  # of `rounded4`; the last gains 1.5 % of the square error
_TINY = 2.0**-24  # float16's smallest number


class RoundedFormat(LinearFormat):
    """Linears of plain numbers that become codes: int8 with a scale for each output, or int4 with a scale and an offset for each group of columns."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    @property
    def scheme(self) -> Scheme:
        return "int4" if self.bits == 4 else "int8"

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor((out_size, in_size))}

    def check(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> None:
        if not bool(tensors["weight"].isfinite().all()):
            raise ValueError("it holds numbers that are not finite, which have no codes")

    def read(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> QuantizedWeight:
        """Where groups do not divide the columns, the last is smaller."""
        weight, group = tensors["weight"], _GROUP4 if self.bits == 4 else in_size
        count = -(-in_size // group)
        codes = weight.new_empty((out_size, in_size), dtype=torch.uint8 if self.bits == 4 else torch.int8)
        scales = weight.new_empty((out_size, count), dtype=torch.float32)
        offsets = weight.new_empty((out_size, count), dtype=torch.float32) if self.bits == 4 else None
        groups = None if in_size % group == 0 else weight.new_empty(in_size, dtype=torch.int32)
        if weight.is_meta:
            return QuantizedWeight(codes, scales, groups=groups, offsets=offsets)
        if groups is not None:
            torch.div(torch.arange(in_size, dtype=torch.int32), group, rounding_mode="floor", out=groups)
        rows = max(1, _CHUNK // in_size)
        for part in (slice(at, at + rows) for at in range(0, out_size, rows)):
            numbers = weight[part].float()
            numbers = torch.cat((numbers, numbers[:, -1:].expand(-1, count * group - in_size)), 1).view(-1, count, group)
            if offsets is not None:
                found, scales[part], offsets[part] = rounded4(numbers)
            else:
                found, scales[part] = rounded8(numbers)
            codes[part] = found.flatten(1)[:, :in_size]
        return QuantizedWeight(codes, scales, groups=groups, offsets=offsets)


def rounded8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of -127 .. 127, scales [rows, groups]) of [rows, groups, columns] float32. All that is not a code is a float16 number in float32."""
    scales = _float16(weight.abs().amax(-1) / 127)
    return (weight / scales[..., None]).round_().clamp_(-127, 127), scales


def rounded4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes of 0 .. 15, scales, offsets), as `rounded8`.

    From the whole range of a group on, rounding and the line of least squares through codes and numbers take turns. Of normal numbers that
    leaves half the square error of a scale alone, from the largest number.
    """
    low, high = weight.amin(-1), weight.amax(-1)
    scales, offsets = ((high - low) / 15).clamp_(min=_TINY), low
    for _ in range(_PASSES):
        scales, offsets = _line(weight, _codes4(weight, scales, offsets), scales, offsets)
    scales, offsets = _float16(scales), offsets.clamp(-65504, 65504).half().float()
    return _codes4(weight, scales, offsets), scales, offsets


def _codes4(weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return (weight - offsets[..., None]).div_(scales[..., None]).round_().clamp_(0, 15)


def _line(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of least squares; what was given for groups of one code."""
    count, x, y = weight.shape[-1], codes.sum(-1), weight.sum(-1)
    spread = count * (codes * codes).sum(-1) - x * x  # of integers below 2**24: exact
    slope = torch.where(spread > 0, (count * (codes * weight).sum(-1) - x * y) / spread, scales)
    return slope, torch.where(spread > 0, (y - slope * x) / count, offsets)


def _float16(scales: torch.Tensor) -> torch.Tensor:
    """The nearest float16 numbers other than 0: a device may keep them in two bytes."""
    return scales.clamp(_TINY, 65504.0).half().float()


class AtLoad(Quantization):
    """What of a plain checkpoint is quantised: every linear, experts and the head included; core leaves routers and embeddings as they are."""

    of_plain = True

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._wide = RoundedFormat(8)
        self._usual = RoundedFormat(4) if settings["quant_method"] == "int4" else self._wide

    def linear(self, prefix: str, is_head: bool) -> LinearFormat | None:
        return self._wide if is_head else self._usual
