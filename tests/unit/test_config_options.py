"""The option table: every row parses, takes effect or is refused; spellings; values."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import oarlock
import pytest
from oarlock.config import sections
from oarlock.config.option import Option, coerce, flag
from oarlock.config.options import BY_NAME, ELSEWHERE, OPTIONS
from oarlock.config.parser import make_parser, parse, with_environment
from oarlock.config.resolve import Resolved, from_kwargs, resolve
from oarlock.errors import ConfigError

SECTIONS = {
    "model": sections.ModelConfig,
    "cache": sections.CacheConfig,
    "scheduler": sections.SchedulerConfig,
    "parallel": sections.ParallelConfig,
    "device": sections.DeviceConfig,
    "observability": sections.ObservabilityConfig,
    "server": sections.ServerConfig,
}

# What users of the era type, with the default and choices they expect. "?" stands for a default that Oarlock sets otherwise, on purpose.
ERA: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "model": ("facebook/opt-125m", ()), "tokenizer": (None, ()), "skip-tokenizer-init": (False, ()), "revision": (None, ()),
    "code-revision": (None, ()), "tokenizer-revision": (None, ()), "tokenizer-mode": ("auto", ("auto", "slow")),
    "trust-remote-code": (False, ()), "download-dir": (None, ()),
    "load-format": ("auto", ("auto", "pt", "safetensors", "npcache", "dummy", "tensorizer", "bitsandbytes")),
    "dtype": ("auto", ("auto", "half", "float16", "bfloat16", "float", "float32")),
    "kv-cache-dtype": ("auto", ("auto", "fp8", "fp8_e5m2", "fp8_e4m3")), "quantization-param-path": (None, ()), "max-model-len": (None, ()),
    "seed": (0, ()), "rope-scaling": (None, ()), "rope-theta": (None, ()), "enforce-eager": (False, ()),
    "max-context-len-to-capture": (None, ()), "max-seq-len-to-capture": (8192, ()), "max-logprobs": (20, ()),
    "disable-sliding-window": (False, ()),
    "quantization": (None, ()), "q": (None, ()),  # names are judged where plugins that read them are known
    "distributed-executor-backend": (None, ("ray", "mp")), "worker-use-ray": (False, ()), "pipeline-parallel-size": (1, ()), "pp": (1, ()),
    "tensor-parallel-size": (1, ()), "tp": (1, ()), "max-parallel-loading-workers": (None, ()), "ray-workers-use-nsight": (False, ()),
    "disable-custom-all-reduce": (False, ()), "tokenizer-pool-size": (0, ()), "tokenizer-pool-type": ("ray", ()),
    "tokenizer-pool-extra-config": (None, ()), "device": ("auto", ()),
    "block-size": ("?", ()), "enable-prefix-caching": ("?", ()), "use-v2-block-manager": (False, ()), "num-lookahead-slots": (0, ()),
    "swap-space": ("?", ()), "gpu-memory-utilization": ("?", ()), "num-gpu-blocks-override": (None, ()), "max-num-batched-tokens": (None, ()),
    "max-num-seqs": (256, ()), "disable-log-stats": (False, ()), "preemption-mode": (None, ("recompute", "swap")),
    "enable-chunked-prefill": ("?", ()), "scheduler-delay-factor": (0.0, ()), "ngram-prompt-lookup-max": (None, ()),
    "ngram-prompt-lookup-min": (None, ()), "speculative-model": (None, ()), "num-speculative-tokens": (None, ()),
    "speculative-draft-tensor-parallel-size": (None, ()), "speculative-max-model-len": (None, ()),
    "speculative-disable-by-batch-size": (None, ()), "otlp-traces-endpoint": (None, ()), "served-model-name": ((), ()),
    "model-loader-extra-config": (None, ()), "qlora-adapter-name-or-path": (None, ()), "engine-use-ray": (False, ()),
    "disable-log-requests": (False, ()), "max-log-len": (None, ()), "enable-lora": (False, ()), "max-loras": (1, ()),
    "max-lora-rank": (16, ()), "lora-extra-vocab-size": (256, (0, 256, 512)), "lora-dtype": ("auto", ("auto", "float16", "bfloat16", "float32")),
    "long-lora-scaling-factors": (None, ()), "max-cpu-loras": (None, ()), "fully-sharded-loras": (False, ()), "lora-modules": ((), ()),
    "guided-decoding-backend": ("?", ("outlines", "lm-format-enforcer")), "image-input-type": (None, ("pixel_values", "image_features")),
    "image-token-id": (None, ()), "image-input-shape": (None, ()), "image-feature-size": (None, ()), "image-processor": (None, ()),
    "image-processor-revision": (None, ()), "disable-image-processor": (False, ()),
    "host": (None, ()), "port": (8000, ()), "uvicorn-log-level": ("info", ("debug", "info", "warning", "error", "critical", "trace")),
    "allow-credentials": (False, ()), "allowed-origins": ("?", ()), "allowed-methods": (("*",), ()), "allowed-headers": (("*",), ()),
    "api-key": ((), ()), "chat-template": (None, ()), "response-role": ("assistant", ()), "ssl-keyfile": (None, ()),
    "ssl-certfile": (None, ()), "ssl-ca-certs": (None, ()), "ssl-cert-reqs": (0, ()), "root-path": (None, ()), "middleware": ((), ()),
}  # fmt: skip

# Another valid value for options whose kind alone does not yield one.
SAMPLES: dict[str, Any] = {
    "root-path": "/api",
    "port": 9001, "device-memory-utilization": 0.5, "rope-scaling": {"rope_type": "linear", "factor": 2.0}, "max-num-batched-tokens": 4096,
    "distributed-executor-backend": "mp", "max-in-flight": 2, "preemption-mode": "recompute", "generation-config": "none", "ssl-certfile": "c.pem",
    "uds": "/run/o.sock", "chat-template": "t.jinja", "max-model-len": 4096, "long-lora-scaling-factors": [4.0], "ssl-keyfile": "k.pem",
    "tokenizer-pool-type": "custom",
}  # fmt: skip
NEEDS = {
    "enable-auto-tool-choice": {"tool_call_parser": "hermes"},
    "ssl-keyfile": {"ssl_certfile": "c.pem"},
    "quantization-param-path": {"kv_cache_dtype": "fp8"},
    "max-num-queued-reqs": {"max_num_seqs": 4},
}


def sample(option: Option) -> Any:
    """A value other than the default that `coerce` would take if every feature were built."""
    if option.name in SAMPLES:
        return SAMPLES[option.name]
    if option.kind == "bool":
        return not option.default
    accepted = [c for c in option.choices if c != option.default and (option.built is None or c in option.built)]
    if option.choices:
        return (accepted or [c for c in option.choices if c != option.default])[0]
    by_kind: dict[str, Any] = {"int": 7, "length": 7, "float": 7.0, "gib": 1.0, "bytes": 7, "str": "word", "object": {"a": 1}}
    return by_kind.get(option.kind, ["a", "b"])


def typed(option: Option, value: Any) -> list[str]:
    """The value as command-line arguments."""
    name = flag(option.name)
    if option.kind == "bool":
        return [name if value else f"--no-{option.name}"]
    if option.kind == "words":
        return [name, *value]
    if option.kind == "repeat":
        return [part for v in value for part in (name, v)]
    return [name, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]


def run(*argv: str) -> Resolved:
    return resolve(parse(make_parser(), argv), host_bytes=1 << 40)


def fields(resolved: Resolved) -> dict[str, Any]:
    parts = {name: getattr(resolved.engine, name) for name in SECTIONS if name != "server"} | {"server": resolved.server}
    return {f"{name}.{f.name}": getattr(part, f.name) for name, part in parts.items() for f in dataclasses.fields(part)}


def test_no_two_options_share_a_name() -> None:
    assert len(BY_NAME) == sum(len(option.names) for option in OPTIONS)
    assert not set(ELSEWHERE) & set(BY_NAME)


@pytest.mark.parametrize("name", ERA)
def test_every_flag_of_the_era_has_its_default_and_choices(name: str) -> None:
    default, choices = ERA[name]
    option = BY_NAME[name]
    assert set(choices) <= set(option.choices)
    if default != "?":
        assert option.default == default


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_an_option_takes_effect_or_is_refused_when_set(option: Option) -> None:
    value = sample(option)
    assert value != option.default
    extra = NEEDS.get(option.name, {})
    values = {**parse(make_parser(), typed(option, value)), **extra}
    refused = option.fate == "refused" or (option.built is not None and value not in option.built)
    if refused:
        with pytest.raises(ConfigError) as caught:
            resolve(values, host_bytes=1 << 40)
        message = str(caught.value)
        assert message.startswith(flag(option.name)) and "\n" not in message
        assert option.feature in message and option.remedy in message
        return
    before, after = fields(resolve(extra)), fields(resolve(values, host_bytes=1 << 40))
    changed = {path for path in after if after[path] != before[path]}
    if option.target is None:
        assert option.fate == "obsolete" and not changed
    elif option.name == "disable-log-requests":  # asks for what is so: the default
        assert not changed
    else:
        assert changed == {option.target}


@pytest.mark.parametrize("name", ["host", "uds", "api-key", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "otlp-traces-endpoint"])
def test_an_empty_variable_never_opens_a_server_to_more_than_was_meant(name: str) -> None:
    for raw in ("", "None"):
        with pytest.raises(ConfigError, match=f"--{name} is empty; give a value, or leave it out"):
            coerce(next(o for o in OPTIONS if o.name == name), raw, "cli")


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.blank_is_unset], ids=lambda o: o.name)
def test_the_default_can_be_typed_and_changes_nothing(option: Option) -> None:
    if option.default is None or option.default == ():
        arguments = [flag(option.name), "None"]
    elif option.kind == "bool":
        arguments = [flag(option.name)] if option.default else [f"--no-{option.name}"]
    else:
        arguments = typed(option, list(option.default) if isinstance(option.default, tuple) else option.default)
    assert fields(run(*arguments)) == fields(run())


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.fate == "obsolete"], ids=lambda o: o.name)
def test_an_obsolete_option_warns_once_and_names_its_successor(option: Option) -> None:
    warnings = [w for w in run("m", *typed(option, sample(option))).warnings if option.name in w]
    assert len(warnings) == 1
    assert (flag(option.instead) if option.instead in BY_NAME else option.instead) in warnings[0]


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.target and o.fate == "live"], ids=lambda o: o.name)
def test_the_tables_default_is_the_fields(option: Option) -> None:
    stored = option.store(option.default) if option.store else option.default
    assert fields(run())[str(option.target)] == stored


def test_every_field_of_the_configuration_can_be_set() -> None:
    targets = {option.target for option in OPTIONS} | {"device.options", "scheduler.num_owners"}  # plugins' options fill the one, and the number of keys is the other
    assert {path for path in fields(run()) if path not in targets} == set()


def test_underscores_and_dashes_are_equal() -> None:
    assert fields(run("--max_num_seqs=8", "--enable_chunked_prefill")) == fields(run("--max-num-seqs", "8", "--enable-chunked-prefill"))


def test_underscores_in_values_are_left_alone() -> None:
    assert run("--tokenizer=my_org/my_model", "--served-model-name", "a_b").engine.model.tokenizer == "my_org/my_model"


@pytest.mark.parametrize(
    ("argv", "model"),
    [(["m"], "m"), (["--model", "m"], "m"), (["m", "--model", "m"], "m"), ([], "facebook/opt-125m"), (["--seed", "3", "m"], "m")],
)
def test_the_model_is_positional_or_a_flag(argv: list[str], model: str) -> None:
    assert run(*argv).engine.model.model == model


def test_two_different_models_are_an_error() -> None:
    with pytest.raises(ConfigError, match="two models were given, a and --model b"):
        run("a", "--model", "b")


def test_an_alias_means_the_same_and_may_not_differ() -> None:
    assert run("--gpu-memory-utilization", "0.5").engine.cache.device_memory_utilization == 0.5
    with pytest.raises(ConfigError, match="--gpu-memory-utilization and --device-memory-utilization are the same option"):
        run("--gpu-memory-utilization", "0.5", "--device-memory-utilization", "0.6")
    with pytest.raises(ConfigError, match="--max-seq-len-to-capture 1 and --max-context-len-to-capture 2 set the same thing"):
        run("--max-seq-len-to-capture", "1", "--max-context-len-to-capture", "2")


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("max-model-len", "4k", 4000), ("max-model-len", "8K", 8192), ("max-model-len", "1M", 1 << 20), ("max-model-len", "auto", -1),
        ("max-model-len", "-1", -1), ("max-model-len", "0.5k", 500), ("kv-cache-memory", "4GiB", 4 << 30), ("kv-cache-memory", "512MiB", 512 << 20),
        ("kv-cache-memory", "4G", 4 << 30), ("kv-cache-memory", "4GB", 4 * 10**9), ("kv-cache-memory", "1000", 1000),
        ("swap-space", "0.5", 0.5), ("swap-space", "4", 4.0), ("swap-space", "512MiB", 0.5), ("tokenizer", "None", None), ("tokenizer", "", None),
        ("allowed-origins", '["*"]', ("*",)), ("long-lora-scaling-factors", None, None), ("max-logprobs", "-1", -1),
    ],
)  # fmt: skip
def test_values_are_read_with_their_units(name: str, raw: Any, value: Any) -> None:
    assert coerce(BY_NAME[name], raw, "cli") == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-model-len", "4q"], ["--max-model-len 4q", "4096", "auto"]),
        (["--max-model-len", "0"], ["--max-model-len 0", "at least 1"]),
        (["--gpu-memory-utilization", "1.5"], ["--device-memory-utilization 1.5", "above 0", "at most 1"]),
        (["--gpu-memory-utilization", "nan"], ["finite"]),
        (["--kv-cache-memory", "4 parsecs"], ["512MiB"]),
        (["--port", "http"], ["--port http", "whole number"]),
        (["--port", "70000"], ["at most 65535"]),
        (["--dtype", "int3"], ["--dtype int3", "bfloat16"]),
        (["--rope-scaling", "{"], ["--rope-scaling {", "JSON"]),
        (["--rope-scaling", "[1]"], ["JSON object"]),
        (["--rope-scaling", '{"factor": 2}'], ["rope_type"]),
        (["--rope-scaling", '{"type": "linear"}'], ["factor"]),
        (["--allowed-origins", "*"], ["JSON"]),
        (["--seed"], ["--seed", "expected one argument"]),
        (["--load-format", "tensorizer"], ["--load-format tensorizer", "safetensors"]),
        (["--distributed-executor-backend", "ray"], ["--distributed-executor-backend ray", "mp"]),
        (["--worker-use-ray"], ["--worker-use-ray", "--distributed-executor-backend mp"]),
        (["-pp", "2"], ["--pipeline-parallel-size 2", "--tensor-parallel-size"]),
        (["--max-num-seqs", "None"], ["--max-num-seqs None", "whole number"]),
        (["--max-modl-len", "100"], ["unknown option --max-modl-len", "did you mean --max-model-len?"]),
        (["--max-len", "100"], ["unknown option --max-len", "did you mean --max-model-len or"]),
        (["--zzzzzzzz"], ["unknown option --zzzzzzzz", "--help"]),
        (["a", "b"], ["unexpected argument 'b'", "usage: oarlock serve [MODEL] [options]"]),
    ],
)
def test_a_wrong_value_is_one_line_with_flag_value_and_remedy(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run(*argv)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_that_belong_elsewhere_say_where(name: str) -> None:
    with pytest.raises(ConfigError, match=flag(name)) as caught:
        run(flag(name), "4")
    assert "did you mean" not in str(caught.value) and "{" not in str(caught.value)
    with pytest.raises(TypeError, match=name.replace("-", "_")):
        from_kwargs("m", **{name.replace("-", "_"): 4})


def test_older_names_of_the_offline_api_map_and_warn() -> None:
    resolved = from_kwargs("m", cpu_swap_space=0, batch_size=8)
    assert resolved.engine.cache.swap_space_bytes == 0
    assert resolved.engine.scheduler.max_num_seqs == 8
    assert sorted(resolved.warnings) == [
        "batch_size is obsolete but still honoured: use max_num_seqs",
        "cpu_swap_space is obsolete but still honoured: use swap_space",
    ]


def test_keywords_are_flags_with_underscores() -> None:
    resolved = from_kwargs("m", max_model_len="4K", gpu_memory_utilization=0.5, enable_prefix_caching=False, served_model_name="x", tokenizer=None)
    assert resolved.engine.model.max_model_len == 4096
    assert resolved.engine.cache.device_memory_utilization == 0.5
    assert resolved.engine.cache.enable_prefix_caching is False
    assert resolved.engine.model.served_model_name == ("x",)
    assert resolved.engine.observability.log_stats is False
    assert from_kwargs("m", disable_log_stats=False).engine.observability.log_stats is True


def test_wrong_keywords_are_type_errors_and_wrong_values_config_errors() -> None:
    with pytest.raises(TypeError, match="unknown option max_modl_len; did you mean max_model_len"):
        from_kwargs("m", max_modl_len=1)
    with pytest.raises(TypeError, match="unknown option max_len; did you mean max_model_len\\?"):
        from_kwargs("m", max_len=1)
    with pytest.raises(TypeError, match="port is the server's"):
        from_kwargs("m", port=1)
    with pytest.raises(ConfigError, match="max_num_seqs='many': must be a whole number"):
        from_kwargs("m", max_num_seqs="many")
    with pytest.raises(ConfigError, match="max_num_seqs=True"):
        from_kwargs("m", max_num_seqs=True)
    with pytest.raises(ConfigError, match="enable_lora=True: this version of Oarlock has no LoRA adapters"):
        from_kwargs("m", enable_lora=True)
    with pytest.raises(ConfigError, match="dtype=None: a value is needed; the default is auto"):
        from_kwargs("m", dtype=None)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("use-v2-block-manager", "(obsolete: what it asks for is always on)"),
        ("batch-size", "(obsolete; use --max-num-seqs)"),
        ("allowed-methods", '[["*"]]'),
        ("max-body-bytes", "[32MiB]"),
        ("drain-grace", "[30]"),
        ("log-json", "[off]"),
        ("load-format", "(not in this version: tensorizer, bitsandbytes, sharded_state)"),
        ("pipeline-parallel-size", "(not in this version: only 1)"),
        ("enable-lora", "(not in this version)"),
    ],
)
def test_the_help_speaks_as_one_would_type(option: str, words: str) -> None:
    text = " ".join(make_parser().format_help().replace("-\n", "-").split())
    entry = text[text.index(f"--{option}") :]
    assert words.replace(" ", "") in entry[: entry.index(" --", 400)].replace(" ", ""), entry[:400]


def test_the_api_key_of_the_environment_counts_unless_one_is_typed() -> None:
    assert resolve(with_environment({}, {"VLLM_API_KEY": "a"})).server.api_keys == ("a",)
    assert resolve(with_environment({}, {"VLLM_API_KEY": "a", "OARLOCK_API_KEY": "b"})).server.api_keys == ("b",)
    assert resolve(with_environment({"api_key": ["c", "d"]}, {"OARLOCK_API_KEY": "b"})).server.api_keys == ("c", "d")
    assert with_environment({}, {}) == {}


@pytest.mark.parametrize("key", ["", "None", " ", "a ", "a\n", "é"])
def test_an_api_key_that_nobody_can_send_is_refused_and_never_means_that_none_is_asked_for(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        resolve(with_environment({"api_key": [key]}, {"OARLOCK_API_KEY": "b"}))
    if key and key != "None":
        with pytest.raises(ConfigError, match="--api-key"):
            resolve(with_environment({}, {"OARLOCK_API_KEY": key}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seed", "9" * 30), "64 bits"),
        (("--max-num-seqs", "9" * 50), "64 bits"),
        (("--max-model-len", "9" * 400), "64 bits"),
        (("--kv-cache-memory", "9" * 400), "64 bits"),
        (("--kv-cache-memory", "99999999TiB"), "64 bits"),
        (("--max-n", "129"), "128"),
        (("--root-path", "api"), "/api"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_number_or_path_beyond_use_is_refused_in_words(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run(*arguments)
    assert str(caught.value).startswith(arguments[0])


def test_a_repeatable_flag_does_not_swallow_the_model() -> None:
    resolved = run("--api-key", "k", "m", "--api-key", "l")
    assert (resolved.server.api_keys, resolved.engine.model.model) == (("k", "l"), "m")


# ---------------------------------------------------------------- nothing is accepted and then read by nobody
CORE = Path(oarlock.__file__).parent
READERS = ("config", "_config", "s")  # how a section is called where it is passed on, beside its own name


def _reads() -> set[tuple[str, str]]:
    """(what, field) of every `what.field` that core reads; the table and the records themselves are not counted."""
    found = set()
    for file in CORE.rglob("*.py"):
        if file.is_relative_to(CORE / "config" / "options") or file == CORE / "config" / "sections.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                found.add((owner, node.attr))
    return found


def test_every_field_that_can_be_set_is_read() -> None:
    reads, unread = _reads(), []
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            options = [o for o in OPTIONS if o.target == f"{section}.{field.name}"]
            can_be_set = any(o.fate != "refused" and not (o.built is not None and set(o.built) <= {o.default}) for o in options) or not options
            if can_be_set and not any((owner, field.name) in reads for owner in (section, *READERS)):
                unread.append(f"{section}.{field.name}")
    assert not unread, f"accepted without effect: {', '.join(unread)}"
    assert ("cache", "no_such_field") not in reads
