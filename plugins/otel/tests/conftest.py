"""The scripted engine of core's own HTTP tests is importable, so is its server of one process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "unit"))
