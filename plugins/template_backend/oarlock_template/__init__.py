"""The light module, which the entry point names: the device, and what this package brings for it. No torch.

Owns: the device's record, its option, what its implementations support.
Reads: `oarlock.backend_api`.
Never: imports torch or a heavy module; the records name those by import strings.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import (
    AttentionSpec,
    Claims,
    ConformanceProfile,
    DeviceSpec,
    GraphRunnerSpec,
    OpImpl,
    OptionSpec,
    ProbeResult,
    Support,
    hookimpl,
)

DTYPES = ("float32", "bfloat16")  # preferred first
BLOCK_SIZES = (16, 32)
MAX_HEAD_DIM = 256
PRIORITY = 10  # above core's references, below a feature plugin that someone installs on purpose


def probe() -> ProbeResult:
    """Whether the device is here, in less than 50 ms and without raising: look into /dev or /sys, or ask the driver by ctypes."""
    claims = Claims(dtypes=DTYPES, block_sizes=BLOCK_SIZES, host_is_device=True, default_swap_bytes=0)
    return ProbeResult("available", "CPU tensors in place of a chip", claims=claims)


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="template",
            probe=probe,
            factory="oarlock_template.device:TemplateDevice",
            distribution="oarlock-template-backend",
            priority=-1,  # an accelerator: 10 or more; below 0: taken only by its name
            torch_install="pip install 'torch>=2.11'",
        )
    ]


@hookimpl
def options() -> list[OptionSpec]:
    """`--template-compile`: fixed shapes and traced programs, as a device with a compiler needs them."""
    return [OptionSpec("template", "compile", "bool", False, "Pad every step to a few shapes, and trace each program once at start.")]


@hookimpl
def kernels(device: Any) -> list[OpImpl]:
    """Ops of our own; core's references serve all others."""
    return [
        OpImpl("rms_norm", "template", "oarlock_template.ops:rms_norm", PRIORITY, supports=supports_op),
        OpImpl("linear", "template", "oarlock_template.ops:linear", PRIORITY, supports=supports_op, prepare="oarlock_template.ops:pack"),
    ]


def supports_op(*, dtype: str, **_: Any) -> Support:
    return Support(True) if dtype in DTYPES else Support(False, (f"computes in {' and '.join(DTYPES)}, not in {dtype}",))


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    """Called once for each group of layers. No module beside this one is called as a hook is: importing it would hide the hook."""
    return [AttentionSpec("template", "oarlock_template.paged:TemplateAttention", PRIORITY, supports_attention)]


def supports_attention(*, dtype: str, head_dim: int, **_: Any) -> Support:
    reasons = list(supports_op(dtype=dtype).reasons)
    if head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim {head_dim} exceeds {MAX_HEAD_DIM}")
    return Support(not reasons, tuple(reasons))


@hookimpl
def graph_runner(device: Any) -> list[GraphRunnerSpec]:
    """Traced programs where the option asks for them; else core runs programs as they are."""
    if not device.options.get("template_compile"):
        return []
    return [GraphRunnerSpec("template", "oarlock_template.graph:TracingRunner", PRIORITY)]


@hookimpl
def conformance() -> list[ConformanceProfile]:
    """Core's own limits hold. Loosen one, or expect a failure, only with a reason."""
    return [ConformanceProfile(device="template")]
