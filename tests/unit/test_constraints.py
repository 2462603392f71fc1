"""Structured output in the scheduler: a branch waits for its mask, nobody else does, and what a mask means beside EOS and bans."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_checking_worker import FULL, Drive, KVCheckingWorker, expected_tokens, request
from oarlock.backend_api import Extension
from oarlock.config.sections import EngineConfig, ModelConfig, SchedulerConfig
from oarlock.errors import ConfigError
from oarlock.kv.manager import KVCacheManager
from oarlock.messages import Abort
from oarlock.scheduler import constraints as constraints_module
from oarlock.scheduler.constraints import Constraints, make_grammars
from oarlock.scheduler.scheduler import Scheduler
from oarlock.shapes import BucketTable, ShapePolicy
from oarlock.structured_outputs import StructuredOutputs

VOCAB = 11
EOS = (0,)


def bits(*tokens: int) -> bytes:
    mask = bytearray(4)
    for token in tokens:
        mask[token >> 3] |= 1 << (token & 7)
    return bytes(mask)


@dataclass
class Counting:
    """A backend whose text is the tokens of `pattern`, one set a place; it may end after the last. Answers after `delay` looks."""

    pattern: list[set[int]]
    delay: int = 0
    problem: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    open: list[tuple[int, int]] = field(default_factory=list)  # (branch, looks to go)
    forgotten: set[int] = field(default_factory=set)
    waits: list[float] = field(default_factory=list)

    def ask(self, branch_id: int, wanted: StructuredOutputs, start: int, token_ids: tuple[int, ...]) -> None:
        known = self.tokens.setdefault(branch_id, [])
        assert start == len(known), "tokens that the backend knows are sent again, or some are left out"
        known += token_ids
        assert all(token in allowed for token, allowed in zip(known, self.pattern, strict=False)), f"{known} does not follow the pattern"
        self.open.append((branch_id, self.delay))

    def answers(self, wait_s: float) -> list[tuple[int, bytes, bool, str]]:
        self.waits.append(wait_s)
        ready = [b for b, looks in self.open if looks <= 0]
        self.open = [(b, looks - 1) for b, looks in self.open if looks > 0]
        found = []
        for branch in ready:
            at = len(self.tokens[branch])
            may_end = at >= len(self.pattern)
            found.append((branch, bits(*(() if may_end else self.pattern[at])), may_end, self.problem))
        return found

    def forget(self, branch_id: int) -> None:
        self.forgotten.add(branch_id)

    def close(self) -> None:
        pass


def drive(backend: Counting, num_blocks: int = 100, **config) -> Drive:
    manager = KVCacheManager(FULL, num_blocks, 4, True, 0)
    constraints = Constraints({"counting": backend}, VOCAB)
    scheduler = Scheduler(SchedulerConfig(**config), manager, ShapePolicy(BucketTable()), 64, clock=lambda: 0.0, constraints=constraints)
    return Drive(scheduler, KVCheckingWorker(FULL, num_blocks, 4, 0, VOCAB, scheduler._config.max_num_seqs), config.get("max_in_flight", 1))


PATTERN = [{3, 4}, {5}, {6, 7, 8}, {9, 10}]
ANY = {"structured_outputs": {"regex": "x"}}


def follows(tokens: list[int]) -> bool:
    return all(token in allowed for token, allowed in zip(tokens, PATTERN, strict=True))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("delay", [0, 1, 4])
def test_every_token_is_one_that_its_mask_allows_and_eos_comes_where_the_text_may_end(depth: int, delay: int) -> None:
    backend = Counting(PATTERN, delay)
    d = drive(backend, max_in_flight=depth)
    d.add(request("a", [1, 2, 3], EOS, **ANY))
    d.run()
    assert follows(d.tokens["a", 0][:-1]) and d.tokens["a", 0][-1] == 0
    assert (d.ends["a", 0].finish_reason, d.ends["a", 0].stop_reason) == ("stop", None)
    assert backend.forgotten == {0} and not d.scheduler._constraints.num_asked


def test_the_prompt_is_computed_while_its_mask_is_awaited_and_others_go_on() -> None:
    backend = Counting(PATTERN, delay=10**9)
    d = drive(backend)
    d.add(request("slow", [1, 2, 3, 4, 5], EOS, **ANY))
    free = request("free", [1, 2, 3], max_tokens=6)
    d.add(free)
    for _ in range(20):
        d.take(d.scheduler.settle_constraints())
        d.step()
    assert (d.tokens["free", 0], "length") == expected_tokens(free, 0, VOCAB, 64)
    assert not d.tokens["slow", 0] and ("slow", 0) not in d.ends
    assert [r.num_tokens for s in d.steps for r in s.rows if r.branch_id == 0] == [4], "all but the last token of its prompt"
    d.take(d.scheduler.abort(Abort("slow")))
    assert d.ends["slow", 0].finish_reason == "abort" and backend.forgotten == {0} and not d.scheduler.has_unfinished()


def test_a_step_that_others_wait_for_is_held_back_a_moment_only() -> None:
    backend = Counting(PATTERN, delay=10**9)
    d = drive(backend)
    d.add(request("slow", [1, 2, 3], EOS, **ANY))
    d.add(request("free", [1, 2, 3], max_tokens=30))
    time.sleep(0.01)
    backend.waits.clear()
    for _ in range(10):
        d.take(d.scheduler.settle_constraints())
        d.step()
    assert backend.waits and max(backend.waits) == 0.0


@pytest.mark.parametrize("n", [2, 5])
def test_branches_have_states_of_their_own(n: int) -> None:
    d = drive(Counting(PATTERN), max_num_seqs=3)
    d.add(request("a", [1, 2, 3], EOS, n=n, **ANY))
    d.run()
    assert all(follows(d.tokens["a", i][:-1]) and d.ends["a", i].finish_reason == "stop" for i in range(n))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6), st.integers(12, 30), st.integers(1, 2), st.integers(0, 3))
def test_constrained_and_free_requests_under_preemption(asked: list[tuple[int, bool]], num_blocks: int, depth: int, delay: int) -> None:
    d = drive(Counting([*PATTERN, *PATTERN], delay), num_blocks, max_in_flight=depth, max_num_seqs=4)
    sources = [
        request(f"r{i}", [i % VOCAB] * length, EOS if constrained else (), max_tokens=12, **(ANY if constrained else {}))
        for i, (length, constrained) in enumerate(asked)
    ]
    for source in sources:
        d.add(source)
    d.run()
    for source in sources:
        key = (source.request_id, 0)
        if source.params.structured_outputs is None:
            assert (d.tokens[key], d.ends[key].finish_reason) == expected_tokens(source, 0, VOCAB, 64)
        else:
            tokens = d.tokens[key]
            assert tokens[-1] == 0 and follows(tokens[:4]) and follows(tokens[4:8]) and len(tokens) == 9


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 6}])
def test_a_complete_text_that_nothing_may_follow_ends_with_stop(fields: dict) -> None:
    d = drive(Counting(PATTERN))
    d.add(request("a", [1, 2, 3], EOS, **fields, **ANY))
    d.run()
    assert follows(d.tokens["a", 0]) and d.ends["a", 0].finish_reason == "stop" and not d.ends["a", 0].new_token_ids


def test_max_tokens_inside_the_text_gives_length() -> None:
    d = drive(Counting(PATTERN))
    d.add(request("a", [1, 2, 3], EOS, max_tokens=2, **ANY))
    d.run()
    assert len(d.tokens["a", 0]) == 2 and d.ends["a", 0].finish_reason == "length"


def test_stop_token_ids_end_a_text_where_it_may_end_and_nowhere_else() -> None:
    d = drive(Counting(PATTERN))
    d.add(request("a", [1, 2, 3], (), stop_token_ids=(1,), **ANY))
    d.run()
    assert follows(d.tokens["a", 0][:-1]) and (d.ends["a", 0].finish_reason, d.ends["a", 0].stop_reason) == ("stop", 1)


@pytest.mark.parametrize(
    ("fields", "after"), [({"allowed_token_ids": (1, 2, 3)}, 1), ({"bad_words": ("x",), "bad_words_token_ids": ((5,),)}, 1)]
)
def test_bans_that_leave_nothing_are_an_error_that_names_them(fields: dict, after: int) -> None:
    d = drive(Counting(PATTERN))
    d.add(request("a", [1, 2, 3], EOS, **fields, **ANY))
    d.add(request("b", [1, 2, 3], EOS, **ANY))
    d.run()
    error = d.ends["a", 0].error
    assert error is not None and error.param == "structured_outputs" and f"after {after} tokens" in error.message and "allowed_token_ids" in error.message
    assert d.ends["b", 0].finish_reason == "stop"


def test_a_problem_fails_every_branch_of_its_request_and_no_other() -> None:
    backend = Counting(PATTERN, problem="unbalanced bracket at 3")
    d = drive(backend)
    d.add(request("a", [1, 2, 3], EOS, n=3, **ANY))
    free = request("free", [1, 2, 3])
    d.add(free)
    d.run()
    assert {d.ends["a", i].error.message for i in range(3)} == {"structured_outputs: unbalanced bracket at 3"}
    assert d.ends["free", 0].finish_reason == "length" and d.scheduler.stats().num_used_blocks == 0


def test_a_mask_of_the_wrong_size_is_the_backends_fault() -> None:
    backend = Counting(PATTERN)
    d = drive(backend)
    d.scheduler._constraints._mask_bytes = 8
    d.add(request("a", [1, 2, 3], EOS, **ANY))
    d.run()
    assert "4 bytes" in d.ends["a", 0].error.message and "8" in d.ends["a", 0].error.message


def test_without_a_backend_the_request_is_refused_with_the_package() -> None:
    manager = KVCacheManager(FULL, 50, 4, True, 0)
    d = Drive(Scheduler(SchedulerConfig(), manager, ShapePolicy(BucketTable()), 64), KVCheckingWorker(FULL, 50, 4))
    d.add(request("a", [1, 2, 3], EOS, **ANY))
    error = d.ends["a", 0].error
    assert error is not None and "pip install ./plugins/structured_output" in error.message and error.param == "structured_outputs"


@pytest.mark.parametrize("width", [2, 3])
def test_beams_follow_their_masks(width: int) -> None:
    class All(KVCheckingWorker):
        """Gives the whole vocabulary's logprobs, as the runner does for rows with a mask."""

        def _sample(self, branch_id, known, banned, tokens, logprobs) -> None:
            super()._sample(branch_id, known, tuple(range(VOCAB)), tokens, logprobs)

    d = drive(Counting(PATTERN))
    d.worker = All(FULL, 100, 4, 0, VOCAB)
    d.add(request("a", [1, 2, 3], EOS, use_beam_search=True, n=width, **ANY))
    d.run()
    found = [tuple(d.tokens["a", i]) for i in range(width)]
    assert all(follows(list(tokens[:-1])) and tokens[-1] == 0 for tokens in found) and len(set(found)) == width


