"""Host inputs of the sampling programs, from each row's parameters.

Owns: the choice between the greedy and the full program, and their packed inputs.
Reads: `batch.Row`, `messages.ScheduledRow`.
Never: samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from oarlock.messages import ScheduledRow
from oarlock.runtime.batch import Row
from oarlock.runtime.pending import PendingStep
from oarlock.shapes import BIAS_BUCKET

Emitting = list[tuple[ScheduledRow, Row, int]]  # (scheduled, row, place among the padded rows)


def choose_program(runner: Any, emitting: Emitting, rows: int) -> tuple[str, dict[str, int]]:
    """`greedy` when no row needs more, else `sample` with the parts that some row needs."""
    plain = all(r.new.params.is_greedy for _, r, _ in emitting)
    penalties = any(r.needs_history for _, r, _ in emitting)
    bias = max((len(r.bias) + len(s.banned_token_ids) for s, r, _ in emitting), default=0)
    mask = any(r.allowed is not None or s.mask for s, r, _ in emitting)
    if plain and not (penalties or bias or mask):
        return "greedy", {"rows": rows}
    if runner.policy.table.is_exact:
        longest = max((s.start + s.num_tokens for s, _, _ in emitting), default=0)
        width = runner.history_width(longest + 1) if penalties else 0
        return "sample", {"rows": rows, "bias": bias, "mask": int(mask), "history": width}
    full = bool(penalties or bias or mask)  # bans go into the mask
    width = runner.history_width(1) if full else 0
    return "sample", {"rows": rows, "bias": BIAS_BUCKET if full else 0, "mask": int(full), "history": width}


def sample_inputs(runner: Any, emitting: Emitting, name: str, axes: dict[str, int]) -> dict[str, Any]:
    """Packed inputs; rows that emit nothing write to the null row and are greedy."""
    count, null = axes["rows"], runner.null_row
    host: dict[str, Any] = {"rows": np.full(count, null, np.int32)}
    if name == "greedy":
        for _, row, place in emitting:
            host["rows"][place] = row.row
        return host
    for field in ("top_k", "seed", "choice", "position", "prompt_len", "total_len"):
        host[field] = np.zeros(count, np.int32)
    for field, neutral in (("temperature", 0), ("top_p", 1), ("min_p", 0), ("presence", 0), ("frequency", 0), ("repetition", 1)):
        host[field] = np.full(count, neutral, np.float32)
    for scheduled, row, place in emitting:
        p, end = row.new.params, scheduled.start + scheduled.num_tokens
        values = {
            "rows": row.row,
            "top_k": min(p.top_k, runner.model.vocab_size),
            "seed": row.new.seed,
            "choice": row.new.index,
            "position": end - row.num_prompt,
            "prompt_len": row.num_prompt,
            "total_len": end,
            "temperature": p.temperature,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "presence": p.presence_penalty,
            "frequency": p.frequency_penalty,
            "repetition": p.repetition_penalty,
        }
        for field, value in values.items():
            host[field][place] = value
    if axes["bias"]:
        _bias_inputs(host, emitting, count, axes["bias"], with_bans=runner.policy.table.is_exact)
    if axes["mask"]:
        host["mask"] = _mask_inputs(runner, emitting, count)
    return host


def _bias_inputs(host: dict[str, Any], emitting: Emitting, count: int, width: int, *, with_bans: bool) -> None:
    ids, values = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
    for scheduled, row, place in emitting:
        pairs = list(row.bias.items()) + ([(t, -np.inf) for t in scheduled.banned_token_ids] if with_bans else [])
        for at, (token, value) in enumerate(pairs):
            ids[place, at], values[place, at] = token, value
    host["bias_ids"], host["bias_values"] = ids, values


def _mask_inputs(runner: Any, emitting: Emitting, count: int) -> np.ndarray:
    """Allowed tokens as bits. On bucketed devices banned tokens are cleared here, so that bias needs no room for them."""
    words = (runner.model.vocab_size + 31) // 32
    mask = np.full((count, words), -1, np.int32)
    for scheduled, row, place in emitting:
        if row.allowed is not None:
            mask[place] = row.allowed
        if scheduled.mask:
            mask[place] &= np.frombuffer(scheduled.mask, "<i4")
        if not runner.policy.table.is_exact:
            bits = mask[place].view(np.uint32)
            for token in scheduled.banned_token_ids:
                bits[token // 32] &= ~np.uint32(1 << (token % 32))
    return mask


def logprob_wants(runner: Any, emitting: Emitting) -> dict[int, tuple[int, int]]:
    """Branch id -> (place, entries) for rows whose log-probabilities are needed: asked for, beams, or choosing the best of several."""
    wants: dict[int, tuple[int, int]] = {}
    for scheduled, row, place in emitting:
        p = row.new.params
        top = -1
        if p.logprobs is not None:
            top = runner.model.vocab_size if p.logprobs < 0 else p.logprobs
        if p.use_beam_search:
            # The engine drops banned candidates from this list and must still find two for each beam.
            candidates = 2 * p.num_branches + len(scheduled.banned_token_ids)
            top = max(top, candidates if row.allowed is None and not scheduled.mask else runner.model.vocab_size)
        elif p.num_branches > p.n:
            top = max(top, 0)
        if top >= 0:
            wants[scheduled.branch_id] = (place, min(top, runner.model.vocab_size))
    return wants


def apply_processors(runner: Any, emitting: Emitting, logits: torch.Tensor, pending: PendingStep) -> torch.Tensor:
    """Run per-request callables on the host. One that raises an Exception, or returns something else, fails its own request.

    What ends a program (KeyboardInterrupt, SystemExit) is nobody's failure and goes on to the caller.
    """
    host = runner.device.to_host(logits).clone()
    for scheduled, row, place in emitting:
        known = runner.batch.tokens[row.row, : int(runner.batch.known[row.row])].tolist()
        prompt, output = known[: row.num_prompt], known[row.num_prompt :]
        for processor in row.processors:
            try:
                wants_prompt = len(_parameters(processor)) == 3
                got = processor(prompt, output, host[place]) if wants_prompt else processor(output, host[place])
                if not isinstance(got, torch.Tensor) or got.shape != host[place].shape:
                    raise TypeError(f"must return a tensor of shape {list(host[place].shape)}, got {type(got).__name__}")
                host[place] = got
            except Exception as error:  # noqa: BLE001  user code: whatever fault it has is the request's own
                pending.failed[scheduled.branch_id] = f"logits_processors: {type(error).__name__}: {error}"
    return runner.device.to_device(host)


def _parameters(processor: Any) -> list[str]:
    import inspect

    try:
        return [n for n, p in inspect.signature(processor).parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    except (TypeError, ValueError):
        return ["output", "logits"]
