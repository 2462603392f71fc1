"""Option table: KV cache, memory, scheduler.

Owns: these rows.
Reads: `config.option`.
Never: holds logic beyond a value's mapping.
"""

from __future__ import annotations

from functools import partial

from oarlock.config.option import Option

_cache = partial(Option, group="KV cache and memory")
_scheduler = partial(Option, group="Scheduler")

OPTIONS: tuple[Option, ...] = (
    _cache("block-size", "int", None, "Tokens in a KV block, any size that the device declares. Unset: its preferred one.", "cache.block_size", low=1),
    _cache("enable-prefix-caching", "bool", True, "Reuse the KV of prompts that begin alike.", "cache.enable_prefix_caching"),
    _cache(
        "kv-cache-dtype", "str", "auto", "Data type of the KV cache; auto: the model's; fp8 is fp8_e4m3.", "cache.kv_cache_dtype",
        choices=("auto", "fp8", "fp8_e5m2", "fp8_e4m3"), store=lambda value: "fp8_e4m3" if value == "fp8" else value,
    ),
    _cache(
        "swap-space", "gib", None, "Host memory per device for the KV of preempted requests, in GiB (0.5, 4) or with a unit (512MiB). "
        "Unset: what the device declares; 0: preempted requests are computed again.", "cache.swap_space_bytes", low=0,
        store=lambda value: None if value is None else int(value * 2**30),
    ),
    _cache(
        "cpu-swap-space", "gib", None, "Older name of --swap-space.", "cache.swap_space_bytes", low=0, fate="obsolete", instead="swap-space",
        store=lambda value: None if value is None else int(value * 2**30),
    ),
    _cache(
        "device-memory-utilization", "float", None, "Share of the device's whole memory for weights, activations and KV cache. Unset: 0.9 of an "
        "accelerator; where the device's memory is the host's, the KV cache takes at most 40 % of what is left.",
        "cache.device_memory_utilization", aliases=("gpu-memory-utilization",), low=0, low_open=True, high=1,
    ),
    _cache(
        "kv-cache-memory", "bytes", None, "Size of the KV cache per device (4GiB, 512MiB, bytes). Wins over --device-memory-utilization.",
        "cache.kv_cache_bytes", aliases=("kv-cache-memory-bytes",), low=1,
    ),
    _cache(
        "num-blocks-override", "int", None, "Number of usable KV blocks, whatever the memory.", "cache.num_blocks_override",
        aliases=("num-gpu-blocks-override",), low=1,
    ),
    _cache(
        "use-v2-block-manager", "bool", False, "Block tables are always managed the newer way.", fate="obsolete",
        instead="what it asks for is always on",
    ),
    _scheduler("max-num-seqs", "int", 256, "Most sequences in one step.", "scheduler.max_num_seqs", low=1),
    _scheduler(
        "batch-size", "int", None, "Older name of --max-num-seqs.", "scheduler.max_num_seqs", low=1, fate="obsolete", instead="max-num-seqs",
    ),
    _scheduler(
        "max-num-batched-tokens", "length", None, "Most tokens in one step. Unset: 2048, or more where --max-num-seqs or "
        "--no-enable-chunked-prefill need more.", "scheduler.max_num_batched_tokens", low=1,
        store=lambda value: None if value == -1 else value,
    ),
    _scheduler(
        "enable-chunked-prefill", "bool", True, "Compute long prompts in chunks, mixed with other requests' tokens.",
        "scheduler.enable_chunked_prefill",
    ),
    _scheduler(
        "scheduling-policy", "str", "fcfs", "fcfs: first come, first served; priority: a request's priority field first; "
        "fair: the API keys in turn, by the tokens that were computed for each.", "scheduler.policy", choices=("fcfs", "priority", "fair"),
    ),
    _scheduler(
        "preemption-mode", "str", None, "What happens to the KV of a preempted request: recompute, or swap to the host. Unset: recompute a single "
        "sequence, swap several where there is swap space.", "scheduler.preemption_mode", choices=("auto", "recompute", "swap"),
        store=lambda value: value or "auto",
    ),
    _scheduler(
        "scheduler-delay-factor", "float", 0.0, "Hold back new prompts for this factor times the last prompt's time.", "scheduler.delay_factor", low=0,
    ),
    _scheduler("max-in-flight", "int", 1, "Steps under way at once: 1, or 2 to overlap scheduling with the device.", "scheduler.max_in_flight", choices=(1, 2)),
    _scheduler(
        "num-lookahead-slots", "int", 0, "KV slots kept free behind each sequence.", "scheduler.num_lookahead_slots", low=0, fate="obsolete",
        instead="slots follow the number of speculated tokens, and the larger of the two counts",
    ),
    _scheduler(
        "max-waiting-requests", "int", 4096, "Prompts that may wait beside the --max-num-seqs that may run; one more is answered with 429.", "scheduler.max_waiting_requests", low=1,
    ),
    _scheduler(
        "max-num-queued-reqs", "int", None, "Prompts that may run and wait together; one more is answered with 429. Unset: --max-num-seqs + "
        "--max-waiting-requests.", "scheduler.max_queued_requests", low=1, offline=False,
    ),
    _scheduler(
        "max-num-queued-tokens", "length", None, "Prompt tokens of requests without an answer yet; a request that brings more is answered with 429, "
        "unless it is the only one. Unset: no bound.", "scheduler.max_queued_tokens", low=1, offline=False,
    ),
    _scheduler(
        "max-queue-time", "float", None, "Seconds that a request may wait for its first step; then it is answered with 429. Unset: as long as it takes.",
        "scheduler.max_queue_s", low=0, low_open=True, offline=False,
    ),
)  # fmt: skip
