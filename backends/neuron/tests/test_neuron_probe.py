"""What the probe says of machines and packages, and at what cost."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from oarlock_neuron import host, plugin

VENDORS = {"torch-neuronx": ("2.13.3.0.1", 300 << 20), "neuronx-cc": ("2.27.1", 500 << 20)}
EMPTY = {"torch-neuronx": ("1.0", 2000), "neuronx-cc": ("1.0.post1", 4000)}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`packages({name: (version, bytes)})` replaces what is installed of the vendor's names."""

    def put(found: dict[str, tuple[str, int]]) -> None:
        def distribution(name: str) -> Any:
            if name not in found:
                raise metadata.PackageNotFoundError(name)
            version, size = found[name]
            return SimpleNamespace(version=version, files=[SimpleNamespace(size=size), SimpleNamespace(size=None)])

        monkeypatch.setattr(host.metadata, "distribution", distribution)

    put({})
    return put


def test_an_empty_machine_has_no_hardware(machine, packages):
    result = plugin.probe()
    assert result.status == "no_hardware" and "/dev/neuron0" in result.reason and "placeholder" not in result.reason and "Trn2" in result.remedy


def test_a_placeholder_is_named_even_where_there_is_no_hardware(machine, packages):
    packages(EMPTY)
    result = plugin.probe()
    assert result.status == "no_hardware" and "torch-neuronx 1.0 is an empty placeholder" in result.reason


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "torch-neuronx and neuronx-cc are not installed"),
        (EMPTY, "the installed torch-neuronx 1.0 is an empty placeholder, not the vendor's package"),
        ({**VENDORS, "neuronx-cc": EMPTY["neuronx-cc"]}, "the installed neuronx-cc 1.0.post1 is an empty placeholder"),
        ({**VENDORS, "torch-neuronx": ("2.9.0.2.11", 90 << 20)}, "the installed torch-neuronx 2.9.0.2.11 is the older PyTorch/XLA backend"),
    ],
)
def test_a_device_without_the_vendors_packages_is_unsupported_and_says_what_to_install(machine, packages, found, words):
    machine()
    packages(found)
    result = plugin.probe()
    assert result.status == "unsupported" and words in result.reason and result.remedy == plugin.TORCH_INSTALL
    assert "/dev/neuron0 is here" in result.reason


def test_a_chip_without_its_driver(machine, packages):
    machine(nodes=0)
    result = plugin.probe()
    assert result.status == "driver_problem" and "Trainium2 at PCI 0000:33:00.0" in result.reason and "aws-neuronx-dkms" in result.remedy


@pytest.mark.parametrize(("device_id", "name"), [("0x7064", "Inferentia"), ("0x7164", "Trainium"), ("0x7264", "Inferentia2")])
def test_older_chips_are_unsupported(machine, packages, device_id, name):
    machine(device_id)
    packages(VENDORS)
    result = plugin.probe()
    assert result.status == "unsupported" and result.reason.startswith(f"{name} at PCI")


def test_a_usable_device_claims_upper_bounds(machine, packages):
    machine(nodes=2)
    packages(VENDORS)
    result = plugin.probe()
    assert (result.status, result.reason) == ("available", "Trainium2, /dev/neuron0 and 1 more")
    assert result.claims.memory_bytes == 24 << 30 and not result.claims.host_is_device


def test_a_simulation_says_so_and_is_never_taken_by_itself(machine, packages, monkeypatch):
    assert plugin.devices()[0].priority > 0
    monkeypatch.setenv(host.SIMULATE, "1")
    result = plugin.probe()
    assert result.status == "available" and "simulated on the host" in result.reason and plugin.devices()[0].priority < 0
    monkeypatch.setenv(host.SIMULATE, "0")
    assert plugin.probe().status == "no_hardware"


def test_a_simulated_device_calls_itself_one(simulated):
    from oarlock_neuron.device import NeuronDevice

    device = NeuronDevice()
    device.activate()
    assert "simulated on the host" in device.describe() and "no Neuron device" in device.describe()
    claims = plugin.probe().claims
    assert (claims.dtypes, claims.block_sizes) == (device.capabilities.dtypes, device.capabilities.block_sizes)


def test_discovery_imports_no_torch_and_is_quick():
    code = (
        "import sys, time; from oarlock_neuron import plugin; plugin.devices(); start = time.perf_counter(); plugin.probe();"
        "print((time.perf_counter() - start) * 1e3); sys.exit('torch' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False) for _ in range(3)]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert min(float(run.stdout) for run in runs) < 50


def test_rows_are_few_unless_typed_and_several_ranks_are_refused():
    def config(typed: tuple[str, ...] = (), seqs: int = 256, ranks: int = 1) -> Any:
        return SimpleNamespace(
            typed=typed, scheduler=SimpleNamespace(max_num_seqs=seqs), parallel=SimpleNamespace(tensor_parallel_size=ranks)
        )

    path, (device,), other = "scheduler.max_num_seqs", plugin.devices(), SimpleNamespace(name="other")
    (change,) = plugin.adjust_config(config(), device)
    assert (change.path, change.value) == (path, plugin.FEW_SEQS)
    assert plugin.adjust_config(config(typed=(path,)), device) == plugin.adjust_config(config(seqs=4), device) == []
    assert plugin.adjust_config(config(), other) == plugin.check_model(None, config(ranks=2), other) == []
    (problem,) = plugin.check_model(None, config(ranks=2), device)
    assert problem.severity == "error" and "--tensor-parallel-size is 2" in problem.text and plugin.check_model(None, config(), device) == []
