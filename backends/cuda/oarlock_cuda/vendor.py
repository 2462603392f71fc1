"""Every call to torch.cuda and to torch's symmetric memory, one function each. Signatures as in torch 2.11 to 2.13.

Owns: the knowledge of how torch.cuda spells what a device needs, and what its failures mean.
Reads: torch.cuda, torch.distributed._symmetric_memory, torch.ops.symm_mem.
Never: knows a program or a model. The rest of the package calls these and nothing else of torch.cuda.

Run over a stub in tests; never run on hardware.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from oarlock_cuda.plugin import TORCH_INSTALL

TYPE = "cuda"  # of torch.device; tests put another
BACKEND = "nccl"  # of torch.distributed; tests put another


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


def has_triton() -> bool:
    """Whether Triton is installed with its driver for NVIDIA GPUs."""
    if TYPE != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return importlib.util.find_spec("triton.backends.nvidia") is not None


def collectives() -> tuple[str, ...]:
    """What torch.distributed can use between GPUs."""
    return (BACKEND,) if torch.distributed.is_available() and torch.distributed.is_nccl_available() else ()


def compile_problem() -> str:
    """Why Triton, which is installed, cannot launch kernels on the current GPU; "" where it can. The first time, it compiles a little C."""
    from triton.runtime import driver

    try:
        driver.active.utils.get_device_properties(driver.active.get_current_device())
    except (Exception, SystemExit) as error:  # noqa: BLE001  a compiler, its headers, a folder to write to, the driver: whatever fails, a sentence says so
        return f"{type(error).__name__}: {error}"
    return ""


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


@contextlib.contextmanager
def capture(graph: Any, pool: Any) -> Iterator[None]:
    """What this thread launches inside is recorded, not run. Other threads (NCCL's watchdog) may ask the driver meanwhile."""
    stream = module().current_stream()
    try:
        with module().graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except BaseException:
        module().set_stream(stream)  # torch leaves the recording's own stream current where it cannot end it
        raise


# ---------------------------------------------------------------- memory that several GPUs read
def symmetric_problem(ranks: int) -> str:
    """Why GPUs 0 .. ranks - 1 cannot read each other's memory directly; "" when they can."""
    cuda = module()
    if cuda.device_count() < ranks:
        return f"torch.cuda finds {cuda.device_count()} GPUs"
    missing = [name for name in ("one_shot_all_reduce_copy", "two_shot_all_reduce_out") if not hasattr(torch.ops.symm_mem, name)]
    if missing:
        return f"torch {torch.__version__} has no torch.ops.symm_mem.{missing[0]}"
    apart = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and not cuda.can_device_access_peer(a, b)]
    return f"GPU {apart[0][0]} cannot read the memory of GPU {apart[0][1]}" if apart else ""


def symmetric_buffer(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes that all ranks of the default group can read; every rank must call it. [size] uint8."""
    from torch.distributed import _symmetric_memory

    buffer = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    _symmetric_memory.rendezvous(buffer, _group())
    return buffer


def one_shot(shared: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's `tensor`, which goes through `shared`, a part of the buffer of the same shape."""
    found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, tensor, "sum", _group())
    return found


def two_shots(shared: torch.Tensor) -> torch.Tensor:
    """The sum of what every rank has put into `shared`."""
    found: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", _group(), torch.empty_like(shared))
    return found


def _group() -> str:
    name: str = torch.distributed.group.WORLD.group_name
    return name
