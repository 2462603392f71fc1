"""Runs one generation for one HTTP request and writes its response, streamed or whole.

Owns: the supervised task of a request, server-sent events, the merge of several prompts' streams.
Reads: `server.state`, `server.errors`, an `AsyncLLM`.
Never: formats a choice (`server.completions` and `server.chat` do); leaves work running for a client that hung up.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response

from oarlock.errors import EngineDead, RequestError
from oarlock.frontend.outputs import RequestOutput
from oarlock.frontend.text_threads import in_text_thread
from oarlock.messages import EngineRequest
from oarlock.sampling_params import SamplingParams
from oarlock.server.errors import STOPS, ApiError, from_exception, from_info
from oarlock.server.gate import Receive, Scope, Send, response_start, send_error, send_json
from oarlock.server.params import Options
from oarlock.server.state import OWNER, OpenRequest, ServerState

DONE = b"data: [DONE]\n\n"
THREAD_CHARS = 20_000  # more text than this in a batch is tokenised, or read by parsers, in a thread, so that streams go on
THREAD_ENTRIES = 10_000  # an answer of more logprobs is written in a thread, for the same reason
encode = msgspec.json.Encoder().encode


class Usage:
    """Token counts of one HTTP request: every prompt once, every returned choice."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self) -> None:
        self.prompt = self.completion = self.cached = 0

    def payload(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer(Response, abc.ABC):
    """The response to one request. Subclasses say how its choices look.

    Errors before the first token are plain HTTP errors; later ones are an event in the stream, which ends with [DONE] all the same.
    """

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str] = "prompt"
    reads_text = False  # whether parsers read the answer, which takes time

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        prompts: Sequence[Any],
        params: SamplingParams,
        options: Options,
        created: int,
        headers: dict[str, str],
        renames: dict[str, str] | None = None,
    ) -> None:
        self.state, self.prompts, self.params, self.options, self.created = state, prompts, params, options, created
        self.request_id = request_id
        self.answer_id = self.id_prefix + request_id
        self.usage = Usage()
        self.background = None
        self._inputs = list(prompts)  # what the engine gets; token ids, once a batch has been checked
        self._extra = headers
        self._renames = renames or {}
        self._engine_ids = [f"{uuid.uuid4().hex}-{i}" for i in range(len(prompts))]
        head = {"id": self.answer_id, "object": self.chunk_name, "created": created, "model": state.names[0]}
        self._event_head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._event_tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"

    # ---------------------------------------------------------------- what subclasses say
    @abc.abstractmethod
    def choices(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole response's own part: `choices` and what stands beside it."""

    @abc.abstractmethod
    def deltas(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """The choices, as JSON, of the chunks that this delta makes; the finish reason comes in one of its own."""

    # ---------------------------------------------------------------- ASGI
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        opened = OpenRequest(self.request_id)
        count = len(self.prompts)
        try:
            self.state.enter(opened, count)
        except ApiError as error:
            self.state.metrics.outcome("refused", count)
            await send_error(send, error)
            return
        try:
            work = self._stream(opened, send) if self.options.stream else self._whole(opened, send)
            await supervise(opened, work, receive)
        finally:
            self.state.leave(opened, count)

    async def _whole(self, opened: OpenRequest, send: Send) -> None:
        try:
            await self._check_batch(opened)
            outputs = await self._results()
            for output in outputs:
                self._count_prompt(output)
                self._count_finished(output, [len(choice.token_ids) for choice in output.outputs], ended_by(output, self.request_id))
            entries = sum(sum(map(len, choice.logprobs or ())) for output in outputs for choice in output.outputs)
            large = opened.entries + entries > THREAD_ENTRIES or (self.reads_text and sum(len(c.text) for o in outputs for c in o.outputs) > THREAD_CHARS)
            body = await in_text_thread(functools.partial(self._body, outputs)) if large else self._body(outputs)
        except BaseException as exc:  # noqa: BLE001  whatever it is, the client is told or the exception goes on
            await send_error(send, self._failure(opened, exc))
            return
        await send_json(send, 200, body, self._extra.items())

    def _body(self, outputs: list[RequestOutput]) -> bytes:
        return encode(
            {
                "id": self.answer_id,
                "object": self.object_name,
                "created": self.created,
                "model": self.state.names[0],
                **self.choices(outputs),
                "usage": self.usage.payload(),
                "system_fingerprint": None,
            }
        )

    async def _stream(self, opened: OpenRequest, send: Send) -> None:
        started = False
        try:
            await self._check_batch(opened)
            async with contextlib.aclosing(self._events()) as events:
                async for event in events:
                    if not started:
                        started = True
                        headers = {**self._extra, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                        await send(response_start(200, b"text/event-stream; charset=utf-8", None, headers.items()))
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            tail = DONE
        except BaseException as exc:  # noqa: BLE001  as above
            error = self._failure(opened, exc)
            if not started:
                await send_error(send, error)
                return
            tail = b"data: " + error.body() + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    def _failure(self, opened: OpenRequest, exc: BaseException) -> ApiError:
        """What to tell the client about `exc`; raises it again when nobody is left to tell."""
        if isinstance(exc, asyncio.CancelledError):
            if opened.error is None:
                self.state.metrics.outcome("abort", len(self.prompts))
                raise exc
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # ended by the server; there is an error to deliver
            exc = opened.error
        elif isinstance(exc, STOPS):
            raise exc
        error = self._renamed(exc)
        self.state.metrics.outcome("abort" if error.code == "aborted" else "error" if error.status >= 500 else "refused", len(self.prompts))
        return error

    def _renamed(self, exc: BaseException) -> ApiError:
        """The error, about this route's fields."""
        error = from_exception(exc, self.request_id)
        name = self._renames.get(error.param or "")
        return error if name is None else ApiError(error.status, error.message.replace(error.param or "", name, 1), error.type, name, error.code, error.headers)

    async def rendered(self) -> list[EngineRequest]:
        """What the engine would be given. Raises ApiError."""
        try:
            return await in_text_thread(self._requests) if sum(map(len, self.prompts)) > THREAD_CHARS else self._requests()
        except RequestError as exc:
            raise self._renamed(exc) from None

    # ---------------------------------------------------------------- the engine
    def _generate(self, index: int, *, stream: bool) -> AsyncGenerator[RequestOutput, None]:
        return self.state.llm.generate(
            self._inputs[index],
            self.params,
            self._engine_ids[index],
            priority=self.options.priority,
            owner=OWNER.get(),
            cache_salt=self.options.cache_salt,
            stream=stream,
            add_special_tokens=self.options.add_special_tokens,
            param=self.prompt_param,
        )

    async def _check_batch(self, opened: OpenRequest) -> None:
        """Check and tokenise every prompt of a batch before the first one costs anything. Raises RequestError, or 429 for want of memory."""
        if len(self.prompts) > 1 or self.params.prompt_logprobs is not None:
            requests = await self.rendered()
            self._inputs = [request.prompt_token_ids for request in requests]
            self.state.hold(opened, self.state.llm.processor.check_together(requests))

    def _requests(self) -> list[EngineRequest]:
        options, settings = self.options, {"priority": self.options.priority, "cache_salt": self.options.cache_salt}
        return [
            self.state.llm.processor.make_request(prompt, self.params, engine_id, add_special_tokens=options.add_special_tokens, param=self.prompt_param, **settings)[0]
            for prompt, engine_id in zip(self._inputs, self._engine_ids, strict=True)
        ]

    async def _result(self, index: int) -> RequestOutput:
        engine_id = self._engine_ids[index]
        self.state.metrics.opened(engine_id)
        try:
            last = None
            async with contextlib.aclosing(self._generate(index, stream=False)) as outputs:
                async for last in outputs:
                    ended_by(last, self.request_id)
            if last is None:
                raise EngineDead("the engine gave no result")
            self.state.metrics.first_token(last.metrics)
            return last
        finally:
            self.state.metrics.closed(engine_id)

    async def _results(self) -> list[RequestOutput]:
        if len(self.prompts) == 1:
            return [await self._result(0)]
        tasks = [asyncio.create_task(self._result(i)) for i in range(len(self.prompts))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _stop(tasks)

    async def _merged(self) -> AsyncGenerator[RequestOutput, None]:
        """The deltas of several prompts, as they come."""
        queue: asyncio.Queue[RequestOutput | BaseException | None] = asyncio.Queue(maxsize=2 * len(self.prompts))

        async def pump(index: int) -> None:
            try:
                async with contextlib.aclosing(self._generate(index, stream=True)) as outputs:
                    async for output in outputs:
                        await queue.put(output)
                await queue.put(None)
            except STOPS:
                raise
            except BaseException as exc:  # noqa: BLE001  it goes on in the task that reads the queue
                await queue.put(exc)

        tasks = [asyncio.create_task(pump(i)) for i in range(len(self.prompts))]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            await _stop(tasks)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: one write for each delta of the engine, whatever it holds."""
        metrics = self.state.metrics
        generated = [[0] * self.params.n for _ in self.prompts]  # tokens of each choice
        seen, timed = [False] * len(self.prompts), [False] * len(self.prompts)
        reasons: list[set[str]] = [set() for _ in self.prompts]
        index_of = {engine_id: index for index, engine_id in enumerate(self._engine_ids)}
        for engine_id in index_of:
            metrics.opened(engine_id)
        try:
            async with contextlib.aclosing(self._generate(0, stream=True) if len(index_of) == 1 else self._merged()) as merged:
                async for output in merged:
                    index = index_of[output.request_id]
                    ended = ended_by(output, self.request_id)
                    if not seen[index]:
                        seen[index] = True
                        self._count_prompt(output)
                    if not timed[index] and output.metrics.first_token_s is not None:
                        timed[index] = True
                        metrics.first_token(output.metrics)
                    new_tokens = 0
                    for choice in output.outputs:
                        new_tokens += len(choice.token_ids)
                        generated[index][choice.index] += len(choice.token_ids)
                    self._count_tokens(new_tokens)
                    event = self._join(self.deltas(index, output))
                    if event:
                        yield event
                    reasons[index] |= ended
                    if output.finished:
                        self._count_finished(output, generated[index], reasons[index], counted=True)
            if self.options.include_usage:
                yield self._event_head + b'],"usage":' + encode(self.usage.payload()) + b"}\n\n"
        finally:
            for engine_id in index_of:
                metrics.closed(engine_id)

    def _join(self, choices: list[bytes]) -> bytes:
        tail = self._event_tail
        if self.options.continuous_usage and choices:
            tail = b'],"usage":' + encode(self.usage.payload()) + b"}\n\n"
        return b"".join([self._event_head + choice + tail for choice in choices])

    # ---------------------------------------------------------------- counting
    def _count_prompt(self, output: RequestOutput) -> None:
        self.usage.prompt += len(output.prompt_token_ids)
        self.usage.cached += output.num_cached_tokens

    def _count_tokens(self, count: int) -> None:
        self.usage.completion += count
        self.state.metrics.generated(count)

    def _count_finished(self, output: RequestOutput, generated: list[int], reasons: set[str], *, counted: bool = False) -> None:
        if not counted:
            self._count_tokens(sum(generated))
        reason = "length" if "length" in reasons else "stop"
        self.state.metrics.finished(output, reason, generated, self.params)


def ended_by(output: RequestOutput, request_id: str) -> set[str]:
    """Why choices have ended. Raises what went wrong with a request after it was accepted."""
    if output.error is not None:
        raise from_info(output.error, request_id)
    reasons = {choice.finish_reason for choice in output.outputs if choice.finish_reason}
    if not reasons.isdisjoint(("abort", "error")):
        raise ApiError(500, "The request was ended by the server before it was complete.", "server_error", None, "aborted")
    return reasons


async def supervise(opened: OpenRequest, work: Any, receive: Receive) -> None:
    """Run `work` to its end, or until the client hangs up; then it is cancelled, which frees its blocks in the engine."""
    task = opened.task = asyncio.create_task(work)
    watcher = asyncio.create_task(_hangup(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            opened.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
