"""Nothing that comes from a file or a client is run: no pickle, no eval, no shell, and only the parts that may talk to other hosts can.

docs/security.md says what this protects. A call that is needed all the same is listed with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_code import CORE, ROOT, core_modules, imports, is_within, module_name, packages_outside_core, python_files, shown, tree

# Modules that run what they read, or pass objects between processes by pickling them.
PICKLING = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "multiprocessing", "torch.multiprocessing", "concurrent.futures.process", "code", "codeop", "imp", "runpy")
BUILTINS = ("eval", "exec", "compile", "__import__", "breakpoint")
METHODS = (
    "os.system", "os.popen", "os.execl", "os.execlp", "os.spawnl", "os.spawnv", "pty.spawn", "commands.getoutput", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp", "importlib.reload", "ctypes.pythonapi",
)  # fmt: skip
PICKLING_METHODS = ("recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
NEEDED_KEYWORD = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False), "numpy.load": ("allow_pickle", False)}
ALLOWED: dict[tuple[str, str], str] = {
    ("core/oarlock/runtime/loader/torch_files.py", "pickle"): "the exception that torch.load raises; checked below to be all that is used of it",
}

CLIENTS = ("httpx", "requests", "urllib.request", "urllib3", "aiohttp", "http.client", "ftplib", "smtplib", "huggingface_hub", "websockets", "socketserver", "xmlrpc")
MAY_CONNECT: dict[str, str] = {
    "oarlock.hub": "fetches the model that the operator named, before the server serves",
    "oarlock.cli": "commands that are clients themselves",
    "oarlock_batches.command": "oarlock run-batch, a client itself",
    "oarlock.conformance.serving": "the kit's own client",
    "oarlock.conformance.serve_level": "the kit's own client",
}


def ours() -> list[Path]:
    folders = [CORE, *packages_outside_core().values(), ROOT / "tools", ROOT / "benchmarks"]
    return [path for folder in folders for path in python_files(folder)]


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; "" for what is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return ""


def found_in(code: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is forbidden there)."""
    for one in imports(code):
        if is_within(one.name, *PICKLING):
            yield one.line, next(name for name in PICKLING if is_within(one.name, name))
    for node in ast.walk(code):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in BUILTINS or name in METHODS or name.rpartition(".")[2] in PICKLING_METHODS:
            yield node.lineno, name
        if name in NEEDED_KEYWORD:
            keyword, value = NEEDED_KEYWORD[name]
            given = keywords.get(keyword)
            if not (isinstance(given, ast.Constant) and given.value is value):
                yield node.lineno, f"{name} without {keyword}={value}"
        if isinstance(keywords.get("shell"), ast.Constant) and keywords["shell"].value:  # type: ignore[attr-defined]
            yield node.lineno, "shell=True"


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    files = ours()
    assert len(files) > 200
    wrong = [f"{shown(path)}:{line}: {what}" for path in files for line, what in found_in(tree(path)) if (shown(path), what) not in ALLOWED]
    assert not wrong


def test_what_is_allowed_is_used_as_its_reason_says() -> None:
    for path, name in ALLOWED:
        uses = {dotted(node) for node in ast.walk(tree(ROOT / path)) if isinstance(node, ast.Attribute) and dotted(node).startswith(f"{name}.")}
        assert uses == {"pickle.UnpicklingError"}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import multiprocessing.pool", "eval('1')", "exec(x)", "compile(x, '', 'exec')", "__import__(x)", "os.system(x)", "torch.load(f)",
        "torch.load(f, weights_only=False)", "np.load(f)", "np.load(f, allow_pickle=True)", "yaml.load(f)", "subprocess.run(x, shell=True)", "socket.recv_pyobj()", "def f():\n    import marshal",
    ],
)  # fmt: skip
def test_the_walk_sees(line: str) -> None:
    assert list(found_in(ast.parse(line)))


@pytest.mark.parametrize("line", ["torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "graph.compile(f)", "re.compile(x)", "model.eval()", "json.load(f)", "subprocess.run([x])"])
def test_the_walk_passes_over(line: str) -> None:
    assert not list(found_in(ast.parse(line)))


def test_only_clients_can_reach_other_hosts() -> None:
    modules = dict(core_modules())
    for folder in packages_outside_core().values():
        modules |= {module_name(path, folder.parent): path for path in python_files(folder)}
    assert any(name.startswith("oarlock_responses") for name in modules)
    wrong = [
        f"{shown(path)}:{one.line}: {one.name}"
        for name, path in modules.items()
        if not is_within(name, *MAY_CONNECT)
        for one in imports(tree(path))
        if is_within(one.name, *CLIENTS)
    ]
    assert not wrong
