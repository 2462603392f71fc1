"""What the documents tell a reader to type exists: commands, flags, make targets, folders, modules, Python names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from source_code import ROOT, imports, shown, tracked_files

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "shell", "console")
PLAIN = {"apt-get", "cd", "curl", "docker", "export", "git", "pytest", "source"}  # not ours to check
QUICK = ("oarlock devices", "oarlock --help", "oarlock --version")  # run for real


def documents() -> list[Path]:
    return [p for p in tracked_files() if p.suffix == ".md" and "adr" not in p.parts]


def blocks(path: Path, languages: tuple[str, ...]) -> list[str]:
    return [body for language, body in FENCE.findall(path.read_text(encoding="utf-8")) if language in languages]


def commands(path: Path) -> list[list[str]]:
    """The words of each command line; drawings and sample output in unmarked fences are passed over."""
    found = []
    for body in blocks(path, SHELL):
        for line in body.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:
                continue  # an apostrophe in prose
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and re.search(r"^(\.venv/bin/)?(oarlock|make|pip|python3?|tools/\S+)$", words[0]):
                found.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return found


@cache
def help_of(*command: str) -> str:
    ran = subprocess.run([str(Path(sys.executable).with_name("oarlock")), *command, "--help"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, f"oarlock {' '.join(command)} --help: {ran.stderr}"
    return ran.stdout


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def problem(words: list[str]) -> str | None:
    """What is wrong with one command, or None."""
    match words:
        case ["make", *rest]:
            unknown = [w for w in rest if "=" not in w and not w.startswith("[") and w not in targets()]
            return f"no make target {unknown}" if unknown else None
        case ["pip", "install", *rest]:
            folders = [w.partition("[")[0] for w in rest if w.startswith(("./", "."))]
            missing = [f for f in folders if not (ROOT / f / "pyproject.toml").is_file()]
            return f"nothing to install in {missing}" if missing else None
        case ["python" | "python3", "-m", "pip", "install", *rest]:
            return problem(["pip", "install", *rest])
        case ["python" | "python3", "-m", module, *_]:
            return None if importlib.util.find_spec(module) else f"no module {module}"
        case ["python" | "python3", script, *_] if script.endswith(".py"):
            return None if (ROOT / script).is_file() else f"no file {script}"
        case ["oarlock", *rest]:
            return oarlock_problem(rest)
        case [tool, *_] if tool.startswith("tools/"):
            return None if (ROOT / tool).is_file() else f"no file {tool}"
    return None


def oarlock_problem(rest: list[str]) -> str | None:
    from oarlock.cli.main import available
    from oarlock.extensions import parts

    if not rest or rest[0].startswith("-"):
        return None
    if rest[0] not in (*available(), *(part.name for _, part in parts("command"))):
        return f"no command oarlock {rest[0]}"
    with_sub = (rest[0], rest[1]) if rest[0] == "bench" and len(rest) > 1 and not rest[1].startswith("-") else (rest[0],)
    text = help_of(*with_sub)
    unknown = [w.partition("=")[0] for w in rest if re.match(r"--[a-z]", w) and not re.search(re.escape(w.partition("=")[0]) + r"(?![\w-])", text)]
    return f"oarlock {' '.join(with_sub)} has no {unknown}" if unknown else None


def test_commands_in_the_documents_exist():
    every = [(path, words) for path in documents() for words in commands(path)]
    assert every
    wrong = [f"{shown(path)}: {' '.join(words)}: {why}" for path, words in every if (why := problem(words))]
    assert not wrong


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("make tset", True),
        ("make test", False),
        ("pip install ./backends/nowhere", True),
        ("pip install ./backends/cpu", False),
        ("python -m pip install ./plugins/nothing", True),
        ("oarlock srve x", True),
        ("oarlock serve x --prot 1", True),
        ("oarlock serve x --port 1", False),
        ("python -m oarlock.nothing", True),
        ("tools/nothing.sh", True),
    ],
)
def test_the_command_check_itself(line, wrong):
    assert bool(problem(shlex.split(line))) is wrong


def test_python_in_the_documents_compiles_and_its_imports_exist():
    for path in documents():
        for body in blocks(path, ("python",)):
            for found in imports(ast.parse(body, shown(path))):
                module, _, name = found.name.rpartition(".")
                if found.name.split(".")[0] == "openai" or importlib.util.find_spec(found.name.split(".")[0]) is None:
                    continue  # a reader's own package
                assert _exists(module, name), f"{shown(path)}: {found.name} does not exist"


def _exists(module: str, name: str) -> bool:
    if not module:
        return importlib.util.find_spec(name) is not None
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


def test_hints_name_the_sources_that_this_version_has():
    from oarlock.hints import load_hints

    tracked = {str(path.relative_to(ROOT)) for path in tracked_files()}
    for known in load_hints():
        folder = known.source or f"backends/{known.device}"
        is_here = f"{folder}/pyproject.toml" in tracked
        assert bool(known.source) == is_here, f"core/oarlock/hints.toml, {known.device}: {'add' if is_here else 'take out'} source = \"{folder}\""


def test_make_serve_passes_flags_on():
    command = ["make", "--no-print-directory", "-n", "serve", "MODEL=x.gguf", "ARGS=--max-model-len 2048 --log-level debug"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert shown.rstrip().endswith("--max-model-len 2048 --log-level debug") and "x.gguf" in shown


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_run(command):
    program, *rest = command.split()
    assert subprocess.run([str(Path(sys.executable).with_name(program)), *rest], check=False, capture_output=True, cwd=ROOT).returncode == 0
