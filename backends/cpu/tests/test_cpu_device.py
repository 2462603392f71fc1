"""What the light half says of the host, the device object, and the backend without compiled kernels."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from oarlock_cpu import host, plugin

PACKAGE = Path(plugin.__file__).parent

CPUINFO = """processor\t: 0
model name\t: Example Processor 9000
flags\t\t: fpu avx2 fma avx512f avx512_bf16

processor\t: 1
model name\t: Another
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# ---- processor, threads, memory -------------------------------------------------------------------------------------


def test_processor_is_read_from_cpuinfo(tmp_path):
    processor = host.read_processor(write(tmp_path, {"proc/cpuinfo": CPUINFO}))
    assert (processor.name, processor.isa, processor.has_bf16) == ("Example Processor 9000", "AVX-512 BF16", True)


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("amx_bf16 avx512_bf16", "AVX-512 and AMX BF16"),
        ("avx512f avx2 fma", "AVX-512"),
        ("avx2 fma", "AVX2"),
        ("avx2", "no vector extension known to the kernels"),
    ],
)
def test_instruction_sets_are_named(flags, isa):
    assert host.Processor("x", frozenset(flags.split())).isa == isa


def test_without_proc_there_is_still_an_answer(tmp_path):
    assert host.read_processor(tmp_path).flags == frozenset()
    assert host.memory(tmp_path) is None
    assert host.usable_threads(tmp_path, {0, 1, 2}) == 3


