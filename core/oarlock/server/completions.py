"""POST /v1/completions.

Owns: the prompt's forms, and how a completion and its chunks look.
Reads: `server.answer`, `server.params`, `server.logprobs`.
Never: tokenises or samples.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oarlock.errors import show
from oarlock.frontend.outputs import CompletionOutput, RequestOutput
from oarlock.frontend.text_threads import in_text_thread
from oarlock.server.answer import THREAD_CHARS, Answer, encode
from oarlock.server.body import checked_body
from oarlock.server.errors import bad
from oarlock.server.fill_in import fill_in_ids
from oarlock.server.kinds import token_ids
from oarlock.server.logprobs import CompletionLogprobs, Position, extend, prompt_shape
from oarlock.server.params import completion_settings
from oarlock.server.requestlog import log_request
from oarlock.server.schema import COMPLETIONS
from oarlock.server.state import ServerState


def read_prompts(value: Any, max_prompts: int) -> list[Any]:
    """A string, token ids, or a list of either, as a list of prompts. Raises ApiError 400 with param "prompt"."""
    if type(value) is str:
        return [value]
    if type(value) is not list:
        raise bad("prompt", f"prompt must be a string, an array of token ids, or an array of these, not {show(value)}.", "invalid_type")
    if not value:
        raise bad("prompt", "prompt is an empty array; give at least one prompt.", "invalid_value")
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [token_ids(value, "prompt")]
    if kinds != {str} and kinds != {list}:
        raise bad("prompt", "prompt must be a string, an array of token ids, or an array of either; this array mixes or holds others.", "invalid_type")
    if len(value) > max_prompts:
        raise bad("prompt", f"prompt has {len(value)} prompts; the limit (--max-prompts) is {max_prompts}.", "invalid_value")
    return value if kinds == {str} else [token_ids(item, "prompt") for item in value]


async def create_completion(request: Request, state: ServerState) -> Response:
    state.check_room()
    values, headers = await checked_body(request, state, COMPLETIONS)
    prompts = read_prompts(values["prompt"], state.server.max_prompts)
    params, options = completion_settings(values, state.defaults, state.engine.scheduler.policy)
    request_id = values.get("request_id") or request.state.request_id
    log_request(state, request_id, prompts, params)
    renames = {"prompt_logprobs": "logprobs"} if options.prompt_logprobs is None else {}
    answer = CompletionAnswer(state, request_id, prompts, params, options, int(time.time()), headers, renames)
    if values.get("suffix"):
        await answer.fill_in(values["suffix"])
    return answer


class CompletionAnswer(Answer):
    """Choice number: prompt number × n + choice of that prompt."""

    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._started: set[int] = set()  # choices that had their first chunk
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_positions: dict[int, list[Position | None]] = {}  # kept for the choices whose first chunk comes later
        self._hidden = self.state.tokenizer.all_special_ids if self.options.skip_special_tokens and self.state.tokenizer else frozenset()

    async def fill_in(self, suffix: str) -> None:
        """Let the model fill the gap between each prompt and `suffix`. Raises ApiError, RequestError."""
        if self.params.truncate_prompt_tokens is not None:
            raise bad("suffix", "suffix and truncate_prompt_tokens exclude each other: the beginning of the prompt marks the gap.", "invalid_value")
        special, processor = self.options.add_special_tokens, self.state.llm.processor

        def make() -> list[Any]:
            return [fill_in_ids(processor, prompt, suffix, add_special_tokens=special) for prompt in self.prompts]

        self._inputs = await in_text_thread(make) if len(suffix) + sum(map(len, self.prompts)) > THREAD_CHARS else make()

    # ---------------------------------------------------------------- whole
    def choices(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        result = []
        for prompt_index, output in enumerate(outputs):
            self._keep_prompt(prompt_index, output)
            prompt_logprobs = self._prompt_logprobs(output)
            for choice in output.outputs:
                number = prompt_index * self.params.n + choice.index
                shown: dict[str, Any] = {
                    "index": number,
                    "text": self._echo(prompt_index, output) + choice.text,
                    "logprobs": self._shape(number, prompt_index, output, choice, first=True),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                if self.options.prompt_logprobs is not None:
                    shown["prompt_logprobs"] = prompt_logprobs
                if self.options.return_token_ids:
                    shown["prompt_token_ids"] = output.prompt_token_ids
                    shown["token_ids"] = choice.token_ids
                result.append(shown)
        return {"choices": result}

    def _prompt_logprobs(self, output: RequestOutput) -> list[Any] | None:
        count = self.options.prompt_logprobs
        return None if count is None or output.prompt_logprobs is None else prompt_shape(output.prompt_logprobs, count)

    # ---------------------------------------------------------------- streamed
    def deltas(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        self._keep_prompt(prompt_index, output)
        chunks = []
        for choice in output.outputs:
            number = prompt_index * self.params.n + choice.index
            first = number not in self._started
            self._started.add(number)
            text = (self._echo(prompt_index, output) if first else "") + choice.text
            shape = self._shape(number, prompt_index, output, choice, first=first)
            ids = choice.token_ids
            if text or (shape and shape["tokens"]) or (self.options.return_token_ids and (ids or first)):
                chunk: dict[str, Any] = {"index": number, "text": text, "logprobs": shape, "finish_reason": None}
                if self.options.return_token_ids:
                    chunk["prompt_token_ids"] = output.prompt_token_ids if first else None
                    chunk["token_ids"] = ids
                chunks.append(encode(chunk))
            if choice.finish_reason is not None:
                end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
                chunks.append(encode({"index": number, "text": "", "logprobs": None, **end}))
        return chunks

    # ---------------------------------------------------------------- parts
    def _keep_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        """The prompt's logprobs come once, before the first chunk of some of its choices."""
        if output.prompt_logprobs is not None:
            self._prompt_positions[prompt_index] = output.prompt_logprobs

    def _echo(self, prompt_index: int, output: RequestOutput) -> str:
        """The prompt as it was computed: the client's text, or what the ids say (also where the prompt was cut)."""
        if not self.options.echo:
            return ""
        prompt = self.prompts[prompt_index]
        if isinstance(prompt, str) and self.params.truncate_prompt_tokens is None:
            return prompt
        if self.state.tokenizer is None:
            return ""
        return self.state.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=self.options.skip_special_tokens)

    def _shape(self, number: int, prompt_index: int, output: RequestOutput, choice: CompletionOutput, *, first: bool) -> dict[str, Any] | None:
        """The logprobs of one choice's new tokens, and of the prompt before them where it is echoed."""
        if self.options.logprobs is None:
            return None
        shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if first:
            tokenizer = self.state.tokenizer
            writer = CompletionLogprobs(
                self.options.logprobs, self.options.tokens_as_ids, self._hidden, tokenizer.token_bytes if tokenizer else None
            )
            self._logprobs[number] = writer
            positions = self._prompt_positions.get(prompt_index)
            if self.options.echo and positions is not None:
                extend(shape, writer.make(output.prompt_token_ids, positions, self._echo(prompt_index, output)))
        if choice.logprobs:
            extend(shape, self._logprobs[number].make(choice.token_ids, choice.logprobs))
        return shape
