"""Cases of bank.yaml: sampling, determinism, prefix cache, preemption."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from real_server import PROMPT, RealServer, join, ok

CMP = "/v1/completions"
PROBE = {"prompt": "Explain rain in one sentence.", "temperature": 0.8, "seed": 123, "max_tokens": 64, "logprobs": 1, "return_token_ids": True}


def run_probe(server: RealServer) -> tuple[list[int], list[float]]:
    choice = server.cmp(**PROBE)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def concurrently(server: RealServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all bodies, sent at once."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ok(server.post(CMP, body)), bodies))


def neighbours(server: RealServer, count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        server.cmp_body(prompt="word " * rng.randint(1, 120), max_tokens=rng.randint(1, 60), temperature=rng.choice([0, 1.0]), ignore_eos=True)
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 7, 31])
def test_seed_under_load(server: RealServer, count: int) -> None:
    """The float32 form: the same tokens whatever else runs, logprobs within rounding."""
    tokens, values = run_probe(server)
    for repeat in range(5 if count == 0 else 2):
        with ThreadPoolExecutor(count + 1) as pool:
            others = [pool.submit(server.post, CMP, body) for body in neighbours(server, count, repeat)]
            probe = pool.submit(run_probe, server)
            assert all(other.result().status_code == 200 for other in others)
        again_tokens, again_values = probe.result()
        assert again_tokens == tokens
        assert again_values == pytest.approx(values, abs=1e-4)


def test_seed_under_load_bit_equal(server: RealServer) -> None:
    """The deterministic form, where the device declares it: bit for bit, greedy and seeded, alone and in every company."""
    doctor = subprocess.run([sys.executable, "-m", "oarlock.cli.main", "doctor", "--device", "cpu"], capture_output=True, text=True, check=False)
    declared = re.search(r"^\s*batch_invariant\s+(.*)$", doctor.stdout, re.MULTILINE)
    assert declared is not None, doctor.stdout + doctor.stderr
    if "float32" not in declared[1]:
        pytest.skip("bit equality under load is promised where the device declares batch_invariant; cpu does not here")
    probes = [server.cmp_body(**PROBE), server.cmp_body(**{**PROBE, "temperature": 0})]

    def run(body: dict[str, Any]) -> list[Any]:
        choice = server.answer(CMP, body)["choices"][0]
        return [choice["token_ids"], choice["logprobs"]]

    alone = [run(body) for body in probes]
    for count in (0, 1, 7, 31):
        with ThreadPoolExecutor(count + 2) as pool:
            others = [pool.submit(server.post, CMP, body) for body in neighbours(server, count, 100 + count)]
            again = list(pool.map(run, probes))
            assert all(other.result().status_code == 200 for other in others)
        assert again == alone, f"with {count} neighbours"


def test_seeds_differ_and_minus_one_is_none(server: RealServer) -> None:
    def text(seed: int | None) -> str:
        return server.cmp(temperature=1.0, max_tokens=24, seed=seed, ignore_eos=True)["choices"][0]["text"]

    assert text(1) == text(1) != text(2)
    assert text(-1) != text(-1)
    assert text(None) != text(None)
    assert text(2**63 - 1) == text(2**63 - 1)
    assert text(2**40) == text(2**40) != text(-(2**41))


def test_greedy_equals_topk1(server: RealServer) -> None:
    greedy = server.cmp(temperature=0, max_tokens=48)["choices"][0]["text"]
    assert server.cmp(temperature=1, top_k=1, max_tokens=48)["choices"][0]["text"] == greedy
    assert server.cmp(temperature=1, top_p=1e-6, max_tokens=48)["choices"][0]["text"] == greedy
    assert server.cmp(temperature=1, min_p=1.0, max_tokens=48)["choices"][0]["text"] == greedy
    assert server.cmp(temperature=0, top_k=-1, max_tokens=48)["choices"][0]["text"] == greedy


def test_bad_words_and_penalties_take_effect(server: RealServer) -> None:
    choice = server.cmp(temperature=0, max_tokens=24, return_token_ids=True)["choices"][0]
    word = server.answer("/detokenize", {"tokens": [choice["token_ids"][3]]})["prompt"]
    if word.strip():
        banned = server.cmp(temperature=0, max_tokens=24, bad_words=[word])["choices"][0]["text"]
        assert banned != choice["text"]
    biased = server.cmp(temperature=0, max_tokens=24, logit_bias={str(choice["token_ids"][0]): -100}, return_token_ids=True)["choices"][0]
    assert choice["token_ids"][0] not in biased["token_ids"]
    repeated = server.cmp(temperature=0, max_tokens=64, repetition_penalty=50.0, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    assert len(set(repeated)) == 64


def random_prompt(seed: int, length: int = 512) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefghij klmnop") for _ in range(length))


def test_prefix_cache_same_answer(server: RealServer) -> None:
    before = server.metrics()["vllm:prefix_cache_hits_total"]
    for seed in range(16):
        body = server.cmp_body(prompt=random_prompt(seed), temperature=0, max_tokens=32)
        miss, hit = server.answer(CMP, body), server.answer(CMP, body)
        assert miss["choices"][0]["text"] == hit["choices"][0]["text"]
        assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert hit["usage"]["prompt_tokens"] == miss["usage"]["prompt_tokens"]
    assert server.metrics()["vllm:prefix_cache_hits_total"] > before


def test_prefix_cache_same_answer_in_a_cold_burst(start_server: Callable[..., RealServer]) -> None:
    server = start_server()
    shared = random_prompt(99, 600)
    bodies = [server.cmp_body(prompt=shared + f" question {i}", temperature=0, max_tokens=16) for i in range(32)]
    burst = concurrently(server, bodies)
    for body, answer in zip(bodies, burst, strict=True):
        assert server.answer(CMP, body)["choices"][0]["text"] == answer["choices"][0]["text"]
    server.kv_idle()


def test_prefix_cache_is_off_when_told_and_salted_when_asked(start_server: Callable[..., RealServer], server: RealServer) -> None:
    prompt = random_prompt(1234)

    def cached(target: RealServer, **fields: Any) -> int:
        return target.cmp(prompt=prompt, max_tokens=1, temperature=0, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(server, cache_salt="a") == 0
    assert cached(server, cache_salt="a") > 0
    assert cached(server, cache_salt="b") == 0
    off = start_server("--no-enable-prefix-caching")
    assert cached(off) == cached(off) == 0


@pytest.mark.parametrize("flags", [(), ("--preemption-mode", "swap", "--swap-space", "64MiB")], ids=["recompute", "swap"])
def test_preemption_correct(start_server: Callable[..., RealServer], flags: tuple[str, ...]) -> None:
    """Sixteen requests in blocks for about three: every one is preempted or waits, and none can tell from its text."""
    server = start_server("--num-gpu-blocks-override", "56", "--no-enable-prefix-caching", *flags)
    prompts = [f"request {i}: {PROMPT}" for i in range(16)]
    penalties = [1.1 if i % 2 else 1.0 for i in range(16)]
    common = {"max_tokens": 256, "ignore_eos": True, "temperature": 0}
    bodies = [server.cmp_body(prompt=p, repetition_penalty=r, **common) for p, r in zip(prompts, penalties, strict=True)]

    def run(index: int) -> tuple[str, str, int]:
        body = bodies[index]
        if index % 4 == 0:
            chunks = server.stream(CMP, {**body, "stream_options": {"include_usage": True}})
            return join(chunks), chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]["completion_tokens"]
        answer = ok(server.post(CMP, body))
        return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(16) as pool:
        crowded = list(pool.map(run, range(16)))
    assert server.metrics()["vllm:num_preemptions_total"] > 0
    if flags:
        assert server.metrics()["oarlock_swap_outs_total"] > 0
    for index, (text, reason, tokens) in enumerate(crowded):
        assert (reason, tokens) == ("length", 256)
        assert text == run(index)[0], f"request {index} changed under preemption"
    server.kv_idle()
