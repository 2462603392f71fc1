"""Hub names, against an endpoint on the loopback interface that speaks as much of the hub's protocol as fetching needs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

MAIN, DEV = "a" * 40, "b" * 40
CONFIG = json.dumps(
    {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 4}
)
FILES = {
    "config.json": CONFIG.encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 64,
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
    "modeling_evil.py": b"not wanted",
    "README.md": b"not wanted",
}
LARGE = bytes(range(256)) * (12 << 12)
REPOS: dict[str, dict[str, dict[str, bytes]]] = {
    "org/small": {MAIN: FILES, DEV: {**FILES, "config.json": CONFIG.replace("8", "16").encode()}},
    "org/torch": {MAIN: {"config.json": FILES["config.json"], "pytorch_model.bin": b"weights", "training_args.bin": b"not wanted"}},
    "org/files": {MAIN: {"a.Q4.gguf": b"GGUF....", "b.Q8.gguf": b"GGUF...."}},
    "org/private": {MAIN: FILES},
    "org/large": {MAIN: {"config.json": FILES["config.json"], "model.safetensors": LARGE}},
}


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, str]] = []  # method, path, range
        self.break_after: int | None = None  # bytes of a body after which the connection is cut
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.split("/")
        if path.startswith("api/models/"):
            self.api("/".join(parts[2:4]), parts[4:])
        else:
            self.file("/".join(parts[:2]), parts[3] if len(parts) > 4 else "", "/".join(parts[4:]))

    def repo(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if name == "org/gated":
            self.reply(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "accept the terms"})
        elif name not in REPOS or name == "org/private" and self.headers.get("Authorization") != "Bearer sesame":
            self.reply(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        else:
            sha = {"main": MAIN, "dev": DEV}.get(revision, revision)
            if sha in REPOS[name]:
                return sha, REPOS[name][sha]
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Revision not found"})
        return None

    def api(self, name: str, rest: list[str]) -> None:
        found = self.repo(name, rest[1] if len(rest) > 1 else "main")
        if found is None:
            return
        sha, files = found
        if rest[:1] == ["tree"]:
            body: Any = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for file, data in files.items()
            ]
        else:
            body = {
                "id": name,
                "modelId": name,
                "sha": sha,
                "siblings": [{"rfilename": file} for file in files],
                "tags": [],
                "private": False,
            }
        self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def file(self, name: str, revision: str, file: str) -> None:
        found = self.repo(name, revision)
        if found is None:
            return
        sha, files = found
        if file not in files:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        data = files[file]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]) if "Range" in self.headers else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.reply(206 if start else 200, data[start:], headers)

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.server.break_after
        if limit is not None and len(body) > limit:
            self.wfile.write(body[:limit])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(body)


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


@pytest.fixture
def hub(server: Hub) -> Hub:
    server.requests.clear()
    server.break_after = None
    return server


SCRIPT = """
import json, sys
from oarlock.config.sections import ModelConfig
from oarlock.errors import OarlockError
from oarlock.hub import resolve_model
for fields in json.loads(sys.argv[1]):
    try:
        print("OK", resolve_model(ModelConfig(**fields)))
    except OarlockError as error:
        print(type(error).__name__, error)
