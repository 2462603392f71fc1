"""Ordered sets of branches: the waiting and the running order.

Owns: the order.
Reads: `request`.
Never: decides who moves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from oarlock.request import Branch, Key


class BranchQueue:
    """Branches by key, the smallest (most urgent, earliest) first. A preempted branch goes back in before later arrivals."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._branches: dict[Key, Branch] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Branch]:
        return (self._branches[key] for key in self._keys)

    def __contains__(self, branch: Branch) -> bool:
        return branch.key in self._branches

    def first(self) -> Branch:
        return self._branches[self._keys[0]]

    def last(self) -> Branch:
        return self._branches[self._keys[-1]]

    def add(self, branch: Branch) -> None:
        """O(log n) comparisons."""
        if branch.key not in self._branches:
            insort(self._keys, branch.key)
            self._branches[branch.key] = branch

    def discard(self, branch: Branch) -> None:
        """Take it out if it is in."""
        if self._branches.pop(branch.key, None) is not None:
            del self._keys[bisect_left(self._keys, branch.key)]

    def charge(self, branch: Branch, num_tokens: int) -> None:
        """Note that a step computes so many tokens for a branch, in here or not. This order does not depend on it."""


class FairQueue:
    """Waiting branches of several owners. The next one is of the owner for whom the fewest tokens were computed; within an owner, the first by key.

    An owner that begins to wait starts where the least of those is who wait already: nobody saves up while idle.
    Source: Fairness in Serving Large Language Models, Sheng et al. 2024, arXiv:2401.00588 (Virtual Token Counter).
    Differs: tokens are charged when their step is planned, all alike; prompt tokens found in the cache are free.
    """

    def __init__(self) -> None:
        self._queues: dict[int, BranchQueue] = {}  # of the owners that wait
        self._charged: dict[int, int] = {}  # tokens of every owner that ever waited
        self._last = 0  # the owner that was the last to wait no more

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, branch: Branch) -> bool:
        return branch in self._queues.get(branch.request.source.owner, ())

    def first(self) -> Branch:
        """O(owners)."""
        return min((queue.first() for queue in self._queues.values()), key=lambda b: (self._charged[b.request.source.owner], b.key))

    def add(self, branch: Branch) -> None:
        owner = branch.request.source.owner
        if owner not in self._queues:
            least = min((self._charged[other] for other in self._queues), default=self._charged.get(self._last, 0))
            self._charged[owner] = max(self._charged.get(owner, 0), least)
            self._queues[owner] = BranchQueue()
        self._queues[owner].add(branch)

    def discard(self, branch: Branch) -> None:
        """Take it out if it is in."""
        owner = branch.request.source.owner
        queue = self._queues.get(owner)
        if queue is not None:
            queue.discard(branch)
            if not queue:
                del self._queues[owner]
                self._last = owner

    def charge(self, branch: Branch, num_tokens: int) -> None:
        """Note that a step computes so many tokens for a branch, in here or not."""
        self._charged[branch.request.source.owner] += num_tokens
