"""Runs the chosen cases on one device and gathers the report.

Owns: which cases run, in which order, and the exit code.
Reads: the levels, `subject`, `report`.
Never: prints; stops at the first failure.
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import platform
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

import oarlock
from oarlock.backend_api import API_VERSION
from oarlock.backend_api.runtime.ops import resolve
from oarlock.conformance import LEVELS, attention_level, contract_level, device_level, ops_level, replay, runner_level, serve_level
from oarlock.conformance.cases import CASE_LIMIT_S, Case, Result, run_case
from oarlock.conformance.provenance import KIT, commit, package_folder, source_hash
from oarlock.conformance.report import Report
from oarlock.conformance.subject import Subject
from oarlock.device_choice import Selection
from oarlock.errors import ConfigError

_SOURCES: tuple[Callable[..., Iterator[Case]], ...] = (
    contract_level.cases, device_level.cases, ops_level.cases, attention_level.cases, runner_level.cases, serve_level.cases,
)  # fmt: skip
GRACE_S = 20.0  # a case that Python cannot interrupt is given this much more, then the run ends


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user asked for."""

    levels: tuple[int, ...] = tuple(range(len(LEVELS)))
    ops: tuple[str, ...] = ()  # () means all; level 2 and 3 only
    pattern: str = ""  # regular expression over case ids
    full: bool = False
    keep_going: bool = False  # past a level whose failures leave the next nothing to stand on
    case_limit_s: float = CASE_LIMIT_S
    replay: str = ""  # a file of recorded calls, which are the cases then


def parse_levels(text: str) -> tuple[int, ...]:
    """ "2", "0-3", "ops,attention" and mixtures of these.

    Raises:
        ConfigError: a level that does not exist.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        ends = [LEVELS.index(end) if end in LEVELS else int(end) if end.isdigit() else -1 for end in (first, last or first)]
        if min(ends) < 0 or max(ends) >= len(LEVELS) or ends[0] > ends[1]:
            known = ", ".join(f"{n} {name}" for n, name in enumerate(LEVELS))
            raise ConfigError(f"--level {text}: {part.strip()!r} is no level; levels are {known}, or a range such as 0-3", option="--level")
        found.update(range(ends[0], ends[1] + 1))
    return tuple(sorted(found))


def select(choice: Choice, subject: Subject | None = None) -> list[Case]:
    """The cases of a choice, in order. Those of attention are built over what the subject declares; None: over all that core knows.

    Raises:
        ConfigError: an op that does not exist, a broken expression, or nothing left.
    """
    try:
        pattern = re.compile(choice.pattern)
    except re.error as error:
        raise ConfigError(f"-k {choice.pattern}: no regular expression: {error}", option="-k") from None
    every = [case for level, source in enumerate(_SOURCES) if level in choice.levels for case in _cases(source, subject)]
    if choice.replay:
        every = list(replay.cases(choice.replay))
    every += [case for case in _extra(subject) if case.level in choice.levels and not choice.replay]
    known = {case.op for source in _SOURCES for case in source() if case.op}
    unknown = sorted(set(choice.ops) - known)
    if unknown:
        raise ConfigError(f"--ops: {', '.join(unknown)} is no op; ops are {', '.join(sorted(known))}", option="--ops")
    found = [c for c in every if (c.quick or choice.full) and pattern.search(c.id) and (not choice.ops or c.op in choice.ops)]
    if not found:
        raise ConfigError(f"no case matches levels {choice.levels}, ops {choice.ops or 'all'}, -k {choice.pattern!r}", option="-k")
    return found


def _extra(subject: Subject | None) -> list[Case]:
    """Cases that the device's profile adds: each import string leads to a callable that gives them."""
    return [case for path in (subject.profile.extra_cases if subject else ()) for case in resolve(path)()]


def _cases(source: Callable[..., Iterator[Case]], subject: Subject | None) -> Iterator[Case]:
    if source is not attention_level.cases or subject is None:
        return source()
    return source(subject.dtypes, subject.device.capabilities.block_sizes)


