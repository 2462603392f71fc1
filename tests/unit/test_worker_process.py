"""What a worker process logs of its own: faults, and not what the engine says anyway."""

from __future__ import annotations

import socket
from typing import NoReturn

import pytest
from oarlock.errors import ConfigError
from oarlock.executor.worker_process import WorkerLoop


def test_a_refusal_is_left_to_the_engine_and_a_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(error: Exception) -> NoReturn:
        raise error

    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = WorkerLoop(ours, worker=None, rank=1)
        refusal, fault = ConfigError("--tensor-parallel-size 2: use 3"), ZeroDivisionError("what is this")
        assert loop._try(fail, refusal) is refusal
        assert caplog.messages == []
        assert loop._try(fail, fault) is fault
        assert caplog.messages == ["rank 1: ZeroDivisionError: what is this"]
