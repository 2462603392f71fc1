"""The application: every route, and the middleware around them.

Owns: the list of routes and their order of middleware.
Reads: `server.*`.
Never: starts or stops anything.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import oarlock
from oarlock import extensions
from oarlock.config.sections import ServerConfig
from oarlock.errors import ConfigError, PluginError, RequestError
from oarlock.frontend.conversation import read_messages
from oarlock.frontend.text_threads import in_text_thread
from oarlock.server import metrics
from oarlock.server.body import checked_body
from oarlock.server.chat import create_chat_completion
from oarlock.server.completions import create_completion
from oarlock.server.conversation import render, template_for
from oarlock.server.errors import ApiError, bad, model_not_found
from oarlock.server.gate import Gate, route_path
from oarlock.server.inside import ABORT, RENDER_CHAT, RENDER_COMPLETION, abort_requests, render_chat, render_completion
from oarlock.server.kinds import token_ids, wrong
from oarlock.server.plugin_routes import PluginServer
from oarlock.server.schema import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, Table, json_schema
from oarlock.server.state import ServerState
from oarlock.server.tools import read_tools
from oarlock.server.unknown_route import no_such_route, wrong_method

THREAD_CHARS = 20_000  # longer texts are tokenised, and more tokens written as text, in a thread, so that streams go on

Endpoint = Callable[[Request, ServerState], Awaitable[Response]]


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def make_app(state: ServerState) -> FastAPI:
    """The ASGI application. Raises ConfigError for a middleware that cannot be imported."""
    app = FastAPI(title="Oarlock", version=oarlock.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.oarlock, app.state.posts = state, {}
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    _add(app, state, "POST", "/v1/completions", create_completion, COMPLETIONS)
    _add(app, state, "POST", "/v1/chat/completions", create_chat_completion, CHAT)
    _add(app, state, "POST", "/v1/completions/render", render_completion, RENDER_COMPLETION)
    _add(app, state, "POST", "/v1/chat/completions/render", render_chat, RENDER_CHAT)
    _add(app, state, "POST", "/abort_requests", abort_requests, ABORT)
    _add(app, state, "GET", "/v1/models", list_models)
    _add(app, state, "GET", "/v1/models/{name:path}", get_model)
    _add(app, state, "POST", "/tokenize", tokenize, TOKENIZE)
    _add(app, state, "POST", "/detokenize", detokenize, DETOKENIZE)
    _add(app, state, "GET", "/health", health)
    _add(app, state, "GET", "/ping", health)
    _add(app, state, "POST", "/ping", health)
    _add(app, state, "GET", "/version", version)
    _add(app, state, "GET", "/metrics", metrics_page)
    app.add_middleware(Gate, state=state)  # type: ignore[arg-type]
    _add_cors(app, state.server)
    for path in state.server.middleware:
        _add_middleware(app, path)
    return app


def plugin_server(app: FastAPI) -> PluginServer:
    """The server as plugins' routes see it."""
    state: ServerState = app.state.oarlock
    return PluginServer(state, app.state.posts, functools.partial(_add, app, state))


def add_plugin_routes(app: FastAPI, device: str) -> None:
    """Let plugins add theirs, once the device is known. Raises PluginError for one that cannot."""
    server = plugin_server(app)
    for plugin, part in extensions.parts("routes", device):
        try:
            extensions.load(part)(server)
        except Exception as error:
            raise PluginError(f"routes {part.name} of {plugin.distribution} could not be added: {type(error).__name__}: {error}") from error


def _add(app: FastAPI, state: ServerState, method: str, path: str, endpoint: Endpoint, table: Table | None = None) -> None:
    async def route(request: Request) -> Response:
        try:
            return await endpoint(request, state)
        except (ApiError, RequestError):
            if table in (COMPLETIONS, CHAT):
                state.metrics.outcome("refused")
            raise

    if method == "POST":
        app.state.posts[path] = route
    extra: dict[str, Any] = {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall(r"{(\w+)", path)]}
    if table is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": json_schema(table, state.names)}}}
    app.add_api_route(path, route, methods=[method], name=f"{endpoint.__name__}_{method.lower()}", response_class=Response, openapi_extra=extra)


def _add_cors(app: FastAPI, server: ServerConfig) -> None:
    if server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.allowed_origins,
            allow_methods=server.allowed_methods,
            allow_headers=server.allowed_headers,
            allow_credentials=server.allow_credentials,
            expose_headers=["X-Request-Id"],
        )


