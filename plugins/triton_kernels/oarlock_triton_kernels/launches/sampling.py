"""Launches of `sampling` and `logits` over the vocabularies of real models.

Owns: those launches, a function for each op.
Reads: `sampling`, `logits`.
Never: computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from oarlock_triton_kernels import logits, sampling
from oarlock_triton_kernels.launches import GEMMA, LLAMA, MODELS, Launch, Model, meta

ROWS = (1, 64)
_HISTORY = 8192


def _of_rows(rows: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [meta(rows, dtype=dtype) for _ in range(count)]


def _logits(model: Model, rows: int) -> torch.Tensor:
    return meta(rows, model.vocab, dtype=torch.float32)


def greedy() -> Iterator[Launch]:
    """Nothing but the best."""
    for model in MODELS:
        for rows in ROWS:
            yield Launch(model.name, f"{rows} rows, greedy", partial(sampling.greedy, _logits(model, rows)), quick=model is LLAMA and rows > 1)


def sample() -> Iterator[Launch]:
    """All four launches of a draw."""
    for model in MODELS:
        for rows in ROWS:
            temperature, top_p, min_p = _of_rows(rows, 3, torch.float32)
            top_k, *noise = _of_rows(rows, 4, torch.int32)
            call = partial(sampling.sample, _logits(model, rows), temperature, top_p, top_k, min_p, *noise)
            yield Launch(model.name, f"{rows} rows", call, quick=model is LLAMA and rows > 1)


def apply_penalties() -> Iterator[Launch]:
    """With a history of 8k tokens."""
    for model in MODELS:
        for rows in ROWS:
            history = (meta(rows, _HISTORY, dtype=torch.int32), *_of_rows(rows, 2, torch.int32))
            call = partial(logits.apply_penalties, _logits(model, rows), *history, *_of_rows(rows, 3, torch.float32))
            yield Launch(model.name, f"{rows} rows, history of {_HISTORY}", call, quick=model is GEMMA and rows > 1)


def apply_bias() -> Iterator[Launch]:
    """With room for 300 tokens, as OpenAI's logit_bias has."""
    for model in MODELS:
        ids, values = meta(64, 300, dtype=torch.int32), meta(64, 300, dtype=torch.float32)
        yield Launch(model.name, "64 rows, 300 tokens", partial(logits.apply_bias, _logits(model, 64), ids, values), quick=model is LLAMA)


def apply_mask() -> Iterator[Launch]:
    """A grammar's mask."""
    for model in MODELS:
        bits = meta(64, (model.vocab + 31) // 32, dtype=torch.int32)
        yield Launch(model.name, "64 rows", partial(logits.apply_mask, _logits(model, 64), bits), quick=model is LLAMA)


def logprobs() -> Iterator[Launch]:
    """The chosen token alone, and with 20 others."""
    for model in MODELS:
        for k in (0, 20):
            call = partial(logits.logprobs, _logits(model, 64), meta(64, dtype=torch.int32), k)
            yield Launch(model.name, f"64 rows, {k} best", call, quick=model is LLAMA and k > 0)
