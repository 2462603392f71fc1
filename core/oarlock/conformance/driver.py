"""Drives a worker step by step, as the scheduler would, but by a plan that a case writes out.

Owns: branches, their blocks, and the records that the worker is sent.
Reads: `messages`, the worker.
Never: decides what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oarlock.conformance.cases import CheckFailed
from oarlock.messages import CachedRequest, ModelRunnerOutput, NewRequest, ScheduledRow, SchedulerOutput, WorkerReady
from oarlock.sampling_params import SamplingParams


@dataclass(eq=False)
class Branch:
    """One sequence in the worker."""

    branch_id: int
    prompt_len: int
    tokens: list[int]  # prompt, then what was sampled
    params: SamplingParams
    seed: int
    tables: list[list[int]]  # per KV group; 0 where a window has passed
    done: int = 0  # tokens whose KV is written, or will be by a step in flight
    promised: int = 0  # tokens that steps in flight will sample
    is_known: bool = False  # the worker has its record
    sent: list[int] = field(default_factory=list)  # per KV group: entries that the worker has
    replaced: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True)
class InFlight:
    """A launched step."""

    pending: Any
    emitting: list[Branch]
    order: list[Branch]
    may_fail: tuple[Branch, ...] = ()  # left without a token on purpose


class Driver:
    """One worker."""

    def __init__(self, worker: Any, ready: WorkerReady) -> None:
        self.worker, self.ready = worker, ready
        self.groups, self.block_size = ready.kv_groups, ready.block_size
        self.free = list(range(1, ready.num_blocks))  # the last freed is used first: stale contents are met soon
        self.finished: list[int] = []
        self.live: list[Branch] = []
        self.moves: dict[str, tuple[tuple[int, int], ...]] = {}
        self.ids = self.steps = 0

    def add(self, prompt: tuple[int, ...], params: SamplingParams, seed: int = 0) -> Branch:
        self.ids += 1
        made = Branch(self.ids, len(prompt), list(prompt), params, seed, [[] for _ in self.groups], sent=[0] * len(self.groups))
        self.live.append(made)
        return made

    def end_all(self) -> None:
        """Forget every branch, whatever state a case left it in."""
        self.moves = {}
        self.end(*self.live)
        self.live = []

    def end(self, *branches: Branch) -> None:
        """Forget branches with the next step, and free their blocks now (nothing is in flight)."""
        for branch in branches:
            if branch.is_known:
                self.finished.append(branch.branch_id)
            self.free += [b for table in branch.tables for b in table if b]
            branch.tables, branch.sent, branch.done, branch.promised = [[] for _ in self.groups], [0] * len(self.groups), 0, 0
            branch.is_known, branch.replaced = False, []

    def step(self, plan: Mapping[Branch, int], banned: Mapping[Branch, tuple[int, ...]] | None = None) -> ModelRunnerOutput:
        """Compute `plan[branch]` tokens of each branch; sampled tokens are appended to their branches."""
        return self.collect(self.launch(plan, banned))

    def launch(self, plan: Mapping[Branch, int], banned: Mapping[Branch, tuple[int, ...]] | None = None) -> InFlight:
        """Start a step without reading it; the next may be launched at once, on tokens that only the device knows."""
        order = sorted(plan, key=lambda b: plan[b] != 1)  # one token first: the decode region
        new, cached, rows = [], [], []
        for branch in order:
            count, known = plan[branch], len(branch.tokens) + branch.promised
            assert branch.done + count <= known, "the plan runs ahead of the known tokens"
            for table in branch.tables:
                while len(table) * self.block_size < branch.done + count:
                    table.append(self.free.pop())
            if not branch.is_known:
                new.append(self._record(branch))
            elif branch.replaced or any(len(t) > n for t, n in zip(branch.tables, branch.sent, strict=True)):
                added = tuple(tuple(t[n:]) for t, n in zip(branch.tables, branch.sent, strict=True))
                cached.append(CachedRequest(branch.branch_id, added, tuple(branch.replaced)))
            branch.is_known, branch.replaced, branch.sent = True, [], [len(t) for t in branch.tables]
            emits = branch.done + count == known
            rows.append(ScheduledRow(branch.branch_id, branch.done, count, emits, (banned or {}).get(branch, ())))
            branch.done += count
            branch.promised += emits
        self.steps += 1
        out = SchedulerOutput(self.steps, tuple(rows), tuple(new), tuple(cached), tuple(self.finished), **self.moves)
        self.finished, self.moves = [], {}
        return InFlight(self.worker.execute(out), [b for b, row in zip(order, rows, strict=True) if row.emits], order, tuple(banned or ()))

    def collect(self, step: InFlight) -> ModelRunnerOutput:
        """Wait for a step. Raises CheckFailed when a row gave no token for no reason of the case's own."""
        result: ModelRunnerOutput = self.worker.read(step.pending)
        for branch in step.order:
            if branch.branch_id in result.failed and branch not in step.may_fail:
                raise CheckFailed(f"position {branch.done - 1} of a row gave no token: {result.failed[branch.branch_id]}")
        for branch in step.emitting:
            branch.promised -= 1
            branch.tokens += result.token_ids.get(branch.branch_id, ())
        for branch in step.order:
            self._slide(branch)
        return result

    def _record(self, branch: Branch) -> NewRequest:
        tables = tuple(tuple(table) for table in branch.tables)
        return NewRequest(branch.branch_id, tuple(branch.tokens), branch.prompt_len, branch.params, 0, branch.seed, tables)

    def _slide(self, branch: Branch) -> None:
        """Free blocks that a window has passed; they are the next to be given out."""
        for group, table in zip(self.groups, branch.tables, strict=True):
            for at in range(max(branch.done - (group.window or branch.done + 1) + 1, 0) // self.block_size):
                if table[at]:
                    self.free.append(table[at])
                    branch.replaced.append((group.group_id, at, 0))
                    table[at] = 0

    def relocate(self, branch: Branch, via_host: bool) -> None:
        """Move a branch's blocks to other device blocks with the next step: by the host tier, or by copies on the device."""
        old = [(g, at, b) for g, table in enumerate(branch.tables) for at, b in enumerate(table) if b]
        to = [self.free.pop(0) for _ in old]
        if via_host:
            host = list(range(len(old)))
            self.moves["swap_out"] = tuple((b, h) for (_, _, b), h in zip(old, host, strict=True))
            self.moves["swap_in"] = tuple(zip(host, to, strict=True))
        else:
            self.moves["block_copy"] = tuple((b, t) for (_, _, b), t in zip(old, to, strict=True))
        for (group, at, block), target in zip(old, to, strict=True):
            branch.tables[group][at] = target
            if at < branch.sent[group]:
                branch.replaced.append((group, at, target))
            self.free.append(block)
