"""Every backend is a distribution of its own, and `oarlock[NAME]` brings it: resolved by pip with dependencies on, from wheels alone.

No index is asked. What others provide is played by wheels without content, of the versions that are installed here, or of the lowest
version that is asked for where a package is not (the tpu's).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_code import ROOT, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = {path.parent.name: path.parent for path in sorted(ROOT.glob("backends/*/pyproject.toml"))}
STALE = Path("build/lib/oarlock/removed_long_ago.py")  # setuptools would put it into the wheel


def requirements_of(folder: Path) -> list[Requirement]:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in project.get("dependencies", ())]


def empty_wheel(folder: Path, name: str, version: str, requires: list[str]) -> None:
    """A wheel with metadata and nothing else."""
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    texts = {
        "METADATA": "\n".join([f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]) + "\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        record = []
        for file, text in texts.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{stem}.dist-info/{file},sha256={digest},{len(text)}")
        wheel.writestr(f"{stem}.dist-info/RECORD", "\n".join([*record, f"{stem}.dist-info/RECORD,,"]) + "\n")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what wheels are built from, with a file of an earlier build in it."""
    copy = tmp_path_factory.mktemp("sources")
    for path in tracked_files():
        part = path.relative_to(ROOT)
        if part.parts[0] in ("core", "backends", "plugins") or part.name in ("pyproject.toml", "README.md", "make_wheels.sh"):
            (copy / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy / part)
    (copy / STALE).parent.mkdir(parents=True)
    (copy / STALE).touch()
    return copy


@pytest.fixture(scope="session")
def wheels(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheels, as `make wheels` builds them but without kernels: those are backends/cpu/tests/test_cpu_build.py's."""
    out = tmp_path_factory.mktemp("wheels")
    subprocess.run([sources / "tools/make_wheels.sh", out], check=True, env={**os.environ, "OARLOCK_CPU_KERNELS": "0", "VENV": sys.prefix})
    return out


def test_make_wheels_builds_each_distribution_once_and_leaves_the_sources_alone(sources, wheels):
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in sources.rglob("pyproject.toml") if "tests" not in path.relative_to(sources).parts]
    assert sorted(p.name.split("-")[0] for p in wheels.iterdir()) == sorted(project["name"].replace("-", "_") for project in projects)
    (core,) = wheels.glob("oarlock-*.whl")
    assert STALE.name not in {Path(name).name for name in zipfile.ZipFile(core).namelist()}
    assert not list(sources.rglob("*.egg-info")) and [p.name for p in sources.rglob("build")] == ["build"]


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty wheels of everything that ours require."""
    out, done = tmp_path_factory.mktemp("others"), set()
    for requirement in [Requirement(text) for text in PROJECT["dependencies"]] + [r for f in SOURCES.values() for r in requirements_of(f)]:
        name = canonicalize_name(requirement.name)
        if name.startswith("oarlock") or name in done:
            continue
        done.add(name)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = next(s.version for s in requirement.specifier if s.operator in (">=", "=="))
        empty_wheel(out, requirement.name, version, [])
    return out


def test_every_backend_is_named_by_an_extra():
    assert set(SOURCES) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("name", SOURCES)
def test_the_extra_resolves_to_our_wheel(wheels, others, name):
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-index", "--report", "-"]
    command += ["--find-links", str(wheels), "--find-links", str(others), f"oarlock[{name}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    assert done.returncode == 0, done.stderr
    chosen = {canonicalize_name(one["metadata"]["name"]): one["download_info"]["url"] for one in json.loads(done.stdout)["install"]}
    (wheel,) = wheels.glob(f"oarlock_{name}-*.whl")
    assert chosen[f"oarlock-{name}"] == wheel.as_uri() and "oarlock" in chosen
    assert not {f"oarlock-{other}" for other in SOURCES if other != name} & set(chosen)
    assert "torch" not in chosen, "which torch is wanted depends on the device and is installed first"


@pytest.mark.parametrize("name", SOURCES)
def test_the_wheel_holds_its_package_and_entry_point(wheels, name):
    (path,) = wheels.glob(f"oarlock_{name}-*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (entry,) = [n for n in names if n.endswith(".dist-info/entry_points.txt")]
        text = wheel.read(entry).decode()
    assert f"[oarlock.devices]\n{name} = oarlock_{name}.plugin" in text
    missing = {f"oarlock_{name}/{p.name}" for p in (SOURCES[name] / f"oarlock_{name}").glob("*.py")} - set(names)
    assert not missing
