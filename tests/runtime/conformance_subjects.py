"""Devices for testing the kit itself: plain host tensors, with whatever implementations a test gives them."""

from __future__ import annotations

from typing import Any

import pluggy
import torch
from oarlock.backend_api import PROJECT, Capabilities, Claims, ConformanceProfile, DeviceSpec, Hooks, ProbeResult, hookimpl
from oarlock.backend_api.runtime import Device, EagerRunner
from oarlock.conformance.subject import Subject
from oarlock.device_choice import Selection

CAPABILITIES = Capabilities(dtypes=("float32", "bfloat16"), block_sizes=(16, 8))


class HostDevice(Device):
    """A device that copies, so that the host's tensors and its own are apart."""

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        super().__init__(index, options)
        self._used = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        return self.options.get("capabilities", CAPABILITIES)

    def activate(self) -> None:
        """Nothing to make current."""

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


def probe() -> ProbeResult:
    return ProbeResult("available", "for tests", claims=Claims(dtypes=CAPABILITIES.dtypes, block_sizes=CAPABILITIES.block_sizes))


class Package:
    """The hooks of one package, answering with given records."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers

    @hookimpl
    def kernels(self, device: Any) -> list[Any]:
        return self.answers.get("kernels", [])

    @hookimpl
    def attention(self, device: Any) -> list[Any]:
        return self.answers.get("attention", [])

    @hookimpl
    def graph_runner(self, device: Any) -> list[Any]:
        return self.answers.get("graph_runner", [])


def manager_of(**answers: list[Any]) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.register(Package(**answers), name="under-test")
    return manager


def make_subject(device: Device | None = None, profile: ConformanceProfile | None = None, **answers: list[Any]) -> Subject:
    device = device or HostDevice()
    spec = DeviceSpec("under-test", probe, f"{HostDevice.__module__}:HostDevice", "under-test")
    selection = Selection(spec, probe(), "under-test")
    return Subject(spec, selection, manager_of(**answers), device, profile or ConformanceProfile(device="under-test"), EagerRunner(device))
