"""GET /: the page, as one document that is allowed to run its own script and to talk to this server, and nothing else.

Owns: the page's headers.
Reads: `oarlock.backend_api`, page.html beside this file.
Never: puts anything into the page: it is the same for every server, and asks the server's own routes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from oarlock.backend_api import BytesReply, Route, RouteCall, RouteServer

PAGE = Path(__file__).with_name("page.html")


def add(server: RouteServer) -> None:
    """Unless the server was started with --no-ui."""
    if not server.options["ui"]:
        return
    data = PAGE.read_bytes()
    reply = BytesReply(data, "text/html; charset=utf-8", page_headers(data.decode()))

    async def page(call: RouteCall) -> BytesReply:
        return reply

    server.add(Route("GET", "/", page, is_page=True))


def page_headers(text: str) -> dict[str, str]:
    """What the browser is told: which scripts and styles are the page's own, by their hashes, and that no other site may frame it."""
    policy = {
        "default-src": "'none'",
        "script-src": _hashes("script", text),
        "style-src": _hashes("style", text),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(tag: str, text: str) -> str:
    found = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in found)
