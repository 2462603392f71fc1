"""Launches of attention and of the cache's writer.

Owns: which steps of which models are compiled.
Reads: the launchers.
Never: computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from oarlock.backend_api.runtime import HeadSteps

from oarlock_triton_kernels import attention_chunks, attention_decode, cache
from oarlock_triton_kernels import qkv as qkv_file
from oarlock_triton_kernels.launches import GEMMA, LLAMA, MODELS, QWEN, Launch, Model, meta

BLOCK_SIZE, NUM_BLOCKS = 16, 40_000
FP8 = {"fp8 e4m3": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}
EXACT = "matrix units round float32 to fewer bits; where they do not, as on gfx942, they are used"


def _cache(model: Model, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (NUM_BLOCKS, model.kv_heads, BLOCK_SIZE, model.head_dim)
    return meta(*shape, dtype=dtype), meta(*shape, dtype=dtype)


def _table(rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    return meta(rows, context // BLOCK_SIZE, dtype=torch.int32), meta(rows, dtype=torch.int32)


def _new(model: Model, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as a fused projection leaves them: views of one tensor."""
    fused = meta(tokens, model.heads + 2 * model.kv_heads, model.head_dim)
    query, key, value = fused.split([model.heads, model.kv_heads, model.kv_heads], 1)
    return query, key, value


def _write(model: Model, tokens: int, kept: torch.dtype) -> None:
    _, key, value = _new(model, tokens)
    cache.write_kv(_cache(model, kept), key, value, meta(tokens, dtype=torch.int32))


def _write_qkv(model: Model, tokens: int, kept: torch.dtype) -> None:
    qkv, ints = meta(tokens, model.heads + 2 * model.kv_heads, model.head_dim), meta(tokens, dtype=torch.int32)
    norms = (None, None) if model is LLAMA else (meta(model.head_dim), meta(model.head_dim))
    table = meta(40_960, 2, model.head_dim // 2, dtype=torch.float32)
    qkv_file.write_qkv(qkv, _cache(model, kept), ints, model.heads, HeadSteps(ints, *norms, 1e-6, table))


def _chunks(model: Model, tokens: int, rows: int, kept: torch.dtype, window: int | None) -> None:
    table, lens = _table(rows, 8192)
    starts = meta(rows + 1, dtype=torch.int32)
    query = meta(tokens, model.heads, model.head_dim, dtype=kept if kept == torch.float32 else torch.bfloat16)
    attention_chunks.attend_chunks(query, _cache(model, kept), table, lens, starts, tokens, model.head_dim**-0.5, window=window)


def _decodes(model: Model, rows: int, context: int, kept: torch.dtype, window: int | None) -> None:
    table, lens = _table(rows, context)
    plan = attention_decode.plan_decodes(table, lens, BLOCK_SIZE, model.head_dim, kept, window)
    query = meta(rows, model.heads, model.head_dim, dtype=kept if kept == torch.float32 else torch.bfloat16)
    attention_decode.attend_decodes(query, _cache(model, kept), plan, model.head_dim**-0.5, window=window)


def write_kv() -> Iterator[Launch]:
    """One step of decodes and one chunk; 8-bit floats."""
    for model in MODELS:
        yield Launch(model.name, "64 tokens", partial(_write, model, 64, torch.bfloat16), quick=model is LLAMA)
    for name, kept in FP8.items():
        yield Launch(LLAMA.name, f"64 tokens, {name}", partial(_write, LLAMA, 64, kept), quick=kept == torch.float8_e4m3fn)


def write_qkv() -> Iterator[Launch]:
    """One step of decodes, with norms of heads where a model has them; 8-bit floats."""
    for model in MODELS:
        yield Launch(model.name, "64 tokens", partial(_write_qkv, model, 64, torch.bfloat16), quick=model is not GEMMA)
    for name, kept in FP8.items():
        yield Launch(LLAMA.name, f"64 tokens, {name}", partial(_write_qkv, LLAMA, 64, kept))


def chunks() -> Iterator[Launch]:
    """A long chunk in full and window layers; a short one."""
    for model in MODELS:
        yield Launch(model.name, "chunk of 2048", partial(_chunks, model, 2048, 1, torch.bfloat16, None), quick=model is LLAMA)
    yield Launch(GEMMA.name, "chunk of 2048, window", partial(_chunks, GEMMA, 2048, 1, torch.bfloat16, GEMMA.window))
    yield Launch(LLAMA.name, "chunk of 64 over 8k", partial(_chunks, LLAMA, 64, 1, torch.bfloat16, None))
    yield Launch(LLAMA.name, "4 chunks, 12 tokens", partial(_chunks, LLAMA, 12, 4, torch.bfloat16, None))
    for name, kept in FP8.items():
        yield Launch(LLAMA.name, f"chunk of 2048, {name}", partial(_chunks, LLAMA, 2048, 1, kept, None))
    for model in (LLAMA, GEMMA):
        yield Launch(model.name, "chunk of 2048, float32", partial(_chunks, model, 2048, 1, torch.float32, None), no_products=EXACT)


def join() -> Iterator[Launch]:
    """Few new tokens over a long context."""
    for model in MODELS:
        yield Launch(model.name, "chunk of 64 over 8k", partial(_chunks, model, 64, 1, torch.bfloat16, None), quick=model is LLAMA)


def plan() -> Iterator[Launch]:
    """With and without a look for a shared prefix."""
    for model in MODELS:
        yield Launch(model.name, "64 decodes of 8k", partial(_decodes, model, 64, 8192, torch.bfloat16, None))
        yield Launch(model.name, "1 decode of 8k", partial(_decodes, model, 1, 8192, torch.bfloat16, None))


def split() -> Iterator[Launch]:
    """One decode, few and many; window layers; 8-bit floats."""
    for model in MODELS:
        yield Launch(model.name, "64 decodes of 8k", partial(_decodes, model, 64, 8192, torch.bfloat16, None), quick=model is not QWEN)
    yield Launch(GEMMA.name, "64 decodes of 8k, window", partial(_decodes, GEMMA, 64, 8192, torch.bfloat16, GEMMA.window))
    for name, kept in FP8.items():
        yield Launch(LLAMA.name, f"64 decodes of 8k, {name}", partial(_decodes, LLAMA, 64, 8192, kept, None), quick=kept == torch.float8_e4m3fn)
    for model in (LLAMA, GEMMA):
        yield Launch(model.name, "64 decodes of 8k, float32", partial(_decodes, model, 64, 8192, torch.float32, None), no_products=EXACT)


def prefix() -> Iterator[Launch]:
    """What many rows share."""
    for model in MODELS:
        yield Launch(model.name, "64 decodes of 8k", partial(_decodes, model, 64, 8192, torch.bfloat16, None))


def merge() -> Iterator[Launch]:
    """One row whose context is cut for the whole chip; many that may share a prefix."""
    for model in MODELS:
        for rows in (1, 64):
            yield Launch(model.name, f"{rows} decode{'s' * (rows > 1)} of 8k", partial(_decodes, model, rows, 8192, torch.bfloat16, None))
