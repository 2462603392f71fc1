"""From a chat request's fields to the prompt's text.

Owns: which template serves a request.
Reads: `frontend.chat`.
Never: looks into a message (`frontend.conversation` has).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.errors import ConfigError
from oarlock.frontend.chat import ChatTemplate, missing_template
from oarlock.server.errors import bad
from oarlock.server.state import ServerState


def render(messages: list[dict[str, Any]], values: Mapping[str, Any], state: ServerState, template: ChatTemplate, tools: Sequence[Any] = ()) -> str:
    """The prompt's text, special tokens included. Raises RequestError or ApiError 400."""
    extra = values.get("chat_template_kwargs", {})
    template.check_kwargs(extra)
    effort = values.get("reasoning_effort")
    if effort is not None:
        if "reasoning_effort" not in template.variables:
            text = "The chat template has no variable 'reasoning_effort', so it would have no effect; leave it out."
            raise bad("reasoning_effort", text, "unsupported_field")
        extra = {"reasoning_effort": effort, **extra}
    continues = values.get("continue_final_message", False)
    starts = values.get("add_generation_prompt", not continues)
    if continues and messages[-1]["role"] != "assistant":
        raise bad("continue_final_message", "continue_final_message needs a last message of role assistant.", "invalid_value")
    return template.render(messages, add_generation_prompt=starts, continue_final_message=continues, tools=tools, **extra)


def template_for(values: Mapping[str, Any], state: ServerState) -> ChatTemplate:
    """The request's own template where that is allowed, else the server's. Raises RequestError or ApiError 400."""
    source = values.get("chat_template")
    if source is None:
        if state.template is None:
            raise missing_template(state.names[0], "start the server with --chat-template FILE, or use /v1/completions")
        return state.template
    if not state.server.allow_request_chat_template:
        raise bad("chat_template", "This server takes no chat template from requests; it would need --allow-request-chat-template.", "unsupported_field")
    try:
        return ChatTemplate(source, state.tokenizer)
    except ConfigError as exc:
        raise bad("chat_template", str(exc), "invalid_value") from None
