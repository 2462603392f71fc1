"""The vendor's calls over stubs: a module with the signatures of torch.neuron, and a dynamo backend named "neuron". Not hardware."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oarlock_neuron import vendor
from oarlock_neuron.compiler import NeuronCompiler
from oarlock_neuron.device import NeuronDevice
from oarlock_neuron.runner import NeuronRunner


class StubNeuron:
    """As torch_neuronx's Python source declares them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def device_count(self) -> int:
        return 2

    def set_device(self, device) -> None:
        self.calls.append(("set_device", device))

    def synchronize(self, device=None) -> None:
        self.calls.append(("synchronize", device))

    def manual_seed(self, seed: int) -> None:
        self.calls.append(("manual_seed", seed))

    def get_device_properties(self, device=None):
        return SimpleNamespace(name="stub of a NeuronCore", total_memory=24 << 30)

    def memory_allocated(self, device=None) -> int:
        return 1 << 30


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubNeuron:
    made = StubNeuron()
    monkeypatch.setattr(vendor, "module", lambda: made)
    monkeypatch.setattr(vendor, "package_problem", lambda: "")
    monkeypatch.setattr(vendor, "versions", lambda: "stub 1")
    monkeypatch.setattr(vendor, "TYPE", "cpu")
    monkeypatch.delenv("OARLOCK_NEURON_SIMULATE", raising=False)
    return made


def test_the_device_calls_what_the_vendor_declares(stub):
    device = NeuronDevice(1)
    device.activate()
    device.synchronise()
    device.seed(7)
    assert stub.calls == [("set_device", 1), ("synchronize", 1), ("manual_seed", 7)]
    assert device.memory_info() == (23 << 30, 24 << 30)
    assert "stub of a NeuronCore, 24576 MiB" in device.describe() and "simulated" not in device.describe()
    assert not device.capabilities.host_is_device and device.capabilities.kv_update == "functional"


def test_a_core_that_is_not_there(stub):
    with pytest.raises(RuntimeError, match="core cpu:2 does not exist: torch.neuron finds 2; look at NEURON_RT_VISIBLE_CORES"):
        NeuronDevice(2).activate()


@pytest.mark.parametrize(("problem", "words"), [("the installed torch-neuronx 1.0 is an empty placeholder", "empty placeholder"), ("", "did not load torch_neuronx")])
def test_without_the_vendors_packages_the_error_says_what_to_install(monkeypatch, problem, words):
    monkeypatch.setattr(vendor, "package_problem", lambda: problem)
    monkeypatch.setattr(vendor, "module", lambda: None)
    monkeypatch.delenv("OARLOCK_NEURON_SIMULATE", raising=False)
    with pytest.raises(RuntimeError, match=words) as caught:
        NeuronDevice().activate()
    assert vendor.TORCH_INSTALL in str(caught.value)


# ---------------------------------------------------------------- programs
@pytest.fixture
def compiler_stub(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """A dynamo backend "neuron" that runs graphs as they are and leaves an artifact, as the vendor's does."""
    from torch._dynamo.backends import registry
    from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

    seen: dict[str, list[Any]] = {"compiled": [], "loaded": []}

    class Artifact(CacheArtifact):
        def populate_cache(self) -> None:
            seen["loaded"].append(self.content)

        @staticmethod
        def type() -> str:
            return vendor.ARTIFACT

    def backend(graph: Any, example: Any) -> Any:
        assert all(not isinstance(size, torch.SymInt) for t in example for size in t.shape)
        seen["compiled"].append(len(example))
        CacheArtifactManager.record_artifact(vendor.ARTIFACT, f"key{len(seen['compiled'])}", b"machine code")
        return graph.forward

    monkeypatch.setitem(CacheArtifactFactory._artifact_types, vendor.ARTIFACT, Artifact)
    registry.register_backend(backend, name="neuron")
    yield seen
    registry._BACKENDS.pop("neuron", None)
    registry._COMPILER_FNS.pop("neuron", None)
    torch._dynamo.reset()


def program(weights, written, read, packed, inputs):
    return {"last": written["last"].index_put((packed,), packed + 1)}, {"hidden": inputs["x"] * weights["w"]}


def example():
    return {"w": torch.tensor([2.0])}, {"last": torch.zeros(5, dtype=torch.int32)}, {}, torch.tensor([0, 3], dtype=torch.int32), {"x": torch.ones(2, 4)}


def test_programs_go_through_torch_compile_once_and_come_back_from_the_cache(stub, compiler_stub, tmp_path):
    def start() -> tuple[NeuronRunner, Any]:
        torch._dynamo.reset()
        runner = NeuronRunner(NeuronDevice(options={"neuron_cache_dir": str(tmp_path)}))
        return runner, runner.compile(program, example(), "greedy-1")

    for compiles, loads, loaded in ((1, 0, []), (0, 1, [b"machine code"])):
        runner, run = start()
        assert isinstance(runner.compiler, NeuronCompiler)
        assert (runner.compiler.compiles, runner.loads, compiler_stub["loaded"]) == (compiles, loads, loaded)
        args = example()
        state, outputs = run(*args)
        assert state["last"] is args[1]["last"] and state["last"].tolist() == [1, 0, 0, 4, 0]
        assert torch.equal(outputs["hidden"], torch.full((2, 4), 2.0))
    assert ("synchronize", 0) in stub.calls


def test_a_compiler_that_leaves_nothing_is_an_error(stub, compiler_stub, monkeypatch):
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    with pytest.raises(RuntimeError, match="left no compiled program"):
        vendor.compile_program(lambda x: (x + 1,), (torch.ones(2),))


def test_an_artifact_of_another_torch_is_an_error(stub):
    with pytest.raises(RuntimeError, match="cannot be read by this torch"):
        vendor.load_program(lambda x: (x,), b"not an artifact")


def test_torch_compile_takes_what_it_is_given():
    inspect.signature(torch.compile).bind(lambda: None, backend="neuron", dynamic=False, fullgraph=True)
    inspect.signature(torch.compiler.load_cache_artifacts).bind(b"")
