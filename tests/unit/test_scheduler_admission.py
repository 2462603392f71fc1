"""Who is let in, who is next among API keys, and how long a request may wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from kv_checking_worker import FULL, Drive, KVCheckingWorker, request
from oarlock.config.resolve import from_kwargs, resolve
from oarlock.config.sections import SchedulerConfig
from oarlock.errors import ConfigError
from oarlock.kv.manager import KVCacheManager
from oarlock.messages import Abort, EngineRequest
from oarlock.scheduler.scheduler import Scheduler
from oarlock.shapes import BucketTable, ShapePolicy


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def drive(clock: Clock | None = None, num_blocks: int = 200, **config) -> Drive:
    manager = KVCacheManager(FULL, num_blocks, 4, False, 0)
    scheduler = Scheduler(SchedulerConfig(**config), manager, ShapePolicy(BucketTable()), 64, clock=clock or Clock())
    return Drive(scheduler, KVCheckingWorker(FULL, num_blocks, 4, 0, 11, scheduler._config.max_num_seqs), config.get("max_in_flight", 1))


def of(owner: int, name: str, prompt: int = 4, arrival_s: float = 100.0, **params) -> EngineRequest:
    return replace(request(name, [1] * prompt, **params), owner=owner, arrival_s=arrival_s)


def begun(d: Drive) -> list[str]:
    """Names in the order in which they had their first step."""
    seen: dict[str, None] = {}
    known = {}
    while d.scheduler.has_unfinished():
        known |= {i: b.request.request_id for i, b in d.scheduler._life.branches.items()}
        if not d.step():
            break
        known |= {i: b.request.request_id for i, b in d.scheduler._life.branches.items()}
        for row in d.steps[-1].rows:
            seen.setdefault(known[row.branch_id])
    return list(seen)


# ---------------------------------------------------------------- fairness
@pytest.mark.parametrize(("policy", "place"), [("fcfs", 200), ("fair", 4)])
def test_one_request_is_not_behind_two_hundred_of_another_key(policy: str, place: int) -> None:
    d = drive(policy=policy, num_owners=2 if policy == "fair" else 1, max_num_seqs=4)
    for i in range(200):
        d.add(of(0, f"flood{i}", max_tokens=3))
    d.step()  # the flood has every seat
    d.add(of(1, "lone", max_tokens=3))
    order = begun(d)
    assert order.index("lone") == place
    assert len(d.ends) == 201 and all(end.finish_reason == "length" for end in d.ends.values())


def test_keys_get_equal_tokens_not_equal_requests() -> None:
    """Three keys; one sends prompts that are eight times as long, and so is begun an eighth as often while all wait."""
    d = drive(policy="fair", num_owners=3, max_num_seqs=1)
    for i in range(60):
        for owner, prompt in ((0, 39), (1, 4), (2, 4)):
            d.add(of(owner, f"{owner}-{i}", prompt, max_tokens=2))
    counts = Counter(name[0] for name in begun(d)[:51])
    assert counts["1"] == counts["2"] == pytest.approx(8 * counts["0"], abs=2)


def test_within_a_key_the_first_to_come_is_the_first_to_go() -> None:
    d = drive(policy="fair", num_owners=2, max_num_seqs=1)
    for name in ("0-a", "0-b", "1-a", "1-b", "0-c", "1-c"):
        d.add(of(int(name[0]), name, max_tokens=2))
    assert begun(d) == ["0-a", "1-a", "0-b", "1-b", "0-c", "1-c"]


def test_a_key_saves_nothing_up_while_it_is_idle() -> None:
    d = drive(policy="fair", num_owners=2, max_num_seqs=1)
    for i in range(20):
        d.add(of(0, f"0-before{i}", max_tokens=4))
    begun(d)  # the other key sent nothing all the while
    for i in range(6):
        d.add(of(1, f"1-{i}", max_tokens=4))
        d.add(of(0, f"0-{i}", max_tokens=4))
    assert [name[0] for name in begun(d)] == ["1", "0"] * 6


def test_tokens_from_the_cache_cost_a_key_nothing() -> None:
    manager = KVCacheManager(FULL, 200, 4, True, 0)
    config = SchedulerConfig(policy="fair", num_owners=2, max_num_seqs=1)
    d = Drive(Scheduler(config, manager, ShapePolicy(BucketTable()), 64, clock=Clock()), KVCheckingWorker(FULL, 200, 4, 0, 11, 1))
    d.add(of(0, "0-warm", 41, max_tokens=1))
    begun(d)
    for i in range(12):
        d.add(replace(request(f"0-{i}", [1] * 41, max_tokens=1), owner=0))  # 40 of 41 tokens are found
        d.add(replace(request(f"1-{i}", [i + 2] * 41, max_tokens=1), owner=1))
    first = Counter(name[0] for name in begun(d)[:13])
    assert first["0"] >= 11


def test_a_preempted_branch_of_a_key_comes_back() -> None:
    d = drive(policy="fair", num_owners=2, max_num_seqs=4, num_blocks=14)
    for i in range(4):
        d.add(of(i % 2, f"{i % 2}-{i}", 8, max_tokens=20, ignore_eos=True))
    begun(d)
    assert d.scheduler.stats().num_preemptions > 0
    assert all(end.finish_reason == "length" for end in d.ends.values()) and len(d.ends) == 4


def test_requests_run_together_after_the_clock_was_set_back() -> None:
    d = drive(max_num_seqs=4)
    for i in range(4):
        d.add(of(0, str(i), arrival_s=5000.0))
    d.step()
    assert len(d.steps[0].rows) == 4
    d.run()


# ---------------------------------------------------------------- bounds
def refusals(d: Drive) -> set[str]:
    return {name for (name, _), end in d.ends.items() if end.error is not None and end.error.code == "queue_full"}


def test_a_key_cannot_fill_the_part_of_another() -> None:
    d = drive(policy="fair", num_owners=2, max_num_seqs=2, max_waiting_requests=6)
    for i in range(8):
        d.add(of(0, f"0-{i}"))
    assert refusals(d) == {f"0-{i}" for i in range(4, 8)}
    assert "max_num_seqs 2 + max_waiting_requests 6, of which each API key has a part of 2" in d.ends["0-4", 0].error.message
    for i in range(5):
        d.add(of(1, f"1-{i}"))
    assert refusals(d) == {*(f"0-{i}" for i in range(4, 8)), "1-4"}
    begun(d)
    d.add(of(0, "0-later"))
    assert "0-later" not in refusals(d)


def test_the_queue_is_bounded_in_all_by_max_num_queued_reqs() -> None:
    d = drive(max_num_seqs=2, max_queued_requests=3)
    for i in range(4):
        d.add(of(0, f"{i}"))
    assert refusals(d) == {"3"} and "max_num_queued_reqs 3" in d.ends["3", 0].error.message


def test_prompt_tokens_that_wait_are_bounded() -> None:
    d = drive(max_num_seqs=1, max_queued_tokens=20)
    d.add(of(0, "long", 40, max_tokens=4))  # more than the bound, and nobody waits: it would never fit otherwise
    d.add(of(0, "a", 8))
    assert refusals(d) == {"a"} and "max_num_queued_tokens 20" in d.ends["a", 0].error.message
    d.step()  # the long prompt is computed
    for name, size in (("b", 8), ("c", 12), ("d", 1)):
        d.add(of(0, name, size))
    assert refusals(d) == {"a", "d"}
    d.take(d.scheduler.abort(Abort("c")))
    d.add(of(0, "e", 12))
    assert refusals(d) == {"a", "d"}
    begun(d)
    d.scheduler.check_invariants()


def test_under_fair_each_key_has_its_part_of_the_tokens() -> None:
    d = drive(policy="fair", num_owners=2, max_num_seqs=1, max_queued_tokens=20)
    for owner, name, size in ((0, "0-a", 8), (0, "0-b", 3), (1, "1-a", 10), (1, "1-b", 1)):
        d.add(of(owner, name, size))
    assert refusals(d) == {"0-b", "1-b"}


# ---------------------------------------------------------------- waiting
def test_a_request_that_waits_too_long_is_answered_and_one_that_runs_is_not() -> None:
    clock = Clock()
    d = drive(clock, max_num_seqs=1, max_queue_s=5.0)
    d.add(of(0, "runs", max_tokens=40, ignore_eos=True))
    d.step()
    d.add(of(0, "waits", max_tokens=4, n=3))
    clock.now_s = 104.0
    d.add(of(0, "later", max_tokens=4, arrival_s=104.0))
    assert d.scheduler.end_overdue() == []
    clock.now_s = 105.5
    ended = d.scheduler.end_overdue()
    d.take(ended)
    assert [(o.request_id, o.index, o.finish_reason) for o in ended] == [("waits", i, "error") for i in range(3)]
    assert {o.error.code for o in ended} == {"queue_timeout"} and "waited 5 s" in ended[0].error.message
    d.scheduler.check_invariants()
    clock.now_s = 109.0  # what runs has been there for longer, and goes on
    assert d.scheduler.end_overdue() == []
    d.run()
    assert {name: end.finish_reason for (name, _), end in d.ends.items()} == {"waits": "error", "runs": "length", "later": "length"}


def test_a_preempted_request_was_begun_and_is_not_overdue() -> None:
    clock = Clock()
    d = drive(clock, num_blocks=8, max_num_seqs=2, max_queue_s=5.0)
    d.add(of(0, "a", 8, max_tokens=16, ignore_eos=True))
    d.add(of(0, "b", 8, max_tokens=16, ignore_eos=True))
    while not d.scheduler.stats().num_preemptions:
        d.step()
    clock.now_s += 100.0
    assert d.scheduler.end_overdue() == []
    d.run()
    assert {end.finish_reason for end in d.ends.values()} == {"length"}


def test_when_all_that_wait_are_overdue_the_engine_is_idle_again() -> None:
    clock = Clock()
    d = drive(clock, max_queue_s=1.0)
    d.add(of(0, "a"))
    clock.now_s += 2.0
    d.take(d.scheduler.end_overdue())
    assert not d.scheduler.has_unfinished() and d.scheduler.schedule() is None


# ---------------------------------------------------------------- options
def test_fair_needs_keys_to_be_fair_between() -> None:
    values = {"model": "m", "scheduling_policy": "fair"}
    for keys, text in (([], "there is none"), (["a"], "there is one"), (["a", "a"], "there is one")):
        with pytest.raises(ConfigError, match=text):
            resolve({**values, "api_key": keys} if keys else values)
    resolved = resolve({**values, "api_key": ["a", "b", "c"]})
    assert resolved.engine.scheduler.num_owners == 3
    with pytest.raises(ConfigError, match="leaves no place for each of 3"):
        resolve({**values, "api_key": ["a", "b", "c"], "max_num_seqs": "1", "max_num_queued_reqs": "2"})
    with pytest.raises(ConfigError, match="scheduling_policy fair"):
        from_kwargs("m", scheduling_policy="fair")


def test_options_of_the_queue() -> None:
    scheduler = resolve({"model": "m", "max_num_queued_reqs": "300", "max_num_queued_tokens": "8K", "max_queue_time": "2.5"}).engine.scheduler
    assert (scheduler.max_inside, scheduler.max_queued_tokens, scheduler.max_queue_s) == (300, 8192, 2.5)
    assert resolve({"model": "m"}).engine.scheduler.max_inside == 256 + 4096
    for values, text in (
        ({"max_num_queued_reqs": "300", "max_waiting_requests": "3"}, "bound the same queue"),
        ({"max_num_queued_reqs": "100"}, "--max-num-seqs is 256"),
        ({"max_queue_time": "0"}, "above 0"),
        ({"max_num_queued_tokens": "0"}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            resolve({"model": "m", **values})
    with pytest.raises(TypeError, match="offline there is nothing it would do"):
        from_kwargs("m", max_queue_time=1.0)
