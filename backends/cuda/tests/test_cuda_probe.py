"""What the probe says of machines, and at what cost."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda_stub import GIB, FakeGpu, FakeNvml, add_card

from oarlock_cuda import host, nvml, plugin


def test_an_empty_machine_has_no_hardware(machine):
    machine()
    result = plugin.probe()
    assert result.status == "no_hardware" and "--gpus all" in result.remedy


@pytest.mark.parametrize("function", [{"kind": "0x040300"}, {"vendor_id": "0x8086"}], ids=["sound-of-a-gpu", "another-vendor"])
def test_what_is_no_gpu_of_nvidia(machine, function):
    add_card(machine(), **function)
    assert plugin.probe().status == "no_hardware"


def test_a_gpu_without_a_driver(machine):
    add_card(machine())
    result = plugin.probe()
    assert result.status == "driver_problem" and "PCI 0000:01:00.0" in result.reason and "its driver is not" in result.reason


def test_a_device_file_tells_of_a_gpu_too(machine):
    root = machine()
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    assert plugin.probe().status == "driver_problem" and "/dev/nvidia0" in plugin.probe().reason


@pytest.mark.parametrize(
    ("code", "seen", "status", "words"),
    [
        (nvml.DRIVER_NOT_LOADED, True, "driver_problem", ("kernel driver is not loaded", "modprobe nvidia")),
        (nvml.DRIVER_NOT_LOADED, False, "no_hardware", ("there is no GPU", "run on a machine")),
        (nvml.VERSION_MISMATCH, True, "driver_problem", ("was upgraded", "restart")),
        (999, True, "driver_problem", ("does not answer: Unknown Error", "nvidia-smi")),
    ],
)
def test_a_driver_that_does_not_answer(machine, code, seen, status, words):
    root = machine(FakeNvml(init_code=code))
    if seen:
        add_card(root)
    result = plugin.probe()
    assert result.status == status and words[0] in result.reason and words[1] in result.remedy


def test_a_library_that_lacks_a_function_is_an_old_driver(machine):
    class Old(FakeNvml):
        def __getattribute__(self, name):
            if name == "nvmlSystemGetCudaDriverVersion_v2":
                raise AttributeError(f"undefined symbol: {name}")
            return super().__getattribute__(name)

    library = Old()
    machine(library)
    result = plugin.probe()
    assert result.status == "driver_problem" and "older than R450" in result.reason and "525" in result.remedy
    assert not library.is_open


def test_a_driver_without_gpus(machine):
    root = machine(FakeNvml([]))
    assert plugin.probe().status == "no_hardware"
    add_card(root)
    assert plugin.probe().status == "driver_problem" and "serves none" in plugin.probe().reason


def test_a_usable_gpu_is_available_with_upper_bounds(machine):
    library = FakeNvml()
    machine(library)
    result = plugin.probe()
    assert (result.status, result.reason) == ("available", "NVIDIA H200, 141 GiB, driver 580.65.06")
    assert result.claims.memory_bytes == 141 * GIB and result.claims.num_devices == 1
    assert result.claims.dtypes == ("bfloat16", "float16", "float32") and not library.is_open


def test_several_gpus_are_counted(machine):
    machine(FakeNvml([FakeGpu(), FakeGpu()]))
    result = plugin.probe()
    assert "2 GPUs" in result.reason and result.claims.num_devices == 2


@pytest.mark.parametrize(
    ("capability", "dtypes", "kv"),
    [
        ((7, 5), ("float16", "float32"), ("auto",)),
        ((8, 0), ("bfloat16", "float16", "float32"), ("auto", "fp8_e5m2")),
        ((8, 9), ("bfloat16", "float16", "float32"), ("auto", "fp8_e4m3", "fp8_e5m2")),
        ((10, 0), ("bfloat16", "float16", "float32"), ("auto", "fp8_e4m3", "fp8_e5m2")),
    ],
)
def test_what_a_chip_computes_in(machine, capability, dtypes, kv):
    machine(FakeNvml([FakeGpu(capability=capability)]))
    assert plugin.probe().claims.dtypes == dtypes and plugin.kv_dtypes(capability) == kv


def test_a_gpu_that_torch_no_longer_serves(machine):
    machine(FakeNvml([FakeGpu("Tesla V100", (7, 0))]))
    result = plugin.probe()
    assert result.status == "unsupported" and "Tesla V100 has compute capability 7.0" in result.reason


@pytest.mark.parametrize(("torch_built", "words"), [(("2.13.0+cpu", None), "torch 2.13.0+cpu has no CUDA support"), (("", None), "torch is not installed")])
def test_torch_without_cuda_is_told_with_the_line_that_installs_one(machine, torch_built, words):
    machine(FakeNvml(), torch_built)
    result = plugin.probe()
    assert (result.status, result.remedy) == ("unsupported", plugin.TORCH_INSTALL) and words in result.reason


def test_a_driver_that_is_older_than_torch(machine):
    machine(FakeNvml(driver="550.54.15", cuda=12040), ("2.13.0", (13, 0)))
    result = plugin.probe()
    assert result.status == "driver_problem" and "driver 550.54.15 serves CUDA 12.4, the installed torch 2.13.0 needs 13.0" in result.reason
    assert result.remedy == "upgrade the driver to 580 or newer, or install a torch built for CUDA 12"
    machine(FakeNvml(driver="550.54.15", cuda=12040), ("2.13.0", (12, 8)))
    assert plugin.probe().status == "available"  # a driver serves every minor version of its CUDA


# ---------------------------------------------------------------- what CUDA will show
@pytest.mark.parametrize(
    ("asked", "count"),
    [("0", 1), ("1,0", 2), ("0,1,2", 2), ("2,0", 0), ("", 0), ("-1", 0), ("GPU-1", 1), ("none", 0), ("\N{SUPERSCRIPT TWO}", 0)],
)
def test_cuda_visible_devices_is_heeded(machine, monkeypatch, asked, count):
    machine(FakeNvml([FakeGpu(), FakeGpu()]))
    monkeypatch.setenv(host.VISIBLE, asked)
    result = plugin.probe()
    if count:
        assert result.status == "available" and result.claims.num_devices == count
    else:
        assert result.status == "unsupported" and f"CUDA_VISIBLE_DEVICES={asked} shows none" in result.reason and "GPU-0, GPU-1" in result.remedy


def test_of_a_gpu_in_mig_mode_one_instance_is_used(machine):
    machine(FakeNvml([FakeGpu(parts=[18 * GIB, 36 * GIB])]))
    result = plugin.probe()
    assert result.status == "available" and result.reason.startswith("NVIDIA H200 MIG 1g, 18 GiB") and result.claims.num_devices == 1
    assert result.claims.memory_bytes == 18 * GIB


def test_an_instance_can_be_named(machine, monkeypatch):
    machine(FakeNvml([FakeGpu(), FakeGpu(parts=[18 * GIB, 36 * GIB])]))
    assert plugin.probe().claims.memory_bytes == 141 * GIB  # whole ones come first
    monkeypatch.setenv(host.VISIBLE, "MIG-1-1,MIG-1-0")
    assert (plugin.probe().claims.memory_bytes, plugin.probe().claims.num_devices) == (36 * GIB, 1)


def test_mig_mode_without_instances(machine):
    machine(FakeNvml([FakeGpu(parts=[])]))
    result = plugin.probe()
    assert result.status == "unsupported" and "MIG mode and has no instance" in result.reason and "nvidia-smi mig -cgi 0 -C" in result.remedy


def test_a_gpu_that_knows_no_mig(machine):
    machine(FakeNvml([FakeGpu("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, knows_mig=False)]))
    assert plugin.probe().status == "available"


# ---------------------------------------------------------------- ctypes, torch's files, time
def test_the_calls_fit_nvidias_header(tmp_path, machine, monkeypatch):
    """A library compiled from C with the types of nvml.h: what ctypes passes is what they take."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(Path(__file__).with_name("fake_nvml.c"))], check=True)
    monkeypatch.setattr(nvml, "LIBRARIES", ("libthatisnot.so.7", str(built)))
    library = nvml.load()
    assert isinstance(library, ctypes.CDLL)
    driver = nvml.ask(library)
    assert (driver.version, driver.cuda) == ("575.57.08", (12, 9)) and library.fake_opened() == 0
    whole, cut = driver.boards
    assert whole == nvml.Board(nvml.Gpu("A GPU", "GPU-a", (8, 9), 80 * GIB), False, ())
    assert cut.is_cut and cut.instances == tuple(nvml.Gpu("A part", f"MIG-{n}", (8, 0), 20 * GIB) for n in (0, 1))


