"""What the simulated devices saw, for tests to assert on.

Owns: the counts of this process.
Reads: nothing.
Never: imports torch; resets itself.
"""

from __future__ import annotations

from collections import Counter

COUNT: Counter[str] = Counter()  # keys: see the package's README


def reset() -> None:
    """Start counting from zero."""
    COUNT.clear()


def snapshot() -> dict[str, int]:
    """A copy of the counts, without zeros."""
    return {key: value for key, value in COUNT.items() if value}
