"""docs/backends.md: its tables are the source's, its files are what `oarlock new-backend` writes, and the backend that it builds conforms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import gen_backend_doc
import pytest
from oarlock.backend_api import Capabilities, Hooks, runtime
from oarlock.backend_api.runtime import registry
from oarlock.cli.new_backend import render
from oarlock.shapes import BucketTable
from source_code import ROOT

GUIDE = ROOT / "docs" / "backends.md"
FILE = re.compile(r"^(Add to )?`oarlock-mydev/([^`]+)`:.*?^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text() -> str:
    return GUIDE.read_text(encoding="utf-8")


def files() -> dict[str, str]:
    """Path -> text, as a reader has them at the end."""
    found: dict[str, str] = {}
    for addition, path, body in FILE.findall(text()):
        assert bool(addition) == (path in found), path
        found[path] = found.get(path, "") + body
    return found


# ---------------------------------------------------------------- tables
def test_the_tables_are_current():
    assert text() == gen_backend_doc.render(text()), "run: python tools/gen_backend_doc.py"


def test_the_tables_are_whole():
    made = {name: gen_backend_doc.section(name) for name in gen_backend_doc.SECTION.findall(text())}
    hooks = [name for name in vars(Hooks) if not name.startswith("_")]
    assert all(f"| `{name}(" in made["hooks"] for name in hooks)
    assert all(f"| `{name}`" in made["ops"] for name in registry())
    assert all(f"| `{name}` |" in made["Capabilities"] for name in Capabilities.__slots__)
    for base in ("Device", "Attention", "GraphRunner", "Communicator"):
        members = [name for name, value in vars(getattr(runtime, base)).items() if not name.startswith("_") and (callable(value) or isinstance(value, property))]
        assert len(members) >= 3 and all(f"def {name}(self" in made[base] for name in members)


def test_a_stale_table_is_seen():
    changed = text().replace("| `kv_update` |", "| `kv_updates` |")
    assert changed != text() and gen_backend_doc.render(changed) == gen_backend_doc.render(text())


# ---------------------------------------------------------------- what it says
def test_the_first_files_are_those_that_new_backend_writes():
    first = {path: body for addition, path, body in FILE.findall(text()) if not addition}
    written = render("mydev", minimal=True)
    assert {path: first[path] for path in written if path != "README.md"} == {path: body for path, body in written.items() if path != "README.md"}


def test_a_missing_member_shows_when_the_object_is_made_and_a_misspelt_one_when_the_class_is():
    class NoActivate(runtime.Device):
        torch_device = capabilities = None

    with pytest.raises(TypeError, match="activate"):
        NoActivate()
    with pytest.raises(TypeError, match="overrides nothing"):
        type("Misspelt", (runtime.Device,), {"activat": lambda self: None})


def test_its_other_classes_are_made_and_its_buckets_are_a_table():
    inside = {body for _, _, body in FILE.findall(text())}
    scope: dict[str, object] = {}
    for body in PYTHON.findall(text()):
        if body not in inside and "@abstractmethod" not in body:
            exec(compile(body, GUIDE.name, "exec"), scope)  # noqa: S102 - our own guide
    table = BucketTable(**scope["Compiled"].buckets(None, 16, 512, 32))  # type: ignore[attr-defined]
    assert table.decode_rows == (4, 16) and table.out_rows == (20,)
    assert scope["MydevRunner"](None).compile(len, (), "p") is len  # type: ignore[operator]


def test_the_keywords_of_supports_are_those_that_core_asks_with():
    from oarlock.backend_api import AttentionSpec, Support
    from oarlock.runtime.choice import choose_attention

    asked: dict[str, object] = {}

    def supports(**given):
        asked.update(given)
        return Support(False, ("asked",))

    device = type("Some", (), {"capabilities": Capabilities()})()
    params = runtime.AttentionParams(4, 2, 16, 0.25, window=7)
    choose_attention([AttentionSpec("mine", "x:y", 1, supports)], device, params, "window", "float32", 16)
    table = text().partition("`supports` is asked once")[2].partition("`oarlock-mydev/oarlock_mydev/paged.py`")[0]
    shown = {word for line in table.splitlines() if line.startswith("| `") for word in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert shown == set(asked)


# ---------------------------------------------------------------- what it builds
def test_the_backend_of_the_guide_conforms(tmp_path: Path):
    for path, body in files().items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(body)
    about = tmp_path / "oarlock_mydev-0.1.0.dist-info"  # as pip would leave it
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: oarlock-mydev\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[oarlock.devices]\nmydev = oarlock_mydev\n")
    cases = r"^(contract|device|silu_and_mul|linear)\[|^attention\[float32,(mixed|window|copies)|^runner\[float32,(dense|hybrid),mixtures"
    command = [sys.executable, "-m", "oarlock.cli.main", "conformance", "--device", "mydev", "--level", "0-4", "-k", cases]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "2"}
    checked = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for op in ("silu_and_mul", "linear"):
        assert re.search(rf"^{op} +ok +ok +mydev$", checked.stdout, re.MULTILINE), checked.stdout
    assert re.search(r"^paged_attention +(ok|part).* mydev$", checked.stdout, re.MULTILINE), checked.stdout
