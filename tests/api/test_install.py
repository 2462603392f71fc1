"""`tools/install.sh`, which `make install` and `make serve` run, with a C++ compiler and without: what it says, and what doctor and /metrics say.

A copy of the sources is installed into an environment that borrows all other packages from this one, so no index is asked. Kernels
are compiled only where these sources never were.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_server import RealServer

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "cut", "dirname", "env", "find", "head", "sha256sum", "sort")
BORROW = "import site; site.addsitedir({!r})\n"


@pytest.fixture(scope="module", params=["without a compiler", "with one"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The environment's python, whether kernels are there, and what the script said."""
    has_kernels = request.param == "with one"
    if has_kernels and shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    folder = tmp_path_factory.mktemp("install")
    source, venv, tools = folder / "source", folder / "venv", folder / "bin"
    source.mkdir()
    for name in ("core", "backends", "plugins", "tools", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", "build", "tests"))
        else:
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "zz_borrowed.pth").write_text(BORROW.format(sysconfig.get_path("purelib")))
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))
    environment = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "OARLOCK_CPU_KERNELS", "TORCH")}
    environment |= {"VENV": str(venv), "TORCH": "torch", "PIP_NO_INDEX": "1"} | ({} if has_kernels else {"PATH": str(tools)})
    done = subprocess.run(
        [source / "tools/install.sh", "run"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout
    return SimpleNamespace(python=venv / "bin/python", has_kernels=has_kernels, said=done.stdout)


def test_the_script_says_when_reference_ops_are_active_and_how_to_mend_it(installed):
    assert ("reference ops are active" in installed.said) is not installed.has_kernels
    assert ("apt-get install g++" in installed.said and "run make install again" in installed.said) is not installed.has_kernels


def test_doctor_says_what_serves(installed, tmp_path):
    command = [installed.python, "-m", "oarlock.cli.main", "doctor", "--device", "cpu"]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout
    linear, attention = ([line for line in report.splitlines() if line.startswith(f"  {what} ")][-1] for what in ("linear", "attention"))
    if installed.has_kernels:
        assert linear.split() == ["linear", "cpu"] and "no compiled extension" not in report
    else:
        assert linear.split()[1:3] == ["reference", "rejected:"]
        assert all("a C++20 compiler there, run: pip install" in line for line in (linear, attention))


def test_the_metrics_page_says_what_serves(installed, tiny_model, tmp_path):
    with RealServer(tiny_model, "--device", "cpu", log=tmp_path / "log", python=installed.python) as server:
        families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    ops = {s.labels["op"]: s.labels for f in families for s in f.samples if s.name == "oarlock_op_info"}
    (device,) = [s.labels for f in families for s in f.samples if s.name == "oarlock_device_info"]
    assert (device["device"], device["dtype"], ops["moe_topk"]["implementation"]) == ("cpu", "float32", "reference")
    for op in ("linear", "greedy", "paged_attention"):
        if installed.has_kernels:
            assert (ops[op]["implementation"], ops[op]["rejected"]) == ("cpu", "") and "kernels" in device["description"]
        else:
            assert ops[op]["implementation"] == "reference" and "a C++20 compiler there, run: pip install" in ops[op]["rejected"]
            assert "no compiled extension" in device["description"]
