"""Which blocks each branch holds, per KV group, and the block moves that the next step must make.

Owns: block tables, host tables, pending copies; through them `BlockPool` and `HostTier`.
Reads: `kv_spec`, `block_hash`.
Never: sees tensors, requests or sampling parameters; decides who is preempted.

    tokens        0 . . . | 4 . . . | 8 . . . | 12 . .          block_size 4, window 5
    full table    b1        b2        b3        b4
    window table  0         0         b5        b6               13 computed: the next token sees positions 9 .. 13
                  ^ null: no future token can see these

All groups take ids from one pool. Moves are made in this order: swap_out, block_copy, swap_in, then the forward pass.
So a block that a swap_out frees may be handed out at once, but a host block that a swap_in frees only after that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from oarlock.errors import ConfigError
from oarlock.kv.block_hash import extend_hashes, root_hash
from oarlock.kv.block_pool import NULL_BLOCK, BlockPool
from oarlock.kv.host_tier import HostTier
from oarlock.kv_spec import KVGroup

Moves = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Table:
    """One branch's blocks on the device."""

    blocks: list[list[int]]  # per group; index i holds tokens [i * block_size, (i + 1) * block_size)
    first_live: list[int]  # per group: entries before it are null
    told: list[int]  # per group: entries that the worker knows
    replaced: list[tuple[int, int, int]] = field(default_factory=list)  # (group, index, block): not yet told
    num_registered: int = 0  # leading blocks offered to the prefix index


