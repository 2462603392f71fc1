"""/v1/files: upload, list, retrieve, content, delete. Files are kept in memory, and end with the server.

Owns: the files and the count of their bytes.
Reads: `oarlock.backend_api`, `multipart`.
Never: touches a disk; takes a path from a request (a file's name is a label).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oarlock.backend_api import BytesReply, JsonReply, Route, RouteCall, RouteError, RouteServer

from oarlock_batches.multipart import parse_form

MAX_NAME = 255

bad = RouteError.invalid


@dataclass(slots=True)
class StoredFile:
    """One file. `users` are the open batches that read it."""

    name: str
    purpose: str
    data: bytes
    id: str = field(default_factory=lambda: f"file-{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    users: set[str] = field(default_factory=set)

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "file", "bytes": len(self.data), "created_at": self.created_at, "filename": self.name, "purpose": self.purpose,
            "status": "processed", "expires_at": None,
        }  # fmt: skip


class FileStore:
    """Files by id, in the order in which they came. Used on the event loop's thread only."""

    def __init__(self, max_files: int, max_bytes: int) -> None:
        self.max_files, self.max_bytes = max_files, max_bytes
        self.held = 0  # bytes of files, and of what is to become one
        self.files: dict[str, StoredFile] = {}

    def hold(self, size: int) -> bool:
        """Count `size` more bytes, where there is room for them."""
        if self.held + size > self.max_bytes:
            return False
        self.held += size
        return True

    def release(self, size: int) -> None:
        self.held -= size

    def check_number(self, param: str) -> None:
        """Raises RouteError 400 where there are as many files as there may be. Answers of open batches come on top."""
        if len(self.files) >= self.max_files:
            raise bad(param, f"There are {len(self.files)} files, which is the limit (--batches-max-files); delete one.", "files_full")

    def add(self, file: StoredFile) -> StoredFile:
        """Keep a file whose bytes are held already."""
        self.files[file.id] = file
        return file

    def upload(self, name: str, purpose: str, data: bytes) -> StoredFile:
        """Raises RouteError 400 where there is no room."""
        self.check_number("file")
        if not self.hold(len(data)):
            text = f"The files here take {self.held} bytes, and with these {len(data)} more than {self.max_bytes >> 20} MiB (--batches-max-mib); delete one."
            raise bad("file", text, "files_full")
        return self.add(StoredFile(name, purpose, data))

    def get(self, key: str, param: str = "file_id", status: int = 404) -> StoredFile:
        found = self.files.get(key)
        if found is None:
            raise RouteError(status, f"There is no file {key[:80]!r} here; files are kept in memory until they are deleted or the server ends.", param, "file_not_found")
        return found

    def delete(self, key: str) -> None:
        """Raises RouteError 400 while a batch reads it."""
        file = self.get(key)
        if file.users:
            raise bad("file_id", f"The file {key!r} is read by {', '.join(sorted(file.users))}; cancel the batch first, or wait for its end.", "file_in_use")
        del self.files[key]
        self.release(len(file.data))


class Files:
    """The routes."""

    def __init__(self, store: FileStore) -> None:
        self.store = store

    def add(self, server: RouteServer) -> None:
        server.add(Route("POST", "/v1/files", self.create, takes_bytes=True))
        server.add(Route("GET", "/v1/files", self.list))
        server.add(Route("GET", "/v1/files/{file_id}", self.retrieve))
        server.add(Route("GET", "/v1/files/{file_id}/content", self.content))
        server.add(Route("DELETE", "/v1/files/{file_id}", self.delete))

    async def create(self, call: RouteCall) -> JsonReply:
        form = parse_form(call.content_type, call.body)
        for name in form:
            if name not in ("file", "purpose"):
                why = "files are kept until they are deleted" if name.startswith("expires_after") else "known are file and purpose"
                raise bad(name[:100], f"The field {name[:100]!r} is not served: {why}.", "unsupported_field")
        for name in ("file", "purpose"):
            if name not in form:
                raise bad(name, f"The field {name} is required.", "missing_field")
        purpose = form["purpose"].data.decode("utf-8", "replace")
        if purpose != "batch":
            raise bad("purpose", f"purpose is {purpose[:60]!r}; here it is 'batch'.")
        name = form["file"].filename or "file"
        if len(name) > MAX_NAME:
            raise bad("file", f"The file's name has {len(name)} characters; the limit is {MAX_NAME}.")
        return JsonReply(self.store.upload(name, purpose, form["file"].data).shown())

    async def list(self, call: RouteCall) -> JsonReply:
        purpose = call.query.get("purpose")
        files = [file.shown() for file in self.store.files.values() if purpose is None or file.purpose == purpose]
        order = call.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad("order", f"order is {order[:60]!r}; it must be asc or desc.")
        return JsonReply(page(files if order == "asc" else reversed(files), call.query, ("purpose", "order"), 10_000))

    async def retrieve(self, call: RouteCall) -> JsonReply:
        return JsonReply(self.store.get(call.path_params["file_id"]).shown())

    async def content(self, call: RouteCall) -> BytesReply:
        return BytesReply(self.store.get(call.path_params["file_id"]).data, "application/octet-stream")

    async def delete(self, call: RouteCall) -> JsonReply:
        key = call.path_params["file_id"]
        self.store.delete(key)
        return JsonReply({"id": key, "object": "file", "deleted": True})


def page(items: Iterable[dict[str, Any]], query: Mapping[str, str], known: tuple[str, ...], most: int) -> dict[str, Any]:
    """One page of a list: `limit` of them, those after the one with the id `after`. Raises RouteError 400."""
    for name in query:
        if name not in ("after", "limit", *known):
            raise bad(name[:100], f"Unknown parameter {name[:100]!r}; known are {', '.join(('after', 'limit', *known))}.", "unknown_field")
    shown = list(items)
    limit, after = query.get("limit", str(most)), query.get("after")
    if not limit.isdecimal() or not limit.isascii() or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise bad("limit", f"limit is {limit[:60]!r}; it must be 1 to {most}.")
    if after is not None:
        at = next((at for at, item in enumerate(shown) if item["id"] == after), None)
        if at is None:
            raise bad("after", f"after is {after[:80]!r}, which is not in the list.")
        shown = shown[at + 1 :]
    data = shown[: int(limit)]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(shown) > len(data)}
