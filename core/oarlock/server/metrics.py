"""The /metrics page: the `vllm:` series that dashboards read, and ours.

Owns: every metric, its labels and buckets.
Reads: `messages`, `frontend.outputs`.
Never: counts a prompt more than once, whatever its n; stops with `--disable-log-stats` (that stops the log only).

A *request* here is one prompt: a batch of three prompts counts three. Tokens are counted as `usage` counts them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.utils import floatToGoString

from oarlock.config.sections import EngineConfig
from oarlock.frontend.outputs import RequestMetrics, RequestOutput
from oarlock.messages import EngineInfo, EngineOutputs, SchedulerStats
from oarlock.sampling_params import SamplingParams

CONTENT_TYPE = CONTENT_TYPE_LATEST
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_E2E_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKEN_COUNTS = {  # histograms whose buckets end at the context's length
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_prefill_kv_computed_tokens": "Prompt tokens of a request that no cached prefix saved.",
    "vllm:request_generation_tokens": "Generated tokens of a request.",
    "vllm:request_max_num_generation_tokens": "Generated tokens of a request's longest choice.",
    "vllm:request_params_max_tokens": "Longest answer that a request allowed, in tokens.",
}


def _token_buckets(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, … up to `limit`."""
    buckets = [step * 10**power for power in range(9) for step in (1, 2, 5)]
    return tuple(b for b in buckets if b <= max(limit, 1)) or (1,)


class _EngineCollector:
    """The scheduler's latest counters, read when the page is asked for."""

    def __init__(self, name: str, info: EngineInfo, stats: Callable[[], SchedulerStats], compiles: Callable[[], int]) -> None:
        self._name, self._info, self._stats, self._compiles = name, info, stats, compiles

    def collect(self) -> Iterator[Metric]:
        s = self._stats()
        used = s.num_used_blocks / s.num_blocks if s.num_blocks else 0.0
        host = s.num_used_host_blocks / s.num_host_blocks if s.num_host_blocks else 0.0
        gauges = (
            ("vllm:num_requests_running", "Requests in the running batch.", s.num_running),
            ("vllm:num_requests_waiting", "Requests that wait for room.", s.num_waiting),
            ("vllm:num_requests_swapped", "Requests whose KV lies in host memory.", s.num_swapped),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1.", used),
            ("vllm:gpu_cache_usage_perc", "The same under its older name.", used),
            ("vllm:cpu_cache_usage_perc", "Share of host KV blocks in use, 0 to 1.", host),
            ("oarlock_kv_blocks_used", "KV blocks held by requests; blocks kept only for prefix reuse do not count.", s.num_used_blocks),
            ("oarlock_kv_blocks_cached", "KV blocks kept for prefix reuse.", s.num_cached_blocks),
            ("oarlock_compiles_after_warmup", "Programs compiled after warm-up; stays 0.", self._compiles()),
        )
        counters = (
            ("vllm:num_preemptions", "Times a request lost its blocks and was computed again or swapped.", s.num_preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_hits),
            ("vllm:gpu_prefix_cache_queries", "Prompt tokens looked up, under the older name.", s.prefix_queries),
            ("vllm:gpu_prefix_cache_hits", "Prompt tokens found, under the older name.", s.prefix_hits),
            ("oarlock_engine_prompt_tokens", "Prompt tokens the engine computed, chunk by chunk; preempted ones again.", s.num_prompt_tokens),
            ("oarlock_swap_outs", "Requests swapped to host memory.", s.num_swap_outs),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._name], float(value))
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._name], float(value))
            yield counter


