"""Runs the equivalence tests and writes what ran, and with which result, to docs/equivalence.md.

    .venv/bin/python tools/equivalence_report.py [pytest arguments]

Without arguments everything runs (families x features x devices and the real models); with some, what they select, and the page says so.
With pytest-xdist installed, `-n 2 --dist worksteal` takes two processes.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("test_equivalence_families.py", "test_equivalence_mutations.py", "test_equivalence_real.py")
MARK = {"passed": "yes", "failed": "**no**", "skipped": "-"}


class Collector:
    """Results by case: (family, device, way) as the tests record them, else the test's own name."""

    def __init__(self) -> None:
        self.results: dict[tuple[str, str, str], str] = {}
        self.seconds: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[str] = []
        self.ties: list[str] = []  # near-ties that were excused

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            self.ties += [value for name, value in report.user_properties if name == "near_tie"]
        if report.when != "call" and report.passed:
            return
        case = dict(report.user_properties).get("case")
        family, device, way = case.split("|") if case else ("", "", report.nodeid)
        self.results[family, device, way] = report.outcome
        self.seconds[family] += report.duration
        if report.skipped:
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.failed:
            self.failures.append(report.nodeid)


def state_of_the_tree() -> str:
    """The commit, and what differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "core", "backends", "plugins", "tests/e2e", "tests/runtime")
    files = sorted(line.split(maxsplit=1)[1] for line in changed.splitlines())
    return git("rev-parse", "HEAD") + (f", with changes in {', '.join(files)}" if files else "")


def processor() -> str:
    """Its name, and how many may be used."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def table(found: Collector) -> list[str]:
    """One table a device: families down, ways across."""
    lines: list[str] = []
    by_device: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for (family, device, way), outcome in found.results.items():
        if device:
            by_device[device][family][way] = outcome
    for device, families in by_device.items():
        ways = list(dict.fromkeys(way for ran in families.values() for way in ran))
        lines += ["", f"## {device}", "", f"| family | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
        lines += [f"| {family} | {' | '.join(MARK.get(ran.get(way, ''), '') for way in ways)} |" for family, ran in families.items()]
    return lines


def page(found: Collector, command: str, started: float, commit: str, load: float, *, interrupted: bool) -> str:
    counts = Counter(found.results.values())
    lines = [
        "# Equivalence",
        "",
        "Written by `tools/equivalence_report.py`. Do not edit.",
        "",
        "Greedy tokens in float32 are compared, 64 for each prompt, with those of transformers. `yes`: every token is the same, near-ties",
        "(the reference's two best logits within 1e-4) apart, and every event that the column is about has happened. `-`: skipped. Empty: not",
        "part of this run.",
        "",
        f"- commit: {commit}",
        f"- date: {time.strftime('%Y-%m-%d %H:%M', time.gmtime(started))} UTC",
        f"- command: `{command}`",
        f"- duration: {(time.time() - started) / 60:.1f} minutes (load {load:.1f} at the start)",
        f"- machine: {processor()}",
        f"- torch {version('torch')}, transformers {version('transformers')}, Python {platform.python_version()}",
        f"- {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {len(found.ties)} near-ties excused",
        *(["- **interrupted**: what is empty below did not run"] if interrupted else []),
        *table(found),
        "",
        "## Skipped",
        "",
        *([f"- {count} x {reason}" for reason, count in found.reasons.items()] or ["Nothing."]),
        "",
        "## Failed",
        "",
        *([f"- `{name}`" for name in found.failures] or ["Nothing."]),
        "",
        "## Near-ties excused",
        "",
        *([f"- {tie}" for tie in found.ties] or ["None."]),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Exit status: pytest's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "equivalence.md")
    known, rest = parser.parse_known_args()
    os.chdir(ROOT)
    tests = [] if any(".py" in word for word in rest) else [f"tests/e2e/{name}" for name in TESTS]
    commit, started, load, found = state_of_the_tree(), time.time(), os.getloadavg()[0], Collector()
    status = pytest.main(["--full", "-q", *tests, *rest], plugins=[found])
    command = shlex.join(["python", "tools/equivalence_report.py", *rest])
    known.output.write_text(page(found, command, started, commit, load, interrupted=status == pytest.ExitCode.INTERRUPTED), encoding="utf-8")
    print(f"wrote {known.output}")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
