"""Where the terminal's answers come from: a running server, or a model loaded into this process. Both give text piece by piece.

Owns: the two sources, the flags that choose one, and the wording of their errors.
Reads: `config`, `engine.launch`, `frontend`, `cli.sse`.
Never: prints an answer or a key; loads a model when a server was named.
"""

from __future__ import annotations

import abc
import ipaddress
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from oarlock.cli.sse import DONE, EventReader, error_of_response, read_chunk
from oarlock.config.parser import Parser, make_parser, parse
from oarlock.errors import ConfigError, EngineDead, OarlockError

DEFAULT_URL, UNIX = "http://127.0.0.1:8000", "unix:"
KEY_VARIABLES = ("OARLOCK_API_KEY", "VLLM_API_KEY")
CONNECT_S = 10.0
START_ONE = "start one with `oarlock serve MODEL`, name another with --url, or load a model here with --model MODEL"
READ_S = 60.0  # of the list of models; an answer may take as long as it takes
# Keyword -> (type, help) of the sampling fields that can be typed; only what was typed is sent.
SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "longest answer, in tokens"),
    "temperature": (float, "0: always the most probable token"),
    "top_p": (float, "keep the most probable tokens that together have this probability"),
    "top_k": (int, "keep the k most probable tokens"),
    "min_p": (float, "keep tokens with at least this share of the best one's probability"),
    "repetition_penalty": (float, "above 1: discourage tokens that occurred"),
}


Answer = Generator[str, None, None]  # the pieces of a text; closing it ends the answer


class AnswerError(OarlockError):
    """An answer could not be had; the message says why."""


