"""Decode steps of a model against batch and context, beside the time that reading their bytes takes.

Owns: a worker in this process, the clock around its steps, the plot.
Reads: `runtime.worker`, `conformance.driver`.
Never: passes or fails; measures HTTP or the scheduler.

    python benchmarks/step_time.py MODEL [--device cpu] [--batches 1,2,4,8,16,32,64,128,256] [--contexts 128,512,2048,8192] [--svg FILE] [--quantization int8] [--kv-cache-dtype fp8_e4m3]

The cache is filled with numbers and every request is placed at its context at once: nothing is prefilled. The limit of a step is the time of
reading its bytes: weights once, keys and values of every request, at the read bandwidth measured beside the steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from oarlock.config.sections import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from oarlock.conformance.driver import Driver
from oarlock.model_summary import load_summary
from oarlock.plugins import select_device
from oarlock.runtime.worker import Worker
from oarlock.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
WIDTH, HEIGHT, MARGIN = 640, 400, 56


@dataclass(frozen=True)
class Point:
    """One measured step, in milliseconds."""

    batch: int
    context: int
    step: float
    limit: float


def seconds(call: Callable[[], object], times: int) -> float:
    """The middle of so many runs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Bench:
    """A started worker and the machine's read bandwidth."""

    def __init__(self, options: argparse.Namespace) -> None:
        model = ModelConfig(model=options.model, dtype=options.dtype, quantization=options.quantization, max_model_len=options.max_model_len)
        cache = CacheConfig(kv_cache_dtype=options.kv_cache_dtype, kv_cache_bytes=6 << 30)
        scheduler = SchedulerConfig(max_num_seqs=max(options.batches), max_num_batched_tokens=4096)
        config = EngineConfig(model, cache, scheduler, device=DeviceConfig(device=options.device))
        self.worker = Worker(config, load_summary(model), options.device, select_device(options.device).spec.factory)
        self.worker.prepare()
        ready = self.worker.load()
        self.worker.start(ready.num_blocks, ready.num_host_blocks, ready.max_model_len)
        self.driver, self.ready = Driver(self.worker, ready), ready
        self.limit_tokens = (ready.num_blocks - 1) * ready.block_size
        layers = self.worker.runner.state["kv"]
        self.kv_bytes = sum(t.nbytes for layer in layers for t in layer) / (ready.num_blocks * ready.block_size)  # of one token
        for tensor in (t for layer in layers for t in layer):
            tensor.view(torch.int16).random_(0x3C00, 0x3E00)  # normal numbers in every dtype, as subnormal products are slow; untouched pages would be one that never leaves the cache
        self.weight_bytes = next(size for what, size, _ in self.worker.plan.rows if what == "weights")
        self.bandwidth = self._bandwidth()

    def _bandwidth(self) -> float:
        numbers = torch.empty(max(self.weight_bytes, 256 << 20) // 8, dtype=torch.int64).random_()
        return numbers.nbytes / seconds(numbers.sum, 7)

    def step(self, batch: int, context: int) -> Point | None:
        """None where the cache is too small."""
        if batch * (context + 16) > self.limit_tokens or context + 16 > self.ready.max_model_len:
            return None
        branches = [self.driver.add(tuple(range(1, context + 1)), GREEDY, seed) for seed in range(batch)]
        for branch in branches:
            branch.done = context - 1
        plan = dict.fromkeys(branches, 1)
        self.driver.step(plan)
        taken = seconds(lambda: self.driver.step(plan), 7 if batch < 64 else 4)
        self.driver.end(*branches)
        moved = (self.weight_bytes + batch * context * self.kv_bytes) / self.bandwidth
        return Point(batch, context, taken * 1e3, moved * 1e3)


def table(points: list[Point], bandwidth: float) -> str:
    """Markdown."""
    rows = [f"| {p.batch} | {p.context} | {p.step:.1f} | {p.limit:.1f} | {p.limit / p.step:.0%} | {p.batch / p.step * 1e3:,.0f} |" for p in points]
    head = f"| batch | context | step, ms | its bytes at {bandwidth / 1e9:.1f} GB/s, ms | share | tokens/s |\n|---|---|---|---|---|---|"
    return "\n".join((head, *rows))


def svg(series: dict[str, list[tuple[float, float]]], across: str) -> str:
    """Both axes in powers of two; one line a series, dashed where its name ends in "limit"."""
    every = [point for points in series.values() for point in points]
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*[(math.log2(x), math.log2(y)) for x, y in every], strict=True))
    y0, y1 = int(y0), int(y1) + 1

    def at(x: float, y: float) -> tuple[float, float]:
        return MARGIN + (math.log2(x) - x0) / max(x1 - x0, 1e-9) * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - (math.log2(y) - y0) / (y1 - y0) * (HEIGHT - 2 * MARGIN)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">']
    parts += [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{across}</text>']
    parts += [f'<text x="12" y="{MARGIN - 24}">ms for a step</text>']
    for power in range(y0, y1 + 1):
        _, y = at(1, 2.0**power)
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/><text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{2.0**power:g}</text>')
    for x in sorted({x for x, _ in every}):
        parts.append(f'<text x="{at(x, 1)[0]:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{x:g}</text>')
    for number, (name, points) in enumerate(series.items()):
        color = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")[number // 2 % 4]
        dashes = ' stroke-dasharray="5 4"' if name.endswith("limit") else ""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*p) for p in points))
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{MARGIN + 10}" y="{MARGIN + 16 * number}" fill="{color}">{name}</text>')
    return "\n".join((*parts, "</svg>"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in text.split(",")]  # a type of argparse
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=numbers, default=[128, 256, 512, 1024, 2048, 4096, 8000])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--svg", type=Path, help="two plots beside each other's name: FILE-batch.svg, FILE-context.svg")
    options = parser.parse_args()
    bench = Bench(options)
    try:
        by_batch = [p for b in options.batches if (p := bench.step(b, 512))]
        print(table(by_batch, bench.bandwidth), flush=True)
        by_context = {b: [p for c in options.contexts if (p := bench.step(b, c))] for b in (1, 8)}
        print("\n" + table([p for points in by_context.values() for p in points], bench.bandwidth))
    finally:
        bench.worker.close()
    if options.svg is None:
        return
    lines = {"step at context 512": [(p.batch, p.step) for p in by_batch], "limit": [(p.batch, p.limit) for p in by_batch]}
    Path(f"{options.svg}-batch.svg").write_text(svg(lines, "requests in a step"))
    lines = {}
    for batch, points in by_context.items():
        lines |= {f"batch {batch}": [(p.context, p.step) for p in points], f"batch {batch}, limit": [(p.context, p.limit) for p in points]}
    Path(f"{options.svg}-context.svg").write_text(svg(lines, "tokens of context"))


if __name__ == "__main__":
    main()
