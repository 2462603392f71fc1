"""/v1/batches: create, list, retrieve, cancel; each line of a file answered by a route of this server.

Owns: the batches, their order and their work.
Reads: `oarlock.backend_api`, `files`, `lines`.
Never: answers a request itself; lets batches take more than their share of requests at once.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from oarlock.backend_api import JsonReply, Route, RouteCall, RouteError, RouteFields, RouteServer

from oarlock_batches.files import Files, FileStore, StoredFile, bad, page
from oarlock_batches.lines import ENDPOINTS, Line, LineError, answer_line, read_line

WINDOW, WINDOW_S = "24h", 24 * 3600
MAX_ERRORS = 100  # lines at fault that a failed batch names
LINES_A_TURN = 50  # checked before others are served
RETRY_S = 1.0  # while the server's queue is full, or too slow
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
CREATE = RouteFields(
    {"input_file_id": "string", "endpoint": "string", "completion_window": "string", "metadata": "object"},
    required=("input_file_id", "endpoint", "completion_window"),
    refused={"output_expires_after": ("files are kept until they are deleted; leave the field out.", ())},
)


def add(server: RouteServer) -> None:
    """Every route."""
    names = ("max_files", "max_mib", "max_lines", "max_batches", "concurrency")
    sizes = {name: server.options[f"batches_{name}"] for name in names}
    store = FileStore(sizes["max_files"], sizes["max_mib"] << 20)
    Files(store).add(server)
    Batches(server, store, sizes["max_lines"], sizes["max_batches"], sizes["concurrency"]).add()


class Batch:
    """One batch. What is answered is kept by line number, and becomes two files at the end."""

    def __init__(self, file: StoredFile, values: Mapping[str, Any]) -> None:
        self.file = file
        self.task: asyncio.Task[None] | None = None
        self.output: dict[int, bytes] = {}
        self.errors: dict[int, bytes] = {}
        now = int(time.time())
        self.shown: dict[str, Any] = {
            "id": f"batch_{uuid.uuid4().hex}", "object": "batch", "endpoint": values["endpoint"], "errors": None, "input_file_id": file.id,
            "completion_window": WINDOW, "status": "validating", "output_file_id": None, "error_file_id": None, "created_at": now, "in_progress_at": None,
            "expires_at": now + WINDOW_S, "finalizing_at": None, "completed_at": None, "failed_at": None, "expired_at": None, "cancelling_at": None,
            "cancelled_at": None, "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": values.get("metadata"),
        }  # fmt: skip

    @property
    def id(self) -> str:
        return self.shown["id"]

    @property
    def is_open(self) -> bool:
        return self.shown["status"] in OPEN

    def enter(self, status: str) -> None:
        """Take a status, with its time."""
        self.shown["status"] = status
        self.shown[f"{status}_at"] = int(time.time())

    def fail(self, errors: list[dict[str, Any]]) -> None:
        self.shown["errors"] = {"object": "list", "data": errors}

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number, line) of every line that is not blank, numbered from 1. The file is not copied as a whole."""
        data, at, number = self.file.data, 0, 0
        while at < len(data):
            end = data.find(b"\n", at)
            end = len(data) if end < 0 else end
            number += 1
            line = data[at:end].strip()
            if line:
                yield number, line
            at = end + 1