class Source(abc.ABC):
    """Streams answers. A context manager."""

    name: str  # of the model

    @abc.abstractmethod
    def chat(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> Answer:
        """The pieces of the answer to a conversation. Raises OarlockError; KeyboardInterrupt ends the answer and leaves the source usable."""

    @abc.abstractmethod
    def complete(self, prompt: str, fields: dict[str, Any]) -> Answer:
        """The pieces that continue a text. Raises as `chat` does."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# ---------------------------------------------------------------- a server
def base_url(url: str) -> str:
    """`localhost:8000/v1/` as `http://localhost:8000`; `unix:/run/oarlock.sock`, as --uds names a socket, stays.

    Raises:
        ConfigError: it is no http or https address, and no socket.
    """
    if url.startswith(UNIX) and len(url) > len(UNIX):
        return url
    text = url if "://" in url else f"http://{url}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: give the address of a server such as {DEFAULT_URL}", "url")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def connection_settings(url: str, transport: type[Any] = httpx.HTTPTransport) -> dict[str, Any]:
    """What an HTTP client needs for this address: no proxy for this machine itself, no certificates (slow to load) for plain http, and
    the way to a socket by `transport`.
    """
    if url.startswith(UNIX):
        return {"base_url": "http://localhost", "transport": transport(uds=url.removeprefix(UNIX))}
    host = urlsplit(url).hostname or ""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return {"base_url": url, "trust_env": not is_loopback, "verify": url.startswith("https:")}


def refused(url: str, status: int, body: bytes) -> AnswerError:
    """What is raised for an answer that is no success."""
    text = error_of_response(status, body)
    if status == 401:
        text += f" (give the key with --api-key, or in {KEY_VARIABLES[0]})"
    return AnswerError(f"{url} answered {text}")


def key_headers(typed: str | None) -> dict[str, str]:
    """The header with the key that was typed, else the environment's; {} without one.

    Raises:
        ConfigError: no header can carry it. The key is not repeated.
    """
    key = typed or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key holds characters that an HTTP header cannot carry; it must be printable ASCII", "api-key")
    return {"Authorization": f"Bearer {key}"}


class ServerSource(Source):
    """Any server with the OpenAI API."""

    def __init__(self, url: str, model: str | None, key: str | None, remedy: str = START_ONE) -> None:
        """`remedy`: what to do when no server answers there. Raises ConfigError, AnswerError."""
        self.url, self._remedy = base_url(url), remedy
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._http = httpx.Client(headers=key_headers(key), timeout=timeout, **connection_settings(self.url))
        try:
            self.name = model or self._first_model()
        except BaseException:
            self._http.close()
            raise

    def _first_model(self) -> str:
        with self._reporting():
            response = self._http.get("/v1/models", timeout=READ_S)
        if response.status_code != 200:
            raise refused(self.url, response.status_code, response.content)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise AnswerError(f"{self.url}/v1/models lists no model; name one with --model") from None

    def chat(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> Answer:
        return self._stream("/v1/chat/completions", {"model": self.name, "messages": messages, **fields})

    def complete(self, prompt: str, fields: dict[str, Any]) -> Answer:
        return self._stream("/v1/completions", {"model": self.name, "prompt": prompt, **fields})

    def _stream(self, path: str, body: dict[str, Any]) -> Answer:
        with self._reporting(), self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise refused(self.url, response.status_code, response.read())
            reader, is_done = EventReader(), False
            for piece in response.iter_bytes():
                for payload in reader.feed(piece):
                    if payload == DONE:
                        is_done = True
                        continue
                    chunk = read_chunk(payload)
                    if chunk.error is not None:
                        raise AnswerError(f"the server ended the answer: {chunk.error}")
                    if chunk.text:
                        yield chunk.text
            if not is_done:
                raise AnswerError("the connection ended before the answer did")

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            reason = f"no server answers at {self.url} ({error})"
            raise AnswerError(f"{reason}; {self._remedy}") from None
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise AnswerError(f"the connection to {self.url} failed: {error or type(error).__name__}") from None

    def close(self) -> None:
        self._http.close()


# ---------------------------------------------------------------- this process
class LocalSource(Source):
    """A model in this process. Steps run on the calling thread; an interrupt is noticed between two of them."""

    def __init__(self, values: dict[str, Any]) -> None:
        from oarlock.config.resolve import resolve
        from oarlock.engine.launch import launch_inprocess
        from oarlock.frontend.inputs import InputLimits, InputProcessor, default_sampling_fields
        from oarlock.frontend.outputs import OutputProcessor
        from oarlock.frontend.tokenizer import load_tokenizer
        from oarlock.model_summary import load_summary
        from oarlock.plugins import select_device

        config = resolve(values, origin="cli").engine
        if config.model.skip_tokenizer_init:
            raise ConfigError("--skip-tokenizer-init: the terminal needs the tokenizer", "skip-tokenizer-init")
        if config.observability.log_level != "info" or config.observability.log_json:  # typed: else only warnings are shown
            from oarlock.logs import configure_logging

            configure_logging(config.observability)
        select_device(config.device.device)  # a device that is not there is said before a download
        self._summary = load_summary(config.model)
        self._tokenizer = load_tokenizer(self._summary, config.model)
        # The context bounds an answer, as it does in a chat over HTTP: a limit that nobody typed would cut it.
        self._defaults = {**default_sampling_fields(self._summary, config.model.generation_config), "max_tokens": None}
        self._template: Any = None
        self._count = 0
        self.name = config.model.model
        self._client = launch_inprocess(config, self._summary)
        self._inputs = InputProcessor(self._client.info, self._tokenizer, self._summary, InputLimits.make(config.model))
        self._outputs = OutputProcessor(self._tokenizer, self._client.abort)

    def chat(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> Answer:
        from oarlock.frontend.chat import load_chat_template, missing_template

        if self._template is None:
            self._template = load_chat_template(None, self._tokenizer, self._summary)
            if self._template is None:
                raise missing_template(self._summary.path, "`oarlock complete TEXT --model MODEL` lets it go on with a text")
        text = self._template.render(messages, add_generation_prompt=True)
        return self._stream(text, fields, add_special_tokens=False)

    def complete(self, prompt: str, fields: dict[str, Any]) -> Answer:
        return self._stream(prompt, fields, add_special_tokens=True)

    def _stream(self, prompt: str, fields: dict[str, Any], *, add_special_tokens: bool) -> Answer:
        from oarlock.frontend.outputs import exception_for
        from oarlock.sampling_params import SamplingParams

        params = SamplingParams(**{**self._defaults, **fields})
        self._count += 1
        request, text = self._inputs.make_request(prompt, params, f"terminal-{self._count}", add_special_tokens=add_special_tokens)
        self._outputs.add(request, text)
        is_finished = False
        with _Interrupt() as interrupt:
            try:
                self._client.submit(request)
                while not is_finished:
                    interrupt.check()
                    outputs = self._client.step()
                    if outputs is None:
                        raise EngineDead("the engine is idle, yet the answer has no end; please report this")
                    for delta in self._outputs.receive(outputs):
                        is_finished = delta.finished
                        if delta.error is not None:
                            raise exception_for(delta.error)
                        yield delta.outputs[0].text if delta.outputs else ""
            finally:
                self._end(request.request_id)

    def _end(self, request_id: str) -> None:
        """Leave the engine idle, whether the answer came to its end or not."""
        self._outputs.cancel(request_id)
        while self._client.is_alive() and self._client.has_unfinished():
            self._client.step()

    def close(self) -> None:
        self._client.shutdown()


class _Interrupt:
    """Turns Ctrl-C into something that is looked for between steps, so that it never ends one halfway."""

    def __enter__(self) -> Self:
        self._came = False
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self._came:  # a second one, while the first was not served
            raise KeyboardInterrupt
        self._came = True

    def check(self) -> None:
        if self._came:
            raise KeyboardInterrupt

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._before)


# ---------------------------------------------------------------- the terminal
def read_input() -> str:
    """Standard input to its end, without the last line breaks.

    Raises:
        ConfigError: it is no UTF-8 text.
    """
    try:
        text = sys.stdin.read().rstrip("\n")
        text.encode("utf-8")
    except UnicodeError:
        raise ConfigError("the input is not UTF-8 text") from None
    return text


def forgive_output() -> None:
    """Let a terminal that cannot show a character show a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


# ---------------------------------------------------------------- flags
def make_answer_parser(prog: str, usage: str, *, positional: bool) -> Parser:
    """The flags that choose a source and shape its answers, before every option of a model that is loaded here."""
    parser = make_parser(prog, offline=True, positional=positional)
    parser.usage = f"{prog} {usage}"
    model = parser._option_string_actions["--model"]
    model.help = "Hub name, folder or .gguf file of a model to load here; with --url, which of the server's models. Unset: the server's first."
    group = parser.add_argument_group("a running server")
    group.add_argument("--url", metavar="URL", help=f"server with the OpenAI API, or unix:PATH [{DEFAULT_URL}]")
    group.add_argument("--api-key", metavar="KEY", help=f"key for the server; better in {KEY_VARIABLES[0]}, where other users cannot see it")
    group = parser.add_argument_group("the answer")
    for name, (kind, text) in SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; repeatable")
    # Help shows what belongs to the command first, the engine's options after it.
    own = parser._action_groups[-2:]
    parser._action_groups[:] = parser._action_groups[:2] + own + [g for g in parser._action_groups[2:] if g not in own]
    return parser


def parse_answer_flags(parser: Parser, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(everything else that was typed, sampling fields)."""
    values = parse(parser, argv)
    fields = {name: values.pop(name) for name in (*SAMPLING, "stop") if name in values}
    if "seed" in values:
        fields["seed"] = _whole(values.pop("seed"))
    return values, fields


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--seed {text}: must be a whole number", "seed") from None


def open_source(values: dict[str, Any], *, loads_model: bool) -> Source:
    """The source that the flags ask for. `values` holds `url`, `api_key` and engine options.

    Raises:
        ConfigError: flags for both. OarlockError: the server does not answer, the model cannot be loaded.
    """
    url, key = values.pop("url", None), values.pop("api_key", None)
    if url is None and loads_model:
        if key is not None:
            raise ConfigError("--api-key is for a server; a model that is loaded here asks for none", "api-key")
        return LocalSource(values)
    model = values.pop("model", None)
    if values:
        name = "--" + next(iter(values)).replace("_", "-")
        raise ConfigError(f"{name} is for a model that is loaded here; a server has its own settings; or give the MODEL to load", name)
    return ServerSource(url or DEFAULT_URL, model, key)
