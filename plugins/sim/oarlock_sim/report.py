"""`--sim-report`: what the simulated device of this process saw, printed when the engine closes.

Owns: the report's words.
Reads: `counters`.
Never: imports torch; speaks of another process's device.
"""

from __future__ import annotations

import sys
from typing import Any

from oarlock_sim import counters


class Report:
    """Counts steps; the counts themselves are made where the work is done."""

    def __init__(self) -> None:
        self._before = counters.snapshot()
        self._steps = 0

    def observe(self, steps: list[Any]) -> None:
        self._steps += len(steps)

    def close(self) -> None:
        print(self.text(counters.snapshot()), file=sys.stderr)

    def text(self, now: dict[str, int]) -> str:
        """The counts since the report was made, whole and for each step."""
        counts = {key: value - self._before.get(key, 0) for key, value in now.items() if value > self._before.get(key, 0)}
        if not counts:
            return f"sim: {self._steps} steps; they ran in another process, whose counts are not seen here (LLM(...) runs them in this one)"
        lines = [f"  {key:<28} {value:>10} {value / max(self._steps, 1):>12.2f}" for key, value in sorted(counts.items())]
        return "\n".join([f"sim: {self._steps} steps", f"  {'':<28} {'all':>10} {'each step':>12}", *lines])


def make(config: Any) -> Report | None:
    """The observer, where it was asked for."""
    return Report() if config.device.options["sim_report"] else None
