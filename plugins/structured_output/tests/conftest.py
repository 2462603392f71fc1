"""Clients for the tests, closed afterwards, and the count of processes that they leave: none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_clients import children
from oarlock_structured_output.client import Client, Limits

HERE = Path(__file__).parent


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Client]]:
    """`make(engine="toy_grammars", backend="llguidance", argument="", **limits)`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("OARLOCK_TEST", str(os.getpid()))
    made: list[Client] = []

    def start(engine: str = "toy_grammars", *, backend: str = "llguidance", argument: str = "", **limits: Any) -> Client:
        made.append(Client(backend, engine, ("toy_grammars:vocabulary", argument), Limits(**limits)))
        return made[-1]

    yield start
    for client in made:
        client.close()
    deadline = time.monotonic() + 5
    while left := children():
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.02)
