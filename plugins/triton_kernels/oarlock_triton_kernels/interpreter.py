"""Triton's interpreter, made to compute as a device does. For tests; nothing else imports this.

Owns: the correction of bf16 products, and the count of programs.
Reads: `triton.runtime.interpreter`.
Never: is imported where kernels are compiled.

Set TRITON_INTERPRET=1 before any kernel's module is imported: `triton.jit` looks at it when it decorates. Then call `put_right`.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def put_right() -> None:
    """Make tl.dot of bf16 multiply numbers.

    WORKAROUND(triton 3.7.1 and 3.9.0, remove when its interpreter widens bf16 itself): it keeps bf16 as uint16, and its dot multiplies those
    patterns.

    Raises:
        RuntimeError: TRITON_INTERPRET is not 1; kernels would be compiled.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET must be 1 before a kernel's module is imported")
    if getattr(interpreter.InterpreterBuilder.create_dot, "widens_bf16", False):
        return
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, _wide(a), _wide(b), *rest)

    create_dot.widens_bf16 = True  # type: ignore[attr-defined]
    interpreter.InterpreterBuilder.create_dot = create_dot


def _wide(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
