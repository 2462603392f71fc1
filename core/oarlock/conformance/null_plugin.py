"""Registers the null device: no hardware, no tensors, answers that can be worked out on paper. Light: no torch.

Owns: its device record, its executor, a command and a route that say what it will answer.
Reads: `backend_api`; `null_device` when one of them is used.
Never: is chosen by `--device auto`.

    oarlock serve MODEL --device null        # MODEL gives config.json and the tokenizer; its weights are not read
    oarlock null-tokens 5,6,7 --vocab-size 100 --max-tokens 4
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import Claims, ConfigChange, DeviceSpec, Extension, ProbeResult, Problem, hookimpl

NAME = "null"
DTYPES = ("float32", "bfloat16", "float16")  # any: no number is computed
BLOCK_SIZES = (16, 8, 32, 4)
MEMORY_BYTES = 1 << 30  # what the memory plan divides; nothing is allocated


def probe() -> ProbeResult:
    """Always there."""
    claims = Claims(DTYPES, BLOCK_SIZES, memory_bytes=MEMORY_BYTES, host_is_device=True, default_swap_bytes=0)
    return ProbeResult("available", "no hardware: answers are arithmetic on the prompt; takes part only when named", claims=claims)


@hookimpl
def devices() -> list[DeviceSpec]:
    """One device that is never chosen by itself."""
    return [DeviceSpec(NAME, probe, "oarlock.conformance.null_device:NullDevice", "oarlock", priority=-100)]


@hookimpl
def extensions() -> list[Extension]:
    """How it runs steps, and two ways to ask what it answers."""
    return [
        Extension("executor", NAME, "oarlock.conformance.null_device:NullExecutor"),
        Extension("command", "null-tokens", "oarlock.conformance.null_answers:main", help="print the tokens that --device null answers"),
        Extension("routes", "null-tokens", "oarlock.conformance.null_answers:add_route"),
    ]


@hookimpl
def adjust_config(config: Any, device: DeviceSpec) -> list[ConfigChange]:
    """It has no worker that another executor could load."""
    return [ConfigChange("parallel.executor", NAME, "the null device is an executor of its own")] if device.name == NAME else []


@hookimpl
def check_model(model: Any, config: Any, device: DeviceSpec) -> list[Problem]:
    """One rank, and any model: only its sizes and its tokenizer are used."""
    found, ranks, threads = [], config.parallel.tensor_parallel_size, config.device.threads
    if device.name == NAME and ranks > 1:
        found.append(Problem("error", f"it has one rank, --tensor-parallel-size is {ranks}", "use 1"))
    if device.name == NAME and threads is not None:
        found.append(Problem("error", f"it computes nothing, so --threads {threads} would have no effect", "leave it out"))
    return found
