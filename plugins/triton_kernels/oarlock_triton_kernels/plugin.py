"""The hooks: attention and ops for a device that declares `triton`. Light: no torch, no triton.

Owns: when the kernels are offered.
Reads: `oarlock.backend_api`, `registry`.
Never: asks which device it is; imports a kernel.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import AttentionSpec, OpImpl, hookimpl

from oarlock_triton_kernels import registry


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    """Paged attention for mixed batches, and split over the context for decodes."""
    return list(registry.ATTENTION) if device.capabilities.triton else []


@hookimpl
def kernels(device: Any) -> list[OpImpl]:
    """The ops of the registry that have a kernel."""
    return list(registry.OPS) if device.capabilities.triton else []
