"""A server on loopback that speaks the OpenAI API from a script, with delays that are known.

Owns: the script, and a record of every request.
Never: decides anything about a test.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class Seen:
    """One request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    at_s: float


@dataclass
class Script:
    """What the server does with every completion."""

    pieces: tuple[str, ...] = ("a", "b", "c")
    ttft_s: float = 0.0
    gap_s: float = 0.0
    usage: dict[str, int] | None = field(default_factory=lambda: {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8})
    status: int = 200  # of every completion; not 200: the error envelope
    failing: range = range(0)  # numbers of the completions that are a 500; the first is 1
    key: str | None = None  # a key that requests must bring
    error_event: bool = False  # after the pieces
    done: bool = True
    role_chunk: bool = True  # chat begins with a chunk without text
    hold_s: float = 0.0  # after the pieces, before the end
    bytes_at_once: int | None = None  # cut what is sent into pieces of so many bytes


class FakeServer:
    """Use as a context manager."""

    def __init__(self, **script: Any) -> None:
        self.script = Script(**script)
        self.seen: list[Seen] = []
        self.num_open = self.most_open = 0
        self.num_broken = 0  # clients that hung up
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                fake.answer_get(self)

            def do_POST(self) -> None:
                fake.answer_post(self)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def completions(self) -> list[Seen]:
        return [seen for seen in self.seen if "completions" in seen.path]

    # ---------------------------------------------------------------- answers
    def answer_get(self, handler: BaseHTTPRequestHandler) -> None:
        self.seen.append(Seen(handler.path, {}, dict(handler.headers), time.perf_counter()))
        if self._is_refused(handler):
            return
        self._json(handler, 200, {"object": "list", "data": [{"id": "toy", "object": "model"}]})

    def answer_post(self, handler: BaseHTTPRequestHandler) -> None:
        at, script = time.perf_counter(), self.script
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.seen.append(Seen(handler.path, body, dict(handler.headers), at))
            number = len(self.completions())
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        try:
            if self._is_refused(handler):
                return
            if script.status != 200 or number in script.failing:
                status = 500 if script.status == 200 else script.status
                self._json(handler, status, {"error": {"message": f"fault {status}", "type": "x", "param": None, "code": None}})
                return
            self._stream(handler, is_chat="chat" in handler.path)
        except (BrokenPipeError, ConnectionResetError):
            self.num_broken += 1
        finally:
            with self._lock:
                self.num_open -= 1

    def _is_refused(self, handler: BaseHTTPRequestHandler) -> bool:
        if self.script.key is None or handler.headers.get("Authorization") == f"Bearer {self.script.key}":
            return False
        self._json(handler, 401, {"error": {"message": "no valid key", "type": "x", "param": None, "code": None}})
        return True

    @staticmethod
    def _json(handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _stream(self, handler: BaseHTTPRequestHandler, *, is_chat: bool) -> None:
        script = self.script
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        if is_chat and script.role_chunk:
            self._event(handler, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        time.sleep(script.ttft_s)
        for number, piece in enumerate(script.pieces):
            if number:
                time.sleep(script.gap_s)
            said = {"delta": {"content": piece}} if is_chat else {"text": piece}
            self._event(handler, {"choices": [{"index": 0, **said, "finish_reason": None}]})
        time.sleep(script.hold_s)
        if script.error_event:
            self._event(handler, {"error": {"message": "the engine has ended"}})
        else:
            said = {"delta": {}} if is_chat else {"text": ""}
            self._event(handler, {"choices": [{"index": 0, **said, "finish_reason": "length"}]})
        if script.usage is not None:
            self._event(handler, {"choices": [], "usage": script.usage})
        if script.done:
            self._write(handler, b"data: [DONE]\n\n")

    def _event(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        self._write(handler, b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n")

    def _write(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        size = self.script.bytes_at_once or len(data)
        for at in range(0, len(data), size):
            handler.wfile.write(data[at : at + size])
            handler.wfile.flush()