def test_where_no_library_is_none_is_loaded(monkeypatch):
    monkeypatch.setattr(nvml, "LIBRARIES", ("libthatisnot.so.7",))
    assert nvml.load() is None


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", ("2.11.0+cu128", (12, 8))),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ("2.13.0+cpu", None)),
        ("__version__ = '2.13.0'\ncuda = '13.0'\n", ("2.13.0", (13, 0))),
    ],
)
def test_what_torch_was_built_for_is_read_from_its_files(tmp_path, monkeypatch, source, found):
    (tmp_path / "version.py").write_text(source)
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert host.torch_cuda() == found


def test_the_installed_torch_is_understood():
    import torch

    built = torch.version.cuda and tuple(map(int, torch.version.cuda.split(".")[:2]))
    assert host.torch_cuda() == (torch.__version__, built)


def test_discovery_imports_no_torch_and_is_quick():
    code = (
        "import sys, time; from oarlock_cuda import plugin; plugin.devices(); start = time.perf_counter(); plugin.probe();"
        "print((time.perf_counter() - start) * 1e3); sys.exit('torch' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False) for _ in range(3)]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert min(float(run.stdout) for run in runs) < 50


def test_two_steps_are_under_way_unless_the_user_says_otherwise():
    (device,) = plugin.devices()

    def changes(depth: int, *typed: str) -> list[tuple[str, int]]:
        config = SimpleNamespace(typed=typed, scheduler=SimpleNamespace(max_in_flight=depth))
        return [(change.path, change.value) for change in plugin.adjust_config(config, device)]

    assert changes(1) == [("scheduler.max_in_flight", 2)]
    assert changes(2) == changes(1, "scheduler.max_in_flight") == []


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (("oarlock_triton_kernels", "triton"), ""),
        (("triton",), "oarlock-triton-kernels not installed"),
        (("oarlock_triton_kernels",), "triton not installed"),
        ((), "oarlock-triton-kernels and triton not installed"),
    ],
)
def test_a_start_without_kernels_is_warned_of(monkeypatch, here, words):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: name if name in here else None)
    found = plugin.check_model(None, None, plugin.devices()[0])
    assert [(p.severity, p.text.startswith(words)) for p in found] == ([("warning", True)] if words else [])
