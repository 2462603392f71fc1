"""What the tests of this folder say to a client, and see of its processes.

Owns: `Wanted`, `children`, `wait`.
Reads: /proc.
Never: is imported by the package.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from oarlock_structured_output.client import Client


class Wanted:
    """A constraint as core gives it."""

    def __init__(self, kind: str, text: str, **settings: Any) -> None:
        self.kind, self.text = kind, text
        self.whitespace_pattern = settings.get("whitespace_pattern")
        self.disable_any_whitespace = settings.get("disable_any_whitespace", False)
        self.disable_additional_properties = settings.get("disable_additional_properties", False)


def children() -> list[int]:
    """Processes of this package that this one, or a child of it, started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                is_ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if b"oarlock_structured_output.zygote" in words and not is_ended and f"OARLOCK_TEST={os.getpid()}".encode() in environment:
                found.append(int(entry.name))
    return found


def wait(client: Client, branch_id: int, timeout_s: float = 20.0) -> tuple[bytes, bool, str]:
    """The answer for one branch; others are dropped."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for found, mask, may_end, problem in client.answers(0.05):
            if found == branch_id:
                return mask, may_end, problem
    raise AssertionError(f"no answer for {branch_id} within {timeout_s} s")
