"""From what the user typed to the frozen configuration: defaults, checks of one option against another, warnings.

Owns: `resolve`, `from_kwargs`, the JSON form of `EngineConfig`.
Reads: `config.options`, `config.sections`, `memory_plan` (the host's memory, for --swap-space only).
Never: reads a checkpoint, probes a device, writes a log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oarlock.config import sections as s
from oarlock.config.option import Origin, coerce, spell
from oarlock.config.options import BY_NAME, find_option, spelling, unknown, with_extensions
from oarlock.config.options.model import DEFAULT_MODEL
from oarlock.errors import ConfigError

DEFAULT_TOKEN_BUDGET = 2048
_SECTIONS = {
    "model": s.ModelConfig,
    "cache": s.CacheConfig,
    "scheduler": s.SchedulerConfig,
    "parallel": s.ParallelConfig,
    "device": s.DeviceConfig,
    "observability": s.ObservabilityConfig,
    "server": s.ServerConfig,
}
_FREE_OF_FACTOR = ("su", "longrope", "default", "mrope")  # rope types whose parameters are not one factor


@dataclass(frozen=True, slots=True)
class Resolved:
    """The whole configuration, and what to tell the user about it."""

    engine: s.EngineConfig
    server: s.ServerConfig
    warnings: tuple[str, ...] = ()  # log each once
    typed: frozenset[str] = frozenset()  # paths that the user set, "cache.block_size"


def resolve(values: Mapping[str, Any], *, origin: Origin = "cli", host_bytes: int | None = None) -> Resolved:
    """Check `values` (keyword -> raw text or Python value, only what was typed) and lay them over the defaults.

    `host_bytes` is the host's memory for the check of --swap-space; None: read from the system when that is set.

    Raises:
        ConfigError: a value that is wrong, or that contradicts another; one line that names both and the remedy.
    """
    assigned: dict[str, Any] = {}
    by_path: dict[str, str] = {}  # path -> how its value was spelt
    warnings: list[str] = []
    if origin == "llm":
        assigned["observability.log_stats"] = False
    for key, raw in values.items():
        option = find_option(key)
        if option is None:
            raise ConfigError(unknown(key, origin))
        if option.extended_by and raw not in option.choices:
            option = with_extensions(option)
        value = coerce(option, raw, origin)
        if option.fate == "obsolete":
            if value == option.default:
                continue
            successor = f"use {spelling(option.instead, origin)}" if option.instead in BY_NAME else option.instead
            warnings.append(f"{spelling(option.name, origin)} is obsolete but still honoured: {successor}")
        if option.target is None:
            continue
        stored = option.store(value) if option.store else value
        shown = spell(option, raw, origin)
        if option.target in by_path and assigned[option.target] != stored:
            raise ConfigError(f"{by_path[option.target]} and {shown} set the same thing to different values; give one", option.name)
        assigned[option.target], by_path[option.target] = stored, shown
    if "model.model" not in assigned:
        assigned["model.model"] = DEFAULT_MODEL
        warnings.append(f"no model was named: taking the default, {DEFAULT_MODEL}")
    built = _build(assigned)
    typed = tuple(sorted(path for path in by_path if not path.startswith("server.")))
    engine = s.EngineConfig(**{name: built[name] for name in _SECTIONS if name != "server"}, typed=typed)
    warnings += check_relations(engine, built["server"], frozenset(by_path), origin, host_bytes)
    if engine.scheduler.policy == "fair":
        engine = dataclasses.replace(engine, scheduler=dataclasses.replace(engine.scheduler, num_owners=_owners(engine.scheduler, built["server"].api_keys, origin)))
    return Resolved(engine, built["server"], tuple(warnings), frozenset(by_path))


def from_kwargs(model: str | None = None, **kwargs: Any) -> Resolved:
    """`resolve` for `LLM(model, **kwargs)`: the same names with underscores.

    Raises:
        TypeError: no such keyword, or one that is the server's alone.
        ConfigError: as `resolve`.
    """
    for key in kwargs:
        option = find_option(key)
        if option is None:
            raise TypeError(f"LLM(): {unknown(key, 'llm')}")
        if not option.offline:
            raise TypeError(
                f"LLM(): {key} is the server's (oarlock serve {spelling(option.name, 'cli')}); offline there is nothing it would do"
            )
    values = kwargs if model is None else {"model": model, **kwargs}
    return resolve(values, origin="llm")


def _build(assigned: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for path, value in assigned.items():
        section, _, field = path.partition(".")
        if field.startswith("options."):  # a plugin's
            parts[section].setdefault("options", {})[field.removeprefix("options.")] = value
        else:
            parts[section][field] = value
    return {name: _SECTIONS[name](**fields) for name, fields in parts.items()}


def check_relations(
    engine: s.EngineConfig, server: s.ServerConfig, typed: frozenset[str], origin: Origin = "cli", host_bytes: int | None = None
) -> list[str]:
    """Everything that relates two options. Returns warnings. Raises ConfigError."""

    def name(option: str) -> str:
        return spelling(option, origin)

    scheduler, parallel, cache, model = engine.scheduler, engine.parallel, engine.cache, engine.model
    length = model.max_model_len if model.max_model_len and model.max_model_len > 0 else None
    token_budget(scheduler, length, origin)
    if parallel.executor == "inline" and parallel.tensor_parallel_size > 1:
        raise ConfigError(f"{name('distributed-executor-backend')} inline runs one worker, but {name('tensor-parallel-size')} is "
                          f"{parallel.tensor_parallel_size}; use mp")  # fmt: skip
    if {"scheduler.max_queued_requests", "scheduler.max_waiting_requests"} <= typed:
        raise ConfigError("--max-num-queued-reqs and --max-waiting-requests bound the same queue; give one")
    if scheduler.max_queued_requests is not None and scheduler.max_queued_requests < scheduler.max_num_seqs:
        raise ConfigError(f"--max-num-queued-reqs {scheduler.max_queued_requests} counts those that run, too, but --max-num-seqs is {scheduler.max_num_seqs}; "
                          f"raise the first, or lower the second", "max-num-queued-reqs")  # fmt: skip
    if scheduler.preemption_mode == "swap" and cache.swap_space_bytes == 0:
        raise ConfigError(f"{name('preemption-mode')} swap needs swap space, but {name('swap-space')} is 0; give it some GiB")
    if cache.kv_scales_path is not None and cache.kv_cache_dtype != "fp8_e4m3":
        raise ConfigError(f"{name('quantization-param-path')} holds scales for an fp8_e4m3 KV cache, but {name('kv-cache-dtype')} is "
                          f"{cache.kv_cache_dtype}; set it to fp8, or leave the file out")  # fmt: skip
    if model.max_logprobs < -1:
        raise ConfigError(f"{name('max-logprobs')} {model.max_logprobs}: must be -1 (no cap) or more")
    if model.rope_scaling is not None:
        _check_rope_scaling(model.rope_scaling, name("rope-scaling"))
    if server.enable_auto_tool_choice and not server.tool_call_parser:
        raise ConfigError(f"{name('enable-auto-tool-choice')} needs {name('tool-call-parser')}: what reads the calls out of the text; name one")
    if model.skip_tokenizer_init and (server.tool_call_parser or server.reasoning_parser):
        flag = name("tool-call-parser" if server.tool_call_parser else "reasoning-parser")
        raise ConfigError(f"{flag} reads text, but {name('skip-tokenizer-init')} is set; drop one of the two")
    if model.skip_tokenizer_init and server.chat_template:
        raise ConfigError(f"{name('chat-template')} needs a tokenizer, but {name('skip-tokenizer-init')} is set; drop one of the two")
    if bool(server.ssl_keyfile) and not server.ssl_certfile:
        raise ConfigError(f"{name('ssl-keyfile')} is set without {name('ssl-certfile')}; HTTPS needs both")
    if server.uds and typed & {"server.host", "server.port"}:
        raise ConfigError("--uds listens on a Unix socket, so --host and --port cannot be honoured; drop one or the other")
    if server.root_path and not server.root_path.startswith("/"):
        raise ConfigError(f"--root-path {server.root_path}: must begin with a slash, such as /{server.root_path}", "root-path")
    if not all(key.isascii() and key.isprintable() and key == key.strip() for key in server.api_keys):
        text = "--api-key (or its environment variable): a key has characters that no header can carry; use visible ASCII characters"
        raise ConfigError(f"{text}, and no space or line break around them", "api-key")
    warnings = []
    if cache.kv_cache_bytes is not None and cache.device_memory_utilization is not None:
        warnings.append(f"{name('kv-cache-memory')} wins over {name('device-memory-utilization')}, which has no effect")
    if model.trust_remote_code:
        warnings.append(f"{name('trust-remote-code')}: Python code that comes with {model.model} is allowed to run")
    if cache.swap_space_bytes:
        warnings += _check_swap(cache.swap_space_bytes, parallel.tensor_parallel_size, name("swap-space"), host_bytes)
    return warnings


def _owners(scheduler: s.SchedulerConfig, keys: tuple[str, ...], origin: Origin) -> int:
    """How many API keys share the engine. Raises ConfigError where there is nobody to share it, or no room for each."""
    count = len(set(keys))
    policy = f"{spelling('scheduling-policy', origin)} fair"
    if count < 2:
        raise ConfigError(f"{policy} shares the engine between API keys, and there {'is one' if count else 'is none'}; give --api-key several times, or take fcfs",
                          "scheduling-policy")  # fmt: skip
    if scheduler.max_inside < count:
        raise ConfigError(f"{policy}: {scheduler.shown_bound} leaves no place for each of {count} API keys; raise it", "scheduling-policy")
    return count


def tokens_per_step(scheduler: s.SchedulerConfig, max_model_len: int) -> int:
    """Most tokens in one step, as asked or by default; `token_budget` says whether it can be."""
    if scheduler.max_num_batched_tokens is not None:
        return scheduler.max_num_batched_tokens
    return max(DEFAULT_TOKEN_BUDGET, scheduler.max_num_seqs, 0 if scheduler.enable_chunked_prefill else max_model_len)


def token_budget(scheduler: s.SchedulerConfig, max_model_len: int | None, origin: Origin = "cli") -> int:
    """Most tokens in one step: --max-num-batched-tokens, or its default for this context length (None: not known yet).

    Raises:
        ConfigError: the flag is below --max-num-seqs, or below the context length without chunked prefill.
    """
    asked = tokens_per_step(scheduler, max_model_len or 0)
    if asked < scheduler.max_num_seqs:
        raise ConfigError(
            f"{spelling('max-num-batched-tokens', origin)} {asked} is below {spelling('max-num-seqs', origin)} {scheduler.max_num_seqs}; "
            f"raise the first to {scheduler.max_num_seqs} or lower the second to {asked}"
        )
    if not scheduler.enable_chunked_prefill and asked < (max_model_len or 0):
        raise ConfigError(
            f"{spelling('max-num-batched-tokens', origin)} {asked} is below the context length {max_model_len}, and without chunked prefill "
            f"no prompt of that length could run; raise it, lower {spelling('max-model-len', origin)}, or leave chunked prefill on"
        )
    return asked


def _check_rope_scaling(rope: Mapping[str, Any], name: str) -> None:
    kind = rope.get("rope_type", rope.get("type"))
    if not isinstance(kind, str):
        raise ConfigError(f'{name} {dict(rope)}: needs "rope_type" (or "type"), such as {{"rope_type": "linear", "factor": 2.0}}')
    factor = rope.get("factor")
    if kind not in _FREE_OF_FACTOR and (isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0):
        raise ConfigError(f'{name} {dict(rope)}: rope type {kind} needs a "factor" above 0')


def _check_swap(swap_bytes: int, workers: int, name: str, host_bytes: int | None) -> list[str]:
    if host_bytes is None:
        from oarlock.memory_plan import total_host_bytes

        host_bytes = total_host_bytes()
    total, gib = swap_bytes * workers, 2**30
    text = f"{name} {swap_bytes / gib:g} GiB for each of {workers} device{'s' if workers > 1 else ''} is {total / gib:.1f} GiB of {host_bytes / gib:.1f} GiB host memory"
    if total > 0.7 * host_bytes:
        raise ConfigError(f"{text}, above the limit of 70 %; at most {0.7 * host_bytes / workers / gib:.1f} fits", "swap-space")
    return [f"{text}, more than 40 %"] if total > 0.4 * host_bytes else []


def to_dict(config: s.EngineConfig) -> dict[str, Any]:
    """The configuration as JSON-able data. `from_dict` gives the equal object back."""
    return dataclasses.asdict(config)


def from_dict(data: Mapping[str, Any]) -> s.EngineConfig:
    """The inverse of `to_dict`, also after a round through JSON, which turns tuples into lists.

    Raises:
        TypeError: a field that this version does not know (front end and engine of different versions).
    """
    parts = {}
    for section, fields in data.items():
        if section == "typed":
            continue
        kind = _SECTIONS[section]
        tuples = {f.name for f in dataclasses.fields(kind) if str(f.type).startswith("tuple")}
        parts[section] = kind(**{key: tuple(value) if key in tuples else value for key, value in fields.items()})
    return s.EngineConfig(**parts, typed=tuple(data["typed"]))
