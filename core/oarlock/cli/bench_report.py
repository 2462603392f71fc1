"""From samples to figures: counts, throughput, mean, median and 99th percentile; as a table and as JSON.

Owns: the definitions of the figures.
Reads: `cli.bench_client`'s samples.
Never: measures.

    TTFT   sending a request to its first piece of text
    TPOT   (E2E - TTFT) / (output tokens - 1), of answers with two tokens or more
    ITL    between two pieces of text; a piece may hold several tokens
    E2E    sending a request to the end of its stream
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oarlock.cli.bench_client import Sample
from oarlock.errors import ConfigError

Figures = dict[str, Any]
SPREADS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    at = (len(ascending) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (at - low)


def spread(values_s: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and p99 in milliseconds; None without a value."""
    if not values_s:
        return None
    ascending = sorted(v * 1e3 for v in values_s)
    return {"mean": sum(ascending) / len(ascending), "median": percentile(ascending, 50), "p99": percentile(ascending, 99)}


def summarize(samples: Sequence[Sample], duration_s: float) -> Figures:
    """Every figure of a run. Failed requests count as failed and in nothing else."""
    good = [s for s in samples if s.error is None]
    tokens_in, tokens_out = sum(s.input_tokens for s in good), sum(s.output_tokens for s in good)
    return {
        "completed": len(good),
        "failed": len(samples) - len(good),
        "duration_s": duration_s,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "tokens_are_counted_by_server": all(s.is_counted for s in good),
        "requests_per_s": len(good) / duration_s,
        "input_tokens_per_s": tokens_in / duration_s,
        "output_tokens_per_s": tokens_out / duration_s,
        "total_tokens_per_s": (tokens_in + tokens_out) / duration_s,
        "ttft_ms": spread([s.ttft_s for s in good if s.ttft_s is not None]),
        "tpot_ms": spread([t for s in good if (t := s.tpot_s) is not None]),
        "itl_ms": spread([gap for s in good for gap in s.gaps_s]),
        "e2e_ms": spread([s.latency_s for s in good]),
        "errors": dict(Counter(s.error for s in samples if s.error is not None)),
    }


def rate_lines(f: Figures) -> list[str]:
    """The counts and rates that every benchmark prints."""
    tokens = f"{f['input_tokens_per_s']:.1f} input tokens/s, {f['output_tokens_per_s']:.1f} output tokens/s, {f['total_tokens_per_s']:.1f} tokens/s"
    return [
        f"{'requests':<14}{f['completed']} completed, {f['failed']} failed, {f['duration_s']:.2f} s",
        f"{'tokens':<14}{f['input_tokens']} in, {f['output_tokens']} out",
        f"{'throughput':<14}{f['requests_per_s']:.2f} requests/s, {tokens}",
    ]


def spread_lines(figures: Figures, names: dict[str, str]) -> list[str]:
    """A table of the spreads that there are."""
    lines = [f"{'ms':<14}{'mean':>12}{'median':>12}{'p99':>12}"]
    for key, name in names.items():
        values = figures[key]
        cells = ("-",) * 3 if values is None else tuple(f"{values[k]:.2f}" for k in ("mean", "median", "p99"))
        lines.append(f"{name:<14}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def table(figures: Figures) -> str:
    """What `bench serve` prints."""
    lines = rate_lines(figures) + spread_lines(figures, SPREADS)
    if figures["completed"] and not figures["tokens_are_counted_by_server"]:
        lines.append("The server gives no usage: an output token is a piece of text, an input token a word or an id.")
    lines += [f"failed {count} times: {error[:300]}" for error, count in sorted(figures["errors"].items(), key=lambda e: -e[1])[:5]]
    return "\n".join(lines)


def write_json(path: str, record: Figures) -> None:
    """One JSON object.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error}", "json") from None
