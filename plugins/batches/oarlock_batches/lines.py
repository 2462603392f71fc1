"""One line of a batch: a request, and its answer. The same for the routes and for `oarlock run-batch`.

Owns: what a line must be, and how an answer is written.
Reads: nothing of ours.
Never: checks a request's own body (the route that answers it does).
"""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import dataclass
from typing import Any

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank")
MAX_CUSTOM_ID = 512
MAX_DEPTH = 100  # what a body may have is the route's to say, and is less
_KEYS = {"custom_id", "method", "url", "body"}


class LineError(ValueError):
    """A line that is no request. `param` is the key at fault; `custom_id` is known where that much could be read."""

    def __init__(self, message: str, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.param, self.custom_id = param, custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """One request."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_line(raw: bytes) -> Line:
    """Raises LineError, also for what could not be sent on as it is."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)
    except UnicodeDecodeError:
        raise LineError("The line is not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise LineError(f"The line is not valid JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise _too_deep() from None
    except LineError:
        raise
    except ValueError:
        raise LineError("The line holds a number that is too long.") from None
    if type(value) is not dict:
        raise LineError("The line must be a JSON object.")
    _check_depth(value)
    if b"\\u" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise LineError("The line holds a lone surrogate escape, which is not text.") from None
    custom_id, body = value.get("custom_id"), value.get("body")
    if type(custom_id) is not str or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError(f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if (problem := _problem(value)) is not None:
        raise LineError(*problem, custom_id)
    return Line(custom_id, value["url"], body)


def _problem(value: dict[str, Any]) -> tuple[str, str] | None:
    """(what is wrong, the key at fault) beside custom_id."""
    body = value.get("body")
    if value.get("method") != "POST":
        return 'method must be "POST".', "method"
    if value.get("url") not in ENDPOINTS:
        return f"url must be one of {', '.join(ENDPOINTS)}.", "url"
    if type(body) is not dict:
        return "body must be an object.", "body"
    if body.get("stream") not in (None, False):
        return "body.stream: nobody reads a stream of a batch; leave it out.", "body.stream"
    if body.get("background") not in (None, False):
        return "body.background: a batch waits for its answers; leave it out.", "body.background"
    if unknown := sorted(value.keys() - _KEYS):
        return f"Unknown key {unknown[0][:100]!r}; known are {', '.join(sorted(_KEYS))}.", unknown[0][:100]
    return None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise LineError("A key is given twice.")
    return result


def _constant(name: str) -> Any:
    raise LineError(f"{name} is not valid JSON; numbers must be finite.")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise LineError(f"The number {text[:40]} is beyond the range of a double.")
    return value


def _too_deep() -> LineError:
    return LineError(f"The line is nested too deeply; the limit is {MAX_DEPTH} levels.")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in (item.values() if type(item) is dict else item) if type(child) in (dict, list)]
        if not level:
            return
    raise _too_deep()


def answer_line(custom_id: str | None, status: int, request_id: str, body: Any) -> bytes:
    """An answer as a line of the output, the line's end included."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    value = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"


def refused_line(custom_id: str | None, code: str, message: str) -> bytes:
    """A line of the output for a request that was never sent."""
    value = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
