"""POST /v1/chat/completions.

Owns: how a chat answer and its chunks look.
Reads: `server.answer`, `server.messages`, `server.params`, `server.logprobs`.
Never: tokenises or samples.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oarlock.frontend.conversation import read_messages, text_of
from oarlock.frontend.outputs import CompletionOutput, RequestOutput
from oarlock.server.answer import Answer, encode
from oarlock.server.body import checked_body
from oarlock.server.conversation import render, template_for
from oarlock.server.logprobs import ChatStyle, prompt_shape
from oarlock.server.params import chat_settings
from oarlock.server.parsing import Reading, whole_message
from oarlock.server.requestlog import log_request
from oarlock.server.schema import CHAT
from oarlock.server.state import ServerState
from oarlock.server.tools import AnswerReader, constrain, read_tools


async def create_chat_completion(request: Request, state: ServerState) -> Response:
    state.check_room()
    values, headers = await checked_body(request, state, CHAT)
    template = template_for(values, state)
    messages = read_messages(values["messages"], template, allow_unknown=state.server.allow_unknown_fields, max_messages=state.server.max_messages)
    params, options, length_name = chat_settings(values, state.defaults, state.engine.scheduler.policy)
    use = read_tools(values, state, template)
    params = constrain(params, use, state.parsers)
    prompt = render(messages, values, state, template, use.shown)
    reader = AnswerReader(use, state, prompt, show_reasoning=values.get("include_reasoning", True))
    params = reader.shown_special_tokens(params)
    request_id = values.get("request_id") or request.state.request_id
    log_request(state, request_id, [prompt], params)
    renames = {"logprobs": "top_logprobs", "max_tokens": length_name}
    answer = ChatAnswer(state, request_id, [prompt], params, options, int(time.time()), headers, renames)
    answer.use_roles(messages, values)
    answer.reader, answer.reads_text = reader, bool(reader.kinds)
    return answer


class ChatAnswer(Answer):
    """One choice for each of n."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_param = "messages"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._started: set[int] = set()
        self.reader: AnswerReader | None = None
        self._readings: dict[int, Reading] = {}
        tokenizer = self.state.tokenizer
        hidden = tokenizer.all_special_ids if self.options.skip_special_tokens and tokenizer else frozenset()
        hidden -= {tokenizer.token_to_id(token) for token in self.params.shown_special_tokens}
        self._style = ChatStyle(self.options.logprobs or 0, self.options.tokens_as_ids, hidden)
        self._role, self._echo = self.state.server.response_role, ""

    def use_roles(self, messages: list[dict[str, Any]], values: dict[str, Any]) -> None:
        """The answer's role, and the last message's text where it is to be repeated before the answer (`echo`)."""
        last = messages[-1]
        if not values.get("add_generation_prompt", True):
            self._role = last["role"]
        if values.get("echo", False) and last["role"] == self._role:
            self._echo = text_of(last["content"])

    # ---------------------------------------------------------------- whole
    def choices(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        result = []
        for choice in output.outputs:
            message, reason = self._message(choice)
            shown: dict[str, Any] = {
                "index": choice.index,
                "message": {"role": self._role, **message, "refusal": None},
                "logprobs": self._logprobs(choice, always=True),
                "finish_reason": reason,
                "stop_reason": choice.stop_reason,
            }
            if self.options.return_token_ids:
                shown["token_ids"] = choice.token_ids
            result.append(shown)
        body: dict[str, Any] = {"choices": result}
        count = self.options.prompt_logprobs
        if count is not None:
            body["prompt_logprobs"] = None if output.prompt_logprobs is None else prompt_shape(output.prompt_logprobs, count)
        if self.options.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    def _message(self, choice: CompletionOutput) -> tuple[dict[str, Any], str | None]:
        """(what the message holds beside its role, the finish reason)."""
        if self.reader is None or not self.reads_text:
            return {"content": self._echo + choice.text}, choice.finish_reason
        reading = self.reader.reading()
        message = whole_message(reading, choice.text, choice.finish_reason or "stop")
        if self._echo or (message["content"] is None and len(message) == 1):
            message["content"] = self._echo + (message["content"] or "")
        return message, reading.finish_reason(choice.finish_reason)

    # ---------------------------------------------------------------- streamed
    def deltas(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        chunks = []
        for choice in output.outputs:
            number = choice.index
            if number not in self._started:
                self._started.add(number)
                chunks += self._opening(number, output)
            deltas, reason = self._read(choice)
            logprobs = self._logprobs(choice, always=False)
            token_ids = choice.token_ids if self.options.return_token_ids else []
            for at, delta in enumerate(deltas or ([{"content": ""}] if logprobs or token_ids else [])):
                chunk: dict[str, Any] = {"index": number, "delta": delta, "logprobs": None if at else logprobs, "finish_reason": None}
                if self.options.return_token_ids:
                    chunk["token_ids"] = [] if at else token_ids
                chunks.append(encode(chunk))
            if reason is not None:
                chunks.append(encode({"index": number, "delta": {}, "logprobs": None, "finish_reason": reason, "stop_reason": choice.stop_reason}))
        return chunks

    def _read(self, choice: CompletionOutput) -> tuple[list[dict[str, Any]], str | None]:
        """(the deltas that this news makes, the finish reason where it is the last)."""
        if self.reader is None or not self.reads_text:
            return [{"content": choice.text}] if choice.text else [], choice.finish_reason
        reading = self._readings.get(choice.index)
        if reading is None:
            reading = self._readings[choice.index] = self.reader.reading()
        deltas = reading.feed(choice.text)
        if choice.finish_reason is not None:
            deltas += reading.finish(choice.finish_reason)
        return deltas, reading.finish_reason(choice.finish_reason)

    def _opening(self, number: int, output: RequestOutput) -> list[bytes]:
        """The role in a chunk of its own, then the repeated text."""
        first: dict[str, Any] = {"index": number, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None}
        if self.options.return_token_ids:
            first["prompt_token_ids"] = output.prompt_token_ids
        chunks = [encode(first)]
        if self._echo:
            chunks.append(encode({"index": number, "delta": {"content": self._echo}, "logprobs": None, "finish_reason": None}))
        return chunks

    def _logprobs(self, choice: CompletionOutput, *, always: bool) -> dict[str, Any] | None:
        if self.options.logprobs is None or choice.logprobs is None or not (choice.logprobs or always):
            return None
        return {"content": self._style.content(choice.token_ids, choice.logprobs), "refusal": None}
