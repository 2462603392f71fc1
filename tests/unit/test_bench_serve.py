"""`oarlock bench serve` against a server whose delays are known."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from oarlock.cli.bench_client import Load, Sample
from oarlock.cli.bench_prompts import Lengths, Prompt, random_ids, random_text, read_prompts
from oarlock.cli.bench_report import percentile, summarize, table
from oarlock.cli.main import main


def bench(server: FakeServer, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON record); {} when none was written."""
    file = tmp_path / "figures.json"
    code = main(["bench", "serve", "--url", server.url, "--json", str(file), "--input-len", "4", "--output-len", "3", *flags])
    return code, json.loads(file.read_text()) if file.exists() else {}


# ---------------------------------------------------------------- figures
def test_times_are_those_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(pieces=("a", "b", "c", "d", "e"), ttft_s=0.06, gap_s=0.03, hold_s=0.02, usage={"prompt_tokens": 7, "completion_tokens": 5}) as server:
        code, figures = bench(server, tmp_path, "--num-prompts", "4", "--max-concurrency", "2")
    assert code == 0
    assert (figures["completed"], figures["failed"], figures["input_tokens"], figures["output_tokens"]) == (4, 0, 28, 20)
    late = 50  # ms that a busy machine may add
    for name, least in (("ttft_ms", 60), ("itl_ms", 30), ("tpot_ms", (4 * 30 + 20) / 4), ("e2e_ms", 60 + 4 * 30 + 20)):
        assert least - 2 <= figures[name]["median"] <= least + late, (name, figures[name])
    # Four requests of 200 ms, two at a time.
    assert 0.4 <= figures["duration_s"] <= 0.8
    assert figures["requests_per_s"] == pytest.approx(4 / figures["duration_s"])
    assert figures["output_tokens_per_s"] == pytest.approx(20 / figures["duration_s"])
    assert figures["total_tokens_per_s"] == pytest.approx(48 / figures["duration_s"])
    assert server.most_open == 2
    printed = capsys.readouterr().out
    assert "4 completed, 0 failed" in printed and f"{figures['ttft_ms']['median']:.2f}" in printed


def sample(**fields: Any) -> Sample:
    return Sample(**{"ttft_s": 0.1, "latency_s": 0.5, "input_tokens": 10, "output_tokens": 5, "is_counted": True, "gaps_s": [0.1] * 4} | fields)


def test_figures_of_known_samples() -> None:
    samples = [sample(), sample(ttft_s=0.3, latency_s=1.1), sample(error="500: x", output_tokens=99), sample(output_tokens=1, gaps_s=[])]
    f = summarize(samples, 2.0)
    assert (f["completed"], f["failed"], f["output_tokens"], f["input_tokens"]) == (3, 1, 11, 30)
    assert f["requests_per_s"] == 1.5 and f["output_tokens_per_s"] == 5.5 and f["total_tokens_per_s"] == 20.5
    assert f["tpot_ms"]["mean"] == pytest.approx((100 + 200) / 2)  # (0.5 - 0.1) / 4, (1.1 - 0.3) / 4; one token has none
    assert f["ttft_ms"] == pytest.approx({"mean": 500 / 3, "median": 100, "p99": 100 + 0.98 * 200})
    assert f["itl_ms"]["mean"] == pytest.approx(100)
    assert f["errors"] == {"500: x": 1}
    assert "failed 1 times: 500: x" in table(f)


def test_no_completed_request_has_no_times() -> None:
    f = summarize([sample(error="x")], 1.0)
    assert f["ttft_ms"] is None and f["requests_per_s"] == 0
    assert "-" in table(f)


@pytest.mark.parametrize(("values", "percent", "expected"), [([7.0], 99, 7.0), ([0.0, 10.0], 50, 5.0), ([float(v) for v in range(101)], 99, 99.0)])
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


# ---------------------------------------------------------------- requests
def test_requests_carry_what_was_asked_for(tmp_path: Path) -> None:
    with FakeServer() as server:
        bench(server, tmp_path, "--num-prompts", "3", "--ignore-eos", "--extra-body", '{"top_p": 0.5}', "--warmup", "1", "--shared-prefix", "6", "--model", "m")
    _, *bodies = [seen.body for seen in server.completions()]
    assert len(bodies) == 3
    for body in bodies:
        prompt = body.pop("prompt")
        assert len(prompt) == 10 and all(1000 <= t <= 9999 for t in prompt)
        assert body == {
            "model": "m", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True, "top_p": 0.5,
        }  # fmt: skip


