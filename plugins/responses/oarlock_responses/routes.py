"""/v1/responses: create, whole, streamed or in the background; retrieve, cancel, delete.

Owns: the order of a response's steps, and what is kept of it.
Reads: `oarlock.backend_api`, `fields`, `items`, `shape`, `store`.
Never: samples or templates itself: the chat route does, with its limits and metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from oarlock.backend_api import EventReply, JsonReply, Route, RouteCall, RouteError, RouteServer

from oarlock_responses.fields import CREATE, chat_fields, check, prompt_fields
from oarlock_responses.items import bad, read_input
from oarlock_responses.shape import Draft
from oarlock_responses.store import Store, Stored
from oarlock_responses.tools import renamed

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
PROMPTLY_S = 0.2  # how long a background response waits for its first token, so that what is wrong with the request is told at once


def add(server: RouteServer) -> None:
    """Every route."""
    max_stored, max_mib = server.options["responses_max_stored"], server.options["responses_max_stored_mib"]
    responses = Responses(server, Store(max_stored, max_mib << 20))
    server.add(Route("POST", "/v1/responses", responses.create, CREATE, generates=True))
    server.add(Route("GET", "/v1/responses/{response_id}", responses.retrieve))
    server.add(Route("DELETE", "/v1/responses/{response_id}", responses.delete))
    server.add(Route("POST", "/v1/responses/{response_id}/cancel", responses.cancel))


class Responses:
    """The routes of one server. Used on the event loop's thread only."""

    def __init__(self, server: RouteServer, store: Store) -> None:
        self.server, self.store = server, store

    # ---------------------------------------------------------------- create
    async def create(self, call: RouteCall) -> JsonReply | EventReply:
        values = call.values
        check(values, self.store.max_count)
        messages = [*self._before(values), *read_input(values["input"], allow_unknown=self.server.allow_unknown_fields)]
        body = prompt_fields(values, allow_unknown=self.server.allow_unknown_fields)
        generation = chat_fields(values)
        messages, sent = await self._fitted(values, messages, body, call.request_id)
        body |= {**generation, "messages": sent}
        draft = Draft(values, self.server.model_names[0], stored=values.get("store", bool(self.store.max_count)))
        if values.get("background", False):
            return await self._in_background(draft, messages, body, call.request_id)
        if values.get("stream", False):
            return EventReply(self._events(draft, messages, body, call.request_id))
        if "tools" in body:  # calls and texts may alternate, and a whole chat answer does not say in which order
            await self._fold(draft, body, call.request_id)
        else:
            try:
                draft.take_whole(await self.server.call(CHAT, body, call.request_id))
            except RouteError as error:
                raise renamed(error) from None
        self._keep(draft, messages)
        return JsonReply(draft.response)

    async def _fold(self, draft: Draft, body: dict[str, Any], request_id: str) -> None:
        """The sum of the chunks. Raises RouteError, also for what goes wrong on the way."""
        try:
            async with contextlib.aclosing(self._chunks(body, request_id)) as chunks:
                async for chunk in chunks:
                    draft.take(chunk)
        except RouteError as error:
            raise renamed(error) from None
        draft.closing()
        draft.ended()

    def _before(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """The conversation that this request goes on with. Raises RouteError 400."""
        key = values.get("previous_response_id")
        if key is None:
            return ()
        found = self.store.find(key)
        if found is None:
            text = f"previous_response_id: {self.store.gone(key)} Send the conversation so far as input."
            raise RouteError(400, text, "previous_response_id", "previous_response_not_found")
        status = found.response["status"]
        if status not in ("completed", "incomplete"):
            raise bad("previous_response_id", f"previous_response_id: the response {key!r} is {status}; only one that has its output can be continued.")
        return found.messages

    async def _fitted(
        self, values: Mapping[str, Any], messages: list[dict[str, Any]], prompt: Mapping[str, Any], request_id: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(the conversation, the messages to send): with truncation auto as many of the oldest are left out as it takes to fit."""
        instructions = [] if values.get("instructions") is None else [{"role": "system", "content": values["instructions"]}]
        if values.get("truncation") != "auto":
            return messages, [*instructions, *messages]
        room = self.server.max_model_len - values.get("max_output_tokens", 1)
        starts = _starts(messages)

        async def fits(start: int) -> bool:
            body = {**prompt, "messages": [*instructions, *_from(messages, start)]}
            try:
                return (await self.server.call(TOKENIZE, body, request_id))["count"] <= room
            except RouteError as error:
                if not (error.param or "").startswith("messages"):
                    raise renamed(error) from None
                return False  # more text than is ever tokenised, or turns that the template refuses

        low, high = 0, len(starts) - 1
        while low < high:  # the earliest start that fits; if none does, the chat route says so
            middle = (low + high) // 2
            low, high = (low, middle) if await fits(starts[middle]) else (middle + 1, high)
        kept = _from(messages, starts[low])
        return kept, [*instructions, *kept]

    def _keep(self, draft: Draft, messages: list[dict[str, Any]]) -> None:
        if draft.stored:
            self.store.put(Stored(draft.response, (*messages, draft.message)))

    async def _events(self, draft: Draft, messages: list[dict[str, Any]], body: dict[str, Any], request_id: str) -> AsyncGenerator[tuple[str, Any], None]:
        started = False
        try:
            async with contextlib.aclosing(self._chunks(body, request_id)) as chunks:
                async for chunk in chunks:
                    if not started:
                        started = True
                        for event in draft.opening():
                            yield event
                    for event in draft.take(chunk):
                        yield event
        except RouteError as error:
            if not started:
                raise renamed(error) from None
            yield draft.failed(error)
            return
        for event in draft.closing():
            yield event
        self._keep(draft, messages)
        yield draft.ended()

    def _chunks(self, body: dict[str, Any], request_id: str) -> AsyncGenerator[Any, None]:
        return self.server.stream(CHAT, {**body, "stream_options": {"include_usage": True}}, request_id)

    # ---------------------------------------------------------------- background
    async def _in_background(self, draft: Draft, messages: list[dict[str, Any]], body: dict[str, Any], request_id: str) -> JsonReply:
        draft.response["status"] = "in_progress"
        entry = Stored(draft.response)
        self.store.put(entry)
        started: asyncio.Future[RouteError | None] = asyncio.get_running_loop().create_future()
        self.server.spawn(self._make(entry, draft, messages, body, request_id, started))
        with contextlib.suppress(TimeoutError):
            refused = await asyncio.wait_for(asyncio.shield(started), PROMPTLY_S)
            if refused is not None:
                raise refused
        return JsonReply(dict(draft.response))

    async def _make(
        self, entry: Stored, draft: Draft, messages: list[dict[str, Any]], body: dict[str, Any], request_id: str, started: asyncio.Future[RouteError | None]
    ) -> None:
        """The work of a background response. A refusal before its client was answered is the client's answer, and nothing is kept."""
        entry.task = asyncio.current_task()
        key = draft.response["id"]
        try:
            async with contextlib.aclosing(self._chunks(body, request_id)) as chunks:
                async for chunk in chunks:
                    if not started.done():
                        started.set_result(None)
                    draft.take(chunk)
            draft.closing()
            draft.ended()
            entry.messages = (*messages, draft.message)
        except RouteError as error:
            if not started.done():
                self._forget(key)
                started.set_result(renamed(error))
                return
            draft.failed(renamed(error))
        except asyncio.CancelledError:
            draft.cancelled()
            raise
        except Exception:
            draft.failed(RouteError(500, "Internal error; the server's log has the reason."))
            raise
        finally:
            if not started.done():
                started.set_result(None)
            if self.store.find(key) is entry:
                self.store.put(entry)

    def _forget(self, key: str) -> None:
        if self.store.find(key) is not None:
            self.store.drop(key)

    # ---------------------------------------------------------------- by id
    async def retrieve(self, call: RouteCall) -> JsonReply:
        for name, value in call.query.items():
            if (name, value) != ("stream", "false"):
                raise bad(name[:100], f"The parameter {name[:100]!r} is not served here: a response is retrieved whole.", "unsupported_field")
        return JsonReply(self.store.get(call.path_params["response_id"]).response)

    async def delete(self, call: RouteCall) -> JsonReply:
        key = call.path_params["response_id"]
        task = self.store.get(key).task
        self.store.drop(key)
        if task is not None:
            task.cancel()
        return JsonReply({"id": key, "object": "response", "deleted": True})

    async def cancel(self, call: RouteCall) -> JsonReply:
        entry = self.store.get(call.path_params["response_id"])
        if not entry.response["background"]:
            raise bad("response_id", "Only a response made with background: true can be cancelled; a client ends others by hanging up.")
        if entry.task is not None and entry.is_open:
            entry.task.cancel()
            await asyncio.wait((entry.task,))
        return JsonReply(entry.response)


def _starts(messages: list[dict[str, Any]]) -> list[int]:
    """Where a shortened conversation may begin: as it is, at a turn of the user, or with its last message, a call with its results."""
    last = len(messages) - 1
    while last and messages[last]["role"] == "tool":
        last -= 1
    return sorted({0, last, *(at for at, message in enumerate(messages) if message["role"] == "user")})


def _from(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """The turns from `start` on, and every system or developer message before them."""
    return [message for at, message in enumerate(messages) if at >= start or message["role"] in ("system", "developer")]
