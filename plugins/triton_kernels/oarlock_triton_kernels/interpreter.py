"""Triton's interpreter, made to compute as a device does. For tests; nothing else imports this.

Owns: the correction of bf16 products and of narrowing casts.
Reads: `triton.runtime.interpreter`, torch (its casts).
Never: is imported where kernels are compiled.

Set TRITON_INTERPRET=1 before any kernel's module is imported: `triton.jit` looks at it when it decorates. Then call `put_right`.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float64: torch.float64, tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
}  # fmt: skip
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def put_right() -> None:
    """Make arithmetic of bf16 work on numbers, and narrowing casts round to nearest even.

    WORKAROUND(triton 3.7.1 and 3.9.0, remove when its interpreter widens bf16 itself): it keeps bf16 as uint16, and its dot multiplies those
    patterns, as do its sums and differences; its casts to bf16 cut bits off, and those to 8-bit floats lose a carry into the exponent.

    Raises:
        RuntimeError: TRITON_INTERPRET is not 1; kernels would be compiled.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET must be 1 before a kernel's module is imported")
    if getattr(interpreter.InterpreterBuilder.create_dot, "widens_bf16", False):
        return
    plain, plain_binary = interpreter.InterpreterBuilder.create_dot, interpreter.InterpreterBuilder.binary_op

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, _wide(a), _wide(b), *rest)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return plain_binary(self, a, b, op)
        wide = plain_binary(self, _wide(a), _wide(b), op)  # float32, or bool of a comparison
        return self.cast_impl(wide, tl.bfloat16) if wide.data.dtype == np.float32 else wide

    create_dot.widens_bf16 = True  # type: ignore[attr-defined]
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.binary_op = binary_op
    interpreter._convert_float = _converted
    _prepare_once()


def _prepare_once() -> None:
    """Let a program's calls of other functions make Triton's language ready once a module, not at each call.

    PERF: a fifth of the time of the kit's attention cases (29.8 to 23.5 s on one core of a 2-core machine).
    """
    ready: set[int] = set()
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        ready.clear()  # the language is as it was after each launch
        return run(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in ready:
            interpreter._patch_lang(self.fn)
            ready.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call


def _wide(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _converted(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """`data`, bits of `source` numbers, as `target` numbers."""
    given = torch.from_numpy(np.array(data, order="C", ndmin=1)).view(_TORCH[source])
    bits = given.to(_TORCH[target]).view(_WORDS[target.primitive_bitwidth // 8]).numpy()
    return bits.view(f"uint{target.primitive_bitwidth}").reshape(np.shape(data))
