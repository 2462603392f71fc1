"""What is drawn follows the exact probabilities: chi-squared for each sampling parameter and each penalty, seeds fixed."""

import numpy as np
import pytest
import torch
from oarlock.runtime.reference.logits import apply_bias, apply_mask, apply_penalties
from oarlock.runtime.reference.sampling import sample
from scipy import stats

DRAWS, PIECE = 60_000, 20_000
LOGITS = np.array([2.0, 1.5, 1.5, 0.3, -0.2, 1.1, -1.0, 0.0, 0.9, -2.5, 0.9, 0.4])
LIMIT = 1e-3  # of the p-value; a wrong sampler gives less than 1e-12 (see the last test)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def exact(logits: np.ndarray, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    """The definition: temperature, min_p against the best, top_k, then top_p over what is left."""
    p = softmax(logits / temperature)
    order = sorted(range(len(p)), key=lambda v: (-logits[v], v))
    order = [v for v in order if p[v] >= min_p * p.max()]
    order = order[: top_k or None]
    left, kept, mass = sum(p[v] for v in order), [], 0.0
    for v in order:
        if kept and mass >= top_p * left:
            break
        kept.append(v)
        mass += p[v]
    result = np.zeros_like(p)
    result[kept] = p[kept] / mass
    return result


def draw(logits: torch.Tensor, seed: int, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, first_position: int = 0) -> np.ndarray:
    """Token counts of DRAWS draws from one row's logits; each draw has a position of its own."""
    counts = np.zeros(logits.shape[-1], dtype=np.int64)
    for start in range(0, DRAWS, PIECE):
        rows = torch.zeros(PIECE)
        ids = sample(
            logits.expand(PIECE, -1),
            rows + temperature,
            rows + top_p,
            rows.int() + top_k,
            rows + min_p,
            rows.int() + seed,
            rows.int(),
            torch.arange(start, start + PIECE, dtype=torch.int32) + first_position,
        )
        counts += np.bincount(ids.numpy(), minlength=len(counts))
    return counts


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that has no probability"
    kept = probabilities > 0
    if kept.sum() == 1:
        return 1.0
    return float(stats.chisquare(counts[kept], probabilities[kept] * counts.sum()).pvalue)


CASES = [
    {},
    {"temperature": 0.4},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 2},  # cuts between two equal logits: the lower id stays
    {"top_k": 5},
    {"top_p": 0.35},
    {"top_p": 0.9},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"temperature": 0.7, "top_k": 7, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 4, "top_p": 0.6, "min_p": 0.02},
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "plain")
def test_draws_follow_the_exact_probabilities(case):
    logits = torch.tensor(LOGITS, dtype=torch.float32)
    # Cumulated probabilities must not meet top_p within rounding, or the exact answer would be a matter of rounding.
    assert p_value(draw(logits, seed=11, **case), exact(LOGITS, **case)) > LIMIT


def test_top_k_before_top_p_keeps_other_tokens_than_after():
    assert (exact(LOGITS, top_k=3, top_p=0.6) > 0).sum() == 2
    assert (exact(LOGITS, top_p=0.6) > 0).sum() == 4


PENALTIES = [
    {"presence": 1.2},
    {"presence": -1.5},
    {"frequency": 0.6},
    {"frequency": -0.3},
    {"repetition": 1.8},
    {"repetition": 0.6},
    {"presence": 0.5, "frequency": 0.4, "repetition": 1.3},
]
PROMPT, OUTPUT = [0, 3, 3, 9], [1, 1, 5, 0, 8, 1]


def penalised(presence: float = 0.0, frequency: float = 0.0, repetition: float = 1.0) -> np.ndarray:
    logits = LOGITS.copy()
    for token in set(PROMPT + OUTPUT):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(OUTPUT):
        logits[token] -= presence + frequency * OUTPUT.count(token)
    return logits


@pytest.mark.parametrize("case", PENALTIES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()))
def test_penalised_draws_follow_the_exact_probabilities_and_leave_the_neighbour_alone(case):
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(2, -1)
    history = torch.tensor([PROMPT + OUTPUT + [7, 7], [0] * 12], dtype=torch.int32)
    lengths = [torch.tensor(n, dtype=torch.int32) for n in ([len(PROMPT), 0], [len(PROMPT + OUTPUT), 12])]
    neutral = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0}
    knobs = [torch.tensor([case.get(name, value), value]) for name, value in neutral.items()]
    got = apply_penalties(logits, history, *lengths, *knobs)
    assert torch.equal(got[1], logits[1])
    assert p_value(draw(got[0], seed=23), exact(penalised(**case))) > LIMIT


def test_bias_and_mask_change_the_distribution_as_written():
    logits = torch.tensor(LOGITS, dtype=torch.float32)[None]
    biased = apply_bias(logits, torch.tensor([[4, 1, 0]], dtype=torch.int32), torch.tensor([[2.5, -float("inf"), 0.0]]))
    biased = apply_mask(biased, torch.tensor([[0b111111111110]], dtype=torch.int32))
    want = LOGITS.copy()
    want[4] += 2.5
    want[[0, 1]] = -np.inf
    assert p_value(draw(biased[0], seed=5), softmax(want)) > LIMIT


def test_a_large_vocabulary_is_drawn_evenly_over_its_parts():
    logits = np.random.default_rng(3).normal(size=6_000) * 2
    wanted = softmax(logits)
    parts = np.zeros(40)
    rows = torch.zeros(250)
    for start in range(0, 3000, 250):
        ids = sample(
            torch.tensor(logits, dtype=torch.float32).expand(250, -1),
            *(rows + 1, rows + 1, rows.int(), rows, rows.int() + 9, rows.int()),
            torch.arange(start, start + 250, dtype=torch.int32),
        )
        parts += np.bincount(ids.numpy() // 150, minlength=40)
    assert stats.chisquare(parts, wanted.reshape(40, 150).sum(1) * 3000).pvalue > LIMIT


def test_successive_positions_are_independent():
    rows, zero = 40_000, torch.zeros(40_000)
    logits = torch.tensor([0.5, 0.0, -0.5]).expand(rows, -1)
    ids = sample(logits, zero + 1, zero + 1, zero.int(), zero, zero.int() + 3, zero.int(), torch.arange(rows, dtype=torch.int32)).numpy()
    pairs = np.bincount(ids[:-1] * 3 + ids[1:], minlength=9).reshape(3, 3)
    assert stats.chi2_contingency(pairs).pvalue > LIMIT


def test_the_chi_squared_test_sees_a_small_error():
    counts = draw(torch.tensor(LOGITS, dtype=torch.float32), seed=11, temperature=1.05)
    assert p_value(counts, exact(LOGITS)) < 1e-9
    counts = draw(torch.tensor(LOGITS, dtype=torch.float32), seed=11)
    assert p_value(counts, exact(penalised(presence=0.1))) < 1e-9
