"""The repository speaks of Oarlock alone: no machine, no folder outside itself, no host that serves packages."""

from __future__ import annotations

import re

import pytest
from source_code import shown, tracked_files

# Written in pieces, so that this file does not find itself.
FORBIDDEN = (
    (re.compile(r"(?<![\w.$~}/-])/" + r"(work|root|home|tmp|opt)/" + r"\w"), "a path of one machine"),
    (re.compile(r"\.\./" + "shared"), "a folder outside the repository"),
    (re.compile(r"py" + r"pi\.org|python" + r"hosted\.org|download\." + r"pytorch\.org", re.IGNORECASE), "a host that serves packages"),
)
ALLOWED = {"LICENSE"}


def offences(text: str) -> list[str]:
    return [
        f"line {text[: match.start()].count(chr(10)) + 1}: {reason}: {match.group()}"
        for pattern, reason in FORBIDDEN
        for match in pattern.finditer(text)
    ]


def test_no_file_speaks_of_anything_outside():
    found = []
    for path in tracked_files():
        if shown(path) in ALLOWED:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary file
        found += [f"{shown(path)} {offence}" for offence in offences(text)]
    assert not found


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("see /" + "work/main", True),
        ("../" + "shared/x", True),
        ("~/.cache/oarlock-models", False),
        ("GET /v1/models", False),
        ("$HOME/" + "tmp/x", False),
    ],
)
def test_the_text_check_itself(text, bad):
    assert bool(offences(text)) is bad
