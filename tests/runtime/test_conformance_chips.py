"""cuda, xpu and neuron under the kit, and beside other packages: over stand-ins for torch.cuda and torch.xpu, and the strict compiler. Not hardware.

Levels 0 and 1 whole; of the others a few cases, for each program is recorded, or exported, operator by operator here: the rest is
`make test-full`. That neuron's compiled programs of a whole model serve is shown by tests/e2e/test_chip_backends.py.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from oarlock.conformance import attention_level, kit, ops_level, subject
from oarlock.conformance.cases import run_case
from oarlock.errors import BackendUnavailable, PluginError
from oarlock.plugins import discover, select_device

pytest.importorskip("oarlock_cuda")
pytest.importorskip("oarlock_xpu")
pytest.importorskip("oarlock_neuron")
from oarlock_neuron import host as neuron_host

for folder in ("cuda", "xpu"):
    sys.path.insert(0, str(Path(__file__).parents[2] / f"backends/{folder}/tests"))
cuda_stub, xpu_stub = (importlib.import_module(name) for name in ("cuda_stub", "xpu_stub"))


def passed(device: str, levels: str, pattern: str) -> int:
    """How many cases passed; none may fail."""
    report = kit.run(select_device(device), kit.Choice(kit.parse_levels(levels), pattern=pattern))
    bad = [(r.id, r.detail) for r in report.results if r.status in ("fail", "error", "xpass", "timeout")]
    assert not bad
    return sum(r.status == "pass" for r in report.results)


@pytest.mark.parametrize(
    ("levels", "pattern", "least"),
    [
        ("0-1", "", 20),
        ("4", r"graph_runner|as_eager|float32,dense,(greedy|overlapped|programs)", 5),
        pytest.param("2-4", "", 100, marks=pytest.mark.full),
    ],
)
def test_cuda(tmp_path, monkeypatch, levels, pattern, least):
    cuda_stub.put_in_place(tmp_path, monkeypatch)
    assert passed("cuda", levels, pattern) >= least


@pytest.mark.parametrize(
    ("levels", "pattern", "least"),
    [
        ("0-1", "", 20),
        ("3", r"float32,.*dim=64\b", 4),
        ("4", "float32,dense,(greedy|swapped|copied|programs)", 4),
        pytest.param("2-4", "", 100, marks=pytest.mark.full),
    ],
)
def test_xpu(tmp_path, monkeypatch, levels, pattern, least):
    xpu_stub.put_in_place(tmp_path, monkeypatch)
    assert passed("xpu", levels, pattern) >= least


def test_xpu_takes_the_triton_kernels(tmp_path, monkeypatch):
    """By declaring `triton`, in the interpreter; eager, for the stand-in's graphs record torch's operators only."""
    pytest.importorskip("triton")
    importlib.import_module("oarlock_triton_kernels.interpreter").put_right()
    xpu_stub.put_in_place(tmp_path, monkeypatch, graphs=False)
    assert not subject.Subject.named("xpu").device.capabilities.triton, "the Triton that is installed here compiles for no Intel GPU"
    monkeypatch.setattr("oarlock_xpu.vendor.has_triton", lambda: True)
    found = subject.Subject.named("xpu")
    served = {op: by for op, by, _ in found.ops("bfloat16").table}
    assert {op for op, by in served.items() if by == "triton"} >= {"rms_norm", "rotary", "silu_and_mul", "sample"}
    cases = [*ops_level.cases(), *attention_level.cases(found.dtypes, found.device.capabilities.block_sizes)]
    chosen = [case for case in cases if re.search(r"^(rms_norm|rotary)\[bfloat16,tokens=(7|1),|^attention\[(bfloat16,mixed|float32,decode),", case.id) and case.quick]
    results = [run_case(case, found, None) for case in chosen]
    assert len(results) > 8 and not [(r.id, r.detail) for r in results if r.status != "pass"]
    assert set(found.attention_served.values()) == {"triton"}


@pytest.mark.parametrize(
    ("levels", "pattern", "least"),
    [
        ("0-1", "", 20),
        ("3", r"float32,(chunk|copies|padding),.*dim=64\b", 2),
        pytest.param("2-3", "", 100, marks=pytest.mark.full),
        pytest.param("4", "float32,dense", 10, marks=pytest.mark.full),
    ],
)
def test_neuron(tmp_path, monkeypatch, levels, pattern, least):
    monkeypatch.setenv(neuron_host.SIMULATE, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert passed("neuron", levels, pattern) >= least


# ---------------------------------------------------------------- installed together
@pytest.fixture
def machine(tmp_path, monkeypatch):
    """All vendors' hardware is looked for below one folder."""
    monkeypatch.delenv(neuron_host.SIMULATE, raising=False)
    monkeypatch.setattr(neuron_host, "ROOT", tmp_path)
    cuda_stub.machine(tmp_path, monkeypatch, None)
    made = xpu_stub.Machine(tmp_path, monkeypatch)
    (tmp_path / "dev").mkdir()
    return made


