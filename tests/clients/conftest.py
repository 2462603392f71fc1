"""What the clients' tests share: the server, and the report in docs/clients.

Each client's folder is run alone, by the Python of that client's environment (`make test-clients`); none of them can import Oarlock.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from serving import oarlock

HERE = Path(__file__).parent
# A template that shows tools and their results; SmolLM2's own knows none. Calls are in the form that the parser hermes reads.
FLAGS = ("--chat-template", str(HERE / "tools.jinja"), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server without a key, its address."""
    with oarlock(*FLAGS) as found:
        yield found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--client", help="distribution under test")
    parser.addoption("--report", type=Path, help="file that the report is written to, when every test passed")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LINES] = []
    config.addinivalue_line("markers", "asyncio: an async test")


# (test, what came of it, why or what it noted) of every test
LINES: pytest.StashKey[list[tuple[str, str, str]]] = pytest.StashKey()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "teardown" and hasattr(report, "wasxfail"):  # what is expected of the model is no excuse for the server's end
        report.outcome = "failed"
        del report.wasxfail
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        result, reason = report.outcome, ", ".join(f"{name} {value}" for name, value in report.user_properties)
        if hasattr(report, "wasxfail"):
            result, reason = ("expected failure", report.wasxfail.removeprefix("reason: ")) if report.skipped else ("passed", reason)
        elif report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        item.config.stash[LINES].append((item.nodeid.partition("::")[2], result, " ".join(reason.split())))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path, client = session.config.getoption("--report"), session.config.getoption("--client")
    if path is None or exitstatus != 0:
        return
    lines = session.config.stash[LINES]
    counts = {result: sum(each == result for _, each, _ in lines) for result in ("passed", "expected failure", "skipped")}
    facts = [f"Oarlock {os.environ['COMMIT']}", f"Python {platform.python_version()}", f"model {Path(os.environ['MODEL']).name}"]
    text = [
        f"# {client} {metadata.version(client)}",
        "",
        f"Written by `make test-clients CLIENT={session.config.rootpath.name}`: {', '.join(facts)}.",
        "",
        f"{counts['passed']} passed, {counts['expected failure']} expected failures, {counts['skipped']} skipped. An expected failure that passes fails the run.",
        "",
    ]
    others = [(name, result, reason) for name, result, reason in lines if result != "passed"]
    if others:
        text += ["| test | | why |", "|---|---|---|", *(f"| `{name}` | {result} | {reason.replace('|', chr(92) + '|')} |" for name, result, reason in others), ""]
    text += ["Passed:", "", *(f"- `{name}`" + (f": {noted}" if noted else "") for name, result, noted in lines if result == "passed"), ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text), encoding="utf-8")
