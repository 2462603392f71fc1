"""gptq checkpoints: 2, 3, 4 and 8 bits, with and without activation order, both conventions of zero points.

Owns: how gptq's settings and tensors become the common form.
Reads: `backend_api.runtime`, `quantization.packing`.
Never: opens a file.

    qweight [in * bits / 32, out] int32, packed along in; qzeros [in / group_size, out * bits / 32] int32, packed along out;
    scales [in / group_size, out]; g_idx [in] int32: the group of each column.

    weight[n, k] = (q[k, n] - z[g, n]) * scales[g, n]. The older format stores z - 1, "gptq_v2" stores z.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from oarlock.backend_api.runtime import LinearFormat, Quantization, QuantizedWeight, StoredTensor
from oarlock.runtime.quantization.packing import unpack_words, words_for
from oarlock.runtime.quantization.patterns import check_pattern
from oarlock.runtime.quantization.schemes import INT4_ZERO

BITS = (2, 3, 4, 8)


class GptqFormat(LinearFormat):
    """Linears of one width and group size."""

    def __init__(self, bits: int, group_size: int, act_order: bool, symmetric: bool, zero_offset: int) -> None:
        """`group_size` -1: one group. `zero_offset`: added to stored zeros."""
        self.bits, self.group_size, self.act_order, self.symmetric, self.zero_offset = bits, group_size, act_order, symmetric, zero_offset

    @property
    def scheme(self) -> Any:
        return "int8" if self.bits == 8 else "int4"

    def _group(self, in_size: int) -> int:
        return in_size if self.group_size == -1 else self.group_size

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        group = self._group(in_size)
        if in_size * self.bits % 32 or out_size * self.bits % 32:
            unit = 32 // math.gcd(32, self.bits)
            raise ValueError(f"gptq packs {self.bits}-bit weights by {unit}; its {in_size} inputs and {out_size} outputs are no multiples of that")
        if in_size % group and not self.act_order:
            raise ValueError(f"its {in_size} inputs are no multiple of the group size {group}")
        num_groups = -(-in_size // group)
        return {
            "qweight": StoredTensor((words_for(in_size, self.bits), out_size), torch.int32),
            "qzeros": StoredTensor((num_groups, words_for(out_size, self.bits)), torch.int32),
            "scales": StoredTensor((num_groups, out_size)),
            "g_idx": StoredTensor((in_size,), torch.int32, optional=not self.act_order, is_index=True),
        }

    def check(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> None:
        num_groups = tensors["scales"].shape[0]
        if "g_idx" in tensors:
            index = tensors["g_idx"]
            if bool((index < 0).any()) or bool((index >= num_groups).any()):
                raise ValueError(f"g_idx holds groups outside 0 .. {num_groups - 1}")
            if not self.act_order and not torch.equal(index.long(), torch.arange(in_size) // self._group(in_size)):
                raise ValueError('g_idx scatters the groups, but the settings say "desc_act": false; set it to true')
        if self.symmetric:
            zeros = self._zeros(tensors, out_size)
            middle = 2 ** (self.bits - 1)
            if bool((zeros != middle).any()):
                raise ValueError(
                    f'the settings say "sym": true, but qzeros holds zeros other than {middle - self.zero_offset}; '
                    'set "sym" to false, or "checkpoint_format" to "gptq_v2" if the zeros are stored as they are'
                )

    def _zeros(self, tensors: dict[str, torch.Tensor], out_size: int) -> torch.Tensor:
        """[num_groups, out] int16."""
        return unpack_words(tensors["qzeros"], self.bits, out_size).to(torch.int16) + self.zero_offset

    def read(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> QuantizedWeight:
        codes = unpack_words(tensors["qweight"].t(), self.bits, in_size)
        zeros = None if self.symmetric else self._zeros(tensors, out_size).t()
        if self.bits == 8:  # into int8
            codes, zeros = (codes.to(torch.int16) - 128).to(torch.int8), None if zeros is None else zeros - 128
        elif self.symmetric:
            codes = codes + (INT4_ZERO - 2 ** (self.bits - 1))
        groups = tensors["g_idx"].to(torch.int32) if self.act_order else None
        return QuantizedWeight(codes, tensors["scales"].t().float(), zeros, groups)


class Gptq(Quantization):
    """The settings of one checkpoint."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._formats: dict[tuple[Any, ...], GptqFormat] = {}
        layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise ValueError(f"checkpoint_format {layout!r} is not read; gptq and gptq_v2 are")
        self._zero_offset = 1 if layout == "gptq" else 0
        self._dynamic = settings.get("dynamic") or {}
        for rule in self._dynamic:
            check_pattern(rule[2:] if rule[:2] in ("-:", "+:") else rule, "dynamic")
        named = settings.get("modules_in_block_to_quantize") or []
        self._only = tuple(name for entry in named for name in (entry if isinstance(entry, list) else [entry]))
        self._make(settings)  # says early what is wrong

    def _make(self, settings: dict[str, Any]) -> GptqFormat:
        bits, group = settings.get("bits"), settings.get("group_size", -1)
        if bits not in BITS:
            raise ValueError(f"bits is {bits!r}; gptq is read with {', '.join(map(str, BITS))}")
        if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
            raise ValueError(f"group_size is {group!r}; a positive number is needed, or -1 for one group")
        key = (bits, group, bool(settings.get("desc_act", False)) and group != -1, bool(settings.get("sym", False)), self._zero_offset)
        return self._formats.setdefault(key, GptqFormat(*key))

    def linear(self, prefix: str, is_head: bool) -> LinearFormat | None:
        """`dynamic` leaves modules out ("-:regex") or gives them settings of their own; the head is quantised only where `lm_head` says so."""
        if is_head and not self.settings.get("lm_head", False):
            return None
        if self._only and not is_head and not prefix.endswith(self._only):
            return None
        for rule, own in self._dynamic.items():
            sign, pattern = (rule[0], rule[2:]) if rule[:2] in ("-:", "+:") else ("+", rule)
            if re.match(pattern, prefix):
                return None if sign == "-" else self._make({**self.settings, **own})
        return self._make(self.settings)
