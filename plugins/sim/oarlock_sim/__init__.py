"""The entry point: what devices this package simulates and whether the installed torch can carry them. Light: no torch.

Owns: the two device records, their probes, options and limits, and which graph runner goes with which.
Reads: `oarlock.backend_api`.
Never: imports torch while devices are discovered; offers itself to `--device auto` (its priorities are negative).
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from oarlock.backend_api import (
    Claims,
    CommunicatorSpec,
    ConfigChange,
    ConformanceProfile,
    DeviceSpec,
    Extension,
    GraphRunnerSpec,
    MemoryProfilerSpec,
    OptionSpec,
    ProbeResult,
    Problem,
    hookimpl,
)

MEMORY_GIB = 2.0  # simulated size of either device; --sim-memory changes it
MEMORY_BYTES = int(MEMORY_GIB * 2**30)
NUM_DEVICES = 2
FEW_SEQS = 16  # sim-static's --max-num-seqs, unless one was typed
BLOCK_SIZES = (12, 8, 16, 32)  # 12 first: code that takes a power of two for granted fails on it
SWAP_BYTES = 64 << 20  # small and not zero, so that the host tier is exercised
DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
TORCH_HOOK = "_setup_privateuseone_for_python_backend"


def _torch_folder() -> Path | None:
    """Where torch is installed, found without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def _has_torch_hook(folder: Path) -> bool:
    """Whether this torch lets a device be written in Python; looks into the file, for importing torch takes seconds."""
    source = folder / "utils" / "backend_registration.py"
    return source.is_file() and f"def {TORCH_HOOK}(" in source.read_text(encoding="utf-8")


def _claims(host_is_device: bool) -> Claims:
    return Claims(DTYPES, BLOCK_SIZES, MEMORY_BYTES, host_is_device=host_is_device, default_swap_bytes=SWAP_BYTES, num_devices=NUM_DEVICES)


def probe(needs_hook: bool) -> ProbeResult:
    """Answer for one of the devices; `needs_hook` is true for sim-eager, which alone has memory apart from the host's."""
    folder = _torch_folder()
    if folder is None:
        return ProbeResult("unsupported", "torch is not installed", "pip install torch==2.13.0")
    if needs_hook and not _has_torch_hook(folder):
        reason = f"the installed torch has no torch.utils.backend_registration.{TORCH_HOOK}, which lets a device be written in Python"
        return ProbeResult("unsupported", reason, "pip install torch==2.13.0")
    return ProbeResult("available", "simulated; takes part only when named", claims=_claims(host_is_device=not needs_hook))


@hookimpl
def devices() -> list[DeviceSpec]:
    """Both devices; neither is ever taken by `--device auto`."""
    return [
        DeviceSpec("sim-eager", partial(probe, True), "oarlock_sim.eager:SimEagerDevice", "oarlock-sim", priority=-10),
        DeviceSpec("sim-static", partial(probe, False), "oarlock_sim.static:SimStaticDevice", "oarlock-sim", priority=-20),
    ]


@hookimpl
def options() -> list[OptionSpec]:
    """What a user may set of the simulation."""
    return [
        OptionSpec("sim", "memory", "float", MEMORY_GIB, "Size of the simulated device's memory, in GiB."),
        OptionSpec("sim", "report", "bool", False, "When LLM(...) closes, print what its simulated device saw: copies, host reads, programs."),
    ]


@hookimpl
def extensions() -> list[Extension]:
    """The observer behind --sim-report."""
    return [Extension(kind="sink", name="sim-report", factory="oarlock_sim.report:make")]


@hookimpl
def adjust_config(config: Any, device: DeviceSpec) -> list[ConfigChange]:
    """sim-static runs each program once for the largest batch before it serves: keep that batch small."""
    path = "scheduler.max_num_seqs"
    if device.name != "sim-static" or path in config.typed or config.scheduler.max_num_seqs <= FEW_SEQS:
        return []
    return [ConfigChange(path, FEW_SEQS, "sim-static runs every program for the largest batch at start")]


@hookimpl
def check_model(model: Any, config: Any, device: DeviceSpec) -> list[Problem]:
    """What the simulation has no room for."""
    memory = config.device.options["sim_memory"]
    least = least_weight_bytes(model, config.model.dtype) / config.parallel.tensor_parallel_size / 2**30
    if least <= memory:
        return []
    return [Problem("error", f"its weights take at least {least:.2g} GiB, --sim-memory is {memory:g}", f"give --sim-memory {least * 1.5:.2g} or more")]


def least_weight_bytes(model: Any, dtype: str) -> int:
    """Bytes of the embedding, the attention and one feed-forward of each layer: what every decoder has at least."""
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    values = model.vocab_size * model.hidden_size + model.num_layers * (attention + 2 * model.hidden_size * model.intermediate_size)
    return values * (4 if dtype == "float32" else 2)


@hookimpl
def communicator(device: Any) -> list[CommunicatorSpec]:
    """Collectives that are counted."""
    return [CommunicatorSpec(name="sim-counting", factory="oarlock_sim.collectives:CountingCommunicator", priority=10)]


@hookimpl
def graph_runner(device: Any) -> list[GraphRunnerSpec]:
    """The strict runner for sim-static; sim-eager takes core's eager one."""
    from oarlock_sim.static import SimStaticDevice  # a worker has torch already

    if not isinstance(device, SimStaticDevice):
        return []
    return [GraphRunnerSpec(name="sim-strict", factory="oarlock_sim.static:StrictRunner", priority=10)]


@hookimpl
def memory_profiler(device: Any) -> list[MemoryProfilerSpec]:
    """sim-eager's account; sim-static's memory is the host's, and holds no temporaries."""
    if device.capabilities.host_is_device:
        return []
    return [MemoryProfilerSpec(name="sim", factory="oarlock_sim.memory:SimMemoryProfiler", priority=10)]


@hookimpl
def conformance() -> list[ConformanceProfile]:
    """Both compute with torch's CPU operators, so the limits are core's own."""
    options = {"stands_in": "torch's CPU operators; there is no such hardware"}
    return [ConformanceProfile(device=name, options=options) for name in ("sim-eager", "sim-static")]
