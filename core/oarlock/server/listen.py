"""The listening socket, taken before anything slow happens.

Owns: the socket, and the Unix socket's file.
Reads: `config.sections`.
Never: accepts a connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from oarlock.config.sections import ServerConfig
from oarlock.errors import ConfigError, OarlockError

BACKLOG = 2048


def listen(config: ServerConfig) -> socket.socket:
    """A bound and listening socket, so that nobody else can take the port while the model loads.

    Raises:
        OarlockError: the address is taken; the message names host, port and cause.
        ConfigError: the address cannot be used on this host.
    """
    return _listen_unix(config.uds) if config.uds else _listen_tcp(config.host or "0.0.0.0", config.port)


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as exc:
        raise ConfigError(f"--host {host}: not an address of this host ({exc.strerror})", option="--host") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended leaves the port waiting
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise OarlockError(f"cannot listen on {host}, port {port}: another process uses it; choose another --port") from None
        raise OarlockError(f"cannot listen on {host}, port {port}: {exc.strerror}; choose another --host or --port") from None
    sock.setblocking(False)
    return sock


def _listen_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_socket(path):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(ConnectionRefusedError):
                probe.connect(path)
                raise OarlockError(f"cannot listen on {path}: another process uses it; choose another --uds")
            os.unlink(path)  # left behind by a server that was killed
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise OarlockError(f"cannot listen on {path}: {exc.strerror or exc}; choose another --uds") from None
    except OarlockError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def release(config: ServerConfig) -> None:
    """Remove the Unix socket's file; TCP needs nothing."""
    if config.uds:
        with contextlib.suppress(OSError):
            os.unlink(config.uds)


def url(config: ServerConfig, sock: socket.socket) -> str:
    """Where clients reach the server, for the line that says so."""
    if config.uds:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}{(config.root_path or '').rstrip('/')}"
