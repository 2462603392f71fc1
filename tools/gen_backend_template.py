"""Write core/oarlock/cli/backend_template.txt, from which `oarlock new-backend` copies, from plugins/template_backend.

    python tools/gen_backend_template.py [--check]

The files lie in one text, so that an installed Oarlock has them without a package of theirs becoming a part of core. "both": in
the complete backend and in the minimal one; the files below minimal/ take the place of those of the same path.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "plugins" / "template_backend"
TARGET = ROOT / "core" / "oarlock" / "cli" / "backend_template.txt"
BOTH = ("pyproject.toml", "README.md")
PACKAGE = ("__init__.py", "device.py", "ops.py", "paged.py", "graph.py")


def files() -> list[tuple[str, str, Path]]:
    """(kind, path in the new backend, source)."""
    minimal = sorted((SOURCE / "minimal").rglob("*.py"))
    return [
        *(("both", name, SOURCE / name) for name in BOTH),
        *(("complete", f"oarlock_template/{name}", SOURCE / "oarlock_template" / name) for name in PACKAGE),
        *(("complete", str(p.relative_to(SOURCE)), p) for p in sorted((SOURCE / "tests").glob("*.py"))),
        *(("minimal", str(p.relative_to(SOURCE / "minimal")), p) for p in minimal),
    ]


def render() -> str:
    """The whole file."""
    head = "Written by tools/gen_backend_template.py from plugins/template_backend. Do not edit.\n"
    return head + "".join(f"==== {kind} {path}\n{source.read_text(encoding='utf-8')}" for kind, path, source in files())


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(render(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != render():
        sys.exit(f"{TARGET.relative_to(ROOT)} is stale: run python tools/gen_backend_template.py")
