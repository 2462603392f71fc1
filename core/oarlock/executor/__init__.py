"""Executors: who owns the workers and fans a step out to them.

Owns: the choice of executor.
Reads: `executor.base`, `executor.inline`, `executor.multiproc`; a plugin's by its name.
Never: imports torch (workers are loaded by dotted path).
"""

from __future__ import annotations

from oarlock import extensions
from oarlock.config.sections import EngineConfig
from oarlock.errors import ConfigError
from oarlock.executor.base import Executor
from oarlock.model_summary import ModelSummary

OWN = ("auto", "inline", "mp")


def make_executor(config: EngineConfig, summary: ModelSummary, device_name: str, factory: str) -> Executor:
    """`auto`: inline for one worker, a process each for several.

    Raises:
        ConfigError: the executor is that of another device's package. PluginError: it cannot be imported.
    """
    kind = config.parallel.executor
    part = extensions.find("executor", kind, device_name, own=kind in OWN)
    if part is not None:
        made: Executor = extensions.load(part)(config, summary, device_name, factory)
        return made
    if kind not in OWN:
        raise ConfigError(f"--distributed-executor-backend {kind}: device {device_name} has no such executor; leave it out")
    if kind == "mp" or (kind == "auto" and config.parallel.tensor_parallel_size > 1):
        from oarlock.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config, summary, device_name, factory)
    from oarlock.executor.inline import InlineExecutor

    return InlineExecutor(config, summary, device_name, factory)
