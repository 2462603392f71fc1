"""The light half: whether an Intel GPU can be used here, and what this package brings for it. No torch.

Owns: the `DeviceSpec`, the probe and the hook answers of this package.
Reads: `oarlock.backend_api`, `host`.
Never: imports torch or a heavy module of this package.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import Claims, ConformanceProfile, DeviceSpec, GraphRunnerSpec, ProbeResult, hookimpl

from oarlock_xpu import host

DTYPES = ("bfloat16", "float16", "float32")  # preferred first
BLOCK_SIZES = (16, 32, 64, 128, 8)
PRIORITY = 50  # with the other accelerators; two of them in one machine ask for --device
TORCH_INSTALL = "pip install 'torch==2.13.0+xpu' --index-url <PyTorch's index for XPU; the selector at pytorch.org/get-started prints it>"


def probe() -> ProbeResult:
    """Look for a card, its kernel driver, the right to open it, and a torch that can drive it: in this order."""
    found = host.cards()
    if not found:
        old = host.cards(include_too_old=True)
        if old:
            return ProbeResult("unsupported", f"{old[0].name} at PCI {old[0].address} is older than what torch.xpu serves", "use another device")
        return ProbeResult("no_hardware", "no Intel GPU with memory of its own is on the PCI bus", "run on a machine with an Arc, Flex or Max card")
    what = f"{found[0].name} at PCI {found[0].address}"
    bound = [card for card in found if card.driver]
    if not bound:
        return ProbeResult("driver_problem", f"{what} has no kernel driver", "load it: sudo modprobe xe (or i915, on kernels before 6.8)")
    openable = [card for card in bound if card.is_openable()]
    if not openable:
        nodes = ", ".join(f"/dev/dri/{node}" for card in bound for node in card.nodes)
        if not nodes or not any((host.ROOT / node.lstrip("/")).exists() for node in nodes.split(", ")):
            return ProbeResult("driver_problem", f"{what} has no node in /dev/dri", "in a container, start it with --device /dev/dri")
        return ProbeResult("driver_problem", f"this user may not open {nodes}", 'sudo usermod -aG render "$USER", and log in anew')
    problem = host.torch_problem()
    if problem:
        return ProbeResult("unsupported", f"{what} is here, but {problem}", TORCH_INSTALL)
    more = f", {len(openable)} cards" if len(openable) > 1 else ""
    sizes = [card.memory_bytes for card in openable]
    memory = None if None in sizes else max(size for size in sizes if size)
    claims = Claims(DTYPES, BLOCK_SIZES, memory_bytes=memory, num_devices=len(openable))
    return ProbeResult("available", f"{openable[0].name}, driver {openable[0].driver}{more}", claims=claims)


@hookimpl
def devices() -> list[DeviceSpec]:
    """Intel GPUs."""
    return [
        DeviceSpec(
            name="xpu",
            probe=probe,
            factory="oarlock_xpu.device:XpuDevice",
            distribution="oarlock-xpu",
            priority=PRIORITY,
            api_version=(1, 1),
            aliases=("intel",),
            torch_install=TORCH_INSTALL,
        )
    ]


@hookimpl
def graph_runner(device: Any) -> list[GraphRunnerSpec]:
    """Capture and replay, where this torch, driver and card can; else core runs programs as they are."""
    if device.capabilities.execution != "capture":
        return []
    return [GraphRunnerSpec(name="xpu-graph", factory="oarlock_xpu.capture:XpuGraphRunner", priority=10)]


@hookimpl
def conformance() -> list[ConformanceProfile]:
    """Core's own limits; nothing is loosened, for nothing was ever measured."""
    return [ConformanceProfile(device="xpu")]
