"""The hooks: attention and ops for a device that declares `triton`. Light: no torch, no triton.

Owns: when the kernels are offered; the plugin's option.
Reads: `oarlock.backend_api`, `registry`.
Never: asks which device it is; imports a kernel.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import AttentionSpec, OpImpl, OptionSpec, Problem, hookimpl

from oarlock_triton_kernels import registry


@hookimpl
def options() -> list[OptionSpec]:
    """What was never measured is taken by name only."""
    text = "Linears of 8 bits for prompts by tensor descriptors and a persistent grid (Hopper, Blackwell). Not yet measured: off."
    return [OptionSpec("triton", "descriptors", "bool", False, text)]


@hookimpl
def check_model(model: Any, config: Any, device: Any) -> list[Problem]:
    """A checkpoint that says nothing of quantisation has no linear that the option is for; of another the loaded weights show it."""
    if not config.device.options.get("triton_descriptors") or model.quantization_config is not None:
        return []
    text = "--triton-descriptors is for linears whose weight and activations have 8 bits, and this checkpoint is not quantised"
    return [Problem("error", text, "leave it out")]


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    """Paged attention for mixed batches, and split over the context for decodes."""
    return list(registry.ATTENTION) if device.capabilities.triton else []


@hookimpl
def kernels(device: Any) -> list[OpImpl]:
    """The ops of the registry that have a kernel.

    Raises:
        RuntimeError: --triton-descriptors was typed for a device without Triton.
    """
    is_asked = device.options.get("triton_descriptors", False)
    if is_asked and not device.capabilities.triton:
        raise RuntimeError("--triton-descriptors needs a device that runs Triton, and this one does not; leave it out")
    return [*registry.OPS, *(registry.BY_DESCRIPTORS if is_asked else ())] if device.capabilities.triton else []
