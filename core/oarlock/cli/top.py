"""`oarlock top`: a server's /metrics page as one screen that is drawn anew every few seconds.

Owns: what is read out of two pages, and how it looks.
Reads: `cli.answers` (addresses and keys).
Never: asks the server for anything but /metrics; shows a rate of which it has seen one end only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from oarlock.cli.answers import (
    CONNECT_S,
    DEFAULT_URL,
    KEY_VARIABLES,
    READ_S,
    START_ONE,
    AnswerError,
    base_url,
    connection_settings,
    key_headers,
    refused,
)
from oarlock.config.parser import Parser
from oarlock.errors import ConfigError

PAGE = "/metrics"
QUANTILES = (0.5, 0.9, 0.99)
LATENCIES = (
    ("time to first token", "vllm:time_to_first_token_seconds"),
    ("between tokens", "vllm:inter_token_latency_seconds"),
    ("in the queue", "vllm:request_queue_time_seconds"),
    ("whole request", "vllm:e2e_request_latency_seconds"),
)


def main(argv: Sequence[str]) -> int:
    """Draw until interrupted; with --once, print one screen and end. Exit code 0.

    Raises:
        ConfigError: wrong flags. AnswerError: no server there, or no page of metrics.
    """
    parser = Parser(prog="oarlock top", description="Show what a running server does: requests, tokens, KV cache, latencies.")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server, or unix:PATH [{DEFAULT_URL}]")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for the server; better in {KEY_VARIABLES[0]}, where other users cannot see it")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks, from which rates are taken [2]")
    parser.add_argument("--once", action="store_true", help="look twice, print one screen, end")
    arguments = parser.parse_args(argv)
    if not 0.1 <= arguments.interval <= 3600:
        raise ConfigError(f"--interval {arguments.interval:g}: must be between 0.1 and 3600 seconds", "interval")
    url = base_url(arguments.url)
    headers, timeout = key_headers(arguments.api_key), httpx.Timeout(READ_S, connect=CONNECT_S)
    with httpx.Client(headers=headers, timeout=timeout, **connection_settings(url)) as http:
        _show(http, url, arguments.interval, once=arguments.once)
    return 0


def _show(http: httpx.Client, url: str, interval_s: float, *, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console, before = Console(), _look(http, url)
    if once:
        time.sleep(interval_s)
        console.print(screen(url, before, _look(http, url)))
        return
    with Live(screen(url, before, before), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = _look(http, url)
            except AnswerError as error:  # it may come back: what was seen last stays, with the reason
                live.update(screen(url, before, before, str(error)), refresh=True)
                continue
            live.update(screen(url, before, now), refresh=True)
            before = now


def _look(http: httpx.Client, url: str) -> Page:
    try:
        response = http.get(PAGE)
    except httpx.ConnectError as error:
        raise AnswerError(f"no server answers at {url} ({error}); {START_ONE.partition(', or')[0]}") from None
    except httpx.TransportError as error:
        raise AnswerError(f"the connection to {url} failed: {error or type(error).__name__}") from None
    if response.status_code != 200:
        raise refused(f"{url}{PAGE}", response.status_code, response.content)
    return Page.read(response.text)


@dataclass(slots=True)
class Page:
    """One reading of /metrics. Values are summed over what the server has several of: models, workers behind one address."""

    seen_s: float  # time.monotonic()
    values: dict[str, float] = field(default_factory=dict)  # by sample name
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # of a histogram: upper bound -> how many up to it
    labels: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # of gauges that stand for their labels

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises AnswerError for what is no page of metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        page = cls(time.monotonic())
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    page._add(sample)
        except ValueError as error:
            raise AnswerError(f"{PAGE} is no page of Prometheus metrics: {error}") from None
        return page

    def _add(self, sample: Any) -> None:
        name, bound = sample.name, sample.labels.get("le")
        if name.endswith("_bucket") and bound is not None:
            counts = self.buckets.setdefault(name.removesuffix("_bucket"), {})
            counts[float(bound)] = counts.get(float(bound), 0.0) + sample.value
            return
        self.values[name] = self.values.get(name, 0.0) + sample.value
        if name.endswith("_info"):
            self.labels.setdefault(name, []).append(sample.labels)

    def rate(self, before: Page, name: str) -> float | None:
        """How fast a counter rises, per second; None when it cannot be said."""
        seconds = self.seen_s - before.seen_s
        rise = self.values.get(name, 0.0) - before.values.get(name, 0.0)
        return None if name not in self.values or seconds <= 0 or rise < 0 else rise / seconds

    def quantile(self, before: Page, name: str, share: float) -> float | None:
        """Of what a histogram saw between the two looks; where that is nothing, since the server's start; None when that is nothing either."""
        counts, earlier = self.buckets.get(name, {}), before.buckets.get(name, {})
        recent = {bound: count - earlier.get(bound, 0.0) for bound, count in counts.items()}
        is_whole = min(recent.values(), default=0.0) >= 0  # else the server was started anew between the looks
        return quantile(recent if is_whole and max(recent.values(), default=0.0) > 0 else counts, share)


def quantile(counts: dict[float, float], share: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket, the last finite bound for what lies above it."""
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            if bound == float("inf"):
                return low
            inside = counts[bound] - below
            return low + (bound - low) * ((wanted - below) / inside if inside > 0 else 1.0)
        low, below = bound, counts[bound]
    return low


# ---------------------------------------------------------------- how it looks
def screen(url: str, before: Page, now: Page, problem: str = "") -> Any:
    """Everything, as something that rich can print."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(*[""] * (len(QUANTILES) + 1), padding=(0, 2))
    names = sorted({labels["model_name"] for rows in now.labels.values() for labels in rows if "model_name" in labels})
    device = next(iter(now.labels.get("oarlock_device_info", ())), {})
    title = Text.assemble((", ".join(names), "bold"), f"  {url}  {device.get('device', '')}  {device.get('dtype', '')}\n")
    value = now.values.get
    waiting, running = value("vllm:num_requests_waiting"), value("vllm:num_requests_running")
    grid.add_row("requests", f"running {_count(running)}", f"waiting {_count(waiting)}", f"preempted {_count(value('vllm:num_preemptions_total'))}")
    prompt, made = now.rate(before, "oarlock_engine_prompt_tokens_total"), now.rate(before, "oarlock_engine_tokens_total")
    grid.add_row("tokens/s", f"prompt {_rate(prompt)}", f"generated {_rate(made)}", f"steps {_rate(now.rate(before, 'oarlock_steps_total'))}/s")
    used, hits, asked = value("vllm:kv_cache_usage_perc"), value("vllm:prefix_cache_hits_total"), value("vllm:prefix_cache_queries_total")
    grid.add_row("KV cache", _bar(used), f"prefix hits {_percent(None if not asked or hits is None else hits / asked)}")
    grid.add_row()
    grid.add_row("[dim]seconds[/]", *(f"[dim]{share:.0%}[/]" for share in QUANTILES))
    for text, name in LATENCIES:
        grid.add_row(text, *(_seconds(now.quantile(before, name, share)) for share in QUANTILES))
    return Group(title, grid, Text(problem, "red")) if problem else Group(title, grid)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _bar(share: float | None, width: int = 16) -> str:
    full = round(width * min(max(share or 0.0, 0.0), 1.0))
    return f"{'█' * full}{'░' * (width - full)} {_percent(share)}"
