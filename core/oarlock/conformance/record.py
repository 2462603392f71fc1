"""Writes down every bound op call of a few steps of a model: op, shapes, dtypes, static arguments and ranges, no data.

Owns: the form of the file.
Reads: the worker, `driver`.
Never: keeps a weight, an activation or a user's token (the prompts are drawn here).

What is recorded is what the model calls, so the ops are core's references, which take weights as the checkpoint has them; the
file can then be replayed on any device. Of a small vector of integers (rows, lengths, positions) the values are kept; of other
tensors the smallest and the largest number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oarlock.backend_api.runtime import Attention, AttentionParams, EagerRunner, registry
from oarlock.config.sections import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from oarlock.conformance.driver import Driver
from oarlock.device_choice import Selection
from oarlock.model_summary import load_summary
from oarlock.runtime.choice import choose_ops
from oarlock.runtime.worker import Worker
from oarlock.sampling_params import SamplingParams

FORMAT = 1
CONTEXT, NUM_BLOCKS = 160, 96
KEPT_VALUES = 64  # a vector of integers up to this length is kept as it is


@dataclass
class Span:
    """Smallest and largest number of a tensor. Calls that differ in spans alone are one call."""

    low: float
    high: float


def _spans(value: Any) -> Iterator[Span]:
    """All spans of a call, in order."""
    if isinstance(value, Span):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _spans(part)


class Calls:
    """What was called, each different call once, with a count."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, **call: Any) -> None:
        key = json.dumps(call, sort_keys=True, default=lambda span: "range")
        found = self.found.setdefault(key, {**call, "count": 0})
        found["count"] += 1
        for mine, other in zip(_spans(found), _spans(call), strict=True):
            mine.low, mine.high = min(mine.low, other.low), max(mine.high, other.high)

    def written(self) -> list[dict[str, Any]]:
        """All calls, ready for JSON."""
        return json.loads(json.dumps(list(self.found.values()), default=lambda span: [span.low, span.high]))

    def of_op(self, name: str, fn: Callable[..., Any], to_host: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        """`fn`, recorded."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.add(op=name, args=[describe(a, to_host) for a in args], kwargs={k: describe(v, to_host) for k, v in kwargs.items()})
            return fn(*args, **kwargs)

        return recorded


def describe(value: Any, to_host: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value without its data.

    Raises:
        TypeError: an argument of another kind than tensors, numbers, texts, and tuples and dicts of them.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value, to_host(value))
    if isinstance(value, (tuple, list)):
        return {"tuple": [describe(v, to_host) for v in value]}
    if isinstance(value, dict):
        return {"dict": {k: describe(v, to_host) for k, v in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"an op was called with a {type(value).__name__}, which cannot be written down")


def _tensor(value: torch.Tensor, host: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if value.dtype == torch.bool or not host.numel():
        return found
    if host.dim() <= 1 and host.numel() <= KEPT_VALUES and not host.is_floating_point():
        return {**found, "values": host.flatten().tolist()}
    numbers = host.double()
    numbers = numbers[numbers.isfinite()]
    return {**found, "range": Span(float(numbers.min()), float(numbers.max()))} if numbers.numel() else found


class RecordingWorker(Worker):
    """A worker that writes down what its model calls."""

    calls: Calls

    def _choose_parts(self) -> None:
        super()._choose_parts()
        self.calls, self.graph = Calls(), EagerRunner(self.device)  # a traced program would be seen once, and without numbers
        self.ops = choose_ops([], self.device, self.dtype_name)
        for name, op in registry().items():
            if op.tested_in == "ops":
                setattr(self.ops, name, self.calls.of_op(name, getattr(self.ops, name), self.device.to_host))

    def make_attention(self, params: AttentionParams, *rest: Any, **more: Any) -> Attention:
        made = super().make_attention(params, *rest, **more)
        plain, calls, to_host, dtype = made.metadata, self.calls, self.device.to_host, self.dtype_name
        facts = {
            "heads": params.num_heads,
            "kv_heads": params.num_kv_heads,
            "head_dim": params.head_dim,
            "window": params.window,
            "softcap": params.softcap,
        }

        def metadata(block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_q: int, num_tokens: int) -> Any:
            new = to_host(query_start_loc).diff().tolist()
            rows = [[length, count] for length, count in zip(to_host(seq_lens).tolist(), new, strict=True) if length]
            if rows:
                calls.add(op="paged_attention", dtype=dtype, block_size=made.block_size, **facts, rows=rows)
            return plain(block_tables, seq_lens, query_start_loc, max_q, num_tokens)

        made.metadata = metadata  # type: ignore[method-assign]
        return made


def record(selection: Selection, model: str, dtype: str = "auto") -> dict[str, Any]:
    """Serve a few steps of a model on the device, and what was called, ready to be written as JSON.

    Raises:
        OarlockError: the model cannot be served.
    """
    given = ModelConfig(model=model, dtype=dtype, generation_config="none", skip_tokenizer_init=True)
    given = replace(given, max_model_len=min(CONTEXT, load_summary(given).max_model_len))
    summary = load_summary(given)
    config = EngineConfig(
        given, CacheConfig(num_blocks_override=NUM_BLOCKS, swap_space_bytes=0), SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    )
    worker = RecordingWorker(config, summary, selection.spec.name, selection.spec.factory)
    try:
        worker.prepare()
        ready = worker.load()
        worker.start(ready.num_blocks, ready.num_host_blocks, ready.max_model_len)
        worker.calls.found.clear()  # of warm-up
        _steps(Driver(worker, ready), summary.vocab_size)
    finally:
        worker.close()
    return {"format": FORMAT, "kind": "calls", "model": Path(model).name, "dtype": worker.dtype_name, "calls": worker.calls.written()}


def _steps(driver: Driver, vocab: int) -> None:
    """Prompts whole and in chunks, chunks beside decodes, decodes alone; greedy, drawn, penalised, with log-probabilities."""
    draw = torch.Generator().manual_seed(3)
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=50),
        SamplingParams(temperature=0.0, max_tokens=50, logprobs=3),
        SamplingParams(
            temperature=0.8, top_p=0.9, top_k=30, max_tokens=50, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1
        ),
    )
    a, b, c = (
        driver.add(tuple(torch.randint(0, vocab, (n,), generator=draw).tolist()), kind, seed=n)
        for n, kind in zip((19, 5, 40), kinds, strict=True)
    )
    for plan in ({a: 19, b: 3}, {a: 1, b: 2, c: 25}, {a: 1, b: 1, c: 15}, {a: 1, b: 1, c: 1}, {c: 1}):
        driver.step(plan)
    driver.end_all()
