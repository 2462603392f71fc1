"""The entry point: what devices this package simulates and whether the installed torch can carry them. Light: no torch.

Owns: the two device records, their probes and which graph runner goes with which.
Reads: `oarlock.backend_api`.
Never: imports torch while devices are discovered; offers itself to `--device auto` (its priorities are negative).
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from oarlock.backend_api import Claims, ConformanceProfile, DeviceSpec, GraphRunnerSpec, ProbeResult, hookimpl

MEMORY_BYTES = 2 << 30  # simulated size of either device; the device option "memory_bytes" changes it
BLOCK_SIZES = (12, 8, 16, 32)  # 12 first: code that takes a power of two for granted fails on it
SWAP_BYTES = 64 << 20  # small and not zero, so that the host tier is exercised
DTYPES = ("float32", "bfloat16")
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
    return Claims(DTYPES, BLOCK_SIZES, num_devices=2, memory_bytes=MEMORY_BYTES, host_is_device=host_is_device, default_swap_bytes=SWAP_BYTES)


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
def graph_runner(device: Any) -> list[GraphRunnerSpec]:
    """The strict runner for sim-static; sim-eager takes core's eager one."""
    from oarlock_sim.static import SimStaticDevice  # a worker has torch already

    if not isinstance(device, SimStaticDevice):
        return []
    return [GraphRunnerSpec(name="sim-strict", factory="oarlock_sim.static:StrictRunner", priority=10)]


@hookimpl
def conformance() -> list[ConformanceProfile]:
    """Both compute with torch's CPU operators, so the limits are core's own."""
    return [ConformanceProfile(device="sim-eager"), ConformanceProfile(device="sim-static")]
