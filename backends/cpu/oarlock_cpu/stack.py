"""The op `decoder_stack`: as many consecutive layers in one call as the kernels know, the others by core's composition.

Owns: which layers those are, and how they are laid out for `csrc/ops_stack.cpp`.
Reads: `ops`, `attention`; plans and weights as core gives them.
Never: computes; serves a layer otherwise than its ops would (same kernels, same order, same bits).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from oarlock_cpu import codes
from oarlock_cpu import ops as own
from oarlock_cpu.attention import CpuAttention

_layers = torch.ops.oarlock_cpu.decoder_layers.default
_NORMS = ("attention_norm", "q_norm", "k_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
_LINEARS = ("qkv", "o", "gate_up", "down")
_HAS_BIAS, _HAS_OFFSETS = 16, 32
_ACTS = {"gelu": 1, "gelu_tanh": 2, "silu": 3}
# What a layer's composition would call: where one of them is another's, its layers are not ours to shorten.
_USED = ("linear", "rms_norm", "fused_add_rms_norm", "rotary", "silu_and_mul", "gelu_and_mul")
_CODES = ("linear_int4", "linear_int8")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers that one call serves, or one that it does not."""

    first: int
    is_ours: bool
    weights: tuple[torch.Tensor, ...] = ()
    shapes: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    caches: tuple[int, ...] = ()  # which of the model's
    tables: tuple[str, ...] = ()  # rotary tables by name


def decoder_stack(ops: Any, layers: tuple[Any, ...], plans: tuple[Any, ...], tensors: tuple[int, ...]) -> Any:
    """As the registry's decoder_stack."""
    has_own_ops = all(getattr(ops, name) is getattr(own, name) for name in _USED) and all(getattr(ops, name) is codes.linear for name in _CODES)
    known: list[Any] = [None, []]  # the weights that `runs` was laid out for, once

    def stack(weights: list[Any], x: torch.Tensor, kv: list[Any], step: Any) -> Any:
        if known[0] is not weights:
            known[:] = weights, _runs(plans, tensors, weights, has_own_ops)
        residual, kv = None, list(kv)
        for run in known[1]:
            if not run.is_ours:
                at = tensors[run.first]
                x, residual, kv[at] = layers[run.first](weights[run.first], x, residual, kv[at], step)
                continue
            caches = [tensor for at in run.caches for tensor in kv[at]]
            rotary = [step.rope[name] for name in run.tables]
            x, residual = _layers(x, residual, run.weights, run.shapes, run.numbers, caches, step.positions, rotary, *_shared(step))
        return x, residual, kv

    return stack


def _shared(step: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Slots and regions of every KV group."""
    held: list[torch.Tensor] = []
    shapes: list[int] = []
    for slots, regions in zip(step.slots, step.regions, strict=True):
        held.append(slots)
        shapes.append(len(regions))
        for begin, end, region in regions:
            held += (region.block_tables, region.seq_lens, region.query_start_loc)
            shapes += (begin, end, region.max_q)
    return held, shapes


def _runs(plans: tuple[Any, ...], tensors: tuple[int, ...], weights: list[Any], has_own_ops: bool) -> list[Run]:
    found = []
    served = [has_own_ops and _is_served(plan, w) for plan, w in zip(plans, weights, strict=True)]
    for is_ours, group in groupby(range(len(plans)), served.__getitem__):
        numbers = list(group)
        if is_ours:
            found.append(_lay_out(numbers, plans, tensors, weights))
        else:
            found += [Run(n, False) for n in numbers]
    return found


def _is_served(plan: Any, w: Any) -> bool:
    spec = plan.spec
    return (
        isinstance(plan.attention, CpuAttention)
        and plan.comm.size == 1
        and (plan.k_scale, plan.v_scale) == (1.0, 1.0)
        and spec.placement in ("pre", "sandwich")
        and spec.norm.kind == "rms"
        and spec.mlp.kind == "gated"
        and spec.mlp.activation in _ACTS
        and plan.params.alibi_slopes is None
        and all(name in w and _packed(w[name]) is not None for name in _LINEARS)
    )


def _packed(linear: Any) -> own.PackedWeight | codes.PackedCodes | None:
    """A linear's weight, where the kernels take it as it is."""
    for kind, weight in linear.items():
        if kind != "bias" and (type(weight) is own.PackedWeight or (type(weight) is codes.PackedCodes and weight.order is None)):
            return weight
    return None


def _lay_out(numbers: list[int], plans: tuple[Any, ...], tensors: tuple[int, ...], weights: list[Any]) -> Run:
    """In the order of csrc/ops_stack.cpp."""
    caches = tuple(dict.fromkeys(tensors[n] for n in numbers))
    tables = tuple(dict.fromkeys(rope for n in numbers if (rope := plans[n].spec.attention.rope) is not None))
    flat: list[torch.Tensor] = []
    shapes: list[int] = []
    settings: list[float] = []
    for n in numbers:
        w, spec, p = weights[n], plans[n].spec, plans[n].params
        flat += [w[name]["weight"] for name in _NORMS if name in w]
        linears = [_linear(w[name], flat) for name in _LINEARS]
        table = -1 if spec.attention.rope is None else tables.index(spec.attention.rope)
        inner = _packed(w["gate_up"]).out_size // 2  # type: ignore[union-attr]  # it is served
        shapes += [p.num_heads, p.num_kv_heads, p.head_dim, p.window or 0, plans[n].group, table, int(spec.attention.rope_interleaved)]
        shapes += [_ACTS[spec.mlp.activation], inner, caches.index(tensors[n]), sum(1 << at for at, name in enumerate(_NORMS) if name in w)]
        shapes += [shape for shape, _ in linears]
        settings += [p.scale, p.softcap or 0.0, spec.norm.eps, *(zero for _, zero in linears)]
    return Run(numbers[0], True, tuple(flat), tuple(shapes), tuple(settings), caches, tables)


def _linear(linear: Any, flat: list[torch.Tensor]) -> tuple[int, float]:
    """Adds a linear's tensors; (what it has, zero point of its codes)."""
    weight, bias = _packed(linear), linear.get("bias")
    assert weight is not None
    flat.append(weight.panels)
    if bias is not None:
        flat.append(bias)
    has = _HAS_BIAS * (bias is not None)
    if isinstance(weight, own.PackedWeight):
        return has, 0.0
    flat += [t for t in (weight.scales, weight.offsets, weight.ends, weight.exponents) if t is not None]
    return has | weight.bits | _HAS_OFFSETS * (weight.offsets is not None), weight.zero
