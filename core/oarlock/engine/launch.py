"""Starts an engine: in this process for `LLM`, in one of its own for the server.

Owns: the one decision about the device, and the environment set before torch is imported.
Reads: `plugins`, `executor`, `engine.core`, `engine.client`.
Never: imports torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from oarlock.config.sections import EngineConfig
from oarlock.device_choice import Selection
from oarlock.engine.client import InProcessClient
from oarlock.engine.core import EngineCore
from oarlock.executor import make_executor
from oarlock.model_summary import ModelSummary
from oarlock.plugins import apply_environment, select_device

if TYPE_CHECKING:
    from oarlock.engine.process_client import ProcessClient

log = logging.getLogger("oarlock.engine")


def choose_device(config: EngineConfig) -> Selection:
    """Decide once, and say what was decided."""
    selection = select_device(config.device.device)
    for note in selection.notes:
        log.warning("%s", note)
    log.info("device %s: %s", selection.spec.name, selection.probe.reason)
    return selection


def launch_inprocess(config: EngineConfig, summary: ModelSummary) -> InProcessClient:
    """An engine in this process; steps run when the client's `step` is called.

    Raises:
        PluginError, ConfigError, ModelError: what cannot be honoured, and why.
    """
    selection = choose_device(config)
    apply_environment(selection.spec)
    executor = make_executor(config, summary, selection.spec.name, selection.spec.factory)
    try:
        return InProcessClient(EngineCore(config, summary, executor))
    except BaseException:
        executor.shutdown()
        raise


def launch_process(config: EngineConfig, summary: ModelSummary) -> ProcessClient:
    """An engine in a process of its own. Returns at once; `await client.ready()` waits for the model.

    Raises:
        PluginError: no device can serve.
    """
    from oarlock.engine.process_client import ProcessClient

    selection = choose_device(config)
    return ProcessClient(config, summary, selection.spec)
