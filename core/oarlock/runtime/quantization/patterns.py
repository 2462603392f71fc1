"""Regular expressions in a checkpoint's settings.

Owns: their check before the first module is asked about.
Reads: nothing.
Never: matches.
"""

from __future__ import annotations

import re
from typing import Any


def check_pattern(pattern: Any, where: str) -> None:
    """Raises ValueError naming the setting for what is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"{where} has {pattern!r:.80}, which is no regular expression: {error}") from None