def test_hyperthreads_of_one_core_count_once(tmp_path):
    siblings = {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n" for i in range(8)}
    root = write(tmp_path, siblings)
    assert host.usable_threads(root, set(range(8))) == 4
    assert host.usable_threads(root, {0, 4, 5}) == 2
    ranges = {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i // 2 * 2}-{i // 2 * 2 + 1}\n" for i in range(4)}
    assert host.usable_threads(write(tmp_path, ranges), {0, 1, 2, 3}) == 2


@pytest.mark.parametrize(("limit", "threads"), [("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 6)])
def test_a_version_2_quota_bounds_the_threads(tmp_path, limit, threads):
    root = write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": limit + "\n"})
    assert host.usable_threads(root, set(range(6))) == threads


def test_a_version_1_quota_bounds_the_threads(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/y\n", "sys/fs/cgroup/cpu/y/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/y/cpu.cfs_period_us": "100000"}
    assert host.usable_threads(write(tmp_path, files), set(range(6))) == 3
    assert host.usable_threads(write(tmp_path, {"sys/fs/cgroup/cpu/y/cpu.cfs_quota_us": "-1"}), set(range(6))) == 6


def machine(tmp_path: Path, nodes: list[str], sockets: int, **more: str) -> Path:
    """A machine of these NUMA nodes (lists of processors), spread over so many sockets; no hyperthreads."""
    files = {f"sys/devices/system/node/node{n}/cpulist": text + "\n" for n, text in enumerate(nodes)}
    for n, text in enumerate(nodes):
        low, _, high = text.partition("-")
        for cpu in range(int(low), int(high or low) + 1) if text else ():
            files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = f"{n * sockets // sum(map(bool, nodes))}\n"
    return write(tmp_path, files | more)


def placed(root: Path, cpus: int | set[int], ranks: int = 1, threads: int | None = None) -> list[str]:
    allowed = set(range(cpus)) if isinstance(cpus, int) else cpus
    return [str(host.placement(rank, ranks, threads, root, allowed)) for rank in range(ranks)]


def test_one_worker_keeps_to_the_socket_with_most_allowed_cores(tmp_path):
    root = machine(tmp_path, ["0-23", "24-47"], 2)
    assert placed(root, 48) == ["24 threads on CPUs 0-23"]
    assert placed(root, set(range(10, 48))) == ["24 threads on CPUs 24-47"]
    assert placed(root, {*range(9), 30}) == ["9 threads on CPUs 0-8"]


def test_a_socket_may_be_several_nodes_and_memory_without_processors_is_none(tmp_path):
    root = machine(tmp_path, ["0-11", "12-23", "24-35", "36-47", ""], 2)
    assert placed(root, 48) == ["24 threads on CPUs 0-23"]
    assert placed(root, 48, ranks=4) == [f"12 threads on CPUs {cpus}" for cpus in ("0-11", "12-23", "24-35", "36-47")]


def test_few_cores_of_a_socket_are_not_worth_leaving_the_others(tmp_path):
    root = machine(tmp_path, ["0-3", "4-7"], 2)
    assert placed(root, 8) == ["8 threads"]
    assert placed(root, 8, ranks=2) == ["4 threads on CPUs 0-3", "4 threads on CPUs 4-7"]


def test_workers_of_one_model_take_turns_on_the_sockets(tmp_path):
    root = machine(tmp_path, ["0-23", "24-47"], 2)
    assert placed(root, 48, ranks=2) == ["24 threads on CPUs 0-23", "24 threads on CPUs 24-47"]
    assert placed(root, 48, ranks=4) == ["12 threads on CPUs 0-23", "12 threads on CPUs 24-47"] * 2
    assert placed(root, 48, ranks=3) == ["12 threads on CPUs 0-23", "16 threads on CPUs 24-47", "12 threads on CPUs 0-23"]


def test_threads_of_the_users_choice_leave_a_socket_only_where_they_must(tmp_path):
    root = machine(tmp_path, ["0-23", "24-47"], 2)
    assert placed(root, 48, threads=16) == ["16 threads on CPUs 0-23"]
    assert placed(root, 48, threads=48) == ["48 threads"]


def test_a_quota_that_one_socket_fills_keeps_to_it(tmp_path):
    quota = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}
    assert placed(machine(tmp_path, ["0-5", "6-11"], 2, **quota), 12) == ["4 threads on CPUs 0-5"]


def test_a_second_server_takes_the_socket_with_more_free_memory(tmp_path):
    free = {f"sys/devices/system/node/node{n}/meminfo": f"Node {n} MemTotal: 900 kB\nNode {n} MemFree:  {kib} kB\n" for n, kib in ((0, 100), (1, 800))}
    root = machine(tmp_path, ["0-23", "24-47"], 2, **free)
    assert placed(root, 48) == ["24 threads on CPUs 24-47"]
    assert placed(root, 48, ranks=2)[0] == "24 threads on CPUs 0-23"


def test_one_node_and_a_virtual_machine_of_many_sockets_leave_the_threads_alone(tmp_path):
    assert placed(machine(tmp_path / "a", ["0-15"], 1), 16) == ["16 threads"]
    topology = {f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id": f"{cpu}\n" for cpu in range(16)}
    assert placed(machine(tmp_path / "b", ["0-15"], 1, **topology), 16, ranks=2) == ["8 threads", "8 threads"]


MEMINFO = "MemTotal:       1000 kB\nMemFree:          10 kB\nMemAvailable:    800 kB\n"


def test_memory_without_a_limit_is_the_machines(tmp_path):
    root = write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert host.memory(root) == (800 * 1024, 1000 * 1024)


def test_the_smallest_limit_above_us_binds_and_page_cache_counts_as_free(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": str(500 * 1024),
        "sys/fs/cgroup/a/memory.current": str(300 * 1024),
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {100 * 1024}\nactive_file 7\n",
    }
    assert host.memory(write(tmp_path, files)) == (300 * 1024, 500 * 1024)


def test_version_1_without_a_limit_writes_a_huge_number(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712"}
    assert host.memory(write(tmp_path, files)) == (800 * 1024, 1000 * 1024)


# ---- the light half -------------------------------------------------------------------------------------------------


def run_python(code: str, **env: str) -> str:
    import os

    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True, timeout=120).stdout


def test_light_half_imports_no_torch_and_is_quick():
    code = (
        "import sys, time; import oarlock_cpu.plugin as p; a = time.process_time(); r = p.probe(); b = time.process_time(); p.devices()\n"
        "print('torch' in sys.modules, r.status, b - a < 0.05)\n"
        "import importlib; t = time.process_time(); [sys.modules.pop(m) for m in list(sys.modules) if m.startswith(('oarlock', 'pluggy'))]\n"
        "importlib.import_module('oarlock_cpu.plugin'); print(time.process_time() - t < 0.1)"
    )
    assert run_python(code).split() == ["False", "available", "True", "True"]


def test_probe_names_processor_threads_and_claims():
    result = plugin.probe()
    assert str(host.usable_threads()) in result.reason and host.read_processor().isa in result.reason
    assert result.claims.host_is_device and result.claims.default_swap_bytes == 0 and set(result.claims.block_sizes) >= {8, 16, 32}


def test_claims_hold():
    from oarlock_cpu.device import CpuDevice

    claims, capabilities = plugin.probe().claims, CpuDevice().capabilities
    for name in ("dtypes", "block_sizes", "host_is_device", "default_swap_bytes"):
        assert getattr(claims, name) == getattr(capabilities, name)


@pytest.mark.parametrize(("flags", "first", "fast"), [("avx512_bf16", "bfloat16", ("bfloat16", "float32")), ("amx_bf16", "bfloat16", ("bfloat16", "float32")), ("avx2", "float32", ("float32",))])
def test_preferred_dtype_follows_the_processor(flags, first, fast):
    dtypes, fast_dtypes = plugin.dtype_order(host.Processor("x", frozenset(flags.split())))
    assert dtypes[0] == first and fast_dtypes == fast and set(dtypes) == {"float32", "bfloat16", "float16"}


def test_the_launcher_is_told_to_stop_openmp_from_spinning():
    assert dict(plugin.devices()[0].environment)["GOMP_SPINCOUNT"] == "0"


def test_only_the_public_surface_is_imported():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] != "oarlock" or name.split(".")[:2] == ["oarlock", "backend_api"], f"{path.name} imports {name}"


# ---- the device -----------------------------------------------------------------------------------------------------


def test_a_placed_device_keeps_its_own_thread_and_what_that_starts_to_its_processors(monkeypatch):
    import os
    import threading

    from oarlock_cpu.device import CpuDevice

    whole, seen = os.sched_getaffinity(0), []
    one = frozenset([min(whole)])
    monkeypatch.setattr(host, "placement", lambda *_: host.Placement(1, one))

    def engine() -> None:
        CpuDevice().activate()
        inner = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        inner.start()
        inner.join()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [one] and os.sched_getaffinity(0) == whole


def test_threads_are_set_by_option():
    code = (
        "from oarlock_cpu.device import CpuDevice; import torch\n"
        "d = CpuDevice(options={'threads': 3}); d.activate(); d.verify(); print(torch.get_num_threads(), '3 threads' in d.describe())"
    )
    assert run_python(code).split() == ["3", "True"]


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 1, 8), (8, 2, 4), (7, 2, 3), (1, 2, 1)])
def test_workers_of_one_model_divide_the_threads(monkeypatch, cores, ranks, threads):
    from oarlock_cpu.device import CpuDevice

    monkeypatch.setattr(host, "usable_threads", lambda *_: cores)
    assert f", {threads} thread{'s' * (threads > 1)}, " in CpuDevice(options={"threads": None, "ranks": ranks}).describe()
    monkeypatch.setattr(host, "usable_threads", lambda *_: 64)
    assert f", {threads} thread{'s' * (threads > 1)}, " in CpuDevice(options={"threads": cores, "ranks": ranks}).describe()


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_a_wrong_number_of_threads_is_refused(threads):
    from oarlock_cpu.device import CpuDevice

    with pytest.raises(ValueError, match="at least 1"):
        CpuDevice(options={"threads": threads})


def test_memory_is_what_the_host_says():
    from oarlock_cpu.device import CpuDevice

    free, total = CpuDevice().memory_info()
    assert 0 < free <= total


@pytest.mark.parametrize(("workers", "cores", "warned"), [(1, 1, False), (2, 2, False), (3, 2, True)])
def test_more_workers_than_cores_is_one_warning(monkeypatch, workers, cores, warned):
    monkeypatch.setattr(host, "usable_threads", lambda: cores)
    config = SimpleNamespace(parallel=SimpleNamespace(tensor_parallel_size=workers))
    (spec,) = plugin.devices()
    found = plugin.check_model(None, config, spec)
    assert [(p.severity, "--tensor-parallel-size 3 on 2 cores" in p.text) for p in found] == [("warning", True)] * warned


# ---- without kernels ------------------------------------------------------------------------------------------------

UNBUILT = """
import oarlock.conformance.references
from oarlock.backend_api.runtime import bind_ops
from oarlock_cpu import native, plugin
from oarlock_cpu.device import CpuDevice
device = CpuDevice(); device.activate(); device.verify()
assert "no compiled extension" in device.describe(), device.describe()
assert device.capabilities.batch_invariant == ()
for name, served, why in bind_ops(plugin.kernels(device), "bfloat16").table:
    assert served == "reference", name
    assert name not in plugin.LAYER_OPS or "pip install" in why, why
support = plugin.attention(device)[0].supports(dtype="bfloat16", head_dim=64, block_size=16)
assert not support.ok and "pip install" in support.reasons[0]
try:
    import oarlock_cpu.ops
except ImportError as error:
    assert "no compiled extension" in str(error)
print("served by references")
"""


def test_without_kernels_the_references_serve_and_say_why(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "oarlock_cpu", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert run_python(UNBUILT, PYTHONPATH=str(tmp_path)).strip() == "served by references"


def test_a_library_that_does_not_load_is_a_reason_not_a_crash(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "oarlock_cpu", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "oarlock_cpu/_C.abi3.so").write_bytes(b"not a library")
    code = "from oarlock_cpu import native; print(native.problem())"
    assert "does not load into torch" in run_python(code, PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize("reason", ["there is no C++ compiler", "OARLOCK_CPU_KERNELS=0"])
def test_building_without_a_compiler_succeeds(tmp_path, reason):
    """A wheel is made all the same; it holds the Python files and no library, not even that of an earlier build."""
    source = tmp_path / "source"
    shutil.copytree(PACKAGE.parent, source, ignore=shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info", "tests"))
    platform = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = [source / "oarlock_cpu/_C.abi3.so", source / f"build/lib.{platform}/oarlock_cpu/_C.abi3.so"]
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"from an earlier build")
    env = {"CXX": "no-such-compiler", "CC": "no-such-compiler"} if "compiler" in reason else {"OARLOCK_CPU_KERNELS": "0"}
    import os

    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=source, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert reason in done.stderr
    import zipfile

    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "oarlock_cpu/plugin.py" in names and not any(n.endswith(".so") for n in names)
    assert not stale[1].exists() and stale[0].exists() == ("compiler" in reason)  # beside the sources an editable install loads it


@pytest.mark.kernels
def test_kernels_are_described_and_serve():
    import oarlock.conformance.references  # noqa: F401  (registers the ops)
    from oarlock.backend_api.runtime import bind_ops

    from oarlock_cpu import native
    from oarlock_cpu.device import CpuDevice

    device = CpuDevice()
    assert f"kernels {native.isa()}" in device.describe()
    for dtype in ("float32", "bfloat16"):
        served = {name: by for name, by, _ in bind_ops(plugin.kernels(device), dtype).table}
        assert all(served[op] == "cpu" for op in plugin.LAYER_OPS + plugin.LOGITS_OPS)
    table = {name: (by, why) for name, by, why in bind_ops(plugin.kernels(device), "float16").table}
    assert table["linear"][0] == "reference" and "not in float16" in table["linear"][1] and table["sample"][0] == "cpu"


@pytest.mark.kernels
def test_the_instruction_set_can_be_capped():
    code = "from oarlock_cpu import native; assert not native.problem(); print(native.isa())"
    assert run_python(code, OARLOCK_CPU_ISA="generic").strip() == "generic"
