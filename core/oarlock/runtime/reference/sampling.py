"""References of the sampler's random part: Threefry noise and the choice of tokens.

Owns: threefry, uniform, gumbel_noise, sample, greedy.
Reads: nothing of ours.
Never: keeps a generator's state; lets a row's noise depend on its row, its rank or its batch.
"""

from __future__ import annotations

import torch

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    # `>>` of int32 is arithmetic: the mask drops the copies of the sign bit.
    low = torch.bitwise_and(torch.bitwise_right_shift(x, 32 - bits), (1 << bits) - 1)
    return torch.bitwise_or(torch.bitwise_left_shift(x, bits), low)


def threefry(key0: torch.Tensor, key1: torch.Tensor, counter0: torch.Tensor, counter1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Threefry-2x32 with 20 rounds, in wrapping int32: two random words for each (key, counter). Broadcasts.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    keys = (key0, key1, torch.bitwise_xor(torch.bitwise_xor(key0, key1), _PARITY))
    x0, x1 = counter0 + key0, counter1 + key1
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = torch.bitwise_xor(_rotate_left(x1, bits), x0)
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + (group + 1)
    return x0, x1


def uniform(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """float32 in [2**-47, 1] from 46 of 64 bits: fine near 0. Every step is exact or rounds once, so all devices agree."""
    # 23 bits of each word are exact in float32.
    mantissa = [torch.bitwise_and(torch.bitwise_right_shift(word, 9), 0x7FFFFF).float() for word in (high, low)]
    return mantissa[0] * 2.0**-23 + (mantissa[1] * 2.0**-46 + 2.0**-47)


def gumbel_noise(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise that belongs to (seed, choice, position, token id). seed, choice, position [num_rows]; token_ids [num_rows, n]."""
    u = uniform(*threefry(seed[:, None], choice[:, None], position[:, None], token_ids.to(torch.int32)))
    return -torch.log(-torch.log1p(-u))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The best token of each row, the lowest id among equals; -1 for a row whose maximum is not finite (NaN, infinite, all banned).

    Shapes:
        logits: [num_rows, vocab_size]  float32
        result: [num_rows]  int32
    """
    best, ids = logits.max(-1)  # NaN counts as the largest
    return torch.where(torch.isfinite(best), ids, -1).to(torch.int32)


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
    """Draw one token a row: temperature, then min_p, top_k, top_p over what is left, then Gumbel-max over the kept tokens.

    The best token is always kept; among equal logits the lowest ids are. Neutral values keep everything, bit for bit.
    A temperature below 1e-5 gives what `greedy` gives. -1 for a row whose maximum is not finite.

    Shapes:
        logits: [num_rows, vocab_size]  float32
        temperature, top_p, min_p: [num_rows]  float32; top_p >= 1 and min_p 0 are off
        top_k, seed, choice, position: [num_rows]  int32; top_k 0 is off
        result: [num_rows]  int32
    """
    vocab_size = logits.shape[-1]
    is_greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    scaled, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    best = scaled[:, :1]
    keep = (scaled - best).exp() >= min_p[:, None]  # p / p_max >= min_p; 0 keeps all
    limit = torch.where(is_greedy, 1, torch.where(top_k > 0, top_k, vocab_size))
    keep = keep & (rank < limit[:, None])
    left = torch.where(keep, scaled, -torch.inf).softmax(-1)
    before = left.cumsum(-1) - left
    keep = keep & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
    noisy = scaled + torch.where(is_greedy[:, None], 0.0, gumbel_noise(seed, choice, position, ids))
    keep = (keep & (scaled > -torch.inf)) | (rank == 0)
    at = torch.where(keep, noisy, -torch.inf).argmax(-1, keepdim=True)
    return torch.where(torch.isfinite(best), ids.gather(1, at), -1).squeeze(1).to(torch.int32)
