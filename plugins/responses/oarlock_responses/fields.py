"""Which fields POST /v1/responses takes, and what they say to the chat route.

Owns: the field table, the rules of single fields, the chat fields made of them.
Reads: `oarlock.backend_api`, `items`.
Never: accepts a field and ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oarlock.backend_api import RouteFields

from oarlock_responses.items import bad, show
from oarlock_responses.tools import chat_format, chat_reasoning, chat_tools

LOGPROBS = "message.output_text.logprobs"  # the one value of `include`
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's
_NO_EFFECT = ("user", "service_tier", "safety_identifier", "prompt_cache_key")  # as on core's routes

REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "max_tool_calls": ("it bounds tools that the server runs itself, and this one runs none; leave max_tool_calls out.", ()),
    "conversation": ("conversations are not kept by name; use previous_response_id, or send all items as input.", ()),
    "prompt": ("prompt templates are not kept here; send their text as input or instructions.", ()),
    "context_management": ("context_management is not served; leave the field out.", ([],)),
    "moderation": ("moderation is not served; leave the field out.", ()),
    "image": ("images are not made here; leave the field out.", ()),
    "access_programs": ("There are no access programs here; leave the field out.", ()),
    "background_options": ("background_options is not served; leave the field out.", ({},)),
    "prompt_cache_options": ("prefixes are cached by themselves; leave the field out.", ({},)),
    "prompt_cache_retention": ("prefixes stay in memory as long as there is room; leave the field out.", ("in_memory",)),
}
CREATE = RouteFields(
    {
        "model": "string", "input": "any", "instructions": "string", "max_output_tokens": "integer", "temperature": "number", "top_p": "number",
        "stream": "boolean", "stream_options": "object", "store": "boolean", "background": "boolean", "previous_response_id": "string",
        "metadata": "object", "truncation": "string", "text": "object", "include": "strings", "top_logprobs": "integer",
        "tools": "any", "tool_choice": "any", "parallel_tool_calls": "boolean", "reasoning": "object",
        **dict.fromkeys(_NO_EFFECT, "any"),
    },
    required=("model", "input"),
    refused=REFUSED,
)  # fmt: skip


def check(values: Mapping[str, Any], max_stored: int) -> None:
    """The rules of single fields, and of those that do not go together. Raises RouteError 400."""
    if values.get("max_output_tokens", 1) < 1:
        raise bad("max_output_tokens", f"max_output_tokens must be at least 1, not {values['max_output_tokens']}.")
    if values.get("truncation", "disabled") not in ("auto", "disabled"):
        raise bad("truncation", f"truncation is {show(values['truncation'])}; it must be 'auto' or 'disabled'.")
    _check_metadata(values.get("metadata", {}))
    for at, name in enumerate(values.get("include", ())):
        if name != LOGPROBS:
            raise bad(f"include[{at}]", f"include[{at}] is {show(name)}; the one value served here is {LOGPROBS!r}.", "unsupported_field")
    if "top_logprobs" in values and not values.get("include"):
        raise bad("top_logprobs", f'top_logprobs is only allowed with include: ["{LOGPROBS}"].')
    stream, background = values.get("stream", False), values.get("background", False)
    _check_stream_options(values.get("stream_options"), stream=stream)
    if background and stream:
        raise bad("background", "A background response is not streamed here: leave stream out, and retrieve it by its id.", "unsupported_field")
    if background and not values.get("store", True):
        raise bad("store", "A background response has to be stored, or nobody could retrieve it; leave store out.")
    if not max_stored and (background or values.get("store", False)):
        name = "background" if background else "store"
        raise bad(name, f"{name}: this server keeps no responses (--responses-max-stored 0); leave the field out.", "unsupported_field")


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad("metadata", f"metadata has {len(metadata)} keys; the limit is {MAX_METADATA}.")
    for key, value in metadata.items():
        if type(value) is not str:
            raise bad("metadata", f"metadata: the value of {show(key)} must be a string, not {show(value)}.", "invalid_type")
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            text = f"metadata: {show(key)} has {len(key)} characters and its value {len(value)}; the limits are {MAX_METADATA_KEY} and {MAX_METADATA_VALUE}."
            raise bad("metadata", text)


def _check_stream_options(options: Mapping[str, Any] | None, *, stream: bool) -> None:
    if options is None:
        return
    if not stream:
        raise bad("stream_options", "stream_options is only allowed with stream: true.")
    for key, value in options.items():
        path = f"stream_options.{key[:100]}"
        if key != "include_obfuscation":
            raise bad(path, f"Unknown field {path}; known is include_obfuscation.", "unknown_field")
        if value not in (None, False) or type(value) is int:
            raise bad(path, f"{path} is not supported; leave it out or send false.", "unsupported_field")


def prompt_fields(values: Mapping[str, Any], *, allow_unknown: bool) -> dict[str, Any]:
    """The chat fields that make the prompt, beside the messages. Raises RouteError 400."""
    return {"model": values["model"], **chat_tools(values, allow_unknown=allow_unknown), **chat_reasoning(values.get("reasoning", {}))}


def chat_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The chat fields that say how to generate. Raises RouteError 400."""
    body: dict[str, Any] = {name: values[name] for name in ("temperature", "top_p") if name in values}
    body |= chat_format(values.get("text", {}))
    if "max_output_tokens" in values:
        body["max_completion_tokens"] = values["max_output_tokens"]
    if values.get("include"):
        body |= {"logprobs": True, "top_logprobs": values.get("top_logprobs", 0)}
    return body
