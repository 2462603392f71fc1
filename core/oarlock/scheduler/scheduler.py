"""Continuous batching: which branch computes which tokens in the next step, and what the results mean.

Owns: token counts of every branch, steps in flight, the one terminal output that each branch gets.
Reads: `config.SchedulerConfig`, `shapes.ShapePolicy`, `messages`; calls `Lifecycle` and `KVCacheManager`.
Never: sees text, tensors or device names.

There is no prefill and no decode phase: each branch is caught up by some tokens within the step's token budget.
Source: Orca (OSDI 2022) for batching by iteration; Sarathi-Serve (arXiv:2403.02310) for chunks beside decode rows;
    PagedAttention (arXiv:2309.06180) for blocks, sharing and swapping.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from oarlock.config.resolve import tokens_per_step
from oarlock.config.sections import SchedulerConfig
from oarlock.errors import ConfigError, OarlockError
from oarlock.kv.manager import KVCacheManager, PrefixHit
from oarlock.messages import (
    Abort,
    CachedRequest,
    EngineOutput,
    EngineRequest,
    ErrorInfo,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRow,
    SchedulerOutput,
    SchedulerStats,
)
from oarlock.request import Branch, Request, Status
from oarlock.scheduler.admission import Admission
from oarlock.scheduler.constraints import Constraints
from oarlock.scheduler.lifecycle import Lifecycle
from oarlock.scheduler.limits import Limits
from oarlock.scheduler.plan import StepPlan
from oarlock.scheduler.policy import DelayGate, priority_of, seed_bits
from oarlock.scheduler.results import Results
from oarlock.scheduler.stops import banned_tokens
from oarlock.shapes import ShapePolicy


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight."""

    started_s: float  # clock() when it was scheduled
    has_prompt_tokens: bool
    swapped_out: tuple[Branch, ...]


