"""The log line of a request, off unless --enable-log-requests is given.

Owns: what is written about a request, and how long it may get.
Reads: `config`.
Never: logs headers, keys or answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from oarlock.sampling_params import SamplingParams
from oarlock.server.state import ServerState

log = logging.getLogger("oarlock.server.requests")


def log_request(state: ServerState, request_id: str, prompts: Sequence[Any], params: SamplingParams) -> None:
    """One line; a prompt longer than --max-log-len is cut."""
    observability = state.engine.observability
    if not observability.log_requests:
        return
    limit = observability.max_log_len
    shown = [prompt if limit is None else prompt[:limit] for prompt in prompts]
    log.info("request %s: prompts %r, %r", request_id, shown, params)
