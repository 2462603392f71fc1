"""The whole HTTP server over a scripted engine: no model, no process; answers can be worked out on paper.

Token ids 0 to 255 are bytes, so `says("abc")` makes every branch answer "abc" and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
from oarlock.async_llm import AsyncLLM
from oarlock.config.sections import DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from oarlock.frontend.chat import ChatTemplate
from oarlock.frontend.inputs import InputLimits, InputProcessor
from oarlock.messages import EngineOutput, EngineOutputs, ErrorInfo
from oarlock.server.errors import unavailable
from oarlock.server.parsing import load_parsers
from oarlock.server.routes import make_app, plugin_server
from oarlock.server.state import ServerState
from toy_frontend import SUMMARY, Script, ScriptedClient, ToyTokenizer, info, position, says

MODEL = "toy-model"


class PumpedClient(ScriptedClient):
    """Steps by itself while something is open, and gives prompt logprobs where they are asked for."""

    def __init__(self, script: Script, step_s: float = 0.0, **settings: Any) -> None:
        super().__init__(script, **settings)
        self.step_s = step_s
        self._scored: set[str] = set()
        self._pump: asyncio.Task[None] | None = None

    def submit(self, request: Any) -> None:
        super().submit(request)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run())

    def abort(self, abort: Any) -> None:
        super().abort(abort)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self.has_unfinished() and self.dead is None:
            await asyncio.sleep(self.step_s)
            if self.dead is None:
                self.step()

    def _advance(self, request_id: str) -> list[EngineOutput]:
        outputs = super()._advance(request_id)
        request = self._requests[request_id]
        if request.params.prompt_logprobs is not None and request_id not in self._scored:
            self._scored.add(request_id)
            positions = (None, *(position(token) for token in request.prompt_token_ids[1:]))
            outputs[0] = replace(outputs[0], prompt_logprobs=positions)
        return outputs


class LateClient(PumpedClient):
    """Its next `late` requests have waited too long in the queue. To be put in place of a toy's `engine.__class__`."""

    late = 1

    def _advance(self, request_id: str) -> list[EngineOutput]:
        if not self.late:
            return super()._advance(request_id)
        self.late -= 1
        self.open.pop(request_id)
        return [EngineOutput(request_id, finish_reason="error", error=ErrorInfo("waited too long", code="queue_timeout"))]


class Toy:
    """One server and a client for it."""

    def __init__(self, state: ServerState, engine: PumpedClient, http: httpx.AsyncClient, app: Any) -> None:
        self.state, self.engine, self.http, self.app = state, engine, http, app

    def shut_down(self) -> None:
        """End every open request, as at the end of a drain."""
        self.state.end_all(unavailable("The server is shutting down; the request was ended.", "shutting_down"))

    async def completion(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields})


@contextlib.asynccontextmanager
async def toy_server(
    script: Script | None = None,
    *,
    engine: EngineConfig | None = None,
    server: ServerConfig | None = None,
    step_s: float = 0.0,
    tokenizer: ToyTokenizer | None = None,
    summary: Any = SUMMARY,
    options: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    routes: tuple[Callable[[Any], None], ...] = (),
    api_keys: tuple[str, ...] = (),
    chat_template: str | None = None,
    parsers: tuple[str, ...] = (),  # for tool calls, and for reasoning
    **facts: Any,
) -> AsyncIterator[Toy]:
    engine = engine or EngineConfig(ModelConfig(MODEL), scheduler=SchedulerConfig(**scheduler or {}), device=DeviceConfig(options=options or {}))
    server = server or ServerConfig(
        api_keys=api_keys, chat_template=chat_template, enable_auto_tool_choice=bool(parsers), **dict(zip(("tool_call_parser", "reasoning_parser"), parsers, strict=False))
    )
    tokenizer = tokenizer or ToyTokenizer()
    client = PumpedClient(script or says("hello"), step_s, engine_info=info(**facts))
    state = ServerState(engine, server, server.api_keys)
    app = make_app(state)
    processor = InputProcessor(client.info, tokenizer, summary, InputLimits.make(engine.model, server))
    llm = AsyncLLM(client, processor, tokenizer)
    for add in routes:  # of plugins
        add(plugin_server(app))
    receive = client.on_outputs

    def on_outputs(outputs: EngineOutputs) -> None:
        state.on_step(outputs)
        receive(outputs)

    client.on_outputs = on_outputs
    state.ready(llm, tokenizer, ChatTemplate(chat_template or tokenizer.chat_template, tokenizer), summary, load_parsers(server, "toy"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
        yield Toy(state, client, http, app)


def events(response: httpx.Response) -> list[Any]:
    """The payloads of a stream, the literal "[DONE]" included. Checks that nothing but events is there."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    payloads: list[Any] = []
    for line in response.text.split("\n\n"):
        if line:
            assert line.startswith("data: "), line
            payload = line.removeprefix("data: ")
            payloads.append(payload if payload == "[DONE]" else strict(payload))
    return payloads


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The payloads of a stream whose events are named after their own type. Checks that nothing but events is there."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found: list[dict[str, Any]] = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(strict(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def strict(text: str) -> Any:
    """JSON with NaN, Infinity and duplicate keys refused."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} in JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(items)) == len(items), f"duplicate keys in {items}"
        return dict(items)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=pairs)


def refused(response: httpx.Response, param: str | None, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, after checking its envelope. `param` is the field, or the start of its path."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = strict(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert "Traceback" not in error["message"] and " object at 0x" not in error["message"]
    if param is None:
        assert error["param"] is None, error
    else:
        assert error["param"] == param or error["param"].startswith((param + ".", param + "[")), error
    if status == 400:
        assert error["type"] == "invalid_request_error"
    return error
