"""`oarlock top`: what it makes of two readings of /metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from oarlock.cli import top
from oarlock.cli.answers import AnswerError
from oarlock.cli.main import main
from oarlock.cli.top import Page, quantile
from oarlock.errors import ConfigError
from rich.console import Console

INF = float("inf")


def page(tokens: float, prompts: float, gaps: tuple[int, int, int], running: int = 1, model: str = "m") -> str:
    """A server's page: gaps up to 0.1 s, up to 1 s, longer."""
    counts = [sum(gaps[: i + 1]) for i in range(3)]
    name = "vllm:inter_token_latency_seconds"
    return f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{model}"}} {running}
# TYPE oarlock_engine_tokens counter
oarlock_engine_tokens_total{{model_name="{model}"}} {tokens}
# TYPE oarlock_engine_prompt_tokens counter
oarlock_engine_prompt_tokens_total{{model_name="{model}"}} {prompts}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="{model}"}} 0.25
# TYPE oarlock_device_info gauge
oarlock_device_info{{model_name="{model}",device="toy",dtype="float32"}} 1
# TYPE {name} histogram
{name}_bucket{{model_name="{model}",le="0.1"}} {counts[0]}
{name}_bucket{{model_name="{model}",le="1.0"}} {counts[1]}
{name}_bucket{{model_name="{model}",le="+Inf"}} {counts[2]}
{name}_sum{{model_name="{model}"}} 1
{name}_count{{model_name="{model}"}} {counts[2]}
"""


def looks(before: str, after: str, seconds: float = 2.0) -> tuple[Page, Page]:
    first, second = Page.read(before), Page.read(after)
    first.seen_s, second.seen_s = 10.0, 10.0 + seconds
    return first, second


def drawn(before: Page, now: Page, problem: str = "") -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  closed with the process
    console.print(top.screen("http://x", before, now, problem))
    return console.export_text()


@contextmanager
def serving(*pages: str | int, key: str | None = None) -> Iterator[str]:
    """The address of a server that gives these one after the other; the last again and again. A number is a status."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now = left.pop(0) if len(left) > 1 else left[0]
            status = now if isinstance(now, int) else 200
            if self.path != "/metrics" or (key and self.headers["Authorization"] != f"Bearer {key}"):
                status = 401
            self.send_response(status)
            self.end_headers()
            self.wfile.write(now.encode() if status == 200 and isinstance(now, str) else b'{"error": {"message": "no key"}}')

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_rates_are_of_the_time_between_the_looks() -> None:
    before, now = looks(page(100, 1000, (0, 0, 0)), page(150, 3000, (0, 0, 0)), seconds=2.0)
    assert now.rate(before, "oarlock_engine_tokens_total") == 25.0
    text = drawn(before, now)
    assert "prompt 1,000.0" in text and "generated 25.0" in text and "running 1" in text and "25.0 %" in text and "toy" in text
    assert now.rate(before, "no_such_total") is None
    assert before.rate(now, "oarlock_engine_tokens_total") is None  # the server was started anew in between
    assert "generated -" in drawn(now, before)


def test_quantiles_are_of_what_happened_since_the_last_look_and_else_of_everything() -> None:
    before, now = looks(page(0, 0, (100, 0, 0)), page(0, 0, (100, 10, 0)))
    name = "vllm:inter_token_latency_seconds"
    assert now.quantile(before, name, 0.5) == pytest.approx(0.1 + 0.9 / 2)  # the ten new ones, linear in their bucket
    assert now.quantile(now, name, 0.5) == pytest.approx(0.1 * 55 / 100)
    assert now.quantile(before, "vllm:no_such_seconds", 0.5) is None


def test_quantiles_across_a_restart_are_those_of_the_new_server() -> None:
    name = "x_seconds"
    old, new = (Page(0.0, buckets={name: counts}) for counts in ({1.0: 5.0, 2.0: 5.0, INF: 5.0}, {1.0: 0.0, 2.0: 8.0, INF: 8.0}))
    assert new.quantile(old, name, 0.5) == 1.5


def test_a_quantile_is_prometheus_own() -> None:
    assert quantile({}, 0.5) is None and quantile({1.0: 0.0, INF: 0.0}, 0.5) is None
    assert quantile({1.0: 4.0, 2.0: 4.0, INF: 4.0}, 0.5) == 0.5
    assert quantile({1.0: 2.0, 3.0: 4.0, INF: 4.0}, 0.75) == 2.0
    assert quantile({1.0: 1.0, INF: 4.0}, 0.9) == 1.0  # beyond the last bound nothing is known
    assert quantile({2.0: 4.0, INF: 4.0}, 1.0) == 2.0


def test_several_models_are_added_up_and_named() -> None:
    text = page(10, 0, (1, 0, 0), running=2, model="a") + page(5, 0, (1, 0, 0), running=3, model="b")
    both = Page.read("\n".join(sorted(text.splitlines(), key=lambda line: (line.split("{")[0].split()[-1], not line.startswith("#")))))
    assert both.values["vllm:num_requests_running"] == 5 and both.values["oarlock_engine_tokens_total"] == 15
    assert "a, b" in drawn(both, both)


def test_once_prints_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(page(0, 0, (1, 0, 0)), page(50, 10, (1, 1, 0)), key="secret") as url:
        assert main(["top", "--once", "--interval", "0.1", "--url", url, "--api-key", "secret"]) == 0
        shown = capsys.readouterr().out
        assert "running 1" in shown and "between tokens" in shown and "generated -" not in shown
        with pytest.raises(AnswerError, match="401: no key \\(give the key with --api-key"):
            top.main(["--once", "--url", url])


def test_what_cannot_be_watched_is_said() -> None:
    with pytest.raises(AnswerError, match="no server answers at http://127.0.0.1:1"):
        top.main(["--once", "--url", "127.0.0.1:1"])
    with pytest.raises(ConfigError, match="--interval 0: must be between"):
        top.main(["--interval", "0"])
    with serving("vllm:odd{ 1") as url, pytest.raises(AnswerError, match="no page of Prometheus metrics"):
        top.main(["--once", "--url", url])


def test_a_server_that_goes_away_leaves_the_last_screen_with_the_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waits = iter([None, None])

    def interrupted(seconds: float) -> None:
        try:
            next(waits)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(top.time, "sleep", interrupted)
    with serving(page(0, 0, (1, 0, 0)), page(50, 10, (1, 1, 0)), 503) as url:
        assert main(["top", "--url", url]) == 130
    shown = capsys.readouterr().out
    assert "running 1" in shown and "503: no key" in shown
