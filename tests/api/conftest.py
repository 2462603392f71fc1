"""Fixtures of the HTTP tests: a tiny model on disk, and real servers that tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # the toy tokenizer and the scripted engine
sys.path.insert(0, str(Path(__file__).parent))

from real_server import RealServer
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def shared_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(tiny_model, log=tmp_path_factory.mktemp("log") / "server.log") as server:
        yield server


@pytest.fixture
def server(shared_server: RealServer) -> Iterator[RealServer]:
    """The shared server. After each test it must answer as before, on the same processes, with no block held."""
    before, pids = shared_server.alive(), sorted(shared_server.lasting_pids())
    yield shared_server
    shared_server.alive(before)
    assert sorted(shared_server.lasting_pids()) == pids, "a process was restarted"
    shared_server.kv_idle()


@pytest.fixture
def start_server(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., RealServer]]:
    """Makes servers that a test may break; they are gone afterwards."""
    made: list[RealServer] = []

    def start(*flags: str, ready: bool = True, port: int | None = None) -> RealServer:
        settings = {"defaults": ()} if "null" in flags else {}  # the null device computes nothing, and refuses what tunes computing
        server = RealServer(tiny_model, *flags, log=tmp_path / f"server-{len(made)}.log", port=port, **settings)
        made.append(server)
        server.launch()
        if ready:
            server.wait_ready()
        return server

    yield start
    for server in made:
        server.http.close()
        server.kill()
