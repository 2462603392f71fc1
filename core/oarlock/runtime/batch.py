"""The host's view of the batch: rows, known tokens, block tables and sampling parameters.

Owns: which row a branch has, the token history on the host, block tables, per-row sampling numbers.
Reads: `messages`.
Never: decides what runs (the scheduler did) or touches a device tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from oarlock.messages import CachedRequest, NewRequest, ScheduledRow, SchedulerOutput


@dataclass(slots=True)
class Row:
    """One branch on one row."""

    branch_id: int
    row: int
    new: NewRequest  # parameters, seed, index
    num_prompt: int
    bias: dict[int, float]
    allowed: np.ndarray | None  # [mask words] int32
    needs_history: bool  # penalties
    history_loaded: bool = False
    pooled: np.ndarray | None = None  # [hidden size or classes] float32: the sum of what was read of its prompt so far

    @property
    def processors(self) -> tuple[Callable[..., Any], ...]:
        return self.new.params.logits_processors


class Batch:
    """Rows are stable while a branch lives; a preempted branch loses its row."""

    def __init__(self, max_rows: int, max_len: int, max_blocks: int, num_groups: int, vocab_size: int) -> None:
        self.max_rows, self.max_len, self.vocab_size = max_rows, max_len, vocab_size
        self.tokens = np.zeros((max_rows, max_len + 1), np.int32)
        self.known = np.zeros(max_rows, np.int64)  # tokens of the row that the host knows
        self.tables = np.zeros((num_groups, max_rows, max_blocks), np.int32)
        self.table_len = np.zeros((num_groups, max_rows), np.int64)
        self.rows: dict[int, Row] = {}
        self._free = list(range(max_rows))

    def apply(self, out: SchedulerOutput) -> None:
        """Take in what changed: finished branches first, so that their rows can be reused."""
        for branch_id in out.finished:
            self.forget(branch_id)
        for new in out.new_requests:
            self._add(new)
        for cached in out.cached_requests:
            self._change(cached)

    def forget(self, branch_id: int) -> None:
        """Free the row of a finished or preempted branch; unknown ids are ignored."""
        row = self.rows.pop(branch_id, None)
        if row is not None:
            heapq.heappush(self._free, row.row)

    def _add(self, new: NewRequest) -> None:
        if new.branch_id in self.rows:
            self.forget(new.branch_id)
        at = heapq.heappop(self._free)
        count = len(new.token_ids)
        self.tokens[at, :count] = new.token_ids
        self.known[at] = count
        for group, ids in enumerate(new.block_ids):
            self.tables[group, at, : len(ids)] = ids
            self.tables[group, at, len(ids) :] = 0
            self.table_len[group, at] = len(ids)
        p = new.params
        penalised = p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1
        self.rows[new.branch_id] = Row(
            new.branch_id, at, new, new.num_prompt_tokens, dict(p.logit_bias), self._bitmask(p.allowed_token_ids), penalised
        )

    def _bitmask(self, allowed: tuple[int, ...] | None) -> np.ndarray | None:
        if allowed is None:
            return None
        bits = np.zeros((self.vocab_size + 31) // 32 * 32, bool)
        bits[list(allowed)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _change(self, cached: CachedRequest) -> None:
        row = self.rows[cached.branch_id].row
        for group, ids in enumerate(cached.new_block_ids):
            if ids:
                start = self.table_len[group, row]
                self.tables[group, row, start : start + len(ids)] = ids
                self.table_len[group, row] = start + len(ids)
        for group, index, block in cached.replaced:
            self.tables[group, row, index] = block
        if cached.new_token_ids:
            self.append(cached.branch_id, row, cached.new_token_ids)

    def append(self, branch_id: int, row: int, token_ids: tuple[int, ...]) -> None:
        """Add tokens to a row's history, if the row still belongs to the branch."""
        owner = self.rows.get(branch_id)
        if owner is None or owner.row != row:
            return
        start = int(self.known[row])
        self.tokens[row, start : start + len(token_ids)] = token_ids
        self.known[row] = start + len(token_ids)

    def is_host_decided(self, branch_id: int) -> bool:
        """Whether the engine, not the sampler, chooses this branch's tokens (beams); they come as `new_token_ids`."""
        row = self.rows.get(branch_id)
        return row is not None and row.new.params.use_beam_search

    # ------------------------------------------------------------ inputs of the programs
    def forward_inputs(self, rows: tuple[ScheduledRow, ...], key: Any, block_size: int, null_row: int) -> dict[str, np.ndarray]:
        """The forward program's host inputs, padded to `key`. Rows come decode first; padded decode rows keep token i = row i.

        Raises:
            ValueError: a row is asked for a token that neither the host nor the device knows.
        """
        groups, count, dr = self.tables.shape[0], len(rows), key.decode_rows
        lens = np.fromiter((r.num_tokens for r in rows), np.int64, count)
        starts = np.fromiter((r.start for r in rows), np.int64, count)
        at = np.fromiter((self.rows[r.branch_id].row for r in rows), np.int64, count)
        place = self.places(rows, key)
        query_lens = np.zeros(key.rows, np.int64)
        query_lens[:dr] = 1
        query_lens[place] = lens
        query_start_loc = np.zeros(key.rows + 1, np.int64)
        np.cumsum(query_lens, out=query_start_loc[1:])
        # One entry per real token: which scheduled row it belongs to, its position, and where it lies in the padded batch.
        owner = np.repeat(np.arange(count), lens)
        offset = np.arange(owner.size) - np.repeat(np.cumsum(lens) - lens, lens)
        position = starts[owner] + offset
        target = query_start_loc[place[owner]] + offset
        host = {name: np.zeros(key.tokens, np.int32) for name in ("tokens", "positions")}
        host["source"] = np.full(key.tokens, null_row, np.int32)
        host["positions"][target] = position
        known = position < self.known[at[owner]]
        host["tokens"][target[known]] = self.tokens[at[owner[known]], position[known]]
        host["source"][target[~known]] = at[owner[~known]]
        slots = np.tile(np.arange(key.tokens) % block_size, (groups, 1))
        tables = np.zeros((groups, key.rows, key.blocks), np.int32)
        for group in range(groups):
            block = self.tables[group, at[owner], position // block_size]
            slots[group, target] = block * block_size + position % block_size
            tables[group, place] = self.tables[group, at, : key.blocks]
        seq_lens = np.zeros(key.rows, np.int32)
        seq_lens[place] = starts + lens
        host |= {"slots": slots, "block_tables": tables, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
        return host

    def places(self, rows: tuple[ScheduledRow, ...], key: Any) -> np.ndarray:
        """Where each scheduled row lies among the padded rows: chunk rows follow the padded decode region. [len(rows)]"""
        decodes = self.num_decodes(rows)
        place = np.arange(len(rows))
        place[decodes:] += key.decode_rows - decodes
        return place

    def query_starts(self, rows: tuple[ScheduledRow, ...], key: Any) -> np.ndarray:
        """Where each padded row's tokens begin among the step's. [key.rows]"""
        lens = np.zeros(key.rows, np.int64)
        lens[: key.decode_rows] = 1
        lens[self.places(rows, key)] = [r.num_tokens for r in rows]
        return np.cumsum(lens) - lens

    @staticmethod
    def num_decodes(rows: tuple[ScheduledRow, ...]) -> int:
        """How many leading rows have exactly one token: the decode region."""
        for count, row in enumerate(rows):
            if row.num_tokens != 1:
                return count
        return len(rows)

    def blocks_needed(self, rows: tuple[ScheduledRow, ...], block_size: int) -> int:
        """Width of the block tables that this step reads."""
        return max((r.start + r.num_tokens + block_size - 1) // block_size for r in rows)
