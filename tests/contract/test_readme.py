"""What README and guides show works as it is written: Python blocks run, curl gets an answer, the short backend computes.

`test_documents.py` checks that every command, flag and folder exists, `test_backend_guide.py` the guide to a backend. A tiny checkpoint stands in for the models that are named.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_code import ROOT, tracked_files

sys.path.insert(0, str(ROOT / "tests" / "unit"))  # what real_server needs

from real_server import RealServer
from tiny_model import make_tiny_model

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B-Instruct")
SERVER = "http://127.0.0.1:8000"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(text_of(name)) if found == language]


def oarlock(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run([sys.executable, "-m", "oarlock.cli.main", *arguments], capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(model, "--served-model-name", "smollm2", log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def run_python(code: str, model: Path, url: str = "") -> str:
    """What a block prints, with the tiny model in place of the one it names."""
    for name in MODELS:
        code = code.replace(f'"{name}"', repr(str(model)))
    code = code.replace(SERVER, url)
    ran = subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert ran.returncode == 0, f"{code}\n{ran.stderr[-3000:]}"
    return ran.stdout


# ---------------------------------------------------------------- links and translation
def test_links_lead_somewhere():
    documents = [p for p in tracked_files() if p.suffix == ".md"]
    broken = [f"{p.name}: {link}" for p in documents for link in LINK.findall(p.read_text(encoding="utf-8"))
              if "://" not in link and not (p.parent / link).exists()]  # fmt: skip
    assert not broken


def test_the_readme_leads_to_every_guide():
    linked = set(LINK.findall(text_of("README.md")))
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")} <= linked


def without_comments(body: str) -> str:
    return re.sub(r"\s+#.*", "", body)


def test_the_chinese_readme_shows_the_same():
    english, chinese = text_of("README.md"), text_of("README.zh.md")
    assert [without_comments(b) for _, b in FENCE.findall(chinese)] == [without_comments(b) for _, b in FENCE.findall(english)]
    assert set(LINK.findall(chinese)) - {"README.md"} == set(LINK.findall(english)) - {"README.zh.md"}
    assert [line.split("|")[1] for line in chinese.splitlines() if line.startswith("| `")] == [
        line.split("|")[1] for line in english.splitlines() if line.startswith("| `")
    ]
    assert chinese.count("\n## ") == english.count("\n## ")


# ---------------------------------------------------------------- commands
def test_commands_that_need_no_server(model: Path):
    listed = oarlock("devices")
    assert listed.returncode == 0 and listed.stdout.split()[0] == "device"
    for line in listed.stdout.splitlines():
        if line.split()[0] in ("cuda", "xpu", "tpu", "neuron"):  # as the table of devices says
            assert any(state in line for state in ("not available", "not installed", "no_hardware"))
    planned = oarlock("plan", str(model), "--max-model-len", "512")
    assert planned.returncode == 0 and "KV" in planned.stdout, planned.stderr


def test_curl_gets_an_answer(server: RealServer):
    shown = [b for name in ("README.md", "docs/quickstart.md", "docs/sampling.md") for b in blocks(name, "sh") if b.startswith("curl")]
    assert len(shown) == 3
    for body in shown:
        command = body.replace("\\\n", " ").splitlines()[0].replace(SERVER, server.base_url)
        assert shlex.split(command)[0] == "curl"
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=60)
        assert '"choices":[{' in ran.stdout, ran.stdout


@pytest.mark.parametrize("name", ["README.md"])
def test_the_openai_client_gets_an_answer(name: str, server: RealServer, model: Path):
    (code,) = [b for b in blocks(name, "python") if "OpenAI(" in b]
    assert len(run_python(code, model, server.base_url).strip()) > 0


def test_chat_and_complete_reach_the_server(server: RealServer):
    said = oarlock("complete", "The capital of France is", "--url", server.base_url, "--max-tokens", "8")
    assert said.returncode == 0 and said.stdout.strip(), said.stderr
    measured = oarlock("bench", "serve", "--url", server.base_url, "--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--id-range", "10", "300", "--ignore-eos")
    assert measured.returncode == 0 and "4 completed, 0 failed" in measured.stdout, measured.stderr
    assert "32 in, 16 out" in measured.stdout


# ---------------------------------------------------------------- Python
@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/offline.md"])
def test_offline_python_runs(name: str, model: Path):
    """The blocks of a page in one process, in their order, as a reader would type them."""
    shown = [b for b in blocks(name, "python") if "OpenAI(" not in b and "Device" not in b]
    assert shown
    assert len(run_python("\n".join(shown), model).splitlines()) >= 2


# ---------------------------------------------------------------- the short backend
def write_backend(folder: Path, files: dict[str, str]) -> Path:
    """The example as pip would leave it. Returns what to put on the path."""
    for name, body in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    top = folder / "oarlock-mydev"
    about = top / "oarlock_mydev-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: oarlock-mydev\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[oarlock.devices]\nmydev = oarlock_mydev\n")
    return top


def test_the_short_backend_of_the_readme_generates(tmp_path: Path, model: Path):
    device, plugin = [b for b in blocks("README.md", "python") if "backend_api" in b]
    path = write_backend(tmp_path, {"oarlock-mydev/oarlock_mydev/device.py": device, "oarlock-mydev/oarlock_mydev/__init__.py": plugin})
    ran = oarlock("complete", "The capital of", "--model", str(model), "--device", "mydev", "--max-tokens", "4", path=path)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
