"""Every call to torch.xpu, one function each. Signatures as in torch 2.13's torch/xpu (memory, graphs, random, streams).

Owns: the knowledge of how torch.xpu spells what a device needs, and what its failures mean.
Reads: torch.xpu.
Never: knows a program or a model. The rest of the package calls these and nothing else of torch.xpu.

Run over a stub in tests; never run on hardware.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from oarlock_xpu.plugin import TORCH_INSTALL

TYPE = "xpu"  # of torch.device; tests put another


def module() -> Any:
    """torch.xpu; tests put a stub."""
    return torch.xpu


def is_built() -> bool:
    """Whether this torch was compiled with XPU support."""
    return getattr(torch.version, "xpu", None) is not None


def require(index: int) -> None:
    """Raises RuntimeError, with the remedy, where device `index` cannot be used."""
    if not is_built():
        raise RuntimeError(f"torch {torch.__version__} has no XPU support. Install one that has: {TORCH_INSTALL}")
    count = module().device_count()
    if not count:
        raise RuntimeError(
            "torch.xpu finds no device though the kernel knows one: install Intel's compute runtime (packages intel-opencl-icd and "
            "libze-intel-gpu1 of the distribution, or of Intel's graphics repository), and look at ONEAPI_DEVICE_SELECTOR and ZE_AFFINITY_MASK"
        )
    if index >= count:
        raise RuntimeError(f"device {TYPE}:{index} does not exist: torch.xpu finds {count}; lower --tensor-parallel-size to {count}")


def device(index: int) -> torch.device:
    return torch.device(TYPE, index)


def activate(index: int) -> None:
    module().set_device(index)


def synchronise(index: int) -> None:
    module().synchronize(index)


def seed(value: int) -> None:
    """The current device's generator."""
    module().manual_seed(value)


def memory(index: int) -> tuple[int, int]:
    """(free, total) bytes.

    The driver's figure, and never more than what this process has left: some drivers do not count allocations (pytorch issue 161381).

    Raises:
        NotImplementedError: the driver cannot tell, as on GPUs inside a processor.
    """
    xpu = module()
    try:
        free, total = xpu.mem_get_info(index)
    except RuntimeError as error:
        raise NotImplementedError(str(error)) from error
    return min(free, total - xpu.memory_reserved(index)), total


def describe(index: int) -> str:
    found = module().get_device_properties(index)
    return f"{found.name}, {found.total_memory >> 20} MiB, driver {found.driver_version}, torch {torch.__version__}"


def collectives() -> tuple[str, ...]:
    """What torch.distributed can use between cards."""
    return ("xccl",) if torch.distributed.is_available() and torch.distributed.is_xccl_available() else ()


def can_pin() -> bool:
    """Whether host memory can be pinned for this device."""
    return TYPE == "xpu" and module().is_available()


def has_triton() -> bool:
    """Whether a Triton that compiles for these GPUs is installed. The one on the usual index does not; torch's build for XPU brings its own."""
    try:
        from triton.backends import backends
    except ImportError:
        return False
    return "intel" in backends


# ---------------------------------------------------------------- graphs
def graph_problem(index: int) -> str:
    """Why programs cannot be captured; "" when a tiny one was, and replayed rightly.

    The classes exist in every build since torch 2.11; whether driver and card record command graphs shows only when it is tried.
    """
    xpu = module()
    missing = [name for name in ("XPUGraph", "graph", "graph_pool_handle") if not hasattr(xpu, name)]
    if missing:
        return f"torch {torch.__version__} has no torch.xpu.{missing[0]}"
    try:
        x = torch.ones(4, device=device(index))
        x + x  # what is captured must have run once
        synchronise(index)
        made = new_graph()
        with capture(made, None):
            y = x + x
        x.fill_(3)
        made.replay()
        total = float(y.sum())
    except Exception as error:  # noqa: BLE001  whatever the driver says becomes the reason for eager execution
        return f"capturing a program failed: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
    return "" if total == 24.0 else f"a captured program computed {total} instead of 24"


def new_graph() -> Any:
    """An empty graph, with `replay()`."""
    return module().XPUGraph()


def graph_pool() -> Any:
    """Memory that all graphs share: they run one after another."""
    return module().graph_pool_handle()


def capture(graph: Any, pool: Any) -> contextlib.AbstractContextManager[Any]:
    """What is launched inside is recorded, not run."""
    context: contextlib.AbstractContextManager[Any] = module().graph(graph, pool=pool)
    return context


