"""Plain checkpoints in 8 or 4 bits: each linear is quantised when it is read. What --quantization int8 and int4 are.

Owns: which linears become what, and how codes and scales are found.
Reads: `backend_api.runtime`, `schemes`.
Never: sees more than one tensor, or an activation.
"""

from __future__ import annotations

from typing import Any

import torch

from oarlock.backend_api.runtime import LinearFormat, Quantization, QuantizedWeight, StoredTensor
from oarlock.backend_api.runtime.quantization import Scheme
from oarlock.runtime.quantization.schemes import INT4_ZERO

_CHUNK = 1 << 19  # numbers quantised at once: a few tensors of so many float32 stay in a processor's cache


class RoundedFormat(LinearFormat):
    """Linears of plain numbers that become codes of one width."""

    def __init__(self, bits: int, group: int) -> None:
        """`group`: columns that share a scale; 0: all. Where it does not divide the columns, the last group is smaller."""
        self.bits, self.group = bits, group

    @property
    def scheme(self) -> Scheme:
        return "int4" if self.bits == 4 else "int8"

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor((out_size, in_size))}

    def check(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> None:
        if not bool(tensors["weight"].isfinite().all()):
            raise ValueError("it holds numbers that are not finite, which have no codes")

    def read(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> QuantizedWeight:
        weight, group = tensors["weight"], self.group or in_size
        num_groups = -(-in_size // group)
        codes = weight.new_empty((out_size, in_size), dtype=torch.uint8 if self.bits == 4 else torch.int8)
        scales = weight.new_empty((out_size, num_groups), dtype=torch.float32)
        groups = None if in_size % group == 0 else weight.new_empty(in_size, dtype=torch.int32)
        if not weight.is_meta:
            if groups is not None:
                torch.arange(in_size, out=groups).div_(group, rounding_mode="floor")
            rows = max(1, _CHUNK // in_size)
            for at in range(0, out_size, rows):
                part = torch.nn.functional.pad(weight[at : at + rows].float(), (0, num_groups * group - in_size))
                found, scales[at : at + rows] = rounded(part.unflatten(1, (num_groups, group)), self.bits)
                codes[at : at + rows] = found.flatten(1)[:, :in_size]
        return QuantizedWeight(codes, scales, groups=groups)


def rounded(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes as the scheme keeps them, scales [rows, num_groups], each of them a float16 number) of [rows, num_groups, group] float32."""
    top = 2 ** (bits - 1) - 1
    scales = _float16(weight.abs().amax(-1) / top)
    codes = (weight / scales[..., None]).round_().clamp_(-top - 1, top)
    return (codes + INT4_ZERO).to(torch.uint8) if bits == 4 else codes.to(torch.int8), scales


def _float16(scales: torch.Tensor) -> torch.Tensor:
    """The nearest float16 numbers other than 0, in float32: a device may keep them in two bytes."""
    return scales.clamp(2.0**-24, 65504.0).half().float()


class AtLoad(Quantization):
    """What of a plain checkpoint is quantised: every linear, experts and the head included; core leaves routers and embeddings as they are."""

    of_plain = True

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._wide = RoundedFormat(8, 0)
        self._usual = RoundedFormat(4, 32) if settings["quant_method"] == "int4" else self._wide

    def linear(self, prefix: str, is_head: bool) -> LinearFormat | None:
        return self._wide if is_head else self._usual
