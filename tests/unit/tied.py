"""Commands that die with the test run, however that ends: a test server must not outlive a `make test` that was stopped.

Owns: `tied`.
Never: is needed by a command that ends by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# The kernel keeps the request across exec, so the command has the process id, the arguments and the name that it would have alone.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """`command`, whose first word is a path, as a child of this process that the kernel kills when this thread ends. Linux only; as it is elsewhere."""
    return [sys.executable, "-S", "-E", "-c", _LAUNCHER, str(os.getpid()), *command] if sys.platform == "linux" else list(command)
