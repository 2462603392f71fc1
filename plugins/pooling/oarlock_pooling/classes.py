"""POST /classify: the classes of a model with a classification head.

Owns: its fields, how classes are written.
Reads: `oarlock.backend_api`, `embeddings`, `fields`.
Never: computes a probability: the engine does.
"""

from __future__ import annotations

import time

from oarlock.backend_api import JsonReply, Route, RouteCall, RouteFields, RouteServer

from oarlock_pooling.embeddings import TEMPLATE_FIELDS, floats, read_prompts
from oarlock_pooling.fields import REFUSED, SHARED, own_id, pool_options, usage

CLASSIFY = RouteFields({**SHARED, **TEMPLATE_FIELDS, "input": "any", "messages": "any"}, refused=REFUSED)


class Classes:
    """The route."""

    def __init__(self, server: RouteServer) -> None:
        self._server = server

    def add(self) -> None:
        self._server.add(Route("POST", "/classify", self.create, CLASSIFY, generates=True))

    async def create(self, call: RouteCall) -> JsonReply:
        server, request_id = self._server, own_id(call.values, call.request_id)
        options = pool_options(call.values, "classify")
        prompts, name = await read_prompts(server, call.values, request_id)
        found = await server.pool(prompts, options, request_id, name)
        data = []
        for at, one in enumerate(found):
            probs = floats(one.data).tolist()
            best = max(range(len(probs)), key=probs.__getitem__)
            data.append({"index": at, "label": server.labels[best], "probs": probs, "num_classes": len(probs)})
        tokens = usage(sum(len(one.token_ids) for one in found), sum(one.num_cached_tokens for one in found))
        answer = {"id": f"classify-{request_id}", "object": "list", "created": int(time.time()), "model": server.model_names[0]}
        return JsonReply({**answer, "data": data, "usage": tokens})
