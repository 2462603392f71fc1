"""Any sequence of add, launch, land, abort, failure and cache reset keeps the invariants and the right tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_checking_worker import FULL, HYBRID, Drive, KVCheckingWorker, expected_beams, expected_tokens, request
from oarlock.config.sections import SchedulerConfig
from oarlock.kv.manager import KVCacheManager
from oarlock.messages import Abort, EngineRequest
from oarlock.scheduler.scheduler import Scheduler
from oarlock.shapes import BucketTable, ShapePolicy

VOCAB, MAX_LEN = 11, 48
BUCKETS = BucketTable((1, 2, 4, 8), (1, 2), (8, 16), (4, 16), (8, 16, 32), (8,))


@dataclass(frozen=True)
class Setup:
    config: SchedulerConfig
    groups: tuple
    num_blocks: int
    block_size: int
    host_blocks: int
    caching: bool
    table: BucketTable


@st.composite
def setups(draw) -> Setup:
    host = draw(st.sampled_from([0, 0, 5, 40]))
    chunked = draw(st.booleans()) or draw(st.booleans())
    config = SchedulerConfig(
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 8])),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 7, 16, 64])) if chunked else 64,
        enable_chunked_prefill=chunked,
        policy=draw(st.sampled_from(["fcfs", "priority", "fair"])),
        preemption_mode=draw(st.sampled_from(["auto", "recompute", "swap"] if host else ["auto", "recompute"])),
        max_in_flight=draw(st.sampled_from([1, 2])),
        num_lookahead_slots=draw(st.sampled_from([0, 0, 2, 9])),
        max_waiting_requests=draw(st.sampled_from([2, 100])),
        max_queued_tokens=draw(st.sampled_from([None, None, 30])),
        max_queue_s=draw(st.sampled_from([None, None, 3.0])),
        num_owners=draw(st.sampled_from([1, 3])),
    )
    size = draw(st.sampled_from([1, 4]))
    groups = draw(st.sampled_from([FULL, HYBRID]))
    blocks = draw(st.integers(3, 24)) * len(groups) * (4 if size == 1 else 1)
    table = BUCKETS if draw(st.integers(0, 3)) == 0 else BucketTable()
    return Setup(config, groups, blocks, size, host, draw(st.booleans()), table)


@st.composite
def requests(draw, name: str) -> EngineRequest:
    shared = draw(st.integers(0, 2))  # few distinct prefixes, so that the cache hits
    prompt = [(shared * 3 + i * i) % VOCAB for i in range(draw(st.integers(1, 24)))]
    kind = draw(st.sampled_from(["plain", "plain", "several", "beam", "words", "prompt"]))
    params: dict = {"max_tokens": draw(st.integers(1, 12)), "stop_token_ids": draw(st.sampled_from([(), (3,), (3, 4)]))}
    params["min_tokens"] = draw(st.integers(0, params["max_tokens"]))
    if kind == "several":
        params |= {"n": draw(st.integers(1, 5))}
    elif kind == "beam":
        params |= {"n": 2, "use_beam_search": True, "early_stopping": draw(st.sampled_from([True, False, "never"]))}
        params |= {"best_of": draw(st.integers(2, 4)), "logprobs": draw(st.sampled_from([None, 1]))}
    elif kind == "words":
        params |= {"bad_words": ("x",), "bad_words_token_ids": ((5,), (1, 2), (7, 8, 9))}
    elif kind == "prompt":
        params |= {"prompt_logprobs": 0, "max_tokens": draw(st.integers(0, 3)), "min_tokens": 0, "n": draw(st.integers(1, 2))}
    eos = draw(st.sampled_from([(), (0,), (0, 6)]))
    params["ignore_eos"] = draw(st.booleans())
    made = request(name, prompt, eos, draw(st.sampled_from([None, "a"])), draw(st.integers(0, 2)), **params)
    return replace(made, owner=draw(st.integers(0, 2)))


def check_result(drive: Drive, source: EngineRequest) -> None:
    """Every index ended once; those that ended by themselves have the tokens of naive generation."""
    p = source.params
    for index in range(p.n if p.use_beam_search else p.num_branches):
        end = drive.ends[source.request_id, index]
        if end.finish_reason not in ("stop", "length"):
            continue
        if p.use_beam_search:
            tokens, reason, total = expected_beams(source, VOCAB, MAX_LEN)[index]
            assert (drive.tokens[source.request_id, index], end.finish_reason) == (list(tokens), reason)
            assert end.cumulative_logprob == pytest.approx(total) and (end.logprobs is None) == (p.logprobs is None)
            continue
        tokens, reason = expected_tokens(source, index, VOCAB, MAX_LEN)
        assert (drive.tokens[source.request_id, index], end.finish_reason) == (tokens, reason)
        first = next(o for o in drive.outputs if (o.request_id, o.index) == (source.request_id, index))
        if p.prompt_logprobs is not None and index == 0:
            assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
            assert [x.logprob for x in first.prompt_logprobs[1:]] == [-float(i) for i in range(1, len(source.prompt_token_ids))]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(setup=setups(), data=st.data())
def test_any_sequence_of_actions_keeps_invariants_and_tokens(setup: Setup, data: st.DataObject) -> None:
    now_s = 0.0
    manager = KVCacheManager(setup.groups, setup.num_blocks, setup.block_size, setup.caching, setup.host_blocks)
    scheduler = Scheduler(setup.config, manager, ShapePolicy(setup.table), MAX_LEN, seed=1, clock=lambda: now_s)
    worker = KVCheckingWorker(setup.groups, setup.num_blocks, setup.block_size, setup.host_blocks, VOCAB, setup.config.max_num_seqs)
    worker.fail_prompts = {9}
    drive = Drive(scheduler, worker, setup.config.max_in_flight)
    sources: list[EngineRequest] = []
    stopped: set[tuple[str, int]] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "add", "launch", "launch", "launch", "land", "land", "abort", "fail", "reset", "wait"]))
        if action == "add":
            sources.append(data.draw(requests(f"r{len(sources)}")))
            sources[-1] = replace(sources[-1], arrival_s=now_s)
            drive.add(sources[-1])
        elif action == "wait":
            now_s += 2.0
            drive.take(scheduler.end_overdue())
        elif action == "launch":
            drive.launch()
        elif action == "land":
            drive.land()
        elif action == "abort" and sources:
            source = data.draw(st.sampled_from(sources))
            index = data.draw(st.sampled_from([None, 0, 1]))
            reason = data.draw(st.sampled_from(["abort", "stop"]))
            before = {k for k in drive.ends if k[0] == source.request_id} | stopped
            drive.take(scheduler.abort(Abort(source.request_id, reason, index)))
            count = source.params.n if source.params.use_beam_search else source.params.num_branches
            if reason == "stop":
                ended = range(count) if index is None else [index] if index < count else []
                stopped |= {(source.request_id, i) for i in ended if (source.request_id, i) not in before}
        elif action == "fail" and drive.in_flight:
            step, _ = drive.in_flight.pop(data.draw(st.sampled_from([0, -1])))  # -1: it failed to launch
            drive.take(scheduler.fail_step(step, "the device said no"))
        elif action == "reset":
            scheduler.reset_prefix_cache()
        scheduler.check_invariants()
    drive.run()
    scheduler.check_invariants()
    assert manager.num_used == 0 and manager.num_used_host == 0
    for source in sources:
        for key in stopped:
            assert key not in drive.ends
        if not any(k[0] == source.request_id for k in stopped):
            check_result(drive, source)
    assert scheduler.schedule() is None
