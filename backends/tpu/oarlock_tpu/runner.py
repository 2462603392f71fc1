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

from oarlock_tpu import chips, vendor
from oarlock_tpu.vendor import jax

log = logging.getLogger("oarlock.tpu")


class XlaRunner(GraphRunner):
    """Weights are arguments, never constants; written state is donated, so that XLA updates it in place."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._chips = chips.active()
        self._weights: tuple[Any, list[Any]] = (None, [])  # the tree last given, and its arrays

    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        """Traces and compiles at once; later calls must have exactly the example's shapes, which XLA checks."""
        started = time.monotonic()
        flat = Flat(fn, example)
        compiled = self._lowered(flat, example).compile()
        log.debug("%s compiled in %.1f s", tag, time.monotonic() - started)

        def run(weights: Any, written: dict[str, Any], read: Any, packed: Any, device_inputs: Any) -> Any:
            others = vendor.to_jax(jax.tree.leaves((read, packed, device_inputs)))
            state, outputs = compiled(self._bound(weights), self._owned(written), others)
            return flat.results(vendor.to_torch(state), vendor.to_torch(outputs))

        return run

    def _lowered(self, flat: Flat, example: tuple[Any, ...], **options: Any) -> Any:
        """The program for arrays where they will lie: weights as they were placed, state as `chips` says, all else whole."""
        weights, state, others = vendor.to_jax(flat.leaves)
        homes, read = self._homes(example[1]), self._homes(example[2])
        others_homes = read + [self._chips.whole] * (len(others) - len(read))
        shapes = (
            [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._chips.home(x)) for x in weights],
            [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home) for x, home in zip(state, homes, strict=True)],
            [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home) for x, home in zip(others, others_homes, strict=True)],
        )
        jitted = jax.jit(flat.trace, donate_argnums=1, out_shardings=(homes, self._chips.whole))
        return jitted.trace(*shapes).lower(**options)

    def _homes(self, state: dict[str, Any]) -> list[Any]:
        """A sharding for each leaf of the state, in their order."""
        return jax.tree.leaves({name: jax.tree.map(lambda _, name=name: self._chips.state(name), tree) for name, tree in state.items()})

    def refuses_unwarmed(self) -> bool:
        return True

    def _owned(self, written: dict[str, Any]) -> list[Any]:
        """State as arrays where programs expect it. What was only reserved is made now, on all chips at once."""
        found = vendor.to_jax(jax.tree.leaves(written))
        if all(isinstance(x, jax.Array) for x in found) and self._chips.count == 1:
            return found
        homes = self._homes(written)
        return [jax.device_put(x, home) if isinstance(x, jax.Array) else vendor.zeros(x, home) for x, home in zip(found, homes, strict=True)]

    def _bound(self, weights: Any) -> list[Any]:
        """The weights as JAX arrays: converted once, for they are the same at every step."""
        if weights is not self._weights[0]:
            self._weights = weights, vendor.to_jax(jax.tree.leaves(weights))
        return self._weights[1]

    def kept_in(self) -> str:
        return self.device.options.get("tpu_compile_cache") or ""


class Flat:
    """A program over lists of arrays: (weights, written, the rest) -> (written, outputs).

    Trees are taken apart because callers may build them of lists here and of tuples there.
    """

    def __init__(self, fn: PureProgram, example: tuple[Any, ...]) -> None:
        self._fn = fn
        parts = [jax.tree.flatten(part) for part in (example[0], example[1], tuple(example[2:]))]
        self.leaves = tuple(leaves for leaves, _ in parts)  # as the example has them: tensors, or shapes
        self._forms = [form for _, form in parts]
        self._result_forms: tuple[Any, Any] = (None, None)  # known after the first trace

    def trace(self, *lists: Any) -> tuple[list[Any], list[Any]]:
        """The JAX function."""
        trees = [jax.tree.unflatten(form, vendor.to_torch(leaves)) for form, leaves in zip(self._forms, lists, strict=True)]
        with vendor.tracing():
            state, outputs = self._fn(trees[0], trees[1], *trees[2])
        flat = [jax.tree.flatten(part) for part in (state, outputs)]
        self._result_forms = flat[0][1], flat[1][1]
        return vendor.to_jax(flat[0][0]), vendor.to_jax(flat[1][0])

    def results(self, state: list[Any], outputs: list[Any]) -> tuple[Any, Any]:
        """What a call returned, in the program's own form."""
        return jax.tree.unflatten(self._result_forms[0], state), jax.tree.unflatten(self._result_forms[1], outputs)
