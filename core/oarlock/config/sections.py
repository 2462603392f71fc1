"""The frozen configuration. Nobody writes it after `resolve()`.

Owns: the sections and what each field means.
Reads: nothing.
Never: parses a command line (`config.options` does), touches a device, imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint, and how it is read."""

    model: str  # hub name, folder or .gguf file, as the user gave it
    tokenizer: str | None = None  # None: the model
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    revision: str | None = None
    code_revision: str | None = None
    tokenizer_revision: str | None = None  # None: revision
    trust_remote_code: bool = False
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None  # None: derived from the checkpoint; -1: what fits the memory
    seed: int = 0
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    max_logprobs: int = 20  # -1: no cap
    max_logprob_entries: int = 1 << 23  # of one request: positions x entries; each costs some 300 bytes of host memory while it is answered
    disable_sliding_window: bool = False
    quantization: str | None = None
    served_model_name: tuple[str, ...] = ()
    generation_config: str = "auto"  # "auto": from the checkpoint; "none"; or a folder
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    pooler_config: dict[str, Any] = field(default_factory=dict)  # over what the checkpoint says of its vectors; `pooling_params.read_pooler_config`
    guided_decoding_backend: str = "auto"  # name of an extension of kind "structured_output"; "auto": the one of highest priority that can serve


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = None  # None: the device's preferred one
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"  # "auto": the model's; "fp8_e4m3", "fp8_e5m2"
    kv_scales_path: str | None = None  # file of scales for fp8_e4m3; None: the checkpoint's, or 1
    swap_space_bytes: int | None = None  # per worker; None: the device's default
    device_memory_utilization: float | None = None  # None: the device's rule (0.9 of an accelerator; design on a host)
    kv_cache_bytes: int | None = None  # absolute; wins over utilization
    num_blocks_override: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Continuous batching."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # None: 2048, or what chunking off requires
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    max_in_flight: int = 1
    num_lookahead_slots: int = 0
    delay_factor: float = 0.0
    max_waiting_requests: int = 4096  # beside max_num_seqs: their sum bounds the prompts inside, for engine, server and offline calls
    max_queued_requests: int | None = None  # bounds them instead, where it is set
    max_queued_tokens: int | None = None  # prompt tokens of requests without an answer yet; None: no bound of their own
    max_queue_s: float | None = None  # longest wait for a request's first step; None: as long as it takes
    num_owners: int = 1  # under the fair policy: API keys, which share the queue in equal parts; set by `resolve`

    @property
    def max_inside(self) -> int:
        """Most prompts that run or wait."""
        return self.max_num_seqs + self.max_waiting_requests if self.max_queued_requests is None else self.max_queued_requests

    @property
    def shown_bound(self) -> str:
        """`max_inside`, as errors name it."""
        if self.max_queued_requests is not None:
            return f"max_num_queued_reqs {self.max_queued_requests}"
        return f"max_num_seqs {self.max_num_seqs} + max_waiting_requests {self.max_waiting_requests}"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Several devices."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    executor: str = "auto"  # "auto", "inline", "mp", or a plugin's
    max_parallel_loading_workers: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Which device, as the user asked."""

    device: str = "auto"
    enforce_eager: bool = False
    max_seq_len_to_capture: int = 8192
    disable_custom_all_reduce: bool = False
    threads: int | None = None  # compute threads on a host device; None: from the allowed CPUs
    options: dict[str, Any] = field(default_factory=dict)  # what plugins declared; complete once an engine is prepared


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """Logs and statistics."""

    log_level: str = "info"
    log_json: bool = False
    log_stats: bool = True
    log_requests: bool = False
    max_log_len: int | None = None  # characters of a prompt in the log; None: all of it
    otlp_traces_endpoint: str | None = None  # where the sink of plugins/otel sends a span for each request


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """HTTP."""

    host: str | None = None  # None: 0.0.0.0
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    root_path: str | None = None
    middleware: tuple[str, ...] = ()
    chat_template: str | None = None
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    exclude_tools_when_none: bool = False
    reasoning_parser: str | None = None
    allow_unknown_fields: bool = False
    allow_request_chat_template: bool = False
    uvicorn_log_level: str = "info"
    drain_grace_s: float = 30.0
    stall_s: float = 120.0  # open requests and no word from the engine for so long: /health is 503
    max_body_bytes: int = 32 << 20
    max_n: int = 128
    max_stop_strings: int = 16
    max_stop_len: int = 1024
    max_prompts: int = 1024
    max_logit_bias: int = 1024
    max_bad_words: int = 256
    max_stop_token_ids: int = 1024
    max_messages: int = 16384
    max_text_chars: int = 1 << 20  # of a text that need not fit the context
    max_grammar_chars: int = 1 << 17  # of a schema, pattern, grammar or all choices together
    max_tools: int = 128
    max_tool_bytes: int = 256 << 10  # all tools of a request as JSON


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs; crosses the process boundary as JSON."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    typed: tuple[str, ...] = ()  # paths that the user set, "cache.block_size"; plugins may not change those
