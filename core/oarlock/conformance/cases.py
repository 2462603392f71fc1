"""What a case is and how it ends.

Owns: `Case`, `Result`, `Measure`, `CheckFailed`; the running of one case.
Reads: nothing of ours but `backend_api`'s `Support`.
Never: turns an exception of a supported case into anything but a failure.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from oarlock.backend_api import Support, always

Status = Literal["pass", "fail", "unsupported", "error", "xfail", "xpass"]
BAD: tuple[Status, ...] = ("fail", "error", "xpass")


class CheckFailed(Exception):
    """A case found something wrong. The message says what was expected and what came; `measure` how far off it is."""

    def __init__(self, message: str, measure: Measure | None = None) -> None:
        super().__init__(message)
        self.measure = measure


@dataclass(frozen=True, slots=True)
class Measure:
    """How close a result came to the oracle."""

    nmse: float  # mean square error over the oracle's mean square; the largest of the case's outputs
    limit: float
    max_abs: float  # largest absolute error


@dataclass(frozen=True, slots=True)
class Case:
    """One check of one subject. `run` returns a measure, or None where nothing is measured; it raises CheckFailed."""

    id: str  # "rms_norm[bfloat16,tokens=7,hidden=33]"; stable, for -k and expected failures
    level: int
    run: Callable[[Any], Measure | None]  # given the Subject
    op: str = ""
    dtype: str = ""
    supports: Callable[[Any], Support] = always  # given the Subject; asked before `run`, and the only way to "unsupported"
    quick: bool = True

    @property
    def seed(self) -> int:
        """Fixed by the id, the same in every process."""
        return zlib.crc32(self.id.encode())


@dataclass(frozen=True, slots=True)
class Result:
    """How one case ended."""

    id: str
    level: int
    status: Status
    detail: str = ""  # why, when not "pass"
    trace: str = ""  # with "error"
    seconds: float = 0.0
    measure: Measure | None = None
    op: str = ""
    dtype: str = ""

    @property
    def is_bad(self) -> bool:
        return self.status in BAD


def run_case(case: Case, subject: Any, expected: str | None) -> Result:
    """Run one case. `expected` is the reason why it is expected to fail, None when it is not; an unexpected pass is bad."""
    started = time.perf_counter()
    status: Status = "pass"
    detail = trace = ""
    measure: Measure | None = None
    try:
        support = case.supports(subject) if case.supports is not always else Support(True)
        if support.ok:
            measure = case.run(subject)
        else:
            status, detail = "unsupported", "; ".join(support.reasons)
    except CheckFailed as failure:
        status, detail, measure = "fail", str(failure), failure.measure
    except Exception as error:  # noqa: BLE001  a stranger's code: whatever it raises is this case's result
        status, detail, trace = "error", f"{type(error).__name__}: {error}", traceback.format_exc()
    if expected is not None and status in ("fail", "error"):
        status, detail = "xfail", f"{expected} ({detail})"
    elif expected is not None and status == "pass":
        status, detail = "xpass", f"expected to fail ({expected}) but passed; remove the expectation"
    return Result(case.id, case.level, status, detail, trace, time.perf_counter() - started, measure, case.op, case.dtype)
