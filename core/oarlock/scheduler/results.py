"""What a step's results mean for a branch: new tokens, the end, a fork, the next beams, an error.

Owns: the making of `EngineOutput`s; each index of a request gets exactly one with a finish reason.
Reads: `messages`, `stops`, `beam`; calls `Lifecycle` and `KVCacheManager`.
Never: plans a step.
"""

from __future__ import annotations

from typing import Any

from oarlock.kv.manager import KVCacheManager
from oarlock.messages import EngineOutput, ErrorInfo, FinishReason, ModelRunnerOutput, PositionLogprobs, ScheduledRow
from oarlock.request import Branch, Request
from oarlock.scheduler.admission import Admission
from oarlock.scheduler.beam import BeamSearch, Extension, candidates_of
from oarlock.scheduler.constraints import Constraints
from oarlock.scheduler.lifecycle import Lifecycle
from oarlock.scheduler.stops import why_stop


class Results:
    """Takes a request out of the open ones when its last index is closed."""

    def __init__(self, life: Lifecycle, manager: KVCacheManager, admission: Admission, constraints: Constraints) -> None:
        self._life, self._manager, self._admission, self._constraints = life, manager, admission, constraints

    # ------------------------------------------------------------ outputs
    def output(self, request: Request, index: int, **fields: Any) -> EngineOutput:
        """An output with what every output carries; the first of an index also says when it was scheduled."""
        first = index not in request.reported
        self._admission.answered(request)
        request.reported.add(index)
        prompt_logprobs = None
        if first and index == 0 and request.prompt_logprobs is not None and not request.num_missing_prompt_logprobs:
            prompt_logprobs = tuple(request.prompt_logprobs)
        return EngineOutput(
            request.request_id,
            index,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens or 0,
            first_scheduled_s=request.first_scheduled_s if first else None,
            **fields,
        )

    def close(self, request: Request, index: int, reason: FinishReason, **fields: Any) -> EngineOutput:
        """The terminal output of an open index."""
        request.open.remove(index)
        if not request.open:
            self._admission.leave(request)
        return self.output(request, index, finish_reason=reason, **fields)

    def fail(self, request: Request, error: ErrorInfo) -> list[EngineOutput]:
        """End every branch with an error; nothing for one that has ended already."""
        outputs = [self.close(request, index, "error", error=error) for index in sorted(request.open)]
        self._life.end_request(request)
        return outputs

    # ------------------------------------------------------------ one row
    def take_row(self, branch: Branch, row: ScheduledRow, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in one row of a branch that has not ended."""
        request, branch_id = branch.request, branch.branch_id
        if branch_id in result.failed:
            self._manager.forget(branch.hashes)  # KV that is not finite would fail whoever finds it
            return self.fail(request, ErrorInfo(result.failed[branch_id]))
        branch.num_computed = row.start + row.num_tokens
        if request.num_missing_prompt_logprobs:
            self._take_prompt_logprobs(request, row, result.prompt_logprobs.get(branch_id, ()))
        self._register(branch)
        if not row.emits:
            if branch.num_computed == request.num_prompt == request.max_total:  # max_tokens is 0: only the prompt was to be scored
                if request.source.pooling is not None:
                    return self._take_vector(branch, result.pooled.get(branch_id))
                self._life.finish(branch)
                indexes = sorted(request.open) if request.is_beam else [branch.index]
                return [self.close(request, index, "length") for index in indexes]
            self._life.fork_due(request)
            return []
        tokens, logprobs = result.token_ids.get(branch_id, ()), result.logprobs.get(branch_id, ())
        if request.is_beam:
            return self._take_candidates(branch, logprobs)
        if not tokens:
            return self.fail(request, ErrorInfo("the worker returned no token for this request", kind="step"))
        return [self._take_tokens(branch, tokens, logprobs)]

    def _take_vector(self, branch: Branch, pooled: bytes | None) -> list[EngineOutput]:
        if pooled is None:
            return self.fail(branch.request, ErrorInfo("the worker returned no vector for this request"))
        self._life.finish(branch)
        return [self.close(branch.request, branch.index, "stop", pooled=pooled)]

    def _take_prompt_logprobs(self, request: Request, row: ScheduledRow, positions: tuple[PositionLogprobs, ...]) -> None:
        assert request.prompt_logprobs is not None
        for at, position in enumerate(positions, row.start + 1):
            if request.prompt_logprobs[at] is None:  # a recomputed chunk says the same again
                request.num_missing_prompt_logprobs -= 1
            request.prompt_logprobs[at] = position

    def _register(self, branch: Branch) -> None:
        """Make full blocks of confirmed tokens findable."""
        if self._manager.has_unregistered(branch.branch_id, branch.num_computed):
            source = branch.request.source
            self._manager.hash_blocks(branch.hashes, branch.tokens, branch.num_computed, source.cache_salt, source.adapter)
            self._manager.register(branch.branch_id, branch.hashes, branch.num_computed)

    def _take_tokens(self, branch: Branch, tokens: tuple[int, ...], logprobs: tuple[PositionLogprobs, ...]) -> EngineOutput:
        """Append sampled tokens up to the stopping one."""
        request = branch.request
        kept, reason, stop_reason = 0, None, None
        for token in tokens:
            branch.tokens.append(token)
            kept += 1
            reason, stop_reason = why_stop(request, len(branch.tokens), token)
            if reason is not None:
                break
        for position in logprobs[:kept]:
            if position.logprob is not None:
                branch.cumulative_logprob = (branch.cumulative_logprob or 0.0) + position.logprob
        fields: dict[str, Any] = {
            "new_token_ids": tokens[:kept],
            "logprobs": logprobs[:kept] if request.params.logprobs is not None else None,
            "cumulative_logprob": branch.cumulative_logprob,
        }
        if reason is None:
            self._constraints.ask(branch)
            return self.output(request, branch.index, **fields)
        self._life.finish(branch)
        return self.close(request, branch.index, reason, stop_reason=stop_reason, **fields)

    def settle_constraints(self, *, is_busy: bool) -> list[EngineOutput]:
        """Take in the masks that have come. `is_busy`: others may run now, so the rest is waited for only a moment."""
        outputs: list[EngineOutput] = []
        for branch, error in self._constraints.settle(is_busy=is_busy):
            request = branch.request
            if branch.index not in request.open:
                continue  # an earlier one of this round ended it
            if error is not None:
                outputs += self.fail(request, error)
            else:  # complete, and nothing may follow
                self._life.finish(branch)
                outputs.append(self.close(request, branch.index, "stop", cumulative_logprob=branch.cumulative_logprob))
        return outputs

    # ------------------------------------------------------------ beams
    def _take_candidates(self, branch: Branch, logprobs: tuple[PositionLogprobs, ...]) -> list[EngineOutput]:
        """Keep a beam's candidates; once every beam has some, take the step of the search."""
        request = branch.request
        if not logprobs:
            return self.fail(request, ErrorInfo("the worker returned no log-probabilities for a beam"))
        branch.tops = logprobs[0].top
        branch.candidates = candidates_of(branch, logprobs[0])
        if any(b.candidates is None for b in request.branches):
            return []
        if request.beams is None:
            request.beams = BeamSearch(request)
        search: BeamSearch = request.beams
        beams = list(request.branches)
        extensions = search.extend(beams)
        if not extensions:
            return self._finish_beams(request, search)
        self._grow(beams, extensions)
        return []

    def _grow(self, beams: list[Branch], extensions: list[Extension]) -> None:
        """Make the branches of the next step, best first: a parent lives on as its best child, its other children are forks of it."""
        chosen = {e.parent for e in extensions}
        for at, beam in enumerate(beams):
            if at not in chosen:
                self._life.finish(beam)
        grown: set[int] = set()
        children: list[Branch] = []
        states = {p: (len(beams[p].tokens), list(beams[p].logprobs)) for p in chosen}
        for e in extensions:
            parent = beams[e.parent]
            length, logprobs = states[e.parent]
            if e.parent in grown:
                child = self._life.new_branch(parent.request, parent.index, [*parent.tokens[:length], e.token_id])
                self._life.fork(parent, child, length)
            else:
                grown.add(e.parent)
                child = parent
                child.tokens.append(e.token_id)
                child.host_tokens.append(e.token_id)
            child.logprobs = [*logprobs, e.position]
            child.cumulative_logprob = e.cumulative_logprob
            child.candidates = None
            children.append(child)
        for child in children:
            self._constraints.ask(child)
        beams[0].request.branches[:] = children  # in rank order, by which ties are broken

    def _finish_beams(self, request: Request, search: BeamSearch) -> list[EngineOutput]:
        """The n best hypotheses, best first, are the outputs."""
        best = search.best()
        outputs = []
        for index in sorted(request.open):
            if index < len(best):
                found = best[index]
                fields: dict[str, Any] = {
                    "new_token_ids": found.token_ids,
                    "logprobs": found.logprobs if request.params.logprobs is not None else None,
                    "cumulative_logprob": found.cumulative_logprob,
                    "stop_reason": found.stop_reason,
                }
                outputs.append(self.close(request, index, found.finish_reason, **fields))
            else:
                error = ErrorInfo(f"beam search found {len(best)} sequences that the bans allow, but n is {request.params.n}", param="n")
                outputs.append(self.close(request, index, "error", error=error))
        self._life.end_request(request)
        return outputs
