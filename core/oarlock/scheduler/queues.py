"""An ordered set of branches; the waiting and the running order are one each.

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
