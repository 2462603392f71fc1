"""Runs every program for every key that the shape policy can yield, through the serving path with the same objects.

Owns: the derivation of the warm-up list (from the policy, never written by hand).
Reads: `shapes`, the runner's programs.
Never: touches a block other than the null block, or a row other than the null row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from oarlock.runtime.programs import step_axes
from oarlock.shapes import BIAS_BUCKET, StepKey

log = logging.getLogger("oarlock.worker")
SAY_S = 10.0  # between two words about how far it is
LONG_CHUNK = 256  # tokens


def warm(runner: Any) -> None:
    """Bucketed: everything. Exact: one decode step and one chunk, so that libraries choose their kernels before the first request, and
    where decodes are padded, chunks of every kind and those decodes, the largest first: graphs that share memory then find it."""
    table, keys = runner.policy.table, list(runner.policy.keys())
    if table.is_exact:
        for key in (StepKey(1, 1, 1, 1, 1), StepKey(8, 1, 1, 8, 0), *(_chunks(runner) if keys else ()), *reversed(keys)):
            step(runner, key)
        for rows in (1, *(rows for rows in table.decode_rows if rows != 1)):
            _sampling(runner, rows)
        return
    (picks,) = table.out_rows
    said = time.monotonic()
    for done, key in enumerate(keys):
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            log.info("warm-up: %d of %d shapes of a step have run", done, len(keys))
        every = step(runner, key)
        chosen = _run(runner, "select", {"tokens": key.tokens, "picks": picks}, {"all": every["all"]})
    _run(runner, "pool", {"picks": picks}, chosen)
    for rows in sorted({key.rows for key in keys} | {picks}):
        _sampling(runner, rows)
    _blocks(runner)


def _chunks(runner: Any) -> Iterator[StepKey]:
    """Steps without decodes: few rows and many, short chunks and long, short contexts and long. Kernels are chosen by these, and compiled when first used."""
    limits, size = runner.limits, runner.model.block_size
    longest = min(max(LONG_CHUNK, limits.max_step_tokens), limits.max_model_len)
    lengths = sorted({*(1 << n for n in range(3, longest.bit_length())), longest})
    yield from (StepKey(length, 1, -(-length // size), length, 0) for length in lengths)
    for rows, length in product(sorted({1, limits.max_num_seqs}), sorted({lengths[0], min(LONG_CHUNK, longest)})):
        yield StepKey(rows - 1 + length, rows, -(-limits.max_model_len // size), length, 0)
    if limits.max_num_seqs > 1:
        yield StepKey(limits.max_num_seqs + 1, limits.max_num_seqs, 1, 2, 0)


def _zeros(runner: Any, name: str, axes: dict[str, int]) -> dict[str, np.ndarray]:
    spec = runner.programs[name]
    return {n: np.zeros(prod(shape), np.int32).reshape(shape) for n, shape in spec.inputs(spec.key(**axes)).items()}


def _run(runner: Any, name: str, axes: dict[str, int], device_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    host = _zeros(runner, name, axes)
    if "rows" in host:
        host["rows"] = np.full(host["rows"].shape, runner.null_row, np.int32)
    if "source" in host:
        host["source"] = np.full(host["source"].shape, runner.null_row, np.int32)
    return runner.run(name, axes, host, device_inputs)


def step(runner: Any, key: StepKey) -> dict[str, Any]:
    """`forward` in one shape."""
    return _run(runner, "forward", step_axes(key))


def _sampling(runner: Any, rows: int) -> None:
    if runner.model.role != "generate":
        return
    spec_hidden = torch.zeros(rows, runner.model.hidden_size, dtype=runner.model.dtype, device=runner.device.torch_device)
    logits = _run(runner, "head", {"rows": rows}, {"hidden": spec_hidden})["logits"]
    tokens = _run(runner, "greedy", {"rows": rows}, {"logits": logits})["tokens"]
    _run(runner, "sample", {"rows": rows, "bias": 0, "mask": 0, "history": 0}, {"logits": logits})
    if runner.policy.table.is_exact:
        return
    width = runner.history_width(1)
    _run(runner, "sample", {"rows": rows, "bias": BIAS_BUCKET, "mask": 1, "history": width}, {"logits": logits})
    for top in {runner.top_bucket(0), runner.model.vocab_size}:
        _run(runner, "logprobs", {"rows": rows, "picks": rows, "top": top}, {"logits": logits, "sampled": tokens})


def sample_everything(runner: Any, rows: int) -> None:
    """Head, a sampler with all that it can do, log-probabilities: what takes most beside a step, where shapes are exact."""
    hidden = torch.zeros(rows, runner.model.hidden_size, dtype=runner.model.dtype, device=runner.device.torch_device)
    if runner.model.role != "generate":
        _run(runner, "pool", {"picks": rows}, {"hidden": hidden})
        return
    logits = _run(runner, "head", {"rows": rows}, {"hidden": hidden})["logits"]
    width = runner.history_width(runner.limits.max_model_len + 1)
    tokens = _run(runner, "sample", {"rows": rows, "bias": 0, "mask": 1, "history": width}, {"logits": logits})["tokens"]
    _run(runner, "logprobs", {"rows": rows, "picks": rows, "top": runner.top_bucket(0)}, {"logits": logits, "sampled": tokens})


def _blocks(runner: Any) -> None:
    for size in {*runner.copy_sizes(1)}:
        got = _run(runner, "gather_blocks", {"copies": size})["blocks"]
        _run(runner, "block_copy", {"copies": size})
        _run(runner, "scatter_blocks", {"copies": size}, {"blocks": got})
    width = runner.history_width(1)
    _run(runner, "load_history", {"rows": 1, "history": width})


@torch.no_grad()
def canary(runner: Any) -> None:
    """One padded step and its head: finite numbers prove that programs, weights and state still serve.

    Raises:
        RuntimeError: the head gave something else.
    """
    key = StepKey(1, 1, 1, 1, 1) if runner.policy.table.is_exact else next(iter(runner.policy.keys()))
    hidden = step(runner, key)["hidden"]
    if runner.model.role == "generate":
        hidden = _run(runner, "head", {"rows": key.rows}, {"hidden": hidden})["logits"]
    if not bool(torch.isfinite(runner.device.to_host(hidden)).all()):
        raise RuntimeError("the canary step gave numbers that are not finite")
