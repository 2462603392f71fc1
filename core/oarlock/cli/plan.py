"""`oarlock plan MODEL`: the memory plan that `oarlock serve` would make, without loading a weight.

Owns: the printed report.
Reads: `config`, `engine.launch`; `cli.plan_worker` in a child process.
Never: imports a heavy module itself; estimates: a worker plans, from the checkpoint's headers and the memory that is free now.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from oarlock import errors
from oarlock.config.parser import make_parser, parse
from oarlock.config.resolve import resolve
from oarlock.engine.launch import Launch, prepare
from oarlock.engine.wire import dump_bootstrap
from oarlock.errors import ConfigError, OarlockError
from oarlock.executor import OWN
from oarlock.executor.parent import how_it_ended

log = logging.getLogger("oarlock")


def main(argv: Sequence[str]) -> int:
    """Print the plan. Exit code 0.

    Raises:
        OarlockError: what `oarlock serve` would refuse, in the same words.
    """
    resolved = resolve(parse(make_parser("oarlock plan"), argv))
    for warning in resolved.warnings:
        log.warning("%s", warning)
    launch = prepare(resolved.engine)
    print(report(launch, ask(launch)))
    return 0


def ask(launch: Launch) -> dict[str, Any]:
    """What a worker of this launch plans. Seconds: the child imports torch.

    Raises:
        OarlockError: as the worker says it.
    """
    executor, spec = launch.config.parallel.executor, launch.selection.spec
    if executor not in OWN:
        raise ConfigError(f"--device {spec.name}: its executor {executor} makes its plan when it starts; oarlock serve prints it")
    bootstrap = dump_bootstrap(launch.config, launch.summary, spec.name, spec.factory, "")
    environment = {**dict(spec.environment), **os.environ}
    command = [sys.executable, "-m", "oarlock.cli.plan_worker"]
    done = subprocess.run(command, input=bootstrap, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise OarlockError(f"the worker that was to plan ended ({how_it_ended(done.returncode)})")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        kind: Any = getattr(errors, answer["error"], OarlockError)
        raise kind(answer["message"])
    return answer


def report(launch: Launch, plan: dict[str, Any]) -> str:
    """The plan of one worker as text."""
    summary, selection, workers = launch.summary, launch.selection, launch.config.parallel.tensor_parallel_size
    context = f"context {plan['max_model_len']} (the checkpoint allows {summary.derived_max_model_len})"
    head = [
        f"model    {summary.architecture}, {summary.num_layers} layers, {plan['dtype']}, {context}",
        f"device   {selection.spec.name}: {plan['device_text']}",
        f"workers  {workers}{', each as below' if workers > 1 else ''}",
    ]
    return "\n".join([*head, plan["table"], "Nothing was loaded. `oarlock serve` plans the same, with the memory that is free when it starts."])
