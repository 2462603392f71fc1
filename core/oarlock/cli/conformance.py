"""`oarlock conformance`: test a device against the kit.

Owns: the command's options and exit codes (0 pass, 1 failures, 2 device not available or wrong usage, 3 contract or version problem).
Reads: `plugins`; the kit by dotted path, after the device's environment is set.
Never: imports torch itself.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oarlock.config.parser import Parser
from oarlock.errors import ApiVersionMismatch, BackendNotFound, BackendUnavailable, PluginError
from oarlock.plugins import apply_environment, select_device

NOT_AVAILABLE, CONTRACT = 2, 3


def main(argv: Sequence[str]) -> int:
    """Run the kit and print its report."""
    arguments = _parser().parse_args(argv)
    try:
        selection = select_device(arguments.device)
    except (BackendNotFound, BackendUnavailable) as error:
        print(f"oarlock conformance: {error}", file=sys.stderr)
        return NOT_AVAILABLE
    except (ApiVersionMismatch, PluginError) as error:
        print(f"oarlock conformance: {error}", file=sys.stderr)
        return CONTRACT
    apply_environment(selection.spec)
    # The oracle computes on the host between the device's steps; spinning threads would take the cores from the device.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    kit: Any = importlib.import_module("oarlock.conformance.kit")
    levels = kit.parse_levels(arguments.level) if arguments.level else kit.Choice().levels
    ops = tuple(name.strip() for name in arguments.ops.split(",")) if arguments.ops else ()
    choice = kit.Choice(levels, ops, arguments.k, arguments.full, arguments.keep_going, arguments.timeout)
    show = functools.partial(_show, command=shlex.join(["oarlock", "conformance", *argv]), form=arguments.format, file=arguments.out)
    report = kit.run(selection, choice, _progress if sys.stderr.isatty() else lambda _: None, functools.partial(_stuck, show))
    show(report)
    return int(kit.exit_code(report.results))


def _show(report: Any, command: str, form: str, file: str | None) -> None:
    """Print the report, or write it to a file and print its verdict."""
    formats = importlib.import_module("oarlock.conformance.report_files").FORMATS
    report.command = command
    text = formats[form](report)
    if not file:
        print(text, flush=True)
        return
    Path(file).write_text(text + "\n", encoding="utf-8")
    print("\n".join(report.verdict_lines()) + f"\nthe report is in {file}", flush=True)


def _stuck(show: Callable[[Any], None], report: Any) -> None:
    """A case hangs where no signal reaches it: say where, report what there is, and end."""
    faulthandler.dump_traceback(all_threads=True)
    show(report)
    os._exit(1)


def _progress(result: Any) -> None:
    """One line that is overwritten, on a terminal."""
    print(f"\r\033[K{result.status:<11} {result.id[:100]}", end="" if result.status in ("pass", "unsupported") else "\n", file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(prog="oarlock conformance", description="Test a device against the conformance kit.")
    parser.add_argument("--device", required=True, help="the device, as for serve; auto takes the best available")
    parser.add_argument("--level", default="", help="levels by number or name, with commas and ranges: 0 contract, 1 device, 2 ops, 3 attention, 4 runner, 5 serve")
    parser.add_argument("--ops", default="", help="only cases of these ops, separated by commas")
    parser.add_argument("-k", default="", metavar="REGEX", help="only cases whose id matches")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the smaller set of cases (the default)")
    size.add_argument("--full", action="store_true", help="every case")
    parser.add_argument("--keep-going", action="store_true", help="run the next level even where failures leave it nothing to stand on")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="limit for one case, compiling included (default 300)")
    parser.add_argument("--format", choices=("table", "json", "md", "junit"), default="table", help="of the report (default table)")
    parser.add_argument("--out", metavar="FILE", help="write the report to a file, and only the verdict here")
    return parser
