"""Launches of `elementwise` at the shapes of real models.

Owns: those launches, a function for each kernel.
Reads: `elementwise`, `launches`.
Never: computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from oarlock_triton_kernels import elementwise
from oarlock_triton_kernels.launches import GEMMA, LLAMA, MODELS, QWEN, Launch, Model, meta

TOKENS = 2048
_DECODES = 64


def _eps(model: Model) -> float:
    return 1e-5 if model is LLAMA else 1e-6


def rms_norm() -> Iterator[Launch]:
    """The final norm, and the norms of query heads where a model has them: a view into the projection."""
    for model in MODELS:
        for tokens in (_DECODES, TOKENS):
            x, weight = meta(tokens, model.hidden), meta(model.hidden)
            yield Launch(model.name, f"{tokens} tokens", partial(elementwise.rms_norm, x, weight, _eps(model)), quick=tokens == TOKENS)
    for model in (QWEN, GEMMA):
        qkv = meta(TOKENS, model.heads + 2 * model.kv_heads, model.head_dim)
        q, weight = qkv[:, : model.heads], meta(model.head_dim)
        yield Launch(model.name, f"query heads of {TOKENS} tokens", partial(elementwise.rms_norm, q, weight, 1e-6), quick=model is QWEN)


def fused_add_rms_norm() -> Iterator[Launch]:
    """Between the halves of a layer."""
    for model in MODELS:
        for tokens in (1, TOKENS):
            x, residual, weight = meta(tokens, model.hidden), meta(tokens, model.hidden, dtype=torch.float32), meta(model.hidden)
            call = partial(elementwise.fused_add_rms_norm, x, residual, weight, _eps(model))
            yield Launch(model.name, f"{tokens} tokens", call, quick=tokens == TOKENS and model is not GEMMA)


def layer_norm() -> Iterator[Launch]:
    """None of the three has it; at their sizes."""
    for model in MODELS:
        x, weight = meta(TOKENS, model.hidden), meta(model.hidden)
        yield Launch(model.name, f"{TOKENS} tokens", partial(elementwise.layer_norm, x, weight, weight, 1e-5), quick=model is LLAMA)


def rotary() -> Iterator[Launch]:
    """Queries and keys together, inside the fused projection."""
    for model in MODELS:
        for tokens in (_DECODES, TOKENS):
            qkv = meta(tokens, model.heads + 2 * model.kv_heads, model.head_dim)
            qk, table = qkv[:, : model.heads + model.kv_heads], meta(8192, 2, model.head_dim // 2, dtype=torch.float32)
            call = partial(elementwise.rotary, qk, meta(tokens, dtype=torch.int32), table)
            yield Launch(model.name, f"heads of {tokens} tokens", call, quick=tokens == TOKENS and model is not QWEN)


def activation() -> Iterator[Launch]:
    """The gate of each model's feed-forward."""
    for model in MODELS:
        gate = elementwise.silu_and_mul if model.activation == "silu" else partial(elementwise.gelu_and_mul, approximate="tanh")
        for tokens in (1, TOKENS):
            x = meta(tokens, 2 * model.intermediate)
            yield Launch(model.name, f"{tokens} tokens", partial(gate, x), quick=tokens == TOKENS and model is not QWEN)
