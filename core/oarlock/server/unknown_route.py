"""The words for a path that no route has, and for a method that its route does not take.

Owns: which route is nearest, and the names of other servers' routes that this version does not have, or that a plugin brings.
Reads: the application's routes, `server.errors`.
Never: redirects.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from starlette.routing import BaseRoute, Route

from oarlock.errors import PIP
from oarlock.server.errors import ApiError

# Beginning of a path -> what it asks for. None of them is in this version.
ABSENT = {
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/moderations": "moderation",
    "/pooling": "pooling",
    "/v1/load_lora_adapter": "LoRA adapters",
    "/v1/unload_lora_adapter": "LoRA adapters",
    "/sleep": "sleeping",
    "/wake_up": "sleeping",
    "/docs": "documentation page (/openapi.json describes the routes)",
}
# Beginning of a path -> the plugin that serves it.
PLUGINS = {"/v1/messages": "messages", "/v1/responses": "responses", "/v1/files": "batches", "/v1/batches": "batches"}
PLUGINS |= dict.fromkeys(("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify"), "pooling")


def _plain(routes: Sequence[BaseRoute]) -> dict[str, set[str]]:
    """Path -> methods, of routes without a variable part."""
    found: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, Route) and "{" not in route.path:
            found.setdefault(route.path, set()).update(_methods(route))
    return found


def _methods(route: Route) -> set[str]:
    methods = set(route.methods or ())
    return methods - {"HEAD"} if "GET" in methods else methods


def no_such_route(routes: Sequence[BaseRoute], path: str) -> ApiError:
    """The 404: the path, and the nearest route; the path is shortened, as the client chose it."""
    shown = path if len(path) <= 200 else path[:200] + "…"
    absent = next((what for start, what in ABSENT.items() if path == start or path.startswith(start + "/")), None)
    if absent is not None:
        return ApiError(404, f"There is no route {shown} here: this version has no {absent}.", code="not_found")
    known = _plain(routes)
    plugin = next((name for start, name in PLUGINS.items() if (path == start or path.startswith(start + "/")) and start not in known), None)
    if plugin is not None:
        text = f"There is no route {shown} here: the plugin oarlock-{plugin} serves it, and is not installed, or was not when this server started (from a checkout: {PIP} ./plugins/{plugin})."
        return ApiError(404, text, code="not_found")
    near = _nearest(path[:200].rstrip("/"), list(known))
    hint = f" Did you mean {' or '.join(sorted(known[near]))} {near}?" if near else f" Routes are {', '.join(sorted(known))}."
    return ApiError(404, f"There is no route {shown} here.{hint}", code="not_found")


def _nearest(path: str, known: list[str]) -> str | None:
    """The same but for a slash at the end; too much or too little in front; a part of it; else by spelling."""
    lowered = path.lower()
    if not lowered:
        return None
    for found in (
        [route for route in known if route == lowered],
        sorted((route for route in known if lowered.endswith(route)), key=len, reverse=True),
        sorted((route for route in known if route.endswith(lowered)), key=len),
        [route for route in known if lowered + "/" in route],
    ):
        if found:
            return found[0]
    close = difflib.get_close_matches(lowered, known, n=1, cutoff=0.7)
    return close[0] if close else None


def wrong_method(routes: Sequence[BaseRoute], path: str, method: str, headers: dict[str, str]) -> ApiError:
    """The 405: what the route does take, also in the header Allow."""
    taken: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            taken |= _methods(route)
    allowed = ", ".join(sorted(taken)) or headers.get("Allow", "")
    return ApiError(405, f"{path[:200]} takes {allowed}, not {method[:20]}.", code="method_not_allowed", headers={**headers, "Allow": allowed})
