"""`oarlock devices`: every device that a package provides, and known hardware that none provides.

Owns: the table and its JSON form.
Reads: `plugins`.
Never: imports a heavy module.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence

from oarlock.config.parser import Parser
from oarlock.plugins import Catalogue, DeviceRow, discover

COLUMNS = ("device", "package", "version", "API", "status", "reason", "remedy")


def main(argv: Sequence[str]) -> int:
    """Print the table. Exit code 0 when a device is available that is not for tests only, else 1."""
    parser = Parser(prog="oarlock devices", description="List devices, and why each can or cannot be used.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    catalogue = discover()
    rows = [row for row in catalogue.rows() if not row.is_internal]
    cells = [device_cells(row) for row in rows] + missing_devices(catalogue, rows)
    if arguments.json:
        print(json.dumps([dict(zip(COLUMNS, line, strict=True)) for line in cells], indent=2))
    else:
        print(table(COLUMNS, cells))
    return 0 if any(row.probe.status == "available" and row.priority >= 0 for row in rows) else 1


def device_cells(row: DeviceRow) -> tuple[str, ...]:
    """One line of the table."""
    api = ".".join(map(str, row.api_version)) if row.spec else "-"
    return (row.device, row.distribution, row.version, api, row.probe.status, row.probe.reason, row.probe.remedy)


def missing_devices(catalogue: Catalogue, rows: Sequence[DeviceRow]) -> list[tuple[str, ...]]:
    """Known devices without an installed package."""
    lines: list[tuple[str, ...]] = []
    for hint in catalogue.hints:
        if hint.is_simulated or any(row.answers_to(hint.device) or row.distribution == hint.package for row in rows):
            continue
        found = f"{hint.label} is here ({hint.evidence}), " if hint.is_present else ""
        if hint.install:
            lines.append((hint.device, hint.package, "-", "-", "not installed", f"{found}the package is not installed", hint.install))
        else:
            why = "the package is not installed" if hint.source else "this version of Oarlock has no such backend yet"
            remedy = f"install {hint.source} of the source of Oarlock" if hint.source else ""
            lines.append((hint.device, hint.package, "-", "-", "not available", f"{found}{why}", remedy))
    return lines


def table(header: Sequence[str], lines: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns for a terminal; the last two are wrapped to what the others leave."""
    total = shutil.get_terminal_size((160, 24)).columns if width is None else width
    fixed = [max(len(line[c]) for line in (header, *lines)) for c in range(len(header) - 2)]
    room = max(total - sum(fixed) - 2 * (len(header) - 1), 48)
    last = min(max((len(line[-1]) for line in (header, *lines)), default=0), room // 2)
    widths = [*fixed, max(room - last, 8), max(last, 6)]
    text = []
    for line in (header, *lines):
        wrapped = [textwrap.wrap(cell, size) or [""] for cell, size in zip(line, widths, strict=True)]
        for at in range(max(map(len, wrapped))):
            cells = (cell[at] if at < len(cell) else "" for cell in wrapped)
            text.append("  ".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True)).rstrip())
    return "\n".join(text)
