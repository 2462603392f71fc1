"""The entry point: a span for each request, sent to an OpenTelemetry collector. Light: OpenTelemetry is imported when spans are asked for.

Owns: the record of the sink.
Reads: `oarlock.backend_api`.
Never: delays a step: a sink is called from a thread of its own.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import Extension, hookimpl


@hookimpl
def extensions() -> list[Extension]:
    """Serves `--otlp-traces-endpoint`."""
    return [Extension("sink", "otel", "oarlock_otel:make_sink")]


def make_sink(config: Any) -> Any:
    """The sink of `--otlp-traces-endpoint`; None without it. Raises ValueError or ImportError with the remedy."""
    endpoint = config.observability.otlp_traces_endpoint
    if endpoint is None:
        return None
    from oarlock_otel.spans import make_spans

    return make_spans(endpoint, (config.model.served_model_name or (config.model.model,))[0])
