"""Seconds of a call on a device, without what launches it: calls over different data, recorded in a graph where there are graphs.

Owns: how time is taken.
Reads: torch.
Never: judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MEASURE_S = 0.05  # one take, about
TAKES = 5
COLD_BYTES = 512 << 20  # of data that calls go round: more than any cache holds


def copies_for(size: int, is_tiny: bool) -> int:
    """How many sets of data of `size` bytes a call must go round to find none of them in a cache."""
    return 1 if is_tiny else max(1, min(16, -(-COLD_BYTES // max(size, 1))))


def seconds_of(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Of one call: the median of a few takes. `calls` do the same on different data."""
    with torch.no_grad():
        for call in calls:
            call()  # kernels are compiled and chosen
        return _on_gpu(calls, device) if device.type == "cuda" else _on_host(calls)


def _on_host(calls: Sequence[Callable[[], Any]]) -> float:
    def take() -> float:
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls)

    return _median([take() for _ in range(TAKES)])


def _on_gpu(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def take(replays: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / replays / len(calls)

    once = take(1) * len(calls)
    replays = max(1, min(2000, int(MEASURE_S / max(once, 1e-7))))
    return _median([take(replays) for _ in range(TAKES)])


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
