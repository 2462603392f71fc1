"""docs/limits.md against the code: every flag of its first table is set low, met exactly, and passed by one."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from oarlock.config.options import BY_NAME, OPTIONS, plugin_options
from real_server import RealServer, wait_until
from tiny_model import TEMPLATE, make_tiny_model
from toy_server import refused

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
CMP, CHT = "/v1/completions", "/v1/chat/completions"
Made = tuple[str, dict[str, Any] | bytes]


def cmp(**fields: Any) -> Made:
    return CMP, {"model": "tiny", "prompt": "Hi", "max_tokens": 1, **fields}


def cht(**fields: Any) -> Made:
    return CHT, {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}


def padded(size: int) -> Made:
    """A body of exactly `size` bytes."""
    bare = json.dumps(cmp()[1] | {"user": ""})
    return CMP, json.dumps(cmp()[1] | {"user": "x" * (size - len(bare))}).encode()


def tool(size: int) -> dict[str, Any]:
    """A tool that takes `size` bytes as JSON."""
    made = {"type": "function", "function": {"name": "f", "description": ""}}
    made["function"]["description"] = "x" * (size - len(json.dumps(made)))  # type: ignore[index]
    return made


def named_tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{at}"}} for at in range(count)]


def form(size: int) -> Made:
    body = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * size + b"\r\n--B--\r\n"
    return "/v1/files", body


@dataclass(frozen=True)
class Cap:
    """`make(n)` asks for n of what `flag` bounds, which is set to `value`."""

    flag: str
    value: int
    make: Callable[[int], Made]
    param: str | None
    status: int = 400
    unit: int = 1  # of the flag's value


WORDS = "one two three four five six"
CAPS = (
    Cap("--max-body-bytes", 4000, padded, None, 413),
    Cap("--max-model-len", 1000, lambda n: cmp(prompt=[5] * 990, max_tokens=n - 990), "max_tokens"),
    Cap("--max-model-len", 1000, lambda n: cmp(prompt=[5] * (n - 1)), "prompt"),
    Cap("--max-prompts", 3, lambda n: cmp(prompt=["Hi"] * n), "prompt"),
    Cap("--max-n", 3, lambda n: cmp(n=n, temperature=1), "n"),
    Cap("--max-n", 3, lambda n: cht(n=n, temperature=1), "n"),
    Cap("--max-n", 3, lambda n: cmp(best_of=n, temperature=1), "best_of"),
    Cap("--max-n", 3, lambda n: cmp(n=n, use_beam_search=True), "n"),
    Cap("--max-stop-strings", 2, lambda n: cht(stop=["x"] * n), "stop"),
    Cap("--max-stop-len", 9, lambda n: cht(stop=["x" * n]), "stop"),
    Cap("--max-stop-len", 9, lambda n: cmp(bad_words=["x" * n]), "bad_words"),
    Cap("--max-stop-token-ids", 3, lambda n: cmp(stop_token_ids=list(range(n))), "stop_token_ids"),
    Cap("--max-bad-words", 2, lambda n: cht(bad_words=["x", "y", "z"][:n]), "bad_words"),
    Cap("--max-logit-bias", 2, lambda n: cht(logit_bias={str(at): 1 for at in range(n)}), "logit_bias"),
    Cap("--max-logprobs", 4, lambda n: cmp(logprobs=n), "logprobs"),
    Cap("--max-logprobs", 4, lambda n: cmp(prompt_logprobs=n), "prompt_logprobs"),
    Cap("--max-logprobs", 4, lambda n: cht(logprobs=True, top_logprobs=n), "top_logprobs"),
    Cap("--max-logprob-entries", 60, lambda n: cmp(prompt=[5] * n, prompt_logprobs=0), "prompt_logprobs"),
    Cap("--max-logprob-entries", 60, lambda n: cmp(max_tokens=n, logprobs=0), "logprobs"),
    Cap("--max-messages", 3, lambda n: cht(messages=[{"role": "user", "content": "Hi"}] * n), "messages"),
    Cap("--max-messages", 3, lambda n: ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}] * n}), "messages"),
    Cap("--max-messages", 3, lambda n: ("/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": "Hi"}] * n, "max_output_tokens": 1}), "input"),
    Cap("--max-tools", 2, lambda n: cht(tools=named_tools(n), tool_choice="none"), "tools"),
    Cap("--max-tool-bytes", 400, lambda n: cht(tools=[tool(n)], tool_choice="none"), "tools"),
    Cap("--max-text-chars", 32100, lambda n: ("/tokenize", {"prompt": "x" * n}), "prompt"),
    Cap("--max-text-chars", 32100, lambda n: ("/detokenize", {"tokens": [5] * n}), "tokens"),
    Cap("--max-text-chars", 32100, lambda n: cmp(prompt="x" * n, truncate_prompt_tokens=3), "prompt"),
    Cap("--max-grammar-chars", 30, lambda n: cmp(guided_regex="a" * n), "guided_regex"),
    Cap("--max-grammar-chars", 30, lambda n: cht(structured_outputs={"choice": ["a" * (n - 4)]}), "structured_outputs"),
    Cap("--batches-max-mib", 1, form, "file", unit=1 << 20),
)  # fmt: skip
QUEUE = ("--max-num-queued-reqs", "--max-num-queued-tokens", "--max-queue-time")  # in test_queue.py
KEPT = ("--max-waiting-requests", "--batches-max-files", *QUEUE)  # tested below: what counts is what came before
LOW = {"--max-body-bytes": "4MiB"}  # one server has all limits at once; this one would hide others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", template="{{ tools and '' }}" + TEMPLATE)


def started(model: Path, log: Path, *flags: str) -> RealServer:
    return RealServer(model, "--device", "null", "--served-model-name", "tiny", *flags, log=log, defaults=())


@pytest.fixture(scope="module")
def low(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = [word for flag, value in {cap.flag: str(cap.value) for cap in CAPS}.items() for word in (flag, LOW.get(flag, value))]
    with started(model, tmp_path_factory.mktemp("log") / "low.log", *flags) as server:
        yield server


def send(server: RealServer, made: Made) -> httpx.Response:
    path, body = made
    if isinstance(body, dict):
        return server.post(path, body)
    kind = "multipart/form-data; boundary=B" if path == "/v1/files" else "application/json"
    return server.http.post(path, content=body, headers={"Content-Type": kind})


@pytest.mark.parametrize("cap", [cap for cap in CAPS if cap.flag not in LOW], ids=lambda cap: f"{cap.flag}-{cap.param}")
def test_limit_is_met_and_one_more_is_refused_by_name(low: RealServer, cap: Cap) -> None:
    most = cap.value * cap.unit
    error = refused(send(low, cap.make(most + 1)), cap.param, cap.status)
    assert cap.flag in error["message"] or cap.flag == "--max-model-len" or cap.flag[2:].replace("-", "_") in error["message"], error
    at_most = send(low, cap.make(most))
    assert at_most.status_code == 200, at_most.text[:300]


def test_body_is_bounded(model: Path, tmp_path: Path) -> None:
    (cap,) = (cap for cap in CAPS if cap.flag == "--max-body-bytes")
    with started(model, tmp_path / "log", cap.flag, str(cap.value)) as server:
        assert send(server, cap.make(cap.value)).status_code == 200
        assert cap.flag in refused(send(server, cap.make(cap.value + 1)), None, 413)["message"]


def test_queue_and_files_are_bounded(model: Path, tmp_path: Path) -> None:
    with started(model, tmp_path / "log", "--max-waiting-requests", "3", "--max-num-seqs", "2", "--batches-max-files", "2") as server:
        for _ in range(2):
            assert send(server, form(3)).status_code == 200
        assert "--batches-max-files" in refused(send(server, form(3)), "file")["message"]
        refused(send(server, cmp(prompt=["Hi"] * 6)), "prompt")
        os.kill(server.engine_pid(), signal.SIGSTOP)
        results: list[int] = []
        waiting = [threading.Thread(target=lambda: results.append(send(server, cmp()).status_code)) for _ in range(5)]
        try:
            for thread in waiting:
                thread.start()
            wait_until(lambda: send(server, cmp(max_tokens=0)).status_code == 429, 10)
            assert int(send(server, cmp()).headers["retry-after"]) >= 1
        finally:
            os.kill(server.engine_pid(), signal.SIGCONT)
        for thread in waiting:
            thread.join(20)
        assert results == [200] * 5


def rows() -> dict[str, str]:
    """Flag -> default, of every table of the page that has flags."""
    return dict(re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+) \|", PAGE, re.MULTILINE))


def test_page_has_every_limit_with_its_default() -> None:
    every = {f"--{option.names[0]}": option for option in (*OPTIONS, *plugin_options(BY_NAME).values())}
    shown = rows()
    for flag, default in shown.items():
        real = every[flag].default
        if real is not None:
            units = {"KiB": 1 << 10, "MiB": 1 << 20}
            number, _, unit = default.strip().partition(" ")
            assert float(number) * units.get(unit, 1) == real, flag
    one_request = {f"--{option.names[0]}" for option in OPTIONS if option.group == "Limits of one request"}
    assert one_request <= shown.keys()
    bounds = {flag for flag, option in every.items() if re.match(r"--(max-|\w+-max-)", flag) and option.fate != "refused"}
    of_the_engine = {"--max-num-batched-tokens", "--max-in-flight", "--max-log-len", "--max-parallel-loading-workers", "--max-seq-len-to-capture", "--max-context-len-to-capture"}
    assert bounds - of_the_engine <= shown.keys()
    first = PAGE.partition("These bound what is kept")[0]
    assert set(re.findall(r"^\| `(--[a-z-]+)`", first, re.MULTILINE)) == {cap.flag for cap in CAPS} | set(KEPT)
