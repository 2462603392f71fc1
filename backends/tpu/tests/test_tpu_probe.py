"""The light half: what the probe says of each kind of machine, the options, and what is refused before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from oarlock_tpu import host, plugin


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(host, "missing", lambda needed=host.NEEDED: [])


def test_a_machine_without_chips_says_so_and_how_to_try_without_one(machine):
    machine("0x0042")  # a network card of the same vendor
    found = plugin.probe()
    assert (found.status, found.reason) == ("no_hardware", "no TPU is on the PCI bus")
    assert "OARLOCK_TPU_ON_HOST=1" in found.remedy


def test_a_cloud_machine_that_announces_chips_and_has_none_is_told(machine, monkeypatch):
    machine("0x0042")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    assert "announces v5litepod-8, but no chip is on the PCI bus" in plugin.probe().reason


def test_chips_are_named_counted_and_their_memory_claimed(machine, installed):
    for _ in range(4):
        machine()
    found = plugin.probe()
    assert (found.status, found.reason) == ("available", "TPU v5e, 4 chips")
    assert found.claims is not None and found.claims.memory_bytes == 64 << 30


@pytest.mark.parametrize(("device_id", "name"), [("0x005e", "v4"), ("0x0062", "v5p"), ("0x006f", "v6e"), ("0x0076", "tpu7x")])
def test_each_kind_of_chip_is_known(machine, installed, device_id, name):
    machine(device_id, node="accel{}")
    assert plugin.probe().reason == f"TPU {name}, 1 chip"


def test_chips_without_a_node_are_a_driver_problem(machine, installed):
    machine(node="")
    found = plugin.probe()
    assert found.status == "driver_problem" and "/dev/vfio" in found.reason and "container" in found.remedy


def test_a_node_that_may_not_be_opened_is_named(machine, installed, monkeypatch):
    machine()
    monkeypatch.setattr(host, "openable", lambda names: [])
    found = plugin.probe()
    assert found.status == "driver_problem" and "may not open /dev/vfio/0" in found.reason and found.remedy


def test_missing_packages_are_named_with_the_command(machine, monkeypatch):
    machine()
    monkeypatch.setattr(host, "missing", lambda needed=host.NEEDED: ["jax", "libtpu"])
    found = plugin.probe()
    assert found.status == "unsupported" and "jax, libtpu is not installed" in found.reason
    assert found.remedy.startswith("pip install") and "torchax==0.0.13" in found.remedy


def test_the_host_takes_part_only_when_asked_for_and_never_under_auto(machine, installed, monkeypatch):
    assert plugin.devices()[0].priority > 0
    monkeypatch.setenv(host.ON_HOST, "1")
    (spec,), found = plugin.devices(), plugin.probe()
    assert spec.priority < 0 and dict(spec.environment)["JAX_PLATFORMS"] == "cpu"
    assert found.status == "available" and "simulated" in found.reason
    assert found.claims is not None and found.claims.host_is_device and found.claims.memory_bytes is None


def test_the_probe_is_light():
    code = (
        "import sys, time; from oarlock_tpu import plugin; s = time.perf_counter(); plugin.probe(); t = time.perf_counter() - s; "
        "print(t < 0.05, {'torch', 'jax', 'jaxlib', 'torchax', 'libtpu'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True set()"


def config(ranks=1, chips=1):
    return SimpleNamespace(parallel=SimpleNamespace(tensor_parallel_size=ranks), device=SimpleNamespace(options={"tpu_chips": chips}))


MODEL = SimpleNamespace(num_heads=24, num_kv_heads=8)


def test_ranks_are_refused_with_the_option_that_serves():
    (problem,) = plugin.check_model(MODEL, config(ranks=4), plugin.devices()[0])
    assert problem.severity == "error" and "--tensor-parallel-size is 4" in problem.text and "--tpu-chips 4" in problem.remedy


def test_chips_that_do_not_divide_the_heads_are_refused_with_those_that_do():
    (problem,) = plugin.check_model(MODEL, config(chips=3), plugin.devices()[0])
    assert "--tpu-chips 3" in problem.text and problem.remedy == "sizes that work: 1, 2, 4, 8"
    assert not plugin.check_model(MODEL, config(chips=4), plugin.devices()[0])


def test_another_device_is_left_alone():
    other = SimpleNamespace(name="cpu")
    assert not plugin.check_model(MODEL, config(ranks=4), other)
    scheduler = SimpleNamespace(max_num_seqs=256)
    given = SimpleNamespace(scheduler=scheduler, typed=frozenset())
    assert not plugin.adjust_config(given, other)
    (change,) = plugin.adjust_config(given, plugin.devices()[0])
    assert (change.path, change.value) == ("scheduler.max_num_seqs", plugin.FEW_SEQS)
    assert not plugin.adjust_config(SimpleNamespace(scheduler=scheduler, typed={"scheduler.max_num_seqs"}), plugin.devices()[0])
