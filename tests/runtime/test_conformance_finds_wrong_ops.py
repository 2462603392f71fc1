"""The kit must fail what is wrong: each op with a plausible mistake, and pass what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_subjects import make_subject
from oarlock.backend_api import OpImpl
from oarlock.backend_api.runtime import registry
from oarlock.conformance import ops_level
from oarlock.conformance.cases import Result, run_case
from oarlock.runtime.quantization import schemes
from oarlock.runtime.reference import layers, logits, moe, sampling, state


def results_of(op: str, implementation: Callable[..., Any] | None) -> list[Result]:
    kernels = []
    if implementation is not None:
        globals()["_under_test"] = implementation
        kernels = [OpImpl(op=op, name="wrong", factory=f"{__name__}:_under_test", priority=1)]
    subject = make_subject(kernels=kernels)
    cases = [case for case in ops_level.cases() if case.op == op and case.quick]
    assert len(cases) >= 6
    return [run_case(case, subject, None) for case in cases]


@pytest.mark.parametrize("op", sorted(name for name, op in registry().items() if op.tested_in == "ops"))
def test_the_reference_passes(op):
    results = results_of(op, None)
    assert not [r for r in results if r.is_bad], [(r.id, r.detail) for r in results if r.is_bad]
    assert any(r.status == "pass" and r.measure is not None for r in results)


def _dtype_kept(x, weight, eps):
    return layers.wide(layers.rms_norm(x, weight, eps))


def _written_in_place(x, weight, eps):
    out = layers.rms_norm(x, weight, eps)
    x.mul_(1.5)
    return out


def _written_beside(x, weight, eps):
    if x.numel():
        torch.as_strided(x, (x.numel() + 1,), (1,), x.storage_offset())[-1] = 5.0
    return layers.rms_norm(x, weight, eps)


def _low_precision_sum(x, weight, eps):
    mean = (x * x).to(torch.bfloat16).mean(-1, keepdim=True)
    return (x * torch.rsqrt(mean + eps) * weight).to(x.dtype)


def _last_of_equals(x):
    best, _ = x.max(-1)
    ids = x.shape[-1] - 1 - x.flip(-1).argmax(-1)
    return torch.where(torch.isfinite(best), ids, -1).to(torch.int32)


def _row_noise(x, temperature, top_p, top_k, min_p, seed, choice, position):
    rows = torch.arange(x.shape[0], dtype=torch.int32)
    return sampling.sample(x, temperature, top_p, top_k, min_p, seed + rows, choice, position)


def _no_choice(x, temperature, top_p, top_k, min_p, seed, choice, position):
    return sampling.sample(x, temperature, top_p, top_k, min_p, seed, choice * 0, position)


def _top_k_off(x, temperature, top_p, top_k, min_p, seed, choice, position):
    return sampling.sample(x, temperature, top_p, torch.where(top_k > 0, top_k + 1, 0), min_p, seed, choice, position)


def _min_p_ignored(x, temperature, top_p, top_k, min_p, seed, choice, position):
    return sampling.sample(x, temperature, top_p, top_k, min_p * 0, seed, choice, position)


def _top_p_before_top_k(x, temperature, top_p, top_k, min_p, seed, choice, position):
    scaled = x / torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    p = ordered.softmax(-1)
    drop = ((p.cumsum(-1) - p) >= top_p[:, None]) & (top_p < 1)[:, None]
    kept = x.clone().scatter(1, ids, torch.where(drop, -torch.inf, x.gather(1, ids)))
    return sampling.sample(kept, temperature, torch.ones_like(top_p), top_k, min_p, seed, choice, position)


def _nan_row_drawn(x, *rest):
    return sampling.sample(x.nan_to_num(), *rest)


def _penalties_of_the_first_row(x, history, prompt, total, presence, frequency, repetition):
    return logits.apply_penalties(x, history[:1].expand_as(history), prompt[:1].expand_as(prompt), total[:1].expand_as(total), presence, frequency, repetition)


def _penalties_over_prompt(x, history, prompt, total, presence, frequency, repetition):
    return logits.apply_penalties(x, history, prompt * 0, total, presence, frequency, repetition)


def _penalties_over_garbage(x, history, prompt, total, presence, frequency, repetition):
    history = history.remainder(x.shape[1]) if history.numel() else history
    return logits.apply_penalties(x, history, prompt, total * 0 + history.shape[1], presence, frequency, repetition)


def _rank_with_equals(x, targets, k):
    target, rank, ids, top = logits.logprobs(x, targets, k)
    return target, rank - 1, ids, top


def _padding_bans(x, ids, values):
    return x.scatter(1, ids.long(), x.gather(1, ids.long()) + values)


def _bits_reversed(x, bitmask):
    return torch.where(logits.apply_mask(torch.zeros_like(x), bitmask) == 0, -torch.inf, x)


def _invalid_tokens_run(x, w13, w2, weights, ids, valid):
    return moe.moe_experts(x, w13, w2, weights, ids, torch.ones_like(valid))


def _experts_unweighted(x, w13, w2, weights, ids, valid):
    return moe.moe_experts(x, w13, w2, weights * 0 + 1 / weights.shape[1], ids, valid)


def _one_row_more(tensor, index, value):
    out = state.index_update(tensor, index, value)
    if out.numel():
        out[-1] = 0
    return out


def _beside_the_state(tensor, index, value):
    if tensor.numel():
        torch.as_strided(tensor, (tensor.numel() + 3,), (1,), tensor.storage_offset())[-1] = 5
    return state.index_update_in_place(tensor, index, value)


def _without(op: str, key: str) -> Callable[..., Any]:
    """The reference, its weights without what `key` holds."""
    return lambda x, weight, bias=None: getattr(schemes, op)(x, {k: v for k, v in weight.items() if k != key}, bias)


def _scales_of_the_first_group(weight):
    return {**weight, "scales": weight["scales"][..., :1].expand_as(weight["scales"]).contiguous()}


def _one_scale(op: str) -> Callable[..., Any]:
    return lambda x, weight, bias=None: getattr(schemes, op)(x, _scales_of_the_first_group(weight), bias)


def _no_bias(op: str) -> Callable[..., Any]:
    return lambda x, weight, bias=None: getattr(schemes, op)(x, weight, None)


def _second_product_in_one_scale(op: str) -> Callable[..., Any]:
    return lambda x, w13, w2, *routing: getattr(schemes, op)(x, w13, {**w2, "scales": w2["scales"].roll(1, 1)}, *routing)


def _codes_unbounded(x, weight, bias=None):
    """Activations beyond a static scale's range keep codes that int8 does not have; halves are rounded up, not to even."""
    scale = weight.get("input_scale", x.float().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127)
    codes = (x.float() / scale + 0.5).floor()
    out = (codes @ weight["codes"].float().T) * scale * weight["scales"].float().flatten()
    return (out if bias is None else out + bias.float()).to(x.dtype)


