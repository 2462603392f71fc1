"""How a response and its events look, as it comes to be.

Owns: the response object, its items, the sequence of events.
Reads: `oarlock.backend_api` (an error's fields), `tools`, chunks and answers of the chat route.
Never: waits for anything.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from oarlock.backend_api import RouteError

from oarlock_responses.tools import shown_tools

Event = tuple[str, dict[str, Any]]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Draft:
    """One response. Its events are the same facts as its fields, so what is streamed is what is stored."""

    def __init__(self, values: Mapping[str, Any], model: str, *, stored: bool) -> None:
        self.stored = stored
        self._items: list[dict[str, Any]] = []  # whole but for the last, which is open until `_close`
        self._is_open = False
        self._pieces: list[str] = []  # text, reasoning or arguments of the open item
        self._length = False
        self._number = -1
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",  # not the request's id, which a client may choose: an id must not be guessed, nor taken twice
            "object": "response", "created_at": int(time.time()), "completed_at": None, "status": "in_progress", "background": values.get("background", False),
            "error": None, "incomplete_details": None, "instructions": values.get("instructions"), "max_output_tokens": values.get("max_output_tokens"),
            "max_tool_calls": None, "model": model, "output": [], "previous_response_id": values.get("previous_response_id"),
            "service_tier": "default", "store": stored, "temperature": values.get("temperature"), "top_logprobs": values.get("top_logprobs", 0), "top_p": values.get("top_p"),
            "truncation": values.get("truncation", "disabled"), "usage": None, "user": values.get("user"), "metadata": values.get("metadata", {}),
            **shown_tools(values),
        }  # fmt: skip

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message: what was thought is part of it only as long as calls wait for their results."""
        found: dict[str, list[Any]] = {"message": [], "reasoning": [], "function_call": []}
        for item in self._items:
            found[item["type"]].append(item)
        text = "".join(part["text"] for item in found["message"] for part in item["content"])
        calls = [{"id": i["call_id"], "type": "function", "function": {"name": i["name"], "arguments": i["arguments"]}} for i in found["function_call"]]
        if not calls:
            return {"role": "assistant", "content": text}
        thought = "".join(part["text"] for item in found["reasoning"] for part in item["content"])
        return {"role": "assistant", "content": text or None, "tool_calls": calls, **({"reasoning_content": thought} if thought else {})}

    # ---------------------------------------------------------------- from the chat route
    def take_whole(self, answer: Mapping[str, Any]) -> None:
        """An answer without calls, whose parts have one order."""
        choice = answer["choices"][0]
        message, logprobs, reason = choice["message"], choice["logprobs"], choice["finish_reason"]
        for delta in ({"reasoning_content": message.get("reasoning_content")}, {"content": message["content"]}):
            self.take({"choices": [{"delta": delta, "logprobs": logprobs if "content" in delta else None, "finish_reason": reason}]})
        self._count(answer["usage"])
        self.closing()
        self.ended()

    def take(self, chunk: Mapping[str, Any]) -> list[Event]:
        """The events of one chunk."""
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta, logprobs = choice["delta"], (choice["logprobs"] or {}).get("content") or []
            if reasoning := delta.get("reasoning_content"):
                events += self._start("reasoning", summary=[], content=[])
                events.append(self._more("response.reasoning_text.delta", reasoning, content_index=0))
            if (text := delta.get("content") or "") or (logprobs and "tool_calls" not in delta):
                events += self._start("message", role="assistant", content=[])
                self._items[-1]["content"][0]["logprobs"] += logprobs
                events.append(self._more("response.output_text.delta", text, content_index=0, logprobs=logprobs))
            for call in delta.get("tool_calls") or ():
                if call.get("id") is not None:
                    events += self._close()
                    events += self._start("function_call", call_id=call["id"], name=call["function"]["name"], arguments="")
                if arguments := call["function"].get("arguments"):
                    events.append(self._more("response.function_call_arguments.delta", arguments))
            if choice["finish_reason"] is not None:
                self._length = choice["finish_reason"] == "length"
        if chunk.get("usage"):
            self._count(chunk["usage"])
        return events

    def _count(self, usage: Mapping[str, Any]) -> None:
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    # ---------------------------------------------------------------- items
    def _start(self, kind: str, **fields: Any) -> list[Event]:
        """Open an item; nothing where one of its kind is open."""
        if self._is_open and self._items[-1]["type"] == kind:
            return []
        events = self._close()
        item = {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._is_open, self._pieces = True, []
        events.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item)))
        if kind == "message":
            events.append(self._event("response.content_part.added", **self._at(), content_index=0, part=_text_part("", [])))
            item["content"] = [_text_part("", [])]
        return events

    def _more(self, name: str, text: str, /, **fields: Any) -> Event:
        self._pieces.append(text)
        return self._event(name, **self._at(), delta=text, **fields)

    def _close(self, status: str = "completed") -> list[Event]:
        """End the open item, where there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self._items[-1], "".join(self._pieces)
        item["status"] = status
        match item["type"]:
            case "message":
                item["content"][0]["text"] = text
                (part,) = item["content"]
                events = [
                    self._event("response.output_text.done", **self._at(), content_index=0, text=text, logprobs=part["logprobs"]),
                    self._event("response.content_part.done", **self._at(), content_index=0, part=part),
                ]
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                events = [self._event("response.reasoning_text.done", **self._at(), content_index=0, text=text)]
            case _:
                item["arguments"] = text
                events = [self._event("response.function_call_arguments.done", **self._at(), name=item["name"], arguments=text)]
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    # ---------------------------------------------------------------- events
    def opening(self) -> list[Event]:
        return [self._event("response.created", response=dict(self.response)), self._event("response.in_progress", response=dict(self.response))]

    def closing(self) -> list[Event]:
        """The items are complete; they are the response's output from now on. An answer without a word is an empty message."""
        events = []
        if all(item["type"] == "reasoning" for item in self._items):
            events = self._start("message", role="assistant", content=[])
        events += self._close("incomplete" if self._length else "completed")
        self.response["output"] = self._items
        return events

    def ended(self) -> Event:
        self.response["status"] = "incomplete" if self._length else "completed"
        self.response["completed_at"] = int(time.time())
        if self._length:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._event(f"response.{self.response['status']}", response=self.response)

    def failed(self, error: RouteError) -> Event:
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=self.response)

    def cancelled(self) -> None:
        self.response["status"] = "cancelled"

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        return name, {"type": name, "sequence_number": self._number, **fields}


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
