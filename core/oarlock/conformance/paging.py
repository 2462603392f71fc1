"""A small paged world for the attention level: rows with known keys and values, block tables, and a dense oracle.

Owns: which block a row holds, what is poisoned, and the float64 answer.
Reads: `shapes`, `subject`.
Never: assumes a cache layout (it knows only that the first dimension counts blocks).

Everything that a row does not own is NaN: the null block, blocks never given out, blocks freed, the rest of a row's last block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oarlock.backend_api.runtime import Attention, AttentionParams
from oarlock.conformance.cases import CheckFailed, Measure, worst
from oarlock.conformance.metrics import measure, same_bits
from oarlock.conformance.subject import DTYPES, Subject
from oarlock.runtime.quantization.kv_cache import cache_dtype
from oarlock.runtime.reference.attention import narrowed
from oarlock.shapes import ShapePolicy, StepKey

NUM_BLOCKS = 49


@dataclass
class Row:
    """One sequence. Keys, values and queries of all its tokens are known from the start."""

    query: torch.Tensor  # [length, num_heads, head_dim], model dtype
    key: torch.Tensor  # [length, num_kv_heads, head_dim]
    value: torch.Tensor
    blocks: list[int] = field(default_factory=list)  # logical block -> id; 0 once it is freed behind the window
    done: int = 0  # tokens whose keys are in the cache


class World:
    """One cache of one layer, its rows, and steps over them."""

    def __init__(
        self, subject: Subject, params: AttentionParams, dtype: str, block_size: int, policy: ShapePolicy, seed: int,
        *, num_blocks: int = NUM_BLOCKS, kv_dtype: str = "auto",
    ) -> None:  # fmt: skip
        self.subject, self.params, self.dtype, self.block_size, self.policy = subject, params, DTYPES[dtype], block_size, policy
        self.kv_dtype, self.kept = kv_dtype, cache_dtype(kv_dtype, self.dtype)
        self.attention: Attention = subject.attention(params, dtype, block_size, kv_dtype)
        self.random, self.num_blocks = torch.Generator().manual_seed(seed), num_blocks
        self.free = [int(b) + 1 for b in torch.randperm(num_blocks - 1, generator=self.random)]  # scattered ids: tables have holes
        self.tag = self._tag()
        self.rows: list[Row] = []
        self.cache = tuple(subject.upload(torch.full(shape, math.nan, dtype=self.kept)) for shape in self.attention.kv_layout(num_blocks))

    def _tag(self) -> str:
        return f"attend-{self.params}-{self.dtype}-{self.kept}-{self.block_size}"

    def turn_to(self, params: AttentionParams) -> None:
        """Serve another layer of the group, which agrees with the first in heads, head size and window."""
        self.params = params
        self.tag = f"{self._tag()}-later"  # the attention was made for other parameters than one that has these from the start

    # ------------------------------------------------------------ rows and blocks
    def add(self, length: int, like: tuple[int, int] | None = None) -> int:
        """A new row of `length` tokens; `like` (row, tokens) shares that many first tokens, whole blocks of them by reference."""
        p = self.params
        query = self._randn(length, p.num_heads)
        key, value = self._randn(length, p.num_kv_heads), self._randn(length, p.num_kv_heads)
        row = Row(query, key, value)
        if like is not None:
            owner, shared = self.rows[like[0]], like[1]
            assert shared % self.block_size == 0 and shared <= owner.done
            for mine, theirs in ((query, owner.query), (key, owner.key), (value, owner.value)):
                mine[:shared] = theirs[:shared]
            row.blocks, row.done = owner.blocks[: shared // self.block_size], shared
        self.rows.append(row)
        return len(self.rows) - 1

    def _randn(self, length: int, heads: int) -> torch.Tensor:
        return torch.randn((length, heads, self.params.head_dim), generator=self.random).to(self.dtype)

    def drop(self, index: int) -> None:
        """Free a row's blocks; they are poisoned."""
        self.poison([b for b in self.rows[index].blocks if b])
        self.free += [b for b in self.rows[index].blocks if b]
        self.rows[index].blocks = []

    def slide(self) -> None:
        """Free and poison the blocks that no later query of a window layer can see."""
        assert self.params.window is not None
        for row in self.rows:
            for logical in range(max(row.done - self.params.window + 1, 0) // self.block_size):
                if row.blocks[logical]:
                    self.poison([row.blocks[logical]])
                    self.free.append(row.blocks[logical])
                    row.blocks[logical] = 0

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill whole blocks with NaN, through the host."""
        host = self.host_cache()
        for tensor in host:
            tensor[list(blocks)] = math.nan
        self.cache = tuple(self.subject.upload(t) for t in host)

    def swap(self, index: int) -> None:
        """A row's blocks out to the host, and back into other blocks; the old ones are poisoned."""
        row, host = self.rows[index], self.host_cache()
        kept = [tensor[row.blocks].clone() for tensor in host]
        self.drop(index)
        row.blocks = [self.free.pop(0) for _ in range(len(kept[0]))]
        host = self.host_cache()
        for tensor, blocks in zip(host, kept, strict=True):
            tensor[row.blocks] = blocks
        self.cache = tuple(self.subject.upload(t) for t in host)

    def host_cache(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.subject.download(t).clone() for t in self.cache)

    # ------------------------------------------------------------ a step
    def step(self, plan: dict[int, int], limit: float) -> tuple[Measure, dict[int, torch.Tensor]]:
        """Compute `plan[row]` new tokens of each row. Returns the worst measure and each row's result.

        Raises:
            CheckFailed: a result is off, a padded row is not finite, or a block that no row of the step owns has changed.
        """
        order = sorted(plan, key=lambda row: plan[row] != 1)  # decode rows first
        decodes = [r for r in order if plan[r] == 1]
        chunks = [r for r in order if plan[r] != 1]
        for r in order:
            self._grow(self.rows[r], self.rows[r].done + plan[r])
        width = max(len(self.rows[r].blocks) for r in order)
        key = self.policy.fit(len(decodes), [plan[r] for r in chunks], width)
        places = {r: n for n, r in enumerate(decodes)} | {r: key.decode_rows + n for n, r in enumerate(chunks)}
        packed, starts = self._pack(key, plan, places)
        owned = sorted({self.rows[r].blocks[position // self.block_size] for r in order for position in self._new_positions(r, plan[r])})
        before = self.host_cache()
        out = self._run(key, packed, self._tokens(key, plan, starts))
        after = self.host_cache()
        self._check_blocks(before, after, owned)
        if not bool(out.isfinite().all()):
            raise CheckFailed("a result is not finite: a null, stale or freed slot was read, or a padded row is not inert")
        found: list[Measure] = []
        results: dict[int, torch.Tensor] = {}
        for r in order:
            results[r] = out[starts[r] : starts[r] + plan[r]]
            self.rows[r].done += plan[r]
            what = f"row {r}, tokens {self.rows[r].done - plan[r]}..{self.rows[r].done - 1}"
            found.append(measure(results[r], self._oracle(self.rows[r], plan[r]), limit, what))
        return worst(found), results

    def _new_positions(self, r: int, count: int) -> range:
        return range(self.rows[r].done, self.rows[r].done + count)

    def _grow(self, row: Row, length: int) -> None:
        while len(row.blocks) * self.block_size < length:
            row.blocks.append(self.free.pop())

    def _pack(self, key: StepKey, plan: dict[int, int], places: dict[int, int]) -> tuple[torch.Tensor, dict[int, int]]:
        """One int32 buffer: slots, block tables, seq_lens, query_start_loc. And each row's first token."""
        tables = torch.tensor([self.free[n % len(self.free)] for n in range(key.rows * key.blocks)], dtype=torch.int32).view(key.rows, key.blocks)
        tables[:, 1::3] = 0  # entries past a row's context are stale ids (poisoned here) or 0
        seq_lens, counts = torch.zeros(key.rows, dtype=torch.int32), torch.zeros(key.rows, dtype=torch.int32)
        counts[: key.decode_rows] = 1  # in the decode region token i is row i, padded or not
        for r, place in places.items():
            row = self.rows[r]
            tables[place, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
            seq_lens[place], counts[place] = row.done + plan[r], plan[r]
        start = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)))
        slots = torch.arange(key.tokens, dtype=torch.int32) % self.block_size  # padding writes to the null block
        starts = {r: int(start[place]) for r, place in places.items()}
        for r, at in starts.items():
            blocks = self.rows[r].blocks
            for n, position in enumerate(self._new_positions(r, plan[r])):
                slots[at + n] = blocks[position // self.block_size] * self.block_size + position % self.block_size
        return torch.cat((slots, tables.reshape(-1), seq_lens, start)), starts

    def _tokens(self, key: StepKey, plan: dict[int, int], starts: dict[int, int]) -> torch.Tensor:
        """Queries, keys and values of the step side by side, as the fused projection gives them; padded tokens carry queries that are numbers, keys and values that are not."""
        p = self.params
        query = torch.ones(key.tokens, p.num_heads, p.head_dim, dtype=self.dtype)
        new_key = torch.full((key.tokens, p.num_kv_heads, p.head_dim), math.nan, dtype=self.dtype)
        new_value = new_key.clone()
        for r, at in starts.items():
            row, part = self.rows[r], slice(self.rows[r].done, self.rows[r].done + plan[r])
            for whole, source in ((query, row.query), (new_key, row.key), (new_value, row.value)):
                whole[at : at + plan[r]] = source[part]
        return torch.cat((query, new_key, new_value), 1)

    def _run(self, key: StepKey, packed: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        attention, params, rows, decode = self.attention, self.params, key.rows, key.decode_rows

        def program(weights: Any, written: dict[str, Any], read: Any, packed: torch.Tensor, i: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            slots, tables, seq_lens, start = packed.split([key.tokens, rows * key.blocks, rows, rows + 1])
            tables = tables.reshape(rows, key.blocks)
            query, new_key, new_value = i["fused"].split([params.num_heads, params.num_kv_heads, params.num_kv_heads], 1)
            cache = attention.write_kv(written["kv"], new_key, new_value, slots)
            out = []
            if decode:
                meta = attention.metadata(tables[:decode], seq_lens[:decode], start[: decode + 1], 1, decode)
                out.append(attention.attend(query[:decode], cache, meta, params))
            if rows > decode:
                meta = attention.metadata(tables[decode:], seq_lens[decode:], start[decode:] - decode, key.max_q, key.tokens - decode)
                out.append(attention.attend(query[decode:], cache, meta, params))
            return {"kv": cache}, {"out": out[0] if len(out) == 1 else torch.cat(out)}

        subject = self.subject
        inputs = {"fused": subject.upload(tokens)}
        new, out = subject.run(f"{self.tag}-{key}", program, written={"kv": self.cache}, packed=subject.upload(packed), inputs=inputs)
        self.cache = new["kv"]
        return subject.download(out["out"])

    def check_writes(self) -> None:
        """`write_kv` by itself, outside of a program.

        Raises:
            CheckFailed: it takes views for contiguous tensors, or changes the cache that it is given where state is replaced.
        """
        subject, heads, count = self.subject, self.params.num_kv_heads, self.block_size + 3
        fused = subject.upload(self._randn(count, 2 * heads))
        slots = subject.upload(torch.randperm(3 * self.block_size, generator=self.random)[:count].to(torch.int32) + self.block_size)
        before = self.host_cache()
        caches = [tuple(subject.upload(t.clone()) for t in before) for _ in range(2)]
        with subject.session():
            views = fused.split(heads, 1)
            of_views = self.attention.write_kv(caches[0], *views, slots)
            of_copies = self.attention.write_kv(caches[1], *(t.contiguous() for t in views), slots)
        if not all(same_bits(subject.download(a), subject.download(b)) for a, b in zip(of_views, of_copies, strict=True)):
            raise CheckFailed("write_kv writes other bits of keys and values that are views into a fused tensor than of their copies")
        replaced = subject.device.capabilities.kv_update == "functional"
        if replaced and not all(same_bits(subject.download(t), old) for t, old in zip(caches[0], before, strict=True)):
            raise CheckFailed('write_kv changed the cache that it was given; kv_update is "functional", so it must return a new one')

    # ------------------------------------------------------------ whole blocks
    def copy(self, source: list[int], destination: list[int]) -> None:
        """Copy blocks as the engine does for branches; padding copies 0 to 0."""
        attention = self.attention

        def program(weights: Any, written: dict[str, Any], read: Any, packed: torch.Tensor, i: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            ids = packed.reshape(2, -1)
            return {"kv": attention.copy_blocks(written["kv"], ids[0], ids[1])}, {}

        packed = torch.tensor([*source, 0, *destination, 0], dtype=torch.int32)
        before = self.host_cache()
        tag = f"{self.tag}-copy-{len(source)}"
        new, _ = self.subject.run(tag, program, written={"kv": self.cache}, packed=self.subject.upload(packed))
        self.cache = new["kv"]
        after = self.host_cache()
        self._check_blocks(before, after, destination)
        for tensor, old in zip(after, before, strict=True):
            if not same_bits(tensor[destination], old[source]):
                raise CheckFailed(f"blocks {destination} are not copies of {source}")

    def _check_blocks(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], owned: Sequence[int]) -> None:
        """Only `owned` blocks, and the null block, may have changed."""
        others = [b for b in range(1, self.num_blocks) if b not in set(owned)]
        for old, new in zip(before, after, strict=True):
            if not same_bits(old[others], new[others]):
                wrong = [b for b in others if not same_bits(old[b], new[b])]
                raise CheckFailed(f"blocks {wrong} changed, but the step addressed {list(owned)} only")

    # ------------------------------------------------------------ the oracle
    def _oracle(self, row: Row, count: int) -> torch.Tensor:
        """Dense attention of the newest `count` tokens, in float64."""
        p, group = self.params, self.params.num_heads // self.params.num_kv_heads
        key, value = (narrowed(t[: row.done], self.kept).double().repeat_interleave(group, 1) for t in (row.key, row.value))
        scores = torch.einsum("qhd,khd->hqk", row.query[row.done - count : row.done].double(), key) * p.scale
        if p.softcap is not None:
            scores = p.softcap * torch.tanh(scores / p.softcap)
        queries, keys = torch.arange(row.done - count, row.done)[:, None], torch.arange(row.done)
        hidden = keys > queries
        if p.window is not None:
            hidden |= keys <= queries - p.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)
