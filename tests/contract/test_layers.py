"""Who may import whom. The picture is in CONTRIBUTING.md; these tests keep it true."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from source_code import (
    CORE,
    ROOT,
    Import,
    control_plane_modules,
    core_modules,
    imports,
    is_within,
    packages_outside_core,
    python_files,
    relative_imports,
    shown,
    tree,
)

# Bottom first. A module imports from its own line and the lines above it in this table; lines whose parts are
# independent of one another stand in INDEPENDENT.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    (
        "config",
        "device_choice",
        "extensions",
        "gguf_config",
        "gguf_header",
        "hints",
        "hub",
        "kv_scales",
        "kv_spec",
        "logs",
        "memory_plan",
        "model_summary",
        "plugins",
        "pooling_params",
        "quantization",
        "rope_config",
        "sampling_params",
        "structured_outputs",
        "weight_files",
    ),
    ("messages", "request", "shapes"),
    ("kv",),
    ("scheduler", "executor"),
    ("engine",),
    ("frontend",),
    ("async_llm", "cli", "entrypoints", "llm", "llm_pooling", "offline_engine", "server"),
)
INDEPENDENT = {("scheduler", "executor"), ("executor", "scheduler")}
RUNTIME_MAY_IMPORT = (
    "backend_api",
    "config",
    "errors",
    "extensions",
    "gguf_config",
    "gguf_header",
    "hub",
    "kv_scales",
    "kv_spec",
    "logs",
    "memory_plan",
    "messages",
    "model_summary",
    "plugins",
    "pooling_params",
    "quantization",
    "rope_config",
    "runtime",
    "sampling_params",
    "shapes",
    "weight_files",
)
HEAVY = ("torch", "transformers", "accelerate", "triton", "torchax", "jax")
# What the server side brings; the worker side and LLM(...) work without it.
SERVER_ONLY = ("fastapi", "httptools", "msgspec", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop", "zmq")


def part(module: str) -> str:
    """ "oarlock.kv.manager" -> "kv"; "oarlock" -> ""."""
    return module.split(".")[1] if "." in module else ""


def rank(name: str) -> int | None:
    return next((at for at, line in enumerate(LAYERS) if name in line), None)


def upward(module: str, found: Import) -> str | None:
    """What is wrong with one import of a control-plane module, or None."""
    mine, theirs = part(module), part(found.name)
    if not is_within(found.name, "oarlock") or not theirs or theirs in (mine, "backend_api", "__version__"):
        return None
    if theirs in ("runtime", "conformance"):
        return f"{module}:{found.line} imports {found.name}; the control plane reaches torch by dotted path only"
    above = rank(theirs)
    if above is None:
        return None if f"oarlock.{theirs}" not in core_modules() else f"{module}:{found.line} imports {found.name}, which has no layer"
    if above > (rank(mine) or 0) or (mine, theirs) in INDEPENDENT:
        return f"{module}:{found.line} imports {found.name}, which lies above {mine}"
    return None


def of_core(*packages: str) -> list[tuple[str, Import]]:
    """The imports of core's modules inside the given packages."""
    return [(name, i) for name, path in core_modules().items() if is_within(name, *packages) for i in imports(tree(path))]


def test_every_module_has_a_layer():
    known = {name for line in LAYERS for name in line} | {"", "runtime", "conformance", "backend_api", "__main__"}
    unknown = {part(m) for m in core_modules()} - known
    assert not unknown, f"give {sorted(unknown)} a layer in LAYERS, or put them into a package that has one"


def test_control_plane_imports_only_downwards():
    wrong = [
        upward(name, i)
        for name, path in control_plane_modules().items()
        if part(name) not in ("", "backend_api")
        for i in imports(tree(path))
    ]
    assert not [w for w in wrong if w]


@pytest.mark.parametrize(
    ("module", "name", "ok"),
    [
        ("oarlock.kv.manager", "oarlock.errors", True),
        ("oarlock.kv.manager", "oarlock.scheduler.queues", False),
        ("oarlock.executor.base", "oarlock.scheduler.scheduler", False),
        ("oarlock.engine.core", "oarlock.runtime.worker", False),
        ("oarlock.engine.core", "oarlock.backend_api", True),
    ],
)
def test_the_layer_check_itself(module, name, ok):
    assert (upward(module, Import(name, 1)) is None) is ok


def test_runtime_imports_only_what_it_may():
    wrong = [f"{m}:{i.line} imports {i.name}" for m, i in of_core("oarlock.runtime") if part(i.name) and is_within(i.name, "oarlock")
             and f"oarlock.{part(i.name)}" in core_modules() and part(i.name) not in RUNTIME_MAY_IMPORT]  # fmt: skip
    assert not wrong


