"""`oarlock compile MODEL --device NAME`: compile every program of a model ahead of time, so that a later start finds them on disk.

Owns: the command's report.
Reads: `engine.launch`, `engine.core`; `cli.doctor` for what the device can do.
Never: compiles otherwise than a server's start does: it is that start, without serving.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from oarlock.cli.doctor import inspect
from oarlock.config.parser import make_parser, parse
from oarlock.config.resolve import resolve
from oarlock.engine.core import EngineCore
from oarlock.engine.launch import Launch, prepare
from oarlock.errors import OarlockError
from oarlock.executor import make_executor
from oarlock.plugins import apply_environment

log = logging.getLogger("oarlock")
NOTHING = {
    "eager": "runs programs as they are",
    "capture": "records programs at each start, in seconds, and a recording does not outlive the process",
}


def main(argv: Sequence[str]) -> int:
    """Compile, or say that nothing is to be compiled: exit code 0 in both cases.

    Raises:
        OarlockError: what `oarlock serve` would refuse, in the same words; and a device that cannot be examined.
    """
    resolved = resolve(parse(make_parser("oarlock compile"), argv))
    for warning in resolved.warnings:
        log.warning("%s", warning)
    launch = prepare(resolved.engine)
    print(nothing_to_do(launch) or run(launch))
    return 0


def nothing_to_do(launch: Launch) -> str:
    """Why nothing is to be compiled for this device; "" where something is."""
    name = launch.selection.spec.name
    if launch.config.device.enforce_eager:
        return "nothing to compile: --enforce-eager runs programs as they are"
    report, problem = inspect(name, launch.config.device.threads)
    if report is None:
        raise OarlockError(f"--device {name} cannot be examined: {problem}")
    why = NOTHING.get(report["capabilities"]["execution"])
    return f"nothing to compile: {name} {why}" if why else ""


def run(launch: Launch) -> str:
    """Start as a server would, on every rank, and stop. Minutes to hours; what was compiled before is only loaded."""
    spec, started = launch.selection.spec, time.monotonic()
    apply_environment(spec)
    print(f"compiling for {spec.name}: {launch.selection.probe.reason}", file=sys.stderr, flush=True)
    executor = make_executor(launch.config, launch.summary, spec.name, spec.factory)
    try:
        info = EngineCore(launch.config, launch.summary, executor).info
    finally:
        executor.shutdown()
    kept = f"kept in {info.program_folder}" if info.program_folder else f"not kept: the runner of {spec.name} keeps no programs for a later start"
    return "\n".join(
        [
            f"device    {info.device_text}",
            f"model     {launch.summary.architecture}, {info.dtype}, {info.max_num_seqs} requests at once, context {info.max_model_len}",
            f"programs  {info.num_programs} ready after {info.warmup_s:.1f} s ({time.monotonic() - started:.1f} s with loading), {kept}",
        ]
    )
