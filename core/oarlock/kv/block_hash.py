"""Chained content hashes of full blocks: equal hash means equal tokens from the very start.

Owns: what goes into a hash.
Reads: nothing.
Never: knows which block holds what (`block_pool` does).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(cache_salt: str | None, adapter: str | None) -> bytes:
    """Start of a chain. Requests that differ in salt or adapter never share a block."""
    return hashlib.sha256(repr((cache_salt, adapter)).encode()).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append, in place, the hashes of blocks `len(hashes)` up to `num_blocks` (exclusive), all of them full.

    hash[i] = SHA-256(hash[i - 1] + tokens of block i as int64); 32 bytes. O(new blocks).
    """
    parent = hashes[-1] if hashes else root
    for i in range(len(hashes), num_blocks):
        content = array("q", tokens[i * block_size : (i + 1) * block_size]).tobytes()
        parent = hashlib.sha256(parent + content).digest()
        hashes.append(parent)
