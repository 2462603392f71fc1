"""A thousand random requests with random aborts through a whole engine: one end for each answer, and nothing held afterwards."""

from __future__ import annotations

import random
from collections import Counter

import seeds
from equivalence import Engine
from oarlock.errors import QueueFull
from oarlock.messages import Abort, EngineOutput
from oarlock.sampling_params import SamplingParams

REQUESTS, ABORTED, IN_QUEUE = 1000, 0.25, 40
GREEDY_CHECKED = 25  # of the greedy requests that were left alone, compared with transformers


def random_params(draw: random.Random) -> SamplingParams:
    """Of every kind: greedy, sampled, penalised, biased, several branches, the best of several, beams, with stops and log-probabilities."""
    kind = draw.random()
    fields: dict[str, object] = {"max_tokens": draw.choice((1, 2, 5, 9, 25)), "ignore_eos": draw.random() < 0.5, "detokenize": False}
    if draw.random() < 0.2:
        fields["stop_token_ids"] = draw.sample(range(320), 20)
    if draw.random() < 0.2:
        fields["logprobs"] = draw.randrange(4)
    if draw.random() < 0.1:
        fields["prompt_logprobs"] = draw.randrange(3)
    if kind < 0.4:
        return SamplingParams(temperature=0.0, **fields)
    if kind < 0.5:
        width = draw.randint(2, 5)
        return SamplingParams(use_beam_search=True, best_of=width, n=draw.randint(1, width), **fields)
    fields |= {"temperature": draw.choice((0.5, 1.0, 2.0)), "top_k": draw.choice((0, 5)), "top_p": draw.choice((1.0, 0.7))}
    if draw.random() < 0.3:
        fields |= {"repetition_penalty": 1.2, "presence_penalty": draw.choice((0.0, 1.0))}
    if draw.random() < 0.2:
        fields["logit_bias"] = {draw.randrange(320): draw.uniform(-5, 5) for _ in range(3)}
    n = draw.choice((1, 1, 1, 2, 3))
    return SamplingParams(n=n, best_of=n + draw.choice((0, 0, 2)) if n > 1 else None, **fields)


def test_thousand_random_requests_with_random_aborts(checkpoint):
    tiny, draw = checkpoint("llama"), random.Random(seeds.TRAFFIC)
    engine = Engine(
        tiny.path, "cpu", block_size=8, num_blocks_override=34, max_model_len=160, max_num_seqs=12, max_num_batched_tokens=40, max_in_flight=2,
        swap_space="16MiB", max_waiting_requests=IN_QUEUE,
    )  # fmt: skip
    shared = [draw.randrange(3, 320) for _ in range(70)]
    open_: dict[str, set[int]] = {}
    sources: dict[str, tuple[list[int], SamplingParams]] = {}
    tokens: dict[str, list[int]] = {}
    ends: Counter[tuple[str, int]] = Counter()
    reasons: Counter[str] = Counter()
    aborted: set[str] = set()
    errors: list[EngineOutput] = []
    steps = 0
    while len(sources) < REQUESTS or engine.client.has_unfinished():
        while len(sources) < REQUESTS and len(open_) < IN_QUEUE and draw.random() < 0.7:
            length = draw.choice((1, 3, 8, 15, 16, 17, 40, 90))
            prompt = shared[:length] if draw.random() < 0.3 and length <= 70 else [draw.randrange(3, 320) for _ in range(length)]
            params = random_params(draw)
            name = engine.submit(prompt, params, eos_token_ids=(2, 30, 60))
            sources[name] = (prompt, params)
            open_[name] = set(range(params.n if params.use_beam_search else params.num_branches))
        if open_ and draw.random() < ABORTED:
            name = draw.choice(sorted(open_, key=int))
            index = draw.choice((None, *sorted(open_[name])))
            reason = draw.choice(("abort", "stop"))
            engine.client.abort(Abort(name, reason, index))
            aborted.add(name)
            if reason == "stop":  # the front end has ended it; the engine says nothing more about it
                for i in set(open_[name]) if index is None else {index}:
                    ends[name, i] += 1
                    open_[name].discard(i)
                if not open_[name]:
                    del open_[name]
        outputs = engine.client.step() if engine.client.has_unfinished() else None
        steps += 1
        for output in outputs.outputs if outputs else ():
            name = output.request_id
            assert output.index in open_.get(name, ()), f"request {name} branch {output.index} had ended before {output}"
            if output.index == 0:
                tokens.setdefault(name, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[name, output.index] += 1
                reasons[output.finish_reason] += 1
                if output.error is not None:
                    errors.append(output)
                open_[name].discard(output.index)
                if not open_[name]:
                    del open_[name]
        if steps % 50 == 0:
            engine.core.scheduler.check_invariants()
    assert not open_, f"requests without an end: {open_}"
    expected = {(n, i) for n, (_, p) in sources.items() for i in range(p.n if p.use_beam_search else p.num_branches)}
    assert set(ends) == expected and set(ends.values()) == {1}
    assert not errors, errors[0]
    assert min(reasons["stop"], reasons["length"], reasons["abort"]) > 30, f"one-sided traffic: {reasons}"
    stats = engine.stats
    assert stats.num_preemptions > 50 and stats.num_swap_outs > 10 and stats.prefix_hits > 100, f"traffic that is too easy: {stats}"
    engine.require("mixed", "overlapped", "chunks", "block_copy", "swap_in", what="random traffic")
    engine.check_idle()
    left_alone = [n for n, (_, p) in sources.items() if p.is_greedy and not p.use_beam_search and n not in aborted]
    for name in left_alone[:: max(1, len(left_alone) // GREEDY_CHECKED)]:
        tiny.check(sources[name][0], tokens[name], f"random traffic, request {name},")
    engine.close()


def test_more_than_the_queue_holds_is_refused_and_the_rest_is_served(checkpoint):
    engine = Engine(checkpoint("llama").path, "cpu", max_model_len=160, max_num_seqs=2, max_waiting_requests=4)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    refused = []
    names = [engine.submit([5, 6, 7], params) for _ in range(10)]
    reasons = Counter()
    while engine.client.has_unfinished():
        for output in engine.client.step().outputs:
            if output.finish_reason is not None:
                reasons[output.finish_reason] += 1
            if output.error is not None:
                refused.append(output)
    assert reasons == {"length": 2 + 4, "error": 4} and len(names) == 10
    assert {output.error.code for output in refused} == {"queue_full"}
    assert QueueFull is not None
    engine.check_idle()
    engine.close()
