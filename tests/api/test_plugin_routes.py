"""What a plugin's route gets of core: its checks, limits, errors and metrics, and other routes to call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import oarlock_messages.routes
import oarlock_pooling.routes
import oarlock_responses.routes
import pytest
from oarlock.backend_api import BytesReply, EventReply, JsonReply, Route, RouteCall, RouteError, RouteFields, RouteServer
from oarlock.config.sections import ServerConfig
from oarlock.errors import PluginError
from oarlock.messages import EngineOutput, ErrorInfo
from oarlock.server.state import Phase
from toy_frontend import says
from toy_server import MODEL, LateClient, PumpedClient, events, refused, strict, toy_server

pytestmark = pytest.mark.asyncio

FIELDS = RouteFields(
    {"model": "string", "prompt": "any", "flag": "boolean", "count": "integer", "share": "number", "words": "strings", "more": "object"},
    required=("prompt",),
    refused={"tools": ("no tools here", ([], False))},
)


class Plugin:
    """Routes that do one thing each."""

    def __init__(self) -> None:
        self.calls: list[RouteCall] = []
        self.closed = 0

    def add(self, server: RouteServer) -> None:
        self.server = server
        server.add(Route("POST", "/toy/echo", self.echo, FIELDS, generates=True))
        server.add(Route("POST", "/toy/whole", self.whole, FIELDS, generates=True))
        server.add(Route("POST", "/toy/stream", self.stream, FIELDS, generates=True))
        server.add(Route("POST", "/toy/bytes", self.bytes, takes_bytes=True))
        server.add(Route("GET", "/toy/things/{name}", self.thing, error_body=lambda status, error: {"odd": [status, error["message"]]}))

    async def echo(self, call: RouteCall) -> JsonReply:
        self.calls.append(call)
        return JsonReply({"values": call.values}, 201, {"X-Toy": "1"})

    async def whole(self, call: RouteCall) -> JsonReply:
        return JsonReply(await self.server.call("/v1/completions", call.values, call.request_id))

    async def stream(self, call: RouteCall) -> EventReply:
        return EventReply(self.chunks(call), done=True)

    async def chunks(self, call: RouteCall) -> AsyncGenerator[tuple[str | None, Any], None]:
        try:
            async with contextlib.aclosing(self.server.stream("/v1/completions", call.values, call.request_id)) as chunks:
                async for chunk in chunks:
                    yield None, chunk
        finally:
            self.closed += 1

    async def bytes(self, call: RouteCall) -> BytesReply:
        return BytesReply(call.body[::-1], "application/x-toy")

    async def thing(self, call: RouteCall) -> JsonReply:
        raise RouteError(404, f"no {call.path_params['name']} {call.query.get('q')}", code="gone")


async def test_fields_are_checked_as_on_cores_routes() -> None:
    plugin = Plugin()
    async with toy_server(routes=(plugin.add,)) as toy:
        sent = {"prompt": [1], "flag": True, "count": 2, "share": 1, "words": ["a"], "more": {"b": None}, "tools": [], "model": None}
        response = await toy.http.post("/toy/echo", json=sent)
        assert response.status_code == 201 and response.headers["x-toy"] == "1"
        assert response.json()["values"] == {"prompt": [1], "flag": True, "count": 2, "share": 1.0, "words": ["a"], "more": {"b": None}}
        assert plugin.calls[0].request_id == response.headers["x-request-id"]
        for name, value in (("flag", 1), ("count", True), ("count", 2**63), ("share", "1"), ("words", "a"), ("more", []), ("tools", [1]), ("tools", 0), ("other", 1)):
            refused(await toy.http.post("/toy/echo", json={"prompt": "x", name: value}), name)
        refused(await toy.http.post("/toy/echo", json={}), "prompt")
        refused(await toy.http.post("/toy/echo", json={"prompt": "x", "model": "other"}), "model", 404)
        assert len(plugin.calls) == 1


async def test_limits_keys_and_unknown_fields_are_the_servers() -> None:
    plugin = Plugin()
    config = ServerConfig(api_keys=("secret",), max_body_bytes=200, allow_unknown_fields=True)
    async with toy_server(server=config, routes=(plugin.add,)) as toy:
        refused(await toy.http.post("/toy/echo", json={"prompt": "x"}), None, 401)
        refused(await toy.http.post("/toy/echo", json={"prompt": "x"}, headers={"X-API-Key": "wrong"}), None, 401)
        assert (await toy.http.get("/toy/things/x")).json()["odd"][0] == 401
        toy.http.headers["Authorization"] = "Bearer secret"
        response = await toy.http.post("/toy/echo", json={"prompt": "x", "other": 1})
        assert response.status_code == 201 and response.headers["x-oarlock-ignored-fields"] == "other"
        refused(await toy.http.post("/toy/echo", json={"prompt": "x" * 300}), None, 413)
        refused(await toy.http.post("/toy/bytes", content=b"x" * 300), None, 413)
        assert (await toy.http.post("/toy/bytes", content=b"\x00\xff1")).content == b"1\xff\x00"
        assert toy.state.bodies.used == 0


async def test_x_api_key_is_a_key_where_a_route_says_so() -> None:
    async def route(call: RouteCall) -> JsonReply:
        return JsonReply({})

    def add(server: RouteServer) -> None:
        server.add(Route("GET", "/toy/keyed", route, takes_x_api_key=True))
        server.add(Route("GET", "/toy/plain", route))

    async with toy_server(server=ServerConfig(api_keys=("secret",)), routes=(add,)) as toy:
        bearer = {"Authorization": "Bearer secret"}
        for headers in ({"X-API-Key": ""}, {"X-API-Key": "no"}, {"Authorization": "Bearer "}, {"Authorization": "Basic secret"}, {"Authorization": "secret"}):
            refused(await toy.http.get("/toy/keyed", headers=headers), None, 401)
        for headers in ({"X-API-Key": "secret"}, bearer, {"Authorization": "Bearer no", "X-API-Key": "secret"}):
            assert (await toy.http.get("/toy/keyed", headers=headers)).status_code == 200
        for path in ("/toy/plain", "/v1/models", "/toy/keyedly", "/metrics"):
            refused(await toy.http.get(path, headers={"X-API-Key": "secret"}), None, 401)
            assert (await toy.http.get(path, headers=bearer)).status_code == (404 if path.endswith("ly") else 200)
        toy.state.phase = Phase.LOADING
        refused(await toy.http.get("/toy/plain", headers={"X-API-Key": "secret"}), None, 503)
        for path, headers in (("/toy/plain", {"X-API-Key": "no"}), ("/metrics", {"X-API-Key": "secret"})):
            refused(await toy.http.get(path, headers=headers), None, 401)


async def test_errors_below_a_path_have_its_form() -> None:
    plugin = Plugin()
    async with toy_server(routes=(plugin.add,)) as toy:
        response = await toy.http.get("/toy/things/x?q=5")
        assert response.status_code == 404 and response.json() == {"odd": [404, "no x 5"]}
        assert (await toy.http.delete("/toy/things/x")).json()["odd"][0] == 405
        assert (await toy.http.get("/toy/things/x/y")).json()["odd"][0] == 404
        refused(await toy.http.get("/toy/thingses"), None, 404)


async def test_another_route_answers_the_same_whole_and_streamed() -> None:
    plugin = Plugin()
    async with toy_server(says("hello"), routes=(plugin.add,)) as toy:
        body = {"model": MODEL, "prompt": "hi"}
        own, through = [(await toy.http.post(path, json=body)).json() for path in ("/v1/completions", "/toy/whole")]
        assert own["choices"] == through["choices"] and own["usage"] == through["usage"]
        own, through = [events(await toy.http.post(path, json={**body, **more})) for path, more in (("/v1/completions", {"stream": True}), ("/toy/stream", {}))]
        assert [chunk["choices"] for chunk in own[:-1]] == [chunk["choices"] for chunk in through[:-1]]
        assert own[-1] == through[-1] == "[DONE]" and plugin.closed == 1
        assert toy.state.num_prompts == 0 and not toy.state.open


async def test_what_another_route_refuses_is_refused_once() -> None:
    plugin = Plugin()
    async with toy_server(routes=(plugin.add,)) as toy:
        for path in ("/toy/whole", "/toy/stream"):
            refused(await toy.http.post(path, json={"model": MODEL, "prompt": []}), "prompt")
            refused(await toy.http.post(path, json={"model": MODEL, "prompt": "x", "count": "y"}), "count")
        page = (await toy.http.get("/metrics")).text
        assert 'oarlock_requests_total{model_name="toy-model",outcome="refused"} 4.0' in page


async def test_an_open_stream_ends_with_an_error_event_and_frees_what_it_held() -> None:
    plugin = Plugin()
    async with toy_server(says("hello " * 9), step_s=0.01, routes=(plugin.add,), max_model_len=256) as toy:
        task = asyncio.create_task(toy.http.post("/toy/stream", json={"model": MODEL, "prompt": "x"}))
        while toy.engine.num_steps < 3:
            await asyncio.sleep(0.01)
        toy.shut_down()
        blocks = (await task).text.split("\n\n")
        assert blocks[-2] == "data: [DONE]" and blocks[-3].startswith("event: error\ndata: ")
        assert strict(blocks[-3].partition("data: ")[2])["error"]["code"] == "shutting_down"
        assert plugin.closed == 1 and toy.state.num_prompts == 0


@pytest.mark.parametrize(("kind", "status", "type_"), [("request", 400, "invalid_request_error"), ("step", 500, "server_error")])
async def test_an_error_in_another_routes_stream_keeps_whose_fault_it_is(kind: Any, status: int, type_: str) -> None:
    """A route that reads a stream and answers whole, as Messages does, tells the client's fault from the server's."""

    class Failing(PumpedClient):
        def _advance(self, request_id: str) -> list[EngineOutput]:
            outputs = super()._advance(request_id)
            if self.num_steps < 3:
                return outputs
            self.open.clear()
            return [EngineOutput(request_id, finish_reason="error", error=ErrorInfo("tools: nothing fits", kind=kind, param="tools"))]

    async def whole(call: RouteCall) -> JsonReply:
        async with contextlib.aclosing(plugin.server.stream("/v1/completions", call.values, call.request_id)) as chunks:
            return JsonReply([chunk async for chunk in chunks])

    plugin = Plugin()
    async with toy_server(says("hello"), routes=(plugin.add, lambda server: server.add(Route("POST", "/toy/read", whole, FIELDS, generates=True)))) as toy:
        toy.engine.__class__ = Failing
        for path in ("/toy/read", "/toy/stream"):
            toy.engine.num_steps = 0
            response = await toy.http.post(path, json={"model": MODEL, "prompt": "hi"})
            error = refused(response, "tools" if status == 400 else None, status) if path == "/toy/read" else events_error(response)
            assert error["type"] == type_


def events_error(response: Any) -> Any:
    """The error at the end of a stream that had begun."""
    assert response.status_code == 200
    return strict(response.text.split("\n\n")[-3].partition("data: ")[2])["error"]


async def test_a_queue_that_is_full_or_too_slow_says_when_to_try_again_on_every_route() -> None:
    plugin, chat = Plugin(), {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/toy/whole", {"model": MODEL, "prompt": "x"}), ("/toy/stream", {"model": MODEL, "prompt": "x"}), ("/v1/responses", {"model": MODEL, "input": "x"}), ("/v1/responses", {"model": MODEL, "input": "x", "background": True}),
        ("/v1/embeddings", {"input": "x"}), ("/score", {"text_1": "x", "text_2": "y"}),
        *((path, {**body, "stream": stream}) for path, body in (("/v1/chat/completions", chat), ("/v1/messages", {**chat, "max_tokens": 2})) for stream in (False, True)),
    ]  # fmt: skip
    routes = (plugin.add, oarlock_responses.routes.add, oarlock_messages.routes.add, oarlock_pooling.routes.add)
    async with toy_server(routes=routes, options={"responses_max_stored": 5, "responses_max_stored_mib": 1}) as toy:
        limit = toy.state.max_prompts_inside
        for is_full in (True, False):
            toy.state.max_prompts_inside, toy.state.num_prompts = (1, 1) if is_full else (limit, 0)
            toy.engine.__class__, toy.engine.late = LateClient, 100
            for path, body in requests:
                response = await toy.http.post(path, json=body)
                assert response.status_code == 429 and response.headers.get("retry-after") == "1", (path, body, response.text)


async def test_a_whole_answer_that_is_read_from_a_stream_says_409_when_it_is_aborted() -> None:
    async def read(call: RouteCall) -> JsonReply:
        async with contextlib.aclosing(plugin.server.stream("/v1/completions", call.values, call.request_id)) as chunks:
            return JsonReply([chunk async for chunk in chunks])

    plugin = Plugin()
    async with toy_server(says("hello " * 9), step_s=0.01, routes=(plugin.add, lambda server: server.add(Route("POST", "/toy/read", read, FIELDS))), max_model_len=256) as toy:
        task = asyncio.create_task(toy.http.post("/toy/read", json={"model": MODEL, "prompt": "x"}, headers={"X-Request-Id": "one"}))
        while toy.engine.num_steps < 3:
            await asyncio.sleep(0.01)
        assert (await toy.http.post("/abort_requests", json={"request_ids": "one"})).json()["aborted"] == ["one"]
        assert refused(await task, None, 409)["code"] == "aborted"


async def test_a_call_that_is_cancelled_ends_its_request() -> None:
    plugin = Plugin()
    async with toy_server(says("hello " * 9), step_s=0.01, routes=(plugin.add,), max_model_len=256) as toy:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True}
        task = asyncio.create_task(plugin.server.call("/v1/completions", body, "one"))
        while not toy.engine.open:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert toy.state.num_prompts == 0
        while toy.engine.open:
            await asyncio.sleep(0.01)
        with pytest.raises(RouteError) as caught:
            await plugin.server.call("/v1/nothing", body, "two")
        assert caught.value.status == 404


async def test_an_unexpected_error_of_a_route_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(call: RouteCall) -> JsonReply:
        raise KeyError("inside")

    async with toy_server(routes=(lambda server: server.add(Route("GET", "/toy/broken", broken)),)) as toy:
        error = refused(await toy.http.get("/toy/broken"), None, 500)
        assert "inside" not in error["message"] and "KeyError" in caplog.text


async def test_a_path_that_is_taken_is_refused() -> None:
    async def route(call: RouteCall) -> JsonReply:
        return JsonReply({})

    with pytest.raises(PluginError, match="/v1/completions"):
        async with toy_server(routes=(lambda server: server.add(Route("POST", "/v1/completions", route, FIELDS)),)):
            pass


async def test_a_route_of_a_plugin_that_is_not_here_names_it() -> None:
    async with toy_server() as toy:
        assert "oarlock-responses" in refused(await toy.http.post("/v1/responses", json={}), None, 404)["message"]
        assert "oarlock-batches" in refused(await toy.http.get("/v1/files/x"), None, 404)["message"]
