"""From checked request fields to `SamplingParams` and what else a generation needs to know.

Owns: the defaults of the HTTP API, and the rules that hold only over HTTP.
Reads: `sampling_params`, `config`, `model_summary`, `server.schema`.
Never: touches the network or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from oarlock.sampling_params import STRUCTURED_NAMES, SamplingParams
from oarlock.server.errors import bad

MAX_TEMPERATURE = 2.0
COMPLETION_MAX_TOKENS = 16
_PASSED_ON = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
    "use_beam_search", "length_penalty", "early_stopping", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """How a request wants its answer, beside the sampling."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    logprobs: int | None = None  # entries beside the sampled token, as the client asked
    prompt_logprobs: int | None = None  # as the client asked; echo with logprobs computes them too
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True


def make_options(values: Mapping[str, Any], *, logprobs: int | None, add_special_tokens: bool, policy: str) -> Options:
    """Raises ApiError 400 for combinations that cannot be honoured."""
    stream = values.get("stream", False)
    stream_options = values.get("stream_options")
    if stream_options is not None and not stream:
        raise bad("stream_options", "stream_options is only allowed with stream: true.")
    stream_options = stream_options or {}
    if values.get("priority", 0) != 0 and policy != "priority":
        raise bad("priority", "priority needs a server started with --scheduling-policy priority.", "unsupported_field")
    return Options(
        stream=stream,
        include_usage=stream_options.get("include_usage", False),
        continuous_usage=stream_options.get("continuous_usage_stats", False),
        echo=values.get("echo", False),
        logprobs=logprobs,
        prompt_logprobs=values.get("prompt_logprobs"),
        return_token_ids=values.get("return_token_ids", False),
        tokens_as_ids=values.get("return_tokens_as_token_ids", False),
        skip_special_tokens=values.get("skip_special_tokens", True),
        priority=values.get("priority", 0),
        cache_salt=values.get("cache_salt"),
        add_special_tokens=values.get("add_special_tokens", add_special_tokens),
    )


def make_params(values: Mapping[str, Any], defaults: Mapping[str, Any], options: Options, max_tokens: int | None) -> SamplingParams:
    """Raises ApiError, or InvalidParameter naming the field."""
    known = {name: values[name] for name in _PASSED_ON if name in values}
    beams = known.get("use_beam_search", False)
    if not beams:
        known = {**defaults, **known}
    if known.get("temperature", 0.0) > MAX_TEMPERATURE:
        raise bad("temperature", f"temperature is {known['temperature']:g}; over HTTP the limit is {MAX_TEMPERATURE:g}.", "invalid_value")
    prompt_logprobs = options.prompt_logprobs
    if options.echo and options.logprobs is not None:
        asked = (options.logprobs, options.logprobs if prompt_logprobs is None else prompt_logprobs)
        prompt_logprobs = -1 if -1 in asked else max(asked)
    if max_tokens == 0 and prompt_logprobs is None:
        prompt_logprobs = 0  # only the prompt is computed
    known |= {name: values[name] for name in (*STRUCTURED_NAMES, "structured_outputs") if name in values}
    params = SamplingParams(**known, max_tokens=max_tokens, logprobs=options.logprobs, prompt_logprobs=prompt_logprobs)
    if options.stream:
        _check_stream(params, options)
    return params


def _check_stream(params: SamplingParams, options: Options) -> None:
    if params.use_beam_search:
        raise bad("stream", "Beams cannot be streamed: which one wins is known only at the end. Leave stream out.", "unsupported_field")
    if params.best_of is not None and params.best_of > params.n:
        raise bad(
            "best_of",
            f"best_of is {params.best_of} and n is {params.n}: the best ones are known only at the end, so this cannot be streamed.",
            "unsupported_field",
        )
    if options.prompt_logprobs is not None:
        raise bad("prompt_logprobs", "prompt_logprobs is not available with stream: true; use echo with logprobs.", "unsupported_field")


def completion_settings(values: Mapping[str, Any], defaults: Mapping[str, Any], policy: str) -> tuple[SamplingParams, Options]:
    """For /v1/completions. max_tokens defaults to 16; 0 is allowed with echo, to score a prompt."""
    max_tokens = values.get("max_tokens", COMPLETION_MAX_TOKENS)
    echo = values.get("echo", False)
    if max_tokens < 1 and not (echo and max_tokens == 0):
        hint = "" if max_tokens else " (0 is allowed only with echo: true)"
        raise bad("max_tokens", f"max_tokens must be at least 1{hint}, not {max_tokens}.", "invalid_value")
    logprobs = values.get("logprobs")
    options = make_options(values, logprobs=logprobs, add_special_tokens=True, policy=policy)
    return make_params(values, defaults, options, max_tokens), options


def chat_settings(values: Mapping[str, Any], defaults: Mapping[str, Any], policy: str) -> tuple[SamplingParams, Options, str]:
    """For /v1/chat/completions; also the name of the length field that was used. No limit given: the rest of the context."""
    newer, older = values.get("max_completion_tokens"), values.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise bad("max_completion_tokens", f"max_completion_tokens is {newer} and max_tokens is {older}; send one of them.", "invalid_value")
    name = "max_tokens" if newer is None else "max_completion_tokens"
    max_tokens = older if newer is None else newer
    if max_tokens is not None and max_tokens < 1:
        raise bad(name, f"{name} must be at least 1, not {max_tokens}.", "invalid_value")
    logprobs: int | None = None
    if values.get("logprobs", False):
        logprobs = values.get("top_logprobs", 0)
        if logprobs < 0:
            raise bad("top_logprobs", f"top_logprobs must be at least 0, not {logprobs}.", "invalid_value")
    elif "top_logprobs" in values:
        raise bad("top_logprobs", "top_logprobs is only allowed with logprobs: true.", "invalid_value")
    options = make_options(values, logprobs=logprobs, add_special_tokens=False, policy=policy)
    options = replace(options, echo=False)  # in chat, echo repeats the last message and asks for no prompt logprobs
    return make_params(values, defaults, options, max_tokens), options, name