@dataclass(slots=True)
class _HostTable:
    """One swapped-out branch's blocks on the host: per group, None where the device table had the null block."""

    blocks: list[list[int | None]]
    first_live: list[int]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a branch may start from."""

    num_tokens: int = 0
    blocks: tuple[tuple[int, ...], ...] = ()  # per group, null where the window has passed


class KVCacheManager:
    """Allocation is all or nothing: a method that answers False or None has changed no holding."""

    def __init__(
        self, groups: tuple[KVGroup, ...], num_blocks: int, block_size: int, enable_prefix_caching: bool, num_host_blocks: int = 0
    ) -> None:
        for group in groups:
            if group.kind not in ("full", "window") or (group.kind == "window") != (group.window is not None):
                raise ConfigError(
                    f"KV group {group.group_id} is of kind {group.kind!r} with window {group.window}; "
                    "only full groups and windows of some length are built"
                )
        self.groups, self.block_size = groups, block_size
        self.windows = tuple(g.window for g in groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._pool = BlockPool(num_blocks)
        self._host = HostTier(num_host_blocks)
        self._tables: dict[int, _Table] = {}
        self._host_tables: dict[int, _HostTable] = {}
        self._swap_out: dict[int, int] = {}  # host block -> device block, not yet sent to the worker
        self._copies: list[tuple[int, int]] = []
        self._swap_in: dict[int, int] = {}  # device block -> host block
        self._reclaim: list[int] = []  # host blocks that are free once the pending swap_in was sent

    # ------------------------------------------------------------ sizes
    @property
    def num_blocks(self) -> int:
        """Usable device blocks: the null block not counted."""
        return self._pool.num_usable

    @property
    def num_free(self) -> int:
        """Device blocks that nobody holds, reusable ones included."""
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        return self._pool.num_usable - self._pool.num_free

    @property
    def num_reusable(self) -> int:
        """Free blocks kept for prefix reuse."""
        return self._pool.num_reusable

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def num_used_host(self) -> int:
        return self._host.num_blocks - self._host.num_free

    def width(self, num_tokens: int) -> int:
        """Entries of a block table that covers this many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_at_once(self, num_tokens: int, span: int) -> int:
        """Most blocks, over all groups, that one branch holds on its way to `num_tokens` when a step computes `span` of them.

        A window group holds the blocks of window - 1 + span consecutive tokens, however they lie.
        """
        total, full = 0, self.width(num_tokens)
        for window in self.windows:
            total += full if window is None else min(full, self.width(window - 2 + span) + 1)
        return total

    # ------------------------------------------------------------ prefix cache
    def hash_blocks(self, hashes: list[bytes], tokens: Sequence[int], num_tokens: int, salt: str | None, adapter: str | None) -> None:
        """Extend `hashes`, in place, over the full blocks of the first `num_tokens` tokens."""
        if self.enable_prefix_caching and len(hashes) < num_tokens // self.block_size:
            extend_hashes(hashes, root_hash(salt, adapter), tokens, self.block_size, num_tokens // self.block_size)

    def lookup(self, hashes: Sequence[bytes], limit: int) -> PrefixHit:
        """The longest cached prefix of at most `limit` tokens. Holds nothing yet. O(blocks).

        Full groups need every block, a window group those that the first token after the prefix sees.
        """
        if not self.enable_prefix_caching:
            return PrefixHit()
        count = min(len(hashes), limit // self.block_size)
        for g, window in enumerate(self.windows):
            if window is None:
                count = next((i for i in range(count) if self._pool.find((g, hashes[i])) is None), count)
        settled = False
        while count and not settled:
            settled = True
            for g, window in enumerate(self.windows):
                if window is None:
                    continue
                missing = next(
                    (i for i in range(count - 1, self._first_visible(count, window) - 1, -1) if self._pool.find((g, hashes[i])) is None),
                    None,
                )
                if missing is not None:  # every longer prefix that ends above `missing` needs it, too
                    count, settled = missing, False
        if not count:
            return PrefixHit()
        blocks = []
        for g, window in enumerate(self.windows):
            first = 0 if window is None else self._first_visible(count, window)
            blocks.append((NULL_BLOCK,) * first + tuple(self._pool.find((g, hashes[i])) or NULL_BLOCK for i in range(first, count)))
        return PrefixHit(count * self.block_size, tuple(blocks))

    def _first_visible(self, num_blocks: int, window: int) -> int:
        """First block that the token after `num_blocks` full blocks sees."""
        return self._passed(num_blocks * self.block_size, window)

    def _passed(self, position: int, window: int) -> int:
        """Blocks before this index hold only tokens that the token at `position`, and all later ones, cannot see."""
        return max(0, position - window + 1) // self.block_size

    def attach(self, branch_id: int, hit: PrefixHit, num_tokens: int, span: int, reserve: int) -> bool:
        """Start a branch from a hit, if what `num_tokens` need, computed `span` at a time, is free beyond `reserve` blocks."""
        revived = [b for blocks in hit.blocks for b in blocks if b != NULL_BLOCK and self._pool.refs(b) == 0]
        kept = sum(b != NULL_BLOCK for blocks in hit.blocks for b in blocks)
        needed = max(0, self.blocks_at_once(num_tokens, span) - kept) + len(revived)
        if needed + reserve > self.num_free:
            return False
        self.start(branch_id, hit)
        return True

    def start(self, branch_id: int, hit: PrefixHit) -> None:
        """Start a branch from a hit, whatever is free."""
        blocks = [list(hit.blocks[g]) if hit.blocks else [] for g in range(len(self.groups))]
        first_live = [next((i for i, b in enumerate(ids) if b != NULL_BLOCK), len(ids)) for ids in blocks]
        for ids in blocks:
            for block in ids:
                if block != NULL_BLOCK:
                    self._pool.hold(block)
        self._tables[branch_id] = _Table(blocks, first_live, [0] * len(blocks), num_registered=hit.num_tokens // self.block_size)

    def register(self, branch_id: int, hashes: Sequence[bytes], num_computed: int) -> None:
        """Make full blocks of confirmed tokens findable. `hashes` covers them. O(new blocks)."""
        table = self._tables[branch_id]
        for i in range(table.num_registered, min(num_computed // self.block_size, len(hashes))):
            for g, ids in enumerate(table.blocks):
                if ids[i] != NULL_BLOCK:
                    self._pool.register(ids[i], (g, hashes[i]))
            table.num_registered = i + 1

    def has_unregistered(self, branch_id: int, num_computed: int) -> bool:
        """Whether a full block of confirmed tokens was not yet offered to the prefix index."""
        return self.enable_prefix_caching and self._tables[branch_id].num_registered < num_computed // self.block_size

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Make this content unfindable, as it may be what made a request fail. O(blocks)."""
        for g in range(len(self.groups)):
            for content in hashes:
                self._pool.forget((g, content))

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that nobody holds."""
        self._pool.forget_unheld()

    # ------------------------------------------------------------ device blocks
    def prepare(self, branch_id: int, start: int, end: int, num_computed: int) -> bool:
        """Make positions [start, end) writable: drop blocks that no future token sees, copy shared ones, add new ones.

        `num_computed`: confirmed tokens; steps in flight may still read what those after it see.
        """
        table = self._tables[branch_id]
        self._drop_passed(table, num_computed)
        width, first = self.width(end), start // self.block_size
        shared = [(g, i) for g, ids in enumerate(table.blocks) for i in range(first, min(width, len(ids))) if self._pool.refs(ids[i]) > 1]
        needed = len(shared) + sum(max(0, width - len(ids)) for ids in table.blocks)
        if needed > self._pool.num_free:
            return False
        for g, i in shared:
            source, block = table.blocks[g][i], self._pool.allocate()
            self._pool.release(source)
            if source in self._swap_in:  # copies are made before swap_in: fetch the content twice instead
                self._swap_in[block] = self._swap_in[source]
            else:
                self._copies.append((source, block))
            self._replace(table, g, i, block)
        for ids in table.blocks:
            for _ in range(width - len(ids)):
                ids.append(self._pool.allocate())
        return True

    def trim(self, branch_id: int, num_computed: int) -> bool:
        """Drop blocks that no future token sees before the branch's next row. Whether that freed any."""
        before = self._pool.num_free
        self._drop_passed(self._tables[branch_id], num_computed)
        return self._pool.num_free > before

    def _drop_passed(self, table: _Table, num_computed: int) -> None:
        for g, window in enumerate(self.windows):
            if window is None:
                continue
            passed = min(self._passed(num_computed, window), len(table.blocks[g]))
            for i in range(table.first_live[g], passed):
                self._release(table.blocks[g][i])
                self._replace(table, g, i, NULL_BLOCK)
            table.first_live[g] = max(table.first_live[g], passed)

    def _replace(self, table: _Table, group: int, index: int, block: int) -> None:
        table.blocks[group][index] = block
        if index < table.told[group]:
            table.replaced.append((group, index, block))

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Let `child` share the parent's blocks of the first `num_tokens` tokens. O(blocks)."""
        table, width = self._tables[parent], self.width(num_tokens)
        blocks = [ids[:width] for ids in table.blocks]
        for ids in blocks:
            for block in ids:
                if block != NULL_BLOCK:
                    self._pool.hold(block)
        live = [min(first, width) for first in table.first_live]
        self._tables[child] = _Table(
            blocks, live, [0] * len(blocks), num_registered=min(table.num_registered, num_tokens // self.block_size)
        )

    def free(self, branch_id: int) -> None:
        """Give back everything a branch holds, on the device or the host; nothing if it holds nothing. Last blocks first."""
        table = self._tables.pop(branch_id, None)
        if table is not None:
            for ids in table.blocks:
                for block in reversed(ids):
                    if block != NULL_BLOCK:
                        self._release(block)
        host = self._host_tables.pop(branch_id, None)
        if host is not None:
            for row in host.blocks:
                for host_block in row:
                    if host_block is not None and self._host.release(host_block):
                        self._swap_out.pop(host_block, None)
                        self._host.reclaim(host_block)

    def _release(self, block: int) -> None:
        """One reference less. A block that nobody holds any more needs nothing from the host: the step to come may use it otherwise."""
        self._pool.release(block)
        if block in self._swap_in and not self._pool.refs(block):
            host_block = self._swap_in.pop(block)
            if host_block in self._reclaim and host_block not in self._swap_in.values():
                self._reclaim.remove(host_block)
                self._host.reclaim(host_block)

    def block_ids(self, branch_id: int) -> tuple[tuple[int, ...], ...]:
        """The whole table, per group, for a worker that does not know the branch. Counts as told."""
        table = self._tables[branch_id]
        table.told = [len(ids) for ids in table.blocks]
        table.replaced.clear()
        return tuple(tuple(ids) for ids in table.blocks)

    def take_changes(self, branch_id: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int, int], ...]]:
        """(new block ids per group, or () when none; replaced entries) since the worker was last told."""
        table = self._tables[branch_id]
        replaced = tuple(table.replaced)
        table.replaced.clear()
        new: tuple[tuple[int, ...], ...] = ()
        if any(len(ids) > told for ids, told in zip(table.blocks, table.told, strict=True)):
            new = tuple(tuple(ids[told:]) for ids, told in zip(table.blocks, table.told, strict=True))
            table.told = [len(ids) for ids in table.blocks]
        return new, replaced

    # ------------------------------------------------------------ host blocks
    @property
    def num_on_host(self) -> int:
        """Branches that are swapped out."""
        return len(self._host_tables)

    def is_on_host(self, branch_id: int) -> bool:
        return branch_id in self._host_tables

    def swap_out(self, branch_ids: Sequence[int]) -> bool:
        """Move these branches' blocks to the host; blocks that they share stay shared there.

        False: the host has no room, or a block's content is still to come from there, which is later than it would be sent back.
        """
        tables = [self._tables[b] for b in branch_ids]
        moved = {block for t in tables for ids in t.blocks for block in ids if block != NULL_BLOCK}
        if not moved or len(moved) > self._host.num_free or not moved.isdisjoint(self._swap_in):
            return False
        place: dict[int, int] = {}
        for branch_id, table in zip(branch_ids, tables, strict=True):
            rows: list[list[int | None]] = []
            for ids in table.blocks:
                row: list[int | None] = []
                for block in ids:
                    if block == NULL_BLOCK:
                        row.append(None)
                        continue
                    if block in place:
                        self._host.hold(place[block])
                    else:
                        place[block] = self._host.allocate()
                        self._swap_out[place[block]] = block
                    row.append(place[block])
                rows.append(row)
            self.free(branch_id)
            self._host_tables[branch_id] = _HostTable(rows, list(table.first_live))
        return True

    def swap_in(self, branch_ids: Sequence[int], reserve: int) -> bool:
        """Bring swapped-out branches back, if that leaves `reserve` blocks free."""
        tables = [self._host_tables[b] for b in branch_ids]
        moved = {block for t in tables for row in t.blocks for block in row if block is not None}
        if len(moved) + reserve > self._pool.num_free:
            return False
        place: dict[int, int] = {}
        for branch_id, host in zip(branch_ids, tables, strict=True):
            blocks: list[list[int]] = []
            for row in host.blocks:
                blocks.append([NULL_BLOCK if block is None else self._bring(block, place) for block in row])
            del self._host_tables[branch_id]
            self._tables[branch_id] = _Table(blocks, list(host.first_live), [0] * len(blocks))
        return True

    def _bring(self, host_block: int, place: dict[int, int]) -> int:
        if host_block in place:
            self._pool.hold(place[host_block])
        else:
            place[host_block] = self._pool.allocate()
            self._swap_in[place[host_block]] = host_block
        if self._host.release(host_block):
            self._reclaim.append(host_block)
        return place[host_block]

    def take_moves(self) -> tuple[Moves, Moves, Moves]:
        """(swap_out, block_copy, swap_in) for the step that is sent now."""
        moves = (tuple((d, h) for h, d in self._swap_out.items()), tuple(self._copies), tuple((h, d) for d, h in self._swap_in.items()))
        self._swap_out.clear()
        self._copies.clear()
        self._swap_in.clear()
        for block in self._reclaim:
            self._host.reclaim(block)
        self._reclaim.clear()
        return moves

    # ------------------------------------------------------------ tests
    def holders(self) -> set[int]:
        """Branches that hold a table, on the device or the host."""
        return set(self._tables) | set(self._host_tables)

    def check_invariants(self) -> None:
        """Raises AssertionError. O(blocks)."""
        held: Counter[int] = Counter()
        for branch_id, table in self._tables.items():
            assert branch_id not in self._host_tables, f"branch {branch_id} is on the device and on the host"
            for g, ids in enumerate(table.blocks):
                live = table.first_live[g]
                assert all(b == NULL_BLOCK for b in ids[:live]), f"branch {branch_id} holds a passed block in group {g}"
                assert all(b != NULL_BLOCK for b in ids[live:]), f"branch {branch_id} has a hole in group {g}"
                held.update(ids[live:])
        self._pool.check_invariants(dict(held))
        on_host = Counter(b for t in self._host_tables.values() for row in t.blocks for b in row if b is not None)
        self._host.check_invariants(dict(on_host), set(self._reclaim))
