"""The op `sample` without a sort: what is kept is found by halving the range of logits, not by ordering them.

Owns: sample, the noise.
Reads: `vendor`.
Never: differs from the reference in meaning; sums of probabilities may round otherwise.

    tokens by rank   |best . . . . .|= = = =|. . . . . .|        rank: by logit, the lowest id first among equals
    kept             |<---- above --->|<-r->|                    above the cut all, of those at the cut the r lowest ids

PERF: a TPU's compiler takes 15 s for one sort of a vocabulary of 128,256 and 30 s for the reference, 1 s for this.

Source: Threefry-2x32, Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oarlock_tpu.vendor import call, jax, jnp

_GREEDY_BELOW = 1e-5  # temperatures below this mean the best token
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """One token a row: min_p, top_k, top_p, then Gumbel-max over the kept tokens. Shapes as the reference's."""
    return call(_sample, logits, temperature, top_p, top_k, min_p, seed, choice, position)


def _sample(logits: Any, temperature: Any, top_p: Any, top_k: Any, min_p: Any, seed: Any, choice: Any, position: Any) -> Any:
    if not logits.size:
        return jnp.zeros(logits.shape[:1], jnp.int32)
    is_greedy = temperature < _GREEDY_BELOW
    scaled = logits / jnp.where(is_greedy, 1.0, temperature)[:, None]
    best, first = scaled.max(-1, keepdims=True), jnp.argmax(scaled, -1).astype(jnp.int32)
    key = _ordered(scaled)
    limit = jnp.where(top_k > 0, top_k, logits.shape[1])[:, None]
    # The least key above which fewer than `limit` tokens are.
    cut = _least(key, lambda middle: (key > middle).sum(-1, keepdims=True, dtype=jnp.int32) < limit)
    taken = (key > cut).sum(-1, keepdims=True, dtype=jnp.int32) + _number(key == cut)
    keep = (key > cut) | ((key == cut) & (taken < limit))
    keep &= jnp.exp(scaled - best) >= min_p[:, None]
    left = jax.nn.softmax(jnp.where(keep, scaled, -jnp.inf), -1)
    above = lambda middle: jnp.where(key > middle, left, 0.0).sum(-1, keepdims=True)
    cut = _least(key, lambda middle: above(middle) < top_p[:, None])
    before = above(cut) + _number(key == cut) * left  # equals have equal parts
    nucleus = (key > cut) | ((key == cut) & (before < top_p[:, None]))
    keep &= nucleus | (top_p >= 1)[:, None]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    noisy = scaled + _gumbel(seed[:, None], choice[:, None], position[:, None], ids)
    keep = (keep & (scaled > -jnp.inf)) | (ids == first[:, None])
    drawn = jnp.argmax(jnp.where(keep, noisy, -jnp.inf), -1).astype(jnp.int32)
    return jnp.where(jnp.isfinite(best[:, 0]), jnp.where(is_greedy, first, drawn), -1)


def _ordered(x: Any) -> Any:
    """Integers in the order of floats; 0.0 and -0.0 are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _least(key: Any, holds: Callable[[Any], Any]) -> Any:
    """The least integer [rows, 1] that `holds`, which is false below and true from some key on."""

    def halve(_: Any, ends: Any) -> Any:
        low, high = ends  # false at low - 1, true at high
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        found = holds(middle)
        return jnp.where(found, low, middle + 1), jnp.where(found, middle, high)

    shape = (key.shape[0], 1)
    ends = jnp.full(shape, -(2**31), jnp.int32), jnp.full(shape, 2**31 - 1, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, ends)[1]


def _number(chosen: Any) -> Any:
    """How many chosen tokens have lower ids."""
    return jnp.cumsum(chosen, -1, dtype=jnp.int32) - chosen


def _gumbel(seed: Any, choice: Any, position: Any, ids: Any) -> Any:
    """The noise of (seed, choice, position, token id): the reference's bits, but for the last one of a logarithm."""
    high, low = _threefry(seed, choice, position, ids)
    mantissa = [((word >> 9) & 0x7FFFFF).astype(jnp.float32) for word in (high, low)]
    u = mantissa[0] * 2.0**-23 + (mantissa[1] * 2.0**-46 + 2.0**-47)
    return -jnp.log(-jnp.log1p(-u))


def _threefry(key0: Any, key1: Any, counter0: Any, counter1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, in wrapping int32."""
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = counter0 + key0, counter1 + key1
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << bits) | jax.lax.shift_right_logical(x1, jnp.int32(32 - bits))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + (group + 1)
    return x0, x1
