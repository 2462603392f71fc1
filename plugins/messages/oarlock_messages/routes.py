"""POST /v1/messages and /v1/messages/count_tokens, over the server's own chat route.

Owns: the fields of both routes, and how an answer, its events and an error look.
Reads: `oarlock.backend_api`, `blocks`, `conversation`, `tools`.
Never: samples, templates or counts itself: the chat route does, with its limits and metrics.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from oarlock.backend_api import EventReply, JsonReply, Route, RouteCall, RouteError, RouteFields, RouteServer

from oarlock_messages.blocks import Blocks, Event, event
from oarlock_messages.conversation import bad, chat_messages, check_cache_control, show
from oarlock_messages.tools import chat_tools, renamed

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
MAX_TEMPERATURE = 1.0  # as documented for this API; the chat route takes more
SERVICE_TIERS = ("auto", "standard_only")

_OFF = {"type": "disabled"}
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "thinking": ("thinking is not served; leave the field out, or send {\"type\": \"disabled\"}.", (_OFF,)),
    "output_config": ("output_config (formats and effort) is not served; leave the field out.", ({},)),
    "output_format": ("output formats are not served on this route; leave the field out.", ()),
    "container": ("containers are not served; leave the field out.", ()),
    "context_management": ("context_management is not served; leave the field out.", ()),
    "mcp_servers": ("MCP servers are never called from here; leave the field out.", ([],)),
    "diagnostics": ("diagnostics are not served; leave the field out.", ()),
    "inference_geo": ("There is one place of inference, this server; leave inference_geo out.", ()),
    "speed": ("There is one speed; leave the field out, or send \"standard\".", ("standard",)),
    "user_profile_id": ("There are no user profiles here; leave the field out.", ()),
    "workspace_id": ("There are no workspaces here; leave the field out.", ()),
}
CREATE = RouteFields(
    {
        "model": "string", "messages": "any", "max_tokens": "integer", "system": "any", "stop_sequences": "strings", "temperature": "number",
        "top_p": "number", "top_k": "integer", "stream": "boolean", "tools": "any", "tool_choice": "any", "metadata": "object", "service_tier": "string", "cache_control": "any",
    },
    required=("model", "messages", "max_tokens"),
    refused=REFUSED,
)  # fmt: skip
_COUNTED = ("model", "messages", "system", "tools", "tool_choice", "cache_control")
COUNT = RouteFields({name: CREATE.fields[name] for name in _COUNTED}, required=("model", "messages"), refused=REFUSED)

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


def add(server: RouteServer) -> None:
    """Both routes."""
    messages = _Messages(server)
    server.add(Route("POST", "/v1/messages", messages.create, CREATE, takes_x_api_key=True, generates=True, error_body=error_body))
    server.add(Route("POST", "/v1/messages/count_tokens", messages.count_tokens, COUNT))


def error_body(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """An error as Anthropic's clients read it; `param` and `code` are additions."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    shown = {"type": kind, "message": error["message"], "param": error["param"], "code": error["code"]}
    return {"type": "error", "error": shown, "request_id": error["request_id"]}


