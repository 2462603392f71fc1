"""The hooks: attention and ops for a device that declares `triton`. Light: no torch, no triton.

Owns: when the kernels are offered; the plugin's option.
Reads: `oarlock.backend_api`, `registry`.
Never: asks which device it is; imports a kernel.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import AttentionSpec, OpImpl, OptionSpec, hookimpl

from oarlock_triton_kernels import registry


@hookimpl
def options() -> list[OptionSpec]:
    """What was never measured is taken by name only."""
    text = "Linears of 8 bits for prompts by tensor descriptors and a persistent grid (Hopper, Blackwell). Not yet measured: off."
    return [OptionSpec("triton", "descriptors", "bool", False, text)]


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    """Paged attention for mixed batches, and split over the context for decodes."""
    return list(registry.ATTENTION) if device.capabilities.triton else []


@hookimpl
def kernels(device: Any) -> list[OpImpl]:
    """The ops of the registry that have a kernel."""
    by_descriptors = registry.BY_DESCRIPTORS if device.options.get("triton_descriptors") else ()
    return [*registry.OPS, *by_descriptors] if device.capabilities.triton else []
