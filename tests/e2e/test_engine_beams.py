"""Beam search on real engines: against every sequence there is, against a plain search without caches, and against transformers'.

The plain search uses transformers' logits of each beam's whole text, so agreement also shows that blocks shared by beams are copied
before one of them writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from checkpoints import NEAR_TIE, NEAR_TIES, Tiny
from equivalence import DEVICES, GREEDY, Engine, check_all, logits_of, prompts_of
from oarlock.messages import EngineOutput
from oarlock.sampling_params import SamplingParams


@dataclass(frozen=True)
class Found:
    """One hypothesis."""

    tokens: tuple[int, ...]
    total: float  # sum of log-probabilities
    score: float
    reason: str


@pytest.fixture
def tiny(checkpoint) -> Tiny:
    return checkpoint("llama")


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(tiny: Tiny, device: str = "cpu", **options: Any) -> Engine:
        made.append(Engine(tiny.path, device, **{"max_model_len": 256, "max_num_seqs": 20, **options}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def beams(width: int, max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"n": width, "best_of": width, "use_beam_search": True, "max_tokens": max_tokens, "detokenize": False, **fields})


def search(engine: Engine, prompt: list[int], params: SamplingParams, eos: tuple[int, ...] = ()) -> list[EngineOutput]:
    """The engine's answer: one output for each of the n best."""
    engine.submit(prompt, params, eos_token_ids=eos)
    ends: dict[int, EngineOutput] = {}
    while engine.client.has_unfinished():
        outputs = engine.client.step()
        for output in outputs.outputs if outputs else ():
            assert output.error is None and output.finish_reason is not None and output.index not in ends
            ends[output.index] = output
    engine.check_idle()
    return [ends[index] for index in range(params.n)]


