"""Write docs/flags.md from the option table. `--check` only compares, for tests and CI.

    python tools/gen_flags_doc.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from oarlock.config.option import Option, flag
from oarlock.config.options import ELSEWHERE, OPTIONS, spelling

TARGET = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

HEAD = """# Flags

Written by `tools/gen_flags_doc.py` from the option table (`core/oarlock/config/options/`). Do not edit.

These are the flags of `oarlock serve` and of `python -m oarlock.entrypoints.openai.api_server`. The same names with
underscores are keywords of `LLM(...)`, but for those marked *server*. Dashes and underscores are equal on the command
line. `None` and the empty string mean "unset" where unset is a default. A switch `--x` has its opposite `--no-x`.
Sizes take units: `512MiB`, `4GiB`; lengths take `4k` (4000) and `4K` (4096).

*Refused*: the feature is not in this version; any value but the default is an error that says so.
*Obsolete*: still honoured, with one warning that names the successor.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for group in dict.fromkeys(option.group for option in OPTIONS):
        rows = [option for option in OPTIONS if option.group == group]
        parts.append(f"\n## {group}\n\n| flag | default | meaning |\n| --- | --- | --- |\n")
        parts += [f"| {_names(option)} | {_default(option)} | {_meaning(option)} |\n" for option in rows]
    parts.append("\n## Names that belong elsewhere\n\nThese are not flags here; each is an error that says:\n\n| name | message |\n| --- | --- |\n")
    parts += [f"| `{name}` | {re.sub('{(.+?)}', lambda found: spelling(found[1], 'cli'), text)} |\n" for name, text in ELSEWHERE.items()]
    return "".join(parts)


def _names(option: Option) -> str:
    return ", ".join(f"`{flag(name)}`" for name in option.names)


def _default(option: Option) -> str:
    value: Any = option.default
    if value is None or value == ():
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{json.dumps(value) if isinstance(value, (dict, list, tuple)) else value}`"


def _meaning(option: Option) -> str:
    text = option.help.replace("|", "\\|")
    if option.choices:
        text += f" Choices: {', '.join(f'`{c}`' for c in option.choices)}."
    if option.built is not None:
        left = [str(c) for c in option.choices if c not in option.built and c != option.default]
        text += f" Refused in this version: {', '.join(f'`{c}`' for c in left)}." if left else f" Only {option.default} in this version."
    if option.fate == "refused":
        text += f" *Refused*: {option.remedy}."
    if option.fate == "obsolete":
        text += f" *Obsolete*: {option.instead if ' ' in option.instead else f'use `{flag(option.instead)}`'}."
    return text + ("" if option.offline else " *server*")


def main() -> int:
    """Exit code 1 when --check finds the page out of date."""
    page = render()
    if "--check" not in sys.argv:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(page)
        return 0
    if TARGET.exists() and TARGET.read_text() == page:
        return 0
    print(f"{TARGET.name} is not what the option table says; run: python tools/gen_flags_doc.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