class _TokenGaps:
    """Times between two outputs of one choice, under the name that they had first and the one that they have now.

    PERF: two of the library's histograms would take a tenth of the API process's time.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = [0] * (len(_TOKEN_S) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_TOKEN_S, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        buckets = list(zip(map(floatToGoString, (*_TOKEN_S, float("inf"))), map(float, accumulate(self._counts)), strict=True))
        for name, text in (
            ("vllm:time_per_output_token_seconds", "Between two outputs of one choice."),
            ("vllm:inter_token_latency_seconds", "The same under its newer name."),
        ):
            histogram = HistogramMetricFamily(name, text, labels=["model_name"])
            histogram.add_metric([self._name], buckets, self._seconds)
            yield histogram


class ServerMetrics:
    """One registry for one server. Called on the event loop's thread only."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._name = model_name
        self._last_token_s: dict[str, dict[int, float]] = {}  # request id -> branch -> time of its last token
        # PERF: what every step and every stream adds is summed here until the page is asked for.
        self._new_tokens, self._new_engine_tokens, self._new_steps, self._new_seconds = 0, 0, 0, 0.0
        self._prompt_tokens_computed, self._tokens_made = 0, 0
        self.compiles_after_warmup = 0

        def labelled(metric: Any) -> Any:
            return metric.labels(model_name=model_name)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Any:
            return labelled(Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self.registry))

        def counter(name: str, text: str) -> Any:
            return labelled(Counter(name, text, ["model_name"], registry=self.registry))

        self._histogram = histogram
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of answered requests, as usage counts them.")
        by_source = Counter("vllm:prompt_tokens_by_source", "Prompt tokens of answered requests.", ["model_name", "source"], registry=self.registry)
        self._computed, self._cached = (by_source.labels(model_name, source) for source in ("local_compute", "local_cache_hit"))
        self._cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens of answered requests that a cached prefix saved.")
        self._generated_tokens = counter("vllm:generation_tokens", "Generated tokens, as usage counts them.")
        self._engine_tokens = counter("oarlock_engine_tokens", "Tokens the engine made, also those nobody gets; rises at every step.")
        self._steps = counter("oarlock_steps", "Steps that gave output.")
        self._step_seconds = counter("oarlock_step_seconds", "Wall time of those steps.")
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens that a step computed, of prompts and of answers.", _STEP_TOKENS)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_S)
        self._gaps = _TokenGaps(model_name)
        self.registry.register(self._gaps)
        self._request_tpot = histogram("vllm:request_time_per_output_token_seconds", "Mean of one request.", _TOKEN_S)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _E2E_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", _TTFT_S)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", _E2E_S)
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.", _E2E_S)
        self._inference = histogram("vllm:request_inference_time_seconds", "From the first step to the last token.", _E2E_S)
        self._n = histogram("vllm:request_params_n", "n of requests.", _COUNTS)
        self._best_of = histogram("vllm:request_params_best_of", "best_of of requests.", _COUNTS)
        self._success = Counter(
            "vllm:request_success", "Requests that ended by themselves.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._outcomes = Counter(
            "oarlock_requests", "Requests by outcome: stop, length, abort, error, refused.", ["model_name", "outcome"], registry=self.registry
        )
        for outcome in ("stop", "length", "abort", "error", "refused"):
            self._outcomes.labels(model_name, outcome)
        for reason in ("stop", "length"):
            self._success.labels(model_name, reason)
        self._max_model_len = 0
        self._token_counts: list[Any] = []  # in the order of _TOKEN_COUNTS

    def attach(self, info: EngineInfo, config: EngineConfig, stats: Callable[[], SchedulerStats]) -> None:
        """Once the engine is ready: its gauges and its constants."""
        buckets = _token_buckets(info.max_model_len)
        self._max_model_len = info.max_model_len
        self._token_counts = [self._histogram(name, text, buckets) for name, text in _TOKEN_COUNTS.items()]
        self.registry.register(_EngineCollector(self._name, info, stats, lambda: self.compiles_after_warmup))
        facts = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "num_cpu_blocks": info.num_host_blocks,
            "enable_prefix_caching": config.cache.enable_prefix_caching,
            "cache_dtype": config.cache.kv_cache_dtype,
            "device": info.device,
        }
        self._constants("vllm:cache_config_info", "The KV cache, as labels.", tuple(facts), tuple(facts.values()))
        device = (info.device, info.dtype, info.device_text)
        self._constants("oarlock_device_info", "The device as it describes itself.", ("device", "dtype", "description"), device)
        text = "What serves each op; what was installed for it and does not, with the reason and the remedy."
        self._constants("oarlock_op_info", text, ("op", "implementation", "rejected"), *info.op_table)
        plan = Gauge("oarlock_memory_plan_bytes", "What each worker's memory is planned for; the last part says what bounds the KV cache.",
                     ["model_name", "part", "note"], registry=self.registry)  # fmt: skip
        for part, size, note in info.memory_plan:
            plan.labels(self._name, part, note).set(size)

    def _constants(self, name: str, text: str, labels: tuple[str, ...], *rows: tuple[object, ...]) -> None:
        """A gauge that is 1 for each row of label values."""
        gauge = Gauge(name, text, ["model_name", *labels], registry=self.registry)
        for row in rows:
            gauge.labels(self._name, *map(str, row)).set(1)

    def totals(self) -> tuple[float, float]:
        """(prompt tokens that the engine computed, tokens that it made), since start."""
        return self._prompt_tokens_computed, self._tokens_made

    def page(self) -> bytes:
        """The page as text. The only reader of the registry."""
        self._generated_tokens.inc(self._new_tokens)
        self._engine_tokens.inc(self._new_engine_tokens)
        self._steps.inc(self._new_steps)
        self._step_seconds.inc(self._new_seconds)
        self._new_tokens, self._new_engine_tokens, self._new_steps, self._new_seconds = 0, 0, 0, 0.0
        return generate_latest(self.registry)

    # ---------------------------------------------------------------- called while serving
    def on_step(self, outputs: EngineOutputs) -> None:
        """Every message of the engine; costs about a microsecond an output."""
        now = time.monotonic()
        tokens = 0
        for output in outputs.outputs:
            tokens += len(output.new_token_ids)
            branches = self._last_token_s.get(output.request_id)
            if branches is None or not output.new_token_ids:
                continue
            last = branches.get(output.index)
            branches[output.index] = now
            if last is not None:
                self._gaps.observe(now - last)
        self.compiles_after_warmup = outputs.compiles_after_warmup
        self._prompt_tokens_computed = outputs.stats.num_prompt_tokens
        if outputs.num_step_tokens:
            self._step_tokens.observe(outputs.num_step_tokens)
        if tokens:
            self._tokens_made += tokens
            self._new_engine_tokens += tokens
            self._new_steps += 1
            self._new_seconds += outputs.step_s

    def opened(self, engine_id: str) -> None:
        self._last_token_s[engine_id] = {}

    def closed(self, engine_id: str) -> None:
        self._last_token_s.pop(engine_id, None)

    def first_token(self, times: RequestMetrics) -> None:
        """Once per prompt."""
        if times.first_token_s is not None:
            self._ttft.observe(max(0.0, times.first_token_s - times.arrival_s))

    def generated(self, num_tokens: int) -> None:
        """Tokens that went to a client, or will in the response being made."""
        self._new_tokens += num_tokens

    def finished(self, output: RequestOutput, reason: str, generated: Sequence[int], params: SamplingParams) -> None:
        """Once per prompt that ended by itself, after its tokens were counted by `generated`. `generated`: tokens of each choice."""
        times, prompt, total = output.metrics, len(output.prompt_token_ids), sum(generated)
        cached = min(output.num_cached_tokens, prompt)
        self._prompt_tokens.inc(prompt)
        self._computed.inc(prompt - cached)
        self._cached.inc(cached)
        self._cached_tokens.inc(cached)
        allowed = params.max_tokens if params.max_tokens is not None else self._max_model_len - prompt
        for histogram, count in zip(self._token_counts, (prompt, prompt - cached, total, max(generated, default=0), allowed), strict=True):
            histogram.observe(count)
        self._n.observe(params.n)
        self._best_of.observe(params.num_branches)
        start, first, last = times.first_scheduled_s, times.first_token_s, times.last_token_s
        for histogram, since, until in (
            (self._e2e, times.arrival_s, times.finished_s or time.time()),
            (self._queue, times.arrival_s, start),
            (self._prefill, start, first),
            (self._decode, first, last),
            (self._inference, start, last),
        ):
            if since is not None and until is not None:
                histogram.observe(max(0.0, until - since))
        if first is not None and last is not None and total > params.n:
            self._request_tpot.observe(max(0.0, last - first) / (total / params.n - 1))
        self._success.labels(self._name, reason).inc()
        self._outcomes.labels(self._name, reason).inc()

    def outcome(self, outcome: str, count: int = 1) -> None:
        """abort: the client hung up. error: the engine or a step failed. refused: a 4xx or 503 before any work."""
        self._outcomes.labels(self._name, outcome).inc(count)
