"""What tests of several folders share: tiny checkpoints, made once a session. Imports no torch until one is asked for.

Owns: the `checkpoint` fixture, and the count of near-ties at the end of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "runtime"))  # `import checkpoints`
collect_ignore = ["clients"]  # each needs an environment of its own: make test-clients


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`checkpoint(name)` -> checkpoints.Tiny: a folder on disk, transformers' own greedy tokens for any prompt. Kept for the session."""
    from checkpoints import Tiny

    folder, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = Tiny.make(name, folder / name)
        return made[name]

    return get


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = getattr(sys.modules.get("checkpoints"), "NEAR_TIES", [])
    if found:
        terminalreporter.section("near-ties that excused a token")
        for line in found:
            terminalreporter.write_line(line)