def test_auto_takes_the_card_where_there_is_one_and_the_processor_where_there_is_none(machine, monkeypatch):
    found = discover(hints=())
    assert {"cpu", "cuda", "xpu", "neuron"} <= {row.device for row in found.rows()}
    assert select_device("auto", found).spec.name == "cpu"
    machine()
    monkeypatch.setattr("oarlock_xpu.host.torch_problem", lambda: "")
    assert select_device("auto", found).spec.name == select_device("intel", found).spec.name == "xpu"
    assert select_device("cpu", found).spec.name == "cpu"


def test_auto_never_falls_back_to_the_processor_when_hardware_was_seen(machine, tmp_path):
    machine()
    with pytest.raises(BackendUnavailable, match="no XPU support.*--device cpu$"):
        select_device("auto", discover(hints=()))
    (tmp_path / "dev/neuron0").touch()
    with pytest.raises(BackendUnavailable, match="xpu .*no XPU support.*--device cpu$") as caught:
        select_device("auto", discover(hints=()))
    assert "/dev/neuron0 is here, but torch-neuronx and neuronx-cc are not installed" in str(caught.value)


def test_two_usable_accelerators_ask_for_a_choice(machine, tmp_path, monkeypatch):
    machine()
    (tmp_path / "dev/neuron0").touch()
    monkeypatch.setattr("oarlock_xpu.host.torch_problem", lambda: "")
    monkeypatch.setattr(neuron_host, "package_problem", lambda: "")
    with pytest.raises(PluginError, match="Choose one: --device neuron or --device xpu"):
        select_device("auto", discover(hints=()))


def test_a_simulated_device_is_taken_only_by_name(machine, monkeypatch):
    monkeypatch.setenv(neuron_host.SIMULATE, "1")
    found = discover(hints=())
    assert select_device("auto", found).spec.name == "cpu"
    assert "simulated on the host" in select_device("neuron", found).probe.reason


@pytest.mark.parametrize("device", ["cuda", "xpu", "neuron"])
def test_what_core_knows_as_hardware_is_never_nothing_to_the_probe(machine, monkeypatch, device):
    """Else `auto` would pass over it to the processor, for a probe's no_hardware outweighs core's hint."""
    import tomllib

    import oarlock

    hints = tomllib.loads((Path(oarlock.__file__).parent / "hints.toml").read_text(encoding="utf-8"))["devices"][device]["pci"]
    probe = next(row.spec.probe for row in discover(hints=()).rows() if row.device == device)
    assert probe().status == "no_hardware"
    for match in hints:
        for prefix in match.get("devices", ["0x2335"]):
            folder = machine(prefix.ljust(6, "0"), vendor_id=match["vendor"], kind=f"{match.get('class', '0x08')}8000")
            assert probe().status in ("available", "driver_problem", "unsupported"), prefix
            (folder / "vendor").write_text("0x0000")
