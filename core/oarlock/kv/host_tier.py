"""Host block ids: where swapped-out branches keep their KV.

Owns: which host ids are free and how often each is held.
Reads: nothing. Called only by `KVCacheManager`.
Never: sees the tensors, which the worker owns.
"""

from __future__ import annotations


class HostTier:
    """Ids 0 .. num_blocks - 1; there is no null block here."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """An id with one reference.

        Raises:
            IndexError: none is free.
        """
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        self._refs[block] += 1

    def release(self, block: int) -> bool:
        """One reference less. True when it was the last; the id is free again only after `reclaim`."""
        self._refs[block] -= 1
        return self._refs[block] == 0

    def reclaim(self, block: int) -> None:
        """Put an id without references back on the free list."""
        del self._refs[block]
        self._free.append(block)

    def check_invariants(self, held: dict[int, int], reclaimable: set[int]) -> None:
        """`held`: host id -> table entries that name it; `reclaimable`: released, not yet reclaimed. Raises AssertionError."""
        assert len(set(self._free)) == len(self._free), "a host block is twice in the free list"
        for block in range(self.num_blocks):
            refs = self._refs.get(block, 0)
            assert refs == held.get(block, 0), f"host block {block}: {refs} references, held {held.get(block, 0)} times"
            states = (refs > 0) + (block in self._free) + (block in reclaimable)
            assert states == 1, f"host block {block} is in {states} states"
