"""Registers core's ops.

Owns: which ops exist.
Reads: the references beside it.
Never: computes.
"""

from __future__ import annotations

from oarlock.backend_api.runtime import Op, register_op
from oarlock.runtime.reference import layers, logits, moe, sampling

for _reference in (
    layers.embedding,
    layers.rms_norm,
    layers.fused_add_rms_norm,
    layers.layer_norm,
    layers.rotary,
    layers.silu_and_mul,
    layers.gelu_and_mul,
    layers.activation,
    layers.linear,
    moe.moe_topk,
    moe.moe_experts,
    sampling.sample,
    sampling.greedy,
    logits.apply_penalties,
    logits.apply_bias,
    logits.apply_mask,
    logits.logprobs,
):
    register_op(Op(_reference.__name__, _reference))
