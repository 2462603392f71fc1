"""Discovery: what the package says of itself, and at what cost."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import oarlock_sim


def test_entry_point_names_the_light_module():
    (found,) = [e for e in entry_points(group="oarlock.devices") if e.name == "sim"]
    assert found.value == "oarlock_sim"


def test_auto_never_takes_a_simulated_device():
    assert [d.name for d in oarlock_sim.devices()] == ["sim-eager", "sim-static"]
    assert all(d.priority < 0 for d in oarlock_sim.devices())


def test_discovery_does_not_import_torch():
    code = "import sys, oarlock_sim; [d.probe() for d in oarlock_sim.devices()]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_torch_without_the_python_hook_is_unsupported_and_says_why(tmp_path: Path, monkeypatch):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "backend_registration.py").write_text("def rename_privateuse1_backend(name): ...\n")
    monkeypatch.setattr(oarlock_sim, "_torch_folder", lambda: tmp_path)
    eager, static = (d.probe() for d in oarlock_sim.devices())
    assert eager.status == "unsupported" and oarlock_sim.TORCH_HOOK in eager.reason and eager.remedy
    assert static.status == "available"


def test_missing_torch_is_unsupported_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(oarlock_sim, "_torch_folder", lambda: None)
    for device in oarlock_sim.devices():
        result = device.probe()
        assert result.status == "unsupported" and "torch" in result.reason and "pip install" in result.remedy


def test_claims_hold(sim):
    from oarlock_sim.eager import SimEagerDevice
    from oarlock_sim.static import SimStaticDevice

    for spec, device in zip(oarlock_sim.devices(), (SimEagerDevice(), SimStaticDevice()), strict=True):
        claims, capabilities = spec.probe().claims, device.capabilities
        assert claims is not None
        assert (claims.dtypes, claims.block_sizes) == (capabilities.dtypes, capabilities.block_sizes)
        assert claims.host_is_device == capabilities.host_is_device
        assert claims.default_swap_bytes == capabilities.default_swap_bytes
        assert claims.memory_bytes == device.memory_info()[1]
