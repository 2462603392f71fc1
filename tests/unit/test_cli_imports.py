"""--help and `devices` load nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from oarlock.cli.main import main
try:
    main({argv!r})
except SystemExit:
    pass
heavy = [name for name in ("torch", "transformers", "fastapi", "pydantic", "zmq", "numpy", "huggingface_hub", "tokenizers") if name in sys.modules]
assert not heavy, heavy
"""


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["devices"]])
def test_help_and_devices_are_light(argv: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT.format(argv=argv)], capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 0, ran.stderr
