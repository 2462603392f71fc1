"""greedy, sample, logprobs, penalties and masks against core's references: the same tokens, the same bits where promised."""

from __future__ import annotations

import pytest
import torch
from oarlock.conformance.references import logits as reference_logits
from oarlock.conformance.references import sampling as reference

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module")
def ops():
    from oarlock_cpu import ops

    return ops


def make_rows(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def arguments(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> list[torch.Tensor]:
    numbers = torch.arange(rows, dtype=torch.int32)
    return [
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), min_p),
        numbers * 7919 - 3,
        numbers % 3,
        numbers * 5 + 1,
    ]


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.7, "temperature": 1.4},
    {"min_p": 0.02, "top_p": 0.8},
    {"min_p": 0.01, "top_k": 30, "top_p": 0.95},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [2, 33, 1000, 50257])
def test_sampled_tokens_equal_the_references(ops, isa, settings, vocab):
    rows = 4 if vocab > 10000 else 64
    logits, args = make_rows(rows, vocab, seed=vocab), arguments(rows, **settings)
    assert torch.equal(ops.sample(logits, *args), reference.sample(logits, *args))


def test_noise_does_not_depend_on_the_batch(ops):
    logits, args = make_rows(8, 5000, seed=1), arguments(8, top_p=0.9)
    whole = ops.sample(logits, *args)
    alone = [ops.sample(logits[r : r + 1], *[a[r : r + 1] for a in args]) for r in range(8)]
    assert torch.equal(whole, torch.cat(alone))


def test_sampling_follows_the_probabilities(ops):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    draws = 20000
    args = arguments(1)
    args = [a.expand(draws).contiguous() for a in args]
    args[6] = torch.arange(draws, dtype=torch.int32)
    counts = torch.bincount(ops.sample(logits.expand(draws, -1).contiguous(), *args).long(), minlength=5)
    expected = logits[0].softmax(-1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # chi squared, 4 degrees of freedom, p = 0.001


def test_equal_logits_keep_the_lowest_ids(ops, isa):
    logits = torch.zeros(64, 100)
    args = arguments(64, top_k=3)
    tokens = ops.sample(logits, *args)
    assert torch.equal(tokens, reference.sample(logits, *args))
    assert int(tokens.max()) < 3


def test_banned_tokens_are_never_drawn(ops):
    logits = make_rows(32, 300, seed=2)
    logits[:, ::2] = -torch.inf
    for settings in SETTINGS:
        tokens = ops.sample(logits, *arguments(32, **settings))
        assert torch.equal(tokens, reference.sample(logits, *arguments(32, **settings)))
        assert bool((tokens % 2 == 1).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 17, 98, 99])
def test_a_row_that_is_not_finite_gives_minus_one(ops, isa, value, at):
    logits = make_rows(3, 100, seed=3)
    logits[1, at] = value
    for tokens in (ops.greedy(logits), *(ops.sample(logits, *arguments(3, **s)) for s in SETTINGS)):
        assert tokens[1] == -1
        assert int(tokens[0]) >= 0 and int(tokens[2]) >= 0


@pytest.mark.parametrize("vocab", [1, 2, 31, 64, 50257])
def test_greedy_takes_the_first_of_the_best(ops, isa, vocab):
    logits = make_rows(9, vocab, seed=4).round()  # many equals
    assert torch.equal(ops.greedy(logits), reference.greedy(logits))
    assert torch.equal(ops.greedy(torch.full((2, vocab), -torch.inf)), torch.tensor([-1, -1], dtype=torch.int32))


@pytest.mark.parametrize("k", [0, 1, 5, 20, 100])
@pytest.mark.parametrize("vocab", [100, 5003])
def test_logprobs_equal_the_references(ops, isa, k, vocab):
    logits = make_rows(7, vocab, seed=5)
    logits[2] = logits[2].round()
    logits[3, vocab // 2 :] = -torch.inf
    targets = torch.tensor([0, 1, 50, vocab - 1, 99, 3, 2], dtype=torch.int32)
    got = ops.logprobs(logits, targets, k)
    want = reference_logits.logprobs(logits, targets, k)
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[3], want[3], rtol=1e-5, atol=1e-5)


def test_logprobs_of_a_row_with_nan_end(ops):
    logits = torch.full((2, 50), float("nan"))
    logits[1] = 0
    values, _, ids, _ = ops.logprobs(logits, torch.zeros(2, dtype=torch.int32), 5)
    assert values.isnan().tolist() == [True, False] and ids[1].tolist() == [0, 1, 2, 3, 4]


def test_penalties_equal_the_references(ops):
    logits = make_rows(5, 200, seed=6)
    history = torch.randint(0, 200, (5, 40), dtype=torch.int32)
    prompt, total = torch.tensor([10, 0, 40, 5, 0]).int(), torch.tensor([40, 20, 40, 6, 0]).int()
    history[1, 20:] = 7  # garbage beyond the end
    presence, frequency = torch.tensor([0.5, 0.0, -1.0, 2.0, 1.0]), torch.tensor([0.1, 0.7, 0.0, -0.5, 1.0])
    repetition = torch.tensor([1.2, 1.0, 0.8, 1.5, 2.0])
    args = (history, prompt, total, presence, frequency, repetition)
    before = logits.clone()
    torch.testing.assert_close(ops.apply_penalties(logits, *args), reference_logits.apply_penalties(logits, *args), rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)  # not in place


def test_neutral_penalties_change_no_bit(ops):
    logits = make_rows(2, 100, seed=7)
    history, zeros = torch.randint(0, 100, (2, 30), dtype=torch.int32), torch.zeros(2)
    counts = torch.tensor([10, 0]).int(), torch.tensor([30, 30]).int()
    assert torch.equal(ops.apply_penalties(logits, history, *counts, zeros, zeros, zeros + 1), logits)


def test_penalties_refuse_a_token_outside_the_vocabulary(ops):
    zeros, counts = torch.zeros(1), torch.ones(1).int()
    with pytest.raises(RuntimeError, match="token 100 is outside the vocabulary of 100"):
        ops.apply_penalties(make_rows(1, 100, 8), torch.full((1, 4), 100).int(), counts, counts, zeros, zeros, zeros + 1)


@pytest.mark.parametrize("vocab", [1, 32, 33, 1000])
def test_masks_equal_the_references(ops, vocab):
    logits = make_rows(3, vocab, seed=9)
    mask = torch.randint(-(2**31), 2**31 - 1, (3, -(-vocab // 32)), dtype=torch.int32)
    assert torch.equal(ops.apply_mask(logits, mask), reference_logits.apply_mask(logits, mask))
