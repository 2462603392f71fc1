"""Device block ids: reference counts, the free list and the index of reusable content.

Owns: which ids are free, how often each is held, and which content hash each holds.
Reads: nothing. Called only by `KVCacheManager`.
Never: knows requests, tokens or tensors.

A block is in one of three states: held (refs > 0), reusable (free, its content still indexed) or blank (free).
Blank blocks are handed out first, then the reusable one that was released longest ago, whose content is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

NULL_BLOCK = 0
BlockKey = tuple[int, bytes]  # (KV group, chained hash): the same tokens have a block of their own in each group


class BlockPool:
    """Ids 1 .. num_blocks - 1; id 0 is the null block and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, but the null block and one more are needed")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[BlockKey, int] = {}
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()  # released longest ago first

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._reusable)

    @property
    def num_reusable(self) -> int:
        return len(self._reusable)

    def refs(self, block: int) -> int:
        """How often a block is held."""
        return self._refs[block]

    def allocate(self) -> int:
        """A block with one reference and no content. The caller checks `num_free` first.

        Raises:
            IndexError: none is free.
        """
        if self._blank:
            block = self._blank.pop()
        elif self._reusable:
            block, _ = self._reusable.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no free block")
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference, also to a free block whose content is reused."""
        if self._refs[block] == 0:
            del self._reusable[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one frees the block and keeps its indexed content for reuse."""
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._reusable[block] = None

    def register(self, block: int, key: BlockKey) -> None:
        """Make a held block's content findable. The first block with that content keeps it."""
        if self._keys[block] is None and key not in self._index:
            self._keys[block] = key
            self._index[key] = block

    def find(self, key: BlockKey) -> int | None:
        """The block, held or free, that has this content."""
        return self._index.get(key)

    def forget(self, key: BlockKey) -> None:
        """Make content unfindable, whoever holds its block."""
        block = self._index.get(key)
        if block is None:
            return
        self._forget(block)
        if self._refs[block] == 0:
            del self._reusable[block]
            self._blank.append(block)

    def forget_unheld(self) -> None:
        """Forget the content of every block that nobody holds."""
        while self._reusable:
            block, _ = self._reusable.popitem()
            self._forget(block)
            self._blank.append(block)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None

    def check_invariants(self, held: dict[int, int]) -> None:
        """`held`: block id -> number of table entries that name it. Raises AssertionError."""
        blank, reusable = set(self._blank), set(self._reusable)
        assert len(blank) == len(self._blank), "a block is twice in the free list"
        assert self._refs[NULL_BLOCK] == 0 and NULL_BLOCK not in blank | reusable, "the null block was handed out"
        for block in range(1, self.num_blocks):
            assert self._refs[block] == held.get(block, 0), (
                f"block {block}: {self._refs[block]} references, held {held.get(block, 0)} times"
            )
            states = (self._refs[block] > 0) + (block in blank) + (block in reusable)
            assert states == 1, f"block {block} is in {states} states"
            assert (block in reusable) <= (self._keys[block] is not None), f"reusable block {block} has no content"
            assert not (block in blank and self._keys[block]), f"blank block {block} has content"
        for key, block in self._index.items():
            assert self._keys[block] == key, f"block {block} is indexed under another content"
        assert len(self._index) == sum(k is not None for k in self._keys), "content that the index does not know"
