"""POST /v1/embeddings.

Owns: its fields, how a vector is written.
Reads: `oarlock.backend_api`, `fields`.
Never: computes a vector: the engine does.
"""

from __future__ import annotations

import array
import base64
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

from oarlock.backend_api import JsonReply, Route, RouteCall, RouteFields, RouteServer

from oarlock_pooling.fields import REFUSED, SHARED, bad, own_id, pool_options, read_texts, show, usage

TOKENIZE = "/tokenize"
TEMPLATE_FIELDS: dict[str, Any] = {
    "add_generation_prompt": "boolean", "continue_final_message": "boolean", "chat_template": "string", "chat_template_kwargs": "object",
}  # fmt: skip
_ORDERS = {"native": "<" if sys.byteorder == "little" else ">", "little": "<", "big": ">"}
_DTYPES = {"float32": "f", "float16": "e"}

EMBEDDINGS = RouteFields(
    {
        **SHARED, **TEMPLATE_FIELDS, "input": "any", "messages": "any", "encoding_format": "string", "dimensions": "integer", "embed_dtype": "string",
        "endianness": "string", "normalize": "boolean", "pooling": "string",
    },
    refused=REFUSED,
)  # fmt: skip


class Embeddings:
    """The route."""

    def __init__(self, server: RouteServer) -> None:
        self._server = server

    def add(self) -> None:
        self._server.add(Route("POST", "/v1/embeddings", self.create, EMBEDDINGS, generates=True))

    async def create(self, call: RouteCall) -> JsonReply:
        values = call.values
        request_id, write = own_id(values, call.request_id), writer(values)
        if "normalize" in values and "use_activation" in values and values["normalize"] != values["use_activation"]:
            raise bad("use_activation", "normalize and use_activation say the same; send one of them.")
        activation = {"use_activation": values["normalize"]} if "normalize" in values else {}
        more = {name: values[name] for name in ("dimensions", "pooling") if name in values}
        options = pool_options(values, "embed", **more, **activation)
        prompts, name = await read_prompts(self._server, values, request_id)
        vectors = await self._server.pool(prompts, options, request_id, name)
        data = [{"object": "embedding", "index": n, "embedding": write(vector.data)} for n, vector in enumerate(vectors)]
        return JsonReply(
            {
                "id": f"embd-{request_id}", "object": "list", "created": int(time.time()), "model": self._server.model_names[0], "data": data,
                "usage": usage(sum(len(v.token_ids) for v in vectors), sum(v.num_cached_tokens for v in vectors)),
            }
        )  # fmt: skip


async def read_prompts(server: RouteServer, values: Mapping[str, Any], request_id: str) -> tuple[list[Any], str]:
    """(prompts, the field that they come from): `input` as it is, or `messages` through the chat template. Raises RouteError."""
    if ("input" in values) == ("messages" in values):
        raise bad("input", "Give one of input and messages.", "missing_field" if "input" not in values else "invalid_value")
    if "input" in values:
        for name in TEMPLATE_FIELDS:
            if name in values:
                raise bad(name, f"{name} is only allowed with messages.")
        return read_texts(values["input"], "input", server.max_prompts), "input"
    body = {name: values[name] for name in ("model", "messages", "add_special_tokens", *TEMPLATE_FIELDS) if name in values}
    answer = await server.call(TOKENIZE, {"add_generation_prompt": False, **body}, request_id)
    return [answer["tokens"]], "messages"


def writer(values: Mapping[str, Any]) -> Any:
    """A function from a vector's bytes to its JSON value. Raises RouteError 400."""
    form, dtype, order = values.get("encoding_format", "float"), values.get("embed_dtype", "float32"), values.get("endianness", "native")
    for name, value, known in (("encoding_format", form, ("float", "base64")), ("embed_dtype", dtype, _DTYPES), ("endianness", order, _ORDERS)):
        if value not in known:
            raise bad(name, f"{name} is {show(value)}; served are {', '.join(known)}.", "unsupported_field")
    if form == "float":
        for name in ("embed_dtype", "endianness"):
            if name in values:
                raise bad(name, f"{name} is only allowed with encoding_format: base64.")
        return lambda data: floats(data).tolist()
    if _DTYPES[dtype] == "f" and _ORDERS[order] == "<":
        return lambda data: base64.b64encode(data).decode()
    return lambda data: base64.b64encode(struct.pack(f"{_ORDERS[order]}{len(data) // 4}{_DTYPES[dtype]}", *floats(data))).decode()


def floats(data: bytes) -> array.array[float]:
    """A vector's numbers."""
    found = array.array("f", data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


__all__ = ["EMBEDDINGS", "Embeddings", "floats", "writer"]
