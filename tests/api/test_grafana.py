"""Every query of docs/grafana/dashboard.json, and the names that routers and other dashboards read, against /metrics of a running server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_server import RealServer

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "dashboard.json").read_text())
# What Prometheus itself adds to each series, and what Grafana puts into a query.
SCRAPE_LABELS = {"instance", "job"}
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$instance": ".*"}
FUNCTIONS = {"sum", "rate", "histogram_quantile", "label_values", "avg", "max", "min", "count", "increase", "irate"}
KEYWORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool", "and", "or", "unless"}
TOKEN = re.compile(r'\s+|(?P<string>"(?:[^"\\]|\\.)*")|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<number>\d+(?:\.\d+)?)|(?P<range>\[[^\]]*\])|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>])')

# vLLM's own Grafana dashboard and alert rules; the endpoint picker of the Kubernetes gateway's inference extension; vLLM's production stack
# (whose router reads the older names of the prefix cache's counters); usual autoscalers.
READ_ELSEWHERE = ["vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_count", "vllm:e2e_request_latency_seconds_sum", "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket", "vllm:inter_token_latency_seconds_sum", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped", "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum", "vllm:gpu_cache_usage_perc", "vllm:cpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:request_success_total", "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum", "vllm:request_inference_time_seconds_sum", "vllm:request_max_num_generation_tokens_sum", "vllm:request_params_max_tokens_bucket", "vllm:request_params_n_bucket", "vllm:request_prefill_kv_computed_tokens_bucket", "vllm:request_time_per_output_token_seconds_bucket", "vllm:iteration_tokens_total_bucket", "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total", "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_by_source_total", "vllm:cache_config_info"]  # fmt: skip


@dataclass
class Read:
    """A metric that a query reads, the labels that it asks of it, and the values that it asks for with `=`."""

    name: str
    labels: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)


def tokens(query: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(query):
        found = TOKEN.match(query, at)
        assert found, f"{query[at:]!r} of {query!r} is no PromQL that this test knows"
        at = found.end()
        if found.lastgroup:
            yield found.lastgroup, found[0]


def reads(query: str) -> list[Read]:
    """The metrics of a query; every `by` of it must find its labels on all of them."""
    words = list(tokens(query))
    balance = [text for kind, text in words if kind == "sign" and text in "(){}"]
    assert balance.count("(") == balance.count(")") and balance.count("{") == balance.count("}"), query
    found: list[Read] = []
    grouped: set[str] = set()
    at = 0
    while at < len(words):
        kind, text = words[at]
        following = words[at + 1][1] if at + 1 < len(words) else ""
        if kind == "name" and text in KEYWORDS:
            if text == "by":
                end = words.index(("sign", ")"), at)
                grouped |= {label for kind, label in words[at + 2 : end] if kind == "name"}
                at = end
        elif kind == "name" and following == "(":
            assert text in FUNCTIONS, f"{text} in {query!r}"
        elif kind == "name" and following == "by":
            assert text in FUNCTIONS
        elif kind == "name":
            read = Read(text)
            found.append(read)
            if following == "{":
                end = words.index(("sign", "}"), at)
                matchers = words[at + 2 : end]
                for place in range(0, len(matchers), 4):
                    (_, label), (_, sign), (_, value) = matchers[place : place + 3]
                    read.labels.add(label)
                    if sign == "=":
                        read.values[label] = value.strip('"')
                at = end
        at += 1
    for read in found:
        read.labels |= grouped
    return found


def queries(part: Any) -> Iterator[str]:
    """Every expression anywhere in the file, variables filled in."""
    if isinstance(part, list):
        for each in part:
            yield from queries(each)
    elif isinstance(part, dict):
        for name, value in part.items():
            if name == "expr" or (name == "query" and isinstance(value, str) and "(" in value):
                for variable, text in VARIABLES.items():
                    value = value.replace(variable, text)
                yield value
            else:
                yield from queries(value)


@pytest.fixture(scope="module")
def series(shared_server: RealServer) -> dict[str, list[dict[str, str]]]:
    """Sample name -> the labels of each of its series."""
    shared_server.cmp(max_tokens=2)
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(shared_server.http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_every_query_finds_its_metrics_and_labels(series: dict[str, list[dict[str, str]]]) -> None:
    seen = 0
    for query in queries(DASHBOARD):
        if variable := re.fullmatch(r"label_values\((.*), (\w+)\)", query):
            query = f"sum by ({variable[2]}) ({variable[1]})"
        for read in reads(query):
            assert read.name in series, f"{read.name} is not on /metrics: {query}"
            for labels in series[read.name]:
                assert read.labels <= {*labels, *SCRAPE_LABELS}, f"{query}: {read.name} has {sorted(labels)}"
            for label, value in read.values.items():
                assert any(labels[label] == value for labels in series[read.name]), f"{query}: no {read.name} has {label}={value}"
            seen += 1
    assert seen > 40


def test_a_query_that_would_find_nothing_is_found_out(series: dict[str, list[dict[str, str]]]) -> None:
    (read,) = reads('histogram_quantile(0.9, sum by (le, engine) (rate(vllm:e2e_request_latency_seconds_bucket{model_name=~".*",le="x"}[5m])))')
    assert read == Read("vllm:e2e_request_latency_seconds_bucket", {"le", "engine", "model_name"}, {"le": "x"})
    assert not read.labels <= {*series[read.name][0], *SCRAPE_LABELS}
    assert [each.name for each in reads("sum(rate(a_total[1m])) / sum(rate(b_total[1m])) > 2")] == ["a_total", "b_total"]
    for wrong in ("sum(rate(a[5m])", "sum(a) ; b", "summ(a)"):
        with pytest.raises(AssertionError):
            reads(wrong)


def test_what_others_read_is_there(series: dict[str, list[dict[str, str]]]) -> None:
    assert not [name for name in READ_ELSEWHERE if name not in series]
    assert {"block_size", "num_gpu_blocks"} <= set(series["vllm:cache_config_info"][0])  # the gateway's names for the cache's size


def test_every_panel_has_a_place_and_a_query() -> None:
    panels = DASHBOARD["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place, asked = panel["gridPos"], [target["expr"] for target in panel["targets"]]
        assert asked and len(set(asked)) == len(asked), panel["title"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
