"""The light half: whether a Neuron device can be used here, and what this package brings for it. No torch.

Owns: the `DeviceSpec`, the probe and the hook answers of this package.
Reads: `oarlock.backend_api`, `host`.
Never: imports torch or a heavy module of this package; calls a simulation a device.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import (
    Claims,
    ConfigChange,
    ConformanceProfile,
    DeviceSpec,
    GraphRunnerSpec,
    OptionSpec,
    ProbeResult,
    Problem,
    hookimpl,
)

from oarlock_neuron import host

DTYPES = ("bfloat16", "float32", "float16")  # preferred first
SIMULATED_DTYPES = ("float32", "bfloat16")
BLOCK_SIZES = (16, 32, 64, 128)
PRIORITY = 50  # with the other accelerators
FEW_SEQS = 16  # --max-num-seqs, unless one was typed: every program is compiled for that many rows
SIMULATED_BYTES = 2 << 30
TORCH_INSTALL = (
    "pip install 'torch==2.13.0' 'torch-neuronx==2.13.*' neuronx-cc --extra-index-url <the Neuron repository; "
    "'Install PyTorch for Neuron' in the Neuron documentation names it>"
)
DRIVER = "install the driver, package aws-neuronx-dkms of the Neuron repository; in a container, start it with --device /dev/neuron0"


def probe() -> ProbeResult:
    """Look for a device node, a chip that TorchNeuron serves, and the vendor's packages: in this order."""
    if host.is_simulated():
        claims = Claims(SIMULATED_DTYPES, BLOCK_SIZES, memory_bytes=SIMULATED_BYTES, host_is_device=True, default_swap_bytes=0)
        return ProbeResult("available", f"simulated on the host, for tests ({host.SIMULATE} is set); takes part only when named", claims=claims)
    nodes, chips = host.nodes(), host.chips()
    if not nodes and not chips:
        problem = host.package_problem()
        also = f"; {problem}" if "placeholder" in problem else ""
        text = f"no Neuron device: there is no /dev/neuron0 and no such chip on the PCI bus{also}"
        return ProbeResult("no_hardware", text, "run on a Trn2 or Trn3 instance")
    if chips and not any(served for *_, served in chips):
        return ProbeResult("unsupported", f"{chips[0][1]} at PCI {chips[0][0]} is older than what TorchNeuron serves", "use Trainium2 or newer")
    if not nodes:
        return ProbeResult("driver_problem", f"{chips[0][1]} at PCI {chips[0][0]} is here, but there is no /dev/neuron0", DRIVER)
    problem = host.package_problem()
    if problem:
        return ProbeResult("unsupported", f"{nodes[0]} is here, but {problem}", TORCH_INSTALL)
    size = next((size for *_, size, served in chips if served), None)
    name = next((name for _, name, _, served in chips if served), "a Neuron device")
    return ProbeResult("available", f"{name}, {nodes[0]}{f' and {len(nodes) - 1} more' if nodes[1:] else ''}", claims=Claims(DTYPES, BLOCK_SIZES, memory_bytes=size))


@hookimpl
def devices() -> list[DeviceSpec]:
    """Neuron devices; under the switch for simulation, one that `--device auto` never takes."""
    return [
        DeviceSpec(
            name="neuron",
            probe=probe,
            factory="oarlock_neuron.device:NeuronDevice",
            distribution="oarlock-neuron",
            priority=-30 if host.is_simulated() else PRIORITY,
            aliases=("trainium",),
            torch_install=TORCH_INSTALL,
        )
    ]


@hookimpl
def options() -> list[OptionSpec]:
    """Where compiled programs are kept."""
    return [OptionSpec("neuron", "cache-dir", "str", None, "Folder of compiled programs; unset: neuron in Oarlock's folder of the user's cache.")]


@hookimpl
def adjust_config(config: Any, device: DeviceSpec) -> list[ConfigChange]:
    """Keep the number of rows small: each program computes all of them in every step."""
    path = "scheduler.max_num_seqs"
    if device.name != "neuron" or path in config.typed or config.scheduler.max_num_seqs <= FEW_SEQS:
        return []
    return [ConfigChange(path, FEW_SEQS, "every program is compiled for that many rows")]


@hookimpl
def check_model(model: Any, config: Any, device: DeviceSpec) -> list[Problem]:
    """One core serves one model for now."""
    ranks = config.parallel.tensor_parallel_size
    if device.name != "neuron" or ranks == 1:
        return []
    text = f"--tensor-parallel-size is {ranks}, and collectives inside compiled programs are not there yet on this device"
    return [Problem("error", text, "use 1")]


@hookimpl
def graph_runner(device: Any) -> list[GraphRunnerSpec]:
    """Every program compiled, and kept on disk."""
    return [GraphRunnerSpec(name="neuron-compile", factory="oarlock_neuron.runner:NeuronRunner", priority=10)]


@hookimpl
def conformance() -> list[ConformanceProfile]:
    """Core's own limits; nothing is loosened, for nothing was ever measured."""
    stands_in = {"stands_in": "a strict compiler on the host, over torch's CPU operators"} if host.is_simulated() else {}
    return [ConformanceProfile(device="neuron", options=stands_in)]
