"""The page in a real browser against a real server: `make test-ui`. Needs Chromium, and nothing of Oarlock in its own environment.

Reads of the environment: OARLOCK (the command), MODEL (a chat model), CHROMIUM (the browser).
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Response, expect, sync_playwright
from serving import NAME, oarlock  # of tests/clients

KEY = "page-key"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with oarlock() as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
        yield started
        started.close()


class Watched:
    """A tab, with everything that it asked for and everything that went wrong in it."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.url, self.requests, self.problems = url, [], []
        self._context = browser.new_context(**context)
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("request", lambda request: self.requests.append(request))  # the driver cannot mark a built-in function
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)

    def open(self) -> Page:
        self.page.goto(self.url)
        expect(self.page.locator("#state")).to_have_text("serving")
        return self.page

    def ask(self, text: str, **fields: Any) -> Any:
        """Send a message and return the box of its answer, once it has ended."""
        for name, value in fields.items():
            self.page.fill(f"#{name}", str(value))
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")
        box = self.page.locator("#talk .assistant").last
        box.locator("small").wait_for()
        return box

    def bodies(self) -> list[Any]:
        return [json.loads(request.post_data or "") for request in self.requests if request.url.endswith("/v1/chat/completions")]

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def tab(browser: Browser, server: str) -> Iterator[Watched]:
    watched = Watched(browser, server)
    yield watched
    others = [request.url for request in watched.requests if not request.url.startswith((server + "/", "data:"))]
    assert not others, "the page asked somebody else"
    assert not watched.problems
    watched.close()


def answer(url: str, messages: list[dict[str, str]], **fields: Any) -> str:
    """What the server answers without the page."""
    body = json.dumps({"model": NAME, "messages": messages, **fields}).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def running(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
        return next(float(line.split()[-1]) for line in response.read().decode().splitlines() if line.startswith("vllm:num_requests_running{"))


def wait_until(true: Callable[[], Any], seconds: float = 20) -> None:
    """The page's own policy forbids the driver to wait inside it."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_conversation_streams_and_is_the_servers_own_answer(tab: Watched) -> None:
    page = tab.open()
    page.evaluate("""() => {
        window.lengths = [];
        new MutationObserver(() => window.lengths.push(document.querySelector('#talk').textContent.length))
            .observe(document.querySelector('#talk'), { childList: true, subtree: true, characterData: true });
    }""")
    first = tab.ask("Name three colours.", temperature=0, max_tokens=24)
    said = first.locator(".said").text_content()
    messages = [{"role": "user", "content": "Name three colours."}]
    assert said == answer(tab.url, messages, temperature=0, max_tokens=24)
    assert "24 tokens" in first.locator("small").text_content() and "(length)" in first.locator("small").text_content()
    lengths = page.evaluate("window.lengths")
    assert len(set(lengths)) > 10 and lengths == sorted(lengths), "the answer came at once"
    tab.ask("And three more.")
    assert tab.bodies()[1]["messages"] == [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And three more."}]
    page.click("#clear")
    expect(page.locator("#talk > div")).to_have_count(0)
    page.click("summary")
    page.fill("#system", "Be brief.")
    tab.ask("Hello.")
    assert [each["role"] for each in tab.bodies()[2]["messages"]] == ["system", "user"]


def test_stop_ends_the_request_in_the_engine(tab: Watched) -> None:
    page = tab.open()
    page.fill("#max_tokens", "1500")
    page.fill("#text", "Write a very long story about rain.")
    page.click("#send")
    wait_until(lambda: len(page.locator("#talk .assistant .said").text_content()) > 20)
    expect(page.locator("#send")).to_be_disabled()
    page.click("#stop")
    expect(page.locator("#talk .assistant small")).to_contain_text("(stopped)")
    expect(page.locator("#send")).to_be_enabled()
    wait_until(lambda: not running(tab.url), 5)


def test_what_the_server_refuses_is_shown_and_the_message_kept(tab: Watched) -> None:
    page = tab.open()
    tab.ask("Hello.", max_tokens=50_000)
    expect(page.locator("#talk .error")).to_contain_text("4096")
    assert page.input_value("#text") == "Hello."
    tab.problems = [text for text in tab.problems if "400" not in text]  # the browser's own note of the status
    tab.ask("Hello again.", temperature=0, max_tokens=4)
    assert tab.bodies()[1]["messages"] == [{"role": "user", "content": "Hello again."}]


def test_text_is_text(tab: Watched) -> None:
    page = tab.open()
    tab.ask("<img src=x onerror=alert(1)><b>bold</b>", max_tokens=2)
    assert page.locator("#talk img, #talk b").count() == 0
    expect(page.locator("#talk .user")).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")


def test_a_new_conversation_has_nothing_of_an_answer_that_was_still_coming(tab: Watched) -> None:
    page = tab.open()
    page.fill("#max_tokens", "1500")
    page.fill("#text", "Write a very long story about rain.")
    page.click("#send")
    wait_until(lambda: len(page.locator("#talk .assistant .said").text_content()) > 20)
    page.click("#clear")
    expect(page.locator("#send")).to_be_enabled()
    tab.ask("Hello.", max_tokens=4)
    assert tab.bodies()[1]["messages"] == [{"role": "user", "content": "Hello."}]


def test_who_scrolls_up_is_left_to_read(tab: Watched) -> None:
    page = tab.open()
    page.set_viewport_size({"width": 900, "height": 500})
    page.evaluate("show('user', 'line\\n'.repeat(200))")
    page.fill("#max_tokens", "1500")
    page.fill("#text", "Write a very long story about rain.")
    page.click("#send")
    said = page.locator("#talk .assistant .said")
    wait_until(lambda: len(said.text_content()) > 20)
    assert page.evaluate("at('talk').scrollHeight - at('talk').scrollTop - at('talk').clientHeight") < 40
    page.evaluate("at('talk').scrollTop = 100")
    before = len(said.text_content())
    wait_until(lambda: len(said.text_content()) > before + 100)
    assert page.evaluate("at('talk').scrollTop") == 100
    page.click("#stop")


def test_code_is_set_off_from_words(tab: Watched) -> None:
    page = tab.open()
    text = "So:\n```python\nif a <b>:\n    pass\n```\nDone."
    page.evaluate("text => say(show('assistant', ''), text)", text)
    expect(page.locator("#talk code")).to_have_text("```python\nif a <b>:\n    pass\n```")
    assert page.locator("#talk .assistant").text_content() == text and not page.locator("#talk b").count()
    page.evaluate("say(show('assistant', ''), '```\\n' + 'long '.repeat(200) + '\\n```')")
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert "monospace" in page.evaluate("getComputedStyle(document.querySelector('#talk code')).fontFamily")


def stream(url: str, max_tokens: int) -> Any:
    """An answer that is being generated and does not end before its length, until it is closed."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello."}], "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def test_the_numbers_live(tab: Watched) -> None:
    page = tab.open()
    cells, latencies = page.locator("#numbers dd"), page.locator("#latencies dd")
    expect(cells).to_have_count(4)
    expect(cells.nth(0)).to_have_text("0")
    expect(latencies).to_have_text(["–"] * 4)  # whatever was before the page was opened
    with stream(tab.url, 3900):
        expect(cells.nth(0)).to_have_text("1")
        wait_until(lambda: re.fullmatch(r"[1-9][0-9.]*", cells.nth(3).text_content()))  # generated tokens/s
        assert page.evaluate("Number(document.querySelector('#kv').value)") > 0
    expect(cells.nth(0)).to_have_text("0")
    assert all(text.endswith("s") for text in latencies.all_inner_texts())
    parts = page.locator("#plan tr td:first-child").all_inner_texts()
    assert any(part.startswith("weights") for part in parts) and any("blocks of 16 tokens" in part for part in parts)
    assert page.locator("#parts div").count() == page.locator("#plan i").count() >= 3
    assert page.evaluate("[...document.querySelectorAll('#parts div')].every(bar => bar.offsetWidth > 0)")
    expect(page.locator("#device")).to_contain_text("cpu")


