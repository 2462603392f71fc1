"""The light half: says that the cpu is there and which implementations it brings. No torch.

Owns: the `DeviceSpec` and the hook answers of this package.
Reads: `oarlock.backend_api`, `host`.
Never: imports torch or a heavy module of this package.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import AttentionSpec, Claims, DeviceSpec, OpImpl, ProbeResult, hookimpl
from oarlock_cpu import host

BLOCK_SIZES = (16, 8, 32, 64, 128)  # preferred first

# Read by the OpenMP runtime when torch is imported. A team that spins while it waits takes the core that the API process
# needs: operations of 0.2 ms then take 5 ms. The first is libgomp's (Linux wheels), the second that of LLVM and Intel.
ENVIRONMENT = (("GOMP_SPINCOUNT", "0"), ("KMP_BLOCKTIME", "0"))


def dtype_order(processor: host.Processor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(dtypes preferred first, those of them that are fast). float16 runs without vector products on most processors."""
    if processor.has_bf16:
        return ("bfloat16", "float32", "float16"), ("bfloat16", "float32")
    return ("float32", "bfloat16", "float16"), ("float32",)


def probe() -> ProbeResult:
    """The host's processor is always there."""
    processor = host.read_processor()
    memory = host.memory()
    threads = host.usable_threads()
    claims = Claims(
        dtypes=dtype_order(processor)[0],
        block_sizes=BLOCK_SIZES,
        memory_bytes=memory[1] if memory else None,
        host_is_device=True,
        default_swap_bytes=0,
    )
    return ProbeResult("available", f"{processor.name}, {processor.isa}, {threads} thread{'s' if threads > 1 else ''}", claims=claims)


@hookimpl
def devices() -> list[DeviceSpec]:
    """One device, of the lowest priority that is chosen by itself."""
    return [
        DeviceSpec(
            name="cpu",
            probe=probe,
            factory="oarlock_cpu.device:CpuDevice",
            distribution="oarlock-cpu",
            priority=0,
            torch_install="pip install 'torch>=2.11'",
            environment=ENVIRONMENT,
        )
    ]


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    """None yet: the reference serves."""
    return []


@hookimpl
def kernels(device: Any) -> list[OpImpl]:
    """None yet: the references serve."""
    return []
