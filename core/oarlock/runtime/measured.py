"""What a model takes beside its weights and its KV cache, measured by running the largest steps over a cache of two blocks.

Owns: which steps those are; the sums.
Reads: the runner, `warmup`, `backend_api.runtime.MemoryProfiler`.
Never: plans; keeps the runner that it made.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from oarlock.backend_api.runtime import MemoryProfiler
from oarlock.runtime.model_runner import ModelRunner
from oarlock.runtime.warmup import sample_everything, step
from oarlock.shapes import StepKey


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes."""

    activations: int  # the most that a step had taken at one time
    programs: int  # graphs of all padded shapes: two were captured, the rest is reckoned from them
    libraries: int  # what was taken for good outside torch's allocator, by whomever, while steps ran


def largest_steps(max_num_seqs: int, max_tokens: int, max_model_len: int, block_size: int) -> Iterator[StepKey]:
    """As many decodes as there may be beside one chunk; as many chunks as there may be. `max_tokens` of one step."""
    blocks = -(-max_model_len // block_size)
    decodes = min(max_num_seqs, max_tokens) - 1
    chunk = min(max_tokens - decodes, max_model_len)
    yield StepKey(decodes + chunk, decodes + 1, blocks, chunk, decodes)
    rows = min(max_num_seqs, max_tokens)
    tokens = min(max_tokens, rows * max_model_len)
    yield StepKey(tokens, rows, blocks, min(tokens, max_model_len), 0)


def measure(profiler: MemoryProfiler, make_runner: Callable[[], ModelRunner], max_tokens: int) -> Measured:
    """Raises torch.OutOfMemoryError: the largest step does not fit."""
    gc.collect()
    _settle(profiler)
    before = profiler.taken()
    runner = make_runner()
    profiler.restart()
    held = profiler.peak()
    sizes = runner.limits
    for key in largest_steps(sizes.max_num_seqs, max_tokens, sizes.max_model_len, runner.model.block_size):
        step(runner, key)
    sample_everything(runner, min(sizes.max_num_seqs, max_tokens))
    profiler.device.synchronise()
    activations = profiler.peak() - held
    _settle(profiler)
    taken = [profiler.taken()]
    padded = list(runner.policy.keys())
    for key in padded[-1:-3:-1]:
        step(runner, key)
        _settle(profiler)
        taken.append(profiler.taken())
    grown = [max(after - earlier, 0) for earlier, after in pairwise(taken)]
    programs = sum(grown) + max(len(padded) - 2, 0) * grown[-1] if grown else 0
    runner.state.clear()
    runner.compiled.clear()
    del runner
    gc.collect()
    _settle(profiler)
    return Measured(max(activations, 0), programs, max(profiler.taken() - before, 0))


def _settle(profiler: MemoryProfiler) -> None:
    profiler.device.synchronise()
    profiler.release()
