"""The layers of a model as one loop, so that XLA compiles one of them: `lax.scan` over packed weights and one cache.

Owns: packing, the loop.
Reads: `chips`, `vendor`; metadata by its `shifted`.
Never: knows what a layer computes.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from oarlock_tpu import chips, vendor
from oarlock_tpu.vendor import jax, jnp


def pack(layers: list[Any]) -> Any:
    """The trees of all layers as one whose leaves have the layers first. Takes `layers` apart, so that one leaf at a time exists twice."""
    forms = [jax.tree.flatten(layer) for layer in layers]
    columns = [list(leaves) for leaves in zip(*(leaves for leaves, _ in forms), strict=True)]
    form = forms[0][1]
    layers.clear()
    forms.clear()
    packed = []
    while columns:
        packed.append(_stack(columns.pop(0)))
    return jax.tree.unflatten(form, packed)


def _stack(parts: list[Any]) -> Any:
    arrays = vendor.to_jax(parts)
    shape, dtype = (len(arrays), *arrays[0].shape), arrays[0].dtype
    sharding = chips.active().packed(chips.active().stacked(arrays[0].sharding), shape, dtype)
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        return vendor.wrap(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
    return vendor.wrap(jax.jit(lambda *rows: jnp.stack(rows), out_shardings=sharding)(*arrays))


def scanned(ops: Any, layers: tuple[Any, ...], plans: tuple[Any, ...], tensors: tuple[int, ...]) -> Any:
    """Serves the op `decoder_stack` for equal layers."""
    layer, plan = layers[0], plans[0]

    def stack(weights: Any, x: Any, kv: list[Any], step: Any) -> Any:
        blocks = kv[0][0].shape[0] // len(plans)  # of one layer
        # The sum that layers pass on begins with nothing in it; a layer that norms its sum passes none.
        residual = None if plan.spec.placement == "post" else vendor.to_torch(jnp.zeros(x.shape, jnp.float32))

        def body(carry: Any, given: Any) -> Any:
            w, number = given
            first = number * blocks
            (hidden, residual, cache), w = vendor.to_torch(carry), vendor.to_torch(w)
            with vendor.tracing():
                here = _shifted(step, first, plan.attention.block_size)
                hidden, residual, cache = layer(w, hidden, residual, cache, here)
            return vendor.to_jax((hidden, residual, tuple(cache))), None

        carry = vendor.to_jax((x, residual, tuple(kv[0])))
        (x, residual, cache), _ = jax.lax.scan(body, carry, (vendor.to_jax(weights), jnp.arange(len(plans), dtype=jnp.int32)))
        return vendor.to_torch(x), vendor.to_torch(residual), [vendor.to_torch(cache)]

    return stack


def _shifted(step: Any, first: Any, block_size: int) -> Any:
    """The step for the layer whose blocks begin at `first`."""
    move = functools.partial(jnp.add, first * block_size)
    regions = [[(lo, hi, meta.shifted(first)) for lo, hi, meta in group] for group in step.regions]
    return replace(step, slots=[vendor.call(move, slots) for slots in step.slots], regions=regions)
