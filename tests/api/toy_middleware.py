"""Middleware as users bring it, for `--middleware`."""

from __future__ import annotations

from typing import Any


class Tag:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def tagged(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-class", b"1")]
            await send(message)

        await self.app(scope, receive, tagged)


async def tag(request: Any, call_next: Any) -> Any:
    response = await call_next(request)
    response.headers["x-function"] = "1"
    return response
