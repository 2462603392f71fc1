"""What one server process is doing: its phase, its models' names, what is open.

Owns: the server's phase, admission, the open requests.
Reads: `config`, `frontend`, `server.metrics`.
Never: parses a request or writes a response.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import msgspec

from oarlock.config.sections import EngineConfig, ServerConfig
from oarlock.frontend.inputs import default_sampling_fields
from oarlock.messages import EngineInfo, EngineOutputs
from oarlock.model_summary import ModelSummary
from oarlock.server.errors import ApiError, bad, queue_full, unavailable
from oarlock.server.metrics import ServerMetrics
from oarlock.server.parsing import Parsers

OWNER: ContextVar[int] = ContextVar("owner", default=0)  # number of the API key of the request that this task, or its parent, works for
MAX_BODIES = 8  # of the largest size, read at once


class Phase(enum.Enum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


class OpenRequest:
    """One HTTP request that generates. Its work runs in `task`; `end` stops it for a reason that the client is told."""

    __slots__ = ("entries", "error", "owner", "request_id", "task")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.owner = OWNER.get()
        self.entries = 0  # prompt logprobs that its answer holds
        self.task: asyncio.Task[None] | None = None
        self.error: ApiError | None = None  # None while it runs, and when the client hung up

    def end(self, error: ApiError | None) -> None:
        if self.error is None:
            self.error = error
        if self.task is not None:
            self.task.cancel()


class BodyMemory:
    """Bytes of the request bodies that are being read or parsed, beyond the first FREE_BYTES of each.

    So bodies of the usual size are read however many large ones are on their way, and these cannot fill the memory.
    """

    FREE_BYTES = 64 << 10

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.turn = asyncio.Lock()  # large bodies are parsed one at a time, so that others are served in between

    def grow(self, before: int, after: int) -> None:
        """A body of `before` bytes has become one of `after`. Raises 429, and counts nothing, where there is no room for it."""
        more = self._counted(after) - self._counted(before)
        if more and self.used + more > self.limit:
            text = f"The large request bodies that are being read have {self.used} of {self.limit} bytes; try again."
            headers = {"Retry-After": "1", "Connection": "close"}  # the rest is not read
            raise ApiError(429, text, "rate_limit_error", None, "queue_full", headers)
        self.used += more

    def free(self, size: int) -> None:
        """A body of `size` bytes is held no longer."""
        self.used -= self._counted(size)

    def _counted(self, size: int) -> int:
        return max(0, size - self.FREE_BYTES)


class ServerState:
    """One for each server. Used on the event loop's thread only."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, api_keys: tuple[str, ...] = ()) -> None:
        self.engine, self.server, self.api_keys = engine, server, api_keys
        self.names = engine.model.served_model_name or (engine.model.model,)
        self.created = int(time.time())
        self.phase = Phase.LOADING
        self.metrics = ServerMetrics(self.names[0])
        self.open: set[OpenRequest] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_prompts = 0  # prompts inside: waiting or running
        self.prompts_of: Counter[int] = Counter()  # the same, by owner
        self.num_entries = 0  # prompt logprobs that open requests' answers hold
        self.bodies = BodyMemory(MAX_BODIES * server.max_body_bytes)
        self.heard_s = 0.0  # time.monotonic() of the engine's last message, or of the first prompt after a pause
        self.error_bodies: dict[str, Callable[[int, dict[str, Any]], Any]] = {}  # beginning of a path -> its errors' form, where it has one
        self.browser_paths: set[str] = set()  # pages: a 401 asks for the key as HTTP Basic's password, which then counts on every path
        self.x_api_key_paths: set[str] = set()  # beginnings of paths whose clients may send the key as X-API-Key
        # Set by `ready`:
        self.llm: Any = None
        self.tokenizer: Any = None
        self.template: Any = None
        self.summary: ModelSummary | None = None
        self.parsers = Parsers()
        self.defaults: dict[str, Any] = {}
        self.max_prompts_inside = 0

    def ready(self, llm: Any, tokenizer: Any, template: Any, summary: ModelSummary, parsers: Parsers | None = None) -> None:
        """The engine has started: begin to serve."""
        self.llm, self.tokenizer, self.template, self.summary = llm, tokenizer, template, summary
        self.parsers = parsers or Parsers()
        self.defaults = default_sampling_fields(summary, self.engine.model.generation_config)
        self.max_prompts_inside = self.engine.scheduler.max_inside // self.engine.scheduler.num_owners
        self.metrics.attach(self.info, self.engine, lambda: llm.stats)
        self.phase = Phase.SERVING

    @property
    def info(self) -> EngineInfo:
        return self.llm.info

    def sickness(self) -> ApiError | None:
        """Why /health is not 200; None when it is. An engine is stuck when requests are open and it says nothing for --stall-time."""
        error = self.not_serving()
        if error is None and not self.llm.is_alive():
            error = unavailable("The engine has ended.", "engine_dead")
        silent_s = time.monotonic() - self.heard_s
        if error is None and self.num_prompts and silent_s > self.server.stall_s:
            error = unavailable(f"Requests are open and the engine has said nothing for {silent_s:.0f} s.", "engine_stalled")
        return error

    def on_step(self, outputs: EngineOutputs) -> None:
        """Every message of the engine."""
        self.heard_s = time.monotonic()
        self.metrics.on_step(outputs)

    def not_serving(self) -> ApiError | None:
        """Why no request is taken now; None when they are."""
        match self.phase:
            case Phase.LOADING:
                return unavailable("The model is still loading.", "loading", retry_after_s=2)
            case Phase.DRAINING:
                return unavailable("The server is shutting down.", "shutting_down", retry_after_s=5)
            case Phase.DEAD:
                return unavailable("The engine has ended; the server is shutting down.", "engine_dead")
        return None

    # ---------------------------------------------------------------- admission
    def check_room(self, num_prompts: int = 1) -> None:
        """Raises 429 when waiting and running prompts are at the bound, of all or of this key, 400 when so many never fit."""
        limit, shared = self.max_prompts_inside, self.engine.scheduler.num_owners > 1
        if num_prompts > limit:
            what = "--max-num-queued-reqs, or --max-num-seqs + --max-waiting-requests" + ", divided by the number of API keys" * shared
            raise bad("prompt", f"The request has {num_prompts} prompts; at most {limit} can be inside ({what}). Send fewer.", "invalid_value")
        inside = self.prompts_of[OWNER.get()] if shared else self.num_prompts
        if inside + num_prompts > limit:
            raise queue_full(f"The queue is full ({inside} of {limit} prompts{' of this API key' * shared} inside); try again.", retry_after_s=1)

    def enter(self, opened: OpenRequest, num_prompts: int) -> None:
        self.check_room(num_prompts)
        if not self.num_prompts:
            self.heard_s = time.monotonic()
        self.open.add(opened)
        self.idle.clear()
        self.num_prompts += num_prompts
        self.prompts_of[opened.owner] += num_prompts

    def leave(self, opened: OpenRequest, num_prompts: int) -> None:
        self.open.discard(opened)
        self.num_prompts -= num_prompts
        self.prompts_of[opened.owner] -= num_prompts
        self.num_entries -= opened.entries
        if not self.open:
            self.idle.set()

    def hold(self, opened: OpenRequest, entries: int) -> None:
        """Count the prompt logprobs of an open request until it leaves. Raises 429 where all together would be too many."""
        limit = self.engine.model.max_logprob_entries
        if entries and self.num_entries + entries > limit:
            text = f"prompt_logprobs: open requests hold {self.num_entries} of {limit} entries (--max-logprob-entries), and this one asks for {entries}"
            raise queue_full(f"{text}; try again.", retry_after_s=1)
        opened.entries = entries
        self.num_entries += entries

    def error_body(self, path: str, error: ApiError, request_id: str) -> bytes:
        """The error as clients of this path expect it."""
        for start, form in self.error_bodies.items():
            if path == start or path.startswith(start + "/"):
                return msgspec.json.encode(form(error.status, {**error.payload()["error"], "request_id": request_id}))
        return error.body()

    def takes_x_api_key(self, path: str) -> bool:
        """Plugins say so; before their routes are there, all paths that answer 503 anyway, so that a client that retries is not told of its key."""
        if self.phase is Phase.LOADING:
            return path != "/metrics"
        return any(path == start or path.startswith(start + "/") for start in self.x_api_key_paths)

    def end_all(self, error: ApiError) -> None:
        """Stop every open request; each client is sent `error`."""
        for opened in list(self.open):
            opened.end(error)
