"""A chip unlike the other backends, made of what docs/backends.md says: pip installs it, and the kit finds nothing.

Its block size, its layouts, its packed weights, its account of 1 GiB and its frozen programs are those of no other backend here.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parent / "quern"
OWN_OPS = ("fused_add_rms_norm", "linear", "rms_norm")
CASES = (
    r"^contract\["
    r"|^device\[(isolation|placing|memory|copies,float16)"
    rf"|^({'|'.join(OWN_OPS)})\[float16,tokens=(0|1|7)"
    r"|^attention\[float16,(mixed|window)"
    r"|^runner\[float32,dense,(mixtures|swapped|programs)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Where pip installed the package, from a copy, so that no build is left beside the source."""
    folder = tmp_path_factory.mktemp("quern")
    source, site = shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__")), folder / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    installed = subprocess.run([*command, "--target", site, source], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    return site


def test_a_backend_made_of_the_guide_conforms(site):
    command = [sys.executable, "-m", "oarlock.cli.main", "conformance", "--device", "quern", "--level", "0-4", "-k", CASES]
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "2"}
    checked = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=site)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for op in (*OWN_OPS, "paged_attention"):
        assert re.search(rf"^{op} .* quern$", checked.stdout, re.MULTILINE), checked.stdout
    assert re.search(r"^3 attention +[1-9].*\n4 runner +3 ", checked.stdout, re.MULTILINE), checked.stdout


@pytest.fixture
def quern(monkeypatch):
    monkeypatch.syspath_prepend(str(SOURCE))
    yield lambda module: importlib.import_module(f"oarlock_quern.{module}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "oarlock_quern"]:
        del sys.modules[name]


def test_a_frozen_program_refuses_other_shapes_dtypes_and_trees(quern):
    example = ({"w": torch.ones(3)}, {}, {}, torch.arange(3, dtype=torch.int32), {"x": (torch.ones(3),)})
    runner = quern("programs").Programs(None)
    program = runner.compile(lambda w, s, r, packed, i: ({}, {"y": w["w"] * packed + i["x"][0]}), example, "scaled")
    assert program(*example)[1]["y"].tolist() == [1.0, 2.0, 3.0]
    for change, words in (
        ({"x": (torch.ones(4),)}, r"scaled .*\['x'\]\[0\] was \(\(3,\), torch.float32\), is \(\(4,\)"),
        ({"x": (torch.ones(3, dtype=torch.float16),)}, r"is \(\(3,\), torch.float16\)"),
        ({"x": [torch.ones(3)]}, "other dicts, lists and tuples"),
    ):
        with pytest.raises(RuntimeError, match=words):
            program(*example[:4], change)


def test_the_account_is_of_the_chip_and_full_at_a_gibibyte(quern):
    device = quern("device").Quern()
    with device.context():
        free, total = device.memory_info()
        assert free == total == 1 << 30
        staged = torch.zeros(1 << 20)  # of the host
        there = device.to_device(staged)
        twice = there * 2
        assert total - device.memory_info()[0] == there.nbytes + twice.nbytes
        assert device.to_host(twice).data_ptr() != twice.data_ptr() and total - device.memory_info()[0] == 2 * there.nbytes
        with pytest.raises(torch.OutOfMemoryError, match="asked"):
            torch.empty(1 << 30, dtype=torch.uint8, device=device.torch_device)
        del there, twice
        assert device.memory_info() == (total, total)