class Scheduler:
    """Not thread-safe: the engine loop is its only caller."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        policy: ShapePolicy,
        max_model_len: int,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
        constraints: Constraints | None = None,
    ) -> None:
        if config.preemption_mode == "swap" and not manager.num_host_blocks:
            raise ConfigError(
                "preemption_mode is swap, but there is no host block; give some swap space, or choose recompute", "preemption_mode"
            )
        self._config, self._manager, self._policy = config, manager, policy
        self._max_model_len, self._seed, self._clock = max_model_len, seed, clock
        self._budget = tokens_per_step(config, max_model_len)
        self._limits = Limits(config, manager, policy, max_model_len, self._budget)
        self._life = Lifecycle(config, manager)
        self._delay = DelayGate(config.delay_factor)
        self._admission = Admission(config)
        self._requests = self._admission.requests
        self._constraints = constraints or Constraints({}, 0)
        self._life.on_release = self._constraints.forget
        self._results = Results(self._life, manager, self._admission, self._constraints)
        self._in_flight: dict[int, _Step] = {}
        self._next_step_id = 0
        self._next_request = 0
        self._num_derived_seeds = 0
        self._num_prompt_tokens = 0
        self._found_nothing = False  # the last time that it planned, and nothing was in flight
        self._blocked: tuple[int, int] | None = None  # (waiting branch that found no room, blocks free then)

    # ------------------------------------------------------------ requests
    def add_request(self, source: EngineRequest) -> list[EngineOutput]:
        """Queue a request. Returns [], or one error output per branch if it can never run or the queue is full."""
        if source.params.seed is None:
            self._num_derived_seeds += 1
        seed = seed_bits(source.params.seed, self._seed, self._num_derived_seeds)
        request = Request(source, self._next_request, seed, self._max_model_len, priority_of(self._config, source))
        self._next_request += 1
        self._limits.fit(request)
        if source.request_id in self._requests:
            error: ErrorInfo | None = ErrorInfo(f"request id {source.request_id!r} is already in use; choose another", param="request_id")
        else:
            error = self._limits.refusal(request) or self._constraints.refusal(request) or self._admission.refusal(request)
        if error is not None:
            return [self._results.output(request, index, finish_reason="error", error=error) for index in sorted(request.open)]
        self._admission.enter(request)
        self._life.enqueue(request)
        for branch in request.branches:
            self._constraints.ask(branch)
        return []

    def abort(self, abort: Abort) -> list[EngineOutput]:
        """End a request or one branch. Reason "stop" returns nothing: the front end has finished that branch."""
        request = self._requests.get(abort.request_id)
        if request is None or (abort.index is not None and abort.index not in request.open):
            return []
        indexes = sorted(request.open) if abort.index is None else [abort.index]
        outputs = [self._results.close(request, index, "abort") for index in indexes]
        if not request.open:
            self._life.end_request(request)
        elif not request.is_beam:  # a beam search goes on for the other results
            for branch in [b for b in request.branches if b.index == abort.index]:
                self._life.finish(branch)
        return outputs if abort.reason == "abort" else []

    def end_overdue(self) -> list[EngineOutput]:
        """End the requests that have waited too long for their first step, each with an error."""
        outputs: list[EngineOutput] = []
        for request in self._admission.overdue(self._clock()):
            text = f"the request waited {self._config.max_queue_s:g} s in the queue, the limit (max_queue_time), and was not begun; retry later"
            outputs += self._results.fail(request, ErrorInfo(text, code="queue_timeout"))
        return outputs

    @property
    def longest_request(self) -> int:
        """Tokens, prompt and output together, of the longest request that can run here."""
        return self._limits.longest_request()

    def settle_constraints(self) -> list[EngineOutput]:
        """Outputs of requests whose constraint ends or fails them. Waits for masks as long as it must, never long."""
        if not self._constraints.num_asked:
            return []
        return self._results.settle_constraints(is_busy=not self._found_nothing)

    def has_unfinished(self) -> bool:
        """Whether a request is open or a step in flight."""
        return bool(self._requests or self._in_flight)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self._manager.reset_prefix_cache()

    # ------------------------------------------------------------ planning
    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can run now. O(branches in the step).

        Raises:
            OarlockError: nothing is in flight and nobody can ever run again. A defect of this module, said aloud rather than hung on.
        """
        if len(self._in_flight) >= self._config.max_in_flight:
            return None
        plan = StepPlan(self._policy, self._budget)
        self._plan_running(plan)
        if not plan.is_preempting:
            self._plan_waiting(plan)
        self._found_nothing = not (plan.branches or self._in_flight)
        if plan.branches:
            return self._send(plan)
        if self._in_flight or self._constraints.num_asked:
            return None
        if not plan.is_preempting and (self._life.running or self._life.waiting):
            raise OarlockError(f"the scheduler cannot go on: {self.stats()}")
        return self.schedule() if plan.is_preempting else None

    def _plan_running(self, plan: StepPlan) -> None:
        """Catch up running branches in order. A chunk leaves room in the budget for the decode rows that come after it."""
        todo = [(branch, branch.remaining()) for branch in self._life.running]
        decodes = sum(remaining == 1 for _, remaining in todo)
        for branch, remaining in todo:
            if plan.budget <= 0:
                break
            if remaining == 1:
                decodes -= 1
            if remaining <= 0 or branch.status is not Status.RUNNING:
                continue
            self._plan_row(branch, remaining, plan.budget if remaining == 1 else plan.budget - decodes, plan, may_preempt=True)

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Let waiting branches in, strictly in order, while seats, budget, shapes and blocks last."""
        life = self._life
        while life.waiting and plan.budget > 0:
            branch = life.waiting.first()
            alone = life.is_alone()
            if life.seats_needed(branch) > life.seats_free():
                break
            if not alone and not self._delay.is_open(self._clock() - branch.request.source.arrival_s):
                break
            if (
                not alone
                and self._blocked is not None
                and self._blocked[0] == branch.branch_id
                and self._blocked[1] >= self._manager.num_free
            ):
                break
            in_place = (
                self._place_swapped(branch, plan, alone=alone)
                if branch.branch_id in life.swapped
                else self._place(branch, plan, alone=alone)
            )
            if not in_place:
                break
            self._blocked = None
            for started in life.start(branch):
                if plan.budget > 0:
                    self._plan_row(started, started.remaining(), plan.budget, plan, may_preempt=False)

    def _place(self, branch: Branch, plan: StepPlan, *, alone: bool) -> bool:
        """Start a branch from the prefix cache, if its first row fits this step and its known tokens fit the free blocks."""
        request, manager = branch.request, self._manager
        total = branch.remaining()  # nothing of it is computed
        goal = total if branch.is_leader else total - 1  # at least the last token is computed
        hit = PrefixHit()
        if request.reads_cache and goal > 0:
            manager.hash_blocks(branch.hashes, branch.tokens, goal, request.source.cache_salt, request.source.adapter)
            hit = manager.lookup(branch.hashes, goal)
        start = hit.num_tokens
        size = self._row_size(start, max(total - start, 1), plan.budget, plan)
        if size <= 0:
            return False
        if alone:
            manager.start(branch.branch_id, hit)
        elif not manager.attach(branch.branch_id, hit, max(total, 1), size, self._reserve()):
            self._blocked = (branch.branch_id, manager.num_free)
            return False
        branch.num_computed = branch.num_scheduled = start
        if request.num_cached_tokens is None:
            request.num_cached_tokens = start
            if request.reads_cache and manager.enable_prefix_caching:
                manager.prefix_queries += request.num_prompt
                manager.prefix_hits += start
        return True

    def _place_swapped(self, branch: Branch, plan: StepPlan, *, alone: bool) -> bool:
        """Bring a unit back from the host, if one row at least fits this step."""
        unit = branch.request.unit(branch)
        longest = max(self._manager.width(self._limits.with_lookahead(len(b.tokens))) for b in unit)
        if not plan.fits(1, longest):
            return False
        row = 1 + self._manager.width(self._config.num_lookahead_slots)  # most new blocks of a row of one token, in each group
        reserve = 0 if alone else self._reserve() + len(unit) * len(self._manager.groups) * row
        if not self._manager.swap_in([b.branch_id for b in unit], reserve):
            self._blocked = (branch.branch_id, self._manager.num_free)
            return False
        return True

    def _reserve(self) -> int:
        """Blocks that new arrivals leave for those that run: 1 %."""
        return self._manager.num_blocks // 100

    def _row_size(self, start: int, remaining: int, room: int, plan: StepPlan) -> int:
        """Tokens of the next row; 0 when it does not fit. Without chunked prefill a row takes all it needs or waits."""
        wanted = min(remaining, room)
        if wanted <= 0:
            return 0
        width = self._manager.width(self._limits.with_lookahead(start + wanted))
        size = plan.largest_chunk(wanted, width)
        if size < remaining and not self._config.enable_chunked_prefill and remaining <= self._limits.whole:
            return 0
        return size

    def _plan_row(self, branch: Branch, remaining: int, room: int, plan: StepPlan, *, may_preempt: bool) -> None:
        """Add a row for a running branch if blocks can be had for it."""
        start = branch.num_scheduled
        size = self._row_size(start, remaining, room, plan)
        while size > 0 and not self._manager.prepare(
            branch.branch_id, start, self._limits.with_lookahead(start + size), branch.num_computed
        ):
            size = self._make_room(branch, size, plan) if may_preempt else self._smaller(size)
        if size <= 0:
            return
        end = start + size
        emits = branch.emits_at(end)
        branch.banned = banned_tokens(branch) if emits else ()
        plan.add(
            branch,
            ScheduledRow(branch.branch_id, start, size, emits, branch.banned, (branch.mask or b"") if emits else b""),
            self._manager.width(self._limits.with_lookahead(end))
        )
        branch.num_scheduled = end
        self._life.waiting.charge(branch, size)
        branch.num_pending += emits
        branch.in_flight += 1

    def _smaller(self, size: int) -> int:
        return size // 2 if self._config.enable_chunked_prefill else 0

    def _make_room(self, branch: Branch, size: int, plan: StepPlan) -> int:
        """Blocks ran out for a running branch. Returns the row size to try again with; 0: not in this step."""
        life = self._life
        if life.preempting or life.draining:
            return 0  # blocks come free when their steps have drained
        if any(self._manager.trim(b.branch_id, b.num_computed) for b in life.running):
            return size
        victim, unit = life.running.last(), branch.request.unit(branch)
        if victim not in unit:
            life.preempt(victim)
            plan.is_preempting = True
            return size
        if any(b.in_flight for b in unit):
            return 0
        if len(life.running) > len(unit):
            life.preempt(branch)
            plan.is_preempting = True
            return 0
        return self._smaller(size)  # it has the whole cache for itself

    def _send(self, plan: StepPlan) -> SchedulerOutput:
        """Turn a plan into the worker's record: in full for branches that it does not know, else what changed."""
        now = self._clock()
        new, cached = [], []
        for branch in plan.branches:
            if branch.request.first_scheduled_s is None:
                branch.request.first_scheduled_s = now
            if not branch.is_known:
                new.append(self._full_record(branch))
                continue
            blocks, replaced = self._manager.take_changes(branch.branch_id)
            if blocks or replaced or branch.host_tokens:
                cached.append(CachedRequest(branch.branch_id, blocks, replaced, tuple(branch.host_tokens)))
                branch.host_tokens.clear()
        swap_out, block_copy, swap_in = self._manager.take_moves()
        output = SchedulerOutput(
            self._next_step_id, plan.rows, tuple(new), tuple(cached), tuple(self._life.to_forget), swap_out, block_copy, swap_in
        )
        has_prompt_tokens = any(row.start + 1 < self._life.branches[row.branch_id].request.num_prompt for row in plan.rows)
        self._in_flight[self._next_step_id] = _Step(now, has_prompt_tokens, tuple(self._life.newly_swapped))
        self._life.to_forget.clear()
        self._life.newly_swapped.clear()
        self._next_step_id += 1
        return output

    def _full_record(self, branch: Branch) -> NewRequest:
        request = branch.request
        branch.is_known = True
        branch.host_tokens.clear()
        return NewRequest(
            branch_id=branch.branch_id,
            token_ids=tuple(branch.tokens),
            num_prompt_tokens=request.num_prompt,
            params=request.worker_params,
            index=branch.index,
            seed=request.seed,
            block_ids=self._manager.block_ids(branch.branch_id),
            adapter=request.source.adapter,
            pooling=request.source.pooling,
        )

    # ------------------------------------------------------------ results
    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in a step's results. Steps must come back in the order in which they were scheduled. O(rows)."""
        record = self._in_flight.pop(step.step_id)
        if record.has_prompt_tokens:
            self._delay.observe(self._clock() - record.started_s)
        outputs: list[EngineOutput] = []
        for row in step.rows:
            branch = self._life.branches[row.branch_id]
            branch.in_flight -= 1
            branch.num_pending -= row.emits
            self._num_prompt_tokens += max(0, min(row.start + row.num_tokens, branch.request.num_prompt) - row.start)
            if branch.status is Status.DRAINING:
                if not branch.in_flight:
                    self._life.release(branch)
            else:
                outputs += self._results.take_row(branch, row, result)
        self._life.settle()
        return outputs

    def fail_step(self, step: SchedulerOutput, message: str) -> list[EngineOutput]:
        """A step raised in the worker: every request with a row in it ends with an error, and its blocks come free."""
        record = self._in_flight.pop(step.step_id)
        outputs: list[EngineOutput] = []
        error = ErrorInfo(message, kind="step")
        lost = [b for b in record.swapped_out if not self._life.lose_host_copy(b)]
        branches = [self._life.branches[row.branch_id] for row in step.rows]
        for row, branch in zip(step.rows, branches, strict=True):
            branch.in_flight -= 1
            branch.num_pending -= row.emits
        for branch in (*branches, *lost):
            outputs += self._results.fail(branch.request, error)
            if branch.status is Status.DRAINING and not branch.in_flight:
                self._life.release(branch)
        # The worker may not have come to forgetting these; telling it twice does no harm.
        self._life.to_forget += [b for b in step.finished if b not in self._life.branches or not self._life.branches[b].is_known]
        self._life.settle()
        return outputs

    # ------------------------------------------------------------ numbers
    def stats(self) -> SchedulerStats:
        """Counters now. O(1)."""
        life, manager = self._life, self._manager
        return SchedulerStats(
            num_running=len(life.running),
            num_waiting=len(life.waiting) - len(life.swapped),
            num_swapped=manager.num_on_host,
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_used,
            num_cached_blocks=manager.num_reusable,
            num_preemptions=life.num_preemptions,
            num_swap_outs=life.num_swap_outs,
            prefix_queries=manager.prefix_queries,
            prefix_hits=manager.prefix_hits,
            num_host_blocks=manager.num_host_blocks,
            num_used_host_blocks=manager.num_used_host,
            num_prompt_tokens=self._num_prompt_tokens,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError. For tests: O(everything)."""
        life = self._life
        self._manager.check_invariants()
        self._admission.check_invariants()
        assert self._manager.holders() <= set(life.branches), "an ended branch holds blocks"
        assert life.seats_free() >= 0, "more branches run than there are seats"
        for branch in life.branches.values():
            where = (branch in life.waiting, branch in life.running, branch.branch_id in life.preempting, branch.branch_id in life.draining)
            expected = {
                Status.RUNNING: (0, 1, 0, 0),
                Status.PREEMPTING: (0, 0, 1, 0),
                Status.DRAINING: (0, 0, 0, 1),
                Status.UNBORN: (0, 0, 0, 0),
            }
            if branch.status is Status.WAITING:
                is_first = branch is branch.request.unit(branch)[0]
                assert where == (is_first, False, False, False), f"waiting branch {branch.branch_id} is in {where}"
                assert not branch.in_flight and not branch.is_known
            else:
                assert where == expected[branch.status], f"{branch.status} branch {branch.branch_id} is in {where}"
            assert 0 <= branch.num_computed <= branch.num_scheduled <= len(branch.tokens) + branch.num_pending
            assert branch.num_pending <= branch.in_flight <= self._config.max_in_flight
            assert len(branch.tokens) + branch.num_pending <= max(branch.request.max_total, branch.request.num_prompt)
            assert branch in branch.request.branches and (branch.request.open or branch.status is Status.DRAINING)
        for request in self._requests.values():
            assert request.open and request.branches, f"request {request.request_id} can never end"
        if not self.has_unfinished():
            assert not life.branches and not self._manager.num_used and not self._manager.num_used_host, "blocks are held at idle"
