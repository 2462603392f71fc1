"""`AsyncLLM`: many requests at once over one engine, each a stream of its own.

Owns: the open streams, and which of them an engine output belongs to.
Reads: `engine.client`, `frontend`.
Never: knows HTTP; runs a step.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from oarlock.engine.client import EngineClient
from oarlock.errors import EngineDead, InvalidParameter, OarlockError, QueueFull
from oarlock.frontend.collect import Collector
from oarlock.frontend.inputs import InputProcessor
from oarlock.frontend.outputs import OutputProcessor, RequestOutput, exception_for
from oarlock.frontend.text_threads import in_text_thread
from oarlock.messages import Abort, EngineInfo, EngineOutputs, EngineRequest, ErrorInfo, SchedulerStats
from oarlock.pooling_params import PoolingParams
from oarlock.sampling_params import SamplingParams

THREAD_CHARS = 100_000  # longer texts are tokenised in a thread, so that the event loop stays free
TELL_S = 1.0  # at shutdown, how long the callers of open requests have to pass the error on
TRACE: ContextVar[tuple[str, ...]] = ContextVar("trace", default=())  # EngineRequest.trace of what this task, or its parent, generates


class AsyncLLM:
    """Everything runs on one event loop; the client calls back on its thread."""

    def __init__(self, client: EngineClient, processor: InputProcessor, tokenizer: Any | None, *, max_waiting_requests: int | None = None) -> None:
        self.processor = processor
        self.tokenizer = tokenizer
        self.stats = SchedulerStats()  # of the latest step
        self.last_outputs: EngineOutputs | None = None  # the latest step's message, for metrics
        self._client = client
        # Beyond this many open requests the next one is refused before it costs anything. None: only the engine's own bound.
        self._max_open = None if max_waiting_requests is None else client.info.max_num_seqs + max_waiting_requests
        self._outputs = OutputProcessor(tokenizer, self._send_abort, client.note)
        self._streams: dict[str, _Stream] = {}
        self._dead: str | None = None
        client.on_outputs = self._receive
        client.on_dead = self._die

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def num_open(self) -> int:
        """Requests whose caller still waits."""
        return len(self._streams)

    def is_alive(self) -> bool:
        return self._dead is None and self._client.is_alive()

    async def generate(
        self,
        prompt: Any,  # str | list[int] | {"prompt": str} | {"prompt_token_ids": list[int]}
        params: SamplingParams | PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        owner: int = 0,  # requests of different owners share fairly under the fair policy
        cache_salt: str | None = None,
        stream: bool = True,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens_param: str = "max_tokens",
    ) -> AsyncIterator[RequestOutput]:
        """Deltas (`stream`), or one whole result. The request ends in the engine when the caller stops iterating.

        Raises, before anything is yielded:
            RequestError: the input is not valid, or the queue is full (QueueFull).
            EngineDead: the engine has ended.
        Raises, at any time:
            RequestError, WorkerError, EngineDead: the request failed in the engine, its step failed, the engine ended.
        """
        if stream and isinstance(params, SamplingParams):
            _check_streamable(params)
        self._check_open()
        make_request = functools.partial(
            self.processor.make_request,
            prompt,
            params,
            request_id,
            priority=priority,
            owner=owner,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            param=param,
            max_tokens_param=max_tokens_param,
        )
        if _text_len(prompt) > THREAD_CHARS:
            request, text = await in_text_thread(make_request)
            self._check_open()  # the world may have changed meanwhile
        else:
            request, text = make_request()
        open_stream = self._submit(replace(request, trace=TRACE.get()), text, stream=stream)
        try:
            while True:
                delta = await open_stream.next()
                if delta.error is not None:
                    raise exception_for(delta.error)
                yield delta
                if delta.finished:
                    return
        finally:
            self._streams.pop(request_id, None)
            self._outputs.cancel(request_id)  # nothing, when it has finished

    async def abort(self, request_id: str) -> None:
        """End a request; its caller gets a last delta with finish_reason "abort". Unknown ids are ignored."""
        delta = self._outputs.cancel(request_id)
        if delta is not None:
            self._deliver(delta)

    def reset_prefix_cache(self) -> None:
        self._client.reset_prefix_cache()

    async def shutdown(self, grace_s: float = 0.0) -> None:
        """Take no more requests, let the open ones finish for up to `grace_s`, end the rest with EngineDead, stop the engine."""
        reason = "the server is shutting down"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        first_time = self._dead is None
        if first_time:
            self._dead = reason
        while self._streams and self._client.is_alive() and loop.time() < deadline:
            await asyncio.sleep(0.02)
        if first_time:
            for delta in self._outputs.fail_all(ErrorInfo(reason, kind="engine")):
                self._deliver(delta)
            deadline = loop.time() + TELL_S
            while self._streams and loop.time() < deadline:  # let the callers hear of it: the next call may block
                await asyncio.sleep(0.01)
        self._client.shutdown(0.0)

    # ---------------------------------------------------------------- inside
    def _check_open(self) -> None:
        if self._dead is not None or not self._client.is_alive():
            raise EngineDead(self._dead or "the engine has ended")
        if self._max_open is not None and len(self._streams) >= self._max_open:
            raise QueueFull(f"{len(self._streams)} requests are open, which is the limit (max_num_seqs + max_waiting_requests); retry later.")

    def _submit(self, request: EngineRequest, text: str | None, *, stream: bool) -> _Stream:
        self._outputs.add(request, text)
        opened = self._streams[request.request_id] = _Stream(None if stream else Collector(request.params))
        try:
            self._client.submit(request)
        except BaseException:
            self._outputs.forget(request.request_id)
            del self._streams[request.request_id]
            raise
        return opened

    def _send_abort(self, abort: Abort) -> None:
        try:
            self._client.abort(abort)
        except OarlockError:
            pass  # the engine is dead, and so is the request

    def _receive(self, outputs: EngineOutputs) -> None:
        self.stats, self.last_outputs = outputs.stats, outputs
        for delta in self._outputs.receive(outputs):
            self._deliver(delta)

    def _deliver(self, delta: RequestOutput) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is not None:
            stream.put(delta)

    def _die(self, reason: str) -> None:
        if self._dead is None:
            self._dead = reason
        for delta in self._outputs.fail_all(ErrorInfo(reason, kind="engine")):
            self._deliver(delta)


class _Stream:
    """What waits for one caller. With a collector the caller is woken once, at the end."""

    __slots__ = ("_caller", "_collector", "_waiting")

    def __init__(self, collector: Collector | None) -> None:
        self._collector = collector
        self._waiting: deque[RequestOutput] = deque()
        self._caller: asyncio.Future[None] | None = None  # done when something waits

    def put(self, delta: RequestOutput) -> None:
        if self._collector is not None:
            if not self._collector.add(delta):
                return
            delta = self._collector.result()
        self._waiting.append(delta)
        if self._caller is not None and not self._caller.done():
            self._caller.set_result(None)

    async def next(self) -> RequestOutput:
        if not self._waiting:
            self._caller = asyncio.get_running_loop().create_future()
            await self._caller
        return self._waiting.popleft()


def _check_streamable(params: SamplingParams) -> None:
    if params.use_beam_search:
        raise InvalidParameter("stream: beams cannot be streamed, as the best is known only at the end; leave stream off.", param="stream")
    if params.num_branches > params.n:
        raise InvalidParameter(
            f"best_of is {params.best_of} and n is {params.n}: which are best is known only at the end, so this cannot be streamed; "
            "make them equal, or leave stream off.",
            param="best_of",
        )


def _text_len(prompt: Any) -> int:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    return len(text) if isinstance(text, str) else 0
