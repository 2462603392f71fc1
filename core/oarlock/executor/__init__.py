"""Executors: who owns the workers and fans a step out to them.

Owns: the choice of executor.
Reads: `executor.base`, `executor.inline`, `executor.multiproc`.
Never: imports torch (workers are loaded by dotted path).
"""

from __future__ import annotations

from oarlock.config.sections import EngineConfig
from oarlock.executor.base import Executor
from oarlock.model_summary import ModelSummary


def make_executor(config: EngineConfig, summary: ModelSummary, device_name: str, factory: str) -> Executor:
    """`auto`: inline for one worker, a process each for several."""
    kind = config.parallel.executor
    if kind == "mp" or (kind == "auto" and config.parallel.tensor_parallel_size > 1):
        from oarlock.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config, summary, device_name, factory)
    from oarlock.executor.inline import InlineExecutor

    return InlineExecutor(config, summary, device_name, factory)
