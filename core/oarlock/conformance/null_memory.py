"""What the null device remembers: each branch's tokens and tables, and a KV store in which a wrong block is noticed.

Owns: `NullMemory`, `Known`; the checks of a step against the contract of `messages`.
Reads: `messages`, `kv_spec`.
Never: answers; repairs what is wrong.

A slot holds a number made of every token up to it, so two sequences have the same content exactly as far as they agree. Before a
row answers, all that its attention would read must be there: computed, copied, swapped or shared, in the order that `messages` gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oarlock.errors import WorkerError
from oarlock.kv_spec import KVGroup
from oarlock.messages import NewRequest, ScheduledRow, SchedulerOutput

_MODULUS = 2**61 - 1
_NEVER = -1  # content of a slot that was never written
Block = tuple[int, list[int]]  # (group, content of each slot)


class Breach(WorkerError):
    """The engine broke the contract of a step."""


def require(holds: bool, text: str) -> None:
    """Raises Breach unless it holds."""
    if not holds:
        raise Breach(text)


@dataclass
class Known:
    """A branch as a worker knows it."""

    new: NewRequest
    tables: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=lambda: [0])  # sums[i]: of the first i tokens
    chain: list[int] = field(default_factory=list)  # chain[i]: made of tokens[: i + 1]

    def append(self, token_ids: tuple[int, ...]) -> None:
        for token in token_ids:
            self.tokens.append(token)
            self.sums.append(self.sums[-1] + token)
            self.chain.append(((self.chain[-1] if self.chain else 0) * 1_000_003 + token + 7) % _MODULUS)


class NullMemory:
    """One worker's."""

    def __init__(self, groups: tuple[KVGroup, ...], num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        self.groups, self.num_blocks, self.block_size, self.num_host_blocks = groups, num_blocks, block_size, num_host_blocks
        self.max_num_seqs = max_num_seqs
        self.known: dict[int, Known] = {}
        self.blocks: dict[int, Block] = {}
        self.host: dict[int, Block] = {}

    def step(self, out: SchedulerOutput) -> list[tuple[ScheduledRow, Known]]:
        """Take in a step: what changed, moves, writes, and checks of every read. Returns its rows. Raises Breach."""
        self._apply(out)
        self._move(out)
        lens = [row.num_tokens for row in out.rows]
        require(all(n >= 1 for n in lens), f"step {out.step_id}: a row computes no token")
        require(lens == sorted(lens, key=lambda n: n > 1), f"step {out.step_id}: rows of one token must come first, got {lens}")
        require(len({r.branch_id for r in out.rows}) == len(lens), f"step {out.step_id}: a branch has two rows")
        rows = [(row, self._known(row.branch_id)) for row in out.rows]
        written: set[int] = set()
        for row, known in rows:
            self._write(row, known, written)
        for row, known in rows:
            self._check_reads(row, known)
        return rows

    def _known(self, branch_id: int) -> Known:
        require(branch_id in self.known, f"branch {branch_id} was never announced, or is finished")
        return self.known[branch_id]

    def _apply(self, out: SchedulerOutput) -> None:
        for branch_id in out.finished:
            self._known(branch_id)
            del self.known[branch_id]
        for new in out.new_requests:
            name = f"branch {new.branch_id}"
            require(new.branch_id not in self.known, f"{name} is announced twice")
            require(-(2**31) <= new.seed < 2**31, f"{name}: seed {new.seed} is no int32")
            require(len(new.block_ids) == len(self.groups), f"{name}: {len(new.block_ids)} tables for {len(self.groups)} groups")
            self.known[new.branch_id] = Known(new, [list(ids) for ids in new.block_ids])
            self.known[new.branch_id].append(new.token_ids)
        require(len(self.known) <= self.max_num_seqs, f"{len(self.known)} branches for {self.max_num_seqs} rows")
        for cached in out.cached_requests:
            known = self._known(cached.branch_id)
            known.append(cached.new_token_ids)
            require(len(cached.new_block_ids) in (0, len(self.groups)), f"branch {cached.branch_id}: new blocks for some groups only")
            for table, ids in zip(known.tables, cached.new_block_ids, strict=False):
                table += ids
            for group, index, block in cached.replaced:
                require(index < len(known.tables[group]), f"branch {cached.branch_id}: entry {index} of group {group} is replaced before it is there")
                known.tables[group][index] = block

    def _move(self, out: SchedulerOutput) -> None:
        """swap_out, block_copy, swap_in, each as a gather and then a scatter."""
        for what, moves, limit in (
            ("swap_out", out.swap_out, self.num_host_blocks), ("block_copy", out.block_copy, self.num_blocks), ("swap_in", out.swap_in, self.num_blocks),
        ):  # fmt: skip
            targets = [target for _, target in moves]
            require(len(set(targets)) == len(targets), f"step {out.step_id}: {what} has two moves to one block: {moves}")
            require(all(0 <= target < limit for target in targets), f"step {out.step_id}: {what} leaves the {limit} blocks there are: {moves}")
            require(what == "swap_out" or 0 not in targets, f"step {out.step_id}: {what} writes the null block: {moves}")
            source, target = (self.host if what == "swap_in" else self.blocks), (self.host if what == "swap_out" else self.blocks)
            gathered = [source.get(at) for at, _ in moves]
            require(None not in gathered, f"step {out.step_id}: {what} reads a block that was never written: {moves}")
            for to, block in zip(targets, gathered, strict=True):
                if block is not None:
                    target[to] = (block[0], list(block[1]))
        for at, _ in out.swap_in:
            self.host.pop(at, None)

    def _write(self, row: ScheduledRow, known: Known, written: set[int]) -> None:
        end, name = row.start + row.num_tokens, f"branch {row.branch_id}"
        require(end <= len(known.tokens), f"{name} is asked for position {end - 1}, but has {len(known.tokens)} tokens")
        require(not row.emits or end == len(known.tokens), f"{name} is to sample after token {end} of {len(known.tokens)}")
        size = self.block_size
        for group, table in enumerate(known.tables):
            require(-(-end // size) <= len(table), f"{name}: its table of group {group} has {len(table)} blocks, position {end - 1} has none")
            for position in range(row.start, end):
                block = table[position // size]
                require(0 < block < self.num_blocks, f"{name}: position {position} of group {group} is written to block {block}")
                slot = block * size + position % size
                require(slot not in written, f"{name}: slot {slot} is written twice in one step")
                written.add(slot)
                owner, content = self.blocks.get(block, (group, None))
                if content is None or owner != group:
                    content = [_NEVER] * size
                    self.blocks[block] = (group, content)
                content[position % size] = known.chain[position]

    def _check_reads(self, row: ScheduledRow, known: Known) -> None:
        """Every slot that the row's tokens see. O(blocks)."""
        end, size = row.start + row.num_tokens, self.block_size
        for group, (spec, table) in enumerate(zip(self.groups, known.tables, strict=True)):
            first = 0 if spec.window is None else max(0, row.start - spec.window + 1)
            for index in range(first // size, -(-end // size)):
                low, high = max(first, index * size), min(end, (index + 1) * size)
                owner, content = self.blocks.get(table[index], (group, []))
                found = content[low - index * size : high - index * size] if table[index] else []
                require(
                    owner == group and found == known.chain[low:high],
                    f"branch {row.branch_id}: positions {low} to {high - 1} of group {group} are not what block {table[index]} holds",
                )
