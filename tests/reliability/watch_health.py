"""Asks a server's /health 20 times a second, each time on a new connection, until standard input ends; then prints how many seconds each answer took.

    python tests/reliability/watch_health.py PORT

A process of its own: beside the load it would measure how busy that is.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

EVERY_S = 0.05
NOT_WELL_S = 3600.0  # stands for an answer other than 200


def main() -> None:
    port, took = int(sys.argv[1]), []
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            is_well = sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        took.append(time.monotonic() - started if is_well else NOT_WELL_S)
    print(json.dumps(took))


if __name__ == "__main__":
    main()
