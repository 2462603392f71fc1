"""The backend to copy: small, of one source, with no word of its origin in a copy, and conforming once pip has installed it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gen_backend_template
import pytest
from oarlock.backend_api import runtime
from oarlock.cli import main, new_backend
from oarlock.errors import ConfigError
from source_code import ROOT, packages_outside_core, python_files

MINIMAL_LINES, COMPLETE_LINES = 150, 500


def run(*command: str | Path, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "2"} | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True, check=False, env=environment, cwd=cwd)


# ---------------------------------------------------------------- one source
def test_what_core_copies_is_the_package():
    assert new_backend.BUNDLE.read_text(encoding="utf-8") == gen_backend_template.render(), "run: python tools/gen_backend_template.py"


def test_every_file_of_the_package_is_copied():
    top = ROOT / "plugins" / "template_backend"
    copied = {source for _, _, source in gen_backend_template.files()}
    assert set(python_files(top)) | {top / "pyproject.toml", top / "README.md"} == copied


def test_the_template_itself_is_the_copy_of_that_name():
    files = {path: source.read_text(encoding="utf-8") for kind, path, source in gen_backend_template.files() if kind != "minimal"}
    assert {path: text.replace("oarlock-template-backend", "oarlock-template") for path, text in files.items()} == new_backend.render("template")


# ---------------------------------------------------------------- small
@pytest.mark.parametrize(("minimal", "limit"), [(True, MINIMAL_LINES), (False, COMPLETE_LINES)])
def test_lines_of_a_whole_backend_after_the_formatter(tmp_path, minimal, limit):
    for path, text in new_backend.render("mychip", minimal=minimal).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    formatted = run("ruff", "format", "--config", ROOT / "pyproject.toml", tmp_path)
    assert formatted.returncode == 0, formatted.stderr
    checked = run("ruff", "check", "--config", ROOT / "pyproject.toml", tmp_path)
    assert checked.returncode == 0, checked.stdout
    count = sum(len(p.read_text().splitlines()) for p in tmp_path.rglob("*") if p.is_file() and ".ruff_cache" not in p.parts)
    assert count < limit


def test_each_base_class_that_it_uses_has_another_user():
    bases = {name for name in runtime.__all__ if isinstance(getattr(runtime, name), type)}
    users: dict[str, set[str]] = {}
    for package, folder in packages_outside_core().items():
        for path in python_files(folder):
            for listed in re.findall(r"^class \w+\(([\w, ]+)\):", path.read_text(encoding="utf-8"), re.MULTILINE):
                for base in bases & set(listed.split(", ")):
                    users.setdefault(base, set()).add(package)
    mine = {base: found for base, found in users.items() if "oarlock_template" in found}
    assert set(mine) == {"Device", "Attention", "GraphRunner"} and all(len(found) > 1 for found in mine.values()), mine


# ---------------------------------------------------------------- names
@pytest.mark.parametrize("minimal", [True, False])
def test_a_copy_bears_its_own_name_only(minimal):
    files = new_backend.render("mychip", minimal=minimal)
    everything = "\n".join([*files, *files.values()])
    assert "template" not in everything.lower()
    for word in ('name = "oarlock-mychip"', 'mychip = "oarlock_mychip"', "class MychipDevice(Device)", 'name="mychip"', "oarlock_mychip.device:MychipDevice"):
        assert word in everything
    assert ("oarlock_mychip/paged.py" in files) is not minimal


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "no name for a device"),
        ("MyChip", "lower-case"),
        ("my-chip", "lower-case letters and digits"),
        ("2fast", "lower-case letter"),
        ("a/b", "no name for a device"),
        ("x" * 33, "32 at most"),
        ("auto", "--device auto chooses one"),
        ("cpu", "taken by oarlock-cpu"),
        ("sim", "taken by oarlock-sim"),
        ("null", "taken by oarlock "),
        ("nvidia", "oarlock-cuda"),
        ("tpu", "tpu"),
    ],
)
def test_names_that_are_bad_or_taken_are_refused_and_nothing_is_written(tmp_path, name, words):
    with pytest.raises(ConfigError) as refused:
        new_backend.main([name, "--dir", str(tmp_path)])
    assert words in str(refused.value) and not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_left_alone_and_one_that_is_not_is_not_made(tmp_path, capsys):
    (tmp_path / "oarlock-mychip").mkdir()
    assert main.main(["new-backend", "mychip", "--dir", str(tmp_path)]) == 2
    assert "oarlock-mychip exists already; nothing was written" in capsys.readouterr().err
    assert not list((tmp_path / "oarlock-mychip").iterdir())
    assert main.main(["new-backend", "mychip", "--dir", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err and not (tmp_path / "none").exists()


# ---------------------------------------------------------------- from a wheel to a device that conforms
@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Where pip installed Oarlock from a wheel: nothing of the checkout is in reach."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "core", source / "core", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    install(source, site)
    assert (site / "oarlock" / "__init__.py").is_file()
    return site


def install(folder: Path, site: Path) -> None:
    done = run("pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target", site, folder)
    assert done.returncode == 0, done.stderr


# All that the references compute is tried on other devices too; here, that a copy has what a device must have.
MINIMAL = r"contract|device|^(linear|rotary|sample)\[float32|^attention\[float32|^runner\[float32,dense"
COMPLETE = r"contract|device|^attention\[float32,mixed|^runner\[float32,dense,mixtures"


@pytest.mark.parametrize(("name", "flags", "cases"), [("mychip", ["--minimal"], MINIMAL), ("acme", [], COMPLETE)])
def test_a_new_backend_conforms_after_pip_install(site, tmp_path, name, flags, cases):
    made = run("oarlock.cli.main", "new-backend", name, *flags, path=site, cwd=tmp_path)
    assert made.returncode == 0 and f"pip install -e oarlock-{name}/" in made.stdout, made.stderr
    install(tmp_path / f"oarlock-{name}", site)
    tested = run("oarlock.cli.main", "conformance", "--device", name, "--level", "0-4", "--quick", "-k", cases, path=site, cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert f"oarlock conformance  {name} (oarlock-{name} 0.1.0" in tested.stdout
    assert "NOT CONFORMING" not in tested.stdout and re.search(r"^4 runner +[1-9]", tested.stdout, re.MULTILINE), tested.stdout
