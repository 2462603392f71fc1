"""Run as `python -m oarlock.cli.plan_worker`, a bootstrap on standard input: one worker plans, and its plan is printed as JSON on the last line.

Owns: nothing.
Reads: `engine.wire`; the worker by dotted path, as an executor does.
Never: loads a weight; runs in the process of a server.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from oarlock.engine.wire import load_bootstrap
from oarlock.errors import OarlockError


def plan(bootstrap: str) -> dict[str, Any]:
    """The first worker's plan, or what it refuses as {"error": its type, "message": …}."""
    config, summary, device, factory, _ = load_bootstrap(bootstrap)
    worker_class: Any = importlib.import_module("oarlock.runtime.worker").Worker
    try:
        worker = worker_class(config, summary, device, factory, size=config.parallel.tensor_parallel_size)
        worker.prepare()
        made = worker.preview()
    except OarlockError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {
        "dtype": worker.dtype_name,
        "device_text": worker.device.describe(),
        "max_model_len": made.max_model_len,
        "table": made.table(),
        "rows": [list(row) for row in made.rows],
    }


if __name__ == "__main__":
    print(json.dumps(plan(sys.stdin.read())))
