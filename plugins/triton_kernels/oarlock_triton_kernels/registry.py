"""The one table of what this package serves: op records, the attention, and the chapters of docs/kernels.md. No torch.

Owns: priorities; which dtypes and sizes each implementation serves.
Reads: `oarlock.backend_api`.
Never: imports a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oarlock.backend_api import AttentionSpec, OpImpl, Support

PRIORITY = 10  # above the reference (which needs no record); a device package that knows better takes more
DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (64, 80, 96, 128, 256)
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True, slots=True)
class Chapter:
    """One kernel, for the book and for the compile checks."""

    kernel: str  # "module:function" below oarlock_triton_kernels
    launches: str  # "launches.module:function" of a function that yields `launches.Launch` for each model that uses the kernel
    has_products: bool = False  # it multiplies matrices: its code must use the chip's matrix units


def supports_dtype(*, dtype: Any, **_: Any) -> Support:
    """Ops in any of the model dtypes."""
    name = str(dtype).removeprefix("torch.")
    return Support(True) if name in DTYPES else Support(False, (f"the kernels compute in {', '.join(DTYPES)}, not in {name}",))


def _op(op: str, factory: str, prepare: str | None = None, supports: Any = supports_dtype) -> OpImpl:
    root = "oarlock_triton_kernels."
    return OpImpl(op=op, name="triton", factory=root + factory, priority=PRIORITY, supports=supports, prepare=root + prepare if prepare else None)


# ---------------------------------------------------------------- attention
ATTENTION: tuple[AttentionSpec, ...] = ()

# ---------------------------------------------------------------- norms, rotary, activations
ELEMENTWISE: tuple[OpImpl, ...] = tuple(
    _op(op, f"elementwise:{op}") for op in ("rms_norm", "fused_add_rms_norm", "layer_norm", "rotary", "silu_and_mul", "gelu_and_mul", "activation")
)

# ---------------------------------------------------------------- experts
MOE: tuple[OpImpl, ...] = ()

# ---------------------------------------------------------------- logits: sampling, penalties, log-probabilities
SAMPLING: tuple[OpImpl, ...] = ()

# ---------------------------------------------------------------- linears
LINEAR: tuple[OpImpl, ...] = ()

OPS: tuple[OpImpl, ...] = (*ELEMENTWISE, *MOE, *SAMPLING, *LINEAR)

CHAPTERS: tuple[Chapter, ...] = (
    *(
        Chapter(f"elementwise:{name}_kernel", f"launches.elementwise:{name}")
        for name in ("rms_norm", "fused_add_rms_norm", "layer_norm", "rotary", "activation")
    ),
)
