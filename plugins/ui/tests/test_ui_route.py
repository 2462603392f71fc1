"""GET /: what the server sends, whom it lets in, and that the page needs nothing from anywhere else."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from oarlock_ui.routes import PAGE, add, page_headers
from toy_server import refused, toy_server

pytestmark = pytest.mark.asyncio
ON: dict[str, Any] = {"options": {"ui": True}, "routes": (add,)}
BASIC = "Basic " + base64.b64encode(b"anybody:secret").decode()


def basic(text: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}


async def test_the_page_is_at_the_root_unless_it_is_switched_off() -> None:
    async with toy_server(**ON) as toy:
        response = await toy.http.get("/")
        assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.content == PAGE.read_bytes()
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        assert 'outcome="refused"} 0.0' in (await toy.http.get("/metrics")).text
    async with toy_server(options={"ui": False}, routes=(add,)) as toy:
        refused(await toy.http.get("/"), None, 404)


async def test_a_browser_gets_in_with_the_key_as_password() -> None:
    async with toy_server(api_keys=("secret", "se:cond"), **ON) as toy:
        response = await toy.http.get("/")
        refused(response, None, 401)
        assert response.headers["www-authenticate"] == 'Basic realm="Oarlock", charset="UTF-8"'
        for right in (basic("anybody:secret"), basic(":secret"), basic("x:se:cond"), {"Authorization": "Bearer secret"}):
            assert (await toy.http.get("/", headers=right)).status_code == 200
            assert (await toy.http.get("/metrics", headers=right)).status_code == 200
        for wrong in (basic("secret"), basic("secret:"), basic("x:secre"), basic("x:secret "[:-1] + "x"), {"Authorization": "Basic ///"}, {"Authorization": "Basic secret"}):
            refused(await toy.http.get("/", headers=wrong), None, 401)
        response = await toy.http.get("/v1/models")
        refused(response, None, 401)
        assert response.headers["www-authenticate"] == "Bearer"  # a program is told what programs send


async def test_a_page_of_another_site_cannot_use_what_the_browser_remembers() -> None:
    async with toy_server(api_keys=("secret",), **ON) as toy:

        async def status(**headers: str) -> int:
            sent = {"Authorization": BASIC, **{name.replace("_", "-"): value for name, value in headers.items()}}
            body = {"model": "toy-model", "messages": [{"role": "user", "content": "hi"}]}
            return (await toy.http.post("/v1/chat/completions", json=body, headers=sent)).status_code

        assert await status() == 200
        assert await status(origin="http://toy") == await status(sec_fetch_site="same-origin", origin="https://front.example") == 200
        assert await status(origin="http://evil.example") == await status(origin="null") == 401
        for site in ("cross-site", "same-site", "odd"):
            assert await status(sec_fetch_site=site, origin="http://toy") == 401
        assert await status(sec_fetch_site="cross-site", Authorization="Bearer secret") == 200  # a key that a program put there counts anywhere


async def test_basic_is_no_way_in_where_there_is_no_page() -> None:
    async with toy_server(api_keys=("secret",), options={"ui": False}, routes=(add,)) as toy:
        refused(await toy.http.get("/v1/models", headers=basic("x:secret")), None, 401)


class Parts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


async def test_the_page_loads_nothing() -> None:
    text = PAGE.read_text()
    parts = Parts()
    parts.feed(text)
    for tag, attributes in parts.tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "style", f"<{tag} {name}> is not covered by the policy's hashes"
            assert name not in ("src", "srcset", "action", "data", "poster") and (name != "href" or value == "data:,"), (tag, name, value)
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|innerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|localStorage|cookie", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    policy = page_headers(text)["Content-Security-Policy"]
    assert policy.count("'sha256-") == text.count("<script") + text.count("<style") == 3
    assert "unsafe" not in policy and "default-src 'none'" in policy
    assert page_headers(text.replace("poll();", "poll(1);"))["Content-Security-Policy"] != policy
