"""The light half: whether a TPU can be used here, and what this package brings for it. No torch, no jax.

Owns: the `DeviceSpec`, the probe, the options and the hook answers of this package.
Reads: `oarlock.backend_api`, `host`.
Never: imports torch, jax or a heavy module of this package.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import (
    AttentionSpec,
    Claims,
    ConfigChange,
    ConformanceProfile,
    DeviceSpec,
    GraphRunnerSpec,
    OpImpl,
    OptionSpec,
    ProbeResult,
    Problem,
    hookimpl,
)

from oarlock_tpu import host

DTYPES = ("bfloat16", "float32")  # preferred first; the chips multiply no float16
BLOCK_SIZES = (32, 16, 64, 128)  # whole tiles of 16 rows in bfloat16
FEW_SEQS = 32  # --max-num-seqs, unless one was typed: every size of batch is a program
PRIORITY, SIMULATED_PRIORITY = 50, -30
INSTALL = "pip install torch==2.13.0 torchax==0.0.13 jax libtpu"


def probe() -> ProbeResult:
    """Look for chips, for the right to open them, and for the packages that drive them: in this order."""
    if host.is_simulated():
        return _simulated()
    found, nodes = host.chips(), host.nodes()
    if not found:
        told = host.announced()
        hint = f"; the environment announces {told}, but no chip is on the PCI bus" if told else ""
        return ProbeResult("no_hardware", f"no TPU is on the PCI bus{hint}", f"{host.ON_HOST}=1 runs its programs on JAX's CPU, to try them")
    what = f"TPU {found[0].name}, {len(found)} chip{'s' if len(found) > 1 else ''}"
    if not nodes:
        remedy = "in a container, start it with --privileged or with --device for each of /dev/accel* or /dev/vfio/*"
        return ProbeResult("driver_problem", f"{what}, but neither /dev/accel* nor /dev/vfio/* is there", remedy)
    if not host.openable(nodes):
        return ProbeResult("driver_problem", f"{what}, but this user may not open {', '.join(nodes)}", "run as a user who may, or start with sudo")
    lacking = host.missing()
    if lacking:
        return ProbeResult("unsupported", f"{what}, but {', '.join(lacking)} is not installed", INSTALL)
    claims = Claims(DTYPES, BLOCK_SIZES, memory_bytes=len(found) * found[0].memory_gib << 30)
    return ProbeResult("available", what, claims=claims)


def _simulated() -> ProbeResult:
    lacking = host.missing(tuple(name for name in host.NEEDED if name != "libtpu"))
    if lacking:
        return ProbeResult("unsupported", f"{host.ON_HOST} is set, but {', '.join(lacking)} is not installed", INSTALL)
    claims = Claims(DTYPES, BLOCK_SIZES, host_is_device=True, default_swap_bytes=0)
    return ProbeResult("available", "simulated on JAX's CPU; takes part only when named", claims=claims)


@hookimpl
def devices() -> list[DeviceSpec]:
    """TPUs, or their stand-in on the host, which `--device auto` never takes."""
    simulated = host.is_simulated()
    return [
        DeviceSpec(
            name="tpu",
            probe=probe,
            factory="oarlock_tpu.device:TpuDevice",
            distribution="oarlock-tpu",
            priority=SIMULATED_PRIORITY if simulated else PRIORITY,
            torch_install=INSTALL,
            environment=host.environment(),
        )
    ]


@hookimpl
def options() -> list[OptionSpec]:
    """What a user may set of a worker."""
    return [
        OptionSpec("tpu", "chips", "int", 1, "Chips that the worker drives together; weights and KV heads are divided over them."),
        OptionSpec("tpu", "compile-cache", "str", None, "Folder that keeps compiled programs, so that the next start compiles nothing."),
    ]


@hookimpl
def adjust_config(config: Any, device: DeviceSpec) -> list[ConfigChange]:
    """Every program is compiled for a largest batch: keep that moderate unless the user says otherwise."""
    path = "scheduler.max_num_seqs"
    if device.name != "tpu" or path in config.typed or config.scheduler.max_num_seqs <= FEW_SEQS:
        return []
    return [ConfigChange(path, FEW_SEQS, "programs are compiled for whole batches")]


@hookimpl
def check_model(model: Any, config: Any, device: DeviceSpec) -> list[Problem]:
    """One worker drives all chips, and each chip holds whole KV heads."""
    if device.name != "tpu":
        return []
    found, ranks, chips = [], config.parallel.tensor_parallel_size, config.device.options["tpu_chips"]
    if ranks > 1:
        found.append(Problem("error", f"--tensor-parallel-size is {ranks}, but one worker drives all chips", f"use --tpu-chips {ranks}"))
    if chips < 1 or model.num_kv_heads % chips or model.num_heads % chips:
        sizes = [str(n) for n in range(1, model.num_kv_heads + 1) if not model.num_kv_heads % n and not model.num_heads % n]
        text = f"--tpu-chips {chips} does not divide {model.num_heads} heads over {model.num_kv_heads} KV heads"
        found.append(Problem("error", text, f"sizes that work: {', '.join(sizes)}"))
    return found


@hookimpl
def graph_runner(device: Any) -> list[GraphRunnerSpec]:
    """Programs are compiled ahead of time by XLA; for a machine that is only described, they stay there."""
    from oarlock_tpu.abstract import AbstractTpu  # a worker has torch and jax already

    factory = "oarlock_tpu.abstract:AbstractRunner" if isinstance(device, AbstractTpu) else "oarlock_tpu.runner:XlaRunner"
    return [GraphRunnerSpec(name="xla", factory=factory, priority=10)]


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    """One kernel for every head size, window and soft cap."""
    return [AttentionSpec(name="pallas", factory="oarlock_tpu.attention:TpuAttention", priority=10)]


@hookimpl
def kernels(device: Any) -> list[OpImpl]:
    """Where the plain-torch reference cannot be traced, or says less than XLA can use."""
    return [
        OpImpl(op="as_float", name="xla", factory="oarlock_tpu.ops:as_float", priority=10),
        OpImpl(op="decoder_stack", name="scan", factory="oarlock_tpu.stack:scanned", priority=10, prepare="oarlock_tpu.stack:pack"),
        OpImpl(op="sample", name="sortless", factory="oarlock_tpu.sampling:sample", priority=10),
        OpImpl(op="lm_head", name="xla", factory="oarlock_tpu.ops:lm_head", priority=10),
    ]


@hookimpl
def conformance() -> list[ConformanceProfile]:
    """Core's own limits. JAX computes without 64-bit integers, and core's programs need none."""
    return [
        ConformanceProfile(
            device="tpu",
            options={"stands_in": "JAX's CPU, kernels interpreted"} if host.is_simulated() else {},
            expected_failures=(("device[copies,int64]", "the chip has no 64-bit integers: what does not fit 32 bits is refused"),),
        )
    ]


