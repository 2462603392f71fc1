"""What starting costs: best of five, so that a busy machine does not fail it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from source_code import ROOT, packages_outside_core

pytestmark = pytest.mark.alone
IMPORT_S = 0.150
HELP_S = 0.5
PLUGIN_S = 0.100
REPEATS = 5


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, stdin=subprocess.DEVNULL).stdout


def import_seconds(first: str, module: str) -> float:
    code = f"import time\n{first}\nt = time.perf_counter()\nimport {module}\nprint(time.perf_counter() - t)"
    return min(float(run(sys.executable, "-c", code)) for _ in range(REPEATS))


def test_import_oarlock_is_quick():
    assert import_seconds("", "oarlock") < IMPORT_S


@pytest.mark.parametrize("package", sorted(packages_outside_core()))
def test_light_module_of_a_plugin_imports_quickly(package):
    from importlib.metadata import entry_points

    modules = [
        e.value.split(":")[0]
        for group in ("oarlock.devices", "oarlock.plugins")
        for e in entry_points(group=group)
        if e.value.startswith(package)
    ]
    assert modules, f"{package} is not installed; run make install"
    for module in modules:
        assert import_seconds("import oarlock.backend_api", module) < PLUGIN_S
        assert run(sys.executable, "-c", f"import sys, {module}; print('torch' in sys.modules)").strip() == "False"


def command() -> str:
    return str(Path(sys.executable).with_name("oarlock"))


def test_help_is_quick_and_prints_help():
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        printed = run(command(), "--help")
        seconds.append(time.perf_counter() - started)
        assert "serve" in printed
    assert min(seconds) < HELP_S


def test_help_and_import_load_no_torch():
    code = "import sys, oarlock\nsys.argv = ['oarlock', '--help']\nfrom oarlock.cli.main import main\ntry:\n    main()\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).splitlines()[-1] == "False"