# ---------------------------------------------------------------- the plain search
class Model:
    """Log-probabilities of what follows a text, by transformers without a cache."""

    def __init__(self, tiny: Tiny) -> None:
        self._tiny = tiny
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def follow(self, texts: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """[vocab_size] float32 for each text. The texts are equally long."""
        new = [text for text in texts if text not in self._known]
        if new:
            with torch.no_grad():
                logits = self._tiny._reference()(torch.tensor(new), use_cache=False).logits[:, -1].float()
            self._known |= dict(zip(new, logits.log_softmax(-1), strict=True))
        return [self._known[text] for text in texts]


def plain_search(model: Model, prompt: list[int], params: SamplingParams, eos: tuple[int, ...] = ()) -> list[Found]:
    """The definition, one line a rule: 2 x width candidates a step, ends among them are kept, width others go on."""
    width, penalty, ends = params.num_branches, params.length_penalty, set(params.stop_token_ids) | set(eos)
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[Found] = []
    for length in range(1, params.max_tokens + 1):
        follow = model.follow([(*prompt, *tokens) for _, tokens in live])
        pool = [
            (total + float(logprobs[t]), (*tokens, t))
            for (total, tokens), logprobs in zip(live, follow, strict=True)
            for t in (params.allowed_token_ids or logprobs.topk(2 * width + len(ends)).indices.tolist())
            if length > params.min_tokens or t not in ends
        ]
        pool = sorted(pool, key=lambda c: -c[0])[: 2 * width]
        ended = [c for c in pool if c[1][-1] in ends]
        live = [c for c in pool if c not in ended][:width]
        last = length == params.max_tokens
        for total, tokens in (*ended, *(live if last else ())):
            done.append(Found(tokens, total, total / length**penalty, "stop" if (total, tokens) in ended else "length"))
        done = sorted(done, key=lambda f: -f.score)[:width]
        horizon = params.max_tokens if params.early_stopping == "never" and penalty > 0 else length
        if len(done) == width and (params.early_stopping is True or not live or done[-1].score >= live[0][0] / horizon**penalty):
            break
    return done[: params.n]


def assert_same(got: list[EngineOutput], want: list[Found], num_prompt: int, penalty: float, what: str) -> None:
    """Equal sequences with equal sums, in order; two neighbours may be swapped where their scores are a near-tie."""
    for at, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.cumulative_logprob is not None
        score = ours.cumulative_logprob / len(ours.new_token_ids) ** penalty
        assert math.isclose(score, theirs.score, abs_tol=1e-4), f"{what}: score {at} is {score}, by definition {theirs.score}"
        if ours.new_token_ids == theirs.tokens:
            assert math.isclose(ours.cumulative_logprob, theirs.total, abs_tol=1e-3), what
            assert ours.finish_reason == theirs.reason, what
            continue
        near = [f for f in want if f is not theirs and abs(f.score - theirs.score) < NEAR_TIE]
        assert any(f.tokens == ours.new_token_ids for f in near), f"{what}: beam {at} is {ours.new_token_ids}, by definition {theirs.tokens}"
        NEAR_TIES.append(f"{what}: beams of equal score, {at}")


# ---------------------------------------------------------------- against everything
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_wide_beams_find_the_best_of_all_sequences(make, tiny, penalty):
    """Three allowed tokens and three steps: 27 sequences. A width of 16 prunes none of the 9 that have two tokens."""
    model, engine = Model(tiny), make(tiny)
    allowed = (17, 101, 250)
    for prompt in prompts_of(tiny, (1, 17, 40)):
        every = []
        for tokens in product(allowed, repeat=3):
            total = sum(float(model.follow([(*prompt, *tokens[:i])])[0][tokens[i]]) for i in range(3))
            every.append(Found(tokens, total, total / 3**penalty, "length"))
        every.sort(key=lambda f: -f.score)
        params = beams(16, 3, n=8, allowed_token_ids=allowed, length_penalty=penalty, early_stopping="never", ignore_eos=True)
        got = search(engine, prompt, params)
        assert_same(got, every[:8], len(prompt), penalty, f"all sequences after {len(prompt)}")


# ---------------------------------------------------------------- against the plain search
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("device", DEVICES)
def test_beams_are_those_of_a_plain_search(make, checkpoint, device, family):
    tiny = checkpoint(family)
    model, engine = Model(tiny), make(tiny, device)
    widths = (2, 4, 16) if device == "cpu" else (4,)
    for width in widths:
        for prompt in prompts_of(tiny, (40, 5) if device == "cpu" else (40,)):
            params = beams(width, 12, ignore_eos=True)
            engine._forget()
            got = search(engine, prompt, params)
            assert engine.events["block_copy"] > 0, "no block that beams share was copied"
            assert_same(got, plain_search(model, prompt, params), len(prompt), 1.0, f"{width} beams on {device} after {len(prompt)}")


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_ending_beams_are_those_of_a_plain_search(make, tiny, early, penalty):
    """With ends that come often: tokens of the greedy continuation, and half of the vocabulary."""
    model, engine, reasons = Model(tiny), make(tiny), set()
    for prompt in prompts_of(tiny, (17, 40)):
        for eos in (tuple(tiny.greedy(prompt).tokens[2:6]), tuple(range(0, 320, 2))):
            params = beams(3, 10, n=2, early_stopping=early, length_penalty=penalty, min_tokens=2, stop_token_ids=(eos[0],))
            got = search(engine, prompt, params, eos[1:])
            want = plain_search(model, prompt, params, eos[1:])
            assert_same(got, want, len(prompt), penalty, f"early_stopping {early}, length_penalty {penalty}, after {len(prompt)}")
            reasons |= {f.reason for f in want}
    assert "stop" in reasons


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_beams_survive_preemption(make, tiny, mode):
    """Searches that push each other out of the cache, beside a greedy request."""
    model = Model(tiny)
    engine = make(tiny, block_size=8, num_blocks_override=40, preemption_mode=mode, swap_space="16MiB", max_in_flight=2)
    prompts = prompts_of(tiny, (64, 40, 17))
    params = beams(4, 24, ignore_eos=True)
    answers = engine.run([(prompts[0], GREEDY), *((prompt, params) for prompt in prompts)])
    engine.require("preemptions", "block_copy", *(["swap_in"] if mode == "swap" else []), what=f"beams under {mode}")
    check_all(tiny, prompts[:1], [answers[0][0]], f"a greedy request beside beams under {mode}")
    for prompt, answer in zip(prompts, answers[1:], strict=True):
        want = plain_search(model, prompt, params)
        assert [tuple(answer[i]) for i in range(4)] == [f.tokens for f in want], f"beams under {mode} after {len(prompt)}"


def test_copied_blocks_leave_the_parent_as_it_was(make, tiny):
    """Branches that share a half-filled block each write their own second half: every position's logits prove it, at every offset."""
    engine = make(tiny, block_size=8)
    for length in (8, 9, 12, 15, 16):  # the shared prompt without its last token ends at any offset, the block's edges included
        (prompt,) = prompts_of(tiny, (length,))
        params = SamplingParams(n=4, temperature=1.2, seed=length, max_tokens=20, ignore_eos=True, logprobs=0, detokenize=False)
        engine._forget()
        engine.submit(prompt, params)
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        while engine.client.has_unfinished():
            for output in engine.client.step().outputs:
                tokens.setdefault(output.index, []).extend(output.new_token_ids)
                logprobs.setdefault(output.index, []).extend(p.logprob for p in output.logprobs)
        assert (engine.events["block_copy"] > 0) == ((length - 1) % 8 != 0), f"prompt of {length}: {engine.events['block_copy']} blocks copied"
        assert len({tuple(t) for t in tokens.values()}) == 4
        for index, generated in tokens.items():
            scores = logits_of(tiny, [*prompt, *generated])[length - 1 : -1].log_softmax(-1)
            expected = scores.gather(1, torch.tensor(generated)[:, None]).squeeze(1)
            assert torch.allclose(torch.tensor(logprobs[index]), expected, atol=1e-3), f"prompt of {length}, branch {index}"


# ---------------------------------------------------------------- against transformers' own beam search
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_are_those_of_transformers(make, tiny, early, penalty):
    """Where nothing ends early the definitions agree: length counts generated tokens, the score is sum / length ** penalty."""
    engine = make(tiny)
    for width, n in ((2, 2), (5, 3)):
        (prompt,) = prompts_of(tiny, (17,))
        with torch.no_grad():
            out = tiny._reference().generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=16, do_sample=False,
                num_beams=width, num_return_sequences=n, length_penalty=penalty, early_stopping=early, return_dict_in_generate=True,
                output_scores=True,
            )  # fmt: skip
        want = [
            Found(tuple(tokens[len(prompt) :].tolist()), float(score) * 16**penalty, float(score), "length")
            for tokens, score in zip(out.sequences, out.sequences_scores, strict=True)
        ]
        params = beams(width, 16, n=n, length_penalty=penalty, early_stopping=early, ignore_eos=True)
        assert_same(search(engine, prompt, params), want, len(prompt), penalty, f"width {width}, early_stopping {early}")