def test_the_shared_prefix_is_common_and_the_warmup_does_not_begin_with_it(tmp_path: Path) -> None:
    with FakeServer() as server:
        bench(server, tmp_path, "--num-prompts", "3", "--shared-prefix", "6")
    warmup, *prompts = [seen.body["prompt"] for seen in server.completions()]
    assert len({tuple(p[:6]) for p in prompts}) == 1 and len({tuple(p) for p in prompts}) == 3
    assert warmup[0] != prompts[0][0] or warmup[:6] != prompts[0][:6]


def test_chat_sends_messages_and_its_empty_first_chunk_is_no_token(tmp_path: Path) -> None:
    with FakeServer(ttft_s=0.1) as server:
        code, figures = bench(server, tmp_path, "--num-prompts", "1", "--endpoint", "chat", "--warmup", "0")
    assert code == 0 and server.completions()[0].path == "/v1/chat/completions"
    (message,) = server.completions()[0].body["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 4
    assert figures["ttft_ms"]["median"] >= 98


def test_without_usage_pieces_are_counted_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(usage=None) as server:
        _, figures = bench(server, tmp_path, "--num-prompts", "2")
    assert (figures["input_tokens"], figures["output_tokens"], figures["tokens_are_counted_by_server"]) == (8, 6, False)
    assert "no usage" in capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 7])
def test_events_may_be_cut_anywhere(tmp_path: Path, size: int) -> None:
    with FakeServer(pieces=("é", "日本", "🎉"), bytes_at_once=size) as server:
        code, figures = bench(server, tmp_path, "--num-prompts", "1", "--warmup", "0")
    assert code == 0 and figures["output_tokens"] == 3


# ---------------------------------------------------------------- arrivals
def test_all_at_once_without_a_rate(tmp_path: Path) -> None:
    with FakeServer(ttft_s=0.15) as server:
        bench(server, tmp_path, "--num-prompts", "6", "--warmup", "0")
    assert server.most_open == 6


def test_arrivals_are_poisson() -> None:
    starts = Load("", "completions", "m", request_rate=20.0, seed=3).starts(4000)
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 20, rel=0.05) and deviation == pytest.approx(mean, rel=0.08)  # exponential: both alike
    assert starts == Load("", "completions", "m", request_rate=20.0, seed=3).starts(4000)
    assert starts != Load("", "completions", "m", request_rate=20.0, seed=4).starts(4000)


def test_requests_leave_when_they_are_due(tmp_path: Path) -> None:
    with FakeServer() as server:
        bench(server, tmp_path, "--num-prompts", "8", "--request-rate", "40", "--warmup", "0", "--seed", "5")
    seen = sorted(s.at_s for s in server.completions())
    due = Load("", "completions", "m", request_rate=40.0, seed=5).starts(8)
    for got, expected in zip(seen, due, strict=True):
        assert -0.05 <= got - seen[0] - expected <= 0.15


# ---------------------------------------------------------------- faults
def test_failed_requests_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(failing=range(4, 9)) as server:
        code, figures = bench(server, tmp_path, "--num-prompts", "5", "--max-concurrency", "1")  # the warm-up is the first of three
    assert code == 1
    assert (figures["completed"], figures["failed"], figures["errors"]) == (2, 3, {"500: fault 500": 3})
    assert "failed 3 times: 500: fault 500" in capsys.readouterr().out


@pytest.mark.parametrize(("script", "words"), [({"error_event": True}, "the engine has ended"), ({"done": False}, "without [DONE]")])
def test_a_broken_stream_is_a_failure(tmp_path: Path, script: dict[str, Any], words: str) -> None:
    with FakeServer(**script) as server:
        code, figures = bench(server, tmp_path, "--num-prompts", "2", "--warmup", "0")
    assert code == 1 and figures["failed"] == 2
    assert words in next(iter(figures["errors"]))


