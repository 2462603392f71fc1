"""The Pallas kernel, interpreted on the host, against dense attention in float64; and the sampler's bits."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

BLOCKS = 12


def dense(shape, q, k, v, tables, lens, first):
    """Row by row, position by position."""
    out = np.zeros(q.shape)
    for r, i in np.ndindex(q.shape[:2]):
        at = int(first[r]) + i
        if at >= lens[r]:
            continue
        low = 0 if shape.window is None else max(0, at - shape.window + 1)
        for h in range(shape.heads):
            kv = slice((h // shape.group) * shape.head_dim, (h // shape.group + 1) * shape.head_dim)
            keys, values = (t[tables[r]].reshape(-1, shape.lanes)[low : at + 1, kv].astype(np.float64) for t in (k, v))
            scores = keys @ q[r, i, h].astype(np.float64) * shape.scale
            scores = scores if shape.softcap is None else shape.softcap * np.tanh(scores / shape.softcap)
            weights = np.exp(scores - scores.max())
            out[r, i, h] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "softcap", "queries"),
    [
        (4, 2, 64, 32, None, None, 1),
        (4, 2, 64, 32, None, None, 16),
        (9, 3, 64, 16, None, None, 8),  # three heads of 64 fill no whole lanes
        (8, 2, 128, 16, 20, None, 8),
        (4, 4, 80, 16, None, 5.0, 4),
        (4, 2, 16, 32, 7, None, 1),
        (2, 1, 256, 64, 30, 30.0, 4),
    ],
)
def test_the_kernel_is_dense_attention_and_reads_nothing_stale(heads, kv_heads, head_dim, block_size, window, softcap, queries):
    from oarlock_tpu import paged
    from oarlock_tpu.vendor import jax, jnp

    random = np.random.default_rng(0)
    shape = paged.Shape(heads, kv_heads, head_dim, block_size, head_dim**-0.5, window, softcap, interpret=True)
    assert shape.lanes % 128 == 0
    keys, values = (random.standard_normal((BLOCKS, block_size, shape.lanes)).astype(np.float32) for _ in range(2))
    tables = np.stack([random.permutation(BLOCKS - 1)[:3] + 1 for _ in range(3)]).astype(np.int32)
    lens = np.array([block_size * 2 + 3, 0, block_size + queries], np.int32)
    first = lens - np.array([min(queries, 3), 0, queries], np.int32)
    query = random.standard_normal((3, queries, heads, head_dim)).astype(np.float32)
    want = dense(shape, query, keys, values, tables, lens, first)
    for tensor in (keys, values):  # what no row owns, and what lies past each row's end
        seen = {int(b) for r in (0, 2) for b in tables[r][: -(-int(lens[r]) // block_size)]}
        for block in set(range(BLOCKS)) - seen:
            tensor[block] = np.nan
        for r in (0, 2):
            if not any(tables[r][lens[r] // block_size] in tables[other][: -(-int(lens[other]) // block_size)] for other in (0, 2) if other != r):
                tensor[tables[r][lens[r] // block_size], lens[r] % block_size :] = np.nan
    base = jnp.zeros((1,), jnp.int32)
    got = np.asarray(jax.jit(lambda *a: paged.attend(shape, *a))(query, keys, values, base, tables, lens, first))
    assert np.isfinite(got).all()
    real = (first[:, None] + np.arange(queries) < lens[:, None])[..., None, None]
    assert np.abs(np.where(real, got - want, 0)).max() < 2e-5 and not got[1].any()


def test_layers_that_share_a_tensor_are_told_apart_by_their_first_block():
    from oarlock_tpu import paged
    from oarlock_tpu.vendor import jax, jnp

    random = np.random.default_rng(1)
    shape = paged.Shape(2, 1, 128, 16, 1.0, None, None, interpret=True)
    cache = random.standard_normal((2 * BLOCKS, 16, 128)).astype(np.float32)
    query = random.standard_normal((1, 1, 2, 128)).astype(np.float32)
    tables, lens = np.array([[3, 5]], np.int32), np.array([20], np.int32)
    run = jax.jit(lambda base: paged.attend(shape, query, cache, cache, base, tables, lens, lens - 1))
    for layer in (0, 1):
        part = cache[layer * BLOCKS : (layer + 1) * BLOCKS]
        want = dense(shape, query, part, part, tables, lens, lens - 1)
        assert np.abs(np.asarray(run(jnp.full((1,), layer * BLOCKS, jnp.int32))) - want).max() < 2e-5


def test_noise_is_threefry():
    """Random123's known answers, and JAX's own."""
    threefry_2x32 = importlib.import_module("jax.extend.random").threefry_2x32

    from oarlock_tpu import sampling
    from oarlock_tpu.vendor import jnp

    word = lambda *values: jnp.array(np.array(values, np.uint32).view(np.int32))
    got = sampling._threefry(word(0, 0xFFFFFFFF, 0x13198A2E), word(0, 0xFFFFFFFF, 0x03707344), word(0, 0xFFFFFFFF, 0x243F6A88), word(0, 0xFFFFFFFF, 0x85A308D3))
    known = [(0x6B200159, 0x99BA4EFE), (0x1CB996FC, 0xBB002BE7), (0xC4923A9C, 0x483DF7A0)]
    assert [tuple(int(np.asarray(half).view(np.uint32)[n]) for half in got) for n in range(3)] == known
    theirs = np.asarray(threefry_2x32((np.uint32(7), np.uint32(9)), np.array([11, 13], np.uint32)))
    assert [int(np.asarray(half).view(np.uint32)[0]) for half in sampling._threefry(word(7), word(9), word(11), word(13))] == list(theirs)
