"""The ops that the compiled kernels serve, as plain callables with the signatures of the op registry.

Owns: the map from the registry's arguments to the kernels'.
Reads: the loaded library (`native.problem()` was "").
Never: computes.
"""

from __future__ import annotations

import torch

from oarlock_cpu import native

if native.problem():
    raise ImportError(native.problem())

_library = torch.ops.oarlock_cpu

linear = _library.linear.default
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
