"""From the hidden states of prompts to vectors: which tokens are read, the sums of chunks, length or probabilities.

Owns: the inputs of the `pool` program and the last step of a vector, on the host.
Reads: `batch.Row`, `messages`.
Never: runs for a step in which nobody asked for a vector; depends on how a prompt was cut into chunks.

    chunks of a prompt    |0 1 2 3|4 5 6 7|8 9|     one entry of the program's input for each token read
    last                                     ^
    mean                   ^ ^ ^ ^ ^ ^ ^ ^ ^ ^      each chunk's sum is added to the row's, which is divided at the end
    cls                    ^
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oarlock.messages import SchedulerOutput
from oarlock.pooling_params import PoolingParams
from oarlock.shapes import StepKey

PICKS = 512  # tokens that are read at once, where shapes are exact: sums cost their square
NOT_FINITE = "the model's output for this request holds NaN or infinity, so it has no vector"


@dataclass(slots=True)
class PooledPart:
    """Output of one pool program: [picks, hidden size or classes] float32, being read."""

    read: Callable[[], torch.Tensor]
    branches: list[int]  # whose sum each row is; the rest is padding


def pool_prompts(runner: Any, out: SchedulerOutput, key: StepKey, every: torch.Tensor) -> list[PooledPart] | None:
    """Launch what this step adds to vectors; None: no row of it is asked for one. `every`: hidden states of the step's tokens."""
    batch = runner.batch
    asked = [(n, row, batch.rows[row.branch_id]) for n, row in enumerate(out.rows) if batch.rows[row.branch_id].new.pooling is not None]
    if not asked:
        return None
    starts, places = batch.query_starts(out.rows, key), batch.places(out.rows, key)
    reads: list[tuple[int, int]] = []  # (branch id, place of a token among the step's)
    for n, row, owner in asked:
        end = row.start + row.num_tokens
        wanted = {"last": range(owner.num_prompt - 1, owner.num_prompt), "mean": range(owner.num_prompt), "cls": range(1)}[owner.new.pooling.pooling]
        first = int(starts[places[n]]) - row.start
        reads += [(row.branch_id, first + at) for at in range(max(row.start, wanted.start), min(end, wanted.stop))]
    size = max(1, min(len(reads), PICKS)) if runner.policy.table.is_exact else runner.policy.table.out_rows[0]
    return [_part(runner, key, reads[at : at + size], every, size) for at in range(0, len(reads), size)]


def _part(runner: Any, key: StepKey, reads: list[tuple[int, int]], every: torch.Tensor, size: int) -> PooledPart:
    size = len(reads) if runner.policy.table.is_exact else size
    branches = list(dict.fromkeys(branch_id for branch_id, _ in reads))
    target = {branch_id: n for n, branch_id in enumerate(branches)}
    pad = size - len(reads)
    index = {"index": [at for _, at in reads] + [0] * pad}
    hidden = runner.run("select", {"tokens": key.tokens, "picks": size}, index, {"all": every})["hidden"]
    targets = {"targets": [target[branch_id] for branch_id, _ in reads] + [-1] * pad}
    pooled = runner.run("pool", {"picks": size}, targets, {"hidden": hidden})["pooled"]
    return PooledPart(runner.device.begin_read(pooled), branches)


def read_vectors(runner: Any, out: SchedulerOutput, parts: list[PooledPart], failed: dict[int, str]) -> dict[int, bytes]:
    """Wait for the sums, add them to their rows', and give the vectors of prompts that are complete. What is not finite goes into `failed`."""
    rows = runner.batch.rows
    for part in parts:
        sums = part.read().numpy()
        for n, branch_id in enumerate(part.branches):
            row = rows.get(branch_id)
            if row is not None:  # else it ended meanwhile
                row.pooled = sums[n].copy() if row.pooled is None else row.pooled + sums[n]
    found: dict[int, bytes] = {}
    for scheduled in out.rows:
        row = rows.get(scheduled.branch_id)
        if row is None or row.pooled is None or scheduled.start + scheduled.num_tokens < row.num_prompt:
            continue
        vector = finish(row.pooled, row.num_prompt, row.new.pooling)
        if np.isfinite(vector).all():
            found[scheduled.branch_id] = vector.astype("<f4").tobytes()
        else:
            failed.setdefault(scheduled.branch_id, NOT_FINITE)
    return found


def finish(total: np.ndarray, num_prompt: int, params: PoolingParams) -> np.ndarray:
    """A prompt's vector, float64, from its sum."""
    vector = total.astype(np.float64) / (num_prompt if params.pooling == "mean" else 1)
    vector = vector[: params.dimensions]
    if params.activation == "normalize":
        return vector / max(float(np.linalg.norm(vector)), 1e-12)
    if params.activation == "sigmoid":
        return 1 / (1 + np.exp(-vector))
    if params.activation == "softmax":
        raised = np.exp(vector - vector.max())
        return raised / raised.sum()
    return vector


__all__ = ["PooledPart", "finish", "pool_prompts", "read_vectors"]
