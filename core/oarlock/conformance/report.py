"""What is said at the end: a table for people, JSON for machines; `report_files` has markdown and JUnit.

Owns: the record of a run, and the form of both.
Reads: `cases`, `verdicts`.
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
from oarlock.conformance.verdicts import Verdict, in_words, judge

FORMAT = 2  # of the JSON; raised when a field changes its meaning
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_SHOWN = 20  # failures listed in the table, those with the same words counted once
STATES = ("pass", "fail", "error", "timeout", "unsupported", "xfail", "xpass")
LEGEND = "ok: every case passed · ref: so it did, and core's reference on the device serves · part: some cases are declared unsupported · -: none in this dtype"


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
    commit: str = ""
    command: str = ""
    date: str = ""
    hashes: dict[str, str] = field(default_factory=dict)  # of the sources: "package" under test, "kit"
    device_text: str = ""
    stands_in: str = ""  # what computed in place of hardware; "" when the device itself did
    stopped: str = ""  # why cases that were chosen were not run
    served_dtype: str = ""  # of level 5
    seconds: float = 0.0
    results: list[Result] = field(default_factory=list)
    served: dict[str, dict[str, str]] = field(default_factory=dict)  # op -> dtype -> implementation
    loosened: list[list[Any]] = field(default_factory=list)  # (op, dtype, limit, reason)

    def counts(self, level: int) -> Counter[str]:
        return Counter(r.status for r in self.results if r.level == level)

    @property
    def judged(self) -> list[Verdict]:
        """By family and dtype; [] when the run was filtered, or left out a level below 5."""
        whole = not self.filtered and set(LEVELS[:5]) <= set(self.levels)
        return judge(self.results, self.served_dtype) if whole else []

    def verdict(self) -> str:
        """One line: what this run allows to say, and no more."""
        return self.verdict_lines()[0]

    def verdict_lines(self) -> list[str]:
        """The verdict, then what contradicts more, each with its level."""
        bad, unrun = [r for r in self.results if r.is_bad], [self.stopped] if self.stopped else []
        lines = in_words(self.judged)
        if bad:
            return [f"NOT CONFORMING: {len(bad)} of {len(self.results)} cases", *lines, *unrun]
        if not lines:
            return [
                f"every chosen case passed (levels {', '.join(self.levels)}); a verdict needs a run of levels 0 to 4 with all their cases",
                *unrun,
            ]
        expected = [r.id for r in self.results if r.status == "xfail"]
        if expected:
            lines[0] += (
                f"; but for {', '.join(expected[:3])}{f' and {len(expected) - 3} more' if len(expected) > 3 else ''}, which are expected to fail"
            )
        return lines

    def to_json(self) -> str:
        data = {"format": FORMAT, "verdict": self.verdict(), "verdicts": [asdict(v) for v in self.judged], **asdict(self)}
        data["reasons"] = self.verdict_lines()[1:]
        data["counts"] = {LEVELS[n]: dict(self.counts(n)) for n in range(len(LEVELS)) if self.counts(n)}
        for result in data["results"]:
            for name in ("measure", "trace", "detail", "op", "dtype", "family", "is_vital"):
                if not result[name]:
                    del result[name]
        return json.dumps(data, indent=1)

    def to_table(self) -> str:
        device = f"{self.device} ({self.distribution} {self.version}, API {self.api})"
        lines = [
            f"oarlock conformance  {device}   core {self.core} (API {self.core_api})   torch {self.torch}   {self.mode}",
            self.device_text,
            "",
            *grid(["level", *STATES, "time", "closest to its limit"], self.level_lines()),
        ]
        if self.served:
            lines += ["", *grid(["op", *map(_SHORT.__getitem__, self.dtypes), "served by"], self.op_lines()), LEGEND]
        bad = list(self.failures())
        lines += [""] if bad else []
        for result, others in bad[:_SHOWN]:
            lines.append(f"{result.status.upper():<6} {result.id}: {result.detail}")
            lines += [f"       {text}" for text in result.trace.strip().splitlines()[-3:-1]]
            lines += [f"       and {others} more with the same words"] if others else []
        if len(bad) > _SHOWN:
            lines.append(f"       and {len(bad) - _SHOWN} more; --format json lists all")
        lines += self.remarks()
        first, *more = self.verdict_lines()
        return "\n".join([*lines, "", f"verdict: {first}   ({self.seconds:.0f} s)", *(f"         {text}" for text in more)])

    def remarks(self) -> list[str]:
        """Loosened limits and expected failures, with their reasons."""
        lines = [f"limit  {op} {dtype} loosened to {limit:.2g}: {reason}" for op, dtype, limit, reason in self.loosened]
        return [*lines, *(f"xfail  {r.id}: {r.detail}" for r in self.results if r.status == "xfail")]

    def failures(self) -> list[tuple[Result, int]]:
        """Each bad result whose words are new, and how many more of its level have the same."""
        first: dict[tuple[int, str], Result] = {}
        count: Counter[tuple[int, str]] = Counter()
        for r in (r for r in self.results if r.is_bad):
            first.setdefault((r.level, r.detail), r)
            count[r.level, r.detail] += 1
        return [(result, count[key] - 1) for key, result in first.items()]

    @property
    def dtypes(self) -> list[str]:
        return [d for d in _SHORT if any(d in by for by in self.served.values())]

    def level_lines(self) -> list[list[str]]:
        """A row for each level: its name, a count for each state, seconds, the case closest to its limit."""
        lines = []
        for n, name in enumerate(LEVELS):
            here, counts = [r for r in self.results if r.level == n], self.counts(n)
            if not here:
                continue
            numbers = [str(counts[s] or "-") for s in STATES]
            lines.append([f"{n} {name}", *numbers, f"{sum(r.seconds for r in here):.1f} s", _closest(here)])
        return lines

    def op_lines(self) -> list[list[str]]:
        """A row for each op that was run: its name, a state for each dtype, who serves."""
        lines = []
        for op, by in sorted(self.served.items()):
            own = [self._state(op, dtype) for dtype in self.dtypes]
            if set(own) != {"-"}:
                lines.append([op, *own, ", ".join(sorted(set(by.values())))])
        return lines

    def _state(self, op: str, dtype: str) -> str:
        """ok, ref, part, FAIL or -: see LEGEND."""
        here = [r for r in self.results if r.op == op and r.dtype == dtype]
        ran = [r for r in here if r.status != "unsupported"]
        if any(r.is_bad for r in here):
            return "FAIL"
        whole = "ref" if self.served[op].get(dtype) == "reference" else "ok"
        return "-" if not ran else whole if len(ran) == len(here) else "part"


def _closest(results: Sequence[Result]) -> str:
    """The case that used the most of its limit."""
    measured = [(r.measure.used, r) for r in results if r.measure is not None and r.measure.limit > 0]
    if not measured:
        return "-"
    share, found = max(measured, key=lambda pair: pair[0])
    assert found.measure is not None
    return f"{found.id} at {share:.0%}, nmse {found.measure.nmse:.1e} of {found.measure.limit:.0e}"


def grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first and the last to the left, numbers to the right."""
    rows = [header, *lines]
    widths = [max(len(row[c]) for row in rows) for c in range(len(header))]
    last = len(header) - 1
    return [
        "  ".join(cell.ljust(w) if c in (0, last) else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
