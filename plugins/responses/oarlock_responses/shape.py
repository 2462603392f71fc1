"""How a response and its events look, as it comes to be.

Owns: the response object, its message and the reasoning before it, the sequence of events.
Reads: `oarlock.backend_api` (an error's fields), chunks and answers of the chat route.
Never: waits for anything.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from oarlock.backend_api import RouteError

Event = tuple[str, dict[str, Any]]


class Draft:
    """One response. Its events are the same facts as its fields, so what is streamed is what is stored."""

    def __init__(self, values: Mapping[str, Any], model: str, *, stored: bool) -> None:
        self.stored = stored
        self._message_id, self._reasoning_id = f"msg_{uuid.uuid4().hex}", f"rs_{uuid.uuid4().hex}"
        self._pieces: list[str] = []
        self._reasoning: list[str] = []  # what a server that tells it apart puts before the answer
        self._is_message_open = self._is_reasoning_open = False
        self._logprobs: list[Any] = []
        self._length = False
        self._number = -1
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",  # not the request's id, which a client may choose: an id must not be guessed, nor taken twice
            "object": "response", "created_at": int(time.time()), "completed_at": None, "status": "in_progress", "background": values.get("background", False),
            "error": None, "incomplete_details": None, "instructions": values.get("instructions"), "max_output_tokens": values.get("max_output_tokens"),
            "max_tool_calls": None, "model": model, "output": [], "parallel_tool_calls": True, "previous_response_id": values.get("previous_response_id"),
            "reasoning": None, "service_tier": "default", "store": stored, "temperature": values.get("temperature"), "text": {"format": {"type": "text"}},
            "tool_choice": "auto", "tools": [], "top_logprobs": values.get("top_logprobs", 0), "top_p": values.get("top_p"),
            "truncation": values.get("truncation", "disabled"), "usage": None, "user": values.get("user"), "metadata": values.get("metadata", {}),
        }  # fmt: skip

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
        return {"role": "assistant", "content": "".join(self._pieces)}

    # ---------------------------------------------------------------- from the chat route
    def take_whole(self, answer: Mapping[str, Any]) -> None:
        choice = answer["choices"][0]
        self._reasoning.append(choice["message"].get("reasoning_content") or "")
        self._add(choice["message"]["content"] or "", (choice["logprobs"] or {}).get("content"))
        self._length = choice["finish_reason"] == "length"
        self._count(answer["usage"])
        self.closing()
        self.ended()

    def take(self, chunk: Mapping[str, Any]) -> list[Event]:
        """The events of one chunk."""
        events: list[Event] = []
        for choice in chunk["choices"]:
            if reasoning := choice["delta"].get("reasoning_content"):
                events += self._reason(reasoning)
            text, logprobs = choice["delta"].get("content") or "", (choice["logprobs"] or {}).get("content") or []
            self._add(text, logprobs)
            if text or logprobs:
                events += self._open_message()
                events.append(self._event("response.output_text.delta", **self._at(), delta=text, logprobs=logprobs))
            if choice["finish_reason"] is not None:
                self._length = choice["finish_reason"] == "length"
        if chunk.get("usage"):
            self._count(chunk["usage"])
        return events

    def _add(self, text: str, logprobs: list[Any] | None) -> None:
        self._pieces.append(text)
        self._logprobs += logprobs or []

    def _count(self, usage: Mapping[str, Any]) -> None:
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    # ---------------------------------------------------------------- events
    def opening(self) -> list[Event]:
        return [self._event("response.created", response=dict(self.response)), self._event("response.in_progress", response=dict(self.response))]

    def _reason(self, text: str) -> list[Event]:
        at = {"item_id": self._reasoning_id, "output_index": 0, "content_index": 0}
        first = not self._reasoning
        self._reasoning.append(text)
        self._is_reasoning_open = True
        item = {"id": self._reasoning_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        opening = [self._event("response.output_item.added", output_index=0, item=item)] if first else []
        return [*opening, self._event("response.reasoning_text.delta", **at, delta=text)]

    def _end_reasoning(self) -> list[Event]:
        if not self._is_reasoning_open:
            return []
        self._is_reasoning_open = False
        at = {"item_id": self._reasoning_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.reasoning_text.done", **at, text="".join(self._reasoning)),
            self._event("response.output_item.done", output_index=0, item=self._reasoning_item()),
        ]

    def _reasoning_item(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": "".join(self._reasoning)}]
        return {"id": self._reasoning_id, "type": "reasoning", "status": "completed", "summary": [], "content": content}

    def _open_message(self) -> list[Event]:
        if self._is_message_open:
            return []
        self._is_message_open = True
        item = {"id": self._message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        return [
            *self._end_reasoning(),
            self._event("response.output_item.added", output_index=self._at()["output_index"], item=item),
            self._event("response.content_part.added", **self._at(), part=self._part("", [])),
        ]

    def closing(self) -> list[Event]:
        """The message is complete; it is the response's output from now on."""
        text = self.message["content"]
        part = self._part(text, self._logprobs)
        status = "incomplete" if self._length else "completed"
        item = {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": [part]}
        self.response["output"] = [*([self._reasoning_item()] if any(self._reasoning) else []), item]
        return [
            *self._open_message(),
            self._event("response.output_text.done", **self._at(), text=text, logprobs=self._logprobs),
            self._event("response.content_part.done", **self._at(), part=part),
            self._event("response.output_item.done", output_index=self._at()["output_index"], item=item),
        ]

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
        return {"item_id": self._message_id, "output_index": int(any(self._reasoning)), "content_index": 0}

    def _event(self, name: str, **fields: Any) -> Event:
        self._number += 1
        return name, {"type": name, "sequence_number": self._number, **fields}

    @staticmethod
    def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
