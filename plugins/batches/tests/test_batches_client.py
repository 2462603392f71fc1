"""OpenAI's own Python client against a real server over the null device, and `oarlock run-batch` over the same model."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from real_server import RealServer, null_server, openai_client
from tiny_model import make_tiny_model

KEY = "batches-key"
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with null_server(model, KEY, "--max-body-bytes", "100000", log=tmp_path_factory.mktemp("log") / "server.log") as started:
        yield started


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai_client(server, KEY) as made:
        yield made


def request(custom_id: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": custom_id}]} if url == CHAT else {"prompt": custom_id}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", "max_tokens": 6, **prompt, **fields}}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_a_batch_from_upload_to_download(client: openai.OpenAI) -> None:
    lines = [request(f"r{n}") for n in range(12)] + [request("bad", top_p=7)]
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    assert [one.id for one in client.files.list()] == [file.id] and client.files.content(file.id).content == jsonl(lines)
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "tests"})
    deadline = time.monotonic() + 30
    while batch.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.request_counts is not None and batch.output_file_id and batch.error_file_id
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (13, 12, 1)
    assert [one.id for one in client.batches.list()] == [batch.id]
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        own = client.chat.completions.create(model="tiny", max_tokens=6, messages=[{"role": "user", "content": answer["custom_id"]}])
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == own.choices[0].message.content
    assert json.loads(client.files.content(batch.error_file_id).text)["custom_id"] == "bad"
    for one in client.files.list():
        client.files.delete(one.id)
    assert not list(client.files.list())


def test_wrong_key_and_large_file_and_cancel(client: openai.OpenAI, server: RealServer) -> None:
    with openai.OpenAI(api_key="wrong", base_url=f"{server.base_url}/v1", max_retries=0) as wrong, pytest.raises(openai.AuthenticationError):
        wrong.files.create(file=("in.jsonl", b"x"), purpose="batch")
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch")
    assert caught.value.status_code == 413
    file = client.files.create(file=("in.jsonl", jsonl([request(f"r{n}", max_tokens=1900) for n in range(200)])), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    deadline = time.monotonic() + 10
    while client.batches.retrieve(batch.id).status != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run_batch(*arguments: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oarlock.cli.main", "run-batch", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "OARLOCK_API_KEY": "of the user"}, **settings)


def test_run_batch_answers_a_file(model: Path, tmp_path: Path, client: openai.OpenAI) -> None:
    lines = [request(f"r{n}", CHAT if n % 2 else PLAIN) for n in range(40)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(lines[:20]) + b"\nnonsense\n" + jsonl(lines[20:]) + jsonl([request("bad", n=0), {**request("url"), "url": "/metrics"}]))
    target.write_text("old")
    done = run_batch("-i", source, "-o", target, "--concurrency", 4, model, "--device", "null", "--served-model-name", "tiny")
    assert done.returncode == 1 and "43 requests: 40 answered, 3 refused or failed" in done.stderr, done.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [*(f"r{n}" for n in range(20)), None, *(f"r{n}" for n in range(20, 40)), "bad", "url"]
    assert answers[20]["response"] is None and "JSON" in answers[20]["error"]["message"]
    assert answers[41]["response"]["status_code"] == 400 and answers[41]["response"]["body"]["error"]["param"] == "n"
    assert answers[42]["error"]["code"] == "invalid_line" and answers[42]["response"] is None
    own = client.completions.create(model="tiny", max_tokens=6, prompt="r2")
    assert answers[2]["response"]["body"]["choices"][0]["text"] == own.choices[0].text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_run_batch_of_good_lines_ends_with_0(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl([request("one"), request("two")]))
    done = run_batch("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--model", model, "--device", "null", "--served-model-name", "tiny")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_run_batch_leaves_the_old_output_when_the_disk_is_full(model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([request(f"r{at}") for at in range(60)]))
    target.write_text("old")

    def a_file_has_no_more() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))

    done = run_batch("-i", source, "-o", target, model, "--device", "null", "--served-model-name", "tiny", preexec_fn=a_file_has_no_more)
    assert done.returncode == 1 and "File too large; no answer was written" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert target.read_text() == "old" and sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_run_batch_leaves_the_old_output_when_its_server_cannot_start(model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([request("one")]))
    target.write_text("old")
    done = run_batch("-i", source, "-o", target, model, "--device", "null", "--max-model-len", "999999999")
    assert done.returncode == 1 and "the server ended with exit code" in done.stderr and target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    for arguments, word in (
        (("-i", tmp_path / "none", "-o", target), "no such file"),
        (("-i", source, "-o", tmp_path / "none" / "out"), "no such folder"),
        (("-i", source, "-o", target, "--concurrency", 0), "--concurrency"),
        (("-i", source, "-o", target, "--port", 80), "--port"),
        (("-i", source), "--output-file"),
    ):
        done = run_batch(*arguments)
        assert done.returncode == 2 and word in done.stderr, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_batch_takes_its_server_along(model: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl([request("one", max_tokens=1900)] * 5000))
    command = [sys.executable, "-m", "oarlock.cli.main", "run-batch", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", model]
    process = subprocess.Popen([*command, "--device", "null", "--served-model-name", "tiny"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert any("ready after" in line for line in process.stderr)
    process.send_signal(number)
    assert process.wait(40) == (130 if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 40
    while left := [pid for pid in os.listdir("/proc") if pid.isdigit() and session_of(pid) == process.pid]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    process.stderr.close()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".jsonl"] == ["in.jsonl"]


def session_of(pid: str) -> int:
    """Of a living process; 0 of others."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[3])


def test_the_command_is_listed() -> None:
    shown = subprocess.run([sys.executable, "-m", "oarlock.cli.main", "--help"], capture_output=True, text=True, check=True).stdout
    assert "run-batch" in shown
