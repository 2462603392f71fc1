"""Starts an engine: in this process for `LLM`, in one of its own for the server.

Owns: the one decision about the device, the questions to plugins before the start, the environment set before torch is imported.
Reads: `plugins`, `config.changes`, `executor`, `engine.core`, `engine.client`, `engine.sinks`.
Never: imports torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oarlock.config import changes
from oarlock.config.device_rules import check_claims
from oarlock.config.sections import EngineConfig
from oarlock.device_choice import Selection
from oarlock.engine.client import InProcessClient
from oarlock.engine.core import EngineCore
from oarlock.engine.sinks import Sink, StatsLog, make_feed
from oarlock.executor import make_executor
from oarlock.kv_scales import read_scales
from oarlock.model_summary import ModelSummary, load_summary
from oarlock.plugins import Catalogue, apply_environment, installed, select_device, worker_plugins
from oarlock.quantization import alias_note, choose_method, methods

if TYPE_CHECKING:
    from oarlock.engine.process_client import ProcessClient

log = logging.getLogger("oarlock.engine")


@dataclass(frozen=True, slots=True)
class Launch:
    """An engine that may be started: nothing stands against it as far as the front process can see."""

    config: EngineConfig  # plugins' options and changes included
    summary: ModelSummary
    selection: Selection

    def inprocess(self) -> InProcessClient:
        """An engine in this process; steps run when the client's `step` is called.

        Raises:
            PluginError, ConfigError, ModelError: what cannot be honoured, and why.
        """
        apply_environment(self.selection.spec)
        executor = make_executor(self.config, self.summary, self.selection.spec.name, self.selection.spec.factory)
        try:
            client = InProcessClient(EngineCore(self.config, self.summary, executor))
            own: dict[str, Sink] = {"statistics": StatsLog()} if self.config.observability.log_stats else {}
            client.feed = make_feed(self.config, self.selection.spec.name, own)
            return client
        except BaseException:
            executor.shutdown()
            raise

    def process(self) -> ProcessClient:
        """An engine in a process of its own. Returns at once; `await client.ready()` waits for the model."""
        from oarlock.engine.process_client import ProcessClient

        feed = make_feed(self.config, self.selection.spec.name)  # may raise, and then no process is left behind
        client = ProcessClient(self.config, self.summary, self.selection.spec)
        client.feed = feed
        return client


def choose_device(config: EngineConfig, catalogue: Catalogue) -> Selection:
    """Decide once, and say what was decided."""
    selection = select_device(config.device.device, catalogue)
    for note in selection.notes:
        log.warning("%s", note)
    log.info("device %s: %s", selection.spec.name, selection.probe.reason)
    return selection


def prepare(config: EngineConfig, summary: ModelSummary | None = None) -> Launch:
    """Choose the device and ask the plugins: once for each engine, in the front process.

    `summary`: of the model, where it is known; else it is read once there is a device, as that may be a download of minutes.

    Raises:
        PluginError: no device can serve, or a plugin asks for what it may not.
        ModelError: the model is not there, or its files cannot be understood.
        ConfigError, UnsupportedByBackend: what cannot be honoured, and why.
    """
    catalogue = installed()
    selection = choose_device(config, catalogue)
    summary = load_summary(config.model) if summary is None else summary
    manager = worker_plugins(selection.spec.name, catalogue)
    config = changes.complete_options(config, selection.spec.name, catalogue)
    config = changes.adjust(config, selection.spec, manager)
    check_claims(selection.probe.claims, config, selection.spec.name)
    changes.check(config, summary, selection.spec, manager)
    method = choose_method(config.model, summary, methods(manager))  # what no reader reads is said before a process starts
    if note := alias_note(config.model, method):
        log.warning("%s", note)
    if method is not None and method.of_plain:
        log.info("quantization %s: every linear of %s is quantised while it is read; no quantised copy is kept", method.name, summary.path)
    if config.cache.kv_scales_path is not None:
        read_scales(config.cache.kv_scales_path, summary.hf_config.get("model_type"), summary.num_layers, config.parallel.tensor_parallel_size)
    return Launch(config, summary, selection)


def launch_inprocess(config: EngineConfig, summary: ModelSummary) -> InProcessClient:
    """`prepare`, and start in this process. Raises what they raise."""
    return prepare(config, summary).inprocess()
