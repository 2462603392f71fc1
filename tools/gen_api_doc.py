"""Write docs/api.md from the server's own OpenAPI schema, with the routes of every plugin. `--check` only compares, for tests and CI.

    python tools/gen_api_doc.py [--check]
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from oarlock.config.options import BY_NAME, plugin_options
from oarlock.config.sections import EngineConfig, ModelConfig, ServerConfig
from oarlock.server.routes import add_plugin_routes, make_app
from oarlock.server.state import ServerState

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "api.md"
NO_EFFECT = "no effect on what is generated"

HEAD = """# The API, field by field

Written by `tools/gen_api_doc.py` from what `GET /openapi.json` says of a server with every plugin of this repository. Do not edit.

What fields mean, and their defaults, say [http.md](http.md), [sampling.md](sampling.md), [structured-output.md](structured-output.md), [responses.md](responses.md), [messages.md](messages.md), [pooling.md](pooling.md)
and [batches.md](batches.md). On every route null is the same as leaving a field out, types are strict, and any other field is a 400 that names it.
*Refused*: a known field whose feature is not here. It is a 400 with the reason, but for values that ask for nothing, as `false` or an empty list mostly do.
"""

# What OpenAI documents for its routes: the parameters of its Python client, 3.57, and `stream`.
OPENAI = {
    "/v1/completions": "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options suffix temperature top_p user",
    "/v1/chat/completions": "messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata modalities moderation n "
    "parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop "
    "store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options",
    "/v1/responses": "access_programs background background_options context_management conversation image include input instructions max_output_tokens max_tool_calls metadata model moderation "
    "parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options temperature "
    "text tool_choice tools top_logprobs top_p truncation user",
    "/v1/embeddings": "input model dimensions encoding_format user",
    "/v1/batches": "completion_window endpoint input_file_id metadata output_expires_after",
}


def paths() -> dict[str, dict[str, Any]]:
    """Of /openapi.json."""
    found = {entry.name for entry in importlib.metadata.entry_points(group="oarlock.plugins")}
    wanted = {file.parent.name for file in (ROOT / "plugins").glob("*/pyproject.toml") if '"oarlock.plugins"' in file.read_text(encoding="utf-8")}
    if missing := wanted - found:
        raise SystemExit(f"docs/api.md lists the routes of every plugin, and these are not installed: {', '.join(sorted(missing))}; run make install")
    engine = EngineConfig(ModelConfig("MODEL"))
    options = {name.replace("-", "_"): option.default for name, option in plugin_options(BY_NAME).items()}
    app = make_app(ServerState(replace(engine, device=replace(engine.device, options=options)), ServerConfig(), ()))
    add_plugin_routes(app, "cpu")
    return app.openapi()["paths"]


def body_of(operation: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema of its body."""
    return operation["requestBody"]["content"]["application/json"]["schema"] if "requestBody" in operation else None


def render() -> str:
    """The whole page."""
    every = paths()
    parts = [HEAD, _deviations(every)]
    plain = [f"`{method.upper()} {path}`" for path, methods in every.items() for method, operation in methods.items() if body_of(operation) is None]
    parts.append(f"\n## Routes without fields\n\n{', '.join(plain)}.\n")
    alike: dict[str, list[str]] = defaultdict(list)  # fields -> the routes that have them
    for path, methods in every.items():
        for method, operation in methods.items():
            if (schema := body_of(operation)) is not None:
                alike[_fields(schema)].append(f"{method.upper()} {path}")
    parts += [f"\n## {', '.join(routes)}\n{text}" for text, routes in alike.items()]
    return "".join(parts)


def _deviations(every: dict[str, dict[str, Any]]) -> str:
    """What OpenAI documents and is not, or not wholly, here; and what is beyond it."""
    parts = ["\n## Where OpenAI's own routes differ\n\nOf the fields that OpenAI documents:\n\n| route | refused | taken, with " + NO_EFFECT + " | unknown |\n| --- | --- | --- | --- |\n"]
    beyond = []
    for path, names in OPENAI.items():
        schema = body_of(every[path]["post"])
        assert schema is not None
        documented, fields, refused = set(names.split()), schema["properties"], schema["x-refused"]
        idle = {name for name, field in fields.items() if field.get("description") == NO_EFFECT}
        cells = [documented & refused.keys(), documented & idle, documented - fields.keys() - refused.keys()]
        parts.append(f"| {path} | {' | '.join(_names(cell) for cell in cells)} |\n")
        beyond.append(f"- {path}: {_names(fields.keys() - documented)}\n")
    return "".join([*parts, "\nFields beyond OpenAI's, most of them vLLM's:\n\n", *beyond])


def _fields(schema: dict[str, Any]) -> str:
    rows = [f"| `{name}` | {_type(field)}{', required' if name in schema['required'] else ''} |\n" for name, field in schema["properties"].items()]
    why: dict[str, list[str]] = defaultdict(list)
    for name, reason in schema["x-refused"].items():
        why[reason].append(name)
    refused = [f"- {_names(names)}: {reason}\n" for reason, names in why.items()]
    return "".join(["\n| field | |\n| --- | --- |\n", *rows, *(["\nRefused:\n\n", *refused] if refused else [])])


def _type(field: dict[str, Any]) -> str:
    if "description" in field:
        return field["description"]
    if "anyOf" in field or "oneOf" in field:
        return " or ".join(dict.fromkeys(_type(one) for one in field.get("anyOf") or field["oneOf"]))
    if "const" in field:
        return f"`{field['const']}`"
    if "type" not in field:
        return "any shape; the route says what it takes"
    names = [field["type"]] if isinstance(field["type"], str) else field["type"]
    if names == ["array"]:
        return f"list of {_type(field['items'])}" if field.get("items") else "list"
    return " or ".join(names)


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def main() -> int:
    text = render()
    if "--check" not in sys.argv:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print("docs/api.md is not what the schema says: python tools/gen_api_doc.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
