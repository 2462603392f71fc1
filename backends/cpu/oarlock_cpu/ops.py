"""The ops that the compiled kernels serve, as plain callables with the signatures of the op registry.

Owns: the map from the registry's arguments to the kernels'.
Reads: the loaded library (`native.problem()` was "").
Never: computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oarlock_cpu import codes, native

if native.problem():
    raise ImportError(native.problem())

_library = torch.ops.oarlock_cpu

rms_norm = _library.rms_norm.default
fused_add_rms_norm = _library.fused_add_rms_norm.default
layer_norm = _library.layer_norm.default
rotary = _library.rotary.default
greedy = _library.greedy.default
sample = _library.sample.default
logprobs = _library.logprobs.default
apply_penalties = _library.apply_penalties.default
apply_mask = _library.apply_mask.default

_KINDS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}
_GATES = {"none": 1, "tanh": 2}
_activate = _library.activate.default


_linear, _linear_packed, _pack_weight, _rows = _library.linear.default, _library.linear_packed.default, _library.pack_weight.default, _library.packed_rows.default


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear's weight in the order in which the kernels read it; made once at load, in place of the plain one."""

    panels: torch.Tensor  # [ceil(out / 32), 32 * in rounded up], and 64 more in binary16
    out_size: int
    in_size: int


def pack(weight: torch.Tensor) -> PackedWeight:
    """Pack a weight [out, in] of float32 or bfloat16."""
    return PackedWeight(_pack_weight(weight), *weight.shape)


def pack_head(weight: Any) -> PackedWeight | codes.PackedCodes | None:
    """The same of a head; one of codes is packed already. None for what another package made of codes."""
    return pack(weight) if isinstance(weight, torch.Tensor) else weight if type(weight) is codes.PackedCodes else None


def linear(x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's linear; `weight` is packed or plain."""
    if type(weight) is PackedWeight:
        return _multiply(x, weight, bias, False)
    return _linear(x, weight, bias, False)


def _multiply(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out_f32: bool) -> torch.Tensor:
    if x.shape[1] != weight.in_size:  # the panels were rounded up, so that the kernel cannot tell
        raise RuntimeError(f"linear: x [num_tokens, {x.shape[1]}] does not fit a weight of [{weight.out_size}, {weight.in_size}]")
    return _linear_packed(x, weight.panels, weight.out_size, bias, out_f32)


def lm_head(x: torch.Tensor, weight: torch.Tensor | PackedWeight | codes.PackedCodes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's lm_head: the sums of a linear, kept in float32."""
    if type(weight) is PackedWeight:
        return _multiply(x, weight, bias, True)
    if type(weight) is codes.PackedCodes:
        return codes.multiply(x, weight, bias, True)
    return _linear(x, weight, bias, True)


def embedding(ids: torch.Tensor, weight: Any) -> torch.Tensor:
    """As the registry's embedding; of a tied head's weight, its rows: of codes in float32."""
    if isinstance(weight, torch.Tensor):
        return torch.nn.functional.embedding(ids, weight)
    if type(weight) is PackedWeight:
        return _rows(ids.int(), weight.panels, weight.out_size, weight.in_size)
    return codes.rows(ids.int(), weight)


def share(head: Any) -> Any:
    """A tied head's weight as `embedding` takes it; None for one of another package."""
    return head if isinstance(head, torch.Tensor | PackedWeight | codes.PackedCodes) else None


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As the registry's silu_and_mul."""
    return _activate(x, 3, True)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """As the registry's gelu_and_mul."""
    return _activate(x, _GATES[approximate], True)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """As the registry's activation.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"activation {kind!r} is unknown; known are {', '.join(_KINDS)}")
    return _activate(x, _KINDS[kind], False)
