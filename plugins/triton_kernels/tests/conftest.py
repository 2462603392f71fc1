"""Kernels of these tests run in Triton's interpreter: TRITON_INTERPRET, which the repository's conftest sets before triton is imported."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from oarlock.backend_api import ConformanceProfile, Hooks
from oarlock.backend_api.runtime import EagerRunner
from oarlock.conformance.cases import CASE_LIMIT_S, Case, run_case
from oarlock.conformance.subject import Subject

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))  # `import interpreted_device`

from oarlock_triton_kernels import elementwise, interpreter, plugin
from triton.runtime.interpreter import GridExecutor

interpreter.put_right()
elementwise.TILE *= 2  # half the programs: each costs the interpreter some milliseconds, whatever it computes
MOST_PROGRAMS = 50
SMALL = {"attend_merge_kernel": 80, "attend_join_kernel": 108}  # a program is one head of one row, and adds up a few parts


@pytest.fixture(autouse=True)
def launched(monkeypatch) -> Iterator[dict[str, int]]:
    """The kernels that the test launched: the most programs of each. More than `MOST_PROGRAMS` are too slow for a quick case."""
    found: dict[str, int] = {}
    run = GridExecutor.__call__

    def launch(self: GridExecutor, *args: object, **kwargs: object) -> None:
        found[self.fn.__name__] = max(found.get(self.fn.__name__, 0), math.prod(self.grid))
        run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    yield found
    assert not {name: programs for name, programs in found.items() if programs > SMALL.get(name, MOST_PROGRAMS)}, "programs in one launch"


@pytest.fixture(scope="session")
def subject() -> Subject:
    """The device `interpreted` with the kernels of this package, and of no other: what the kit's cases are given."""
    return opened({})


@pytest.fixture(scope="session")
def subject_by_descriptors() -> Subject:
    """The same, where --triton-descriptors was typed."""
    return opened({"triton_descriptors": True})


def opened(options: dict[str, Any]) -> Subject:
    from interpreted_device import Interpreted, devices

    manager = pluggy.PluginManager("oarlock")
    manager.add_hookspecs(Hooks)
    manager.register(plugin, name="oarlock-triton-kernels")
    device, (spec,) = Interpreted(0, options), devices()
    return Subject(spec, SimpleNamespace(spec=spec), manager, device, ConformanceProfile(device=spec.name), EagerRunner(device))


@pytest.fixture
def passed(subject, request) -> Callable[..., list[str]]:
    """`passed(cases, pattern)` runs the quick cases whose ids match, with --full all of them; returns the ids of those that passed. None may fail.
    `by` takes another subject."""

    def run(cases: list[Case], pattern: str = "", by: Subject = subject) -> list[str]:
        chosen = [case for case in cases if re.search(pattern, case.id) and (case.quick or request.config.getoption("--full"))]
        results = [run_case(case, by, None, CASE_LIMIT_S) for case in chosen]
        assert not [(r.id, r.detail, r.trace[-1500:]) for r in results if r.is_bad]
        return [r.id for r in results if r.status == "pass"]

    return run
