"""One behaviour of the scheduler a test."""

from __future__ import annotations

import pytest
from kv_checking_worker import FULL, HYBRID, Drive, KVCheckingWorker, expected_tokens, request, toy_token
from oarlock.config.sections import SchedulerConfig
from oarlock.errors import ConfigError
from oarlock.kv.manager import KVCacheManager
from oarlock.kv_spec import KVGroup
from oarlock.messages import Abort, EngineRequest
from oarlock.scheduler.policy import seed_bits
from oarlock.scheduler.scheduler import Scheduler
from oarlock.shapes import BucketTable, ShapePolicy


def drive(
    groups=FULL,
    num_blocks: int = 100,
    host: int = 0,
    caching: bool = True,
    table=None,
    clock=lambda: 0.0,
    max_model_len: int = 64,
    **config,
) -> Drive:
    manager = KVCacheManager(groups, num_blocks, 4, caching, host)
    scheduler = Scheduler(SchedulerConfig(**config), manager, ShapePolicy(table or BucketTable()), max_model_len, clock=clock)
    return Drive(
        scheduler, KVCheckingWorker(groups, num_blocks, 4, host, 11, scheduler._config.max_num_seqs), config.get("max_in_flight", 1)
    )


def eos_of(prompt: list[int], at: int) -> tuple[int, ...]:
    """The token that the toy model generates as number `at`."""
    tokens = list(prompt)
    for _ in range(at):
        tokens.append(toy_token(tokens, 0, 11))
    return (tokens[-1],)


def only(d: Drive, source: EngineRequest) -> tuple[list[int], str]:
    return d.tokens[source.request_id, 0], d.ends[source.request_id, 0].finish_reason


def test_prompt_tokens_are_counted_as_they_are_computed() -> None:
    d = drive(max_num_batched_tokens=4, max_in_flight=1)
    d.add(request("a", range(10), max_tokens=3))
    counted = []
    while d.step():
        counted.append(d.scheduler.stats().num_prompt_tokens)
    assert counted == [4, 8, 10, 10, 10]
    d.add(request("b", range(10), max_tokens=1))
    d.run()
    assert d.scheduler.stats().num_prompt_tokens == 12  # two blocks of four were found in the cache


# ---------------------------------------------------------------- overlap
def test_token_computed_beyond_eos_is_discarded_and_blocks_wait_for_it() -> None:
    d = drive(max_in_flight=2)
    source = request("a", [1, 2, 3], eos_of([1, 2, 3], 2), max_tokens=9)
    d.add(source)
    while not d.ends:
        d.launch()
        if len(d.in_flight) == 2:
            d.land()
    assert d.in_flight and d.scheduler.stats().num_used_blocks > 0 and d.scheduler.has_unfinished()
    d.run()
    assert only(d, source) == expected_tokens(source, 0, 11, 64) and d.scheduler.stats().num_used_blocks == 0


def test_nothing_is_promised_beyond_max_tokens() -> None:
    d = drive(max_in_flight=2)
    d.add(request("a", [1, 2, 3], max_tokens=3))
    d.run()
    assert [r.start for s in d.steps for r in s.rows] == [0, 3, 4]


def test_third_step_is_not_launched_and_idle_gives_none() -> None:
    d = drive(max_in_flight=2)
    assert d.scheduler.schedule() is None
    d.add(request("a", [1, 2, 3]))
    assert d.launch() and d.launch() and not d.launch()
    d.run()
    assert d.scheduler.schedule() is None and not d.scheduler.has_unfinished()


def test_abort_while_a_step_runs_ends_at_once_and_frees_after_it() -> None:
    d = drive(max_in_flight=2)
    d.add(request("a", [1, 2, 3], n=2))
    d.launch()
    d.take(d.scheduler.abort(Abort("a")))
    assert {e.finish_reason for e in d.ends.values()} == {"abort"} and len(d.ends) == 2
    assert d.scheduler.stats().num_used_blocks == 1
    d.land()
    assert d.scheduler.stats().num_used_blocks == 0 and d.scheduler.abort(Abort("a")) == []


def test_host_side_tokens_force_one_step_at_a_time() -> None:
    d = drive(max_in_flight=2)
    source = request("a", [1, 2, 3], bad_words=("x",), bad_words_token_ids=((4, 5),))
    d.add(source)
    assert d.launch() and not d.launch()
    d.run()
    assert only(d, source) == expected_tokens(source, 0, 11, 64)


