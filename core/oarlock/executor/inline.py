"""One worker in this process, called directly.

Owns: the worker object.
Reads: `executor.base`.
Never: imports torch by name.
"""

from __future__ import annotations

import importlib
from typing import Any

from oarlock.executor.base import WORKER, Executor, Pending
from oarlock.messages import ModelRunnerOutput, SchedulerOutput, WorkerReady


class _InlinePending:
    def __init__(self, worker: Any, pending: Any) -> None:
        self._worker, self._pending = worker, pending

    def result(self) -> ModelRunnerOutput:
        return self._worker.read(self._pending)


class InlineExecutor(Executor):
    """Steps run in the calling thread."""

    supports_host_callbacks = True
    _worker: Any = None

    def load(self) -> list[WorkerReady]:
        module, _, name = WORKER.partition(":")
        self._worker = getattr(importlib.import_module(module), name)(self.config, self.summary, self.device_name, self.factory)
        self._worker.prepare()
        self._worker.load()
        return [self._worker.measure()]

    def start(self, num_blocks: int, num_host_blocks: int, max_model_len: int) -> tuple[float, int]:
        return self._worker.start(num_blocks, num_host_blocks, max_model_len)

    def execute(self, out: SchedulerOutput) -> Pending:
        return _InlinePending(self._worker, self._worker.execute(out))

    def canary(self) -> None:
        self._worker.canary()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
