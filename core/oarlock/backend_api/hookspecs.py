"""The call points of the plugin system. Called at start-up only: a test counts hook calls while serving and expects none.

Owns: names, arguments and return types of the hooks.
Reads: `specs`.
Never: runs a plugin (`oarlock.plugins` does).

Every hook is a list hook: each plugin may answer with a list of records, and core chooses among them. An implementation takes
the arguments that it wants, by name. Processes: the *front* process parses the command line or is the caller of `LLM(...)`; an
*engine* process runs the scheduler, and a *worker* holds a device. Offline all three are one.
"""

from __future__ import annotations

from typing import Any

import pluggy

from oarlock.backend_api import specs

PROJECT = "oarlock"
API_VERSION = (1, 2)

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """Implement any of these in the module named by the entry point `oarlock.devices` or `oarlock.plugins`."""

    @hookspec
    def devices(self) -> list[specs.DeviceSpec]:
        """Devices that this package provides; only from an entry point of `oarlock.devices`.

        When: discovery; once in each process that looks for plugins. No torch.
        Example:
            @hookimpl
            def devices():
                return [DeviceSpec(name="mydev", probe=probe, factory="oarlock_mydev.device:MyDevice",
                                   distribution="oarlock-mydev", priority=10)]
        """

    @hookspec
    def options(self) -> list[specs.OptionSpec]:
        """Options of this plugin, on the command line and for `LLM(...)`. Those of a device package need its device.

        When: discovery; once in each process that looks for plugins. No torch.
        Example:
            @hookimpl
            def options():
                return [OptionSpec(namespace="mydev", name="streams", type="int", default=2, help="Copy streams.")]
        """

    @hookspec
    def extensions(self) -> list[specs.Extension]:
        """Parts that this plugin adds to core: commands, models, executors, routes, sinks, structured-output backends, text parsers. Imported when they are used.

        When: discovery; once in each process that looks for plugins. No torch.
        Example:
            @hookimpl
            def extensions():
                return [Extension(kind="model", name="MyForCausalLM", factory="my_pkg.my_family")]
        """

    @hookspec
    def adjust_config(self, config: Any, device: specs.DeviceSpec) -> list[specs.ConfigChange]:
        """Changes to the configuration that this device or feature needs. `config.typed` are the paths that the user set: changing
        one of those is an error, so leave them alone, or let the error tell the user what cannot be combined.

        When: configure, after the device was chosen and the checkpoint's config read; once, in the front process. No torch.
        Example:
            @hookimpl
            def adjust_config(config, device):
                slow = device.name == "mydev" and "scheduler.max_num_seqs" not in config.typed
                return [ConfigChange("scheduler.max_num_seqs", 16, "each size is compiled")] if slow else []
        """

    @hookspec
    def check_model(self, model: Any, config: Any, device: specs.DeviceSpec) -> list[specs.Problem]:
        """What stands against this model under this configuration. An error ends the start before weights are read; a warning is
        logged. `model` is the checkpoint's summary (architecture, num_layers, hidden_size, vocab_size, layer_windows, ...).

        When: configure, after `adjust_config`; once, in the front process. No torch.
        Example:
            @hookimpl
            def check_model(model, config, device):
                odd = device.name == "mydev" and model.head_dim % 8
                return [Problem("error", f"heads of {model.head_dim} are no multiple of 8", "--device cpu serves it")] if odd else []
        """

    @hookspec
    def quantization(self) -> list[specs.QuantizationMethod]:
        """Ways to read quantised checkpoints. A factory is imported in the worker, for a checkpoint that its method reads.

        When: configure, in the front process, and worker start; once in each. No torch.
        Example:
            @hookimpl
            def quantization():
                is_mine = lambda settings: settings.get("quant_method") == "mine"
                return [QuantizationMethod(name="mine", factory="my_pkg.reader:MyQuantization", recognises=is_mine)]
        """

    @hookspec
    def attention(self, device: Any) -> list[specs.AttentionSpec]:
        """Attention implementations for this device.

        When: worker start; once for each KV cache group, in each worker.
        Example:
            @hookimpl
            def attention(device):
                return [AttentionSpec(name="mydev", factory="oarlock_mydev.attention:MyAttention", priority=10)]
        """

    @hookspec
    def kernels(self, device: Any) -> list[specs.OpImpl]:
        """Op implementations for this device.

        When: worker start; once in each worker.
        Example:
            @hookimpl
            def kernels(device):
                return [OpImpl(op="rms_norm", name="mydev", factory="oarlock_mydev.ops:rms_norm", priority=10)]
        """

    @hookspec
    def graph_runner(self, device: Any) -> list[specs.GraphRunnerSpec]:
        """How this device compiles or captures programs. Core's own runs them as they are.

        When: worker start; once in each worker, not under --enforce-eager.
        Example:
            @hookimpl
            def graph_runner(device):
                return [GraphRunnerSpec(name="strict", factory="oarlock_sim.static:StrictRunner", priority=10)]
        """

    @hookspec
    def memory_profiler(self, device: Any) -> list[specs.MemoryProfilerSpec]:
        """What this device says of its memory while the largest steps run. Core's own reckons by a formula.

        When: worker start, after the weights are loaded; once in each worker, not under --num-blocks-override.
        Example:
            @hookimpl
            def memory_profiler(device):
                return [MemoryProfilerSpec(name="mydev", factory="oarlock_mydev.memory:MydevProfiler", priority=10)]
        """

    @hookspec
    def communicator(self, device: Any) -> list[specs.CommunicatorSpec]:
        """Collectives between ranks. Core's own is torch.distributed over what the device declares.

        When: worker start; once in each worker.
        Example:
            @hookimpl
            def communicator(device):
                return [CommunicatorSpec(name="shm", factory="oarlock_mydev.shm:SharedMemoryCommunicator", priority=10)]
        """

    @hookspec
    def conformance(self) -> list[specs.ConformanceProfile]:
        """Limits and expected failures for the conformance kit.

        When: tests; once for each run of the kit.
        Example:
            @hookimpl
            def conformance():
                return [ConformanceProfile(device="mydev", tolerances=(("rotary", "bfloat16", 1e-4, "table in bf16"),))]
        """
