"""The ways of a branch: wait, run, fork, be preempted, end.

Owns: waiting and running order, every change of `Branch.status`, seats, preemption counters.
Reads: `request`, `policy`; calls `KVCacheManager`.
Never: plans a step or makes an output.

    UNBORN -> WAITING -> RUNNING -> (DRAINING ->) ENDED
                 ^          |
                 +- PREEMPTING     blocks are given back once no step in flight writes them

A *seat* is a row at the worker: running branches have one, and so have those whose steps still drain. A request under beam
search has as many seats as its width while it runs.
"""

from __future__ import annotations

from collections.abc import Callable

from oarlock.config.sections import SchedulerConfig
from oarlock.kv.manager import KVCacheManager
from oarlock.request import Branch, Request, Status
from oarlock.scheduler.policy import prefers_swap
from oarlock.scheduler.queues import BranchQueue, FairQueue


class Lifecycle:
    """Every branch that has not ended."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager) -> None:
        self._config, self._manager = config, manager
        self.branches: dict[int, Branch] = {}
        self.waiting = FairQueue() if config.policy == "fair" else BranchQueue()  # a swapped-out unit is represented by its first branch
        self.running = BranchQueue()
        self.preempting: dict[int, Branch] = {}
        self.draining: dict[int, Branch] = {}
        self.to_forget: list[int] = []  # branch ids that the worker must be told to forget
        self.swapped: set[int] = set()  # branches in `waiting` whose unit is on the host
        self.newly_swapped: list[Branch] = []  # since the last step was sent
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self._running_beams: set[Request] = set()
        self._next_id = 0
        self.on_release: Callable[[Branch], object] = lambda branch: None

    # ------------------------------------------------------------ seats
    def seats_free(self) -> int:
        taken = len(self.running) + len(self.draining) + len(self.preempting)
        for request in self._running_beams:
            taken += request.width - sum(b.status not in (Status.UNBORN, Status.WAITING) for b in request.branches)
        return self._config.max_num_seqs - taken

    def seats_needed(self, branch: Branch) -> int:
        return branch.request.width if branch.request.is_beam else 1

    def is_alone(self) -> bool:
        """Nobody runs, and nobody's blocks are about to come free."""
        return not (self.running or self.draining or self.preempting)

    # ------------------------------------------------------------ birth
    def new_branch(self, request: Request, index: int, tokens: list[int]) -> Branch:
        branch = Branch(self._next_id, request, index, tokens)
        self._next_id += 1
        self.branches[branch.branch_id] = branch
        request.branches.append(branch)
        return branch

    def enqueue(self, request: Request) -> None:
        """Make a request's branches. Several share all but the prompt's last token, which each computes for itself."""
        count = 1 if request.is_beam else request.width
        made = [self.new_branch(request, index, list(request.source.prompt_token_ids)) for index in range(count)]
        request.leader, request.unborn, request.fork_at = made[0], made[1:], request.num_prompt - 1
        self._wait(made[0])

    def _wait(self, branch: Branch) -> None:
        branch.status = Status.WAITING
        self.waiting.add(branch)

    def start(self, branch: Branch) -> list[Branch]:
        """Let a waiting branch run, with the rest of its unit; its blocks are in place. Returns those that run now."""
        self.waiting.discard(branch)
        self.swapped.discard(branch.branch_id)
        unit = branch.request.unit(branch)
        for member in unit:
            member.status = Status.RUNNING
            self.running.add(member)
        if branch.request.is_beam:
            self._running_beams.add(branch.request)
        return unit + self.fork_due(branch.request)

    def fork_due(self, request: Request) -> list[Branch]:
        """Fork the unborn once their leader has computed what they share. Returns those that run now; the rest waits for seats."""
        leader = request.leader
        if not request.unborn or leader is None or leader.status is not Status.RUNNING or leader.num_computed < request.fork_at:
            return []
        born, request.unborn = request.unborn, []
        started = []
        for child in born:
            if request.is_beam or self.seats_free() > 0:
                self.fork(leader, child, request.fork_at)
                started.append(child)
            else:
                self._wait(child)
        return started

    def fork(self, parent: Branch, child: Branch, num_tokens: int) -> None:
        """Let `child` continue from the parent's first `num_tokens` tokens, in the parent's state (running or preempting)."""
        self._manager.fork(parent.branch_id, child.branch_id, num_tokens)
        child.num_computed = child.num_scheduled = num_tokens
        child.hashes = parent.hashes[: num_tokens // self._manager.block_size]
        child.status = parent.status
        if parent.status is Status.RUNNING:
            self.running.add(child)
        else:
            self.preempting[child.branch_id] = child

    # ------------------------------------------------------------ preemption
    def preempt(self, branch: Branch) -> None:
        """Take the blocks of a running branch, with its unit: now, or once its steps in flight have drained."""
        unit = branch.request.unit(branch)
        for member in unit:
            self.running.discard(member)
            member.status = Status.PREEMPTING
            self.preempting[member.branch_id] = member
        self._complete(unit)

    def settle(self) -> None:
        """Complete the preemptions whose steps have drained."""
        for branch in tuple(self.preempting.values()):
            if branch.status is Status.PREEMPTING:
                self._complete(branch.request.unit(branch))

    def _complete(self, unit: list[Branch]) -> None:
        if any(b.in_flight for b in unit):
            return
        request = unit[0].request
        self._running_beams.discard(request)
        self.num_preemptions += len(unit)
        for branch in unit:
            del self.preempting[branch.branch_id]
            self._forget(branch)
            branch.status = Status.WAITING
        if prefers_swap(self._config, request) and self._manager.swap_out([b.branch_id for b in unit]):
            self.num_swap_outs += len(unit)
            self.newly_swapped += unit
            self.swapped.add(unit[0].branch_id)
            self._wait(unit[0])
        else:
            self._recompute(unit)

    def _recompute(self, unit: list[Branch]) -> None:
        """Queue a unit without any block. Beams share again what they have in common: the first one computes it for all."""
        request = unit[0].request
        for branch in unit:
            self._manager.free(branch.branch_id)
            branch.num_computed = branch.num_scheduled = 0
            branch.candidates = None
        if len(unit) > 1:
            request.leader, request.unborn = unit[0], unit[1:]
            request.fork_at = _common_prefix(unit)
            for branch in unit[1:]:
                branch.status = Status.UNBORN
        self._wait(unit[0])

    def lose_host_copy(self, branch: Branch) -> bool:
        """The step that should have swapped it out failed: recompute instead. False if it already runs on what it lost."""
        if self._manager.is_on_host(branch.branch_id):
            unit = branch.request.unit(branch)
            self.swapped.discard(unit[0].branch_id)
            self._recompute(unit)
        return branch.status in (Status.DRAINING, Status.ENDED) or branch.num_scheduled == 0

    def _forget(self, branch: Branch) -> None:
        if branch.is_known:
            self.to_forget.append(branch.branch_id)
        branch.is_known = False
        branch.host_tokens.clear()

    # ------------------------------------------------------------ end
    def finish(self, branch: Branch) -> None:
        """End a branch. Its blocks are free at once, or when the steps in flight have drained."""
        if branch.status in (Status.DRAINING, Status.ENDED):
            return
        request = branch.request
        if branch.status is Status.UNBORN:
            request.unborn.remove(branch)
        self.running.discard(branch)
        self.waiting.discard(branch)
        self.preempting.pop(branch.branch_id, None)
        self.swapped.discard(branch.branch_id)
        branch.status = Status.DRAINING
        if branch.in_flight:
            self.draining[branch.branch_id] = branch
        else:
            self.release(branch)
        if branch is request.leader and request.unborn:  # somebody else must compute what the siblings share
            request.leader = request.unborn.pop(0)
            self._wait(request.leader)

    def release(self, branch: Branch) -> None:
        """Give back everything of an ended branch that no step in flight holds."""
        self._manager.free(branch.branch_id)
        self._forget(branch)
        branch.status = Status.ENDED
        self.draining.pop(branch.branch_id, None)
        del self.branches[branch.branch_id]
        self.on_release(branch)
        branch.request.branches.remove(branch)
        if not branch.request.branches:
            self._running_beams.discard(branch.request)

    def end_request(self, request: Request) -> None:
        """End every branch."""
        for branch in (*reversed(request.unborn), *request.branches):
            self.finish(branch)


def _common_prefix(unit: list[Branch]) -> int:
    """Tokens that all have in common, leaving each at least one to compute."""
    shortest = min(len(b.tokens) for b in unit)
    first = unit[0].tokens
    same = next((i for i in range(shortest) if any(b.tokens[i] != first[i] for b in unit[1:])), shortest)
    return min(same, shortest - 1)
