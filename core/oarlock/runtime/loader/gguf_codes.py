"""The block-quantised linears of a GGUF file as they are stored: a quantization like any other.

Owns: which of them are kept so, and the one form that the parts of a fused linear are given.
Reads: `backend_api.runtime`, `gguf_quant`.
Never: reads a file; knows what multiplies the codes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from oarlock.backend_api.runtime import LinearFormat, Quantization, QuantizedWeight, StoredTensor
from oarlock.backend_api.runtime.quantization import Scheme
from oarlock.runtime.loader.gguf_quant import BLOCK_TYPES, Codes

_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_INT4_ZERO = 8  # of codes without offsets


class Form(NamedTuple):
    """What codes of several block types are written as."""

    bits: int  # 4 or 8
    group: int
    has_offsets: bool

    @classmethod
    def of(cls, types: list[str]) -> Form:
        """The narrowest that holds all of them without rounding."""
        kinds = [BLOCK_TYPES[name] for name in types]
        return cls(max(k.bits for k in kinds), min(k.group for k in kinds), any(k.has_offset for k in kinds))

    def write(self, codes: Codes, type_name: str) -> Codes:
        """Codes of one block type in this form; q as the scheme has it (0 .. 15 in uint8, or int8)."""
        q, scale, offset = codes
        lowest = BLOCK_TYPES[type_name].lowest
        if self.has_offsets and offset is None:
            offset = torch.zeros_like(scale)
        if self.bits == 4:
            # With offsets codes are bare, else 8 stands for 0.
            shift = (-lowest if lowest < 0 else 0) if self.has_offsets else _INT4_ZERO
            q = (q + shift).view(torch.uint8)
            offset = offset - shift * scale if offset is not None else None
        repeats = q.shape[1] // scale.shape[1] // self.group
        if repeats > 1:
            scale, offset = (None if t is None else t.repeat_interleave(repeats, 1) for t in (scale, offset))
        assert scale is not None
        return Codes(q, scale, offset)


@dataclass(frozen=True)
class BlockFormat(LinearFormat):
    """Linears of one form: codes [out, in], scales and offsets [out, in / group], as GGUFCheckpoint gives them."""

    form: Form

    @property
    def scheme(self) -> Scheme:
        return "int4" if self.form.bits == 4 else "int8"

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        codes = StoredTensor((out_size, in_size), torch.uint8 if self.form.bits == 4 else torch.int8)
        table = StoredTensor((out_size, in_size // self.form.group), torch.float32)
        return {"codes": codes, "scales": table} | ({"offsets": table} if self.form.has_offsets else {})

    def read(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> QuantizedWeight:
        return QuantizedWeight(tensors["codes"], tensors["scales"], offsets=tensors.get("offsets"))


class BlockQuantization(Quantization):
    """Which linears of one file keep their codes."""

    def __init__(self, types: dict[str, str]) -> None:
        """`types`: prefix of every linear of the file -> type of its blocks, or of its numbers."""
        super().__init__({})
        fused: dict[str, list[str]] = defaultdict(list)
        for prefix in types:
            module, _, leaf = prefix.rpartition(".")
            fused[f"{module}.{_FUSED.get(leaf, leaf)}"].append(prefix)
        self.forms: dict[str, Form] = {}
        for parts in fused.values():
            if all(types[part] in BLOCK_TYPES for part in parts):
                self.forms |= dict.fromkeys(parts, Form.of([types[part] for part in parts]))

    def linear(self, prefix: str, is_head: bool) -> LinearFormat | None:
        return BlockFormat(self.forms[prefix]) if prefix in self.forms else None
