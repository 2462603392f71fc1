"""AWQ checkpoints: 4 bits, groups in order, zero points.

Owns: how AWQ's settings and tensors become the common form.
Reads: `oarlock.backend_api.runtime`.
Never: opens a file.

    qweight [in, out / 8] int32; qzeros [in / group, out / 8] int32; scales [in / group, out]
    weight[n, k] = (q[k, n] - z[g, n]) * scales[g, n]. Eight columns share a word: column c of them is its half byte PLACES[c].
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from oarlock.backend_api.runtime import LinearFormat, Quantization, QuantizedWeight, StoredTensor

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """[rows, words] int32 -> [rows, 8 * words] uint8."""
    shifts = torch.tensor(PLACES, dtype=torch.int32, device=words.device) * 4
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)


class AwqFormat(LinearFormat):
    """Every linear of a checkpoint."""

    def __init__(self, group_size: int) -> None:
        """`group_size` -1: one group."""
        self.group_size = group_size

    @property
    def scheme(self) -> Literal["int4"]:
        return "int4"

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        group = in_size if self.group_size == -1 else self.group_size
        if out_size % 8 or in_size % group:
            raise ValueError(f"awq keeps outputs by 8 and inputs by groups of {group}; this linear has {out_size} outputs and {in_size} inputs")
        return {
            "qweight": StoredTensor((in_size, out_size // 8), torch.int32),
            "qzeros": StoredTensor((in_size // group, out_size // 8), torch.int32),
            "scales": StoredTensor((in_size // group, out_size)),
        }

    def read(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> QuantizedWeight:
        zeros = unpack(tensors["qzeros"]).t().to(torch.int16)
        return QuantizedWeight(unpack(tensors["qweight"]).t(), tensors["scales"].t().float(), zeros)


class Awq(Quantization):
    """The settings of one checkpoint."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        bits, group = settings.get("w_bit", settings.get("bits")), settings.get("q_group_size", settings.get("group_size"))
        version = str(settings.get("version", "gemm")).lower()
        if bits != 4:
            raise ValueError(f"bits is {bits!r}; awq is read with 4")
        if not isinstance(group, int) or (group < 1 and group != -1):
            raise ValueError(f"group_size is {group!r}; a positive number is needed, or -1 for one group")
        if version != "gemm" or not settings.get("zero_point", True):
            raise ValueError(f"version is {version!r} with zero_point {settings.get('zero_point', True)!r}; gemm with zero points is read")
        self._format = AwqFormat(group)
        self._plain = tuple(settings.get("modules_to_not_convert") or ())

    def linear(self, prefix: str, is_head: bool) -> LinearFormat | None:
        """The head stays as it is, and so does what the settings leave out, by any part of a name."""
        return None if is_head or any(part in prefix for part in self._plain) else self._format
