"""Integers of a few bits, packed densely into 32-bit words.

Owns: the unpacking that gptq and compressed-tensors share.
Reads: nothing of ours.
Never: looks at a value (it also runs on meta tensors).
"""

from __future__ import annotations

import torch

_ROWS = 256  # unpacked at a time, where that takes 64-bit integers


def words_for(count: int, bits: int) -> int:
    """Words that hold `count` values."""
    return -(-count * bits // 32)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Value i of a row is at its bits i * bits and up, low first; a value may straddle two words.

    Shapes:
        words:  [rows, words_for(count, bits)]  int32
        result: [rows, count]  uint8
    """
    if 8 % bits == 0:  # values do not straddle bytes, and torch has no big-endian build that serves
        octets = words.contiguous().view(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        return ((octets[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[:, :count]
    start = torch.arange(count, device=words.device) * bits
    at, shift = start // 32, start % 32
    found = []
    for part in words.split(_ROWS):
        low = part[:, at].long() & 0xFFFFFFFF
        following = part[:, (at + 1).clamp(max=words.shape[1] - 1)].long() & 0xFFFFFFFF
        found.append((((low | (following << 32)) >> shift) & (2**bits - 1)).to(torch.uint8))
    return torch.cat(found)