def test_backend_api_imports_nothing_else_of_ours():
    wrong = [
        f"{m}:{i.line} imports {i.name}"
        for m, i in of_core("oarlock.backend_api")
        if is_within(i.name, "oarlock") and not is_within(i.name, "oarlock.backend_api")
    ]
    assert not wrong


def test_light_half_of_backend_api_needs_the_standard_library_and_pluggy_only():
    allowed = {*sys.stdlib_module_names, "pluggy", "oarlock"}
    wrong = [
        f"{m}:{i.line} imports {i.name}"
        for m, i in of_core("oarlock.backend_api")
        if not is_within(m, "oarlock.backend_api.runtime") and i.name.split(".")[0] not in allowed
    ]
    assert not wrong


def test_control_plane_never_imports_torch():
    wrong = [
        f"{name}:{i.line} imports {i.name}"
        for name, path in control_plane_modules().items()
        for i in imports(tree(path))
        if is_within(i.name, *HEAVY)
    ]
    assert not wrong


def test_importing_the_whole_control_plane_loads_no_torch():
    """The transitive form: through third-party packages too."""
    names = [n for n in control_plane_modules() if not n.endswith("__main__")]
    code = f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == "[]"


def test_in_process_path_needs_no_server_package():
    """Config, plugins, scheduler, kv, the engine's loop, the inline executor, the worker and LLM import without the server's packages."""
    names = [n for n in core_modules() if part(n) not in ("server", "cli", "entrypoints") and n not in _SERVER_SIDE]
    code = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {SERVER_ONLY!r}:
            raise ModuleNotFoundError("refused: " + name)
sys.meta_path.insert(0, Refuse())
for n in {names!r}:
    try:
        importlib.import_module(n)
    except ModuleNotFoundError as error:
        if "refused" in str(error):
            print(n, error)
        else:
            raise
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert not ran.stdout.strip(), ran.stdout


# Modules outside server, cli and entrypoints that serve the split into processes or HTTP, and may use the server's packages.
_SERVER_SIDE = ("oarlock.engine.process", "oarlock.engine.process_client", "oarlock.engine.wire")


def test_only_the_kv_manager_imports_the_block_pool():
    users = {m for m, i in of_core("oarlock") if is_within(i.name, "oarlock.kv.block_pool")}
    assert users <= {"oarlock.kv.manager"}


def test_core_imports_no_backend_and_no_plugin():
    wrong = [f"{m}:{i.line} imports {i.name}" for m, i in of_core("oarlock") if i.name.startswith("oarlock_")]
    assert not wrong


def test_imports_are_absolute():
    wrong = [
        f"{shown(p)}:{line}"
        for folder in (CORE, *packages_outside_core().values())
        for p in python_files(folder)
        for line in relative_imports(tree(p))
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(packages_outside_core()))
def test_backends_and_plugins_import_only_the_backend_api(package):
    folder = packages_outside_core()[package]
    wrong = []
    for path in python_files(folder.parent):
        allowed = ["oarlock.backend_api", package]
        if "tests" in path.relative_to(folder.parent).parts:
            allowed += ["oarlock.conformance", "oarlock.shapes"]
        for found in imports(tree(path)):
            ours = is_within(found.name, "oarlock") or found.name.startswith("oarlock_")
            if ours and found.name != "oarlock" and not is_within(found.name, *allowed):
                wrong.append(f"{shown(path)}:{found.line} imports {found.name}")
    assert not wrong


def test_imports_inside_functions_are_seen_and_those_for_types_are_not():
    source = "if TYPE_CHECKING:\n    import torch\ndef f():\n    from oarlock.kv import manager\n"
    assert [i.name for i in imports(ast.parse(source))] == ["oarlock.kv", "oarlock.kv.manager"]


ANY_FIRST = """
import importlib, sys
import torch
wrong = []
for module in sys.argv[1:]:
    for name in [n for n in sys.modules if n.partition('.')[0] == 'oarlock']:
        del sys.modules[name]
    try:
        importlib.import_module(module)
    except Exception as error:
        wrong.append(f'{module}: {type(error).__name__}: {error}')
print('\\n'.join(wrong))
"""


def test_any_module_of_the_runtime_may_be_imported_first():
    """A cycle shows only to whoever enters it at the wrong place."""
    modules = [name for name in core_modules() if is_within(name, "oarlock.runtime")]
    done = subprocess.run([sys.executable, "-c", ANY_FIRST, *modules], check=False, capture_output=True, text=True, timeout=120)
    assert not done.returncode and not done.stdout.strip(), done.stdout + done.stderr
