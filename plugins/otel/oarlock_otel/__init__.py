"""The entry point: a span for each request, sent to an OpenTelemetry collector. Light: OpenTelemetry is imported when spans are asked for.

Owns: the record of the sink.
Reads: `oarlock.backend_api`.
Never: delays a step: a sink is called from a thread of its own.
"""

from __future__ import annotations

from oarlock.backend_api import Extension, hookimpl


@hookimpl
def extensions() -> list[Extension]:
    """Serves `--otlp-traces-endpoint`."""
    return [Extension("sink", "otel", "oarlock_otel.spans:make_sink")]
