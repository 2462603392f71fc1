"""The child process behind `oarlock doctor`, on the host's own device."""

from __future__ import annotations

import pluggy
from oarlock.backend_api import Hooks, hookimpl
from oarlock.cli import doctor, inspect_device


def test_the_host_device_is_examined_in_a_process_of_its_own() -> None:
    report, problem = doctor.inspect("cpu", threads=1)
    assert report is not None, problem
    assert report["threads"] == 1
    assert report["capabilities"]["host_is_device"] is True
    assert {"rms_norm", "linear", "sample"} <= {op for op, _, _ in report["ops"]}
    assert "GiB" in report["memory"]


class _Kernels:
    """A plugin with kernels for `device` alone."""

    def __init__(self, device: str) -> None:
        self._device = device

    @hookimpl
    def kernels(self, device: str) -> list[str]:
        return ["fast"] if device == self._device else []


class _Parser:
    @hookimpl
    def extensions(self) -> list[str]:
        return []


def test_plugins_that_have_nothing_for_the_device_are_named():
    manager = pluggy.PluginManager("oarlock")
    manager.add_hookspecs(Hooks)
    for name, plugin in (("here", _Kernels("chip")), ("elsewhere", _Kernels("another")), ("parser", _Parser())):
        manager.register(plugin, name=name)
    assert inspect_device._idle(manager, "chip") == ["elsewhere"]
