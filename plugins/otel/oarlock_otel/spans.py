"""Requests that have ended, as OpenTelemetry spans.

Owns: the names of a span and of its attributes, which are those that vLLM's dashboards read.
Reads: OpenTelemetry's SDK; records of core (`frontend.outputs.RequestRecord`), by their fields.
Never: puts a prompt or an answer into a span.
"""

from __future__ import annotations

import logging
import os
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

NAME = "llm_request"
MAX_PARENT = 512  # characters of a client's traceparent, of which 55 have a meaning; OpenTelemetry writes a line into the log for each longer one
PROTOCOLS = ("http/protobuf", "grpc")
NS = 1_000_000_000


class Spans:
    """A sink: one span for each request, from its arrival to its end, below the client's own where it sent a traceparent."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "oarlock")}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("oarlock")

    def observe(self, steps: list[Any]) -> None:
        """Steps are no spans."""

    def finished(self, records: list[Any]) -> None:
        for record in records:
            traceparent, *_ = (*record.request.trace, "")
            parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if 0 < len(traceparent) <= MAX_PARENT else None
            start, end = record.metrics.arrival_s, record.metrics.finished_s or record.metrics.arrival_s
            span = self._tracer.start_span(NAME, parent, trace.SpanKind.SERVER, attributes=attributes(record, self._model), start_time=int(start * NS))
            if record.error is not None:
                span.set_status(trace.StatusCode.ERROR, record.error.kind)
            span.end(int(end * NS))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def attributes(record: Any, model: str) -> dict[str, Any]:
    """What a span says of a request. What is not known, such as the first token's time of an embedding, is left out."""
    request, times = record.request, record.metrics
    params, first, last, began = request.params, times.first_token_s, times.last_token_s, times.first_scheduled_s
    generates = request.pooling is None

    def between(since: float | None, until: float | None) -> float | None:
        return None if since is None or until is None else max(0.0, until - since)

    found = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": request.trace[1] if len(request.trace) > 1 else request.request_id,
        "gen_ai.request.temperature": params.temperature if generates else None,
        "gen_ai.request.top_p": params.top_p if generates else None,
        "gen_ai.request.max_tokens": params.max_tokens if generates else None,
        "gen_ai.request.n": params.n if generates else None,
        "gen_ai.usage.num_sequences": params.num_branches if generates else None,
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.cached_tokens": record.num_cached_tokens,
        "gen_ai.usage.completion_tokens": record.num_generated_tokens,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.latency.time_in_queue": between(times.arrival_s, began),
        "gen_ai.latency.time_to_first_token": between(times.arrival_s, first),
        "gen_ai.latency.time_in_model_prefill": between(began, first),
        "gen_ai.latency.time_in_model_decode": between(first, last),
        "gen_ai.latency.e2e": between(times.arrival_s, times.finished_s),
    }
    return {name: value for name, value in found.items() if value is not None}


def make_spans(endpoint: str, model: str) -> Spans:
    """The sink that sends to `endpoint`. Raises ValueError or ImportError with the remedy."""
    logger = logging.getLogger("opentelemetry")  # what it says of a collector that does not answer has the form of all our lines
    logger.handlers, logger.propagate = list(logging.getLogger("oarlock").handlers), False
    return Spans(BatchSpanProcessor(_exporter(endpoint)), model)


def _exporter(endpoint: str) -> Any:
    """By HTTP, or by gRPC where OTEL_EXPORTER_OTLP_TRACES_PROTOCOL (or OTEL_EXPORTER_OTLP_PROTOCOL) says so."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in names if os.environ.get(name)), PROTOCOLS[0])
    if protocol not in PROTOCOLS:
        raise ValueError(f"{names[0]} is {protocol!r}; it must be {' or '.join(PROTOCOLS)}")
    url = urlsplit(endpoint)
    if protocol != "grpc" and (url.scheme not in ("http", "https") or not url.hostname):
        raise ValueError(f"--otlp-traces-endpoint is {endpoint!r}; it must be the collector's whole address, such as http://localhost:4318/v1/traces")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Exporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Exporter
    except ImportError:
        package = "opentelemetry-exporter-otlp-proto-" + ("grpc" if protocol == "grpc" else "http")
        raise ImportError(f"spans are sent by {protocol}, and the package for it is not here; run pip install {package}") from None
    return Exporter(endpoint=endpoint)
