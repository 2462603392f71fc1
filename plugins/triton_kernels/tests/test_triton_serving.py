"""A whole model through the model runner on a device of host tensors: every op that has a kernel, and the attention, in the interpreter.

In a process of its own, to which the device is made known as an installed package is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted_device import installed

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "pattern",
    [
        "float32,dense,greedy",
        pytest.param("float32,(dense|hybrid|moe),|bfloat16,(dense|moe-all),", marks=pytest.mark.full),
    ],
)
def test_a_tiny_model_gives_the_tokens_of_whole_sequence_computation(tmp_path, pattern):
    installed(tmp_path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oarlock.cli.main", "conformance", "--device", "interpreted", "--level", "4", "-k", pattern]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "every chosen case passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
