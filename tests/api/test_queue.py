"""What clients see of the queue: fair turns between API keys, its bounds, and the end of patience. Over the null device."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from oarlock.config.sections import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from real_server import RealServer, ok, wait_until
from toy_frontend import says
from toy_server import MODEL, refused, toy_server

CMP = "/v1/completions"
KEYS = ("first-key", "second-key")


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class Flood:
    """A request of many prompts, on a thread of its own. Each prompt counts as a request in the queue."""

    def __init__(self, server: RealServer, key: str, prompts: int, prompt: Any = "The sea is", **fields: Any) -> None:
        body = server.cmp_body(model="tiny", ignore_eos=True, **fields) | {"prompt": [prompt] * prompts}
        self._statuses: list[int] = []
        self._thread = threading.Thread(target=lambda: self._statuses.append(server.http.post(CMP, json=body, headers=headers(key)).status_code))
        self._thread.start()

    def join(self) -> int:
        self._thread.join()
        return self._statuses[0]


@pytest.fixture
def fair(start_server: Callable[..., RealServer]) -> Iterator[RealServer]:
    flags = ("--device", "null", "--served-model-name", "tiny", "--scheduling-policy", "fair", "--max-num-seqs", "2", "--max-waiting-requests", "58")
    server = start_server(*flags, "--api-key", KEYS[0], "--api-key", KEYS[1])
    server.http.headers.update(headers(KEYS[0]))
    yield server


def waiting(server: RealServer) -> float:
    return server.metrics()["vllm:num_requests_waiting"]


def test_a_key_that_floods_does_not_starve_another(fair: RealServer) -> None:
    flood = Flood(fair, KEYS[0], 28, max_tokens=600)
    wait_until(lambda: waiting(fair) >= 20, 20)
    before = waiting(fair)
    usage = ok(fair.http.post(CMP, json=fair.cmp_body(model="tiny", max_tokens=600, ignore_eos=True), headers=headers(KEYS[1])))["usage"]
    assert usage["completion_tokens"] == 600
    assert before - waiting(fair) <= 6  # those that ran, and a few that went in beside it; first come, first served would be all of them
    assert flood.join() == 200
    fair.kv_idle()


def test_a_key_that_fills_its_part_of_the_queue_leaves_the_other_its_own(fair: RealServer) -> None:
    flood = Flood(fair, KEYS[0], 30, max_tokens=600)
    wait_until(lambda: waiting(fair) >= 20, 20)
    response = fair.http.post(CMP, json=fair.cmp_body(model="tiny", max_tokens=1), headers=headers(KEYS[0]))
    assert "30 of 30 prompts of this API key" in refused(response, None, 429)["message"] and response.headers["retry-after"] == "1"
    assert fair.http.post(CMP, json=fair.cmp_body(model="tiny", max_tokens=1), headers=headers(KEYS[1])).status_code == 200
    assert flood.join() == 200
    fair.kv_idle()


def test_the_queue_is_bounded_by_requests_and_by_tokens(start_server: Callable[..., RealServer]) -> None:
    bounds = ("--max-num-seqs", "1", "--max-num-queued-reqs", "14", "--max-num-queued-tokens", "40")
    server = start_server("--device", "null", "--served-model-name", "tiny", *bounds)
    flood = Flood(server, "", 12, [5] * 2, max_tokens=1500)
    wait_until(lambda: waiting(server) >= 9, 20)
    response = server.post(CMP, server.cmp_body(model="tiny", prompt=[5] * 30, max_tokens=1))
    error = refused(response, None, 429)
    assert error["code"] == "queue_full" and "max_num_queued_tokens 40" in error["message"] and response.headers["retry-after"]
    response = server.post(CMP, server.cmp_body(model="tiny", prompt=[[5]] * 3, max_tokens=1))
    assert re.search("1[23] of 14 prompts inside", refused(response, None, 429)["message"])  # the request before may still be leaving
    refused(server.post(CMP, server.cmp_body(model="tiny", prompt=[[5]] * 15, max_tokens=1)), "prompt")
    assert server.post(CMP, server.cmp_body(model="tiny", prompt=[5] * 5, max_tokens=1)).status_code == 200
    assert flood.join() == 200
    server.kv_idle()


def test_a_request_that_waits_too_long_is_told_so(start_server: Callable[..., RealServer]) -> None:
    server = start_server("--device", "null", "--served-model-name", "tiny", "--max-num-seqs", "1", "--max-queue-time", "0.3")
    holder = server.iterate(CMP, server.cmp_body(model="tiny", max_tokens=2000, ignore_eos=True))
    next(holder)
    started = time.monotonic()
    for path, body in (
        (CMP, server.cmp_body(model="tiny", max_tokens=4)),
        (CMP, server.cmp_body(model="tiny", max_tokens=4, n=2, stream=True)),
        ("/v1/chat/completions", server.cht_body(model="tiny", max_tokens=4, stream=True)),
    ):
        with contextlib.suppress(StopIteration):
            next(holder)
        response = server.post(path, body)
        if response.status_code == 200:  # the one that held the seat has ended meanwhile
            continue
        error = refused(response, None, 429)
        assert error["code"] == "queue_timeout" and error["type"] == "rate_limit_error" and "0.3 s" in error["message"]
        assert response.headers["retry-after"]
    assert time.monotonic() - started < 10
    holder.close()
    server.kv_idle()
    assert server.cmp(model="tiny", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.asyncio
async def test_the_key_goes_with_the_request_and_with_what_it_makes_others_do() -> None:
    """A plugin's route that calls another one, at once or in the background, does so for the same key."""
    from oarlock.backend_api import JsonReply, Route, RouteCall, RouteServer

    def add(server: RouteServer) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}

        async def later(call: RouteCall) -> None:
            await server.call(CMP, body, call.request_id)

        async def both(call: RouteCall) -> JsonReply:
            await server.call(CMP, body, call.request_id)
            server.spawn(later(call))
            return JsonReply({})

        server.add(Route("GET", "/toy/both", both))

    engine = EngineConfig(ModelConfig(MODEL), scheduler=SchedulerConfig(policy="fair", num_owners=2))
    async with toy_server(says("a"), engine=engine, server=ServerConfig(api_keys=KEYS), routes=(add,)) as toy:
        for number, key in enumerate(KEYS):
            toy.engine.submitted.clear()
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
            assert (await toy.http.post(CMP, json=body, headers=headers(key))).status_code == 200
            assert (await toy.http.get("/toy/both", headers=headers(key))).status_code == 200
            async with asyncio.timeout(10):
                while len(toy.engine.submitted) < 3 or toy.state.num_prompts:
                    await asyncio.sleep(0.01)
            assert {request.owner for request in toy.engine.submitted} == {number}
        assert not +toy.state.prompts_of
