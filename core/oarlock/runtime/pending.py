"""A step that was launched and not yet read.

Owns: the reads of one step's results, begun when it was launched, and their translation into `ModelRunnerOutput`.
Reads: `messages`.
Never: launches anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from oarlock.messages import ModelRunnerOutput, PositionLogprobs, SchedulerOutput
from oarlock.runtime.pooling import PooledPart, read_vectors

NOTHING_FINITE = (
    "no token can be chosen for this request: the model's output holds NaN, or the request's own fields (repetition_penalty, "
    "allowed_token_ids, bad_words, min_tokens, logits_processors) leave no finite value"
)


@dataclass(slots=True)
class LogprobsPart:
    """Output of one logprobs program: logprob and rank [picks], top_ids and top_logprobs [picks, top], being read."""

    reads: dict[str, Callable[[], torch.Tensor]]
    targets: list[int]  # per real row: the token whose probability was asked for, -1 for the sampled one; the rest is padding


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _HostPart:
    """A LogprobsPart on the host."""

    def __init__(self, part: LogprobsPart) -> None:
        read = {name: wait().tolist() for name, wait in part.reads.items()}
        self.logprob, self.rank, self.ids, self.values = read["logprob"], read["rank"], read["top_ids"], read["top_logprobs"]

    def at(self, n: int, token_id: int, top: int) -> PositionLogprobs:
        best = tuple((i, _finite(v)) for i, v in zip(self.ids[n][:top], self.values[n][:top], strict=True))
        return PositionLogprobs(token_id, _finite(self.logprob[n]), self.rank[n], best)


@dataclass(slots=True)
class PendingStep:
    """Holds a step's results until `result` waits for them."""

    runner: Any
    out: SchedulerOutput
    emitted: list[tuple[int, int, int]]  # (branch id, row, place among the padded rows)
    tokens: Callable[[], torch.Tensor] | None
    logprobs: LogprobsPart | None = None
    wants: dict[int, tuple[int, int]] = field(default_factory=dict)  # branch id -> (place, entries)
    prompt: list[tuple[int, int, int, LogprobsPart]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    pooled: list[PooledPart] | None = None  # None: no row is asked for a vector
    done: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step, read it once, and add its tokens to the host's history."""
        if self.done is not None:
            return self.done
        runner, tokens = self.runner, {}
        if self.tokens is not None:
            read = self.tokens().tolist()
            for branch_id, row, place in self.emitted:
                token = read[place]
                if token < 0:
                    self.failed.setdefault(branch_id, NOTHING_FINITE)
                elif branch_id not in self.failed:
                    tokens[branch_id] = (token,)
                    if not runner.batch.is_host_decided(branch_id):
                        runner.batch.append(branch_id, row, (token,))
        logprobs = {}
        if self.logprobs is not None:
            part = _HostPart(self.logprobs)
            for n, (branch_id, (_, top)) in enumerate(self.wants.items()):
                if branch_id in tokens:
                    logprobs[branch_id] = (part.at(n, tokens[branch_id][0], top),)
        pooled = read_vectors(runner, self.out, self.pooled, self.failed) if self.pooled is not None else {}
        self.done = ModelRunnerOutput(
            self.out.step_id, tokens, logprobs, self._read_prompts(), dict(self.failed), runner.compiles_after_warmup, pooled
        )
        self.tokens, self.logprobs, self.prompt, self.pooled = None, None, [], None
        return self.done

    def _read_prompts(self) -> dict[int, tuple[PositionLogprobs, ...]]:
        found: dict[int, tuple[PositionLogprobs, ...]] = {}
        for branch_id, top, count, part in self.prompt:
            host = _HostPart(part)
            found[branch_id] = found.get(branch_id, ()) + tuple(host.at(n, part.targets[n], top) for n in range(count))
        return found
