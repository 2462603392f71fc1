"""Kernels of these tests run in Triton's interpreter: TRITON_INTERPRET, which the repository's conftest sets before triton is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pluggy
import pytest
from oarlock.backend_api import ConformanceProfile, Hooks
from oarlock.backend_api.runtime import EagerRunner
from oarlock.conformance.cases import CASE_LIMIT_S, Case, run_case
from oarlock.conformance.subject import Subject

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))  # `import interpreted_device`

from oarlock_triton_kernels import interpreter, plugin

interpreter.put_right()


@pytest.fixture(scope="session")
def subject() -> Subject:
    """The device `interpreted` with the kernels of this package, and of no other: what the kit's cases are given."""
    from interpreted_device import Interpreted, devices

    manager = pluggy.PluginManager("oarlock")
    manager.add_hookspecs(Hooks)
    manager.register(plugin, name="oarlock-triton-kernels")
    device, (spec,) = Interpreted(), devices()
    return Subject(spec, SimpleNamespace(spec=spec), manager, device, ConformanceProfile(device=spec.name), EagerRunner(device))


@pytest.fixture
def passed(subject, request) -> Callable[..., list[str]]:
    """`passed(cases, pattern)` runs the quick cases whose ids match, with --full all of them; returns the ids of those that passed. None may fail."""

    def run(cases: list[Case], pattern: str = "") -> list[str]:
        chosen = [case for case in cases if re.search(pattern, case.id) and (case.quick or request.config.getoption("--full"))]
        results = [run_case(case, subject, None, CASE_LIMIT_S) for case in chosen]
        assert not [(r.id, r.detail, r.trace[-1500:]) for r in results if r.is_bad]
        return [r.id for r in results if r.status == "pass"]

    return run
