"""Registers core's ops: each with its reference, how it is tested, how wrong it may be and what it costs.

Owns: which ops exist; their cases and limits.
Reads: the references and `inputs`.
Never: computes.

A limit is the normalised mean square error against the reference in float64, by dtype; 0 means equal. The limits of a
dtype are the same for ops of one kind; a backend loosens one only with a reason, in its `ConformanceProfile`.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api.runtime import Op, register_op
from oarlock.runtime.reference import inputs, layers, logits, moe, sampling, state

EQUAL = {"float32": 0.0, "float16": 0.0, "bfloat16": 0.0}
POINTWISE = {"float32": 1e-9, "float16": 1e-6, "bfloat16": 2e-5}  # norms, rotary, activations; float32 tells the two gelus apart
SOFTMAX = {"float32": 1e-6, "float16": 1e-5, "bfloat16": 1e-4}
PRODUCT = {"float32": 1e-9, "float16": 1e-5, "bfloat16": 1e-4}  # float32 tells products of 10-bit mantissas (tf32) apart
HEAD = {"float32": 1e-9, "float16": 1e-6, "bfloat16": 1e-6}  # sums are kept in float32 whatever the inputs are
LOGITS = {"float32": 1e-6}  # logits are always float32
LOGITS_EQUAL = {"float32": 0.0}


def _token_cases(name: str, **more: Any) -> tuple[dict[str, Any], ...]:
    """Aligned, odd, one, zero, large, over tokens and one size called `name`."""
    sizes = ((16, 64), (7, 33), (1, 1), (0, 64), (130, 1536))
    return tuple({"tokens": tokens, name: size, **more} for tokens, size in sizes)


def _row_cases(**more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"rows": rows, "vocab": vocab, **more} for rows, vocab in ((8, 256), (5, 1001), (1, 1), (0, 256), (3, 50257)))


_FILLS = tuple({"tokens": 5, "hidden": 96, "fill": fill} for fill in ("outliers", "equal", "denormal"))
_GATED_FILLS = tuple({"tokens": 5, "size": 96, "fill": fill} for fill in ("outliers", "equal"))

_EMBEDDING = tuple({**case, "vocab": vocab} for case, vocab in zip(_token_cases("hidden"), (32, 17, 1, 32, 1000), strict=True))
_NORM = (*_token_cases("hidden"), *_FILLS, {"tokens": 5, "hidden": 96, "weight": "float32"})
_HEAD_NORM = ({"tokens": 6, "heads": 4, "hidden": 64}, {"tokens": 1, "heads": 3, "hidden": 80})
_LAYER_NORM = (  # a denormal row has no variance worth the name
    *_token_cases("hidden"), *_FILLS[:-1], {"tokens": 5, "hidden": 96, "fill": "offset"}, {"tokens": 7, "hidden": 33, "bias": False},
)  # fmt: skip
_ROTARY = (
    {"tokens": 16, "heads": 8, "head_dim": 64},
    {"tokens": 7, "heads": 3, "head_dim": 80},
    {"tokens": 1, "heads": 1, "head_dim": 128},
    {"tokens": 0, "heads": 4, "head_dim": 64},
    {"tokens": 130, "heads": 12, "head_dim": 256},
    {"tokens": 9, "heads": 4, "head_dim": 64, "rot": 32},
    {"tokens": 9, "heads": 4, "head_dim": 64, "interleaved": 1},
    {"tokens": 9, "heads": 2, "head_dim": 96, "rot": 24, "interleaved": 1},
)
_GATED = (*_token_cases("size"), *_GATED_FILLS)
_GELU = tuple({**case, "approximate": kind} for kind in ("tanh", "none") for case in _GATED)
_ACTIVATION = tuple({**case, "kind": kind} for kind in ("relu", "gelu", "gelu_tanh", "silu") for case in _GATED)
_LINEAR = (
    {"tokens": 16, "k": 64, "n": 128},
    {"tokens": 7, "k": 33, "n": 65, "bias": 1},
    {"tokens": 1, "k": 1, "n": 1, "bias": 1},
    {"tokens": 1, "k": 576, "n": 960},
    {"tokens": 0, "k": 64, "n": 32},
    {"tokens": 4, "k": 576, "n": 1537, "bias": 1},
    {"tokens": 130, "k": 1536, "n": 640},
)
_TOPK = tuple(
    {"tokens": tokens, "experts": experts, "k": k, "renormalise": renormalise}
    for tokens, experts, k in ((16, 8, 2), (7, 60, 4), (1, 1, 1), (0, 8, 2), (130, 128, 8))
    for renormalise in (0, 1)
) + ({"tokens": 9, "experts": 40, "k": 6, "special": "ties"},)
_EXPERTS = (
    {"tokens": 16, "experts": 8, "k": 2, "hidden": 64, "size": 32},
    {"tokens": 7, "experts": 5, "k": 3, "hidden": 33, "size": 17, "padded": 1},
    {"tokens": 1, "experts": 8, "k": 2, "hidden": 64, "size": 32},
    {"tokens": 1, "experts": 1, "k": 1, "hidden": 8, "size": 4},
    {"tokens": 0, "experts": 8, "k": 2, "hidden": 64, "size": 32},
    {"tokens": 6, "experts": 4, "k": 2, "hidden": 32, "size": 16, "padded": 4},
    {"tokens": 40, "experts": 8, "k": 2, "hidden": 64, "size": 32, "routing": "one", "padded": 1},
    {"tokens": 130, "experts": 16, "k": 4, "hidden": 256, "size": 96, "padded": 1},
)
_GREEDY = (*_row_cases(), {"rows": 5, "vocab": 97, "special": "rising"}, {"rows": 6, "vocab": 300, "special": "ties"}, {"rows": 5, "vocab": 97, "special": "broken"})
_SAMPLE = (
    *_row_cases(),
    *({"rows": 16, "vocab": 333, "mode": mode} for mode in ("neutral", "temperature", "top_k", "top_p", "min_p")),
    *_GREEDY[-2:],
)
_PENALTIES = tuple({**case, "history": n} for case, n in zip(_row_cases(), (32, 77, 1, 16, 400), strict=True)) + (
    {"rows": 4, "vocab": 50, "history": 0},
)
_BIAS = tuple({**case, "width": n} for case, n in zip(_row_cases(), (8, 31, 1, 8, 300), strict=True)) + ({"rows": 4, "vocab": 50, "width": 0},)
_LOGPROBS = tuple({**case, "k": k} for case, k in zip(_row_cases(), (5, 20, 1, 5, 40), strict=True)) + (
    {"rows": 4, "vocab": 50, "k": 0}, {"rows": 6, "vocab": 300, "k": 7, "special": "ties"},
)  # fmt: skip

_BITS = ({"rows": 16}, {"rows": 7}, {"rows": 1}, {"rows": 0}, {"rows": 1031})
_UPDATE = tuple({**case, "width": width} for case in _BITS for width in (1, 130))

_cost = inputs.elementwise_cost
for _op in (
    Op("embedding", layers.embedding, generate=inputs.embedding, cases=_EMBEDDING, tolerance=EQUAL, cost=inputs.embedding_cost),
    Op("rms_norm", layers.rms_norm, generate=inputs.head_norm, cases=_NORM + _HEAD_NORM, tolerance=POINTWISE, cost=_cost(4)),
    Op("fused_add_rms_norm", layers.fused_add_rms_norm, generate=inputs.fused_add_rms_norm, cases=_NORM, tolerance=POINTWISE, cost=_cost(5, 2)),
    Op("layer_norm", layers.layer_norm, generate=inputs.layer_norm, cases=_LAYER_NORM, tolerance=POINTWISE, cost=_cost(7)),
    Op("rotary", layers.rotary, generate=inputs.rotary, cases=_ROTARY, tolerance=POINTWISE, cost=inputs.rotary_cost),
    Op("silu_and_mul", layers.silu_and_mul, generate=inputs.gated, cases=_GATED, tolerance=POINTWISE, cost=_cost(3, 0.5)),
    Op("gelu_and_mul", layers.gelu_and_mul, generate=inputs.gated, cases=_GELU, tolerance=POINTWISE, cost=_cost(6, 0.5)),
    Op("activation", layers.activation, generate=inputs.activation, cases=_ACTIVATION, tolerance=POINTWISE, cost=_cost(4)),
    Op("linear", layers.linear, generate=inputs.linear, cases=_LINEAR, tolerance=PRODUCT, cost=inputs.linear_cost),
    Op("lm_head", layers.lm_head, generate=inputs.linear, cases=_LINEAR, tolerance=HEAD, cost=inputs.linear_cost),
    Op("moe_topk", moe.moe_topk, generate=inputs.moe_topk, cases=_TOPK, tolerance=SOFTMAX, cost=_cost(8)),
    Op("moe_experts", moe.moe_experts, generate=inputs.moe_experts, cases=_EXPERTS, tolerance=PRODUCT, cost=inputs.moe_experts_cost),
    Op("sample", sampling.sample, generate=inputs.sample, cases=_SAMPLE, tolerance=LOGITS_EQUAL, cost=_cost(150, 0)),
    Op("greedy", sampling.greedy, generate=inputs.greedy, cases=_GREEDY, tolerance=LOGITS_EQUAL, cost=_cost(1, 0)),
    Op("apply_penalties", logits.apply_penalties, generate=inputs.apply_penalties, cases=_PENALTIES, tolerance=LOGITS, cost=_cost(6)),
    Op("apply_bias", logits.apply_bias, generate=inputs.apply_bias, cases=_BIAS, tolerance=LOGITS, cost=_cost(0)),
    Op("apply_mask", logits.apply_mask, generate=inputs.apply_mask, cases=_row_cases(), tolerance=LOGITS_EQUAL, cost=_cost(0)),
    Op("logprobs", logits.logprobs, generate=inputs.logprobs, cases=_LOGPROBS, tolerance=LOGITS, cost=_cost(5, 0)),
    Op("as_float", state.as_float, generate=inputs.as_float, cases=_BITS, tolerance=LOGITS_EQUAL, cost=_cost(0)),
    Op(
        "index_update",
        state.index_update,
        mutates=("tensor",),
        generate=inputs.index_update,
        cases=_UPDATE,
        tolerance=LOGITS_EQUAL,
        cost=inputs.index_update_cost,
    ),
):
    register_op(_op)
