"""The load of `oarlock bench serve`: streamed requests over HTTP, each with the times of its pieces.

Owns: when requests are sent, and the clock.
Reads: `cli.sse`, `cli.bench_prompts`.
Never: averages anything.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from oarlock.cli.bench_prompts import Prompt
from oarlock.cli.sse import DONE, EventReader, error_of_response, read_chunk

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONNECT_S = 30.0


@dataclass(slots=True)
class Sample:
    """What one request did. Times are in seconds, from just before it was sent."""

    started_s: float = 0.0  # since the first request of the run
    ttft_s: float | None = None  # first piece of text; the first choice of an answer without text
    gaps_s: list[float] = field(default_factory=list)  # between one piece and the next
    latency_s: float = 0.0  # end of the stream
    input_tokens: int = 0
    output_tokens: int = 0
    is_counted: bool = False  # the server gave the token counts; else pieces were counted
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are made and when they are sent."""

    url: str
    endpoint: str  # "completions" or "chat"
    model: str
    extra: dict[str, Any] = field(default_factory=dict)  # fields of every request
    request_rate: float = math.inf  # requests a second, Poisson; inf: all at once
    max_concurrency: int | None = None  # requests that are open at a time
    seed: int = 0

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request for one prompt."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": prompt.output_len, "stream": True, "stream_options": {"include_usage": True}}
        if self.endpoint == "chat":
            body["messages"] = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = list(prompt.token_ids) or prompt.text
        return body | self.extra

    def starts(self, count: int) -> list[float]:
        """When each request is due, in seconds. Poisson arrivals have exponential gaps."""
        if math.isinf(self.request_rate):
            return [0.0] * count
        rng, at, due = random.Random(self.seed), 0.0, []
        for _ in range(count):
            due.append(at)
            at += rng.expovariate(self.request_rate)
        return due


async def send(http: httpx.AsyncClient, load: Load, prompt: Prompt, origin: float) -> Sample:
    """One request. Never raises for what the server or the network did: the sample says it."""
    body = load.body(prompt)
    sample = Sample(input_tokens=prompt.input_len)
    started = time.perf_counter()
    sample.started_s = started - origin
    try:
        async with http.stream("POST", PATHS[load.endpoint], json=body) as response:
            if response.status_code != 200:
                sample.error = error_of_response(response.status_code, await response.aread())
            else:
                await _read(response, sample, started)
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}".rstrip(": ")
    sample.latency_s = sample.latency_s or time.perf_counter() - started
    return sample


async def _read(response: httpx.Response, sample: Sample, started: float) -> None:
    reader, last, pieces, first_choice = EventReader(), 0.0, 0, None
    async for piece in response.aiter_raw():
        now = time.perf_counter()
        for payload in reader.feed(piece):
            if payload == DONE:
                sample.latency_s = now - started
                continue
            chunk = read_chunk(payload)
            if chunk.error is not None:
                sample.error = chunk.error
                return
            if chunk.usage is not None:
                sample.input_tokens = chunk.usage.get("prompt_tokens", sample.input_tokens)
                sample.output_tokens = chunk.usage.get("completion_tokens", 0)
                sample.is_counted = True
            if chunk.has_choice and first_choice is None:
                first_choice = now - started
            if chunk.text:
                pieces += 1
                if sample.ttft_s is None:
                    sample.ttft_s = now - started
                else:
                    sample.gaps_s.append(now - last)
                last = now
    if not sample.latency_s:
        sample.error = "the stream ended without [DONE]"
    elif first_choice is None:
        sample.error = "the stream held no choice"
    if sample.ttft_s is None:
        sample.ttft_s = first_choice
    if not sample.is_counted:
        sample.output_tokens = pieces


async def run_load(http: httpx.AsyncClient, load: Load, prompts: Sequence[Prompt], on_done: Callable[[Sample], None]) -> tuple[list[Sample], float]:
    """Send every prompt when it is due. Returns the samples in the order of the prompts, and the seconds from first start to last end.

    Under `max_concurrency` a request that is due waits for a place; its times count from when it is sent.
    """
    places = asyncio.Semaphore(load.max_concurrency or len(prompts))
    origin = time.perf_counter()

    async def one(prompt: Prompt) -> Sample:
        try:
            sample = await send(http, load, prompt, origin)
        finally:
            places.release()
        on_done(sample)
        return sample

    tasks = []
    try:
        for prompt, due in zip(prompts, load.starts(len(prompts)), strict=True):
            wait = due - (time.perf_counter() - origin)
            if wait > 0:
                await asyncio.sleep(wait)
            await places.acquire()
            tasks.append(asyncio.create_task(one(prompt)))
        samples = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
    return samples, time.perf_counter() - origin
