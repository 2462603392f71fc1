"""Run as `python -m oarlock.cli.inspect_device NAME [THREADS]`: load one device and print what it is, as JSON on the last line.

Owns: nothing.
Reads: `plugins`; heavy modules by dotted path, as an executor does.
Never: loads a model; runs in the process of a server.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from typing import Any

from oarlock.memory_plan import gib
from oarlock.plugins import apply_environment, collect, collect_named, select_device, worker_plugins

DEVICE_HOOKS = ("attention", "kernels", "graph_runner", "memory_profiler", "communicator")  # what a plugin may have for some devices and not for others


def examine(name: str, threads: int | None) -> dict[str, Any]:
    """Everything that doctor shows of a device. Raises whatever the device raises."""
    spec = select_device(name).spec
    apply_environment(spec)
    module, _, attribute = spec.factory.partition(":")
    device = getattr(importlib.import_module(module), attribute)(0, {"threads": threads})
    device.activate()
    torch = importlib.import_module("torch")
    manager = worker_plugins(spec.name)
    with device.context():
        device.verify()
        capabilities = device.capabilities
        computes = device.torch_device is not None  # one without tensors has an executor of its own, and no ops
        ops = _ops(collect(manager, "kernels", device=device), capabilities.dtypes[0]) if computes else []
        parts = [(hook, f"{found.name} (priority {found.priority})", _refusal(hook, found, capabilities))
                 for hook in ("attention", "graph_runner", "communicator") for found in collect(manager, hook, device=device) if computes]  # fmt: skip
    return {
        "text": device.describe(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "memory": _memory(device),
        "capabilities": dataclasses.asdict(capabilities),
        "ops": ops,
        "parts": parts or [("all", "core's own" if computes else "its own executor", "")],
        "idle": _idle(manager, device) if computes else [],
    }


def _idle(manager: Any, device: Any) -> list[str]:
    """Plugins that are made for devices, and have nothing for this one."""
    asked = {name for name, plugin in manager.list_name_plugin() if {caller.name for caller in manager.get_hookcallers(plugin) or ()} & {*DEVICE_HOOKS}}
    return sorted(asked - {name for hook in DEVICE_HOOKS for name, _ in collect_named(manager, hook, device=device)})


def _ops(implementations: list[Any], dtype: str) -> list[tuple[str, str, str]]:
    """(op, implementation that serves it in `dtype`, why others do not)."""
    importlib.import_module("oarlock.runtime.reference")  # registers every op
    return list(importlib.import_module("oarlock.backend_api.runtime.ops").bind_ops(implementations, dtype).table)


def _refusal(hook: str, found: Any, capabilities: Any) -> str:
    """Why an attention does not serve plain layers in the preferred dtype, block size and commonest head size; "" where it does."""
    if hook != "attention":
        return ""
    heads = {"head_dim": 128, "num_heads": 8, "num_kv_heads": 8, "window": None, "softcap": None}
    support = found.supports(kind="full", dtype=capabilities.dtypes[0], block_size=capabilities.block_sizes[0], **heads)
    return "" if support.ok else "; ".join(support.reasons)


def _memory(device: Any) -> str:
    try:
        free, total = device.memory_info()
    except NotImplementedError:
        return "cannot be asked; give --kv-cache-memory"
    return f"{gib(free)} of {gib(total)} free"


if __name__ == "__main__":
    print(json.dumps(examine(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)))
