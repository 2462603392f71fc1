"""What figures mean: shares of measured limits, and the targets that they are held against.

Owns: the targets (T-12 to T-14) and the formulas.
Reads: nothing.
Never: imports torch; measures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# name of a group of figures -> (least share or most value, what it is of, which way)
TARGETS: dict[str, tuple[float, str, str]] = {
    "decode attention": (0.85, "the copy bandwidth", "least"),
    "prefill attention": (0.9, "torch's best SDPA", "least"),
    "elementwise": (0.85, "the copy bandwidth", "least"),
    "int4 linear": (0.75, "the copy bandwidth", "least"),
    "fp8 linear": (0.9, "torch._scaled_mm", "least"),
    "decode, one request": (0.85, "the copy bandwidth over the weights' bytes", "least"),
    "outside kernels": (0.03, "of a step", "most"),
    "prefill, 2048 tokens": (0.55, "the matrix rate", "least"),
    "start to first token": (20.0, "s", "most"),
    "memory plan": (0.02, "off what was taken", "most"),
}


def judged(group: str, value: float, unit: str, share: float | None = None, **more: Any) -> dict[str, Any]:
    """A figure beside its target: its share of what limits it where the target is one, else the value itself."""
    target, of, way = TARGETS[group]
    held = value if share is None else share
    figure = {"group": group, "value": value, "unit": unit, "target": target, "met": held >= target if way == "least" else held <= target, **more}
    return {**figure, "share": share, "of": of} if share is not None else figure


def plain(value: float, unit: str, **more: Any) -> dict[str, Any]:
    """A figure without a target."""
    return {"value": value, "unit": unit, **more}


def bandwidth_share(moved_bytes: float, seconds: float, peak: float) -> float:
    """Of the bytes a second that a copy reads and writes."""
    return moved_bytes / seconds / peak


def decode_attention_bytes(rows: int, context: int, heads: int, kv_heads: int, head_dim: int, item: int) -> int:
    """Keys and values of every row once; queries and results once."""
    return item * (2 * rows * context * kv_heads * head_dim + 2 * rows * heads * head_dim)


def causal_attention_flops(tokens: int, heads: int, head_dim: int) -> int:
    """Two products over the pairs that a causal mask leaves."""
    return 4 * heads * head_dim * (tokens * (tokens + 1) // 2)


def llama_weights(hidden: int, layers: int, intermediate: int, vocab: int, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """(weights that a decode reads, weights that multiply a prompt's tokens): the embedding is a row a token, the head's rows are the last tokens' alone."""
    attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    layer = attention + 3 * hidden * intermediate
    return layers * layer + vocab * hidden, layers * layer


def prefill_flops(tokens: int, multiplied: int, layers: int, heads: int, head_dim: int) -> int:
    return 2 * tokens * multiplied + layers * causal_attention_flops(tokens, heads, head_dim)


def outside(intervals: Iterable[tuple[float, float]]) -> float:
    """Share of the time from the first kernel's begin to the last one's end in which none ran. Kernels may overlap."""
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("no kernel was seen")
    busy, (begin, end) = 0.0, ordered[0]
    first = begin
    for start, stop in ordered[1:]:
        if start > end:
            busy += end - begin
            begin, end = start, stop
        else:
            end = max(end, stop)
    busy += end - begin
    return 1 - busy / (end - first) if end > first else 0.0


def per_step(short_s: float, long_s: float, short: int, long: int) -> float:
    """Seconds of one decode step from two runs that differ in their number of tokens alone."""
    return (long_s - short_s) / (long - short)
