"""What docs/security.md promises of a request: no key, no answer; no address in it is connected to, no path in it is opened, nothing in it is run."""

from __future__ import annotations

import contextlib
import copy
import hmac
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from mutations import _places
from oarlock.config.options import BY_NAME, plugin_options
from oarlock.config.sections import ServerConfig
from oarlock.engine.process_client import _socket_folder
from oarlock.server.gate import OPEN_PATHS, Keys
from oarlock.server.routes import add_plugin_routes
from real_server import RealServer
from starlette.routing import Route
from test_odd_values import BODIES, post
from tiny_model import make_tiny_model
from toy_frontend import says
from toy_server import Toy, toy_server

KEY = "a-key-of-the-operator"
EVENTS: list[tuple[str, str]] = []  # what the interpreter was about to do, while somebody listens
LISTENING = threading.Event()
REACHING_OUT = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn", "ctypes.dlopen", "pickle.find_class", "urllib.Request", "ftplib.connect")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if LISTENING.is_set() and (event in REACHING_OUT or event in ("open", "import", "exec", "compile") or event.startswith(("os.", "shutil.", "glob.", "pathlib."))):
        EVENTS.append((event, repr(arguments)[:2000]))


@pytest.fixture(scope="module")
def audited() -> Iterator[None]:
    sys.addaudithook(_hook)  # there is no way to take it away again
    yield
    LISTENING.clear()


@contextlib.contextmanager
def listened() -> Iterator[list[tuple[str, str]]]:
    EVENTS.clear()
    LISTENING.set()
    try:
        yield EVENTS
    finally:
        LISTENING.clear()


@contextlib.asynccontextmanager
async def whole_server(**server: Any) -> Any:
    """Core's routes and those of every installed plugin, in this process."""
    options = {name.replace("-", "_"): option.default for name, option in plugin_options(BY_NAME).items()}
    config = ServerConfig(tool_call_parser="hermes", enable_auto_tool_choice=True, **server)
    async with toy_server(says("hello"), server=config, options=options) as toy:
        add_plugin_routes(toy.app, "null")
        yield toy


def routes_of(toy: Toy) -> set[tuple[str, str]]:
    """(method, path) of every route that the application has, in its schema or not."""
    found = set()
    waiting = list(toy.app.routes)
    while waiting:
        route = waiting.pop()
        if isinstance(route, Route):
            found |= {(method, route.path) for method in route.methods or ()}
        else:
            waiting += getattr(route, "routes", ())
            found.add(("GET", getattr(route, "path", "/a-mount")))
    return found


@pytest.mark.asyncio
async def test_every_route_but_three_asks_for_the_key() -> None:
    async with whole_server(api_keys=(KEY,)) as toy:
        routes = routes_of(toy)
        assert {path for _, path in routes} >= {"/v1/responses", "/v1/messages", "/v1/files", "/v1/batches/{batch_id}", "/openapi.json", "/metrics", "/"}
        opened = set()
        for method, path in sorted(routes):
            asked = "/".join("x" if part.startswith("{") else part for part in path.split("/"))
            wrong = ({}, {"Authorization": f"Bearer {KEY[:-1]}"}, {"Authorization": KEY}, {"Cookie": f"key={KEY}"}, {"Authorization": "Basic Og=="}, {"X-API-Key": "no"})
            statuses = {(await toy.http.request(method, f"{asked}?api_key={KEY}&key={KEY}", headers=headers)).status_code for headers in wrong}
            if 401 in statuses:
                assert statuses == {401}, (method, path)
            else:
                opened.add(path)
            assert (await toy.http.request(method, asked, headers={"Authorization": f"Bearer {KEY}"})).status_code != 401
        assert opened == OPEN_PATHS == {"/health", "/ping", "/version"}


def test_comparing_keys_takes_the_same_steps_whatever_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    keys = Keys((KEY, "another", "x" * 500))
    for sent, number in ((KEY, 0), ("another", 1), (KEY[:-1], None), (KEY + "x", None), ("x", None), ("x" * 499, None), ("é", None), ("x" * 100_000, None)):
        compared.clear()
        assert keys.find(sent.encode()) == number
        assert compared == [(32, 32)] * 3, "every key, as a digest of one length, whether it was found or not"
    assert keys.find(b"", b"") is None and keys.find() is None
    assert KEY not in repr(vars(keys)) and KEY not in repr(keys)


@contextlib.contextmanager
def trap() -> Iterator[tuple[int, list[Any]]]:
    """(port, who connected) of a listener that nobody should find."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as sock:
        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, address = sock.accept()
                    came.append(address)
                    connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield sock.getsockname()[1], came


def planted(canary: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every body with the canary in one of its places."""
    for path, body in BODIES:
        for at in range(len(_places(body))):
            tree = copy.deepcopy(body)
            container, key = _places(tree)[at]
            container[key] = canary
            yield path, tree


