"""A server in a process of its own, for tests whose environment has nothing of Oarlock. Standard library only.

Reads of the environment: OARLOCK (the command), MODEL (a chat model).
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "smollm2"
START_S = 180.0


@contextmanager
def oarlock(*flags: str, key: str = "") -> Iterator[str]:
    """The address of a server that is ready, without a slash at its end. It must end as it should."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [os.environ["OARLOCK"], "serve", os.environ["MODEL"], "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--device", "cpu", "--max-model-len", "4096", "--kv-cache-memory", "256MiB", *flags]
    command += ["--api-key", key] if key else []
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("r", prefix="oarlock-", suffix=".log") as log:
        with Path(log.name).open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the server did not become ready:\n{log.read()}")
                time.sleep(0.1)
            yield url
            assert _running(url, key) == 0, "a request goes on"
        finally:
            process.terminate()
            code = process.wait(40)
        assert code == 0 and "Traceback" not in log.read(), f"ended with {code}:\n{Path(log.name).read_text()}"


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5):
            return True
    except OSError:
        return False


def _running(url: str, key: str) -> float:
    """Requests in the engine: 0, or what is left after ten seconds, as what a client left open ends soon after it."""
    page = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {key}"})
    deadline = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(page, timeout=10) as response:
            value = next(float(line.split()[-1]) for line in response.read().decode().splitlines() if line.startswith("vllm:num_requests_running{"))
        if value == 0 or time.monotonic() > deadline:
            return value
        time.sleep(0.1)
