"""`decoder_layer`: any LayerSpec as a composition of ops. A coarse op whose reference is this composition.

Owns: the order of operations in a decoder layer.
Reads: `layers.spec`, the op registry's bound callables.
Never: closes over a weight; chooses an implementation; branches on a tensor's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from oarlock.backend_api.runtime import Attention, AttentionParams, Communicator, HeadSteps, Op, Ops, register_op
from oarlock.runtime.layers.spec import LayerSpec, MlpSpec, NormSpec

Tree = dict[str, Any]
Cache = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class StepContext:
    """What all layers of one step share. Made inside the forward program."""

    positions: torch.Tensor  # [num_tokens] int32
    slots: list[torch.Tensor]  # per KV group: [num_tokens] int32
    regions: list[list[tuple[int, int, Any]]]  # per KV group: (first token, end token, attention metadata)
    valid: torch.Tensor  # [num_tokens] bool: False for padding
    rope: dict[str, torch.Tensor]  # rotary tables, float32


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Everything constant about one layer on one rank."""

    spec: LayerSpec
    params: AttentionParams  # head counts of this rank
    attention: Attention
    group: int
    comm: Communicator
    k_scale: float = 1.0  # an fp8 cache keeps key / k_scale and value / v_scale; params.scale has k_scale in it already
    v_scale: float = 1.0


def make_plan(spec: Any, params: AttentionParams, attention: Attention, group: int, comm: Communicator, kv_scales: tuple[float, float]) -> LayerPlan:
    """The plan of a layer whose fp8 cache has such scales for keys and values; 1 and 1 for any other cache."""
    return LayerPlan(spec, replace(params, scale=params.scale * kv_scales[0]), attention, group, comm, *kv_scales)


# A layer: (weights, hidden, residual or None, cache, step) -> (hidden, residual or None, cache)
Layer = Callable[[Tree, torch.Tensor, torch.Tensor | None, Cache, StepContext], tuple[torch.Tensor, torch.Tensor | None, Cache]]


def apply_linear(ops: Ops, x: torch.Tensor, w: Tree) -> torch.Tensor:
    """A linear whose output every rank keeps for itself."""
    return _linear(ops, x, w, w.get("bias"))


def _linear(ops: Ops, x: torch.Tensor, w: Tree, bias: torch.Tensor | None) -> torch.Tensor:
    """The op that the weight is for: {"weight": plain, "bias"?} or {scheme: quantised, "bias"?}."""
    if "weight" in w:
        return ops.linear(x, w["weight"], bias)
    scheme = next(key for key in w if key != "bias")
    return getattr(ops, f"linear_{scheme}")(x, w[scheme], bias)


def row_linear(ops: Ops, comm: Communicator, x: torch.Tensor, w: Tree) -> torch.Tensor:
    """A linear over a sharded input: partial sums are added over ranks, the bias once."""
    if comm.size == 1:
        return _linear(ops, x, w, w.get("bias"))
    out = comm.all_reduce(_linear(ops, x, w, None))
    return out if w.get("bias") is None else out + w["bias"]


def apply_norm(ops: Ops, norm: NormSpec, x: torch.Tensor, w: Tree) -> torch.Tensor:
    """The model's norm."""
    if norm.kind == "rms":
        return ops.rms_norm(x, w["weight"], norm.eps)
    return ops.layer_norm(x, w["weight"], w.get("bias"), norm.eps)


def add_norm(ops: Ops, norm: NormSpec, x: torch.Tensor, residual: torch.Tensor | None, w: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x + residual) in x's dtype, and the sum in float32, in one op where there is one."""
    if residual is None:
        return apply_norm(ops, norm, x, w), x.float() if x.element_size() < 4 else x
    if norm.kind == "rms":
        return ops.fused_add_rms_norm(x, residual, w["weight"], norm.eps)
    total = x + residual
    return apply_norm(ops, norm, total, w).to(x.dtype), total


def self_attention(ops: Ops, plan: LayerPlan, w: Tree, h: torch.Tensor, cache: Cache, step: StepContext) -> tuple[torch.Tensor, Cache]:
    """Project, rotate, write KV, attend region by region, project back."""
    spec, p = plan.spec.attention, plan.params
    num_tokens, heads, kv_heads = h.shape[0], p.num_heads, p.num_kv_heads
    qkv = apply_linear(ops, h, w["qkv"]).view(num_tokens, heads + 2 * kv_heads, p.head_dim)
    norms = (w["q_norm"]["weight"], w["k_norm"]["weight"]) if spec.qk_norm else (None, None)
    table = None if spec.rope is None else step.rope[spec.rope]
    steps = HeadSteps(step.positions, *norms, plan.spec.norm.eps, table, spec.rope_interleaved, plan.k_scale, plan.v_scale)
    q, cache = plan.attention.write_qkv(ops, qkv, cache, step.slots[plan.group], p, steps)
    out = _attend(plan, q, cache, step)
    return row_linear(ops, plan.comm, out.reshape(num_tokens, heads * p.head_dim), w["o"]), cache


