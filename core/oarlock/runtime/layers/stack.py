"""`decoder_stack`: all layers of a model, one after another. A coarse op whose reference is that walk.

Owns: the order of layers; which cache tensor each layer uses; what it takes to serve a whole stack at once.
Reads: `layers.decoder`, `kv_spec`.
Never: computes; knows what serves it.

A compiler that is given equal layers one by one compiles each of them. An implementation with a `prepare` is given them together: where
`is_uniform`, the worker has it pack the layers' weights into one tree, and the cache of all layers is one tensor each for keys and
values, layer n's block b at n * num_blocks + b ("joined"). Other models are walked by the reference. An implementation without a
`prepare` serves every model, in the reference's form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oarlock.backend_api.runtime import Op, Ops, register_op
from oarlock.kv_spec import KVGroup
from oarlock.runtime.layers.decoder import Cache, Layer, LayerPlan, StepContext

# A stack: (weights of the layers, hidden, caches, step) -> (hidden, residual or None, caches)
Stack = Callable[[Any, torch.Tensor, list[Cache], StepContext], tuple[torch.Tensor, torch.Tensor | None, list[Cache]]]


def is_uniform(plans: tuple[LayerPlan, ...], groups: tuple[KVGroup, ...]) -> bool:
    """Whether one layer's program serves all layers, and one block table all caches."""
    return len(groups) == 1 and len({(plan.spec, plan.k_scale, plan.v_scale) for plan in plans}) == 1


def make_decoder_stack(ops: Ops, layers: tuple[Layer, ...], plans: tuple[LayerPlan, ...], tensors: tuple[int, ...]) -> Stack:
    """The reference: layer by layer. `tensors`: which cache each layer uses; weights are a list of trees, one for each layer."""

    def stack(weights: Any, x: torch.Tensor, kv: list[Cache], step: StepContext) -> tuple[torch.Tensor, torch.Tensor | None, list[Cache]]:
        residual, kv = None, list(kv)
        for layer, w, tensor in zip(layers, weights, tensors, strict=True):
            x, residual, kv[tensor] = layer(w, x, residual, kv[tensor], step)
        return x, residual, kv

    return stack


DECODER_STACK = register_op(Op(name="decoder_stack", reference=make_decoder_stack, mutates=("kv",), tested_in="runner"))
