"""Checks of one option against another, the swap check, and the configuration as data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from oarlock.config.resolve import from_dict, resolve, to_dict, token_budget
from oarlock.config.sections import SchedulerConfig
from oarlock.errors import ConfigError

GIB = 1 << 30


def test_what_was_typed_is_known_by_path() -> None:
    resolved = resolve({"model": "m", "block_size": "16", "disable_log_stats": True})
    assert resolved.typed == {"model.model", "cache.block_size", "observability.log_stats"}


def test_no_model_takes_the_default_and_says_so() -> None:
    assert any("facebook/opt-125m" in w for w in resolve({}).warnings)
    assert resolve({"model": "m"}).warnings == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_num_batched_tokens": 100}, ["--max-num-batched-tokens 100", "--max-num-seqs 256"]),
        (
            {"max_num_batched_tokens": 512, "max_model_len": 1024, "enable_chunked_prefill": False},
            ["--max-num-batched-tokens 512", "1024", "chunked prefill", "--max-model-len"],
        ),
        ({"distributed_executor_backend": "inline", "tensor_parallel_size": 2}, ["inline", "--tensor-parallel-size", "mp"]),
        ({"preemption_mode": "swap", "swap_space": 0}, ["--preemption-mode swap", "--swap-space"]),
        ({"max_logprobs": -2}, ["--max-logprobs -2", "-1"]),
        ({"skip_tokenizer_init": True, "chat_template": "t"}, ["--chat-template", "--skip-tokenizer-init"]),
        ({"ssl_keyfile": "k"}, ["--ssl-keyfile", "--ssl-certfile"]),
        ({"uds": "/run/x", "port": 1}, ["--uds", "--port"]),
        ({"nonsense": 1}, ["unknown option --nonsense"]),
    ],
)
def test_contradictions_name_both_options(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"model": "m", **values})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "length", "budget"),
    [
        ({}, None, 2048),
        ({}, 100_000, 2048),
        ({"max_num_seqs": 4000}, None, 4000),
        ({"enable_chunked_prefill": False}, 8192, 8192),
        ({"enable_chunked_prefill": False}, 100, 2048),
        ({"max_num_batched_tokens": 300}, 8192, 300),
    ],
)
def test_token_budget_defaults(settings: dict[str, Any], length: int | None, budget: int) -> None:
    assert token_budget(SchedulerConfig(**settings), length) == budget


def test_a_large_budget_without_chunks_is_judged_once_the_context_is_known() -> None:
    scheduler = resolve({"model": "m", "max_num_batched_tokens": 512, "enable_chunked_prefill": False}).engine.scheduler
    with pytest.raises(ConfigError, match="512 is below the context length 1024"):
        token_budget(scheduler, 1024)


@pytest.mark.parametrize(
    ("swap", "workers", "verdict"), [("1", 1, ""), ("5", 1, "warns"), ("8", 1, "fails"), ("2", 2, ""), ("2.5", 2, "warns"), ("4", 2, "fails")]
)
def test_swap_space_is_held_against_the_hosts_memory(swap: str, workers: int, verdict: str) -> None:
    values = {"model": "m", "swap_space": swap, "tensor_parallel_size": workers}
    if verdict == "fails":
        with pytest.raises(ConfigError, match=r"--swap-space .* 70 %; at most [0-9.]+ fits"):
            resolve(values, host_bytes=10 * GIB)
        return
    resolved = resolve(values, host_bytes=10 * GIB)
    assert resolved.engine.cache.swap_space_bytes == int(float(swap) * GIB)
    assert [("40 %" in w) for w in resolved.warnings] == ([True] if verdict else [])


def test_warnings_for_what_loses_or_is_risky() -> None:
    warnings = resolve({"model": "m", "kv_cache_memory": "1GiB", "device_memory_utilization": 0.5, "trust_remote_code": True}).warnings
    assert any("--kv-cache-memory wins over --device-memory-utilization" in w for w in warnings)
    assert any("--trust-remote-code" in w and "m" in w for w in warnings)


def test_rope_scaling_takes_both_spellings_and_types_without_factor() -> None:
    for rope in ({"type": "linear", "factor": 2}, {"rope_type": "yarn", "factor": 4.0}, {"type": "longrope", "short_factor": [1.0]}):
        assert resolve({"model": "m", "rope_scaling": json.dumps(rope)}).engine.model.rope_scaling == rope


def test_the_engines_configuration_survives_json() -> None:
    values = {"model": "m", "served_model_name": ["a", "b"], "hf_overrides": {"x": [1, {"y": 2}]}, "rope_scaling": {"type": "linear", "factor": 2}}
    engine = resolve(values).engine
    assert from_dict(json.loads(json.dumps(to_dict(engine)))) == engine
    with pytest.raises(TypeError):
        from_dict({**to_dict(engine), "cache": {"of_another_version": 1}})
