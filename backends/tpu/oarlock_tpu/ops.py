"""Ops whose plain-torch reference XLA should not be given as it is.

Owns: as_float, lm_head.
Reads: `vendor`.
Never: differs from the reference in meaning.
"""

from __future__ import annotations

from typing import Any

import torch

from oarlock_tpu.vendor import call, jax, jnp


def as_float(bits: torch.Tensor) -> torch.Tensor:
    """The reference views a tensor as another dtype, which torchax does not have."""
    return call(lambda x: jax.lax.bitcast_convert_type(x, jnp.float32), bits)


def lm_head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Products of the model's dtype summed in float32: the reference's meaning without a float32 copy of the vocabulary."""
    out = call(_head, x, weight)
    return out if bias is None else out + bias.float()


def _head(x: Any, weight: Any) -> Any:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
