"""The entry point: routes of the server whose answers are vectors, or what follows from them. Light: it imports its routes when a server adds them.

Owns: the record of the routes.
Reads: `oarlock.backend_api`.
Never: knows a model or the engine.
"""

from __future__ import annotations

from oarlock.backend_api import Extension, hookimpl


@hookimpl
def extensions() -> list[Extension]:
    """/v1/embeddings, /score, /rerank, /classify and their other names."""
    return [Extension("routes", "pooling", "oarlock_pooling.routes:add")]
