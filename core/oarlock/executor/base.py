"""The executor's protocol.

Owns: what the engine may ask of its workers.
Reads: `messages`.
Never: schedules; looks into a step.
"""

from __future__ import annotations

import abc
from typing import Protocol

from oarlock.config.sections import EngineConfig
from oarlock.messages import ModelRunnerOutput, SchedulerOutput, WorkerReady
from oarlock.model_summary import ModelSummary

WORKER = "oarlock.runtime.worker:Worker"


class Pending(Protocol):
    """A launched step."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what the worker raised, or WorkerDied."""


class Executor(abc.ABC):
    """Owns one worker per rank."""

    supports_host_callbacks = False  # whether callables (logits processors) reach the worker

    def __init__(self, config: EngineConfig, summary: ModelSummary, device_name: str, factory: str) -> None:
        self.config, self.summary, self.device_name, self.factory = config, summary, device_name, factory

    @abc.abstractmethod
    def load(self) -> list[WorkerReady]:
        """Start the workers and load the model; one answer per rank, rank 0 first."""

    @abc.abstractmethod
    def start(self, num_blocks: int, num_host_blocks: int, max_model_len: int) -> tuple[float, int]:
        """Agree on sizes, allocate, warm up. Returns (seconds, programs)."""

    @abc.abstractmethod
    def execute(self, out: SchedulerOutput) -> Pending:
        """Launch a step on every rank."""

    @abc.abstractmethod
    def canary(self) -> None:
        """Prove that every rank still works. Raises when one does not."""

    def idle_ends(self) -> tuple[int, ...]:
        """File descriptors that become readable when a worker is gone while nothing is asked of it; () where workers cannot go alone."""
        return ()

    def check_idle(self) -> None:
        """Raise WorkerDied when a worker is gone. Only while nothing is asked of them."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the workers; idempotent, never raises."""
