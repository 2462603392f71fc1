"""What the probe says of machines, and at what cost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from oarlock_xpu import host, plugin


@pytest.fixture
def good_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "torch_problem", lambda: "")


def test_an_empty_machine_has_no_hardware(machine):
    result = plugin.probe()
    assert result.status == "no_hardware" and "Arc" in result.remedy


@pytest.mark.parametrize(
    "function",
    [
        {"device_id": "0x9a49"},  # graphics inside a processor
        {"kind": "0x020000"},  # a network card
        {"vendor_id": "0x10de"},
    ],
    ids=["integrated", "network", "another-vendor"],
)
def test_what_is_no_card_of_ours(machine, function):
    machine(**function)
    assert plugin.probe().status == "no_hardware"


@pytest.mark.parametrize(
    ("device_id", "kind", "name", "gib"),
    [
        ("0x0bda", "0x038000", "Data Center GPU Max 1100", 48),
        ("0x0bd5", "0x038000", "Data Center GPU Max", 128),
        ("0x56a0", "0x030000", "Arc A series", 16),
        ("0xe20b", "0x030000", "Arc B580", 12),
        ("0xe202", "0x030000", "Arc B series", None),
    ],
)
def test_a_usable_card_is_available_with_upper_bounds(machine, good_torch, device_id, kind, name, gib):
    machine(device_id, kind=kind)
    result = plugin.probe()
    assert (result.status, result.reason) == ("available", f"{name}, driver xe")
    assert result.claims.memory_bytes == (gib << 30 if gib else None) and result.claims.dtypes == plugin.DTYPES


def test_the_driver_knows_the_memory_better(machine, good_torch):
    folder = machine("0xe202")
    for tile in (0, 1):
        (folder / f"tile{tile}").mkdir()
        (folder / f"tile{tile}/physical_vram_size_bytes").write_text("0x300000000\n")
    assert plugin.probe().claims.memory_bytes == 24 << 30


def test_several_cards_are_counted(machine, good_torch):
    machine()
    machine()
    result = plugin.probe()
    assert "2 cards" in result.reason and result.claims.num_devices == 2


def test_a_card_without_kernel_driver(machine, good_torch):
    machine(driver="", node=False)
    result = plugin.probe()
    assert result.status == "driver_problem" and "no kernel driver" in result.reason and "modprobe xe" in result.remedy


def test_a_card_without_its_node_as_in_a_container(machine, good_torch):
    machine(node=False)
    result = plugin.probe()
    assert result.status == "driver_problem" and "no node in /dev/dri" in result.reason and "--device /dev/dri" in result.remedy


def test_a_card_that_this_user_may_not_open(machine, good_torch, monkeypatch):
    machine()
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = plugin.probe()
    assert result.status == "driver_problem" and "may not open /dev/dri/renderD128" in result.reason and "usermod -aG render" in result.remedy


def test_torch_without_xpu_support_is_told_with_the_line_that_installs_one(machine):
    machine()
    result = plugin.probe()
    assert (result.status, result.remedy) == ("unsupported", plugin.TORCH_INSTALL)
    assert "Arc A series" in result.reason and "the installed torch has no XPU support" in result.reason


def test_missing_torch_is_told(machine, monkeypatch):
    machine()
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    assert "torch is not installed" in plugin.probe().reason


def test_a_card_that_torch_does_not_serve(machine):
    machine("0x4905")
    result = plugin.probe()
    assert result.status == "unsupported" and "Iris Xe MAX" in result.reason


def test_discovery_imports_no_torch_and_is_quick():
    code = (
        "import sys, time; from oarlock_xpu import plugin; plugin.devices(); start = time.perf_counter(); plugin.probe();"
        "print((time.perf_counter() - start) * 1e3); sys.exit('torch' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False) for _ in range(3)]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert min(float(run.stdout) for run in runs) < 50
