"""Test inputs of every op: a generator and its cases, from which the conformance kit makes its cases.

Owns: what sizes and distributions an op is tried with, and what a call costs.
Reads: nothing of ours.
Never: draws from a global generator; makes two logits of a row equal where an order of equals is not part of the meaning.

A case is a dict of integers and words; `fill` names a distribution (see `values`). A generator returns `(args, kwargs)`,
tensors on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Case = dict[str, Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Generate = Callable[[Case, torch.dtype, torch.Generator], Inputs]


def values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, fill: str = "normal") -> torch.Tensor:
    """Random values. `fill`: "normal"; "outliers" (one in 50 is 100 times larger); "equal" (all 0.5); "denormal" (about 1e-39);
    "offset" (a mean of 100); "halves" (odd multiples of 1/64, at most 255/64).

    Raises:
        ValueError: an unknown `fill`.
    """
    x = torch.randn(shape, generator=generator)
    if fill == "outliers":
        x = torch.where(torch.rand(shape, generator=generator) < 0.02, x * 100, x)
    elif fill == "equal":
        x = torch.full(shape, 0.5)
    elif fill == "denormal":
        x = x * 1e-39
    elif fill == "offset":
        x = x + 100
    elif fill == "halves":
        x = (2 * torch.randint(-128, 128, shape, generator=generator) + 1) / 64
    elif fill != "normal":
        raise ValueError(f"fill {fill!r} is unknown; known are normal, outliers, equal, denormal, offset, halves")
    return x.to(dtype)


def integers(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """int32 in [low, high)."""
    return torch.randint(low, max(high, low + 1), shape, generator=generator).to(torch.int32)


def distinct_logits(rows: int, size: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of values of which no two are equal, in steps that `dtype` holds exactly (256 values for the half types)."""
    order = torch.rand((rows, size), generator=generator).argsort(-1)
    step = 8.0 / max(size, 1) if dtype == torch.float32 else 1 / 16
    return ((order - size // 2) * step).to(dtype)


# ---- layers


def embedding(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    ids = integers(0, case["vocab"], (case["tokens"],), g)
    return (ids, values((case["vocab"], case["hidden"]), dtype, g)), {}


def rms_norm(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    x = values((case["tokens"], case["hidden"]), dtype, g, case.get("fill", "normal"))
    # Families that store weight - 1 keep the sum in float32 whatever the model's dtype.
    weight = values((case["hidden"],), torch.float32 if case.get("weight") == "float32" else dtype, g)
    return (x, weight, case.get("eps", 1e-5)), {}


def head_norm(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    """rms_norm over heads: three dimensions, and an x that is a view into a wider tensor, as query and key norms have it."""
    if "heads" not in case:
        return rms_norm(case, dtype, g)
    wide = values((case["tokens"], case["heads"] + 2, case["hidden"]), dtype, g)
    return (wide[:, : case["heads"]], values((case["hidden"],), dtype, g), 1e-6), {}


def fused_add_rms_norm(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    (x, weight, eps), _ = rms_norm(case, dtype, g)
    return (x, values(tuple(x.shape), torch.float32, g), weight, eps), {}


def layer_norm(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    (x, weight, eps), _ = rms_norm(case, dtype, g)
    return (x, weight, values((case["hidden"],), dtype, g) if case.get("bias", True) else None, eps), {}


def rotary(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    rot = case.get("rot", case["head_dim"])
    angles = torch.arange(512, dtype=torch.float64)[:, None] / 10000.0 ** (torch.arange(0, rot, 2, dtype=torch.float64) / rot)
    table = torch.stack((angles.cos(), angles.sin()), 1).float()
    # As models do it: the heads of queries and keys, a view into the fused projection.
    x = values((case["tokens"], case["heads"] + 1, case["head_dim"]), dtype, g)[:, : case["heads"]]
    return (x, integers(0, 512, (case["tokens"],), g), table), {"interleaved": bool(case.get("interleaved", False))}


def gated(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    x = values((case["tokens"], 2 * case["size"]), dtype, g, case.get("fill", "normal"))
    return (x,) + ((case["approximate"],) if "approximate" in case else ()), {}


def activation(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    return (values((case["tokens"], case["size"]), dtype, g, case.get("fill", "normal")), case["kind"]), {}


def linear(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    x = values((case["tokens"], case["k"]), dtype, g)
    weight = values((case["n"], case["k"]), torch.float32, g) / math.sqrt(case["k"])
    return (x, weight.to(dtype), values((case["n"],), dtype, g) if case.get("bias") else None), {}


# ---- mixture of experts


def moe_topk(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    logits = distinct_logits(case["tokens"], case["experts"], g, dtype)
    if case.get("special") == "ties":
        logits = (logits / 2).round()
    return (logits, case["k"], bool(case.get("renormalise", True))), {}


def moe_experts(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    tokens, experts, k, hidden, size = (case[n] for n in ("tokens", "experts", "k", "hidden", "size"))
    ids = torch.rand((tokens, experts), generator=g).argsort(-1)[:, :k]
    if case.get("routing") == "one":  # every token wants the same experts: the worst case for tiles
        ids = torch.arange(k).expand(tokens, k)
    valid = torch.rand((tokens,), generator=g) > case.get("padded", 0) / 4
    x = torch.where(valid[:, None], values((tokens, hidden), torch.float32, g), torch.nan).to(dtype)
    w13 = (values((experts, 2 * size, hidden), torch.float32, g) / math.sqrt(hidden)).to(dtype)
    w2 = (values((experts, hidden, size), torch.float32, g) / math.sqrt(size)).to(dtype)
    return (x, w13, w2, torch.rand((tokens, k), generator=g).softmax(-1), ids.to(torch.int32), valid), {}


# ---- logits and sampling: always float32


def greedy(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    logits = distinct_logits(case["rows"], case["vocab"], g)
    if case.get("special") == "ties":
        logits = (logits / 2).round()
    elif case.get("special") == "rising":  # whatever is read of the next row is the best
        logits = logits + 100.0 * torch.arange(case["rows"])[:, None]
    elif case.get("special") == "broken":  # one row each: NaN, +inf, all banned; the others stay whole
        logits[0, case["vocab"] // 2] = torch.nan
        logits[1, -1] = torch.inf
        logits[2] = -torch.inf
        logits[3, 0] = -torch.inf
    return (logits,), {}


def sample(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    rows = case["rows"]
    ((logits,), _), mode = greedy(case, dtype, g), case.get("mode", "mixed")

    def column(low: float, high: float, neutral: float, name: str) -> torch.Tensor:
        drawn = torch.rand((rows,), generator=g) * (high - low) + low
        used = torch.rand((rows,), generator=g) < 0.7 if mode == "mixed" else torch.full((rows,), mode == name)
        return torch.where(used, drawn, neutral)

    temperature, top_p, min_p = column(0.3, 1.8, 1.0, "temperature"), column(0.05, 0.99, 1.0, "top_p"), column(0.001, 0.3, 0.0, "min_p")
    top_k = column(1, 9, 0, "top_k").to(torch.int32)  # few, so that one more or less shows; above the vocabulary of the smallest case
    if mode == "mixed":
        temperature = torch.where(torch.arange(rows) % 4 == 3, 0.0, temperature)
    seed, choice, position = integers(-(2**31), 2**31, (rows,), g), integers(0, 16, (rows,), g), integers(0, 4096, (rows,), g)
    return (logits, temperature, top_p, top_k, min_p, seed, choice, position), {}


def apply_penalties(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    rows, vocab, length = case["rows"], case["vocab"], case["history"]
    total = integers(0, length + 1, (rows,), g)
    prompt = torch.minimum(integers(0, length + 1, (rows,), g), total)
    history = integers(0, vocab, (rows, length), g)
    garbage = integers(-(2**31), 2**31, (rows, length), g)
    history = torch.where(torch.arange(length) < total[:, None], history, garbage)
    neutral = torch.arange(rows) % 3 == 2

    def column(low: float, high: float, value: float) -> torch.Tensor:
        return torch.where(neutral, value, torch.rand((rows,), generator=g) * (high - low) + low)

    return (values((rows, vocab), torch.float32, g), history, prompt, total, column(-2, 2, 0), column(-2, 2, 0), column(0.5, 2, 1)), {}


def apply_bias(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    rows, vocab, width = case["rows"], case["vocab"], case["width"]
    # Distinct ids in a row, so that the order of additions is not part of the test; a third of the entries are padding, which
    # must leave the bias of token 0 alone.
    ids = (torch.rand((rows, max(vocab, width)), generator=g).argsort(-1)[:, :width] + 1).clamp(max=vocab - 1).to(torch.int32)
    ids[:, 1:2] = 0
    bias = values((rows, width), torch.float32, g) * 10
    bias[:, ::4] = -torch.inf
    padding = torch.arange(width) >= width - width // 3
    return (values((rows, vocab), torch.float32, g), torch.where(padding, 0, ids), torch.where(padding, 0.0, bias)), {}


def apply_mask(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    words = (case["vocab"] + 31) // 32
    return (values((case["rows"], case["vocab"]), torch.float32, g), integers(-(2**31), 2**31, (case["rows"], words), g)), {}


def logprobs(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    logits = distinct_logits(case["rows"], case["vocab"], g)
    if case.get("special") == "ties":
        logits = (logits / 2).round()
    return (logits, integers(0, case["vocab"], (case["rows"],), g), case["k"]), {}


# ---- inputs and state of programs


def as_float(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    """Bits of ordinary numbers, zeros of both signs and infinities."""
    numbers = values((case["rows"],), torch.float32, g)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    numbers[: min(4, case["rows"] // 2)] = special[: min(4, case["rows"] // 2)]
    return (numbers.view(torch.int32),), {}


def index_update(case: Case, dtype: torch.dtype, g: torch.Generator) -> Inputs:
    """Token state, int32: one column is `last` (one index), several are `history` (row and place)."""
    rows, width = case["rows"], case["width"]
    tensor = integers(0, 1 << 30, (rows + 3, width) if width > 1 else (rows + 3,), g)
    at = torch.randperm(rows + 3, generator=g)[:rows].to(torch.int32)
    index = (at, integers(0, width, (rows,), g)) if width > 1 else (at,)
    return (tensor, index, integers(0, 1 << 30, (rows,), g)), {}


# ---- costs: (floating-point operations, bytes moved at least once)


def tensor_bytes(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def elementwise_cost(operations: int, results: float = 1.0) -> Callable[..., tuple[int, int]]:
    """`operations` for each element of the first tensor; reads every argument once, writes `results` times the first."""

    def cost(*args: Any, **kwargs: Any) -> tuple[int, int]:
        return operations * args[0].numel(), tensor_bytes(*args) + int(results * tensor_bytes(args[0]))

    return cost


def embedding_cost(ids: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    return 0, tensor_bytes(ids) + 2 * ids.numel() * weight.shape[1] * weight.element_size()


def rotary_cost(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool = False) -> tuple[int, int]:
    return 3 * x.numel(), 2 * tensor_bytes(x) + positions.numel() * (4 + 8 * table.shape[-1])


def linear_cost(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[int, int]:
    tokens, k = x.shape
    return 2 * tokens * k * weight.shape[0], tensor_bytes(x, weight, bias) + tokens * weight.shape[0] * x.element_size()


def moe_experts_cost(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> tuple[int, int]:
    pairs, one = ids.numel(), (w13[0].numel() + w2[0].numel()) if len(w13) else 0
    used = min(pairs, w13.shape[0])
    return 2 * pairs * one, 2 * tensor_bytes(x) + used * one * x.element_size() + tensor_bytes(weights, ids)


def index_update_cost(tensor: torch.Tensor, index: tuple[torch.Tensor, ...], value: torch.Tensor) -> tuple[int, int]:
    """In place: only what is written moves."""
    return 0, tensor_bytes(*index) + 2 * tensor_bytes(value)