def test_a_server_that_is_gone_is_said_and_its_numbers_are_not_shown_as_of_now(browser: Browser) -> None:
    with oarlock() as url:
        watched = Watched(browser, url)
        watched.open()
        watched.ask("Hello.", max_tokens=2)
    page = watched.page
    expect(page.locator("#state")).to_have_text("the server does not answer")
    assert "old" in page.get_attribute("#side", "class")
    page.fill("#text", "Are you there?")
    page.press("#text", "Enter")
    expect(page.locator("#talk .error")).to_have_text("The server does not answer.")
    assert page.input_value("#text") == "Are you there?" and "unsent" in page.locator("#talk .user").last.get_attribute("class")
    watched.close()


def test_a_key_is_asked_for_and_then_serves_the_whole_page(browser: Browser) -> None:
    with oarlock(key=KEY) as url:
        stranger = Watched(browser, url)
        assert stranger.page.goto(url).status == 401
        assert "needs the API key" in stranger.page.content()
        stranger.close()
        known = Watched(browser, url, http_credentials={"username": "anybody", "password": KEY})
        known.open()
        box = known.ask("Name three colours.", temperature=0, max_tokens=8)
        assert box.locator(".said").text_content() and not known.page.locator("#talk .error").count()
        assert all(KEY not in (request.post_data or "") + request.url for request in known.requests)
        known.close()


POST = "async url => (await fetch(url + '/v1/batches', { method: 'POST', mode: 'no-cors', credentials: 'include', body: 'x' })).type"


class Blank(BaseHTTPRequestHandler):
    """Another site, with a page of its own."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<p>hello</p>")

    def log_message(self, *args: object) -> None:
        pass


def test_a_page_of_another_site_gets_nothing_by_the_password_that_the_browser_keeps(browser: Browser) -> None:
    """Its script asks for what needs no permission of the server first. tests/test_ui_route.py has what the server does with a password that is sent."""
    other = ThreadingHTTPServer(("127.0.0.1", 0), Blank)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    with oarlock(key=KEY) as url:
        context = browser.new_context(http_credentials={"username": "anybody", "password": KEY})
        page = context.new_page()
        statuses: list[tuple[int, bool]] = []

        def note(response: Response) -> None:
            if response.request.method == "POST":
                statuses.append((response.status, "authorization" in response.request.all_headers()))

        page.on("response", note)
        page.goto(url)
        expect(page.locator("#state")).to_have_text("serving")
        page.evaluate(POST, url)
        wait_until(lambda: page.title() is not None and statuses)  # asking the driver lets it tell what it saw
        assert statuses.pop() == (400, True)  # from the page itself it is let in, and refused for what it is
        page.goto(f"http://127.0.0.1:{other.server_port}/")
        page.evaluate(POST, url)
        wait_until(lambda: page.title() is not None and statuses)  # asking the driver lets it tell what it saw
        assert [status for status, _ in statuses] == [401]  # whether or not the browser added the password
        context.close()
    other.shutdown()


def test_without_the_page() -> None:
    with oarlock("--no-ui") as url, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url)
    assert caught.value.code == 404