def test_a_refused_first_request_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(status=400) as server:
        code, figures = bench(server, tmp_path)
    assert (code, figures) == (1, {})
    assert capsys.readouterr().err == "oarlock bench: error: the first request failed: 400: fault 400\n"


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        url = server.url
    assert main(["bench", "serve", "--url", url]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_the_key_is_sent_and_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(key="secret-1") as server:
        assert bench(server, tmp_path, "--num-prompts", "1", "--api-key", "secret-1")[0] == 0
        written = (tmp_path / "figures.json").read_text()
        assert bench(server, tmp_path, "--num-prompts", "1", "--api-key", "secret-2")[0] == 1
        monkeypatch.setenv("OARLOCK_API_KEY", "secret-1")
        assert bench(server, tmp_path, "--num-prompts", "1")[0] == 0
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err + written
    assert "401: no valid key" in shown.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input-len", "0"], "--input-len 0: must be at least 1"),
        (["--output-len", "9:3"], "smaller number comes first"),
        (["--output-len", "many"], "give a number of tokens"),
        (["--num-prompts", "0"], "--num-prompts 0"),
        (["--max-concurrency", "0"], "--max-concurrency 0"),
        (["--request-rate", "0"], "--request-rate 0.0: must be above 0"),
        (["--request-rate", "nan"], "must be above 0"),
        (["--endpoint", "chat", "--dataset", "random"], "use --dataset text"),
        (["--dataset", "none.jsonl"], "none.jsonl: cannot be read"),
        (["--extra-body", "[1]"], "must be an object"),
        (["--id-range", "9", "3"], "--id-range 9 3"),
        (["--nonsense", "1"], "--nonsense"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert words in capsys.readouterr().err


# ---------------------------------------------------------------- prompts
def test_the_same_seed_gives_the_same_prompts() -> None:
    for make in (random_ids, random_text):
        one, two, other = (make(5, Lengths(3, 9), Lengths(1, 4), seed=seed) for seed in (1, 1, 2))
        assert one == two and one != other
        assert all(3 <= p.input_len <= 9 and 1 <= p.output_len <= 4 for p in one)


def test_lengths_fill_their_range() -> None:
    drawn = {p.input_len for p in random_ids(300, Lengths(2, 5), Lengths(1, 1))}
    assert drawn == {2, 3, 4, 5}


def test_prompt_files(tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text('"one two"\n{"prompt": [4, 5], "output_len": 9}\n\n{"messages": [{"role": "user", "content": "a b c"}]}\n')
    assert read_prompts(lines, Lengths(2, 2)) == [
        Prompt(text="one two", input_len=2, output_len=2),
        Prompt(token_ids=(4, 5), input_len=2, output_len=9),
        Prompt(messages=({"role": "user", "content": "a b c"},), input_len=3, output_len=2),
    ]
    shared = tmp_path / "s.json"
    shared.write_text(json.dumps([{"id": "x", "conversations": [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}]}]))
    assert read_prompts(shared, Lengths(2, 2)) == [Prompt(text="hello there", input_len=2, output_len=2)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"prompt": ""}', "entry 1"),
        ("a.jsonl", '"x"\n{"nothing": 1}', "entry 2"),
        ("a.jsonl", "{", "not JSON lines"),
        ("a.json", "{}", "must hold a list"),
        ("a.json", "[]", "no prompt"),
        ("a.json", '[{"prompt": "x", "output_len": 0}]', "output_len is 0"),
        ("a.json", "[7]", "entry 1"),
    ],
)
def test_wrong_prompt_files_are_named(name: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(text)
    assert main(["bench", "serve", "--dataset", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert words in said and name in said


def test_a_file_is_sent_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "first", "output_len": 2}\n{"prompt": "second"}\n')
    with FakeServer() as server:
        code, figures = bench(server, tmp_path, "--dataset", str(file), "--warmup", "0")
        assert code == 0 and figures["num_prompts"] == 2
        assert sorted((s.body["prompt"], s.body["max_tokens"]) for s in server.completions()) == [("first", 2), ("second", 3)]
        assert bench(server, tmp_path, "--dataset", str(file), "--num-prompts", "3")[0] == 2
    assert f"--num-prompts 3: {file} has 2" in capsys.readouterr().err
