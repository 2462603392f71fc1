"""Which fields each route takes, which it refuses and why, and the check of a body against that table.

Owns: the field tables of every route.
Reads: `sampling_params`' lists of foreign and missing names, `server.kinds`, `server.errors`.
Never: accepts a field and ignores it: what is not built, not known or meant for another server is a 400 that names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oarlock.sampling_params import FOREIGN_NAMES, NOT_BUILT
from oarlock.server import kinds
from oarlock.server.errors import bad
from oarlock.server.kinds import Kind


@dataclass(frozen=True, slots=True)
class Refused:
    """A field whose feature is absent. `neutral(value)` is true where the value asks for nothing."""

    reason: str
    neutral: Callable[[Any], bool] = lambda value: False


@dataclass(frozen=True, slots=True)
class Table:
    """One route's fields."""

    path: str
    fields: Mapping[str, Kind]
    required: tuple[str, ...] = ()
    refused: Mapping[str, Refused] = field(default_factory=dict)


NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "session_id")

FOREIGN = {**FOREIGN_NAMES, "bad_words_ids": "bad_words", "top_logprobs_num": "top_logprobs", "return_logprob": "logprobs", "inputs": "prompt"}

_NOT_YET, _NOT_YET_THESE = "is not built in this version", "are not built in this version"
_FUNCTIONS = Refused("This is the obsolete form of tool calling; send tools and tool_choice.", lambda value: value in ([], "none", "auto"))

_REFUSED_BOTH = {
    **{name: Refused(f"This version does not have {what}; leave {name} out.", lambda value: value is False) for name, what in NOT_BUILT.items()},
    **{name: Refused(f"Here this is structured_outputs: {{\"{key}\": …}}.") for name, key in (("grammar", "grammar"), ("json_schema", "json"), ("regex", "regex"))},
    "logits_processors": Refused("Logits processors run in the caller's process; use LLM.generate, logit_bias or allowed_token_ids."),
    "prompt_embeds": Refused(f"Prompt embeddings {_NOT_YET_THESE}; send text or token ids."),
    "lora_request": Refused(f"LoRA {_NOT_YET}."),
    **{name: Refused(f"KV transfer {_NOT_YET}.") for name in ("kv_transfer_params", "ec_transfer_params")},
    "return_token_offsets": Refused("Offsets of tokens are not given; leave return_token_offsets out.", lambda value: value is False),
    "return_mm_kwargs": Refused(f"Images and audio {_NOT_YET_THESE}; leave return_mm_kwargs out.", lambda value: value is True),
    "routed_experts_prompt_start": Refused("Routed experts are not returned; leave the field out.", lambda value: value == 0 and value is not False),
    "prompt_cache_retention": Refused("Prefixes stay in memory as long as there is room.", lambda value: value == "in_memory"),
}

COMMON: dict[str, Kind] = {
    "model": kinds.string,
    "max_tokens": kinds.integer,
    "temperature": kinds.number,
    "top_p": kinds.number,
    "n": kinds.integer,
    "stream": kinds.boolean,
    "stream_options": kinds.stream_options,
    "stop": kinds.string_or_strings,
    "presence_penalty": kinds.number,
    "frequency_penalty": kinds.number,
    "logit_bias": kinds.logit_bias,
    "seed": kinds.integer,
    "best_of": kinds.integer,
    "top_k": kinds.integer,
    "min_p": kinds.number,
    "repetition_penalty": kinds.number,
    "use_beam_search": kinds.boolean,
    "length_penalty": kinds.number,
    "early_stopping": kinds.early_stopping,
    "stop_token_ids": kinds.ids,
    "include_stop_str_in_output": kinds.boolean,
    "ignore_eos": kinds.boolean,
    "min_tokens": kinds.integer,
    "skip_special_tokens": kinds.boolean,
    "spaces_between_special_tokens": kinds.boolean,
    "truncate_prompt_tokens": kinds.integer,
    "truncation_side": kinds.string,
    "prompt_logprobs": kinds.integer,
    "allowed_token_ids": kinds.ids,
    "bad_words": kinds.strings,
    "echo": kinds.boolean,
    "add_special_tokens": kinds.boolean,
    "priority": kinds.integer,
    "cache_salt": kinds.salt,
    "request_id": kinds.request_id,
    "return_token_ids": kinds.boolean,
    "return_tokens_as_token_ids": kinds.boolean,
    "response_format": kinds.obj,
    "structured_outputs": kinds.obj,
    "guided_json": kinds.object_or_text,
    "guided_regex": kinds.string,
    "guided_choice": kinds.strings,
    "guided_grammar": kinds.string,
    "guided_json_object": kinds.boolean,
    "guided_whitespace_pattern": kinds.string,
    "guided_decoding_backend": kinds.string,
    "structural_tag": kinds.object_or_text,
    **{name: kinds.without_effect for name in NO_EFFECT},
}

TEMPLATE: dict[str, Kind] = {
    "add_generation_prompt": kinds.boolean,
    "continue_final_message": kinds.boolean,
    "chat_template": kinds.string,
    "chat_template_kwargs": kinds.obj,
    "tools": kinds.items,
    "tool_choice": kinds.raw,
    "parallel_tool_calls": kinds.boolean,
    "reasoning_effort": kinds.string,
}

