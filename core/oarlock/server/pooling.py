"""Runs the prompts of one HTTP request whose answer is made of vectors.

Owns: admission, the check of every prompt before the first costs anything, how many run at once, metrics.
Reads: `server.state`, an `AsyncLLM`.
Never: formats an answer (plugins do); leaves work running for a client that hung up.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import Any, cast

from oarlock.backend_api import Pooled, PoolOptions
from oarlock.errors import EngineDead
from oarlock.frontend.pairs import pair_text
from oarlock.frontend.text_threads import in_text_thread
from oarlock.messages import EngineRequest
from oarlock.pooling_params import PoolingParams
from oarlock.sampling_params import SamplingParams
from oarlock.server.answer import THREAD_CHARS, ended_by
from oarlock.server.errors import bad
from oarlock.server.state import OWNER, OpenRequest, ServerState

NO_TOKENS = SamplingParams(max_tokens=0, prompt_logprobs=0)  # what /metrics counts of such a request


async def pool(state: ServerState, prompts: Sequence[Any], options: PoolOptions, request_id: str, param: str) -> list[Pooled]:
    """The vectors, in order. Of a long list as many prompts are inside as run at once. Raises ApiError or OarlockError."""
    limit = state.server.max_prompts
    if len(prompts) > limit:
        raise bad(param, f"{param} has {len(prompts)} entries; the limit (--max-prompts) is {limit}.", "invalid_value")
    if options.priority and state.engine.scheduler.policy != "priority":
        raise bad("priority", "priority needs a server started with --scheduling-policy priority.", "unsupported_field")
    names = ("task", "pooling", "use_activation", "dimensions", "truncate_prompt_tokens", "truncation_side")
    params = PoolingParams(**{name: getattr(options, name) for name in names})
    opened, width = OpenRequest(request_id), min(len(prompts), state.info.max_num_seqs, state.max_prompts_inside)
    opened.task = asyncio.current_task()
    state.enter(opened, width)
    try:
        requests = await _requests(state, prompts, params, options, param)
        return await _results(state, requests, params, options, width, request_id)
    except asyncio.CancelledError:
        if opened.error is None:
            state.metrics.outcome("abort")  # what else ends it is counted where it is answered
            raise
        asyncio.current_task().uncancel()  # type: ignore[union-attr]  # ended by the server; there is an error to deliver
        raise opened.error from None
    finally:
        state.leave(opened, width)


async def _requests(state: ServerState, prompts: Sequence[Any], params: PoolingParams, options: PoolOptions, param: str) -> list[EngineRequest]:
    def check() -> list[EngineRequest]:
        make, template = state.llm.processor.make_request, state.template if state.server.chat_template else None
        names = [param] if len(prompts) == 1 else [f"{param}[{n}]" for n in range(len(prompts))]
        return [
            make(pair_text(prompt[0], prompt[1], template) if isinstance(prompt, tuple) else prompt, params, uuid.uuid4().hex, cache_salt=options.cache_salt, add_special_tokens=options.add_special_tokens, param=name)[0]
            for prompt, name in zip(prompts, names, strict=True)
        ]

    length = sum(sum(map(len, prompt)) if isinstance(prompt, tuple) else len(prompt) for prompt in prompts)
    return await in_text_thread(check) if length > THREAD_CHARS else check()


async def _results(
    state: ServerState, requests: list[EngineRequest], params: PoolingParams, options: PoolOptions, width: int, request_id: str
) -> list[Pooled]:
    turns = asyncio.Semaphore(width)

    async def one(request: EngineRequest) -> Pooled:
        more: dict[str, Any] = {"priority": options.priority, "owner": OWNER.get(), "cache_salt": options.cache_salt, "stream": False}
        async with turns, contextlib.aclosing(state.llm.generate(request.prompt_token_ids, params, request.request_id, **more)) as outputs:
            async for output in outputs:
                ended_by(output, request_id)
                if output.pooled is not None:
                    state.metrics.finished(output, "stop", [0], NO_TOKENS)
                    return Pooled(output.pooled, request.prompt_token_ids, output.num_cached_tokens)
        raise EngineDead("the engine gave no vector")

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        return cast(list[Pooled], await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
