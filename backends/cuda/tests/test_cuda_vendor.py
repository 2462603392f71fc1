"""Each call to torch.cuda: made as torch declares it, and its failures told with the remedy. Over a stand-in, not hardware."""

from __future__ import annotations

import inspect

import pytest
import torch
from cuda_stub import MIB

from oarlock_cuda import plugin, vendor
from oarlock_cuda.capture import CudaGraphRunner
from oarlock_cuda.device import PINNED_LIMIT, CudaDevice
from oarlock_cuda.memory import CudaMemoryProfiler
from oarlock_cuda.plugin import TORCH_INSTALL


def test_torch_declares_every_call_that_is_made(stub):
    """torch.cuda's Python half is in every build of torch, so its signatures can be checked without a GPU."""
    device = CudaDevice()
    device.activate()
    device.synchronise()
    device.memory_info()
    device.describe()
    device.begin_read(torch.ones(2))()
    assert device.capabilities.kv_dtypes == ("auto", "fp8_e4m3", "fp8_e5m2")
    vendor.built_for()
    profiler = CudaMemoryProfiler(device)
    profiler.restart()
    assert profiler.peak() == profiler.taken() == 0
    profiler.release()
    runner = CudaGraphRunner(device)
    with runner.recording(runner.new_graph(), runner.new_pool()):
        pass
    made = {name for name, _, _ in stub.calls}
    for name, args, kwargs in stub.calls:
        if not name.startswith("Event."):
            inspect.signature(getattr(torch.cuda, name)).bind(*args, **kwargs)
    assert made == {
        "device_count", "set_device", "synchronize", "mem_get_info", "memory_reserved", "memory_allocated", "max_memory_reserved", "reset_peak_memory_stats",
        "empty_cache", "get_device_properties", "get_device_capability", "get_arch_list", "Event", "Event.record", "Event.synchronize", "graph_pool_handle", "graph",
        "current_stream",
    }  # fmt: skip
    for name in ("record", "synchronize"):
        inspect.signature(getattr(torch.cuda.Event, name)).bind(object())
    inspect.signature(torch.cuda.CUDAGraph.replay).bind(object())
    assert isinstance(torch.distributed.is_nccl_available(), bool)
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        assert getattr(torch.backends.cuda.matmul, name) is False


def test_the_device_is_passed_by_its_number(stub):
    stub.count = 3
    device = CudaDevice(2)
    device.activate()
    device.synchronise()
    assert ("set_device", (2,), {}) in stub.calls and ("synchronize", (2,), {}) in stub.calls


def test_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="has no CUDA support") as caught:
        CudaDevice().activate()
    assert TORCH_INSTALL in str(caught.value)


def test_a_driver_that_torch_cannot_reach(stub):
    stub.count = 0
    with pytest.raises(RuntimeError, match="finds no GPU though the driver knows one.*CUDA_VISIBLE_DEVICES"):
        CudaDevice().activate()


def test_a_gpu_that_is_not_there(stub):
    with pytest.raises(RuntimeError, match="cpu:1 does not exist: torch.cuda finds 1; lower --tensor-parallel-size to 1"):
        CudaDevice(1).activate()