"""


def fetch(hub: Hub, cache: Path, *configs: dict[str, Any], **env: str) -> list[str]:
    """One line for each config: OK and the path, or the error. In a process of its own: the client reads its environment once."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    clean |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(configs)], check=False, env=clean, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_fetches_settings_and_one_kind_of_weights_then_works_offline(hub: Hub, tmp_path: Path) -> None:
    (line,) = fetch(hub, tmp_path, {"model": "org/small"})
    folder = Path(line.removeprefix("OK "))
    assert sorted(file.name for file in folder.rglob("*") if file.is_file()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.requests.clear()
    assert fetch(hub, tmp_path, {"model": "org/small"}, HF_HUB_OFFLINE="1") == [line]
    assert hub.requests == []
    (absent,) = fetch(hub, tmp_path, {"model": "org/torch"}, HF_HUB_OFFLINE="1")
    assert absent.startswith("ModelError model org/torch was not fetched before") and "unset HF_HUB_OFFLINE" in absent
    dead = "http://127.0.0.1:9"
    assert fetch(hub, tmp_path, {"model": "org/small"}, HF_ENDPOINT=dead) == [line]
    (unreachable,) = fetch(hub, tmp_path, {"model": "org/torch"}, HF_ENDPOINT=dead)
    assert "check the network and HF_ENDPOINT" in unreachable


def test_a_revision_is_fetched_beside_the_default_one(hub: Hub, tmp_path: Path) -> None:
    main, dev, absent = fetch(
        hub, tmp_path, {"model": "org/small"}, {"model": "org/small", "revision": "dev"}, {"model": "org/small", "revision": "no"}
    )
    assert json.loads((Path(main.removeprefix("OK ")) / "config.json").read_text())["hidden_size"] == 8
    assert json.loads((Path(dev.removeprefix("OK ")) / "config.json").read_text())["hidden_size"] == 16
    assert absent.startswith("ModelError model org/small has no revision no")


def test_what_the_hub_refuses_is_said_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    absent, gated, private, files = fetch(
        hub, tmp_path, {"model": "org/absent"}, {"model": "org/gated"}, {"model": "org/private"}, {"model": "org/files"}
    )
    assert (
        absent
        == f"ModelError model org/absent: no such file or folder, and {hub.url} has no such model, or a private one (then set HF_TOKEN)"
    )
    assert gated.startswith("ModelError model org/gated is gated: accept its terms at") and "HF_TOKEN" in gated
    assert private.startswith("ModelError") and "set HF_TOKEN" in private
    assert files == "ModelError org/files holds GGUF files; name one of them: org/files/a.Q4.gguf, org/files/b.Q8.gguf"
    (allowed,) = fetch(hub, tmp_path, {"model": "org/private"}, HF_TOKEN="sesame")
    assert allowed.startswith("OK ")


def test_other_kinds_of_files(hub: Hub, tmp_path: Path) -> None:
    one, torch_files, dummy, wrong = fetch(
        hub,
        tmp_path,
        {"model": "org/files/b.Q8.gguf"},
        {"model": "org/torch", "download_dir": str(tmp_path / "other")},
        {"model": "org/torch", "load_format": "dummy"},
        {"model": "org/small", "load_format": "pt"},
    )
    assert one.startswith("OK ") and one.endswith("b.Q8.gguf")
    folder = Path(torch_files.removeprefix("OK "))
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "pytorch_model.bin"] and folder.is_relative_to(
        tmp_path / "other"
    )
    assert [file.name for file in Path(dummy.removeprefix("OK ")).iterdir()] == ["config.json"]
    assert wrong == "ModelError org/small has no weights for --load-format pt"


def test_a_cut_connection_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.break_after = 11 << 20  # the client keeps what it has in units of 10 MiB
    (line,) = fetch(hub, tmp_path, {"model": "org/large"})
    assert (Path(line.removeprefix("OK ")) / "model.safetensors").read_bytes() == LARGE
    spans = [span for method, path, span in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert spans[0] == "" and spans[1].startswith(f"bytes={10 << 20}-")


def test_a_failed_download_keeps_the_files_that_are_complete(hub: Hub, tmp_path: Path) -> None:
    hub.break_after = 9000
    (broken,) = fetch(hub, tmp_path, {"model": "org/small"})
    assert broken.startswith("ModelError model org/small could not be fetched") and "run the same command again" in broken
    hub.break_after = None
    hub.requests.clear()
    (line,) = fetch(hub, tmp_path, {"model": "org/small"})
    assert (Path(line.removeprefix("OK ")) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "resolve" in path] == ["model.safetensors"]
