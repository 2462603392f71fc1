"""The random numbers: known answers, uniformity, and noise that belongs to the token alone."""

import numpy as np
import pytest
import torch
from oarlock.runtime.reference.sampling import GREEDY_BELOW, greedy, gumbel_noise, sample, threefry, uniform
from scipy import stats


def words(*values: int) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array([v], dtype=np.uint32).view(np.int32)) for v in values]


# Published with the Random123 library for Threefry-2x32 with 20 rounds: key, counter, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "want"), KNOWN)
def test_threefry_gives_the_published_words(key, counter, want):
    got = threefry(*words(*key), *words(*counter))
    assert [int(w) & 0xFFFFFFFF for w in got] == list(want)


def test_uniform_covers_its_interval_and_never_touches_zero():
    least, most = uniform(*words(0, 0)), uniform(*words(0xFFFFFFFF, 0xFFFFFFFF))
    assert float(least) == 2.0**-47 and float(most) == 1.0
    draws = uniform(*threefry(*words(7, 0), torch.zeros(1, dtype=torch.int32), torch.arange(200_000, dtype=torch.int32)))
    assert stats.kstest(draws.double().numpy(), "uniform").pvalue > 0.001


def test_noise_is_gumbel_and_uncorrelated_between_neighbours():
    zero = torch.zeros(1, dtype=torch.int32)
    noise = gumbel_noise(zero + 1, zero, zero, torch.arange(100_000, dtype=torch.int32)[None])[0].double().numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 0.001
    for change in ("seed", "choice", "position"):
        other = {"seed": zero + 1, "choice": zero, "position": zero}
        other[change] = other[change] + 1
        neighbour = gumbel_noise(**other, token_ids=torch.arange(100_000, dtype=torch.int32)[None])[0].double().numpy()
        assert abs(np.corrcoef(noise, neighbour)[0, 1]) < 4 / np.sqrt(100_000), change
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 4 / np.sqrt(100_000)


def draw_inputs(rows: int, vocab: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def column(low: float, high: float) -> torch.Tensor:
        return torch.rand(rows, generator=g) * (high - low) + low

    whole = [torch.randint(0, high, (rows,), generator=g, dtype=torch.int32) for high in (2**31 - 1, 8, 4096)]
    top_k = torch.randint(0, vocab, (rows,), generator=g, dtype=torch.int32)
    return [torch.randn(rows, vocab, generator=g) * 3, column(0.2, 2.0), column(0.3, 1.2), top_k, column(0.0, 0.2).clamp(min=0.05) - 0.05, *whole]


@pytest.mark.parametrize("vocab", [3, 257, 1000])
def test_a_row_does_not_depend_on_its_batch_or_its_place(vocab):
    inputs = draw_inputs(40, vocab)
    together = sample(*inputs)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(*(t[order] for t in inputs)), together[order])
    for row in range(40):
        assert torch.equal(sample(*(t[row : row + 1] for t in inputs)), together[row : row + 1]), row
    assert torch.equal(sample(*(torch.cat((t, t[:7])) for t in inputs)), torch.cat((together, together[:7])))


def test_noise_bits_do_not_depend_on_batch_or_order_of_tokens():
    seed, choice, position = (torch.arange(n, n + 5, dtype=torch.int32) for n in (3, 0, 100))
    ids = torch.arange(777, dtype=torch.int32).expand(5, -1)
    bits = threefry(seed[:, None], choice[:, None], position[:, None], ids)
    shuffled = torch.randperm(777, generator=torch.Generator().manual_seed(0))
    for word, other in zip(bits, threefry(seed[2:3, None], choice[2:3, None], position[2:3, None], ids[2:3][:, shuffled]), strict=True):
        assert torch.equal(word[2:3][:, shuffled], other)


def test_seed_choice_and_position_each_change_the_draws():
    rows, zero = 64, torch.zeros(64, dtype=torch.int32)
    flat, one = torch.zeros(rows, 1000), torch.ones(rows)
    base = sample(flat, one, one, zero, zero.float(), zero + 5, zero, torch.arange(rows, dtype=torch.int32))
    for seed, choice, position in ((6, 0, 0), (5, 1, 0), (5, 0, 1000)):
        other = sample(flat, one, one, zero, zero.float(), zero + seed, zero + choice, torch.arange(rows, dtype=torch.int32) + position)
        assert (other == base).sum() <= 2


def test_neutral_values_bypass_bit_for_bit():
    logits, temperature, _, _, _, *key = draw_inputs(64, 300)
    zero, one = torch.zeros(64), torch.ones(64)
    plain = sample(logits, temperature, one, zero.int(), zero, *key)
    noise = gumbel_noise(*key, torch.arange(300, dtype=torch.int32).expand(64, -1))
    assert torch.equal(plain, (logits / temperature[:, None] + noise).argmax(-1).int())
    for top_p, top_k, min_p in ((1.5, 0, 0.0), (1.0, 300, 0.0), (1.0, 10_000, 0.0), (1.0, 299 + 1, 0.0)):
        assert torch.equal(sample(logits, temperature, one * top_p, zero.int() + top_k, zero + min_p, *key), plain)


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -0.0, 0.0]])
    assert greedy(logits).tolist() == [1, 0, 2]
    zero = torch.zeros(3)
    for temperature in (0.0, GREEDY_BELOW / 2):
        assert sample(logits, zero + temperature, zero + 1, zero.int(), zero, zero.int(), zero.int(), zero.int()).tolist() == [1, 0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_maximum_is_reported_and_harms_no_other(temperature):
    inputs = draw_inputs(5, 50)
    inputs[1] = torch.full((5,), temperature)
    want, want_greedy = sample(*inputs), greedy(inputs[0])
    inputs[0][0, 7], inputs[0][2, 3] = float("nan"), float("inf")
    inputs[0][4] = -float("inf")
    for got, expected in ((sample(*inputs), want), (greedy(inputs[0]), want_greedy)):
        assert got.tolist() == [-1, int(expected[1]), -1, int(expected[3]), -1]


def test_banned_tokens_are_never_drawn():
    rows = 2000
    logits = torch.zeros(rows, 6)
    logits[:, [0, 2, 5]] = -float("inf")
    zero = torch.zeros(rows)
    got = sample(logits, zero + 50.0, zero + 1, zero.int(), zero, zero.int(), zero.int(), torch.arange(rows, dtype=torch.int32))
    assert set(got.tolist()) == {1, 3, 4}


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(1e-6, 0, 0.0), (1.0, 1, 0.0), (1.0, 0, 1.0)])
def test_the_tightest_limits_leave_the_best_token(top_p, top_k, min_p):
    logits, temperature, *_, seed, choice, position = draw_inputs(50, 100)
    full = torch.ones(50)
    assert torch.equal(sample(logits, temperature, full * top_p, full.int() * top_k, full * min_p, seed, choice, position), greedy(logits))
