"""The light half: whether an NVIDIA GPU can be used here, and what this package brings for it. No torch.

Owns: the `DeviceSpec`, the probe and the hook answers of this package.
Reads: `oarlock.backend_api`, `nvml`, `host`.
Never: imports torch or a heavy module of this package; brings a kernel.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from oarlock.backend_api import (
    Claims,
    CommunicatorSpec,
    ConfigChange,
    ConformanceProfile,
    DeviceSpec,
    GraphRunnerSpec,
    MemoryProfilerSpec,
    ProbeResult,
    Problem,
    Support,
    hookimpl,
)

from oarlock_cuda import host, nvml

BLOCK_SIZES = (16, 32, 64, 128, 8)
PRIORITY = 50  # with the other accelerators; two of them in one machine ask for --device
OLDEST = (7, 5)  # the oldest that torch's builds serve
HALF, FP8_E5M2, FP8 = (8, 0), (8, 0), (8, 9)  # what computes in bfloat16, and converts the 8-bit floats, in hardware
# What the usual index has for Linux is built for CUDA; one built for the CPU alone counts as installed already, so it must be replaced.
TORCH_INSTALL = "pip install --force-reinstall torch==2.13.0"
DRIVERS = {12: "525", 13: "580"}  # the first driver of each CUDA, which serves its minor versions too
KERNELS = ("oarlock-triton-kernels", "oarlock_triton_kernels")  # distribution and package
_GIB = 1 << 30


def dtypes(capability: tuple[int, int]) -> tuple[str, ...]:
    """Preferred first."""
    return ("bfloat16", "float16", "float32") if capability >= HALF else ("float16", "float32")


def has_kernels() -> bool:
    """Whether the Triton kernels are installed."""
    return importlib.util.find_spec(KERNELS[1]) is not None


def kv_dtypes(capability: tuple[int, int]) -> tuple[str, ...]:
    """Caches of 8-bit floats where the chip converts them itself."""
    e4m3 = ("fp8_e4m3",) if capability >= FP8 else ()
    return ("auto", *e4m3, *(("fp8_e5m2",) if capability >= FP8_E5M2 else ()))


def probe() -> ProbeResult:
    """Look for the driver, a GPU that may be used, and a torch that this driver and this GPU serve: in this order."""
    seen, library = host.hardware(), nvml.load()
    if library is None:
        if not seen:
            return ProbeResult("no_hardware", "no NVIDIA GPU and no driver of one are here", "run on a machine with one; in a container, start it with --gpus all")
        return ProbeResult("driver_problem", f"an NVIDIA GPU is here ({seen}), its driver is not", "install NVIDIA's driver; in a container, start it with --gpus all")
    try:
        driver = nvml.ask(library)
    except nvml.NvmlError as error:
        return _driver_problem(error, seen)
    except AttributeError as error:  # the library lacks a function
        return ProbeResult("driver_problem", f"NVIDIA's driver is older than R450: {error}", f"install driver {DRIVERS[12]} or newer")
    if not driver.boards:
        if seen:
            return ProbeResult("driver_problem", f"an NVIDIA GPU is here ({seen}), but driver {driver.version} serves none", "see what `nvidia-smi` and `dmesg` say")
        return ProbeResult("no_hardware", f"NVIDIA's driver {driver.version} is installed, but there is no GPU", "run on a machine with one")
    gpus, problem = host.usable(driver.boards)
    if problem:
        remedy = f"unset {host.VISIBLE}, or name one of {', '.join(_names(driver))}" if host.VISIBLE in problem else "make one: sudo nvidia-smi mig -cgi 0 -C; or leave the mode: sudo nvidia-smi -mig 0"
        return ProbeResult("unsupported", f"{driver.boards[0].gpu.name}: {problem}", remedy)
    return _with_torch(driver, gpus)


def _names(driver: nvml.Driver) -> list[str]:
    return [gpu.uuid for board in driver.boards for gpu in (board.instances if board.is_cut else (board.gpu,))]


def _driver_problem(error: nvml.NvmlError, seen: str) -> ProbeResult:
    if error.code == nvml.DRIVER_NOT_LOADED:
        if not seen:
            return ProbeResult("no_hardware", "NVIDIA's driver is installed, but there is no GPU", "run on a machine with one")
        return ProbeResult("driver_problem", f"an NVIDIA GPU is here ({seen}), but its kernel driver is not loaded", "load it: sudo modprobe nvidia")
    if error.code == nvml.VERSION_MISMATCH:
        return ProbeResult("driver_problem", "NVIDIA's driver was upgraded and the old one still runs in the kernel", "restart the machine")
    return ProbeResult("driver_problem", f"NVIDIA's driver does not answer: {error}", "see what `nvidia-smi` says")


def _with_torch(driver: nvml.Driver, gpus: list[nvml.Gpu]) -> ProbeResult:
    """The answer for GPUs that CUDA shows."""
    best = max(gpus, key=lambda gpu: gpu.capability)
    name = f"{best.name}, {best.memory_bytes / _GIB:.0f} GiB"
    if best.capability < OLDEST:
        reason = f"{best.name} has compute capability {_dotted(best.capability)}, torch serves {_dotted(OLDEST)} and newer"
        return ProbeResult("unsupported", reason, "use another device")
    version, built = host.torch_cuda()
    if built is None:
        found = f"the installed torch {version} has no CUDA support" if version else "torch is not installed"
        return ProbeResult("unsupported", f"{name} is here, but {found}", TORCH_INSTALL)
    if driver.cuda[0] < built[0]:
        reason = f"{name}: driver {driver.version} serves CUDA {_dotted(driver.cuda)}, the installed torch {version} needs {_dotted(built)}"
        newest = DRIVERS.get(built[0], f"for CUDA {built[0]}")
        return ProbeResult("driver_problem", reason, f"upgrade the driver to {newest} or newer, or install a torch built for CUDA {driver.cuda[0]}")
    more = f", {len(gpus)} GPUs" if len(gpus) > 1 else ""
    claims = Claims(dtypes(best.capability), BLOCK_SIZES, max(gpu.memory_bytes for gpu in gpus), num_devices=len(gpus))
    return ProbeResult("available", f"{name}, driver {driver.version}{more}", claims=claims)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@hookimpl
def devices() -> list[DeviceSpec]:
    """NVIDIA GPUs."""
    return [
        DeviceSpec(
            name="cuda",
            probe=probe,
            factory="oarlock_cuda.device:CudaDevice",
            distribution="oarlock-cuda",
            priority=PRIORITY,
            api_version=(1, 1),
            aliases=("nvidia",),
            torch_install=TORCH_INSTALL,
        )
    ]


@hookimpl
def adjust_config(config: Any, device: DeviceSpec) -> list[ConfigChange]:
    """The next step is launched while one runs, unless the user said otherwise."""
    path = "scheduler.max_in_flight"
    if path in config.typed or config.scheduler.max_in_flight == 2:
        return []
    return [ConfigChange(path, 2, "a GPU must not wait for Python between two steps")]


@hookimpl
def check_model(model: Any, config: Any, device: DeviceSpec) -> list[Problem]:
    """Without kernels everything is right, and slow: that must not go unsaid."""
    missing = [name for name, package in (KERNELS, ("triton", "triton")) if importlib.util.find_spec(package) is None]
    if not missing:
        return []
    remedy = "pip install ./plugins/triton_kernels, in a checkout of Oarlock" if missing[0] != "triton" else "pip install triton, in the version that the installed torch requires"
    return [Problem("warning", f"{' and '.join(missing)} not installed: attention and ops are plain torch, many times slower", remedy)]


@hookimpl
def graph_runner(device: Any) -> list[GraphRunnerSpec]:
    """Capture and replay of decodes."""
    return [GraphRunnerSpec(name="cuda-graph", factory="oarlock_cuda.capture:CudaGraphRunner", priority=10)]


@hookimpl
def communicator(device: Any) -> list[CommunicatorSpec]:
    """Small all-reduces without NCCL, where GPUs read each other's memory; --disable-custom-all-reduce leaves it out."""
    return [CommunicatorSpec(name="cuda-symmetric", factory="oarlock_cuda.collectives:SymmetricCommunicator", priority=10, supports=_peers_allow)]


def _peers_allow(device: Any, **_: Any) -> Support:
    from oarlock_cuda import collectives  # a worker has torch already

    return collectives.supports(device)


@hookimpl
def memory_profiler(device: Any) -> list[MemoryProfilerSpec]:
    """What steps, graphs and libraries take, measured before the cache is allocated."""
    return [MemoryProfilerSpec(name="cuda", factory="oarlock_cuda.memory:CudaMemoryProfiler", priority=10)]


@hookimpl
def conformance() -> list[ConformanceProfile]:
    """Core's own limits; nothing is loosened, for nothing was ever measured."""
    return [ConformanceProfile(device="cuda")]
