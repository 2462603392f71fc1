"""The package keeps the contract, and what it brings computes what it should. `oarlock conformance --device template` tests all."""

from __future__ import annotations

import subprocess
import sys

import oarlock_template
import pytest


def test_the_device_is_found_without_torch():
    code = "import sys, oarlock_template as t; print(t.devices()[0].name, t.probe().status, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["template", "available", "False"]


def test_own_parts_conform():
    own = [*sorted({record.op for record in oarlock_template.kernels(None)}), "paged_attention"]
    command = [
        sys.executable,
        "-m",
        "oarlock.cli.main",
        "conformance",
        "--device",
        "template",
        "--level",
        "2,3",
        "--ops",
        ",".join(own),
        "-k",
        "float32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{op} " in done.stdout for op in own)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "ok"), [("float32", 64, True), ("bfloat16", 256, True), ("float16", 64, False), ("float32", 512, False)]
)
def test_what_is_not_supported_is_declared(dtype, head_dim, ok):
    support = oarlock_template.supports_attention(dtype=dtype, head_dim=head_dim, window=None)
    assert support.ok is ok and bool(support.reasons) is not ok
