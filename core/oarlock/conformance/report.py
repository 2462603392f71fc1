"""What is said at the end: a table for people, JSON for machines.

Owns: the form of both.
Reads: `cases`.
Never: decides what passes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from oarlock.conformance import LEVELS
from oarlock.conformance.cases import Result

FORMAT = 1  # of the JSON; raised when a field changes its meaning
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_SHOWN = 20  # failures listed in the table


@dataclass
class Report:
    """One run on one device."""

    device: str
    distribution: str
    version: str
    api: str
    core: str
    core_api: str
    torch: str
    python: str
    machine: str
    levels: list[str]
    mode: str  # "quick" or "full"
    filtered: bool  # only some cases were asked for
    device_text: str = ""
    seconds: float = 0.0
    results: list[Result] = field(default_factory=list)
    served: dict[str, dict[str, str]] = field(default_factory=dict)  # op -> dtype -> implementation
    loosened: list[list[Any]] = field(default_factory=list)  # (op, dtype, limit, reason)

    def counts(self, level: int) -> Counter[str]:
        return Counter(r.status for r in self.results if r.level == level)

    def verdict(self) -> str:
        """In words: what this run allows to say, and no more."""
        bad = [r for r in self.results if r.is_bad]
        if bad:
            return f"NOT CONFORMING: {len(bad)} of {len(self.results)} cases"
        if self.filtered or len(self.levels) < len(LEVELS):
            return f"every chosen case passed (levels {', '.join(self.levels)}); a verdict needs a run of all levels"
        dtypes = sorted({r.dtype for r in self.results if r.status == "pass" and r.level == LEVELS.index("attention")})
        return f"CORRECT for {', '.join(dtypes)}"

    def to_json(self) -> str:
        data = {"format": FORMAT, "verdict": self.verdict(), **asdict(self)}
        data["counts"] = {LEVELS[n]: dict(self.counts(n)) for n in range(len(LEVELS)) if self.counts(n)}
        for result in data["results"]:
            for name in ("measure", "trace", "detail", "op", "dtype"):
                if not result[name]:
                    del result[name]
        return json.dumps(data, indent=1)

    def to_table(self) -> str:
        device = f"{self.device} ({self.distribution} {self.version}, API {self.api})"
        lines = [
            f"oarlock conformance  {device}   core {self.core} (API {self.core_api})   torch {self.torch}   {self.mode}",
            self.device_text,
            "",
            *_grid(["level", "pass", "fail", "error", "unsup", "xfail", "time", "closest to its limit"], self._level_lines()),
        ]
        if self.served:
            dtypes = [d for d in _SHORT if any(d in by for by in self.served.values())]
            lines += ["", *_grid(["op", *(_SHORT[d] for d in dtypes), "served by"], self._op_lines(dtypes))]
        bad = [r for r in self.results if r.is_bad]
        lines += [""] if bad else []
        for result in bad[:_SHOWN]:
            lines.append(f"{result.status.upper():<6} {result.id}: {result.detail}")
            lines += [f"       {text}" for text in result.trace.strip().splitlines()[-3:-1]]
        if len(bad) > _SHOWN:
            lines.append(f"       and {len(bad) - _SHOWN} more; --format json lists all")
        lines += [f"limit  {op} {dtype} loosened to {limit:.2g}: {reason}" for op, dtype, limit, reason in self.loosened]
        return "\n".join([*lines, "", f"verdict: {self.verdict()}   ({self.seconds:.0f} s)"])

    def _level_lines(self) -> list[list[str]]:
        lines = []
        for n, name in enumerate(LEVELS):
            here, counts = [r for r in self.results if r.level == n], self.counts(n)
            if not here:
                continue
            numbers = [str(counts[s] or "-") for s in ("pass", "fail", "error", "unsupported", "xfail")]
            numbers[1] = str(counts["fail"] + counts["xpass"] or "-")
            lines.append([f"{n} {name}", *numbers, f"{sum(r.seconds for r in here):.1f} s", _closest(here)])
        return lines

    def _op_lines(self, dtypes: Sequence[str]) -> list[list[str]]:
        lines = []
        for op, by in sorted(self.served.items()):
            own = [self._state(op, dtype) for dtype in dtypes]
            if set(own) != {"-"}:
                lines.append([op, *own, ", ".join(sorted(set(by.values())))])
        return lines

    def _state(self, op: str, dtype: str) -> str:
        """ok, part (some declared unsupported), FAIL, or - (not run)."""
        here = [r for r in self.results if r.op == op and r.dtype == dtype]
        ran = [r for r in here if r.status != "unsupported"]
        if any(r.is_bad for r in here):
            return "FAIL"
        return "-" if not ran else "ok" if len(ran) == len(here) else "part"


def _closest(results: Sequence[Result]) -> str:
    """The case that used the most of its limit."""
    measured = [r for r in results if r.measure is not None and r.measure.limit > 0]
    if not measured:
        return "-"
    worst = max(measured, key=lambda r: r.measure.nmse / r.measure.limit if r.measure else 0.0)
    assert worst.measure is not None
    return f"{worst.id} nmse {worst.measure.nmse:.1e}, limit {worst.measure.limit:.0e}"


def _grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first and the last to the left, numbers to the right."""
    rows = [header, *lines]
    widths = [max(len(row[c]) for row in rows) for c in range(len(header))]
    last = len(header) - 1
    return [
        "  ".join(cell.ljust(w) if c in (0, last) else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