def run(
    selection: Selection,
    choice: Choice,
    on_result: Callable[[Result], None] = lambda _: None,
    on_stuck: Callable[[Report], None] | None = None,
) -> Report:
    """Run the chosen cases. A device that cannot even be made is one error of level 0.

    `on_stuck` is called from another thread, with the report so far, when a case neither ends nor can be interrupted.

    Raises:
        ConfigError: the choice names what does not exist.
    """
    select(choice)  # raises for what does not exist, before a device is touched
    report = _new_report(selection, choice)
    started = time.perf_counter()
    try:
        subject = Subject.open(selection)
        report.device_text = subject.device.describe()
        chosen = select(choice, subject)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  a stranger's constructor: the report says what it raised
        text = f"{type(error).__name__}: {error}"
        failed = Result("contract[opens]", 0, "error", text, traceback.format_exc(), time.perf_counter() - started)
        report.results.append(failed)
        on_result(failed)
        return report
    try:
        for level in sorted({case.level for case in chosen}):
            here = [case for case in chosen if case.level == level]
            for case in here:
                with _watched(case, report, choice.case_limit_s, on_stuck):
                    result = run_case(case, subject, expected_failure(case.id, subject), choice.case_limit_s)
                report.results.append(result)
                on_result(result)
            left = [case for case in chosen if case.level > level]
            why = "" if choice.keep_going or not left else _nothing_to_stand_on(report.results[-len(here) :])
            if why:
                report.stopped = f"stopped after level {level} {LEVELS[level]}: {why}. {len(left)} cases of later levels were not run; --keep-going runs them"
                break
    finally:
        subject.close()
    report.seconds = time.perf_counter() - started
    report.served = _served(subject)
    report.loosened = [list(t) for t in subject.profile.tolerances]
    report.stands_in = str(subject.profile.options.get("stands_in", ""))
    report.served_dtype = serve_level.dtype_of(subject)
    return report


def _nothing_to_stand_on(results: Sequence[Result]) -> str:
    """Why failures of this level make the next one meaningless; "" when they do not."""
    vital = [r for r in results if r.is_bad and r.is_vital]
    if vital:
        return f"{vital[0].id} failed, and what follows needs it"
    if any(r.is_bad for r in results) and not any(r.status == "pass" for r in results):
        return "none of its cases passed"
    return ""


@contextlib.contextmanager
def _watched(case: Case, report: Report, limit_s: float, on_stuck: Callable[[Report], None] | None) -> Iterator[None]:
    """Code that never comes back to Python cannot be interrupted: then the report, with this case as timeout, is handed to `on_stuck`."""

    def stuck() -> None:
        detail = f"not done after {limit_s:g} s, and cannot be interrupted: the run ends here"
        report.results.append(
            Result(case.id, case.level, "timeout", detail, op=case.op, dtype=case.dtype, family=case.family, is_vital=case.is_vital)
        )
        report.stopped = f"{case.id} hung; the cases after it were not run"
        if on_stuck is not None:
            on_stuck(report)

    timer = threading.Timer(limit_s + GRACE_S, stuck)
    timer.daemon = True
    if on_stuck is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def expected_failure(case_id: str, subject: Subject) -> str | None:
    """Why the device's profile expects this case to fail; None when it does not. In a pattern only * and ? are special."""
    for pattern, reason in subject.profile.expected_failures:
        if fnmatch.fnmatchcase(case_id, pattern.replace("[", "[[]")):
            return reason
    return None


def _served(subject: Subject) -> dict[str, dict[str, str]]:
    """op -> dtype -> implementation. Empty where nothing could be bound, which the ops' cases report."""
    table: dict[str, dict[str, str]] = {}
    for dtype, ops in subject.bound.items():
        for op, name, _ in ops.table:
            table.setdefault(op, {})[dtype] = name
    if not subject.attention_served:
        return table
    table["paged_attention"] = dict(subject.attention_served)
    return table


def _new_report(selection: Selection, choice: Choice) -> Report:
    try:
        version = metadata.version(selection.distribution)
    except metadata.PackageNotFoundError:
        version = "?"
    folder = package_folder(selection.spec.factory)
    return Report(
        device=selection.spec.name,
        distribution=selection.distribution,
        version=version,
        api=".".join(map(str, selection.spec.api_version)),
        core=oarlock.__version__,
        core_api=".".join(map(str, API_VERSION)),
        torch=torch.__version__,
        python=platform.python_version(),
        machine=platform.machine(),
        levels=["replay"] if choice.replay else [LEVELS[n] for n in choice.levels],
        mode="full" if choice.full else "quick",
        filtered=bool(choice.ops or choice.pattern or choice.replay),
        commit=commit((folder, KIT)),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        hashes={"package": source_hash(folder), "kit": source_hash(KIT)},
    )


def exit_code(results: Sequence[Result]) -> int:
    """0 pass, 1 failures, 3 a problem of the contract (which makes other failures its consequences)."""
    if any(r.is_bad and r.level == 0 for r in results):
        return 3
    return 1 if any(r.is_bad for r in results) else 0
