"""A null device that breaks when a prompt begins with a certain token: the faults that a real device may have, in a real server.

Owns: the faults, and `install`, which makes a package of this file.
Never: breaks by itself.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from oarlock.backend_api import Extension, hookimpl
from oarlock.conformance.null_device import NullExecutor
from oarlock.errors import OutOfDeviceMemory
from oarlock.executor.base import Pending
from oarlock.messages import ModelRunnerOutput, SchedulerOutput

STEP_S = 0.002  # so that requests which came at one time run in one step
AFTER = 3  # tokens that a request with a fault gets before it shows
FAULTS = {301: "raises", 302: "raises late", 303: "no memory on the device", 304: "no memory on the host", 305: "not finite", 306: "not finite logprobs", 307: "canary fails", 308: "hangs", 309: "ends", 310: "no answer for a row"}
TOKEN = {name: token for token, name in FAULTS.items()}


class _Late:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        raise self._error


class FaultyExecutor(NullExecutor):
    """Takes each step in before it breaks, as a device does whose kernel fails."""

    is_lost = False

    def execute(self, out: SchedulerOutput) -> Pending:
        time.sleep(STEP_S)
        pending = super().execute(out)
        for row in out.rows:
            known = self.memory.known[row.branch_id]
            fault = FAULTS.get(known.tokens[0])
            if fault is not None and len(known.tokens) - known.new.num_prompt_tokens == AFTER:
                pending = self._break(fault, row.branch_id, pending)
        return pending

    def _break(self, fault: str, branch_id: int, pending: Pending) -> Pending:
        result = pending.result()
        match fault:
            case "raises":
                raise RuntimeError("a kernel failed at /secret/path")
            case "raises late":
                return _Late(RuntimeError("a kernel failed at /secret/path"))
            case "no memory on the device":
                raise OutOfDeviceMemory("the device has no memory left for 1 GiB")
            case "no memory on the host":
                raise MemoryError
            case "canary fails":
                self.is_lost = True
                raise RuntimeError("the device was lost")
            case "hangs":
                time.sleep(3600)
            case "ends":
                os._exit(9)
            case "not finite":
                result.failed[branch_id] = "its logits have no finite value (NaN)"
                result.token_ids.pop(branch_id)
            case "not finite logprobs":
                entry = result.logprobs[branch_id][0]
                result.logprobs[branch_id] = (type(entry)(entry.token_id, math.nan, entry.rank, tuple((token, -math.inf) for token, _ in entry.top)),)
            case "no answer for a row":
                result.token_ids.pop(branch_id)
        return pending

    def canary(self) -> None:
        super().canary()
        if self.is_lost:
            raise RuntimeError("the device was lost")


@hookimpl
def extensions() -> list[Any]:
    """In place of the null device's own executor."""
    return [Extension("executor", "null", "faulty_device:FaultyExecutor", priority=100)]


def install(folder: Path) -> Path:
    """Write what makes this file an installed plugin, and return the folder that must be on the path."""
    made = folder / "faulty_device-1.0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-device\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text("[oarlock.plugins]\nfaulty = faulty_device\n")
    (folder / "faulty_device.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return folder
