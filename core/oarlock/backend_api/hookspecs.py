"""The call points of the plugin system. Called at start-up only: a test counts hook calls while serving and expects none.

Owns: names, arguments and return types of the hooks.
Reads: `specs`.
Never: runs a plugin (`oarlock.plugins` does).

Every hook is a list hook: each plugin may answer with a list of records, and core chooses among them.
"""

from __future__ import annotations

from typing import Any

import pluggy

from oarlock.backend_api import specs

PROJECT = "oarlock"
API_VERSION = (1, 0)

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """Implement any of these in the module named by the entry point `oarlock.devices` or `oarlock.plugins`."""

    @hookspec
    def devices(self) -> list[specs.DeviceSpec]:
        """Devices this package provides. Discovery, once, front process; must not import torch.

        Example:
            @hookimpl
            def devices():
                return [DeviceSpec(name="mydev", probe=probe, factory="oarlock_mydev.device:MyDevice",
                                   distribution="oarlock-mydev", priority=10)]
        """

    @hookspec
    def extensions(self) -> list[specs.Extension]:
        """Parts added to core: models, load formats, executors, routes, commands, parsers, sinks. Configure, once; no torch.

        Example:
            @hookimpl
            def extensions():
                return [Extension(kind="model", name="MyForCausalLM", factory="my_pkg.model:MyFamily")]
        """

    @hookspec
    def attention(self, device: Any) -> list[specs.AttentionSpec]:
        """Attention implementations for this device. Worker start, once.

        Example:
            @hookimpl
            def attention(device):
                return [AttentionSpec(name="mydev", factory="oarlock_mydev.attention:MyAttention", priority=10)]
        """

    @hookspec
    def kernels(self, device: Any) -> list[specs.OpImpl]:
        """Op implementations for this device. Worker start, once.

        Example:
            @hookimpl
            def kernels(device):
                return [OpImpl(op="rms_norm", name="mydev", factory="oarlock_mydev.ops:rms_norm", priority=10)]
        """

    @hookspec
    def graph_runner(self, device: Any) -> list[specs.GraphRunnerSpec]:
        """How this device compiles or captures programs. Worker start, once. Core's own: eager, capture, compile.

        Example:
            @hookimpl
            def graph_runner(device):
                return [GraphRunnerSpec(name="strict", factory="oarlock_sim.static:StrictRunner", priority=10)]
        """

    @hookspec
    def communicator(self, device: Any) -> list[specs.CommunicatorSpec]:
        """Collectives between ranks. Worker start, once. Core's own: torch.distributed.

        Example:
            @hookimpl
            def communicator(device):
                return [CommunicatorSpec(name="shm", factory="oarlock_cpu.shm:SharedMemoryCommunicator", priority=10)]
        """

    @hookspec
    def conformance(self) -> list[specs.ConformanceProfile]:
        """Limits and expected failures for the conformance kit. Tests only.

        Example:
            @hookimpl
            def conformance():
                return [ConformanceProfile(device="mydev", tolerances=(("rotary", "bfloat16", 1e-4, "table in bf16"),))]
        """
