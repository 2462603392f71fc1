"""What the engine knows of one request and of each of its branches.

Owns: `Request`, `Branch` and the arithmetic on their token counts.
Reads: `messages`, `sampling_params`.
Never: changes itself: only the scheduler writes these fields.

    tokens of a branch            |prompt prompt prompt prompt|output output ? ?
    num_computed (confirmed)       ^^^^^^^^^^^^^^^^
    num_scheduled (promised)       ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    len(tokens) (host knows)       ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    + num_pending (in flight)                                               ^^^  each `?` is a token that only the device knows
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

from oarlock.messages import EngineRequest, PositionLogprobs

Key = tuple[int, int, int]  # (priority, arrival number, branch id): smaller runs first


class Status(Enum):
    """Where a branch is."""

    UNBORN = "unborn"  # waits until its request's leader has computed what they share
    WAITING = "waiting"  # holds no device blocks; perhaps host blocks
    RUNNING = "running"
    PREEMPTING = "preempting"  # loses its blocks once the steps in flight have drained
    DRAINING = "draining"  # ended; a step in flight still writes its blocks
    ENDED = "ended"


class Branch:
    """One sequence of tokens: one of n, of best_of, or one beam."""

    __slots__ = (
        "banned",
        "branch_id",
        "candidates",
        "cumulative_logprob",
        "hashes",
        "host_tokens",
        "in_flight",
        "index",
        "is_known",
        "key",
        "logprobs",
        "mask",
        "num_computed",
        "num_pending",
        "num_scheduled",
        "request",
        "status",
        "tokens",
        "tops",
    )

    def __init__(self, branch_id: int, request: Request, index: int, tokens: list[int]) -> None:
        self.branch_id = branch_id
        self.request = request
        self.index = index
        self.tokens = tokens  # prompt, then generated tokens known on the host
        self.key: Key = (request.priority, request.number, branch_id)
        self.status = Status.UNBORN
        self.num_computed = 0  # tokens whose KV is confirmed
        self.num_scheduled = 0  # tokens whose KV is confirmed or promised by steps in flight
        self.num_pending = 0  # sampled tokens promised by steps in flight
        self.in_flight = 0  # steps in flight that hold a row of this branch
        self.is_known = False  # the worker has its full record
        self.hashes: list[bytes] = []  # chained hashes of its full blocks, as far as they were needed
        self.host_tokens: list[int] = []  # chosen by the host and not yet sent to the worker
        self.banned: tuple[int, ...] = ()  # of its last row
        self.mask: bytes | None = None  # structured output: what its next token may be; None until that is known
        self.cumulative_logprob: float | None = None
        self.logprobs: list[PositionLogprobs] = []  # kept under beam search only
        self.candidates: tuple[tuple[int, float], ...] | None = None  # beam search: (token id, logprob), best first; None until computed
        self.tops: tuple[tuple[int, float | None], ...] = ()  # beam search: the worker's entries for its last position

    @property
    def num_output(self) -> int:
        """Generated tokens known on the host."""
        return len(self.tokens) - self.request.num_prompt

    @property
    def is_leader(self) -> bool:
        """Whether it computes for siblings that wait to fork from it."""
        return self.request.leader is self and bool(self.request.unborn)

    def remaining(self) -> int:
        """Tokens that could be computed now; 0 when it waits for a result, or needs no more."""
        r = self.request
        if r.unborn and r.leader is self:
            return r.fork_at - self.num_scheduled
        promised = len(self.tokens) + self.num_pending
        if promised >= r.max_total and promised > r.num_prompt:
            return 0
        if self.num_pending and r.needs_host_tokens:
            return 0
        waits = r.constraint is not None and self.mask is None  # its last token is computed when the sample after it can be taken
        return promised - self.num_scheduled - waits

    def emits_at(self, end: int) -> bool:
        """Whether a row that ends before position `end` samples a token."""
        return end == len(self.tokens) + self.num_pending and self.request.max_total > self.request.num_prompt


class Request:
    """A request and what its branches share."""

    def __init__(self, source: EngineRequest, number: int, seed: int, max_model_len: int, priority: int) -> None:
        p = source.params
        self.source = source
        self.params = p
        self.request_id = source.request_id
        self.number = number  # order of arrival
        self.priority = priority
        self.seed = seed
        self.num_prompt = len(source.prompt_token_ids)
        max_tokens = 0 if source.pooling is not None else max_model_len if p.max_tokens is None else p.max_tokens
        self.max_total = max(min(self.num_prompt + max_tokens, max_model_len), self.num_prompt)  # tokens, prompt included
        self.is_beam = p.use_beam_search
        self.width = p.num_branches
        self.eos_ids = frozenset() if p.ignore_eos else frozenset(source.eos_token_ids)
        self.stop_ids = frozenset(p.stop_token_ids)
        self.stop_ban = tuple(sorted(self.eos_ids | self.stop_ids))
        self.bad_tokens = tuple(words[0] for words in p.bad_words_token_ids if len(words) == 1)
        self.bad_tails = tuple(words for words in p.bad_words_token_ids if len(words) > 1)
        self.constraint = p.structured_outputs if self.max_total > self.num_prompt else None
        self.worker_params = p if p.structured_outputs is None else replace(p, structured_outputs=None)  # workers get masks
        self.needs_host_tokens = self.is_beam or bool(p.logits_processors) or bool(self.bad_tails) or self.constraint is not None
        # Branches: `leader` computes the first `fork_at` tokens, which `unborn` share.
        self.branches: list[Branch] = []
        self.unborn: list[Branch] = []
        self.leader: Branch | None = None
        self.fork_at = 0
        # Results: indexes that still owe a terminal output. Under beam search these are the n best, not the beams.
        self.open: set[int] = set(range(p.n if self.is_beam else self.width))
        self.beams: Any = None  # scheduler.beam.BeamSearch
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.num_missing_prompt_logprobs = 0
        if p.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.num_prompt
            self.num_missing_prompt_logprobs = self.num_prompt - 1
        self.num_cached_tokens: int | None = None  # None until first scheduled
        self.first_scheduled_s: float | None = None
        self.reported: set[int] = set()  # indexes that had an output

    @property
    def reads_cache(self) -> bool:
        """Prompt log-probabilities need the prompt computed, so such a request reads no cached block before they are complete."""
        return not self.params.skip_reading_prefix_cache and not self.num_missing_prompt_logprobs

    def unit(self, branch: Branch) -> list[Branch]:
        """What is preempted and resumed together: all beams of a request, else one branch."""
        return [b for b in self.branches if b.status is not Status.UNBORN] if self.is_beam else [branch]
