"""The plugin surface says what it does: documents, users, versions, and what happens to a plugin that is broken."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import oarlock.backend_api as api
import pytest
from oarlock.backend_api import API_VERSION, Extension, Hooks
from oarlock.backend_api.runtime import Attention, Communicator, Device, GraphRunner
from oarlock.plugins import api_problem, installed
from source_code import ROOT, core_modules, is_within, packages_outside_core, python_files, shown, tree

HOOKS = sorted(name for name, member in vars(Hooks).items() if not name.startswith("_") and callable(member))
EXAMPLE_LINES = 5
READERS = {api.Capabilities: ("caps", "capabilities"), api.Claims: ("claims",)}  # what core calls them
WHEN = re.compile(r"^When: (discovery|configure|worker start|tests)\b.*\bonce\b.*\.$", re.DOTALL)


def parameters(hook: str) -> list[str]:
    return list(inspect.signature(getattr(Hooks, hook)).parameters)[1:]


def record(hook: str) -> type:
    """What the hook yields."""
    (kind,) = get_args(get_type_hints(getattr(Hooks, hook))["return"])
    return kind


def parts(hook: str) -> tuple[str, str, str]:
    """(what it is, when it is called, example) of a hook's docstring."""
    text = inspect.getdoc(getattr(Hooks, hook)) or ""
    what, _, rest = text.partition("\n\nWhen:")
    when, _, example = rest.partition("\nExample:\n")
    return what, " ".join(f"When:{when}".split()), textwrap.dedent(example).strip()


# ---------------------------------------------------------------- users
SHOWN = {"batch_invariant": "a promise to the user: `oarlock doctor` shows it, and docs/sampling.md says what follows"}
IN_PLUGINS = {"triton": "kernels for every device that can run them are a plugin's"}  # read there instead of in core


