"""Registers the ops of the schemes: cases, limits, costs.

Owns: what quantised weights the conformance kit tries, and how wrong a product with them may be.
Reads: `quantization.schemes`, `reference.inputs`.
Never: computes what a reference computes.

Limits are against the reference in float64, which dequantises the same codes: what quantising lost is not part of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from oarlock.backend_api.runtime import Op, register_op
from oarlock.runtime.quantization import schemes
from oarlock.runtime.reference import inputs

WEIGHT_ONLY = {"float32": 1e-9, "float16": 5e-4, "bfloat16": 5e-4}
INTEGER = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 5e-4}  # an activation near a tie may be rounded either way
FLOAT8 = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 2e-3}  # the same, in coarser steps

_SIZES: tuple[dict[str, Any], ...] = (
    {"tokens": 16, "k": 64, "n": 128, "group": 32},
    {"tokens": 7, "k": 33, "n": 65, "group": 33, "bias": 1},
    {"tokens": 1, "k": 1, "n": 1, "group": 1, "bias": 1},
    {"tokens": 0, "k": 64, "n": 32, "group": 64},
    {"tokens": 130, "k": 1024, "n": 320, "group": 128},
)
_GROUPED: tuple[dict[str, Any], ...] = (
    *_SIZES,
    {"tokens": 5, "k": 99, "n": 40, "group": 11, "zeros": 1},
    {"tokens": 6, "k": 96, "n": 33, "group": 32, "zeros": 1, "order": 1, "bias": 1},
    {"tokens": 3, "k": 64, "n": 40, "group": 16, "offsets": 1},
)
_CHANNEL = tuple({key: value for key, value in case.items() if key != "group"} for case in _SIZES)
_W8A8 = (*_CHANNEL, {"tokens": 9, "k": 80, "n": 48, "static": 1, "bias": 1}, {"tokens": 5, "k": 96, "n": 40, "fill": "outliers"})
_W8A8_FP8 = (*_SIZES, *_W8A8[-2:])
_W8A8 += ({"tokens": 6, "k": 64, "n": 48, "static": 1, "fill": "halves"},)  # each is exactly between two codes
_EXPERTS: tuple[dict[str, Any], ...] = (
    {"tokens": 16, "experts": 8, "k": 2, "hidden": 64, "size": 32, "group": 16},
    {"tokens": 7, "experts": 5, "k": 3, "hidden": 33, "size": 17, "padded": 1},
    {"tokens": 1, "experts": 1, "k": 1, "hidden": 8, "size": 4},
    {"tokens": 0, "experts": 8, "k": 2, "hidden": 64, "size": 32},
    {"tokens": 130, "experts": 8, "k": 2, "hidden": 64, "size": 32, "group": 32, "routing": "one", "padded": 1},
)
_ORDERED = (*_EXPERTS, {"tokens": 9, "experts": 4, "k": 2, "hidden": 48, "size": 32, "group": 16, "zeros": 1, "order": 1})


def weight_of(scheme: str, shape: tuple[int, ...], case: inputs.Case, g: torch.Generator) -> dict[str, torch.Tensor]:
    """A random weight of `shape` ([..., out, in]), about 1 / sqrt(in) large.

    `group`: columns of a group, else one group; `zeros`, `offsets`, `order` and `static`: with zeros, offsets, scattered groups, a
    static input scale.
    """
    *outer, columns = shape
    num_groups = columns // min(case.get("group", columns), columns)
    size = 1 / math.sqrt(columns)
    scales = (torch.rand((*outer, num_groups), generator=g) + 0.5) * size
    found: dict[str, torch.Tensor] = {"scales": scales}
    if scheme == "int4":
        found |= {"codes": schemes.pack_int4(torch.randint(0, 16, shape, generator=g, dtype=torch.uint8)), "scales": scales / 4}
    elif scheme == "codebook":
        found |= {"codes": torch.randint(0, 16, shape, generator=g, dtype=torch.uint8), "codebook": torch.randn((*outer, 16), generator=g)}
    elif "fp8" in scheme:
        found |= {"codes": (torch.randn(shape, generator=g) * 100).clamp(-448, 448).to(schemes.FP8), "scales": scales / 100}
    else:
        found |= {"codes": torch.randint(-128, 128, shape, generator=g).to(torch.int8), "scales": scales / 64}
    if case.get("zeros"):
        low, high = (0, 17) if scheme == "int4" else (-128, 129)  # old gptq checkpoints have zeros one beyond the largest code
        found["zeros"] = torch.randint(low, high, scales.shape, generator=g).to(torch.int16)
    if case.get("offsets"):
        found["offsets"] = torch.randn(scales.shape, generator=g) * size
    if case.get("order"):
        scattered = torch.rand((*shape[:-2], columns), generator=g).argsort(-1)
        found["groups"] = (scattered // (columns // num_groups)).to(torch.int32)
    if case.get("static"):
        found["input_scale"] = torch.tensor([1 / 32 if case.get("fill") == "halves" else 2.5 / (schemes.FP8_MAX if "fp8" in scheme else 127.0)])
    return found


def _linear(scheme: str) -> inputs.Generate:
    def generate(case: inputs.Case, dtype: torch.dtype, g: torch.Generator) -> inputs.Inputs:
        x = inputs.values((case["tokens"], case["k"]), dtype, g, case.get("fill", "normal"))
        weight = weight_of(scheme, (case["n"], case["k"]), case, g)
        return (x, weight, inputs.values((case["n"],), dtype, g) if case.get("bias") else None), {}

    return generate


def _experts(scheme: str) -> inputs.Generate:
    def generate(case: inputs.Case, dtype: torch.dtype, g: torch.Generator) -> inputs.Inputs:
        (x, w13, w2, *routing), _ = inputs.moe_experts(case, dtype, g)
        return (x, weight_of(scheme, w13.shape, case, g), weight_of(scheme, w2.shape, case, g), *routing), {}

    return generate


def _linear_cost(x: torch.Tensor, weight: dict[str, torch.Tensor], bias: torch.Tensor | None = None) -> tuple[int, int]:
    (tokens, k), n = x.shape, weight["scales"].shape[0]
    return 2 * tokens * k * n, inputs.tensor_bytes(x, bias, *weight.values()) + tokens * n * x.element_size()


def _experts_cost(x: torch.Tensor, w13: dict[str, torch.Tensor], w2: dict[str, torch.Tensor], *routing: torch.Tensor) -> tuple[int, int]:
    pairs, experts = routing[1].numel(), w13["scales"].shape[0]
    moved = inputs.tensor_bytes(*w13.values(), *w2.values()) * min(pairs, experts) // experts
    return 2 * pairs * 3 * x.shape[1] * w13["scales"].shape[1] // 2, 2 * inputs.tensor_bytes(x) + moved + inputs.tensor_bytes(*routing)


def _register() -> None:
    for scheme, cases, limits in (
        ("int4", _GROUPED, WEIGHT_ONLY),
        ("int8", _GROUPED, WEIGHT_ONLY),
        ("fp8", _SIZES, WEIGHT_ONLY),
        ("codebook", _SIZES, WEIGHT_ONLY),
        ("w8a8", _W8A8, INTEGER),
        ("w8a8_fp8", _W8A8_FP8, FLOAT8),
    ):
        name = f"linear_{scheme}"
        register_op(Op(name, getattr(schemes, name), generate=_linear(scheme), cases=cases, tolerance=limits, cost=_linear_cost))
    for scheme, cases in (("int4", _ORDERED), ("int8", _ORDERED), ("fp8", _EXPERTS)):
        name = f"moe_experts_{scheme}"
        register_op(Op(name, getattr(schemes, name), generate=_experts(scheme), cases=cases, tolerance=WEIGHT_ONLY, cost=_experts_cost))


_register()
