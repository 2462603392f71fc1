"""Modules that these tests share with others: the toy and real servers, the tiny model, tied processes."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit"), str(HERE.parent / "api")]