def attend_and_keep(plan: LayerPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, step: StepContext) -> tuple[torch.Tensor, Cache]:
    """Write the new keys and values, then attend over all regions. Scales of an fp8 cache are applied here, not by the attention."""
    if plan.k_scale != 1.0:
        k = k / plan.k_scale
    if plan.v_scale != 1.0:
        v = v / plan.v_scale
    cache = plan.attention.write_kv(cache, k, v, step.slots[plan.group])
    return _attend(plan, q, cache, step), cache


def _attend(plan: LayerPlan, q: torch.Tensor, cache: Cache, step: StepContext) -> torch.Tensor:
    parts = [plan.attention.attend(q[lo:hi], cache, meta, plan.params) for lo, hi, meta in step.regions[plan.group]]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out if plan.v_scale == 1.0 else out * plan.v_scale


def _gate(ops: Ops, mlp: MlpSpec, x: torch.Tensor) -> torch.Tensor:
    if mlp.activation == "silu":
        return ops.silu_and_mul(x)
    return ops.gelu_and_mul(x, "tanh" if mlp.activation == "gelu_tanh" else "none")


def feed_forward(ops: Ops, plan: LayerPlan, w: Tree, h: torch.Tensor, step: StepContext) -> torch.Tensor:
    """Gated, plain or mixture-of-experts feed-forward."""
    mlp = plan.spec.mlp
    if mlp.kind == "gated":
        return row_linear(ops, plan.comm, _gate(ops, mlp, apply_linear(ops, h, w["gate_up"])), w["down"])
    if mlp.kind == "plain":
        return row_linear(ops, plan.comm, ops.activation(apply_linear(ops, h, w["up"]), mlp.activation), w["down"])
    weights, ids = ops.moe_topk(apply_linear(ops, h, w["router"]), mlp.top_k, mlp.renormalise)
    return plan.comm.all_reduce(_experts(ops, w["experts"])(h, weights, ids, step.valid))


def _experts(ops: Ops, w: Tree) -> Callable[..., torch.Tensor]:
    """{"w13", "w2"} plain, or {scheme: {"w13", "w2"}}."""
    if "w13" in w:
        return lambda h, *routing: ops.moe_experts(h, w["w13"], w["w2"], *routing)
    ((scheme, quantised),) = w.items()
    return lambda h, *routing: getattr(ops, f"moe_experts_{scheme}")(h, quantised["w13"], quantised["w2"], *routing)


def make_decoder_layer(ops: Ops, plan: LayerPlan) -> Layer:
    """The reference of the op `decoder_layer`: bind the composition for one layer."""
    spec, norm = plan.spec, plan.spec.norm

    def pre(w: Tree, x: torch.Tensor, residual: torch.Tensor | None, cache: Cache, step: StepContext) -> tuple[Any, Any, Cache]:
        h, residual = add_norm(ops, norm, x, residual, w["attention_norm"])
        x, cache = self_attention(ops, plan, w, h, cache, step)
        if spec.placement == "sandwich":
            x = apply_norm(ops, norm, x, w["attention_post_norm"])
        h, residual = add_norm(ops, norm, x, residual, w["mlp_norm"])
        x = feed_forward(ops, plan, w, h, step)
        if spec.placement == "sandwich":
            x = apply_norm(ops, norm, x, w["mlp_post_norm"])
        return x, residual, cache

    def post(w: Tree, x: torch.Tensor, residual: torch.Tensor | None, cache: Cache, step: StepContext) -> tuple[Any, Any, Cache]:
        h, cache = self_attention(ops, plan, w, x, cache, step)
        x = apply_norm(ops, norm, x + h, w["attention_norm"])
        return apply_norm(ops, norm, x + feed_forward(ops, plan, w, x, step), w["mlp_norm"]), None, cache

    return post if spec.placement == "post" else pre


DECODER_LAYER = register_op(Op(name="decoder_layer", reference=make_decoder_layer, mutates=("cache",), tested_in="runner"))
