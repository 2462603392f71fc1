"""What an HTTP route of a plugin is made of, and all that it may know of the server. Standard library only.

Owns: the records that a route and the server exchange.
Reads: nothing of ours.
Never: names a web framework; lets a route see a request's headers, and so its key.

    def add(server: RouteServer) -> None:
        async def echo(call: RouteCall) -> JsonReply:
            return JsonReply(await server.call("/v1/completions", {**call.values, "max_tokens": 1}, call.request_id))

        server.add(Route("POST", "/echo", echo, RouteFields({"model": "string", "prompt": "any"}, required=("model", "prompt"))))
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

FieldKind = Literal["boolean", "integer", "number", "string", "strings", "object", "any"]


@dataclass(eq=False)
class RouteError(Exception):
    """An answer other than 2xx. Raised by a route, and by `RouteServer.call` and `stream` for what another route answered."""

    status: int
    message: str  # what happened, the value, the limit, the remedy
    param: str | None = None  # the field at fault, with its path: "messages[0].content"
    code: str | None = None
    type: str = "invalid_request_error"
    headers: Mapping[str, str] = field(default_factory=dict)
    counted: bool = False  # the metrics have it: another route answered it

    def __str__(self) -> str:
        return self.message

    @classmethod
    def invalid(cls, param: str | None, message: str, code: str = "invalid_value") -> RouteError:
        """The 400 about a field."""
        return cls(400, message, param, code)

    @staticmethod
    def shown(value: Any) -> str:
        """A value as an error shows it."""
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."

    def renamed(self, names: Mapping[str, str]) -> RouteError:
        """The same about this route's fields, which the other route knows by other names."""
        new = names.get(self.param or "")
        return self if new is None else replace(self, param=new, message=self.message.replace(self.param or "", new, 1))


@dataclass(frozen=True, slots=True)
class RouteFields:
    """The fields of a JSON body. Any other is a 400 that names it, as on core's routes."""

    fields: Mapping[str, FieldKind]  # null is the same as leaving a field out
    required: tuple[str, ...] = ()
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)  # name -> (why, values that ask for nothing)


@dataclass(frozen=True, slots=True)
class RouteCall:
    """One request, after the API key and every check of its body."""

    request_id: str
    values: Mapping[str, Any]  # the fields that are there
    body: bytes  # of a route with `takes_bytes`
    content_type: str
    path_params: Mapping[str, str]
    query: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JsonReply:
    """A whole answer."""

    value: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BytesReply:
    """A whole answer that is no JSON."""

    data: bytes
    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventReply:
    """Server-sent events: (name or None, JSON value). What fails before the first is a plain HTTP error, later an event named error.

    The generator is closed when the client hangs up.
    """

    events: AsyncGenerator[tuple[str | None, Any], None]
    headers: Mapping[str, str] = field(default_factory=dict)
    done: bool = False  # "data: [DONE]" is the end


@dataclass(frozen=True, slots=True)
class Route:
    """A route. The API key, the server's phase, the body's limits and the metrics are core's; the task is cancelled when the client hangs up."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # "/v1/things/{thing_id}"
    endpoint: Callable[[RouteCall], Awaitable[JsonReply | BytesReply | EventReply]]
    fields: RouteFields | None = None  # POST: of the JSON body; None: there is none
    takes_bytes: bool = False  # POST: the body is taken as it comes, up to --max-body-bytes
    takes_x_api_key: bool = False  # the key may come in the header X-API-Key, too; for all routes below the path
    is_page: bool = False  # for people: a 401 asks the browser for the key, as HTTP Basic's password; it then counts for all that the page fetches
    generates: bool = False  # what it refuses counts as a refused request
    # (status, error) -> body, where it is not {"error": error}; `error` has message, type, param, code and request_id. For all routes below the path
    error_body: Callable[[int, dict[str, Any]], Any] | None = None


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How prompts become vectors. None: as the checkpoint, or --pooler-config, has it."""

    task: Literal["embed", "classify"] | None = None
    pooling: str | None = None  # last, mean, cls
    use_activation: bool | None = None  # embed: length 1; classify: probabilities
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None  # -1: the context
    truncation_side: str = "right"  # which end is cut off
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Pooled:
    """One prompt's vector: an embedding, or a number for each of `RouteServer.labels`."""

    data: bytes  # float32, lowest byte first
    token_ids: tuple[int, ...]  # the prompt's
    num_cached_tokens: int


class RouteServer(Protocol):
    """What a route may know and do. `add` while the server starts, the rest while it serves, on the event loop's thread."""

    @property
    def model_names(self) -> tuple[str, ...]: ...  # answers name the first
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_prompts(self) -> int: ...  # of one request
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def allow_unknown_fields(self) -> bool: ...
    @property
    def options(self) -> Mapping[str, Any]: ...  # of every plugin: `OptionSpec`
    @property
    def labels(self) -> tuple[str, ...]: ...  # of a classifier's classes; (): the model gives embeddings
    @property
    def post_paths(self) -> frozenset[str]: ...  # of every POST route, for `call` and `stream`
    def add(self, route: Route) -> None: ...
    async def call(self, path: str, body: Mapping[str, Any], request_id: str) -> Any: ...  # what POST path answers; raises RouteError
    def stream(self, path: str, body: Mapping[str, Any], request_id: str) -> AsyncGenerator[Any, None]: ...  # its events' JSON values, without [DONE]
    async def pool(self, prompts: Sequence[Any], options: PoolOptions, request_id: str, param: str = "prompt") -> list[Pooled]: ...  # texts, ids, or (query, document) for a classifier; raises RouteError naming param[n]
    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...  # goes on without the client; ends with the server
