"""`oarlock run-batch -i IN -o OUT MODEL …`: start a server on a private socket, answer a file of requests, stop the server.

Owns: the server process, the order and the file of the answers, the exit code.
Reads: `lines`, `private`.
Never: leaves half a file in place of the output, or a process behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from oarlock_batches.lines import LineError, answer_line, read_line, refused_line
from oarlock_batches.private import PrivateClient

MAX_LINE = 32 << 20  # bytes
READY_S = 0.2  # between two looks at a server that loads
RETRY_S = 1.0  # while its queue is full
STOP_S = 30.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: Sequence[str]) -> int:
    """0: every line has an answer with status 200. 1: some line has another, or the server ended. 2: wrong usage."""
    parser = argparse.ArgumentParser(
        prog="oarlock run-batch",
        description="Answer the requests of a JSONL file, one a line: {custom_id, method, url, body}. All other arguments are those of `oarlock serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--input-file", type=Path, required=True, help="the requests")
    parser.add_argument("-o", "--output-file", type=Path, required=True, help="the answers, in the order of the requests; replaced at the end, as a whole")
    parser.add_argument("--concurrency", type=int, default=64, help="requests that are sent at once [64]")
    given, serve = parser.parse_known_args(list(arguments))
    if given.concurrency < 1:
        parser.error(f"--concurrency is {given.concurrency}; it must be at least 1")
    for name in ("--host", "--port", "--uds", "--api-key"):
        if any(word == name or word.startswith(name + "=") for word in serve):
            parser.error(f"{name}: run-batch serves nobody else, on a private socket; leave it out")
    if not given.input_file.is_file():
        parser.error(f"--input-file {given.input_file}: there is no such file")
    if not given.output_file.absolute().parent.is_dir():
        parser.error(f"--output-file {given.output_file}: there is no such folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is stopped then, too
    try:
        return _run(given.input_file, given.output_file, given.concurrency, serve)
    except KeyboardInterrupt:
        return 130


def _run(source: Path, target: Path, concurrency: int, serve: list[str]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="oarlock-batch-"))
    partial = target.absolute().with_name(f".{target.name}.{os.getpid()}.part")
    key = secrets.token_hex(16)
    try:
        with source.open("rb") as requests, partial.open("wb") as answers, _process(serve, folder / "socket", key) as process:
            good, bad = asyncio.run(_serve_all(process, folder / "socket", key, requests, answers, concurrency))
            answers.flush()
            os.fsync(answers.fileno())
        partial.replace(target)
        print(f"{good + bad} requests: {good} answered, {bad} refused or failed; {target}", file=sys.stderr)
        return 1 if bad else 0
    except OSError as error:
        print(f"oarlock run-batch: error: {error.filename or partial}: {error.strerror or error}; no answer was written", file=sys.stderr)
        return 1
    except _ServerEnded as ended:
        print(f"oarlock run-batch: error: the server ended with exit code {ended}; no answer was written. Its messages are above.", file=sys.stderr)
        return 1
    finally:
        partial.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


class _ServerEnded(Exception):
    """The exit code of a server that was to serve."""


@contextlib.contextmanager
def _process(serve: list[str], socket: Path, key: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server of our own, which ends with us. Its messages go to our stderr; the key is not on its command line."""
    command = [sys.executable, "-m", "oarlock.cli.main", "serve", *serve, "--uds", str(socket)]
    environment = {**os.environ, "OARLOCK_API_KEY": key}
    process = subprocess.Popen(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, env=environment, preexec_fn=_die_with_parent)  # noqa: PLW1509  one thread
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _die_with_parent() -> None:
    """On Linux; elsewhere a run-batch that is killed outright leaves its server."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _serve_all(
    process: subprocess.Popen[bytes], socket: Path, key: str, requests: BinaryIO, answers: BinaryIO, concurrency: int
) -> tuple[int, int]:
    """`_answer_all` once the server is ready. Raises _ServerEnded."""
    with contextlib.closing(PrivateClient(socket, key)) as client:
        while not await _is_ready(client):
            if process.poll() is not None:
                raise _ServerEnded(process.returncode)
            await asyncio.sleep(READY_S)
        try:
            return await _answer_all(client, requests, answers, concurrency)
        except ConnectionError:
            raise _ServerEnded(await asyncio.to_thread(process.wait, STOP_S)) from None


async def _is_ready(client: PrivateClient) -> bool:
    with contextlib.suppress(OSError):
        return (await client.ask("GET", "/health")).status == 200
    return False


async def _answer_all(client: PrivateClient, requests: BinaryIO, answers: BinaryIO, concurrency: int) -> tuple[int, int]:
    """(answered, refused or failed). The answers are written in order; at most four times `concurrency` lines are held."""
    turns = asyncio.Semaphore(concurrency)
    waiting: deque[asyncio.Task[tuple[bool, bytes]]] = deque()
    counts = [0, 0]

    async def write_first() -> None:
        good, written = await waiting.popleft()
        answers.write(written)
        counts[0 if good else 1] += 1

    try:
        for raw in _lines(requests):
            waiting.append(asyncio.create_task(_answer(client, raw, turns)))
            while len(waiting) >= 4 * concurrency or (waiting and waiting[0].done()):
                await write_first()
            await asyncio.sleep(0)
        while waiting:
            await write_first()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return counts[0], counts[1]


def _lines(requests: BinaryIO) -> Iterator[bytes | None]:
    """Every line that is not blank; None for one that is too long."""
    while line := requests.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            while line and not line.endswith(b"\n"):
                line = requests.readline(MAX_LINE)
            yield None
        elif line.strip():
            yield line.strip()


async def _answer(client: PrivateClient, raw: bytes | None, turns: asyncio.Semaphore) -> tuple[bool, bytes]:
    if raw is None:
        return False, refused_line(None, "line_too_long", f"The line is longer than {MAX_LINE} bytes.")
    try:
        line = read_line(raw)
    except LineError as error:
        return False, refused_line(error.custom_id, "invalid_line", str(error))
    async with turns:
        while True:
            response = await client.ask("POST", line.url, json.dumps(line.body, ensure_ascii=False).encode())
            if response.status != 429 or "retry-after" not in response.headers:
                break
            await asyncio.sleep(RETRY_S)
    return response.status == 200, answer_line(line.custom_id, response.status, response.headers["x-request-id"], response.json())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
