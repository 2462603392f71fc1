"""The ops of mixtures of experts: all experts of a layer packed as one weight, expert after expert.

Owns: that packing, once at load.
Reads: the loaded library, `ops` and `codes`, which pack a single weight.
Never: computes; reads the weights of an expert that no token goes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from oarlock.backend_api.runtime import registry

from oarlock_cpu import codes, ops

_dense, _codes = torch.ops.oarlock_cpu.moe_experts.default, torch.ops.oarlock_cpu.moe_experts_codes.default
_PANEL = 32  # outputs of a panel: each expert begins a new one


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The weights of one linear of all experts."""

    packed: ops.PackedWeight | codes.PackedCodes  # of [num_experts * out rounded up to whole panels, in]
    num_experts: int
    out_size: int  # of an expert; of int4 codes with an odd number of columns, only this says how many the next linear has


def pack(weight: torch.Tensor) -> PackedExperts:
    """Pack weights [num_experts, out, in] of float32 or bfloat16."""
    return PackedExperts(ops.pack(_joined(weight)), weight.shape[0], weight.shape[1])


def pack_int4(weight: dict[str, torch.Tensor]) -> PackedExperts | dict[str, torch.Tensor]:
    """Pack int4 weights with the experts first; those of scattered groups, which differ from expert to expert, are left as they are."""
    return _packed(weight, codes.pack_int4)


def pack_int8(weight: dict[str, torch.Tensor]) -> PackedExperts | dict[str, torch.Tensor]:
    """Pack int8 weights with the experts first, as `pack_int4`."""
    return _packed(weight, codes.pack_int8)


def _packed(weight: dict[str, torch.Tensor], pack_one: Any) -> PackedExperts | dict[str, torch.Tensor]:
    if "groups" in weight:
        return weight
    packed = pack_one({name: _joined(tensor) for name, tensor in weight.items()})
    return PackedExperts(packed, *weight["scales"].shape[:2]) if packed.order is None else weight


def _joined(tensor: torch.Tensor) -> torch.Tensor:
    """[num_experts, out, …] -> [num_experts * out rounded up, …]."""
    missing = -tensor.shape[1] % _PANEL
    if missing:
        tensor = torch.cat((tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])), 1)
    return tensor.flatten(0, 1)


def moe_experts(x: torch.Tensor, w13: Any, w2: Any, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """As the registry's; by its reference where a model gives plain weights."""
    if isinstance(w13, torch.Tensor):
        return registry()["moe_experts"].reference(x, w13, w2, weights, ids, valid)
    return _dense(x, w13.packed.panels, w2.packed.panels, w13.num_experts, w13.out_size // 2, weights, ids, valid)


def moe_experts_int4(x: torch.Tensor, w13: Any, w2: Any, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """As the registry's; by its reference where a weight could not be packed."""
    return _multiply("moe_experts_int4", x, w13, w2, weights, ids, valid)


def moe_experts_int8(x: torch.Tensor, w13: Any, w2: Any, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """As the registry's; by its reference where a weight could not be packed."""
    return _multiply("moe_experts_int8", x, w13, w2, weights, ids, valid)


def _multiply(op: str, x: torch.Tensor, w13: Any, w2: Any, *routing: torch.Tensor) -> torch.Tensor:
    if not (isinstance(w13, PackedExperts) and isinstance(w2, PackedExperts)):
        return registry()[op].reference(x, w13, w2, *routing)
    first: codes.PackedCodes = w13.packed  # type: ignore[assignment]  # as `_packed` made it
    return _codes(x, _tensors(first), _tensors(w2.packed), first.bits, first.zero, w13.num_experts, w13.out_size // 2, *routing)


def _tensors(packed: Any) -> list[torch.Tensor]:
    return [packed.panels, packed.scales, packed.ends, packed.exponents, *([] if packed.offsets is None else [packed.offsets])]
