"""`XlaRunner`: programs traced through torchax and compiled by XLA before they are called.

Owns: compilation, donation, the binding of arrays to compiled programs.
Reads: `oarlock.backend_api`, `vendor`.
Never: knows what a program computes.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from oarlock.backend_api.runtime import Device, GraphRunner, PureProgram

from oarlock_tpu import vendor
from oarlock_tpu.vendor import jax

log = logging.getLogger("oarlock.tpu")
WRITTEN = 1  # the argument that is donated: state that a program replaces


class XlaRunner(GraphRunner):
    """Weights are arguments, never constants; written state is donated, so that XLA updates it in place."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._weights: tuple[Any, Any] = (None, None)  # the tree last given, and the same of JAX arrays

    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        """Traces and compiles at once; later calls must have exactly the example's shapes, which XLA checks."""
        started = time.monotonic()
        args = vendor.to_jax(example)
        compiled = jax.jit(vendor.as_jax(fn), donate_argnums=WRITTEN).lower(*args).compile()
        log.debug("%s compiled in %.1f s", tag, time.monotonic() - started)

        def run(weights: Any, *rest: Any) -> Any:
            return vendor.to_torch(compiled(self._bound(weights), *vendor.to_jax(rest)))

        return run

    def refuses_unwarmed(self) -> bool:
        return True

    def _bound(self, weights: Any) -> Any:
        """The weight tree as JAX arrays: converted once, for it is the same at every step."""
        if weights is not self._weights[0]:
            self._weights = weights, vendor.to_jax(weights)
        return self._weights[1]
