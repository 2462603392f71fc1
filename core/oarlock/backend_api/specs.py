"""The frozen records that hooks yield. Standard library only; a factory is an import string, "package.module:attribute".

Owns: the records' fields and their meaning.
Reads: `capabilities`.
Never: imports a factory (core does, once, at start-up).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from oarlock.backend_api.capabilities import Claims

ProbeStatus = Literal["available", "no_hardware", "driver_problem", "unsupported", "error"]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe's answer. It never raises and takes less than 50 ms."""

    status: ProbeStatus
    reason: str  # one sentence: what was found, or what is missing
    remedy: str = ""  # what the user can do about it
    claims: Claims | None = None  # with "available"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device that a package provides. Yielded by the hook `devices`."""

    name: str  # the value of --device
    probe: Callable[[], ProbeResult]
    factory: str  # "oarlock_cpu.device:CpuDevice", a subclass of backend_api.runtime.Device
    distribution: str  # what pip calls the package
    priority: int = 0  # --device auto takes the highest available; a host CPU has 0; below 0: by name only, auto never takes it
    api_version: tuple[int, int] = (1, 0)
    aliases: tuple[str, ...] = ()
    torch_install: str = ""  # the pip command that brings the torch this device needs
    environment: tuple[tuple[str, str], ...] = ()  # variables the launcher sets, unless set, before torch is imported


@dataclass(frozen=True, slots=True)
class Support:
    """Whether an implementation can serve, and every reason why not."""

    ok: bool
    reasons: tuple[str, ...] = ()


def always(**_: Any) -> Support:
    """The `supports` of an implementation without limits."""
    return Support(True)


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """A namespaced option of a plugin: `--<namespace>-<name>`, and the keyword `<namespace>_<name>` of `LLM(...)`. Without a name: `--<namespace>`.

    Its value, typed or default, is `Device.options["<namespace>_<name>"]` and `config.device.options[...]`.
    """

    namespace: str  # lower-case letters and digits, "sim"
    name: str  # the same, and single dashes: "max-steps"; "": the switch that turns the plugin itself on or off
    type: Literal["str", "int", "float", "bool"]
    default: Any  # of that type; None: unset
    help: str

    @property
    def flag(self) -> str:
        """As it is typed, without the dashes in front."""
        return f"{self.namespace}-{self.name}" if self.name else self.namespace


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A change that a plugin asks for. Applied in order and printed; what the user typed may not be changed."""

    path: str  # a field of the configuration, dotted: "cache.block_size"; not of the model, whose files are read already
    value: Any  # as the field holds it
    reason: str  # completes "because"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something `check_model` found."""

    severity: Literal["error", "warning"]
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Extension:
    """A part that a plugin adds to core. A device package's part counts only where its device was chosen; commands always do.

    What `factory` names, by kind:
        command   function(arguments: list[str]) -> exit code; `oarlock NAME`, where core has no command of that name
        model     module or object with model_spec(summary) and weight_specs(summary, spec), made of the records in
                  `backend_api.runtime.model`; the name is the architecture in config.json
        executor  class that runs steps, made and called as core's own executors; --distributed-executor-backend NAME
        routes    function(server: RouteServer) that adds `Route`s, which have core's checks, limits, errors and metrics
        sink      function(config) -> an observer with observe(steps) and close(), or None to take no part. `steps` is a list of
                  what the engine said after each step (.stats, .step_s, .outputs); called about once a second, off the step path.
                  It may have finished(records): a server's requests that ended since (.request, .metrics, .num_generated_tokens, .finish_reasons, .error)
        structured_output  function(config, vocabulary) -> an object with ask, answers, forget and close, as scheduler.constraints
                  describes them; vocabulary = (import string, argument) of a function that gives every token's bytes, the special ids,
                  the ids that end a text, and a function from text to ids. Called once in the engine's process; raises with the remedy where it cannot serve;
                  --guided-decoding-backend NAME
        tool_parser       subclass of `backend_api.TextParser` that reads calls out of an answer; --tool-call-parser NAME
        reasoning_parser  the same for the model's reasoning; --reasoning-parser NAME
    """

    kind: Literal["command", "model", "executor", "routes", "sink", "structured_output", "tool_parser", "reasoning_parser"]
    name: str
    factory: str  # import string
    priority: int = 0  # core's own parts have 0; a part of the same kind and name replaces those of lower priority
    help: str = ""  # one line for `oarlock --help`; commands only


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """A way to read quantised checkpoints, or to quantise plain ones while they are read. Core's own are gptq and compressed-tensors, int8 and int4."""

    name: str  # a value of --quantization
    factory: str  # subclass of backend_api.runtime.Quantization
    recognises: Callable[[dict[str, Any]], bool]  # given config.json's quantization_config, or what stands in its place; does not raise
    priority: int = 0  # among those that recognise a checkpoint; core's own have 0
    aliases: tuple[str, ...] = ()  # more values of --quantization that mean it
    of_plain: bool = False  # it quantises plain checkpoints, where --quantization names it; the factory gets {"quant_method": name}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """An attention implementation: cache layout, metadata, KV write and paged attention together."""

    name: str
    factory: str  # subclass of backend_api.runtime.Attention
    priority: int = 0
    supports: Callable[..., Support] = always  # supports(kind=, head_dim=, num_heads=, num_kv_heads=, dtype=, block_size=, window=, softcap=)
    kv_dtypes: tuple[str, ...] = ("auto",)  # dtypes of the cache that it serves: "auto" (the model's), "fp8_e4m3", "fp8_e5m2"


@dataclass(frozen=True, slots=True)
class OpImpl:
    """An implementation of one op of the registry."""

    op: str  # registry name
    name: str  # for doctor and logs
    factory: str  # import string of the callable, same signature as the op's reference
    priority: int = 0
    version: int = 1  # of the op's definition
    supports: Callable[..., Support] = always  # supports(dtype=, **the op's static arguments)
    prepare: str | None = None  # import string: pack a weight once at load


@dataclass(frozen=True, slots=True)
class GraphRunnerSpec:
    """How programs are compiled or captured."""

    name: str
    factory: str  # subclass of backend_api.runtime.GraphRunner
    priority: int = 0
    supports: Callable[..., Support] = always


@dataclass(frozen=True, slots=True)
class MemoryProfilerSpec:
    """How the memory of a device is looked at while the largest steps run, so that the plan is measured."""

    name: str
    factory: str  # subclass of backend_api.runtime.MemoryProfiler
    priority: int = 0
    supports: Callable[..., Support] = always  # supports(device=)


@dataclass(frozen=True, slots=True)
class CommunicatorSpec:
    """Collectives between ranks."""

    name: str
    factory: str  # subclass of backend_api.runtime.Communicator, made with (rank, size, init_method: torch.distributed's, unique to the run)
    priority: int = 0
    supports: Callable[..., Support] = always


@dataclass(frozen=True, slots=True)
class ConformanceProfile:
    """What the conformance kit needs to know of a device: loosened limits and expected failures, each with a reason."""

    device: str
    tolerances: tuple[tuple[str, str, float, str], ...] = ()  # (op, dtype, NMSE limit, reason)
    expected_failures: tuple[tuple[str, str], ...] = ()  # (case id pattern, reason); strict
    extra_cases: tuple[str, ...] = ()  # import strings of functions without arguments that give `oarlock.conformance.cases.Case`s
    options: dict[str, Any] = field(default_factory=dict)  # "stands_in": what computes where no hardware does, for the support table
