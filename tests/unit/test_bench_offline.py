"""`oarlock bench throughput` and `latency` over a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oarlock.cli.bench_offline import _latencies
from oarlock.cli.main import main
from oarlock.config.resolve import from_kwargs
from oarlock.frontend.outputs import RequestMetrics, RequestOutput
from oarlock.llm import LLM
from toy_frontend import SUMMARY, ScriptedClient, info


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ScriptedClient:
    made = ScriptedClient(lambda request, index: [97], engine_info=info(max_num_seqs=8))

    def make(**options: Any) -> LLM:
        return LLM.from_client(made, SUMMARY, None, from_kwargs(options.pop("model"), **options).engine)

    monkeypatch.setattr("oarlock.llm.LLM", make)
    return made


def test_throughput_counts_what_was_generated(client: ScriptedClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.json"
    flags = ["--num-prompts", "5", "--input-len", "3:6", "--output-len", "4", "--shared-prefix", "2", "--json", str(file)]
    assert main(["bench", "throughput", "toy", *flags]) == 0
    figures = json.loads(file.read_text())
    warmup, *requests = client.submitted
    assert len(requests) == 5
    assert len({r.prompt_token_ids[:2] for r in requests}) == 1 and all(5 <= len(r.prompt_token_ids) <= 8 for r in requests)
    assert all(r.params.max_tokens == 4 and not r.eos_token_ids for r in requests)
    assert (figures["completed"], figures["failed"], figures["output_tokens"]) == (5, 0, 20)
    assert figures["input_tokens"] == sum(len(r.prompt_token_ids) for r in requests)
    assert figures["output_tokens_per_s"] == pytest.approx(20 / figures["duration_s"])
    assert "5 completed, 0 failed" in capsys.readouterr().out and warmup.request_id == "0"


def test_latency_runs_each_batch_and_one_to_warm_up(client: ScriptedClient, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    flags = ["--batches", "1,4", "--iterations", "2", "--input-len", "3", "--output-len", "5", "--json", str(file)]
    assert main(["bench", "latency", "--model", "toy", *flags]) == 0
    one, four = json.loads(file.read_text())["batches"]
    assert (one["batch"], one["completed"], one["output_tokens"]) == (1, 2, 10)
    assert (four["batch"], four["completed"], four["output_tokens"]) == (4, 8, 40)
    assert len(client.submitted) == 3 * 1 + 3 * 4
    assert len({r.prompt_token_ids for r in client.submitted}) == 15, "a prompt came twice, so that its KV may have been reused"


def test_latencies_of_known_times() -> None:
    def result(first: float, last: float) -> RequestOutput:
        times = RequestMetrics(arrival_s=100.0, first_token_s=100.0 + first, last_token_s=100.0 + last)
        return RequestOutput("r", None, [1, 2], metrics=times, num_generated_tokens=5)

    record = _latencies(2, [([result(0.1, 0.5), result(0.2, 1.0)], 1.5)])
    assert record["ttft_ms"]["mean"] == pytest.approx(150)
    assert record["tpot_ms"]["mean"] == pytest.approx((100 + 200) / 2)
    assert record["e2e_ms"]["mean"] == pytest.approx(1500)
    assert record["output_tokens_per_s"] == pytest.approx(10 / 1.5)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["throughput"], "no model: oarlock bench throughput MODEL"),
        (["throughput", "m", "--num-prompts", "0"], "--num-prompts 0"),
        (["throughput", "m", "--input-len", "x"], "--input-len x"),
        (["latency", "m", "--batches", "1,x"], "--batches 1,x"),
        (["latency", "m", "--batches", "0"], "--batches 0"),
        (["latency", "m", "--iterations", "0"], "--iterations 0"),
        (["latency", "m", "--dtype", "int8"], "--dtype int8"),
        (["latency", "m", "--nonsense"], "--nonsense"),
        (["speed"], "choose from"),
    ],
)
def test_wrong_flags_are_named(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_lengths_beyond_the_context_are_named_by_their_flags(kind: str, client: ScriptedClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind, "toy", "--input-len", "10:60", "--output-len", "5"]) == 2
    assert "--input-len 10:60 --output-len 5: up to 65 tokens, but the context is 64" in capsys.readouterr().err
    assert not client.submitted


def test_help_promises_no_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "throughput", "--help"])
    text = capsys.readouterr().out
    assert "usage: oarlock bench throughput MODEL [options]" in text and "opt-125m" not in text
