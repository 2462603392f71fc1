"""A test server dies with the test run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tied import tied

RUN = """
import subprocess, sys, time
sys.path.insert(0, {folder!r})
from tied import tied
child = subprocess.Popen(tied([sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"]), start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the parent's death is Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_tied_command_ends_with_the_run_that_started_it(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", RUN.format(folder=str(Path(__file__).parent))], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        os.kill(child, 0)  # alive, in a session of its own
        run.send_signal(number)
        run.wait(10)
    deadline = time.monotonic() + 5
    while _lives(child):
        assert time.monotonic() < deadline, "the child outlived its run"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_tied_command_is_the_command_itself() -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = subprocess.run(tied([sys.executable, "-S", "-c", code, "a b", "c"]), capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("['a b', 'c']\n", 7)
