"""What every test run has: the --full option and a time per folder at the end.

Owns: command-line options and the summary.
Never: holds a fixture (those live beside the tests that use them).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported anywhere: two threads, one where tests run side by side, and none of them spins while a test's server process
# wants the core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before anything imports triton: there is no device for its kernels here, and its own functions are made for one of the two ways.
os.environ.setdefault("TRITON_INTERPRET", "1")

_ROOT = Path(__file__).parent
_SECONDS: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked full as well")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: long; runs only with --full (make test-full)")
    config.addinivalue_line("markers", "alone: measures time, or uses all cores; make test runs it after those that run side by side")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    long = [item for item in items if item.get_closest_marker("full")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = Path(report.nodeid.split("::")[0])
    _SECONDS[str(path.parent)] += report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if len(_SECONDS) < 2:
        return
    terminalreporter.section("seconds by folder")
    for folder, seconds in _SECONDS.items():
        terminalreporter.write_line(f"{seconds:8.1f}  {folder}")
