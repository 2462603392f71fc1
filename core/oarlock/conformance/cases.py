"""What a case is and how it ends.

Owns: `Case`, `Result`, `Measure`, `CheckFailed`; the running of one case, and its time limit.
Reads: nothing of ours but `backend_api`'s `Support`.
Never: turns an exception of a supported case into anything but a failure.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oarlock.backend_api import Support, always

Status = Literal["pass", "fail", "unsupported", "error", "timeout", "xfail", "xpass"]
BAD: tuple[Status, ...] = ("fail", "error", "timeout", "xpass")
CASE_LIMIT_S = 300.0  # what one case may take, the compiling of its programs included


class CheckFailed(Exception):
    """A case found something wrong. The message says what was expected and what came; `measure` how far off it is."""

    def __init__(self, message: str, measure: Measure | None = None) -> None:
        super().__init__(message)
        self.measure = measure


class OutOfTime(BaseException):
    """Raised inside a case that exceeds its limit. No Exception, so that the code under test does not catch it by accident."""


@dataclass(frozen=True, slots=True)
class Measure:
    """How close a result came to the oracle."""

    nmse: float  # mean square error over the oracle's mean square; the largest of the case's outputs
    limit: float
    max_abs: float  # largest absolute error
    max_abs_limit: float | None = None  # None: not bounded

    @property
    def used(self) -> float:
        """The share of its limits that the result uses; 1 is at the limit. 0 where equality is asked for."""
        bounded = self.max_abs / self.max_abs_limit if self.max_abs_limit else 0.0
        return max(self.nmse / self.limit if self.limit else 0.0, bounded)


def worst(found: Sequence[Measure]) -> Measure:
    """The largest error of several, and the largest absolute error with its own limit."""
    widest = max(found, key=lambda m: m.max_abs / m.max_abs_limit if m.max_abs_limit else 0.0)
    return Measure(max(m.nmse for m in found), found[0].limit, widest.max_abs, widest.max_abs_limit)


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
    family: str = ""  # of models, for verdicts; "" means all
    is_vital: bool = False  # where it fails, later levels have nothing to stand on

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
    family: str = ""
    is_vital: bool = False

    @property
    def is_bad(self) -> bool:
        return self.status in BAD


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the body after so many seconds, as soon as Python runs; in the main thread of a POSIX system, else not at all."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    before, started = signal.setitimer(signal.ITIMER_REAL, seconds)[0], time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before:  # somebody else's alarm goes on
            signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - started), 0.001))


def run_case(case: Case, subject: Any, expected: str | None, limit_s: float = CASE_LIMIT_S) -> Result:
    """Run one case. `expected` is the reason why it is expected to fail, None when it is not; an unexpected pass is bad."""
    started = time.perf_counter()
    status: Status = "pass"
    detail = trace = ""
    measure: Measure | None = None
    try:
        with time_limit(limit_s):
            support = case.supports(subject) if case.supports is not always else Support(True)
            if support.ok:
                measure = case.run(subject)
            else:
                status, detail = "unsupported", "; ".join(support.reasons)
    except OutOfTime as error:
        where = traceback.extract_tb(error.__traceback__)[:-1]  # without the alarm's own frame
        status, detail, trace = "timeout", f"not done after {limit_s:g} s", "".join(traceback.format_list(where)) + "OutOfTime"
    except CheckFailed as failure:
        status, detail, measure = "fail", str(failure), failure.measure
    except Exception as error:  # noqa: BLE001  a stranger's code: whatever it raises is this case's result
        status, detail, trace = "error", f"{type(error).__name__}: {error}", traceback.format_exc()
    if expected is not None and status in ("fail", "error", "timeout"):
        status, detail = "xfail", f"{expected} ({detail})"
    elif expected is not None and status == "pass":
        status, detail = "xpass", f"expected to fail ({expected}) but passed; remove the expectation"
    return Result(
        case.id, case.level, status, detail, trace, time.perf_counter() - started, measure, case.op, case.dtype, case.family, case.is_vital
    )