def _add_middleware(app: FastAPI, path: str) -> None:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"--middleware {path}: it cannot be imported: {exc}", option="--middleware") from None
    if inspect.isclass(found):
        app.add_middleware(found)  # type: ignore[arg-type]
    elif inspect.iscoroutinefunction(found):
        app.add_middleware(BaseHTTPMiddleware, dispatch=found)
    else:
        raise ConfigError(f"--middleware {path}: it must be an ASGI class or an async function (request, call_next)", option="--middleware")


async def _http_error(request: Request, exc: HTTPException) -> Response:
    """Unknown paths and methods, in the same envelope as everything else."""
    routes = request.app.routes
    if exc.status_code == 404:
        error = no_such_route(routes, route_path(request.scope))
    elif exc.status_code == 405:
        error = wrong_method(routes, route_path(request.scope), request.method, dict(exc.headers or {}))
    else:
        error = ApiError(exc.status_code, str(exc.detail), headers=dict(exc.headers or {}))
    body = request.app.state.oarlock.error_body(route_path(request.scope), error, request.state.request_id)
    return Response(body, error.status, dict(error.headers), "application/json")


# ---------------------------------------------------------------- models
def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "oarlock",
        "root": state.names[0],
        "parent": None,
        "max_model_len": state.info.max_model_len,
    }


async def list_models(request: Request, state: ServerState) -> Response:
    return reply({"object": "list", "data": [_card(state, name) for name in state.names]})


async def get_model(request: Request, state: ServerState) -> Response:
    name = request.path_params["name"]
    if name not in state.names:
        raise model_not_found(name, state.names)
    return reply(_card(state, name))


# ---------------------------------------------------------------- tokenizer
async def tokenize(request: Request, state: ServerState) -> Response:
    values, headers = await checked_body(request, state, TOKENIZE)
    if ("prompt" in values) == ("messages" in values):
        raise bad("prompt", "Give one of prompt and messages.", "missing_field" if "prompt" not in values else "invalid_value")
    tokenizer = _tokenizer(state)
    if "messages" in values:
        template = template_for(values, state)
        messages = read_messages(values["messages"], template, allow_unknown=state.server.allow_unknown_fields, max_messages=state.server.max_messages)
        text = render(messages, values, state, template, read_tools(values, state, template).shown)
    else:
        text = values["prompt"]
        if type(text) is not str:
            raise wrong("prompt", text, "a string")
    limit = state.llm.processor.longest_text
    if len(text) > limit:
        raise bad("prompt" if "prompt" in values else "messages", f"The text has {len(text)} characters, the limit (--max-text-chars) is {limit}; tokenize it in pieces.")
    special = values.get("add_special_tokens", "prompt" in values)
    if len(text) > THREAD_CHARS:
        ids = await in_text_thread(functools.partial(tokenizer.encode, text, special))
    else:
        ids = tokenizer.encode(text, special)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": state.info.max_model_len, "tokens": ids}
    body["token_strs"] = [tokenizer.id_to_token(i) for i in ids] if values.get("return_token_strs", False) else None
    return reply(body, headers=headers)


async def detokenize(request: Request, state: ServerState) -> Response:
    values, headers = await checked_body(request, state, DETOKENIZE)
    tokenizer = _tokenizer(state)
    ids = state.llm.processor.check_token_ids(token_ids(values["tokens"], "tokens"), "tokens", may_be_empty=True)
    limit = state.llm.processor.longest_text
    if len(ids) > limit:
        raise bad("tokens", f"tokens has {len(ids)} entries, the limit (--max-text-chars) is {limit}; detokenize them in pieces.")
    decode = functools.partial(tokenizer.decode, ids, skip_special_tokens=False)
    return reply({"prompt": await in_text_thread(decode) if len(ids) > THREAD_CHARS else decode()}, headers=headers)


def _tokenizer(state: ServerState) -> Any:
    if state.tokenizer is None:
        raise bad(None, "This server runs without a tokenizer (--skip-tokenizer-init).", "unsupported_field")
    return state.tokenizer


# ---------------------------------------------------------------- operation
async def health(request: Request, state: ServerState) -> Response:
    """200 while a request would be served, else 503: loading, draining, engine dead or stuck."""
    if (error := state.sickness()) is not None:
        raise error
    return reply({"status": "ok"})


async def version(request: Request, state: ServerState) -> Response:
    return reply({"version": oarlock.__version__})


async def metrics_page(request: Request, state: ServerState) -> Response:
    return Response(state.metrics.page(), media_type=metrics.CONTENT_TYPE)
