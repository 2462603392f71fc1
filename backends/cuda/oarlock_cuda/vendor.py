"""Every call to torch.cuda, one function each. Signatures as in torch 2.11 to 2.13.

Owns: the knowledge of how torch.cuda spells what a device needs, and what its failures mean.
Reads: torch.cuda.
Never: knows a program or a model. The rest of the package calls these and nothing else of torch.cuda.

Run over a stub in tests; never run on hardware.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from oarlock_cuda.plugin import TORCH_INSTALL

TYPE = "cuda"  # of torch.device; tests put another


def module() -> Any:
    """torch.cuda; tests put a stub."""
    return torch.cuda


def is_built() -> bool:
    """Whether this torch was compiled with CUDA support."""
    return torch.version.cuda is not None


def require(index: int) -> None:
    """Raises RuntimeError, with the remedy, where device `index` cannot be used."""
    if not is_built():
        raise RuntimeError(f"torch {torch.__version__} has no CUDA support. Install one that has: {TORCH_INSTALL}")
    count = module().device_count()
    if not count:
        raise RuntimeError(
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU though the driver knows one: see what "
            "`python -c 'import torch; torch.cuda.init()'` says, and look at CUDA_VISIBLE_DEVICES"
        )
    if index >= count:
        raise RuntimeError(f"device {TYPE}:{index} does not exist: torch.cuda finds {count}; lower --tensor-parallel-size to {count}")


def device(index: int) -> torch.device:
    return torch.device(TYPE, index)


def activate(index: int) -> None:
    module().set_device(index)


def exact_sums() -> None:
    """cuBLAS adds up in float32 also where it splits a sum: the ops' definition rounds once."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def synchronise(index: int) -> None:
    module().synchronize(index)


def capability(index: int) -> tuple[int, int]:
    """Compute capability, (9, 0)."""
    major, minor = module().get_device_capability(index)
    return int(major), int(minor)


def built_for() -> list[str]:
    """Architectures that this torch has kernels for, "sm_90"."""
    return list(module().get_arch_list())


def describe(index: int) -> str:
    found = module().get_device_properties(index)
    return f"{found.name}, {found.total_memory >> 20} MiB, sm_{found.major}{found.minor}, torch {torch.__version__}"


def collectives() -> tuple[str, ...]:
    """What torch.distributed can use between GPUs."""
    return ("nccl",) if torch.distributed.is_available() and torch.distributed.is_nccl_available() else ()


# ---------------------------------------------------------------- memory
def memory(index: int) -> tuple[int, int]:
    """(free, total) bytes. What torch's allocator keeps for its next use is free."""
    cuda = module()
    free, total = cuda.mem_get_info(index)
    return min(free + cuda.memory_reserved(index) - cuda.memory_allocated(index), total), total


def taken(index: int) -> int:
    """Bytes that anybody has taken, as the driver says."""
    free, total = module().mem_get_info(index)
    return int(total - free)


def peak_reserved(index: int) -> int:
    """The most bytes that torch's allocator had taken from the driver since `restart_peak`."""
    return int(module().max_memory_reserved(index))


def restart_peak(index: int) -> None:
    module().reset_peak_memory_stats(index)


def release() -> None:
    """Give back to the driver what the allocator keeps."""
    module().empty_cache()


def pinned(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the same shape in pinned host memory.

    torch keeps such memory for its next use, and not before the copies that were begun on it have ended: whoever began one need not wait.
    """
    return torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format, pin_memory=TYPE == "cuda")


def when_done() -> Callable[[], None]:
    """A wait for all that was launched so far on the current stream."""
    event = module().Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


# ---------------------------------------------------------------- graphs
def new_graph() -> Any:
    """An empty graph, with `replay()`."""
    return module().CUDAGraph()


def graph_pool() -> Any:
    """Memory that all graphs share: they run one after another."""
    return module().graph_pool_handle()


def capture(graph: Any, pool: Any) -> contextlib.AbstractContextManager[Any]:
    """What this thread launches inside is recorded, not run. Other threads (NCCL's watchdog) may ask the driver meanwhile."""
    context: contextlib.AbstractContextManager[Any] = module().graph(graph, pool=pool, capture_error_mode="thread_local")
    return context
