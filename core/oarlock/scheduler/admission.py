"""Who may still come in, and how long a request may wait: the bounds of the queue.

Owns: the open requests, and which of them have not answered yet.
Reads: `config.SchedulerConfig`, `request`.
Never: ends a request, or decides who is next.
"""

from __future__ import annotations

from collections import Counter

from oarlock.config.sections import SchedulerConfig
from oarlock.messages import ErrorInfo
from oarlock.request import Request


class Admission:
    """Under the fair policy each owner has an equal part of every bound, so that none can fill the queue for the others."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.requests: dict[str, Request] = {}  # those that still owe a terminal output
        self._unanswered: dict[Request, None] = {}  # those of them that gave no output yet, the oldest first
        self._inside: Counter[int] = Counter()  # open requests of each owner
        self._tokens: Counter[int] = Counter()  # prompt tokens of each owner's unanswered requests

    def refusal(self, request: Request) -> ErrorInfo | None:
        """Why the queue has no room for it now, or None. O(1)."""
        config, owner = self._config, self._owner(request)
        inside, limit = self._inside[owner], config.max_inside // config.num_owners
        if inside >= limit:
            return self._full(f"{inside} requests are running or waiting", limit, "requests", config.shown_bound)
        tokens, most = self._tokens[owner], config.max_queued_tokens
        if most is not None and tokens and tokens + request.num_prompt > most // config.num_owners:
            what = f"{tokens} prompt tokens wait for their first answer, and this request brings {request.num_prompt}"
            return self._full(what, most // config.num_owners, "tokens", f"max_num_queued_tokens {most}")
        return None

    def enter(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._unanswered[request] = None
        owner = self._owner(request)
        self._inside[owner] += 1
        self._tokens[owner] += request.num_prompt

    def answered(self, request: Request) -> None:
        """Its first output was made. Nothing for a request that never entered."""
        if request in self._unanswered:
            del self._unanswered[request]
            self._tokens[self._owner(request)] -= request.num_prompt

    def leave(self, request: Request) -> None:
        """Its last output was made. Nothing for a request that never entered."""
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]
            self._inside[self._owner(request)] -= 1

    def overdue(self, now_s: float) -> list[Request]:
        """Those that have waited for their first step longer than they may. O(those and the requests whose prompt is being computed)."""
        limit_s, found = self._config.max_queue_s, []
        for request in self._unanswered if limit_s is not None else ():
            if now_s - request.source.arrival_s <= (limit_s or 0.0):
                break
            if request.first_scheduled_s is None:
                found.append(request)
        return found

    def check_invariants(self) -> None:
        """Raises AssertionError. For tests: O(everything)."""
        for owner in {*self._inside, *self._tokens}:
            assert self._inside[owner] == sum(self._owner(r) == owner for r in self.requests.values())
            assert self._tokens[owner] == sum(r.num_prompt for r in self._unanswered if self._owner(r) == owner)
        assert all(self.requests.get(r.request_id) is r and not r.reported for r in self._unanswered)

    def _owner(self, request: Request) -> int:
        return request.source.owner if self._config.num_owners > 1 else 0

    def _full(self, what: str, limit: int, unit: str, bound: str) -> ErrorInfo:
        share = f", of which each API key has a part of {self._config.num_owners}" if self._config.num_owners > 1 else ""
        return ErrorInfo(f"{what}, the limit is {limit} {unit} ({bound}{share}); retry later", code="queue_full")
