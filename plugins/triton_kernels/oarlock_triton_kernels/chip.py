"""What kernels are sized by: what the driver says of the chip that launches go to.

Owns: `Chip` and the question to Triton's driver.
Reads: triton's active driver.
Never: knows a chip by name; measures.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

from triton.compiler import make_backend
from triton.runtime import driver


@dataclass(frozen=True, slots=True)
class Chip:
    """One device."""

    units: int  # multiprocessors, compute units: how many programs at least keep all of it busy
    shared_bytes: int  # that one program may use
    fp8: frozenset[str]  # 8-bit floats that it converts itself, by Triton's names
    has_descriptors: bool  # it copies tiles between global and shared memory by descriptors, of themselves
    divides_warps: bool  # Triton can give copies and products to warps of their own


_INTERPRETED = Chip(units=4, shared_bytes=131_072, fp8=frozenset(), has_descriptors=True, divides_warps=False)  # few programs, and still several a row


def chip() -> Chip:
    """The current device's."""
    return _INTERPRETED if os.environ.get("TRITON_INTERPRET") == "1" else _described(driver.active.get_current_device())


@functools.cache
def _described(device: Any) -> Chip:
    said = driver.active.utils.get_device_properties(device)
    target = driver.active.get_current_target()
    options = make_backend(target).parse_options({})
    capability = target.arch if target.backend == "cuda" else 0
    return Chip(said["multiprocessor_count"], said["max_shared_mem"], frozenset(options.supported_fp8_dtypes), capability >= 90, capability >= 100)
