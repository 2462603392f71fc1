"""Launches of `moe` at the shapes of the one model here that has experts.

Owns: those launches.
Reads: `moe`, `launches.linear.weight`.
Never: computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from oarlock_triton_kernels import moe
from oarlock_triton_kernels.launches import QWEN, Launch, meta
from oarlock_triton_kernels.launches.linear import weight

TOKENS = (1, 64, 2048)
_SPILLS = "two addresses of gate_up on sm_80, stored before the loop and read after it: ptxas stops at 128 registers, half of a unit's"


def topk() -> Iterator[Launch]:
    """From the router's logits."""
    for tokens in TOKENS:
        yield Launch(QWEN.name, f"{tokens} tokens", partial(moe.moe_topk, meta(tokens, QWEN.experts), QWEN.top_k, True), quick=tokens == 64)


def _routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = (tokens, QWEN.top_k)
    return meta(*pairs, dtype=torch.float32), meta(*pairs, dtype=torch.int32), meta(tokens, dtype=torch.bool)


def _of_codes(kind: str, run: int, tokens: int, *, ordered: bool = False) -> torch.Tensor:
    sizes = ((2 * QWEN.intermediate, QWEN.hidden), (QWEN.hidden, QWEN.intermediate))
    w13, w2 = (weight(kind, outs, width, run, QWEN.experts, zeros=ordered) for outs, width in sizes)
    if ordered:
        w13, w2 = (replace(of, order=meta(QWEN.experts, of.in_size, dtype=torch.int32)) for of in (w13, w2))
    return moe.moe_experts_of_codes(meta(tokens, QWEN.hidden), w13, w2, *_routing(tokens))


def experts() -> Iterator[Launch]:
    """In bf16; int4 in groups of 128, int8 with a scale an output, fp8 in blocks of 128."""
    w13, w2 = meta(QWEN.experts, 2 * QWEN.intermediate, QWEN.hidden), meta(QWEN.experts, QWEN.hidden, QWEN.intermediate)
    for tokens in TOKENS:
        call = partial(moe.moe_experts, meta(tokens, QWEN.hidden), w13, w2, *_routing(tokens))
        yield Launch(QWEN.name, f"{tokens} tokens", call, quick=tokens != 1, spills=_SPILLS if tokens == 2048 else "")
        for kind, run in (("int4", 128), ("int8", 0), ("fp8", 128)):
            yield Launch(QWEN.name, f"{kind}, {tokens} tokens", partial(_of_codes, kind, run, tokens), quick=tokens == 64)


def scattered() -> Iterator[Launch]:
    """int4 in groups of 128 with zeros, in activation order, as gptq has them."""
    for tokens in TOKENS:
        yield Launch(QWEN.name, f"int4 in activation order, {tokens} tokens", partial(_of_codes, "int4", 128, tokens, ordered=True), quick=tokens == 64)