@pytest.mark.asyncio
async def test_no_path_and_no_address_of_a_request_is_followed(audited: None, tmp_path: Path) -> None:
    """The interpreter itself says what is opened, connected to and started while requests name files and addresses everywhere."""
    secret = tmp_path / "canary.txt"
    secret.write_text("a secret of the operator's")
    with trap() as (port, came):
        canaries = [str(secret), f"file://{secret}", f"../../../../..{secret}", f"http://127.0.0.1:{port}/canary", f"//127.0.0.1:{port}/canary"]
        async with whole_server() as toy:
            routes = sorted(routes_of(toy))
            for warm_up in BODIES:  # what is imported and opened once
                await post(toy, *warm_up)
            await toy.http.get("/openapi.json")
            with listened() as events:
                for canary in canaries:
                    for path, body in planted(canary):
                        await post(toy, path, body)
                    for method, path in routes:
                        for sent in (quote(canary, safe=""), quote(canary)):
                            asked = "/".join(sent if part.startswith("{") else part for part in path.split("/"))
                            await toy.http.request(method, f"{asked}?file={sent}&prompt={sent}&after={sent}", headers={"X-Request-Id": canary, "Referer": canary})
                    form = f'--B\r\nContent-Disposition: form-data; name="file"; filename="{canary}"\r\n\r\n{canary}\r\n--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B--\r\n'
                    await toy.http.post("/v1/files", content=form, headers={"Content-Type": "multipart/form-data; boundary=B"})
            followed = [event for event in events if event[0] in REACHING_OUT or "canary" in event[1] or event[0] == "open"]
            assert followed == []
            assert came == []


def test_the_audit_would_see_it(audited: None, tmp_path: Path) -> None:
    (tmp_path / "canary.txt").write_text("x")
    with trap() as (port, came), listened() as events:
        (tmp_path / "canary.txt").read_text()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert connection.recv(1) == b"" and came
    seen = {event for event, _ in events}
    assert {"open", "socket.connect"} <= seen and any("canary" in arguments for _, arguments in events)


SOURCES = ("__import__('os').system('touch {}')", "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}", "{{% include '{}' %}}", "%import {}", "%include \"{}\"", "$(touch {})", "`touch {}`")


def schemas(path: str, url: str) -> list[dict[str, Any]]:
    """Constraints that name a file or an address."""
    refs = [{"$ref": url}, {"$ref": f"file://{path}"}, {"$schema": url, "type": "string"}, {"$id": url, "type": "object"}, {"allOf": [{"$ref": f"{url}#/x"}]}, {"$dynamicRef": url}]
    grammars = [f'%import {path}\nstart: "a"', f'%import common.{path}\nstart: "a"', f'start: "a" %import {url}', f'start: %include "{path}"', f"start: @{path}"]
    tags = [{"structures": [{"begin": "<", "schema": {"$ref": url}, "end": ">"}], "triggers": ["<"]}]
    return [*({"guided_json": ref} for ref in refs), *({"guided_grammar": text} for text in grammars), *({"structural_tag": tag} for tag in tags)]


def test_grammars_and_messages_follow_no_address_and_open_no_file(tmp_path: Path) -> None:
    """The processes of grammars are others than this one, so what they do is seen from outside: a pipe that nobody opens, a listener that nobody finds."""
    pipe, touched = tmp_path / "pipe", tmp_path / "touched"
    os.mkfifo(pipe)
    model = make_tiny_model(tmp_path / "tiny")
    with trap() as (port, came), RealServer(model, "--device", "null", "--served-model-name", "tiny", "--grammar-time", "3", log=tmp_path / "log", defaults=()) as server:
        server.model, url = "tiny", f"http://127.0.0.1:{port}/x"
        base = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for backend in ("llguidance", "outlines", "lm-format-enforcer"):
            for fields in schemas(str(pipe), url)[: None if backend == "llguidance" else 2]:  # the others take schemas alone
                response = server.post("/v1/chat/completions", {**base, **fields, "guided_decoding_backend": backend})
                assert response.status_code in (200, 400), response.text
        parts = (
            {"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}, {"type": "file", "file": {"file_data": f"file://{pipe}"}}, {"type": "document", "source": {"type": "url", "url": url}},
            {"type": "video_url", "video_url": {"url": f"file://{pipe}"}}, {"type": "image", "source": {"type": "file", "path": str(pipe)}}, {"type": "input_file", "file_url": url},
        )  # fmt: skip
        for part in parts:
            for path, name in (("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
                body = {"model": "tiny", name: [{"role": "user", "content": [part]}], **({} if name == "input" else {"max_tokens": 2})}
                assert server.post(path, body).status_code == 400
        for text in SOURCES:
            sent = text.format(touched)
            for fields in ({"chat_template": sent}, {"chat_template_kwargs": {"messages": sent}}, {"messages": [{"role": "user", "content": sent}]}, {"stop": sent}, {"user": sent}):
                assert server.post("/v1/chat/completions", {**base, **fields}).status_code in (200, 400)
        with pytest.raises(OSError, match="No such device"):  # ENXIO: nobody reads it, and nobody waits to
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        assert came == [] and not touched.exists()
        server.alive()


@pytest.mark.asyncio
async def test_templates_of_requests_run_in_a_sandbox_where_they_are_allowed() -> None:
    attacks = (
        "{{ ''.__class__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__class__ }}", "{{ cycler.__init__.__globals__ }}", "{{ self.__init__.__globals__ }}",
        "{% set x = messages.append(1) %}", "{{ raise_exception.__globals__ }}", "{% include '/etc/passwd' %}", "{% import 'os' as x %}", "{{ ().__class__.__base__ }}", "{{ lipsum.__globals__['os'] }}",
    )  # fmt: skip
    async with whole_server(allow_request_chat_template=True) as toy:
        for attack in attacks:
            response = await toy.chat(chat_template=attack)
            if response.status_code == 200:  # what a sandbox does not give is empty
                assert all(token > 255 for token in toy.engine.submitted[-1].prompt_token_ids), attack  # special tokens, no text
            else:
                assert response.status_code == 400, attack
    async with whole_server() as toy:
        assert (await toy.chat(chat_template="{{ messages }}")).status_code == 400


def test_sockets_between_our_processes_are_the_owners_alone() -> None:
    folder = Path(_socket_folder())
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        folder.rmdir()