_TEMPLATE_REFUSED = {
    "documents": Refused(f"Documents for retrieval {_NOT_YET_THESE}; put the text into a message.", lambda value: value == []),
    **{name: Refused(f"Images and audio {_NOT_YET_THESE}.") for name in ("mm_processor_kwargs", "media_io_kwargs")},
}

COMPLETIONS = Table(
    path="/v1/completions",
    fields={**COMMON, "prompt": kinds.prompt, "logprobs": kinds.integer, "suffix": kinds.string},
    required=("model", "prompt"),
    refused=_REFUSED_BOTH,
)

CHAT = Table(
    path="/v1/chat/completions",
    fields={
        **COMMON,
        **TEMPLATE,
        "messages": kinds.messages,
        "logprobs": kinds.boolean,
        "top_logprobs": kinds.integer,
        "max_completion_tokens": kinds.integer,
        "include_reasoning": kinds.boolean,
    },
    required=("model", "messages"),
    refused={
        **_REFUSED_BOTH,
        **_TEMPLATE_REFUSED,
        "functions": _FUNCTIONS,
        "function_call": _FUNCTIONS,
        "audio": Refused(f"Audio output {_NOT_YET}."),
        "modalities": Refused(f"Output other than text {_NOT_YET}.", lambda value: value == ["text"]),
        "prediction": Refused(f"Predicted output {_NOT_YET}."),
        "verbosity": Refused(f"verbosity {_NOT_YET}."),
        "moderation": Refused(f"Moderation {_NOT_YET}."),
        "prompt_cache_options": Refused("Prefixes are cached by themselves; leave prompt_cache_options out."),
        "return_prompt_text": Refused("/v1/chat/completions/render answers with the prompt; leave return_prompt_text out.", lambda value: value is False),
        "web_search_options": Refused(f"Web search {_NOT_YET}."),
        "suffix": Refused("Chat has no suffix; leave it out."),
    },
)

TOKENIZE = Table(
    path="/tokenize",
    fields={
        **TEMPLATE,
        "model": kinds.string,
        "prompt": kinds.raw,
        "messages": kinds.messages,
        "add_special_tokens": kinds.boolean,
        "return_token_strs": kinds.boolean,
    },
    refused=_TEMPLATE_REFUSED,
)

DETOKENIZE = Table(path="/detokenize", fields={"model": kinds.string, "tokens": kinds.raw}, required=("tokens",))


def check_fields(data: dict[str, Any], table: Table, allow_unknown: bool) -> tuple[dict[str, Any], list[str]]:
    """The fields that were given, read by their kinds; null is absent. Also the names that were ignored, where that is allowed.

    Raises ApiError 400 for the first field at fault. Linear in the body.
    """
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in data.items():
        kind = table.fields.get(name)
        if value is None and (kind or name in table.refused):
            continue
        if kind is not None:
            values[name] = kind.read(value, name)
        elif (refused := table.refused.get(name)) is not None:
            if not refused.neutral(value):
                raise bad(name, refused.reason, "unsupported_field")
        elif name in FOREIGN:
            raise bad(name, f"Unknown field {name!r}; here this is {_here(FOREIGN[name], table)}.", "unknown_field")
        elif allow_unknown:
            ignored.append(name)
        else:
            raise bad(name[:100], _unknown_text(name, table), "unknown_field")
    for name in table.required:
        if name not in values:
            raise bad(name, f"The field {name} is required.", "missing_field")
    return values, ignored


# A field of one route, and what says the same on another.
_SAME = (("prompt", "messages"), ("max_tokens", "max_completion_tokens"), ("logprobs", "top_logprobs"))
_ROUTES = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE)


def _here(name: str, table: Table) -> str:
    """A field, or what stands for it on this route."""
    if name in table.fields:
        return name
    return next((other for pair in _SAME if name in pair for other in pair if other in table.fields), name)


def _unknown_text(name: str, table: Table) -> str:
    shown = name[:100]
    sibling = next((other.path for other in _ROUTES if name in other.fields), None)
    if sibling is not None:
        here = _here(name, table)
        return f"Unknown field {shown!r}: it belongs to {sibling}, and this is {table.path}{f', which takes {here}' if here != name else ''}."
    close = difflib.get_close_matches(shown, table.fields.keys(), n=1, cutoff=0.75)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown field {shown!r}.{hint} (--allow-unknown-fields makes the server accept such fields and ignore them.)"


def json_schema(table: Table, names: Sequence[str]) -> dict[str, Any]:
    """The table as OpenAPI sees it; `names`: of the models. `x-refused`: what is a 400 where it asks for something, and why."""
    return {
        "x-refused": {name: refused.reason for name, refused in table.refused.items() if name not in table.fields},
        "type": "object",
        "properties": {name: {**kind.schema, "enum": list(names)} if name == "model" else kind.schema for name, kind in table.fields.items()},
        "required": list(table.required),
        "additionalProperties": False,
    }
