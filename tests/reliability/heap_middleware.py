"""Says in every response how many objects the garbage collector no longer looks at."""

from __future__ import annotations

import gc
from typing import Any


class FrozenCount:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_count(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-frozen", b"%d" % gc.get_freeze_count())]
            await send(message)

        await self._app(scope, receive, send_with_count)
