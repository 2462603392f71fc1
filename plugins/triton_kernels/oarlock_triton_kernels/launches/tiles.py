"""Launches of the linears by descriptors. By themselves, for a Triton of another vendor may have no descriptors on the host.

Owns: those launches.
Reads: `linear_tiles`, `launches.linear`.
Never: computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from oarlock_triton_kernels import linear_tiles
from oarlock_triton_kernels.launches import MODELS, QWEN, Launch
from oarlock_triton_kernels.launches.linear import EIGHT_BITS, both_rounded, ends


def tiles() -> Iterator[Launch]:
    """As `launches.linear.eight_bits`, of many rows, on chips with descriptors."""
    for kind, run, scales in EIGHT_BITS:
        for model in MODELS:
            for name, (outs, width) in ends(model).items():
                call = partial(both_rounded, linear_tiles, kind, run, 2048, outs, width)
                quick = model is QWEN and name == "o"
                yield Launch(model.name, f"{kind}, scales of {scales}, {name}, 2048 rows", call, quick=quick, chips=("sm_90", "sm_100"))
