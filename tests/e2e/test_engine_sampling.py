"""A seeded request gives the same tokens whatever else runs, on every device; penalties and biases stay with their request.

The expectation is not another run of the engine: it is the sampler's definition over transformers' logits of the same text (near-ties
excused and counted), so runs that meet it are equal to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import seeds
from checkpoints import NEAR_TIES, Tiny
from equivalence import DEVICES, GREEDY, Answers, Engine, check_all, check_sampled, prompts_of, sampled_params
from oarlock.sampling_params import SamplingParams

LENGTHS = (40, 1, 17, 129)
OTHERS = (5, 64, 12, 31, 9, 100, 2, 25, 48, 3, 13, 65, 20, 7, 33, 16)
Request = tuple[list[int], SamplingParams]


@pytest.fixture
def tiny(checkpoint) -> Tiny:
    return checkpoint("llama")


@pytest.fixture
def make(tiny) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(device: str = "cpu", **options: Any) -> Engine:
        made.append(Engine(tiny.path, device, **{"max_model_len": 256, "max_num_seqs": 20, **options}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def seeded(tiny: Tiny) -> list[Request]:
    """One of each kind of sampling; two with penalties, one of them with a bias."""
    kinds: tuple[dict[str, Any], ...] = (
        {}, {}, {"repetition_penalty": 1.3, "presence_penalty": 0.4}, {"frequency_penalty": 0.7, "logit_bias": {11: 3.0, 12: -2.0}},
    )  # fmt: skip
    return [(p, sampled_params(i, **kinds[i])) for i, p in enumerate(prompts_of(tiny, LENGTHS))]


def others(tiny: Tiny) -> list[Request]:
    """Sixteen requests of other kinds, some with the same seeds."""
    return [
        (p, GREEDY if i % 4 == 0 else sampled_params(i % 7, temperature=1.3, presence_penalty=float(i % 3), max_tokens=10 + i))
        for i, p in enumerate(prompts_of(tiny, OTHERS))
    ]


def alone(engine: Engine, requests: list[Request]) -> list[Answers]:
    return [engine.run([request], fresh=False)[0] for request in requests]


def check(tiny: Tiny, requests: list[Request], got: list[Answers], what: str) -> None:
    for (prompt, params), answers in zip(requests, got, strict=True):
        check_sampled(tiny, prompt, params, answers, what)


@pytest.fixture(scope="module")
def by_itself() -> dict[str, list[Answers]]:
    """The tokens of the four requests alone on cpu, kept by the first test that makes them."""
    return {}


def same(by_itself: dict[str, list[Answers]], make: Callable[..., Engine], tiny: Tiny, got: list[Answers], what: str) -> None:
    """The definition's tokens, and, where no near-tie was excused, those of the request alone."""
    if not by_itself:
        by_itself["cpu"] = alone(make(), seeded(tiny))
        check(tiny, seeded(tiny), by_itself["cpu"], "alone on cpu")
    excused = len(NEAR_TIES)
    check(tiny, seeded(tiny), got, what)
    if len(NEAR_TIES) == excused:
        assert got == by_itself["cpu"], f"{what}: other tokens than alone on cpu"


@pytest.mark.parametrize("device", DEVICES)
def test_seeded_request_gives_the_same_tokens_alone(make, tiny, by_itself, device):
    same(by_itself, make, tiny, alone(make(device), seeded(tiny)), f"alone on {device}")


@pytest.mark.parametrize("device", DEVICES)
def test_seeded_request_gives_the_same_tokens_among_sixteen_others(make, tiny, by_itself, device):
    engine = make(device)
    got = engine.run([*others(tiny)[:8], *seeded(tiny), *others(tiny)[8:]], waves=(6, 4))
    engine.require("mixed", what=f"a batch on {device}")
    assert engine.events["rows"] >= 16
    same(by_itself, make, tiny, got[8:12], f"among others on {device}")
    check_all(tiny, [others(tiny)[0][0]], [got[0][0]], f"a greedy request among sampled ones on {device}")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_seeded_request_gives_the_same_tokens_under_preemption(make, tiny, by_itself, mode):
    engine = make(block_size=8, num_blocks_override=46, preemption_mode=mode, swap_space="16MiB")
    for turn in range(2):  # once as those that came last and lose their blocks, once as the first
        requests = [*others(tiny)[:8], *seeded(tiny)] if turn == 0 else [*seeded(tiny), *others(tiny)[:8]]
        got = engine.run(requests)
        engine.require("preemptions", *(["swap_outs"] if mode == "swap" else []), what=mode)
        same(by_itself, make, tiny, got[8:12] if turn == 0 else got[:4], f"{mode} turn {turn}")


def test_seeded_request_gives_the_same_tokens_with_two_steps_in_flight(make, tiny, by_itself):
    engine = make(max_in_flight=2, max_num_batched_tokens=32)
    got = engine.run([*others(tiny)[:6], *seeded(tiny)], waves=(3, 3))
    engine.require("overlapped", "chunks", what="two steps in flight")
    same(by_itself, make, tiny, got[6:10], "two steps in flight")


def test_seeded_request_gives_the_same_tokens_on_two_ranks(make, tiny, by_itself):
    """One rank samples; the other must hold the same last tokens and histories to go on from."""
    engine = make(tensor_parallel_size=2, max_num_batched_tokens=32)
    got = engine.run([*others(tiny)[:4], *seeded(tiny)], waves=(3, 3))
    engine.require("mixed", "chunks", what="two ranks")
    same(by_itself, make, tiny, got[4:8], "two ranks")


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_and_biases_never_cross_requests(make, tiny, device):
    """Equal prompts, two seats that requests use one after another: plain ones stay plain, each other one has its own history."""
    engine = make(device, max_num_seqs=2)
    (prompt,) = prompts_of(tiny, (40,))
    short = {"max_tokens": 20, "ignore_eos": True, "detokenize": False, "temperature": 0.0}
    strong = SamplingParams(repetition_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0, **short)
    frequent = SamplingParams(frequency_penalty=1.5, **short)
    biased = SamplingParams(logit_bias={7: 100.0}, allowed_token_ids=[7, 8, 9], **short)
    plain = SamplingParams(**short)
    order = [strong, plain, plain, frequent, biased, plain, plain, strong, frequent, biased]
    got = engine.run([(prompt, params) for params in order])
    want = tiny.greedy(prompt).tokens[:20]
    for params, answers in zip(order, got, strict=True):
        what = f"{'plain' if params == plain else params} on {device}"
        if params == plain:
            tiny.check(prompt, answers[0], what)
        else:
            assert answers[0] != want, f"{what}: it has no effect"
            check_sampled(tiny, prompt, params, answers, what)
    assert got[4][0] == [7] * 20


def test_seeds_make_different_requests_differ(make, tiny):
    engine = make()
    (prompt,) = prompts_of(tiny, (17,))
    tokens = [engine.run([(prompt, sampled_params(0, seed=seeds.SAMPLED + n, temperature=1.5))], fresh=False)[0][0] for n in (0, 1, 2**33, -5)]
    assert len({tuple(t) for t in tokens}) == 4
