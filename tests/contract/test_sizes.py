"""Size budgets. Raising one takes a decision record in docs/adr/."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from source_code import CORE, ROOT, control_plane_modules, core_modules, is_within, packages_outside_core, python_files, shown, tree

MAX_FILE = 600
MAX_FUNCTION = 60
MAX_KERNEL = 80  # compiled for a device by @triton.jit: a page
MAX_TABLE = 120  # kernels in other languages, and functions that are one long table
MAX_MODEL_FILE = 300
MAX_CONTROL_PLANE = 12_300  # without server, cli and the option table; docs/adr/0001, 0002, 0004 to 0009
MAX_SERVER = 4_300  # docs/adr/0009, 0011
MAX_RUNTIME = 5_500  # without models
OPTION_TABLE = ("oarlock.config.option", "oarlock.config.options")
TABLES: dict[str, str] = {}  # "path:function" -> why it may be as long as a table


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def total(*packages: str, without: tuple[str, ...] = ()) -> int:
    return sum(lines(p) for name, p in core_modules().items() if is_within(name, *packages) and not is_within(name, *without))


def source_files() -> list[Path]:
    return [p for folder in (CORE, *packages_outside_core().values(), ROOT / "tools", ROOT / "benchmarks") for p in python_files(folder)]


def test_size_of_each_package(capsys):
    """Not a limit: what the limits below are spent on."""
    count: Counter[str] = Counter()
    for name, path in core_modules().items():
        count[".".join(name.split(".")[:2])] += lines(path)
    for name, folder in packages_outside_core().items():
        count[name] += sum(lines(p) for p in python_files(folder))
    with capsys.disabled():
        print("\nlines  package")
        for name, size in sorted(count.items()):
            print(f"{size:5}  {name}")
        print(f"{sum(count.values()):5}  in all")
    assert count["oarlock.backend_api"] > 0


def test_files_are_short():
    long = [f"{shown(p)}: {lines(p)}" for p in source_files() if lines(p) > MAX_FILE]
    assert not long, f"over {MAX_FILE} lines"


def test_model_files_are_short():
    long = [f"{shown(p)}: {lines(p)}" for p in python_files(CORE / "runtime" / "models") if lines(p) > MAX_MODEL_FILE]
    assert not long, f"over {MAX_MODEL_FILE} lines"


def test_functions_are_short():
    long = []
    for path in source_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or 0) - node.lineno + 1
                is_kernel = any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
                limit = MAX_TABLE if f"{shown(path)}:{node.name}" in TABLES else MAX_KERNEL if is_kernel else MAX_FUNCTION
                if size > limit:
                    long.append(f"{shown(path)}:{node.lineno} {node.name}: {size} lines, limit {limit}")
    assert not long


def test_control_plane_is_small():
    count = sum(
        lines(p) for name, p in control_plane_modules().items() if not is_within(name, "oarlock.server", "oarlock.cli", *OPTION_TABLE)
    )
    assert count <= MAX_CONTROL_PLANE


def test_server_is_small():
    assert total("oarlock.server") <= MAX_SERVER


def test_runtime_is_small():
    assert total("oarlock.runtime", without=("oarlock.runtime.models",)) <= MAX_RUNTIME


def test_no_file_has_a_name_that_says_nothing():
    banned = {"utils.py", "util.py", "common.py", "misc.py", "helper.py", "helpers.py"}
    assert not [shown(p) for p in source_files() if p.name in banned]