def test_steps_of_a_constrained_request_never_overlap() -> None:
    d = drive(Counting(PATTERN), max_in_flight=2)
    d.add(request("a", [1, 2, 3], EOS, **ANY))
    d.run()
    emitting = [s.step_id for s in d.steps if s.rows[0].emits]
    assert len(emitting) == 5 and all(later > earlier for earlier, later in pairwise(emitting))
    assert all(row.mask for s in d.steps for row in s.rows if row.emits) and not any(row.mask for s in d.steps for row in s.rows if not row.emits)


# ---------------------------------------------------------------- which backend
class Parts:
    """Stands for `oarlock.extensions`: what is installed, and what of it cannot serve."""

    def __init__(self, **factories) -> None:
        self.factories = factories

    def parts(self, kind: str, device: str) -> list:
        assert kind == "structured_output"
        return [(None, Extension(kind, name, "x:y", priority)) for priority, name in enumerate(self.factories)]

    def load(self, part: Extension):
        return self.factories[part.name]


def broken(config: object, vocabulary: object) -> Counting:
    raise RuntimeError("the library is not here: pip install it")


def chosen(monkeypatch: pytest.MonkeyPatch, wanted: str, **factories):
    monkeypatch.setattr(constraints_module, "extensions", Parts(**factories))
    return make_grammars(EngineConfig(ModelConfig("m", guided_decoding_backend=wanted)), "cpu", ("a:b", ""))


def works(config: object, vocabulary: object) -> Counting:
    return Counting(PATTERN)


def test_the_backend_of_highest_priority_that_can_serve_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    made, states = chosen(monkeypatch, "auto", low=works, high=works, best=broken)
    assert list(made) == ["high", "low"] and states == (("high", ""), ("low", ""), ("best", "the library is not here: pip install it"))


def test_the_backend_that_was_named_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    made, states = chosen(monkeypatch, "low", low=works, high=works)
    assert list(made) == ["low", "high"] and states[0] == ("low", "")


@pytest.mark.parametrize(("wanted", "words"), [("best", "pip install it"), ("outlines", r"pip install \./plugins/structured_output")])
def test_a_named_backend_that_cannot_serve_ends_the_start(monkeypatch: pytest.MonkeyPatch, wanted: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--guided-decoding-backend {wanted}: .*{words}"):
        chosen(monkeypatch, wanted, low=works, best=broken)


def test_none_is_needed_where_none_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, "auto") == ({}, ())
