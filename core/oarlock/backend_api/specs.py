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
    """A namespaced CLI option of a plugin, `--<namespace>-<name>`."""

    namespace: str
    name: str
    type: Literal["str", "int", "float", "bool"]
    default: Any
    help: str


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A change that a plugin asks for. Applied in order and printed; what the user typed may not be changed."""

    path: str  # dotted: "cache.block_size"
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Something `check_model` found."""

    severity: Literal["error", "warning"]
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Extension:
    """A typed part that a plugin adds to core."""

    kind: Literal["model", "load_format", "executor", "structured_output", "tool_parser", "reasoning_parser", "route", "command", "sink"]
    name: str
    factory: str  # import string
    priority: int = 0


@dataclass(frozen=True, slots=True)
class QuantizationMethodSpec:
    """How a quantized checkpoint is recognised; the factory maps its layers to schemes in the worker."""

    name: str
    factory: str
    recognises: Callable[[dict[str, Any]], bool]  # given config.json's quantization_config
    priority: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """An attention implementation: cache layout, metadata, KV write and paged attention together."""

    name: str
    factory: str  # subclass of backend_api.runtime.Attention
    priority: int = 0
    supports: Callable[..., Support] = always  # supports(kind=, head_dim=, num_heads=, num_kv_heads=, dtype=, block_size=, window=, softcap=)


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
class MemoryProfilerSpec:
    """How the worker measures what is free and what a step needs."""

    name: str
    factory: str
    priority: int = 0
    supports: Callable[..., Support] = always


@dataclass(frozen=True, slots=True)
class GraphRunnerSpec:
    """How programs are compiled or captured."""

    name: str
    factory: str  # subclass of backend_api.runtime.GraphRunner
    priority: int = 0
    supports: Callable[..., Support] = always


@dataclass(frozen=True, slots=True)
class CommunicatorSpec:
    """Collectives between ranks."""

    name: str
    factory: str  # subclass of backend_api.runtime.Communicator
    priority: int = 0
    supports: Callable[..., Support] = always


@dataclass(frozen=True, slots=True)
class ConformanceProfile:
    """What the conformance kit needs to know of a device: loosened limits and expected failures, each with a reason."""

    device: str
    tolerances: tuple[tuple[str, str, float, str], ...] = ()  # (op, dtype, NMSE limit, reason)
    expected_failures: tuple[tuple[str, str], ...] = ()  # (case id pattern, reason); strict
    extra_cases: tuple[str, ...] = ()  # import strings
    options: dict[str, Any] = field(default_factory=dict)
