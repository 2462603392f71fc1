"""One step while it is being put together.

Owns: its rows, what is left of the token budget, and whether one more row fits the device's shapes.
Reads: `shapes.ShapePolicy`, `request`.
Never: allocates a block or decides who is next.
"""

from __future__ import annotations

from oarlock.messages import ScheduledRow
from oarlock.request import Branch
from oarlock.shapes import ShapePolicy


class StepPlan:
    """Rows of one token form the decode region, longer ones are chunks."""

    def __init__(self, policy: ShapePolicy, budget: int) -> None:
        self._policy = policy
        self.budget = budget  # tokens that may still be added
        self.branches: list[Branch] = []  # in the order in which they were added
        self.is_preempting = False  # somebody lost blocks for this step, so nobody new is let in
        self._decodes: list[ScheduledRow] = []
        self._chunks: list[ScheduledRow] = []
        self._chunk_lens: list[int] = []
        self._width = 0

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """Decode rows first, then chunks."""
        return (*self._decodes, *self._chunks)

    def fits(self, num_tokens: int, width: int) -> bool:
        """Whether a row of this many tokens, with a block table of this width, fits the device's shapes."""
        width = max(width, self._width)
        if num_tokens == 1:
            return self._policy.fits(len(self._decodes) + 1, self._chunk_lens, width)
        return self._policy.fits(len(self._decodes), [*self._chunk_lens, num_tokens], width)

    def largest_chunk(self, num_tokens: int, width: int) -> int:
        """The most tokens, up to `num_tokens`, that one more row can have; 0 when none fits. `width`: for all of them."""
        longest = self._policy.max_chunk()
        num_tokens = min(num_tokens, self.budget, num_tokens if longest is None else longest)
        if num_tokens <= 0 or self.fits(num_tokens, width):
            return max(num_tokens, 0)
        low, high = (1 if self.fits(1, width) else 0), num_tokens - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle, width) else (low, middle - 1)
        return low

    def add(self, branch: Branch, row: ScheduledRow, width: int) -> None:
        self.branches.append(branch)
        self.budget -= row.num_tokens
        self._width = max(self._width, width)
        if row.num_tokens == 1:
            self._decodes.append(row)
        else:
            self._chunks.append(row)
            self._chunk_lens.append(row.num_tokens)