WRONG: list[tuple[str, Callable[..., Any]]] = [
    ("embedding", lambda ids, weight: layers.embedding((ids + 1) % weight.shape[0], weight)),
    ("rms_norm", lambda x, weight, eps: layers.rms_norm(x, weight, 0.0)),
    ("rms_norm", lambda x, weight, eps: layers.rms_norm(x, layers.wide(weight) + 0.01, eps)),
    ("rms_norm", _dtype_kept),
    ("rms_norm", _written_in_place),
    ("rms_norm", _written_beside),
    ("rms_norm", _low_precision_sum),
    ("fused_add_rms_norm", lambda x, residual, weight, eps: (layers.rms_norm(x + residual, weight, eps), residual)),
    ("layer_norm", lambda x, weight, bias, eps: layers.layer_norm(x, weight, None, eps)),
    ("rotary", lambda x, positions, table, interleaved=False: layers.rotary(x, positions, table, not interleaved)),
    ("rotary", lambda x, positions, table, interleaved=False: layers.rotary(x, positions - (positions > 0).int(), table, interleaved)),
    ("silu_and_mul", lambda x: layers.silu_and_mul(torch.cat(x.chunk(2, -1)[::-1], -1))),
    ("gelu_and_mul", lambda x, approximate: layers.gelu_and_mul(x, "none")),
    ("activation", lambda x, kind: layers.activation(x, "gelu" if kind == "gelu_tanh" else kind)),
    ("lm_head", lambda x, weight, bias=None: layers.lm_head(x, weight, None)),
    ("lm_head", lambda x, weight, bias=None: layers.lm_head(x, weight, bias).bfloat16().float()),  # rounded after all
    ("linear", lambda x, weight, bias=None: layers.linear(x, weight, None)),
    ("linear", lambda x, weight, bias=None: layers.linear(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()).to(x.dtype)),
    ("moe_topk", lambda x, k, renormalise: moe.moe_topk(x, k, True)),
    ("moe_topk", lambda x, k, renormalise: tuple(t.flip(-1) for t in moe.moe_topk(x, k, renormalise))),
    ("moe_experts", _invalid_tokens_run),
    ("moe_experts", _experts_unweighted),
    ("greedy", _last_of_equals),
    ("greedy", lambda x: x.argmax(-1).to(torch.int32)),
    ("sample", _row_noise),
    ("sample", _no_choice),
    ("sample", _top_k_off),
    ("sample", _min_p_ignored),
    ("sample", _top_p_before_top_k),
    ("sample", _nan_row_drawn),
    ("apply_penalties", _penalties_of_the_first_row),
    ("apply_penalties", _penalties_over_prompt),
    ("apply_penalties", _penalties_over_garbage),
    ("apply_bias", _padding_bans),
    ("apply_mask", _bits_reversed),
    ("logprobs", _rank_with_equals),
    ("logprobs", lambda x, targets, k: logits.logprobs(x.bfloat16().float(), targets, k)),
    ("as_float", lambda bits: bits.float()),
    ("index_update", _one_row_more),
    ("index_update", _beside_the_state),
    *((op, _no_bias(op)) for op in ("linear_int4", "linear_int8", "linear_fp8", "linear_codebook", "linear_w8a8", "linear_w8a8_fp8")),
    *((op, _one_scale(op)) for op in ("linear_int4", "linear_int8", "linear_fp8", "linear_w8a8_fp8")),
    ("linear_int4", _without("linear_int4", "zeros")),
    ("linear_int4", _without("linear_int4", "groups")),
    ("linear_w8a8", _without("linear_w8a8", "input_scale")),
    ("linear_w8a8", _codes_unbounded),
    *((op, _second_product_in_one_scale(op)) for op in ("moe_experts_int4", "moe_experts_int8", "moe_experts_fp8")),
]


@pytest.mark.parametrize(("op", "wrong"), WRONG, ids=lambda v: v if isinstance(v, str) else v.__name__.strip("_<>"))
def test_a_wrong_implementation_fails(op, wrong):
    bad = [r for r in results_of(op, wrong) if r.is_bad]
    assert bad, f"{op} passed with a mistake in it"
    assert all(r.detail for r in bad)


def test_every_op_has_a_mistake_that_is_found():
    assert {op for op, _ in WRONG} == {name for name, op in registry().items() if op.tested_in == "ops"}
