"""`oarlock doctor`: the installation, every plugin's state, and one device examined in a process of its own.

Owns: the report.
Reads: `plugins`, `memory_plan`, `cli.devices`; `cli.inspect_device` in a child process.
Never: imports a heavy module itself, so that a broken driver cannot take it down.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import oarlock
from oarlock.backend_api import API_VERSION
from oarlock.cli.devices import COLUMNS, device_cells, missing_devices, table
from oarlock.config.parser import Parser
from oarlock.errors import ConfigError, OarlockError
from oarlock.executor.parent import how_it_ended
from oarlock.memory_plan import available_host_bytes, gib, total_host_bytes
from oarlock.plugins import PLUGIN_GROUP, PROBE_LIMIT_MS, Catalogue, Selection, discover, select_device

CHILD_TIMEOUT_S = 120
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pluggy", "numpy", "fastapi", "uvicorn", "msgspec", "pyzmq")

EMPTY = {"fast_dtypes": "all of dtypes"}  # capabilities whose empty list does not mean none


def main(argv: Sequence[str]) -> int:
    """Print the report. Exit code 0 when the device can be used, else 1."""
    parser = Parser(prog="oarlock doctor", description="Examine the installation and one device closely.")
    parser.add_argument("--device", default="auto", help="device to examine [auto]")
    parser.add_argument("--threads", type=int, help="compute threads, on a host device")
    arguments = parser.parse_args(argv)
    catalogue = discover()
    _installation()
    _plugins(catalogue)
    try:
        selection = select_device(arguments.device, catalogue)
    except OarlockError as error:
        print(f"\nDevice\n  {error}")
        return 1
    return _device(selection, arguments.threads)


def _installation() -> None:
    print(f"Oarlock {oarlock.__version__}, backend API {'.'.join(map(str, API_VERSION))}, Python {platform.python_version()}, {platform.platform()}")
    print(f"  {os.path.dirname(oarlock.__file__)}")
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} missing")
    print(textwrap.fill(", ".join(versions), 110, initial_indent="  ", subsequent_indent="  "))
    print(f"  CPUs this process may use: {_usable_cpus()}")
    try:
        print(f"  host memory: {gib(available_host_bytes())} of {gib(total_host_bytes())} available, cgroup limits included")
    except (OSError, ConfigError) as error:
        print(f"  host memory: unknown ({error})")


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plugins(catalogue: Catalogue) -> None:
    print("\nDevices")
    rows = [row for row in catalogue.rows() if not row.is_internal]
    print(textwrap.indent(table(COLUMNS, [device_cells(r) for r in rows] + missing_devices(catalogue, rows)), "  "))
    for row in rows:
        if row.probe_ms > PROBE_LIMIT_MS:
            print(f"  {row.device}: its probe took {row.probe_ms:.0f} ms; {PROBE_LIMIT_MS:.0f} ms is the limit")
    features = [p for p in catalogue.plugins if p.group == PLUGIN_GROUP]
    print("\nPlugins")
    print("\n".join(f"  {p.name} ({p.distribution} {p.version}): {p.error or 'loaded'}" for p in features) or "  none")
    for plugin in catalogue.broken():
        print(f"\nBroken: {plugin.name} ({plugin.distribution} {plugin.version})\n{textwrap.indent(plugin.detail.rstrip(), '  ')}")


def _device(selection: Selection, threads: int | None) -> int:
    spec = selection.spec
    print(f"\nDevice {spec.name} ({selection.distribution})\n  {selection.probe.reason}")
    for note in selection.notes:
        print(f"  {note}")
    report, problem = inspect(spec.name, threads)
    if report is None:
        print(f"  examination failed: {problem}")
        if spec.torch_install:
            print(f"  the torch it needs: {spec.torch_install}")
        return 1
    print(f"  {report['text']}\n  verified by a small computation; torch {report['torch']}, {report['threads']} threads")
    print(f"  memory: {report['memory']}")
    print("\nCapabilities")
    print("\n".join(f"  {name:<20} {_value(value, EMPTY.get(name, 'none'))}" for name, value in report["capabilities"].items()))
    for title, lines in (("Ops", report["ops"]), ("Parts", report["parts"])):
        print(f"\n{title}")
        width = max((len(line[0]) for line in lines), default=0)
        print("\n".join(f"  {what:<{width}}  {by}{f'   rejected: {why}' if why else ''}" for what, by, why in lines) or "  none")
    if report["idle"]:
        print(textwrap.fill(f"Nothing for this device: {', '.join(report['idle'])}", 110, initial_indent="\n", subsequent_indent="  "))
    return 0


def _value(value: Any, empty: str) -> str:
    return (", ".join(map(str, value)) or empty) if isinstance(value, list) else str(value)


def inspect(device: str, threads: int | None = None) -> tuple[dict[str, Any] | None, str]:
    """Load a device's heavy module in a child process. Returns (report, "") or (None, what went wrong)."""
    command = [sys.executable, "-m", "oarlock.cli.inspect_device", device, *([str(threads)] if threads else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {CHILD_TIMEOUT_S} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return None, f"{last} ({how_it_ended(done.returncode)})"
