"""uvicorn, without its signal handling and its ten wake-ups a second.

Owns: the HTTP protocol's settings, TLS.
Reads: `config.sections`.
Never: decides when to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import uvicorn

from oarlock.config.sections import ServerConfig
from oarlock.errors import ConfigError
from oarlock.logs import LEVELS
from oarlock.server.connection import Connection

KEEP_ALIVE_S = 75  # longer than the idle time of common load balancers, so that they close first
FINISH_S = 3  # for connections that are still open when everything has been answered


class HttpServer(uvicorn.Server):
    """Serves one application on one socket until `finish` is called."""

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self._wake = asyncio.Event()
        settings = uvicorn.Config(
            app, http=Connection, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=FINISH_S + 2, ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile, ssl_ca_certs=config.ssl_ca_certs, ssl_cert_reqs=config.ssl_cert_reqs,
        )  # fmt: skip
        _log_as_we_do(config.uvicorn_log_level)
        try:
            settings.load()
        except (OSError, ssl.SSLError, ValueError) as exc:
            files = ", ".join(f for f in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs) if f)
            raise ConfigError(f"--ssl-certfile: HTTPS cannot be set up from {files}: {exc}", option="--ssl-certfile") from None
        super().__init__(settings)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to `server.app`."""
        yield

    async def main_loop(self) -> None:
        """Wait to be told to stop; renew the date header once a second."""
        while not self.should_exit:
            date = [(b"date", formatdate(time.time(), usegmt=True).encode())]
            self.server_state.default_headers = date + self.config.encoded_headers
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout=1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening; answer those who are already connected.

        Closing a listening socket resets what waits in its queue, and a client cannot tell that from a request that was begun.
        """
        queues = [sock.dup() for sock in sockets or ()]
        for server in self.servers:
            server.close()
        waiting = [peer for queue in queues for peer in self._empty(queue)]
        loop = asyncio.get_running_loop()
        greetings = [loop.create_task(loop.connect_accepted_socket(self._connection, peer, ssl=self.config.ssl)) for peer in waiting]
        if greetings:
            await asyncio.wait(greetings, timeout=FINISH_S)
        end = loop.call_later(FINISH_S, self._hang_up)
        await super().shutdown(sockets)
        end.cancel()

    def _hang_up(self) -> None:
        """Whoever has not read an answer by now does not. uvicorn would cancel its task, and write a traceback into the log for each."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _empty(self, queue: socket.socket) -> Iterator[socket.socket]:
        """What has connected to `queue` and was not accepted yet; then close it."""
        with queue:
            queue.setblocking(False)
            for _ in range(self.config.backlog):
                try:
                    peer = queue.accept()[0]
                except OSError:
                    return
                peer.setblocking(False)
                yield peer

    def _connection(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def finish(self) -> None:
        """Stop listening and close connections as they become idle."""
        self.should_exit = True
        self._wake.set()


def _log_as_we_do(level: str) -> None:
    """uvicorn's records go to our handler, at its own level."""
    logger = logging.getLogger("uvicorn")
    logger.setLevel(LEVELS[level])
    logger.handlers = list(logging.getLogger("oarlock").handlers)
    logger.propagate = False
    for name in ("uvicorn.error", "uvicorn.asgi"):
        logging.getLogger(name).addFilter(_under_our_name)


def _under_our_name(record: logging.LogRecord) -> bool:
    """uvicorn logs whatever it does as `uvicorn.error`, and readers look for an error."""
    record.name = "oarlock.server"
    return True
