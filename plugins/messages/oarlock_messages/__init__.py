"""The entry point: Anthropic's Messages API as routes of the server. Light: it imports its routes when a server adds them.

Owns: the record of the routes.
Reads: `oarlock.backend_api`.
Never: knows a model or the engine.
"""

from __future__ import annotations

from oarlock.backend_api import Extension, hookimpl


@hookimpl
def extensions() -> list[Extension]:
    """POST /v1/messages and /v1/messages/count_tokens."""
    return [Extension("routes", "messages", "oarlock_messages.routes:add")]
