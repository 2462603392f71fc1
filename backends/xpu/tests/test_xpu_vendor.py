"""Each call to torch.xpu: made as torch declares it, and its failures told with the remedy. Over a stand-in, not hardware."""

from __future__ import annotations

import inspect

import pytest
import torch
from xpu_stub import MIB

from oarlock_xpu import vendor
from oarlock_xpu.device import XpuDevice
from oarlock_xpu.plugin import TORCH_INSTALL


def test_torch_declares_every_call_that_is_made(stub):
    """torch.xpu's Python half is in every build of torch, so its signatures can be checked without a card."""
    device = XpuDevice()
    device.activate()
    device.synchronise()
    device.seed(5)
    device.memory_info()
    device.describe()
    vendor.can_pin()
    graph, pool = vendor.new_graph(), vendor.graph_pool()
    with vendor.capture(graph, pool):
        pass
    made = {name for name, _, _ in stub.calls}
    assert {"device_count", "set_device", "synchronize", "manual_seed", "mem_get_info", "memory_reserved", "get_device_properties"} <= made
    assert {"graph_pool_handle", "graph"} <= made
    for name, args, kwargs in stub.calls:
        inspect.signature(getattr(torch.xpu, name)).bind(*args, **kwargs)
    inspect.signature(torch.xpu.XPUGraph.__new__).bind(object)
    inspect.signature(torch.xpu.XPUGraph.replay).bind(object())
    assert isinstance(torch.distributed.is_xccl_available(), bool)


def test_the_device_is_passed_by_its_number(stub):
    stub.count = 3
    device = XpuDevice(2)
    device.activate()
    device.synchronise()
    assert ("set_device", (2,), {}) in stub.calls and ("synchronize", (2,), {}) in stub.calls


def test_torch_without_xpu_support(monkeypatch):
    with pytest.raises(RuntimeError, match="has no XPU support") as caught:
        XpuDevice().activate()
    assert TORCH_INSTALL in str(caught.value)


def test_a_driver_that_torch_cannot_reach(stub):
    stub.count = 0
    with pytest.raises(RuntimeError, match="compute runtime .*ONEAPI_DEVICE_SELECTOR"):
        XpuDevice().activate()


def test_a_card_that_is_not_there(stub):
    with pytest.raises(RuntimeError, match="cpu:1 does not exist: torch.xpu finds 1; lower --tensor-parallel-size to 1"):
        XpuDevice(1).activate()


def test_free_memory_is_the_drivers_and_never_more_than_what_this_process_has_left(stub):
    kept = stub.upload(torch.zeros(64 * MIB // 4))
    assert vendor.memory(0) == (960 * MIB, 1024 * MIB)
    stub.free_is_stuck = True
    assert vendor.memory(0) == (960 * MIB, 1024 * MIB)
    del kept
    assert vendor.memory(0) == (1024 * MIB, 1024 * MIB)


def test_a_driver_that_cannot_tell_its_free_memory_asks_for_sizes(stub, caplog):
    stub.free_fails = True
    with pytest.raises(NotImplementedError):
        XpuDevice().memory_info()
    assert "cannot tell its free memory" in caplog.text


def test_without_the_graph_api_programs_run_eagerly_and_the_reason_is_told(stub, monkeypatch):
    del stub.XPUGraph
    device = XpuDevice()
    assert (device.capabilities.execution, device.capabilities.dynamic_shapes, device.buckets(8, 512, 10)) == ("eager", True, {})
    assert "has no torch.xpu.XPUGraph" in device.describe()


@pytest.mark.parametrize(
    ("replay", "words"),
    [(lambda self: None, "computed 8.0 instead of 24"), (lambda self: 1 / 0, "capturing a program failed: division by zero")],
    ids=["does-nothing", "raises"],
)
def test_graphs_are_used_only_when_one_was_seen_to_work(stub, monkeypatch, replay, words):
    monkeypatch.setattr(stub.XPUGraph, "replay", replay)
    device = XpuDevice()
    assert device.capabilities.execution == "eager" and words in device.describe()


def test_with_graphs_decodes_are_padded_and_all_else_has_its_own_shape(stub):
    device = XpuDevice()
    assert (device.capabilities.execution, device.capabilities.dynamic_shapes) == ("capture", True)
    assert device.capabilities is device.capabilities and "decodes captured" in device.describe()
    assert device.buckets(12, 256, 9) == {"decode_rows": (1, 2, 4, 8, 12), "blocks": (3, 9)}
