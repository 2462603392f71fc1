"""Every call to the vendor's packages, one function each.

Owns: how TorchNeuron spells what a device and a compiler need.
Reads: torch.neuron (made by torch_neuronx 2.13), torch.compile with its backend "neuron", torch.compiler's cache artifacts.
Never: knows a program or a model. The rest of the package calls these and nothing else of the vendor's.

Signatures after the vendor's documentation of Neuron 2.33 (torch.compile backend reference, environment variables) and the
Python source of torch_neuronx. Run over a stub in tests; never run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch.compiler._cache import CacheArtifactManager

from oarlock_neuron.host import PACKAGES, package_problem
from oarlock_neuron.plugin import TORCH_INSTALL

TYPE = "neuron"  # of torch.device
ARTIFACT = "neuron_neff"  # what torch_neuronx calls a compiled program among torch's cache artifacts


def module() -> Any:
    """torch.neuron, which importing torch_neuronx makes; torch does that by itself. None without it. Tests put a stub."""
    return getattr(torch, "neuron", None)


def require(index: int) -> None:
    """Raises RuntimeError, with the remedy, where core `index` cannot be used."""
    problem = package_problem() or ("" if hasattr(module(), "device_count") else f"torch {torch.__version__} did not load torch_neuronx")
    if problem:
        raise RuntimeError(f"{problem}. Install: {TORCH_INSTALL}")
    count = module().device_count()
    if index >= count:
        raise RuntimeError(f"core {TYPE}:{index} does not exist: torch.neuron finds {count}; look at NEURON_RT_VISIBLE_CORES, and whether another process holds them")


def device(index: int) -> torch.device:
    return torch.device(TYPE, index)


def activate(index: int) -> None:
    module().set_device(index)


def synchronise(index: int) -> None:
    module().synchronize(index)


def seed(value: int) -> None:
    """The current core's generator."""
    module().manual_seed(value)


def memory(index: int) -> tuple[int, int]:
    """(free, total) bytes of a core. A core belongs to one process, so what this process does not hold is free."""
    total = module().get_device_properties(index).total_memory
    return total - module().memory_allocated(index), total


def describe(index: int) -> str:
    found = module().get_device_properties(index)
    return f"{found.name}, {found.total_memory >> 20} MiB, {versions()}"


def versions() -> str:
    """Everything of others that a compiled program depends on."""
    return ", ".join([f"torch {torch.__version__}", *(f"{name} {metadata.version(name)}" for name in PACKAGES)])


# ---------------------------------------------------------------- programs
def compile_program(fn: Callable[..., Any], example: tuple[Any, ...]) -> tuple[Callable[..., Any], bytes]:
    """(callable, artifact). Compiles now, by a call on the example, which `fn` may write to.

    `dynamic=True` is refused by this backend, and a graph break would leave parts uncompiled: hence the two arguments.

    Raises:
        RuntimeError: nothing came out that could be kept, so nothing was compiled.
    """
    compiled = torch.compile(fn, backend="neuron", dynamic=False, fullgraph=True)
    with CacheArtifactManager.with_fresh_cache():
        compiled(*example)
        synchronise(next((value.device.index for value in example if isinstance(value, torch.Tensor)), None) or 0)  # compilation is asynchronous
        saved = torch.compiler.save_cache_artifacts()
    if saved is None or ARTIFACT not in saved[1].artifacts:
        raise RuntimeError("torch.compile(backend='neuron') left no compiled program; TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION=1 shows why")
    return compiled, saved[0]


def load_program(fn: Callable[..., Any], artifact: bytes) -> Callable[..., Any]:
    """The callable of an artifact: it is put into the vendor's cache, where the first call finds it.

    Raises:
        RuntimeError: another torch or compiler made it.
    """
    found = torch.compiler.load_cache_artifacts(artifact)
    if found is None or ARTIFACT not in found.artifacts:
        raise RuntimeError("the kept program cannot be read by this torch")
    compiled: Callable[..., Any] = torch.compile(fn, backend="neuron", dynamic=False, fullgraph=True)
    return compiled
