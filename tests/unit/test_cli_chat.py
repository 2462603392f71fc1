"""`oarlock chat` and `oarlock complete` with a server, typed and piped."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import FakeServer
from oarlock.cli.answers import base_url
from oarlock.cli.main import main
from oarlock.cli.sse import EventReader, error_of_response, read_chunk
from tied import tied


class Terminal(io.StringIO):
    """Input that says it is typed; an exception in it is raised in its turn."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`typed("line", KeyboardInterrupt, ...)`: what the user does, line by line; then the end of the input."""

    def type_lines(*lines: Any) -> None:
        coming: Iterator[Any] = iter(lines)

        def read(prompt: str = "") -> str:
            line = next(coming, EOFError)
            if isinstance(line, type):
                raise line
            return str(line)

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", Terminal())

    return type_lines


def piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def conversations(server: FakeServer) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in seen.body["messages"]] for seen in server.completions()]


# ---------------------------------------------------------------- chat
def test_a_conversation_keeps_its_history(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed("hello", "again")
    with FakeServer(pieces=("Hi", " there")) as server:
        assert main(["chat", "--url", server.url, "--system", "Be brief.", "--temperature", "0", "--max-tokens", "9"]) == 0
    assert conversations(server) == [
        [("system", "Be brief."), ("user", "hello")],
        [("system", "Be brief."), ("user", "hello"), ("assistant", "Hi there"), ("user", "again")],
    ]
    body = server.completions()[0].body
    del body["messages"]
    assert body == {"model": "toy", "stream": True, "temperature": 0.0, "max_tokens": 9}
    assert capsys.readouterr().out == "Hi there\nHi there\n"


def test_commands_change_the_conversation(typed: Any) -> None:
    typed("one", "/undo", "two", "/system Be kind.", "three", "/clear", "four", "/system", "/nonsense", "five", "/exit", "six")
    with FakeServer(pieces=("a",)) as server:
        assert main(["chat", "--url", server.url]) == 0
    assert conversations(server) == [
        [("user", "one")],
        [("user", "two")],
        [("system", "Be kind."), ("user", "two"), ("assistant", "a"), ("user", "three")],
        [("system", "Be kind."), ("user", "four")],
        [("user", "four"), ("assistant", "a"), ("user", "five")],
    ]


def test_a_line_may_go_on_and_an_interrupt_forgets_it(typed: Any) -> None:
    typed("dropped \\", KeyboardInterrupt, "first \\", "second", "   ")
    with FakeServer() as server:
        assert main(["chat", "--url", server.url]) == 0
    assert conversations(server) == [[("user", "first \nsecond")]]


def test_an_error_is_shown_and_the_question_forgotten(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed("one", "two", "three")
    with FakeServer(failing=range(2, 3)) as server:
        assert main(["chat", "--url", server.url]) == 0
    assert conversations(server)[2] == [("user", "one"), ("assistant", "abc"), ("user", "three")]
    shown = capsys.readouterr()
    assert shown.out == "abc\nabc\n"
    assert f"error: {server.url} answered 500: fault 500" in shown.err and "Traceback" not in shown.err


def test_an_answer_that_breaks_off_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for script, words in (({"done": False}, "the connection ended before the answer did"), ({"error_event": True}, "the engine has ended")):
        piped(monkeypatch, "hello")
        with FakeServer(**script) as server:
            assert main(["chat", "--url", server.url]) == 1
        shown = capsys.readouterr()
        assert shown.out == "abc\n" and words in shown.err


def test_piped_text_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    piped(monkeypatch, "line one\nline two\n")
    with FakeServer(pieces=("é", "🎉"), bytes_at_once=1) as server:
        assert main(["chat", "--url", server.url + "/v1/"]) == 0
    assert conversations(server) == [[("user", "line one\nline two")]]
    assert capsys.readouterr().out == "é🎉\n"


def test_ctrl_c_ends_the_answer_and_not_the_program() -> None:
    """In a process of its own with a real terminal: the signal arrives in the middle of an answer."""
    import pty

    with FakeServer(pieces=("word ",) * 300, gap_s=0.02) as server:
        leader, follower = pty.openpty()
        command = [sys.executable, "-m", "oarlock.cli.main", "chat", "--url", server.url]
        process = subprocess.Popen(tied(command), stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
        os.close(follower)
        try:
            read_until(leader, b"> ")
            os.write(leader, b"hello\n")
            read_until(leader, b"word word")
            process.send_signal(signal.SIGINT)
            assert b"(stopped)" in read_until(leader, b"> ")
            server.script.pieces = ("fine",)
            os.write(leader, b"still there?\n")
            read_until(leader, b"fine")
            os.write(leader, b"/exit\n")
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
            os.close(leader)
    first, second = conversations(server)
    assert first == [("user", "hello")]
    assert second[0] == ("user", "hello") and second[1][0] == "assistant" and second[1][1].startswith("word word")
    assert second[2] == ("user", "still there?")


def read_until(fd: int, words: bytes, timeout_s: float = 20.0) -> bytes:
    seen, deadline = b"", time.monotonic() + timeout_s
    while words not in seen:
        assert time.monotonic() < deadline, seen
        seen += os.read(fd, 4096)
    return seen


# ---------------------------------------------------------------- complete
def test_complete_continues_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert main(["complete", "The end", "--url", server.url, "--seed", "7", "--stop", "x", "--stop", "y", "--model", "m", "--echo"]) == 0
    (seen,) = server.seen  # a named model is not looked up
    assert seen.path == "/v1/completions"
    assert seen.body == {"model": "m", "prompt": "The end", "max_tokens": 128, "seed": 7, "stop": ["x", "y"], "stream": True}
    assert capsys.readouterr().out == "The endabc\n"


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_complete_reads_a_pipe(argument: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, "from a pipe\n")
    with FakeServer() as server:
        assert main(["complete", *argument, "--url", server.url]) == 0
    assert server.completions()[0].body["prompt"] == "from a pipe"


# ---------------------------------------------------------------- both
def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(key="secret-1") as server:
        assert main(["complete", "x", "--url", server.url, "--api-key", "secret-1"]) == 0
        assert main(["complete", "x", "--url", server.url, "--api-key", "secret-2"]) == 1
        assert main(["complete", "x", "--url", server.url, "--api-key", "secret-\u00e9"]) == 2
        monkeypatch.setenv("OARLOCK_API_KEY", "secret-1")
        assert main(["complete", "x", "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err
    assert "401: no valid key (give the key with --api-key" in shown.err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["complete", "a", "b"], 2, "the text came as 2 arguments; put it in quotes"),
        (["complete", ""], 2, "empty"),
        (["complete", "x", "--top-k", "many"], 2, "--top-k"),
        (["complete", "x", "--seed", "many"], 2, "--seed many: must be a whole number"),
        (["complete", "x", "--url", "ftp://host"], 2, "--url ftp://host: give the address of a server"),
        (["complete", "x", "--url", "http://127.0.0.1:1", "--dtype", "float32"], 2, "--dtype is for a model that is loaded here"),
        (["complete", "x", "--model", "m", "--api-key", "k"], 2, "--api-key is for a server"),
        (["complete", "x", "--num-beams", "2"], 2, "--num-beams"),
        (["complete", "x", "--url", "http://127.0.0.1:1"], 1, "no server answers at http://127.0.0.1:1"),
        (["chat"], 2, "the message on standard input is empty"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, "\n")
    assert main(argv) == code
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(["complete", "--url", "http://127.0.0.1:1"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:80", "http://127.0.0.1:80/", "http://127.0.0.1:80/v1", "http://127.0.0.1:80/v1/"])
def test_addresses_may_be_written_in_several_ways(url: str) -> None:
    assert base_url(url) == "http://127.0.0.1:80"


# ---------------------------------------------------------------- events
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    stream = ': comment\r\n\r\ndata: {"a": "é"}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n'.encode()
    reader, found = EventReader(), []
    for at in range(0, len(stream), size):
        found += reader.feed(stream[at : at + size])
    assert found == ['{"a": "é"}', "two\nlines", "[DONE]"]


@pytest.mark.parametrize(
    ("payload", "text", "error"),
    [
        ('{"choices": [{"text": "x"}]}', "x", None),
        ('{"choices": [{"delta": {"content": "x"}}]}', "x", None),
        ('{"choices": [{"delta": {"content": null, "reasoning_content": "r"}}]}', "r", None),
        ('{"choices": [{"delta": {}, "finish_reason": "stop"}]}', "", None),
        ('{"choices": []}', "", None),
        ('{"error": {"message": "m"}}', "", "m"),
        ('{"error": "m"}', "", "m"),
        ("nonsense", "", "not JSON"),
        ("[1]", "", "no object"),
    ],
)
def test_chunks(payload: str, text: str, error: str | None) -> None:
    chunk = read_chunk(payload)
    assert chunk.text == text
    assert (chunk.error is None) if error is None else (error in chunk.error)


@pytest.mark.parametrize(
    ("body", "line"),
    [(b"", "502"), (b"<html>\n bad\n gateway", "502: <html> bad gateway"), (b'{"detail": "d"}', "502: d"), (b'{"error": {"message": "m"}}', "502: m")],
)
def test_error_responses_of_any_server(body: bytes, line: str) -> None:
    assert error_of_response(502, body) == line
