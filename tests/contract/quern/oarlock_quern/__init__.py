"""What the Quern Q1 is and what it brings. Imported by every command: no torch here.

Owns: the chip's numbers, the records of what this package brings, what each part supports.
Reads: `oarlock.backend_api`.
Never: imports torch; the records name the heavy modules by import strings.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import AttentionSpec, Claims, DeviceSpec, GraphRunnerSpec, OpImpl, ProbeResult, Support, hookimpl

DTYPES = ("float32", "float16")  # preferred first; the chip has no bfloat16
BLOCK_SIZES = (32,)  # one line of its memory
MEMORY_BYTES = 1 << 30
SWAP_BYTES = 256 << 20
PRIORITY = 10


def probe() -> ProbeResult:
    claims = Claims(dtypes=DTYPES, block_sizes=BLOCK_SIZES, memory_bytes=MEMORY_BYTES, default_swap_bytes=SWAP_BYTES)
    return ProbeResult("available", "the simulation of a Quern Q1, on CPU tensors", claims=claims)


def supports_op(*, dtype: str, **_: Any) -> Support:
    return Support(True) if dtype in DTYPES else Support(False, (f"the Quern Q1 computes in {' and '.join(DTYPES)}, not in {dtype}",))


def supports_attention(*, dtype: str, block_size: int, **_: Any) -> Support:
    reasons = list(supports_op(dtype=dtype).reasons)
    if block_size not in BLOCK_SIZES:
        reasons.append(f"blocks of {block_size} tokens are not the {BLOCK_SIZES[0]} of a memory line")
    return Support(not reasons, tuple(reasons))


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="quern",
            probe=probe,
            factory="oarlock_quern.device:Quern",
            distribution="oarlock-quern",
            priority=-1,  # a simulation is taken by its name alone
            torch_install="pip install 'torch>=2.11'",
        )
    ]


@hookimpl
def kernels(device: Any) -> list[OpImpl]:
    ops = "oarlock_quern.ops"
    return [
        OpImpl(op="rms_norm", name="quern", factory=f"{ops}:rms_norm", priority=PRIORITY, supports=supports_op),
        OpImpl(op="fused_add_rms_norm", name="quern", factory=f"{ops}:fused_add_rms_norm", priority=PRIORITY, supports=supports_op),
        OpImpl(op="linear", name="quern", factory=f"{ops}:linear", priority=PRIORITY, supports=supports_op, prepare=f"{ops}:pack"),
    ]


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    return [AttentionSpec(name="quern", factory="oarlock_quern.paged:QuernAttention", priority=PRIORITY, supports=supports_attention)]


@hookimpl
def graph_runner(device: Any) -> list[GraphRunnerSpec]:
    return [GraphRunnerSpec(name="quern", factory="oarlock_quern.programs:Programs", priority=PRIORITY)]