def test_what_the_allocator_keeps_is_free(stub):
    kept = stub.own(torch.zeros(64 * MIB // 4))
    assert vendor.memory(0) == (960 * MIB, 1024 * MIB)
    stub.kept, stub.others = 32 * MIB, 100 * MIB
    assert vendor.memory(0) == (860 * MIB, 1024 * MIB)
    del kept
    assert vendor.memory(0) == (924 * MIB, 1024 * MIB)


def test_a_small_tensor_is_sent_through_memory_of_its_own_and_nothing_waits(stub):
    device, host = CudaDevice(), torch.arange(6.0)
    sent = device.to_device(host)
    host.fill_(-1)
    assert sent.tolist() == [0, 1, 2, 3, 4, 5]
    large = torch.zeros(PINNED_LIMIT + 1, dtype=torch.uint8)
    assert torch.equal(device.to_device(large), large)
    assert not {"synchronize", "Event"} & {name for name, _, _ in stub.calls}


def test_a_read_is_begun_at_once_and_waits_for_its_own_event(stub):
    device, tensor = CudaDevice(), torch.tensor([1, 2, 3])
    wait = device.begin_read(tensor)
    assert [name for name, _, _ in stub.calls] == ["Event", "Event.record"]
    tensor.fill_(0)  # launched later, so it is not read
    assert wait().tolist() == [1, 2, 3]
    assert [name for name, _, _ in stub.calls][2:] == ["Event.synchronize"]


def test_a_gpu_without_kernels_for_it_is_found_before_a_model_is_loaded(stub, monkeypatch):
    CudaDevice().verify()

    def broken(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.Tensor, "__matmul__", broken)
    with pytest.raises(RuntimeError, match="multiplies no matrices: .*no kernel image.*has kernels for sm_80, sm_90; if sm_90 is not served"):
        CudaDevice().verify()


def test_triton_is_declared_where_its_driver_is_installed(stub, monkeypatch):
    assert not CudaDevice().capabilities.triton  # host tensors, whatever is installed
    monkeypatch.setattr(vendor, "TYPE", "cuda")
    found = {"triton": object(), "triton.backends.nvidia": object()}
    monkeypatch.setattr(vendor.importlib.util, "find_spec", found.get)
    assert vendor.has_triton()
    del found["triton.backends.nvidia"]  # a vendor's own Triton, for another device
    assert not vendor.has_triton()
    found.clear()
    assert not vendor.has_triton()


def test_decodes_are_padded_and_all_else_has_its_own_shape(stub):
    device = CudaDevice()
    assert (device.capabilities.execution, device.capabilities.dynamic_shapes) == ("capture", True)
    found = device.buckets(256, 8192, 512)
    assert found == {"decode_rows": (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256), "blocks": (128, 512)}
    assert device.buckets(1000, 8192, 5)["decode_rows"][-1] == 512  # beyond it a step runs as it is
    assert device.buckets(12, 256, 1) == {"decode_rows": (1, 2, 4, 8, 12), "blocks": (1,)}


def test_a_recording_that_breaks_off_says_why_and_leaves_the_stream_as_it_was(stub):
    runner = CudaGraphRunner(CudaDevice())
    args = ({}, {}, {}, torch.zeros(1, dtype=torch.int32), {"x": torch.ones(2)})
    run = runner.compile(lambda w, written, read, packed, i: ({}, {"y": i["x"] * float(i["x"].sum())}), args, "head-1")
    with pytest.raises(RuntimeError, match=r"program head-1 cannot be captured: aten\._local_scalar_dense.*waits for the device") as caught:
        run(*args)
    assert "capture_end" in str(caught.value.__cause__) and stub.stream == "the default one"


def test_memory_that_runs_out_while_it_is_recorded_is_that_error(stub):
    runner, calls = CudaGraphRunner(CudaDevice()), []

    def program(*args):
        calls.append(args)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no room")
        return {}, {}

    args = ({}, {}, {}, torch.zeros(1, dtype=torch.int32), {})
    run = runner.compile(program, args, "forward-1")
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        run(*args)


def test_a_triton_that_cannot_launch_is_found_before_a_model_is_loaded(stub, monkeypatch):
    monkeypatch.setattr(vendor, "has_triton", lambda: True)
    monkeypatch.setattr(vendor, "compile_problem", lambda: "")
    CudaDevice().verify()
    monkeypatch.setattr(vendor, "compile_problem", lambda: "RuntimeError: Failed to find C compiler.")
    with pytest.raises(RuntimeError, match=r"Failed to find C compiler\..*gcc.*python3-dev.*TRITON_CACHE_DIR.*pip uninstall oarlock-triton-kernels"):
        CudaDevice().verify()
    monkeypatch.setattr(plugin, "has_kernels", lambda: False)  # torch brings a Triton that nobody uses
    CudaDevice().verify()


def test_why_triton_cannot_launch():
    """Here there is no NVIDIA driver, so that asking it must give a sentence, and raise nothing."""
    pytest.importorskip("triton")
    assert not torch.cuda.is_available() and "Error" in vendor.compile_problem()