# ---------------------------------------------------------------- stops and bans
def test_stop_reason_is_none_for_eos_and_the_id_for_a_stop_token() -> None:
    token = eos_of([1, 2, 3], 3)
    d = drive()
    d.add(request("eos", [1, 2, 3], token, stop_token_ids=token))
    d.add(request("stop", [1, 2, 3], token, stop_token_ids=token, ignore_eos=True))
    d.run()
    assert (d.ends["eos", 0].finish_reason, d.ends["eos", 0].stop_reason) == ("stop", None)
    assert (d.ends["stop", 0].finish_reason, d.ends["stop", 0].stop_reason) == ("stop", token[0])
    assert d.tokens["eos", 0][-1] == d.tokens["stop", 0][-1] == token[0]


def test_min_tokens_bans_eos_by_promised_length() -> None:
    d = drive(max_in_flight=2)
    d.add(request("a", [1, 2, 3], (7,), min_tokens=2, max_tokens=5, stop_token_ids=(3,)))
    d.run()
    bans = [r.banned_token_ids for s in d.steps for r in s.rows]
    assert bans[:2] == [(3, 7), (3, 7)] and set(bans[2:]) <= {()}


def test_model_length_ends_a_branch_with_length() -> None:
    d = drive(max_model_len=10)
    d.add(request("a", range(7), max_tokens=50))
    d.run()
    assert len(d.tokens["a", 0]) == 3 and d.ends["a", 0].finish_reason == "length"


def test_stop_from_the_front_end_is_silent() -> None:
    d = drive()
    d.add(request("a", [1, 2, 3], n=2))
    d.step()
    assert d.scheduler.abort(Abort("a", "stop", 1)) == []
    d.run()
    assert set(d.ends) == {("a", 0)}


def test_scoring_request_ends_after_its_prompt_with_no_token() -> None:
    d = drive(max_num_batched_tokens=4, max_num_seqs=4)
    d.add(request("a", range(10), max_tokens=0, prompt_logprobs=0, n=2))
    d.run()
    assert d.tokens["a", 0] == [] and d.ends["a", 0].finish_reason == "length"
    assert [x and x.logprob for x in d.ends["a", 0].prompt_logprobs] == [None, *(-float(i) for i in range(1, 10))]
    assert d.ends["a", 1].prompt_logprobs is None


# ---------------------------------------------------------------- admission
def test_request_that_can_never_fit_is_told_needed_and_available() -> None:
    d = drive(num_blocks=5)
    d.add(request("a", range(10), max_tokens=8))
    assert "needs 5 KV cache blocks of 4 tokens at one time, but 4 are available" in d.ends["a", 0].error.message
    d.add(request("b", range(10), max_tokens=7))  # the last token's KV is not needed
    d.run()
    assert d.ends["b", 0].finish_reason == "length"


def test_window_groups_count_only_what_they_hold_at_one_time() -> None:
    d = drive((KVGroup(0, "window", 5, (0,)),), num_blocks=4)
    source = request("a", range(20), max_tokens=30)
    d.add(source)
    d.run()
    assert only(d, source) == expected_tokens(source, 0, 11, 64)


def test_full_queue_is_refused_by_code() -> None:
    """A burst on an idle engine fills its seats and its queue, before any step and after it alike."""
    for steps in (0, 1):
        d = drive(max_waiting_requests=1, max_num_seqs=2)
        for name in "abc":
            d.add(request(name, [1], max_tokens=9))
            for _ in range(steps):
                d.step()
        d.add(request("d", [1], n=2))
        assert {name for name, _ in d.ends} == {"d"}
        assert [d.ends["d", i].error.code for i in range(2)] == ["queue_full"] * 2
        assert "max_num_seqs 2 + max_waiting_requests 1" in d.ends["d", 0].error.message
        d.run()
        d.add(request("e", [1]))
        d.run()
        assert d.ends["e", 0].finish_reason == "length"


def test_prompt_longer_than_a_step_is_refused_only_without_chunks() -> None:
    d = drive(max_num_batched_tokens=8, max_num_seqs=4, enable_chunked_prefill=False)
    d.add(request("a", range(9)))
    assert "chunked prefill is off" in d.ends["a", 0].error.message
    d = drive(max_num_batched_tokens=8, max_num_seqs=4)
    d.add(request("a", range(9)))
    d.run()
    assert d.ends["a", 0].finish_reason == "length"


def test_swap_without_host_blocks_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="swap space"):
        drive(preemption_mode="swap")


