"""Valid requests to every route, chosen by a seed: what mutations start from.

Owns: the bodies, the weights of the routes, the identities of stored things that answers told of.
Never: sends anything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mutations import TEXTS

MODEL = "tiny"
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
# Like tiny_model's, and it knows tools, calls and reasoning.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{{ m.reasoning_content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, {"enum": ["a", "b"]}, {"type": "string", "pattern": "^[a-z]{1,4}$"}, {}, True,
    {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0}]}, {"type": "string", "format": "date"},
)  # fmt: skip
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f>"]}
FUNCTION = {"name": "weather", "description": "tells", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "time"}}]

Make = Callable[[random.Random], Any]


def _one(*values: Any) -> Make:
    return lambda rng: rng.choice(values)


SAMPLING: dict[str, Make] = {
    "temperature": _one(0, 0.3, 1, 2), "top_p": _one(0.1, 0.9, 1), "top_k": _one(-1, 0, 1, 40), "min_p": _one(0, 0.2), "seed": _one(0, 7, -1, 2**62),
    "presence_penalty": _one(-2, 0, 1.5), "frequency_penalty": _one(-1, 2), "repetition_penalty": _one(0.5, 1.2, 3), "stop": _one("a", ["b", "\n"], [], "\u00e9"),
    "stop_token_ids": _one([], [5], [1, 2, 3]), "include_stop_str_in_output": _one(True, False), "ignore_eos": _one(True, False), "min_tokens": _one(0, 1),
    "logit_bias": _one({}, {"5": 100}, {"7": -100, "8": 3.5}), "allowed_token_ids": _one([5], list(range(40, 90))), "bad_words": _one(["a"], ["x y", "\u00e9"], []),
    "skip_special_tokens": _one(True, False), "spaces_between_special_tokens": _one(True, False), "return_token_ids": _one(True, False),
    "return_tokens_as_token_ids": _one(True, False), "truncate_prompt_tokens": _one(1, 5, 2000), "add_special_tokens": _one(True, False),
    "cache_salt": _one("s", "t"), "priority": _one(0), "request_id": _one("a-1", "b.2"), "user": _one("u"), "metadata": _one({"a": "b"}), "store": _one(False),
    "response_format": lambda rng: rng.choice(
        ({"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "s", "schema": rng.choice(SCHEMAS)}})
    ),
    "structured_outputs": lambda rng: rng.choice(({"regex": "[ab]{2,5}"}, {"choice": ["yes", "no"]}, {"json": rng.choice(SCHEMAS)}, {"grammar": 'start: "x"+'})),
    "guided_regex": _one("a+b", "(a|b)*c", "[0-9]{1,3}", "(a+)+$", "\\w{1,50}"), "guided_choice": _one(["one", "two"], ["\u00e9"]),
    "guided_json": lambda rng: rng.choice(SCHEMAS), "guided_grammar": _one('root ::= "a" root | "b"', 'start: "yes" | "no"'), "structural_tag": _one(TAG),
}  # fmt: skip
_STRUCTURED = ("response_format", "structured_outputs", "guided_regex", "guided_choice", "guided_json", "guided_grammar", "structural_tag")


@dataclass(slots=True)
class Asked:
    """One request before it is spoilt. `fields` is a JSON body, `body` any other one."""

    method: str
    path: str
    fields: dict[str, Any] | None = None
    body: bytes = b""
    content_type: str = "application/json"


@dataclass(slots=True)
class Known:
    """Names that answers gave to what the server keeps; the latest of each kind."""

    ids: dict[str, list[str]] = field(default_factory=lambda: {"resp_": [], "file-": [], "batch_": []})

    def learn(self, answer: Any) -> None:
        name = answer.get("id") if isinstance(answer, dict) else None
        for start, names in self.ids.items():
            if isinstance(name, str) and name.startswith(start):
                names.append(name)
                del names[:-20]

    def pick(self, start: str, rng: random.Random) -> str:
        names = self.ids[start]
        return rng.choice(names) if names and rng.random() < 0.85 else start + rng.choice(("0", "x" * 200, "%2e%2e", "\u00e9"))


def _text(rng: random.Random) -> str:
    return rng.choice(("Hi", "The capital of France is", "Name three colours.", "one two three four five")) if rng.random() < 0.6 else rng.choice(TEXTS)


def _generation(rng: random.Random, lengths: str = "max_tokens") -> dict[str, Any]:
    fields: dict[str, Any] = {lengths: rng.choice((1, 1, 2, 3, 5, 8, 16, 24))}
    names = rng.sample(sorted(SAMPLING.keys() - set(_STRUCTURED)), rng.choice((0, 0, 1, 1, 2, 4)))
    if rng.random() < 0.06:
        names.append(rng.choice(_STRUCTURED))
    fields |= {name: SAMPLING[name](rng) for name in names}
    if rng.random() < 0.3:
        fields["stream"] = True
        if rng.random() < 0.5:
            fields["stream_options"] = {"include_usage": rng.random() < 0.7, "continuous_usage_stats": rng.random() < 0.3}
    if rng.random() < 0.12:
        fields |= rng.choice(({"n": 2, "temperature": 1}, {"n": 3, "best_of": 4, "temperature": 0.7, "stream": False}, {"use_beam_search": True, "n": 2, "stream": False}))
    return fields


def _completion(rng: random.Random, known: Known) -> Asked:
    prompts = (_text(rng), _text(rng), [rng.randrange(3, 400) for _ in range(rng.choice((1, 5, 40, 300)))], [_text(rng), "b"], [[5, 6], [7]], [_text(rng)] * rng.choice((1, 8)))
    fields = {"model": MODEL, "prompt": rng.choice(prompts), **_generation(rng)}
    if rng.random() < 0.15:
        fields["logprobs"] = rng.choice((0, 1, 5, 20))
    if rng.random() < 0.1:
        fields |= rng.choice(({"echo": True}, {"echo": True, "max_tokens": 0}, {"echo": True, "logprobs": 2}, {"prompt_logprobs": 3, "stream": False}))
    return Asked("POST", "/v1/completions", fields)


def _messages(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": _text(rng)}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": rng.choice(("system", "developer")), "content": [{"type": "text", "text": _text(rng)}, {"type": "text", "text": "b"}]})
    if rng.random() < 0.15:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": rng.choice(('{"city": "Oslo"}', "{", ""))}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"}]
    if rng.random() < 0.15:
        messages += [{"role": "assistant", "content": _text(rng), "reasoning_content": "so"}, {"role": "user", "content": "and?", "name": "u"}]
    return messages


def _chat(rng: random.Random, known: Known) -> Asked:
    fields = {"model": MODEL, "messages": _messages(rng), **_generation(rng, rng.choice(("max_tokens", "max_completion_tokens")))}
    if rng.random() < 0.15:
        fields |= {"logprobs": True, "top_logprobs": rng.choice((0, 1, 5, 20))}
    if rng.random() < 0.15:
        fields["tools"] = json.loads(json.dumps(TOOLS))
        fields |= rng.choice(({}, {"tool_choice": "none"}, {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "time"}}}, {"parallel_tool_calls": False}))
    if rng.random() < 0.1:
        fields |= rng.choice(({"chat_template_kwargs": {}}, {"include_reasoning": False}, {"add_generation_prompt": False}, {"echo": True}))
    if rng.random() < 0.05:
        fields["messages"].append({"role": "assistant", "content": "Well,"})
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return Asked("POST", "/v1/chat/completions", fields)


def _responses(rng: random.Random, known: Known) -> Asked:
    items = [{"role": "user", "content": [{"type": "input_text", "text": _text(rng)}]}, {"type": "message", "role": "assistant", "content": "b", "id": "m"}]
    fields: dict[str, Any] = {"model": MODEL, "input": rng.choice((_text(rng), items, items[:1])), "max_output_tokens": rng.choice((1, 2, 5, 16))}
    extra: dict[str, Any] = {
        "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "stream": True, "store": rng.random() < 0.5, "background": True, "metadata": {"a": "b"}, "truncation": "auto",
        "include": ["message.output_text.logprobs"], "text": {"format": {"type": "text"}}, "previous_response_id": known.pick("resp_", rng), "user": "u",
    }  # fmt: skip
    fields |= {name: extra[name] for name in rng.sample(sorted(extra), rng.choice((0, 1, 1, 2, 3)))}
    return Asked("POST", "/v1/responses", fields)


def _anthropic(rng: random.Random) -> dict[str, Any]:
    blocks = [{"type": "text", "text": _text(rng)}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    fields: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": rng.choice((_text(rng), blocks))}]}
    if rng.random() < 0.2:
        use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": rng.choice(("3", [{"type": "text", "text": "3"}])), "is_error": rng.random() < 0.3}
        fields["messages"] += [{"role": "assistant", "content": [{"type": "text", "text": "a"}, use]}, {"role": "user", "content": [result]}]
        fields["tools"] = [{"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}]
        fields |= rng.choice(({}, {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "weather"}}, {"tool_choice": {"type": "none"}}))
    if rng.random() < 0.4:
        fields["system"] = rng.choice((_text(rng), [{"type": "text", "text": "s"}]))
    return fields


def _message(rng: random.Random, known: Known) -> Asked:
    fields = {**_anthropic(rng), "max_tokens": rng.choice((1, 3, 9))}
    extra: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "stream": True, "stop_sequences": ["a"], "metadata": {"user_id": "u"}, "service_tier": "auto"}
    return Asked("POST", "/v1/messages", fields | {name: extra[name] for name in rng.sample(sorted(extra), rng.choice((0, 1, 2)))})


def _embeddings(rng: random.Random, known: Known) -> Asked:
    inputs = (_text(rng), [_text(rng), "b"], [5, 6, 7], [[5, 6], [7]], [_text(rng)] * rng.choice((1, 9)))
    extra: dict[str, Any] = {"encoding_format": rng.choice(("float", "base64")), "dimensions": rng.choice((1, 8, 64)), "user": "u", "truncate_prompt_tokens": 5, "add_special_tokens": False}
    return Asked("POST", "/v1/embeddings", {"model": MODEL, "input": rng.choice(inputs)} | {name: extra[name] for name in rng.sample(sorted(extra), rng.choice((0, 1, 2)))})


def _count_tokens(rng: random.Random, known: Known) -> Asked:
    return Asked("POST", "/v1/messages/count_tokens", _anthropic(rng))


def _tokenize(rng: random.Random, known: Known) -> Asked:
    fields = rng.choice(({"prompt": _text(rng)}, {"messages": _messages(rng)}, {"model": MODEL, "prompt": _text(rng), "return_token_strs": True, "add_special_tokens": False}))
    return Asked("POST", "/tokenize", fields)


def _detokenize(rng: random.Random, known: Known) -> Asked:
    return Asked("POST", "/detokenize", {"model": MODEL, "tokens": [rng.randrange(448) for _ in range(rng.choice((0, 1, 30, 3000)))]})


def _file(rng: random.Random, known: Known) -> Asked:
    """Some are forms as they should be, some hold lines that are none."""
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses"))
    make = {"/v1/completions": _completion, "/v1/chat/completions": _chat, "/v1/responses": _responses}[path]
    lines = [json.dumps({"custom_id": f"r{at}", "method": "POST", "url": path, "body": make(rng, known).fields}) for at in range(rng.choice((1, 1, 3)))]
    if rng.random() < 0.3:
        lines.append(rng.choice(("", "{", "[]", lines[0], '{"custom_id": 5}', "\x00", "[" * 2000)))
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    head = b'Content-Disposition: form-data; name="file"; filename="' + rng.choice((b"a.jsonl", b"../../x", "é".encode(), b"a\\\"b")) + b'"'
    parts = [b'Content-Disposition: form-data; name="purpose"\r\n\r\n' + rng.choice((b"batch", b"batch", b"other")), head + b"\r\n\r\n" + data]
    body = b"".join(b"--B\r\n" + part + b"\r\n" for part in rng.sample(parts, 2)) + b"--B--\r\n"
    return Asked("POST", "/v1/files", None, body, "multipart/form-data; boundary=B")


def _batch(rng: random.Random, known: Known) -> Asked:
    fields = {"input_file_id": known.pick("file-", rng), "endpoint": rng.choice(GENERATING[:3]), "completion_window": "24h"}
    return Asked("POST", "/v1/batches", fields | rng.choice(({}, {"metadata": {"a": "b"}})))


def _by_id(rng: random.Random, known: Known) -> Asked:
    start, path = rng.choice((("resp_", "/v1/responses"), ("file-", "/v1/files"), ("batch_", "/v1/batches")))
    path = f"{path}/{known.pick(start, rng)}"
    ways = {"resp_": (("GET", ""), ("DELETE", ""), ("POST", "/cancel")), "file-": (("GET", ""), ("GET", "/content"), ("DELETE", "")), "batch_": (("GET", ""), ("POST", "/cancel"))}
    method, rest = rng.choice(ways[start])
    return Asked(method, path + rest)


def _plain(rng: random.Random, known: Known) -> Asked:
    queries = ("", "", "?limit=2", "?after=x", "?limit=-1&order=asc", "?stream=true", "?a=" + "b" * 3000, "?%ff=%00")
    paths = ("/v1/models", "/v1/models/tiny", "/v1/models/%2e%2e/x", "/health", "/ping", "/version", "/metrics", "/openapi.json", "/v1/files", "/v1/batches", "/null/tokens?prompt=5,6", "/")
    odd = ("/v1/nothing", "//v1/models", "/v1/chat/completions/", "/%00", "/%ff%fe", "/v1/models/" + "x" * 5000, "/../../etc/passwd", "/v1/models?" + "x" * 9000, "/;", "/\u00e9")
    path = rng.choice(paths) + rng.choice(queries) if rng.random() < 0.7 else rng.choice(odd)
    return Asked(rng.choice(("GET", "GET", "GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "TRACE", "PATCH", "BREW")), path)


ROUTES: tuple[tuple[int, Callable[[random.Random, Known], Asked]], ...] = (
    (28, _completion), (28, _chat), (10, _responses), (9, _message), (4, _embeddings), (2, _count_tokens), (5, _tokenize), (3, _detokenize), (3, _file), (3, _batch), (4, _by_id), (4, _plain),
)  # fmt: skip
COVERED = {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize", "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel", "/v1/models",
    "/v1/models/{name}", "/health", "/ping", "/version", "/metrics", "/null/tokens", "/v1/embeddings",
}  # fmt: skip


class Corpus:
    """The routes above, and what the server's own schema has beside them."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.known = Known()
        self.other = [
            (method.upper(), path, operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema"))
            for path, methods in schema["paths"].items()
            if path not in COVERED
            for method, operation in methods.items()
        ]
        routes = [*ROUTES, *([(8, self._from_schema)] if self.other else [])]
        self._weights, self._makers = [weight for weight, _ in routes], [make for _, make in routes]

    def ask(self, rng: random.Random) -> Asked:
        (make,) = rng.choices(self._makers, self._weights)
        return make(rng, self.known)

    def _from_schema(self, rng: random.Random, known: Known) -> Asked:
        method, path, schema = rng.choice(self.other)
        path = "/".join("x" if part.startswith("{") else part for part in path.split("/"))
        return Asked(method, path, None if schema is None else value_of(schema, rng) | ({"model": MODEL} if "model" in schema["properties"] else {}))


def value_of(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """A value of a JSON schema as this server writes them."""
    if "anyOf" in schema:
        return value_of(rng.choice(schema["anyOf"]), rng)
    if "const" in schema:
        return schema["const"]
    match schema.get("type"):
        case "object":
            names = schema.get("properties", {})
            chosen = {*schema.get("required", ()), *(name for name in sorted(names) if rng.random() < 0.15)}
            return {name: value_of(names[name], rng) for name in names if name in chosen}
        case "array":
            return [value_of(schema.get("items", {}), rng) for _ in range(rng.choice((0, 1, 2, 5)))]
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            return rng.choice((0, 1, 2, 5))
        case "number":
            return rng.choice((0, 0.5, 1))
        case "string":
            return _text(rng)
    return rng.choice((_text(rng), [_text(rng)], [5, 6], {"text": "x"}, 1, [{"role": "user", "content": "x"}]))