class Batches:
    """The routes. Used on the event loop's thread only."""

    def __init__(self, server: RouteServer, store: FileStore, max_lines: int, max_batches: int, concurrency: int) -> None:
        self.server, self.store, self.max_lines, self.max_batches = server, store, max_lines, max_batches
        self.batches: dict[str, Batch] = {}
        self._concurrency = concurrency
        self._turns = asyncio.Semaphore(concurrency)

    def add(self) -> None:
        self.server.add(Route("POST", "/v1/batches", self.create, CREATE))
        self.server.add(Route("GET", "/v1/batches", self.list))
        self.server.add(Route("GET", "/v1/batches/{batch_id}", self.retrieve))
        self.server.add(Route("POST", "/v1/batches/{batch_id}/cancel", self.cancel))

    # ---------------------------------------------------------------- routes
    async def create(self, call: RouteCall) -> JsonReply:
        values = call.values
        if values["completion_window"] != WINDOW:
            raise bad("completion_window", f"completion_window is {values['completion_window'][:60]!r}; it must be {WINDOW!r}.")
        here = [path for path in ENDPOINTS if path in self.server.post_paths]
        if values["endpoint"] not in here:
            raise bad("endpoint", f"endpoint is {values['endpoint'][:100]!r}; this server answers batches of {', '.join(here)}.")
        _check_metadata(values.get("metadata", {}))
        file = self.store.get(values["input_file_id"], "input_file_id", 400)
        if file.purpose != "batch":
            raise bad("input_file_id", f"The file {file.id!r} is for {file.purpose!r}; give one whose purpose is 'batch'.")
        self.store.check_number("input_file_id")
        self._make_room()
        batch = Batch(file, values)
        self.batches[batch.id] = batch
        file.users.add(batch.id)
        self.server.spawn(self._run(batch))
        return JsonReply(batch.shown)

    def _make_room(self) -> None:
        """Drop the oldest batch that has ended, its files stay. Raises RouteError 429 where all are open."""
        if len(self.batches) < self.max_batches:
            return
        ended = next((key for key, batch in self.batches.items() if not batch.is_open), None)
        if ended is None:
            text = f"{len(self.batches)} batches are open, which is the limit (--batches-max-batches); try again."
            raise RouteError(429, text, None, "queue_full", "rate_limit_error", {"Retry-After": "10"})
        del self.batches[ended]

    async def list(self, call: RouteCall) -> JsonReply:
        return JsonReply(page([batch.shown for batch in reversed(self.batches.values())], call.query, (), 100))

    def _find(self, call: RouteCall) -> Batch:
        key = call.path_params["batch_id"]
        found = self.batches.get(key)
        if found is None:
            text = f"There is no batch {key[:80]!r} here; the last {self.max_batches} are kept (--batches-max-batches), until the server ends."
            raise RouteError(404, text, "batch_id", "batch_not_found")
        return found

    async def retrieve(self, call: RouteCall) -> JsonReply:
        return JsonReply(self._find(call).shown)

    async def cancel(self, call: RouteCall) -> JsonReply:
        batch = self._find(call)
        if not batch.is_open:
            raise bad("batch_id", f"The batch {batch.id!r} is {batch.shown['status']}; only an open one can be cancelled.")
        batch.enter("cancelling")
        if batch.task is not None:
            batch.task.cancel()
        return JsonReply(batch.shown)

    # ---------------------------------------------------------------- work
    async def _run(self, batch: Batch) -> None:
        """A batch from its first check to its files. It always ends in a status that says how."""
        batch.task = asyncio.current_task()
        end = "failed"
        try:
            if batch.shown["status"] == "cancelling":  # before it began
                end = "cancelled"
                return
            async with asyncio.timeout(WINDOW_S):
                if await self._check(batch):
                    batch.enter("in_progress")
                    end = await self._answer_all(batch)
        except TimeoutError:
            end = "expired"
        except asyncio.CancelledError:
            end = "cancelled"
            if batch.shown["status"] != "cancelling":
                raise
        finally:
            self._write_files(batch)
            batch.enter(end)
            batch.file.users.discard(batch.id)
            batch.task = None

    async def _check(self, batch: Batch) -> bool:
        """Every line, before the first is answered; whether all are requests."""
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        total = 0
        for number, raw in batch.lines():
            total += 1
            if total % LINES_A_TURN == 0:
                await asyncio.sleep(0)
            if total > self.max_lines:
                errors.append(_error("too_many_lines", f"The file has more than {self.max_lines} requests (--batches-max-lines); send several batches.", None))
                break
            try:
                line = read_line(raw)
                if line.url != batch.shown["endpoint"]:
                    raise LineError(f"url is {line.url}, but the batch is for {batch.shown['endpoint']}.", "url")
                if line.custom_id in seen:
                    raise LineError(f"custom_id {line.custom_id[:100]!r} is given twice.", "custom_id")
                seen.add(line.custom_id)
            except LineError as error:
                errors.append(_error("invalid_line", str(error), number, error.param))
                if len(errors) == MAX_ERRORS:
                    break
        if not total:
            errors.append(_error("empty_file", "The file has no request.", None))
        batch.shown["request_counts"]["total"] = total
        if errors:
            batch.fail(errors)
        return not errors

    async def _answer_all(self, batch: Batch) -> str:
        """Answer every line, some at once. Returns the status that the batch ends in."""
        lines = batch.lines()

        async def work() -> None:
            for number, raw in lines:
                async with self._turns:
                    await self._answer(batch, number, read_line(raw))

        workers = [asyncio.create_task(work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        except _NoRoom:
            text = f"The answers and the files here take {self.store.max_bytes >> 20} MiB (--batches-max-mib); delete files, and send the rest in another batch."
            batch.fail([_error("no_room", text, None)])
            return "failed"
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        batch.enter("finalizing")
        return "completed"

    async def _answer(self, batch: Batch, number: int, line: Line) -> None:
        request_id = uuid.uuid4().hex
        counts = batch.shown["request_counts"]
        while True:
            try:
                body, status, into, name = await self.server.call(line.url, line.body, request_id), 200, batch.output, "completed"
            except RouteError as error:
                if error.status == 429 and "Retry-After" in error.headers:
                    await asyncio.sleep(RETRY_S)
                    continue
                envelope = {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
                body, status, into, name = envelope, error.status, batch.errors, "failed"
            break
        written = answer_line(line.custom_id, status, request_id, body)
        if not self.store.hold(len(written)):
            raise _NoRoom
        into[number] = written
        counts[name] += 1

    def _write_files(self, batch: Batch) -> None:
        """What was answered, in the order of the lines; also of a batch that did not come to its end."""
        for answers, field, name in ((batch.output, "output_file_id", "output"), (batch.errors, "error_file_id", "error")):
            if answers:
                data = b"".join(answers[number] for number in sorted(answers))
                batch.shown[field] = self.store.add(StoredFile(f"{batch.id}_{name}.jsonl", "batch_output", data)).id
                answers.clear()


class _NoRoom(Exception):
    """An answer cannot be kept."""


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad("metadata", f"metadata has {len(metadata)} keys; the limit is {MAX_METADATA}.")
    for key, value in metadata.items():
        if type(value) is not str or len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            text = f"metadata: keys are up to {MAX_METADATA_KEY} characters, values strings of up to {MAX_METADATA_VALUE}; that of {key[:60]!r} is not."
            raise bad("metadata", text)
