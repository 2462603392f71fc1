"""`oarlock conformance`: test a device against the kit.

Owns: the command's options and exit codes (0 pass, 1 failures, 2 device not available or wrong usage, 3 contract or version problem).
Reads: `plugins`; the kit by dotted path, after the device's environment is set.
Never: imports torch itself.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oarlock.config.parser import Parser
from oarlock.errors import ApiVersionMismatch, BackendNotFound, BackendUnavailable, ConfigError, PluginError
from oarlock.plugins import apply_environment, select_device

NOT_AVAILABLE, CONTRACT = 2, 3


def main(argv: Sequence[str]) -> int:
    """Run the kit and print its report."""
    arguments = _parser().parse_args(argv)
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout {arguments.timeout:g}: seconds above 0 are needed", option="--timeout")
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
    if arguments.baseline and not arguments.perf:
        raise ConfigError("--baseline compares figures; give --perf with it", option="--baseline")
    if arguments.record:
        return _record(arguments, selection)
    if arguments.perf:
        return _perf(arguments, selection, argv)
    kit: Any = importlib.import_module("oarlock.conformance.kit")
    levels = kit.parse_levels(arguments.level) if arguments.level else kit.Choice().levels
    choice = kit.Choice(
        levels, _names(arguments.ops), arguments.k, arguments.full, arguments.keep_going, arguments.timeout, arguments.replay
    )
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


def _record(arguments: Any, selection: Any) -> int:
    """Write down the op calls of a model instead of testing."""
    _refuse_beside("--record", "writes down what a model calls", arguments, ("level", "ops", "k", "full", "perf", "replay", "keep_going"))
    if not arguments.out:
        raise ConfigError("--record needs --out FILE: where to write the calls", option="--out")
    data = importlib.import_module("oarlock.conformance.record").record(selection, arguments.record)
    Path(arguments.out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    calls = data["calls"]
    print(
        f"{len(calls)} different calls of {len({c['op'] for c in calls})} ops in {data['dtype']} are in {arguments.out}; --replay {arguments.out} runs them"
    )
    return 0


def _perf(arguments: Any, selection: Any, argv: Sequence[str]) -> int:
    """Measure instead of testing."""
    if arguments.format not in ("table", "json"):
        raise ConfigError(f"--perf --format {arguments.format}: figures come as table or json", option="--format")
    _refuse_beside("--perf", "measures", arguments, ("level", "full", "keep_going", "replay"))
    perf = importlib.import_module("oarlock.conformance.perf")
    baseline = (
        importlib.import_module("oarlock.conformance.perf_report").read_baseline(arguments.baseline, selection.spec.name)
        if arguments.baseline
        else None
    )
    report = perf.run(selection, _names(arguments.ops), arguments.k, _progress if sys.stderr.isatty() else lambda _: None)
    report.command = shlex.join(["oarlock", "conformance", *argv])
    text = report.to_json() if arguments.format == "json" else report.to_table(baseline)
    if not arguments.out:
        print(text)
        return 0
    Path(arguments.out).write_text(text + "\n", encoding="utf-8")
    print(f"{len(report.figures)} figures are in {arguments.out}")
    return 0


def _refuse_beside(flag: str, does: str, arguments: Any, others: Sequence[str]) -> None:
    """Raises ConfigError for a flag that chooses among tests, beside one that runs none."""
    for name in others:
        if getattr(arguments, name):
            shown = f"-{name}" if name == "k" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {does} and tests nothing, so {shown} would have no effect; leave one of them out", option=flag)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _progress(result: Any) -> None:
    """One line that is overwritten, on a terminal."""
    status = getattr(result, "status", "measured")
    print(
        f"\r\033[K{status:<11} {result.id[:100]}",
        end="\n" if status in ("fail", "error", "timeout", "xpass") else "",
        file=sys.stderr,
        flush=True,
    )


def _parser() -> Parser:
    parser = Parser(prog="oarlock conformance", description="Test a device against the conformance kit.")
    parser.add_argument("--device", required=True, help="the device, as for serve; auto takes the best available")
    parser.add_argument(
        "--level",
        default="",
        help="levels by number or name, with commas and ranges: 0 contract, 1 device, 2 ops, 3 attention, 4 runner, 5 serve",
    )
    parser.add_argument("--ops", default="", help="only cases of these ops, separated by commas")
    parser.add_argument("-k", default="", metavar="REGEX", help="only cases whose id matches")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the smaller set of cases (the default)")
    size.add_argument("--full", action="store_true", help="every case")
    parser.add_argument(
        "--perf", action="store_true", help="measure instead of testing: ops, steps, launches, start-up; nothing passes or fails"
    )
    parser.add_argument("--baseline", metavar="FILE", help="with --perf: an older report in JSON to compare with")
    parser.add_argument(
        "--record", metavar="MODEL", help="write every op call of a few steps of a model to --out: shapes, dtypes, ranges, no data"
    )
    parser.add_argument("--replay", default="", metavar="FILE", help="run the calls of a file of --record as cases")
    parser.add_argument("--keep-going", action="store_true", help="run the next level even where failures leave it nothing to stand on")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="limit for one case, compiling included (default 300)"
    )
    parser.add_argument("--format", choices=("table", "json", "md", "junit"), default="table", help="of the report (default table)")
    parser.add_argument("--out", metavar="FILE", help="write the report to a file, and only the verdict here")
    return parser