def test_bucketed_shapes_are_never_exceeded() -> None:
    table = BucketTable((1, 2), (1,), (4, 8), (4, 8), (4, 8), (3,))
    d = drive(table=table, max_num_seqs=8, max_model_len=32)
    sources = [request(f"r{i}", range(i, i + 11), n=1 + i % 2, max_tokens=5) for i in range(6)]
    for source in sources:
        d.add(source)
    d.run()
    policy = ShapePolicy(table)
    for step in d.steps:
        chunks = [r.num_tokens for r in step.rows if r.num_tokens > 1]
        assert policy.fits(len(step.rows) - len(chunks), chunks, max(-(-(r.start + r.num_tokens) // 4) for r in step.rows))
    assert all(only(d, s) == expected_tokens(s, 0, 11, 32) for s in sources)
    d = drive(table=table, max_model_len=64)
    d.add(request("long", range(20), max_tokens=20))
    assert "largest shape" in d.ends["long", 0].error.message


def test_delay_factor_holds_prompts_back_until_the_oldest_has_waited() -> None:
    now = [0.0]
    d = drive(delay_factor=2.0, clock=lambda: now[0])
    d.add(request("a", [1, 2, 3], max_tokens=9))
    d.launch()
    now[0] = 1.0  # the prompt's step takes one second
    d.land()
    late = request("b", [4, 5, 6], max_tokens=1)
    d.add(EngineRequest("b", late.prompt_token_ids, late.params, arrival_s=1.0))
    d.step()
    assert len(d.steps[-1].rows) == 1
    now[0] = 3.0
    d.step()
    assert len(d.steps[-1].rows) == 2
    d.run()


# ---------------------------------------------------------------- prefix cache
def test_cached_prompt_computes_only_its_last_part_and_says_so() -> None:
    d = drive()
    for name in ("a", "b"):
        d.add(request(name, range(12), max_tokens=3))
        d.run()
    assert d.ends["a", 0].num_cached_tokens == 0 and d.ends["b", 0].num_cached_tokens == 8
    assert d.tokens["a", 0] == d.tokens["b", 0]
    stats = d.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (24, 8)


def test_generated_tokens_are_cached_too() -> None:
    d = drive()
    d.add(request("a", range(6), max_tokens=7))
    d.run()
    d.add(request("b", [*range(6), *d.tokens["a", 0]], max_tokens=2))
    d.run()
    assert d.ends["b", 0].num_cached_tokens == 12


@pytest.mark.parametrize("params", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_requests_that_need_the_prompt_computed_fill_but_do_not_read(params: dict) -> None:
    d = drive()
    for name in ("a", "b"):
        d.add(request(name, range(12), **params))
        d.run()
    assert d.ends["b", 0].num_cached_tokens == 0
    d.add(request("c", range(12)))
    d.run()
    assert d.ends["c", 0].num_cached_tokens == 8


def test_unconfirmed_blocks_are_not_shared() -> None:
    d = drive(max_in_flight=2)
    d.add(request("a", range(12)))
    d.launch()
    d.add(request("b", range(12)))
    d.launch()
    assert next(r.start for r in d.steps[1].rows if r.num_tokens > 1) == 0
    d.run()


def test_reset_forgets_the_cache() -> None:
    d = drive()
    d.add(request("a", range(12)))
    d.run()
    assert d.scheduler.stats().num_cached_blocks > 0
    d.scheduler.reset_prefix_cache()
    d.add(request("b", range(12)))
    d.run()
    assert d.ends["b", 0].num_cached_tokens == 0


# ---------------------------------------------------------------- preemption and failure
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("mode", "host"), [("recompute", 0), ("swap", 40), ("swap", 3)])
@pytest.mark.parametrize("groups", [FULL, HYBRID])
def test_preempted_requests_keep_their_output_tokens(depth: int, mode: str, host: int, groups) -> None:
    d = drive(groups, 8 * len(groups), host=host * len(groups), caching=False, preemption_mode=mode, max_in_flight=depth)
    sources = [request(f"r{i}", range(i, i + 6), max_tokens=14, n=1 + i % 2) for i in range(5)]
    for source in sources:
        d.add(source)
    d.run()
    stats = d.scheduler.stats()
    assert stats.num_preemptions > 0 and (stats.num_swap_outs > 0) == (mode == "swap")
    for source in sources:
        for index in range(source.params.n):
            assert (d.tokens[source.request_id, index], d.ends[source.request_id, index].finish_reason) == expected_tokens(
                source, index, 11, 64
            )


def test_failed_row_ends_its_request_only() -> None:
    d = drive()
    d.worker.fail_prompts = {9}
    d.add(request("bad", [9, 1, 2], n=2))
    d.add(request("good", [1, 2]))
    d.run()
    assert [d.ends["bad", i].error.kind for i in range(2)] == ["request"] * 2 and d.ends["good", 0].finish_reason == "length"


def test_failed_step_ends_its_requests_and_recomputes_what_it_was_swapping_out() -> None:
    d = drive(num_blocks=4, host=8, caching=False, preemption_mode="swap")
    sources = [request("a", range(4), max_tokens=6), request("b", range(4), max_tokens=4)]
    for source in sources:
        d.add(source)
    d.step()
    step = d.scheduler.schedule()
    assert step.swap_out
    d.take(d.scheduler.fail_step(step, "boom"))
    assert d.ends["a", 0].error.kind == "step" and "boom" in d.ends["a", 0].error.message
    d.run()
    assert not any(s.swap_in for s in d.steps) and only(d, sources[1]) == expected_tokens(sources[1], 0, 11, 64)
    assert d.scheduler.stats().num_used_host_blocks == 0


def test_leader_aborted_before_the_fork_is_replaced() -> None:
    d = drive(max_num_batched_tokens=4, max_num_seqs=4)
    source = request("a", range(10), n=3, max_tokens=3)
    d.add(source)
    d.step()
    d.take(d.scheduler.abort(Abort("a", "abort", 0)))
    d.run()
    assert d.ends["a", 0].finish_reason == "abort"
    assert [d.tokens["a", i] for i in (1, 2)] == [expected_tokens(source, i, 11, 64)[0] for i in (1, 2)]


# ---------------------------------------------------------------- seeds and log-probabilities
def test_seeds_are_folded_into_int32_and_derived_ones_repeat_with_the_engine_seed() -> None:
    assert seed_bits(7, 0, 1) == 7 and seed_bits((5 << 32) | 3, 0, 1) == 5 ^ 3
    assert -(2**31) <= seed_bits(-1, 0, 1) < 2**31 and seed_bits(2**31, 0, 1) == -(2**31)
    derived = [seed_bits(None, 3, i) for i in range(20)]
    assert len(set(derived)) == 20 and derived == [seed_bits(None, 3, i) for i in range(20)] != [seed_bits(None, 4, i) for i in range(20)]


def test_branches_of_a_request_share_its_seed_and_differ_by_index() -> None:
    d = drive()
    d.add(request("a", [1, 2], n=3, seed=5))
    d.run()
    news = [n for s in d.steps for n in s.new_requests]
    assert {n.seed for n in news} == {5} and sorted(n.index for n in news) == [0, 1, 2]


def test_cumulative_logprob_comes_with_best_of_even_if_logprobs_do_not() -> None:
    d = drive()
    d.add(request("a", [1, 2], n=1, best_of=3, max_tokens=4))
    d.add(request("b", [1, 2], max_tokens=4, logprobs=2))
    d.run()
    assert all(d.ends["a", i].cumulative_logprob < 0 and d.ends["a", i].logprobs is None for i in range(3))
    each = [o for o in d.outputs if o.request_id == "b"]
    assert sum(o.logprobs[0].logprob for o in each) == pytest.approx(each[-1].cumulative_logprob)


def test_first_output_says_when_the_request_was_scheduled() -> None:
    d = drive(clock=lambda: 5.0)
    d.add(request("a", [1, 2], max_tokens=3))
    d.run()
    assert [o.first_scheduled_s for o in d.outputs] == [5.0, None, None]


# ---------------------------------------------------------------- the longest request
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("table", [None, BucketTable((1, 2), (1,), (64,), (64,), (4, 9), (8,))])
@pytest.mark.parametrize("groups", [FULL, HYBRID, HYBRID[1:]])
def test_longest_request_that_is_stated_is_the_longest_that_is_let_in(groups, table, lookahead, chunked) -> None:
    for num_blocks in (8, 13, 20, 100):
        d = drive(groups, num_blocks, table=table, num_lookahead_slots=lookahead, enable_chunked_prefill=chunked)
        longest = d.scheduler.longest_request
        for total, fits in ((longest, True), (longest + 1, False)):
            if total > 64:  # the context length: more output is cut there, not refused
                continue
            name = f"{num_blocks} {total}"
            d.add(request(name, [1], max_tokens=total - 1))
            assert ((name, 0) not in d.ends) == fits, f"{total} tokens in {num_blocks} blocks"
        d.run()
