"""Beam search against enumeration of every sequence, against a plain search, and under preemption."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_checking_worker import FULL, HYBRID, Drive, KVCheckingWorker, expected_beams, request, toy_logprobs
from oarlock.config.sections import SchedulerConfig
from oarlock.kv.manager import KVCacheManager
from oarlock.messages import Abort, EngineRequest
from oarlock.scheduler.scheduler import Scheduler
from oarlock.shapes import BucketTable, ShapePolicy


def drive(groups=FULL, num_blocks: int = 200, vocab: int = 11, host: int = 0, caching: bool = True, **config) -> Drive:
    manager = KVCacheManager(groups, num_blocks, 4, caching, host)
    scheduler = Scheduler(SchedulerConfig(**config), manager, ShapePolicy(BucketTable()), 64, clock=lambda: 0.0)
    return Drive(
        scheduler, KVCheckingWorker(groups, num_blocks, 4, host, vocab, scheduler._config.max_num_seqs), config.get("max_in_flight", 1)
    )


def found(d: Drive, source: EngineRequest) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(d.tokens[source.request_id, i]), d.ends[source.request_id, i].finish_reason) for i in range(source.params.n)]


def enumerate_all(source: EngineRequest, vocab: int) -> list[tuple[float, tuple[int, ...], str]]:
    """(score, tokens, reason) of every sequence that ends with EOS or has max_tokens tokens, best first."""
    p, every = source.params, []
    for length in range(1, p.max_tokens + 1):
        for tokens in product(range(vocab), repeat=length):
            ended = tokens[-1] in source.eos_token_ids
            if any(t in source.eos_token_ids for t in tokens[:-1]) or not (ended or length == p.max_tokens):
                continue
            if ended and length <= p.min_tokens:
                continue
            history, total = list(source.prompt_token_ids), 0.0
            for token in tokens:
                total += toy_logprobs(history, vocab)[token]
                history.append(token)
            every.append((total / length**p.length_penalty, tokens, "stop" if ended else "length"))
    return sorted(every, key=lambda h: (-h[0], h[1]))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_wide_beams_find_the_best_of_all_sequences(penalty: float, first: int) -> None:
    # Vocabulary 3, three tokens: no more than 8 beams and 24 candidates, fewer than a width of 16 keeps. Nothing is pruned.
    source = request(
        "a", [first, 2], (0,), n=4, best_of=16, max_tokens=3, use_beam_search=True, length_penalty=penalty, early_stopping="never"
    )
    d = drive(vocab=3)
    d.add(source)
    d.run()
    assert found(d, source) == [(tokens, reason) for _, tokens, reason in enumerate_all(source, 3)[:4]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=12),
    width=st.integers(2, 6),
    max_tokens=st.integers(1, 9),
    min_tokens=st.integers(0, 4),
    early=st.sampled_from([True, False, "never"]),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    stops=st.sampled_from([(), (3,), (3, 5)]),
    ignore_eos=st.booleans(),
)
def test_beams_equal_a_plain_search(prompt, width, max_tokens, min_tokens, early, penalty, stops, ignore_eos) -> None:
    source = request(
        "a", prompt, (0, 4), n=2, best_of=width, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), use_beam_search=True,
        early_stopping=early, length_penalty=penalty, stop_token_ids=stops, ignore_eos=ignore_eos, logprobs=1,
    )  # fmt: skip
    d = drive()
    d.add(source)
    d.run()
    expected = expected_beams(source, 11, 64)
    assert found(d, source) == [(tokens, reason) for tokens, reason, _ in expected]
    for index, (tokens, _, total) in enumerate(expected):
        end = d.ends["a", index]
        assert end.cumulative_logprob == pytest.approx(total)
        assert [x.token_id for x in end.logprobs] == list(tokens) and all(len(x.top) == 1 for x in end.logprobs)
        assert sum(x.logprob for x in end.logprobs) == pytest.approx(total)


@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_beams_give_the_same_answer(groups, mode: str, caching: bool) -> None:
    sources = [request("p", range(9), (), n=1, max_tokens=14)]
    sources += [request(f"b{i}", [i, 2, 3, 4, 5, 6, 7], (), n=3, best_of=3, max_tokens=10, use_beam_search=True) for i in range(2)]
    d = drive(groups, 18 if groups is FULL else 36, host=60 if mode == "swap" else 0, caching=caching, preemption_mode=mode)
    for source in sources:
        d.add(source)
    d.run()
    stats = d.scheduler.stats()
    assert stats.num_preemptions > 0 and (stats.num_swap_outs > 0) == (mode == "swap")
    for source in sources[1:]:
        assert found(d, source) == [(tokens, reason) for tokens, reason, _ in expected_beams(source, 11, 64)]


def test_beams_share_blocks_and_copy_only_what_they_write() -> None:
    source = request("a", range(41), (), n=4, max_tokens=6, use_beam_search=True)
    d = drive(caching=False)
    d.add(source)
    d.step()
    d.launch()
    assert d.worker.num_copies == 3 and d.scheduler.stats().num_used_blocks == 10 + 4
    d.run()


def test_beam_split_over_steps_waits_for_all_of_its_beams() -> None:
    source = request("a", [5, 6, 7], (), n=4, max_tokens=4, use_beam_search=True)
    d = drive(max_num_batched_tokens=3)
    d.add(source)
    d.run()
    assert found(d, source) == [(tokens, reason) for tokens, reason, _ in expected_beams(source, 11, 64)]


def test_beams_do_not_overlap_but_their_neighbours_do() -> None:
    d = drive(max_in_flight=2)
    sources = [request("a", [5, 6, 7], (), n=2, max_tokens=4, use_beam_search=True), request("p", [1, 2], max_tokens=6)]
    for source in sources:
        d.add(source)
    d.run()
    assert found(d, sources[0]) == [(tokens, reason) for tokens, reason, _ in expected_beams(sources[0], 11, 64)]
    assert len(d.tokens["p", 0]) == 6


def test_the_search_says_so_when_there_are_fewer_sequences_than_asked_for() -> None:
    source = request("a", [1], (), n=4, max_tokens=1, use_beam_search=True, allowed_token_ids=(3, 4))
    d = drive()
    d.add(source)
    d.run()
    reasons = [d.ends["a", i].finish_reason for i in range(4)]
    assert reasons[-1] == "error" and "n is 4" in d.ends["a", 3].error.message
    assert all(t in (3, 4) for i in range(4) for t in d.tokens["a", i])


def test_huge_length_penalty_does_not_raise() -> None:
    for penalty in (1e308, -1e308):
        d = drive()
        source = request("a", [1, 2], (0,), n=2, max_tokens=6, use_beam_search=True, length_penalty=penalty)
        d.add(source)
        d.run()
        assert all(d.ends["a", i].finish_reason in ("stop", "length") for i in range(2))


@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_of_open_length_end_where_the_cache_does(groups, width) -> None:
    """One token more could never be held by all beams; the context alone would allow 64."""
    per_group = 10
    for num_blocks in range(per_group * len(groups), 3 * per_group * len(groups), 9):
        source = request("a", range(9), (), n=width, max_tokens=None, use_beam_search=True, ignore_eos=True)
        d = drive(groups, num_blocks, caching=False)
        d.add(source)
        d.run()
        lengths = {len(d.tokens["a", i]) for i in range(width)}
        assert {d.ends["a", i].finish_reason for i in range(width)} == {"length"} and len(lengths) == 1
        (length,) = lengths
        assert 1 <= length <= 64 - 9
        refusals = []
        for asked in (length, length + 1):
            d = drive(groups, num_blocks, caching=False)
            d.add(request("a", range(9), (), n=width, max_tokens=asked, use_beam_search=True, ignore_eos=True))
            d.run()
            refusals.append(d.ends["a", 0].error is not None)
        assert refusals == [False, length < 64 - 9], f"{num_blocks} blocks end the search after {length} tokens"


def test_beams_of_open_length_that_cannot_even_begin_are_refused() -> None:
    d = drive(num_blocks=4)
    d.add(request("a", range(11), (), n=4, max_tokens=None, use_beam_search=True))
    assert d.ends["a", 0].error.code == "kv_cache_exceeded" and "4 beams" in d.ends["a", 0].error.message


def test_beam_wider_than_the_seats_is_refused() -> None:
    d = drive(max_num_seqs=3)
    d.add(request("a", [1], n=4, use_beam_search=True))
    assert "max_num_seqs is 3" in d.ends["a", 0].error.message and len(d.ends) == 4


def test_one_result_of_a_beam_search_may_be_aborted() -> None:
    d = drive()
    source = request("a", [5, 6, 7], (), n=2, best_of=3, max_tokens=5, use_beam_search=True)
    d.add(source)
    d.step()
    d.take(d.scheduler.abort(Abort("a", "abort", 0)))
    d.run()
    assert d.ends["a", 0].finish_reason == "abort"
    assert tuple(d.tokens["a", 1]) == expected_beams(source, 11, 64)[1][0]
