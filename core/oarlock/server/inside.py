"""What the server would feed the model, and the end of requests by their ids: /render and /abort_requests.

Owns: how a rendered request and an abort are answered.
Reads: `server.chat`, `server.completions`, `server.state`.
Never: runs a prompt.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server import kinds
from oarlock.server.answer import Answer, encode
from oarlock.server.body import checked_body
from oarlock.server.chat import create_chat_completion
from oarlock.server.completions import create_completion
from oarlock.server.errors import ApiError, bad
from oarlock.server.schema import CHAT, COMPLETIONS, Table
from oarlock.server.state import OWNER, ServerState

RENDER_CHAT = replace(CHAT, path="/v1/chat/completions/render")
RENDER_COMPLETION = replace(COMPLETIONS, path="/v1/completions/render")
ABORT = Table("/abort_requests", {"request_ids": kinds.string_or_strings}, required=("request_ids",))
MAX_IDS = 4096


async def render_chat(request: Request, state: ServerState) -> Response:
    (shown,) = await _rendered(request, state, await create_chat_completion(request, state))
    return Response(encode(shown), media_type="application/json")


async def render_completion(request: Request, state: ServerState) -> Response:
    return Response(encode(await _rendered(request, state, await create_completion(request, state))), media_type="application/json")


async def _rendered(request: Request, state: ServerState, answer: Response) -> list[dict[str, Any]]:
    """Each prompt after every check: its text, where there is one, its token ids, and how it would be answered."""
    assert isinstance(answer, Answer)
    shown = []
    for prompt, made in zip(answer.prompts, await answer.rendered(), strict=True):
        params = asdict(made.params)
        del params["logits_processors"]
        fields = {"request_id": answer.answer_id, "model": state.names[0], "prompt": prompt if type(prompt) is str else None, "token_ids": made.prompt_token_ids}
        shown.append({**fields, "sampling_params": params, "stream": answer.options.stream, "priority": made.priority, "cache_salt": made.cache_salt})
    return shown


async def abort_requests(request: Request, state: ServerState) -> Response:
    """End open requests of the same API key by X-Request-Id, `request_id` or the id of an answer. Each client is sent an error, unless all is said."""
    values, headers = await checked_body(request, state, ABORT)
    given = values["request_ids"]
    asked = [given] if type(given) is str else list(given)
    if not asked or len(asked) > MAX_IDS:
        raise bad("request_ids", f"request_ids has {len(asked)} entries; give 1 to {MAX_IDS}.", "invalid_value")
    found = set()
    own = OWNER.get()
    for opened in [one for one in state.open if one.owner == own]:
        names = {name for name in asked if name == opened.request_id or name.endswith(("-" + opened.request_id, "_" + opened.request_id))}
        if names:
            found |= names
            opened.end(ApiError(409, "The request was ended by its id (POST /abort_requests).", param=None, code="aborted"))
    body = {"aborted": [name for name in asked if name in found], "not_found": [name for name in asked if name not in found]}
    return Response(msgspec.json.encode(body), 200, headers, "application/json")
