"""Figures of one device, as a table for people and JSON for the next comparison.

Owns: the form of both.
Reads: nothing of ours but the table's grid.
Never: judges.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oarlock.conformance.report import grid
from oarlock.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement."""

    id: str  # stable, for comparison with a baseline
    seconds: float  # of one call
    flops: int = 0  # of one call; 0 where it is not counted
    bytes: int = 0  # read and written by one call, at least
    dtype: str = ""
    served: str = ""  # the implementation


@dataclass
class PerfReport:
    """One run."""

    device: str
    device_text: str
    torch: str
    figures: list[Figure] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)  # dtype -> FLOP/s of the best matrix product of this run
    bandwidth: float = 0.0  # bytes/s of a large copy of this run
    command: str = ""

    def share(self, figure: Figure) -> float:
        """Of what this run's peaks would allow at best: the larger of the shares of arithmetic and of bandwidth. Small data in a cache exceed 1."""
        peak = self.peaks.get(figure.dtype, 0.0)
        arithmetic = figure.flops / figure.seconds / peak if peak else 0.0
        return max(arithmetic, figure.bytes / figure.seconds / self.bandwidth if self.bandwidth else 0.0)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "kind": "perf", **asdict(self)}, indent=1)

    def to_table(self, baseline: dict[str, float] | None = None) -> str:
        peaks = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in self.peaks.items())
        lines = [f"oarlock conformance --perf  {self.device}   {self.device_text}   torch {self.torch}"]
        lines += [f"peaks of this run: {peaks}; copying {self.bandwidth / 1e9:.1f} GB/s", ""]
        header = ["what", "µs", "GB/s", "GFLOP/s", "of peak", *(["was µs", "now/then"] if baseline is not None else []), "served by"]
        return "\n".join(lines + grid(header, [self._row(figure, baseline) for figure in self.figures]))

    def _row(self, figure: Figure, baseline: dict[str, float] | None) -> list[str]:
        row = [figure.id, f"{figure.seconds * 1e6:.1f}"]
        row += [f"{count / figure.seconds / 1e9:.2f}" if count else "-" for count in (figure.bytes, figure.flops)]
        row.append(f"{self.share(figure):.0%}" if figure.flops or figure.bytes else "-")
        if baseline is not None:
            was = baseline.get(figure.id)
            row += [f"{was * 1e6:.1f}", f"{figure.seconds / was:.2f}"] if was else ["-", "new"]
        return [*row, figure.served or "-"]


def read_baseline(path: str, device: str) -> dict[str, float]:
    """id -> seconds of an older run.

    Raises:
        ConfigError: no file of `--perf --format json`, or one of another device.
    """
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, of = data.get("kind"), data.get("device")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--baseline {path}: {error}", option="--baseline") from None
    if kind != "perf" or of != device:
        raise ConfigError(
            f"--baseline {path}: a report of --perf --format json on {device} is needed; this is {kind} on {of}", option="--baseline"
        )
    return {figure["id"]: figure["seconds"] for figure in data["figures"]}