@pytest.mark.parametrize(("record", "name"), [(r, f.name) for r in (api.Capabilities, api.Claims) for f in dataclasses.fields(r)])
def test_what_a_device_declares_is_read_by_core(record, name):
    """A declaration that nothing reads promises a plugin what core does not do. Checks of its form do not count as reading it."""
    if name in SHOWN:
        assert f"`{name}`" in (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
        return
    readers = [
        module
        for module, path in (plugin_modules() if name in IN_PLUGINS else core_modules().items())
        if not is_within(module, "oarlock.backend_api", "oarlock.conformance")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr == name and ast.unparse(node.value).endswith(READERS[record])
    ]
    assert readers, f"nothing reads {record.__name__}.{name}"


def plugin_modules() -> list[tuple[str, Path]]:
    return [(shown(p), p) for folder in packages_outside_core().values() if folder.is_relative_to(ROOT / "plugins") for p in python_files(folder)]


# ---------------------------------------------------------------- documents
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_what_it_yields_when_how_often_and_where(hook):
    what, when, _ = parts(hook)
    assert what and WHEN.match(when), when
    assert "process" in when or "worker" in when or "run of the kit" in when
    light = "device" not in parameters(hook) or hook in ("adjust_config", "check_model")
    assert ("No torch" in when) == (light and hook != "conformance")


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_a_hook_is_short_and_runs(hook):
    example = parts(hook)[2]
    assert 3 <= len(example.splitlines()) <= EXAMPLE_LINES
    (function,) = ast.parse(example).body
    assert isinstance(function, ast.FunctionDef) and function.name == hook
    assert [a.arg for a in function.args.args] == parameters(hook)
    assert [ast.unparse(d) for d in function.decorator_list] == ["hookimpl"]
    scope = {name: getattr(api, name) for name in api.__all__} | {"probe": lambda: None}
    exec(compile(example, hook, "exec"), scope)  # noqa: S102 - our own docstring
    given = {
        "device": SimpleNamespace(name="mydev"), "config": SimpleNamespace(typed=()), "model": SimpleNamespace(head_dim=12),
    }  # fmt: skip
    answer = scope[hook](**{name: given[name] for name in parameters(hook)})
    assert answer and all(type(found) is record(hook) for found in answer)


def test_a_record_exists_only_for_a_hook():
    yielded = {record(hook) for hook in HOOKS}
    records = {value for value in vars(api.specs).values() if inspect.isclass(value) and value.__module__ == "oarlock.backend_api.specs"}
    assert records - yielded == {api.ProbeResult, api.Support}  # parts of records


# ---------------------------------------------------------------- users
def test_every_hook_has_a_user_in_this_repository_beside_cores_default():
    """Core's own devices, ops, attention, graph runner, communicator, limits and configuration are the other user."""
    users = {hook: sorted({p.distribution for p in installed().plugins if callable(getattr(p.module, hook, None))}) for hook in HOOKS}
    assert all(users.values()), users


def test_every_kind_of_extension_is_used_or_named_here():
    kinds = get_args(get_type_hints(Extension)["kind"])
    used = {part.kind for p in installed().plugins for part in p.extensions}
    # Core's families are one user of "model"; the other is the stranger's family in tests/runtime/test_plugin_models.py.
    assert set(kinds) - used == {"model"}


@pytest.mark.parametrize("kind", get_args(get_type_hints(Extension)["kind"]))
def test_every_kind_of_extension_is_documented_and_consumed(kind):
    assert re.search(rf"^\s+{kind}\s+\S", Extension.__doc__ or "", re.MULTILINE)
    sources = [p for p in (ROOT / "core" / "oarlock").rglob("*.py") if p.name not in ("specs.py", "null_plugin.py")]
    assert any(re.search(rf'extensions\.(parts|find)\("{kind}"', p.read_text(encoding="utf-8")) for p in sources)


# ---------------------------------------------------------------- overrides
def subclass(base: type, name: str, method: Callable[..., Any]) -> type:
    return type("Mine", (base,), {name: method})


@pytest.mark.parametrize(
    ("base", "misspelt", "right"),
    [
        (Device, "memory_inf", "memory_info"),
        (Device, "synchronize", "synchronise"),
        (Attention, "attends", "attend"),
        (GraphRunner, "retired", "retire"),
        (Communicator, "allreduce", "all_reduce"),
    ],
)
def test_a_misspelt_override_is_refused_when_the_class_is_made(base, misspelt, right):
    with pytest.raises(TypeError, match=rf"Mine.{misspelt} overrides nothing of {base.__name__}; its members are .*{right}"):
        subclass(base, misspelt, lambda self: None)
    assert subclass(base, "_" + misspelt, lambda self: None)  # private names are free


@pytest.mark.parametrize(
    ("base", "name", "wrong", "right"),
    [
        (Device, "place", lambda self, tensor, name, shard: tensor, lambda self, name, tensor, shard: tensor),
        (Device, "seed", lambda self: None, lambda self, value: None),
        (Attention, "copy_blocks", lambda self, cache, destination, source: cache, lambda self, cache, source, destination: cache),
        (GraphRunner, "compile", lambda self, fn, tag: fn, lambda self, fn, example, tag: fn),
        (Communicator, "broadcast", lambda self, x: x, lambda self, tensor: tensor),
    ],
)
def test_an_override_with_other_parameters_is_refused_when_the_class_is_made(base, name, wrong, right):
    with pytest.raises(TypeError, match=rf"Mine.{name}.* must take the parameters"):
        subclass(base, name, wrong)
    assert subclass(base, name, right)


# ---------------------------------------------------------------- versions
@pytest.mark.parametrize(
    ("wanted", "ours", "upgrade"),
    [
        ((1, 0), (1, 0), None),
        ((1, 0), (1, 3), None),
        ((1, 3), (1, 3), None),
        ((1, 4), (1, 3), "oarlock"),
        ((2, 0), (1, 3), "oarlock"),
        ((1, 9), (2, 0), "oarlock-x"),
        ((0, 9), (1, 0), "oarlock-x"),
        ((3, 1), (2, 9), "oarlock"),
    ],
)
def test_versions_major_equal_and_minor_no_newer(wanted, ours, upgrade):
    problem = api_problem("oarlock-x", wanted, ours)
    if upgrade is None:
        assert problem == ""
    else:
        assert f"API {wanted[0]}.{wanted[1]}" in problem and f"has {ours[0]}.{ours[1]}" in problem
        assert problem.endswith(f"upgrade {upgrade}")


def test_plugins_of_this_repository_are_of_this_version():
    for plugin in installed().plugins:
        assert not plugin.error, plugin.detail
        assert all(spec.api_version[0] == API_VERSION[0] and spec.api_version <= API_VERSION for spec in plugin.devices)


# ---------------------------------------------------------------- a broken plugin
BROKEN = 'raise RuntimeError("no such library: libnone.so")\n'


@pytest.fixture
def oarlock_with(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `oarlock ...` where one more distribution is installed, whose module is `source`."""

    def run(*arguments: str, source: str = BROKEN, group: str = "oarlock.devices") -> subprocess.CompletedProcess[str]:
        info = tmp_path / "oarlock_stranger-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oarlock-stranger\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\nstranger = oarlock_stranger\n")
        (tmp_path / "oarlock_stranger.py").write_text(source)
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
        command = [sys.executable, "-m", "oarlock.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path)

    return run


@pytest.mark.parametrize("group", ["oarlock.devices", "oarlock.plugins"])
def test_doctor_names_a_broken_plugin_with_its_traceback(oarlock_with, group):
    text = oarlock_with("doctor", "--device", "null", group=group).stdout
    assert "Broken: stranger (oarlock-stranger 1.0)" in text
    assert "Traceback (most recent call last)" in text and "oarlock_stranger.py" in text and "libnone.so" in text


def test_a_broken_plugin_ends_nothing_that_did_not_ask_for_it(oarlock_with):
    assert oarlock_with("--help").returncode == 0
    listed = oarlock_with("devices")
    assert listed.returncode == 0 and "libnone.so" in listed.stdout
    assert oarlock_with("null-tokens", "5", "--vocab-size", "9", group="oarlock.plugins").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "group", "code"),
    [
        (("serve", "m", "--device", "stranger"), "oarlock.devices", 1),
        (("serve", "m", "--stranger-level", "3"), "oarlock.plugins", 2),
        (("stranger-command",), "oarlock.plugins", 2),
    ],
)
def test_a_broken_plugin_that_was_asked_for_ends_the_start_and_is_named(oarlock_with, tmp_path, arguments, group, code):
    if "--device" in arguments:
        config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9}
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text(str(config).replace("'", '"'))
        arguments = (*arguments, "--port", "0", "--host", "127.0.0.1")
    ran = oarlock_with(*arguments, group=group)
    assert ran.returncode == code, ran.stderr
    last = ran.stderr.strip().splitlines()[-1]
    assert "oarlock-stranger" in last and "libnone.so" in last and "oarlock doctor" in last


def test_a_hook_of_another_name_makes_the_plugin_broken(oarlock_with):
    source = "from oarlock.backend_api import hookimpl\n\n@hookimpl\ndef speculation():\n    return []\n"
    text = oarlock_with("doctor", "--device", "null", source=source, group="oarlock.plugins").stdout
    assert "implements a hook that Oarlock does not have" in text and "speculation" in text


def test_a_stranger_needs_no_more_than_the_public_surface(oarlock_with):
    source = """
from oarlock.backend_api import Extension, OptionSpec, hookimpl

@hookimpl
def options():
    return [OptionSpec("stranger", "depth", "int", 3, "How deep.")]

@hookimpl
def extensions():
    return [Extension("command", "greet", "oarlock_stranger:greet", help="say hello")]

def greet(arguments):
    print("hello", *arguments)
    return 7
"""
    ran = oarlock_with("greet", "you", source=source, group="oarlock.plugins")
    assert (ran.returncode, ran.stdout) == (7, "hello you\n")
    assert "greet        say hello (oarlock-stranger)" in oarlock_with("--help", source=source, group="oarlock.plugins").stdout
    assert "--stranger-depth N    How deep. [3]" in oarlock_with("serve", "--help", source=source, group="oarlock.plugins").stdout
