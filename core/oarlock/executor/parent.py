"""A child dies when its parent dies, however that happens; and what is said of a child that died first.

Owns: the parent-death signal; which signals a child leaves to its parent; the words for an exit code.
Reads: nothing of ours.
Never: kills anything but its own process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL at the parent's death; where there is no such call, watch for it once a second.

    Exits at once when the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ctrl-C and service managers signal a whole group: the parent decides what becomes of its children, whose work it may want to drain."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def how_it_ended(code: int) -> str:
    """An exit code in words; for the one that the kernel leaves when memory runs out, what to lower."""
    if code == -signal.SIGKILL:
        return (
            "signal 9: somebody killed it, or the kernel did for want of memory (its log, dmesg, says so); then take a smaller model or dtype, "
            "or lower --kv-cache-memory, --max-model-len or --max-num-seqs"
        )
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1)
    os._exit(1)