class _Messages:
    def __init__(self, server: RouteServer) -> None:
        self._server = server

    async def create(self, call: RouteCall) -> JsonReply | EventReply:
        body = self._prompt(call.values) | _sampling(call.values)
        headers = {"request-id": call.request_id}
        blocks = Blocks()
        if call.values.get("stream", False):
            return EventReply(self._events(body, call.request_id, blocks), headers)
        if "tools" in body:  # calls and texts may alternate, and a whole chat answer does not say in which order
            message = await self._folded(body, call.request_id, blocks)
        else:
            message = await self._whole(body, call.request_id, blocks)
        return JsonReply(message, headers=headers)

    async def _whole(self, body: dict[str, Any], request_id: str, blocks: Blocks) -> dict[str, Any]:
        try:
            answer = await self._server.call(CHAT, body, request_id)
        except RouteError as error:
            raise renamed(error) from None
        choice = answer["choices"][0]
        blocks.take({"reasoning_content": choice["message"].get("reasoning_content")})
        blocks.take({"content": choice["message"]["content"]})
        return {**self._message(request_id, answer["usage"]), "content": blocks.whole, **_stop(choice)}

    async def _folded(self, body: dict[str, Any], request_id: str, blocks: Blocks) -> dict[str, Any]:
        """The sum of the events."""
        message: dict[str, Any] = {}
        async with contextlib.aclosing(self._events(body, request_id, blocks)) as events:
            async for name, fields in events:
                if name == "message_start":
                    message = fields["message"]
                elif name == "message_delta":
                    message |= {"content": blocks.whole, **fields["delta"], "usage": fields["usage"]}
        return message

    async def count_tokens(self, call: RouteCall) -> JsonReply:
        try:
            answer = await self._server.call(TOKENIZE, self._prompt(call.values), call.request_id)
        except RouteError as error:
            raise renamed(error) from None
        return JsonReply({"input_tokens": answer["count"]}, headers={"request-id": call.request_id})

    def _prompt(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The chat fields that make the prompt. A last turn of the assistant is continued."""
        check_cache_control(values.get("cache_control"), "cache_control")
        messages = chat_messages(values.get("system"), values["messages"], allow_unknown=self._server.allow_unknown_fields)
        body: dict[str, Any] = {"model": values["model"], "messages": messages}
        body |= chat_tools(values, allow_unknown=self._server.allow_unknown_fields)
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _message(self, request_id: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """A message without content. Every prompt token is an input token: prefixes are cached without being asked for, and cost nothing."""
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {
            "id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": self._server.model_names[0], "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": counts,
        }  # fmt: skip

    async def _events(self, body: dict[str, Any], request_id: str, blocks: Blocks) -> AsyncGenerator[Event, None]:
        started = False
        stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        usage: dict[str, Any] = {}
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with contextlib.aclosing(self._server.stream(CHAT, {**body, "stream_options": options}, request_id)) as chunks:
            try:
                async for chunk in chunks:
                    usage = chunk["usage"]
                    if not started:
                        started = True
                        yield event("message_start", message=self._message(request_id, {**usage, "completion_tokens": 0}))
                        yield event("ping")
                    for choice in chunk["choices"]:
                        for made in blocks.take(choice["delta"]):
                            yield made
                        if choice["finish_reason"] is not None:
                            stop = _stop(choice)
            except RouteError as error:
                raise renamed(error) from None
        for made in blocks.close():
            yield made
        yield event("message_delta", delta=stop, usage={"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]})
        yield event("message_stop")


def _stop(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Why it ended: a stop sequence shows itself, the end of the turn does not."""
    if choice["finish_reason"] == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice["finish_reason"] == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if type(choice["stop_reason"]) is str:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice["stop_reason"]}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """The chat fields that say how to generate. Raises RouteError 400."""
    temperature, tier, metadata = values.get("temperature"), values.get("service_tier"), values.get("metadata", {})
    if temperature is not None and not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise bad("temperature", f"temperature is {temperature:g}; on this route it is 0 to {MAX_TEMPERATURE:g}.")
    if values.get("top_k", 0) < 0:
        raise bad("top_k", f"top_k is {values['top_k']}; it must be at least 0, which is off.")
    if tier is not None and tier not in SERVICE_TIERS:
        raise bad("service_tier", f"service_tier is {show(tier)}; it must be one of {', '.join(SERVICE_TIERS)}.")
    for key, value in metadata.items():
        if key != "user_id":
            raise bad(f"metadata.{key[:100]}", f"Unknown field metadata.{key[:100]}; known is user_id.", "unknown_field")
        if value is not None and type(value) is not str:
            raise bad("metadata.user_id", f"metadata.user_id must be a string, not {show(value)}.", "invalid_type")
    body = {name: values[name] for name in ("max_tokens", "temperature", "top_p", "top_k") if name in values}
    if values.get("stop_sequences"):
        body["stop"] = list(values["stop_sequences"])
    return body
