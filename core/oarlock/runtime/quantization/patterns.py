"""Regular expressions in a checkpoint's settings.

Owns: their check before the first module is asked about.
Reads: nothing.
Never: matches.
"""

from __future__ import annotations

import re
from re import _constants, _parser  # type: ignore[attr-defined]  # the standard library's own reading of a pattern
from typing import Any

LONGEST = 4096  # characters
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


def check_pattern(pattern: Any, where: str) -> None:
    """Raises ValueError naming the setting for what is no regular expression, or one whose matching may take for ever."""
    try:
        re.compile(pattern)
        nests = len(pattern) > LONGEST or _nests(_parser.parse(pattern), inside=False)
    except (re.error, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"{where} has {pattern!r:.80}, which is no regular expression: {error}") from None
    if nests:
        raise ValueError(f"{where} has {pattern!r:.80}: a repeat inside a repeat, or more than {LONGEST} characters, may take for ever to match")


def _nests(part: Any, *, inside: bool) -> bool:
    """Whether a repeat without an end lies inside another: (a+)+ tries every way to share out a name."""
    for what, value in part:
        repeats = what in _REPEATS and value[1] is _constants.MAXREPEAT
        if repeats and inside:
            return True
        for inner in _inner(value):
            if _nests(inner, inside=inside or repeats):
                return True
    return False


def _inner(value: Any) -> list[Any]:
    """The patterns inside one item of a pattern, however the item keeps them."""
    if isinstance(value, _parser.SubPattern):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for entry in value for found in _inner(entry)]
    return []
