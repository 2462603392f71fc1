"""Level 5's judgements, without a server: what an answer must be, what a leak is, when the level is unsupported."""

from __future__ import annotations

import importlib.util

import oarlock.llm
import pytest
from conformance_subjects import make_subject
from oarlock import plugins
from oarlock.conformance import serve_level
from oarlock.conformance.cases import CheckFailed, run_case
from oarlock.conformance.serving import Answer, Server

CASES = {case.id: case for case in serve_level.cases()}
BODY = {"prompt": [4, 5, 6], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def harbour():
    made = serve_level.Harbour()
    made.dtype = "float32"
    yield made
    made.close()


def best(harbour, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(harbour.model.logprobs(tuple(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def answer(*choices, status=200):
    made = Answer(status, {"error": {}})
    for index, choice in enumerate(choices):
        made.add({"index": index, "text": " w1", "finish_reason": "length", **choice})
    return made


def test_a_right_answer_passes(harbour):
    tokens = best(harbour, BODY["prompt"], 3)
    harbour.check(BODY, answer({"token_ids": tokens}))
    harbour.check({**BODY, "logprobs": 1}, answer({"token_ids": tokens, "logprobs": {"token_logprobs": [-1.0, -0.5, 0.0]}}))
    harbour.check({**BODY, "n": 2, "temperature": 1}, answer({"token_ids": [1, 2, 3]}, {"token_ids": [4], "finish_reason": "stop"}))


@pytest.mark.parametrize(
    ("body", "choices", "status", "words"),
    [
        ({}, [], 500, "500"),
        ({}, [], 200, "choices"),
        ({"n": 2}, [{"token_ids": [1, 2, 3]}], 200, "choices"),
        ({}, [{"token_ids": [1, 2, 3], "finish_reason": None}], 200, "finish reasons"),
        ({}, [{"token_ids": [1, 2, 3], "finish_reason": "error"}], 200, "finish reasons"),
        ({}, [{"token_ids": [1, 2]}], 200, "2 tokens and finish reason length"),
        ({}, [{"token_ids": [1, 2, 3, 4], "finish_reason": "stop"}], 200, "4 tokens"),
        ({"n": 1, "logprobs": 1}, [{"token_ids": [1, 2, 3], "logprobs": {"token_logprobs": [-1.0, None, -1.0]}}], 200, "log-probabilities"),
        ({"stop": ["w1"]}, [{"token_ids": [1, 2, 3]}], 200, "holds a stop string"),
        ({}, [{"token_ids": [1, 2, 3]}], 200, "reference's best"),
    ],
)
def test_a_wrong_answer_is_named(harbour, body, choices, status, words):
    with pytest.raises(CheckFailed, match=words):
        harbour.check({**BODY, **body}, answer(*choices, status=status))


def test_nothing_may_follow_the_end_of_a_choice():
    made = answer({"token_ids": [1]})
    with pytest.raises(CheckFailed, match="goes on after its finish_reason"):
        made.add({"index": 0, "text": "x", "finish_reason": None})


def test_blocks_that_stay_held_are_a_leak(tmp_path):
    class Leaking(Server):
        def metrics(self):
            return {"oarlock_kv_blocks_used": 2.0, "vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0, "vllm:num_requests_swapped": 0}

    with pytest.raises(CheckFailed, match="oarlock_kv_blocks_used is 2"):
        Leaking(tmp_path, [], tmp_path / "log").wait_idle(0.05)


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(CheckFailed, match=r"ended with 2: .*--no-such-flag"):
        Server(tmp_path, ["--no-such-flag", "1"], tmp_path / "log").start()


def test_hooks_called_while_serving_fail(monkeypatch):
    class Calls:
        def __init__(self, *_, **__):
            plugins._count()

        def generate(self, *_, **__):
            plugins._count()

    subject = make_subject()
    monkeypatch.setattr(oarlock.llm, "LLM", Calls)
    monkeypatch.setattr(serve_level, "_installed", lambda subject: None)
    with pytest.raises(CheckFailed, match="2 hooks were called while serving"):
        CASES["serve[cold_hooks]"].run(subject)
    subject.close()


def test_what_is_missing_for_a_server_makes_the_level_unsupported(monkeypatch):
    result = run_case(CASES["serve[starts]"], make_subject(), None)
    assert result.status == "unsupported" and "no installed package provides the device under-test" in result.detail
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("zmq", "fastapi") else find(name, *rest))
    result = run_case(CASES["serve[mixed]"], make_subject(), None)
    assert (result.status, result.detail) == ("unsupported", "the server needs fastapi, pyzmq: pip install fastapi pyzmq")


def test_every_kind_of_request_is_in_the_load():
    bodies = serve_level._bodies(serve_level.REQUESTS)
    assert len(bodies) == 200 and {len(b["prompt"]) for b in bodies} >= {1, 20} and max(len(b["prompt"]) for b in bodies) <= 60
    for key in ("n", "logprobs", "stop", "seed", "frequency_penalty", "min_p", "top_k"):
        assert 20 < sum(key in b for b in bodies) < 100, key
    assert 60 < sum(b["stream"] for b in bodies) < 140 and sum(map(serve_level._is_greedy, bodies)) > 60
    assert all(len(b["prompt"]) + b["max_tokens"] <= serve_level.CONTEXT and b["max_tokens"] >= 1 for b in bodies)
