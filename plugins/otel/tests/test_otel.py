"""A span for each request: over a scripted engine with the SDK's exporter in memory, and from a real server to a collector that listens here."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oarlock_otel import make_sink
from oarlock_otel.spans import NAME, Spans
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from real_server import null_server, wait_until
from tiny_model import make_tiny_model
from toy_frontend import says
from toy_server import MODEL, Toy, toy_server

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


def watch(here: Toy) -> InMemorySpanExporter:
    """Let a sink see what ends on this server."""
    exporter = InMemorySpanExporter()
    sink = Spans(SimpleSpanProcessor(exporter), MODEL)
    here.engine.feed = SimpleNamespace(note=lambda record: sink.finished([record]))  # type: ignore[assignment]
    return exporter


@pytest.mark.asyncio
async def test_a_span_says_what_became_of_a_request() -> None:
    async with toy_server(says("hello"), step_s=0.01) as here:
        exporter = watch(here)
        headers = {"X-Request-Id": "mine", "traceparent": PARENT}
        await here.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "n": 2}, headers=headers)
        (span,) = exporter.get_finished_spans()
        said = dict(span.attributes or {})
        assert span.name == NAME and span.kind is trace.SpanKind.SERVER and span.status.is_ok is not False
        assert span.parent is not None and f"{span.parent.span_id:x}" == SPAN_ID and f"{span.context.trace_id:032x}" == TRACE_ID
        assert {name.removeprefix("gen_ai."): value for name, value in said.items() if "latency" not in name} == {
            "response.model": MODEL, "request.id": "mine", "request.temperature": 0.5, "request.top_p": 0.9, "request.max_tokens": 3, "request.n": 2,
            "usage.num_sequences": 2, "usage.prompt_tokens": 2, "usage.cached_tokens": 4, "usage.completion_tokens": 6, "response.finish_reasons": ("length", "length"),
        }  # fmt: skip
        times = {name.removeprefix("gen_ai.latency."): value for name, value in said.items() if "latency" in name}
        assert set(times) == {"time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "e2e"}
        assert 0 < times["time_to_first_token"] <= times["e2e"] and times["time_in_queue"] == pytest.approx(0.25)
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(times["e2e"], abs=1e-3)
        assert "hi" not in str(said) and "hel" not in str(said)


@pytest.mark.asyncio
async def test_a_stop_string_ends_a_span_too_and_a_refusal_has_none() -> None:
    async with toy_server(says("hello"), step_s=0.01) as here:
        exporter = watch(here)
        await here.completion(stop="l", max_tokens=30)
        await here.chat(max_tokens=2, stream=True)
        assert (await here.completion(temperature=9)).status_code == 400, "what never ran has no span"
        found = [dict(span.attributes or {})["gen_ai.response.finish_reasons"] for span in exporter.get_finished_spans()]
        assert found == [("stop",), ("length",)]
        assert all(span.parent is None for span in exporter.get_finished_spans())


def test_spans_reach_a_collector(tmp_path: Path) -> None:
    came: list[Any] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            came.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    folder = make_tiny_model(tmp_path / "tiny")
    try:
        with null_server(folder, "k", "--otlp-traces-endpoint", f"http://127.0.0.1:{listener.server_port}/v1/traces", log=tmp_path / "log") as server:
            assert server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 4, "ignore_eos": True}).status_code == 200
            wait_until(lambda: came, 15.0)
    finally:
        listener.shutdown()
    path, sent = came[0]
    (resource,) = sent.resource_spans
    (span,) = resource.scope_spans[0].spans
    said = {item.key: item.value for item in span.attributes}
    assert path == "/v1/traces" and span.name == NAME and said["gen_ai.usage.completion_tokens"].int_value == 4
    assert said["gen_ai.response.model"].string_value == "tiny"
    assert {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"] == "oarlock"


def test_a_sink_is_made_where_spans_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(endpoint: str | None) -> Any:
        return SimpleNamespace(observability=SimpleNamespace(otlp_traces_endpoint=endpoint), model=SimpleNamespace(model="m", served_model_name=()))

    code = "import sys, types as t, oarlock_otel as o; c = t.SimpleNamespace(observability=t.SimpleNamespace(otlp_traces_endpoint=None)); assert o.make_sink(c) is None"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'opentelemetry' not in sys.modules"], check=True)  # who asks for no spans does not wait for it
    made = make_sink(config("http://127.0.0.1:9/v1/traces"))
    assert isinstance(made, Spans)
    made.close()
    for endpoint in ("nonsense", "localhost:4318", "http://", "file:///x"):
        with pytest.raises(ValueError, match="--otlp-traces-endpoint"):
            make_sink(config(endpoint))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ValueError, match="http/protobuf or grpc"):
        make_sink(config("http://127.0.0.1:9"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    try:
        import opentelemetry.exporter.otlp.proto.grpc  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
            make_sink(config("http://127.0.0.1:9"))
