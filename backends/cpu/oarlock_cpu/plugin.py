"""The light half: says that the cpu is there and which implementations it brings. No torch.

Owns: the `DeviceSpec` and the hook answers of this package.
Reads: `oarlock.backend_api`, `host`.
Never: imports torch or a heavy module of this package.
"""

from __future__ import annotations

import os
from typing import Any

from oarlock.backend_api import AttentionSpec, Claims, DeviceSpec, OpImpl, ProbeResult, Problem, Support, hookimpl

from oarlock_cpu import host

BLOCK_SIZES = (16, 8, 32, 64, 128)  # preferred first
KERNEL_DTYPES = ("float32", "bfloat16")  # what the compiled kernels compute in
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
MAX_HEAD_DIM = 512
INSTRUCTION_SETS = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_fp16", "amx")  # that OARLOCK_CPU_ISA may name
PRIORITY = 10  # above core's references and below a feature plugin that is installed on purpose
CODE_SCHEMES = ("int4", "int8")  # of quantised weights; the references serve the others
LAYER_OPS = ("embedding", "linear", "lm_head", "rms_norm", "fused_add_rms_norm", "layer_norm", "rotary", "silu_and_mul", "gelu_and_mul", "activation")
LOGITS_OPS = ("greedy", "sample", "logprobs", "apply_penalties", "apply_mask")

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
    cap = os.environ.get("OARLOCK_CPU_ISA")
    if cap is not None and cap not in INSTRUCTION_SETS:
        return ProbeResult("error", f"OARLOCK_CPU_ISA={cap} is none of {', '.join(INSTRUCTION_SETS)}; unset it, or take one of those")
    processor = host.read_processor()
    memory = host.memory()
    claims = Claims(
        dtypes=dtype_order(processor)[0],
        block_sizes=BLOCK_SIZES,
        memory_bytes=memory[1] if memory else None,
        host_is_device=True,
        default_swap_bytes=0,
    )
    return ProbeResult("available", f"{processor.name}, {processor.isa}, {host.placement()}", claims=claims)


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
def check_model(model: Any, config: Any, device: DeviceSpec) -> list[Problem]:
    """Workers that share cores are served, and slower than fewer of them."""
    workers, cores = config.parallel.tensor_parallel_size, host.usable_threads()
    if device.name != "cpu" or workers <= cores:
        return []
    text = f"--tensor-parallel-size {workers} on {cores} core{'s' if cores > 1 else ''}: the workers take turns on them"
    return [Problem("warning", text, f"at most {cores} can run at once")]


def kernels_problem() -> str:
    """Why the compiled kernels cannot be used; "" when they can. Imports torch: worker only."""
    from oarlock_cpu import native

    return native.problem()


def _dtype_support(dtype: str, problem: str) -> Support:
    if problem:
        return Support(False, (problem,))
    if dtype.removeprefix("torch.") not in KERNEL_DTYPES:
        return Support(False, (f"the kernels compute in {' and '.join(KERNEL_DTYPES)}, not in {dtype}",))
    return Support(True)


def supports_op(*, dtype: Any, **_: Any) -> Support:
    """Whether the compiled ops serve this dtype."""
    return _dtype_support(str(dtype), kernels_problem())


def supports_logits(**_: Any) -> Support:
    """Whether the compiled ops over logits serve: those are float32 whatever the model's dtype."""
    return _dtype_support("float32", kernels_problem())


def supports_attention(*, dtype: Any, head_dim: int, block_size: int, **_: Any) -> Support:
    """Whether the compiled attention serves these layers."""
    support = _dtype_support(str(dtype), kernels_problem())
    reasons = list(support.reasons)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        reasons.append(f"head_dim {head_dim} exceeds {MAX_HEAD_DIM}")
    if block_size not in BLOCK_SIZES:
        reasons.append(f"block_size {block_size} is none of {', '.join(map(str, sorted(BLOCK_SIZES)))}")
    return Support(not reasons, tuple(reasons))


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    """The compiled attention."""
    if device.torch_device.type != "cpu":
        return []
    return [AttentionSpec(name="cpu", factory="oarlock_cpu.attention:CpuAttention", priority=PRIORITY, supports=supports_attention, kv_dtypes=KV_DTYPES)]


@hookimpl
def kernels(device: Any) -> list[OpImpl]:
    """The compiled ops."""
    if device.torch_device.type != "cpu":
        return []
    names = {op: (f"oarlock_cpu.ops:{op}", supports_op) for op in LAYER_OPS} | {op: (f"oarlock_cpu.ops:{op}", supports_logits) for op in LOGITS_OPS}
    names |= {f"linear_{scheme}": ("oarlock_cpu.codes:linear", supports_op) for scheme in CODE_SCHEMES}
    names |= {op: (f"oarlock_cpu.experts:{op}", supports_op) for op in ("moe_experts", *(f"moe_experts_{scheme}" for scheme in CODE_SCHEMES))}
    names["linear_w8a8"] = ("oarlock_cpu.codes:linear_w8a8", supports_op)
    names["decoder_stack"] = ("oarlock_cpu.stack:decoder_stack", supports_op)
    prepare = {"linear": "oarlock_cpu.ops:pack", "lm_head": "oarlock_cpu.ops:pack_head", "embedding": "oarlock_cpu.ops:share", "moe_experts": "oarlock_cpu.experts:pack", "linear_w8a8": "oarlock_cpu.codes:pack_w8a8"}
    for scheme in CODE_SCHEMES:
        prepare |= {f"linear_{scheme}": f"oarlock_cpu.codes:pack_{scheme}", f"moe_experts_{scheme}": f"oarlock_cpu.experts:pack_{scheme}"}
    return [
        OpImpl(op=op, name="cpu", factory=factory, priority=PRIORITY, supports=supports, prepare=prepare.get(op)) for op, (factory, supports) in names.items()
    ]
