"""What the kit does not ask of sampling: the set of kept tokens itself, and the noise."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from oarlock_triton_kernels import sampling

FILTERS = (  # temperature, top_p, top_k, min_p
    (1.0, 0.9, 0, 0.0),
    (0.7, 1.0, 20, 0.0),
    (1.3, 0.8, 50, 0.0),
    (0.9, 0.95, 0, 0.05),
    (1.0, 1.0, 0, 0.1),
    (0.5, 0.0, 0, 0.0),  # the best alone
    (1.6, 0.999, 1000, 0.001),
)


def kept_by_sorting(logits: torch.Tensor, filters: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[rows, vocab] bool, as core's reference decides it."""
    temperature, top_p, top_k, min_p = (column[:, None] for column in filters)
    scaled, ids = torch.sort(logits * (1 / temperature), dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1])
    keep = (scaled - scaled[:, :1]).exp() >= min_p
    keep &= rank < torch.where(top_k > 0, top_k, logits.shape[1])
    left = torch.where(keep, scaled, -torch.inf).softmax(-1)
    keep &= (left.cumsum(-1) - left < top_p) | (top_p >= 1)
    keep = (keep & (scaled > -torch.inf)) | (rank == 0)
    return torch.zeros_like(keep).scatter(1, ids, keep)


def kept_by_kernels(logits: torch.Tensor, filters: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The same, from where `cut_kernel` says that the kept tokens end."""
    best, end, last = sampling.cut(logits, *filters)
    scaled = logits * (1 / filters[0])[:, None]
    kept = (scaled > end[:, None]) | ((scaled == end[:, None]) & (torch.arange(logits.shape[1]) <= last[:, None]))
    return kept & ((scaled - best[:, None]).exp() >= filters[3][:, None]) & (scaled > -torch.inf)


@pytest.mark.parametrize("shape", ["ties", "banned", *(pytest.param(shape, marks=pytest.mark.full) for shape in ("smooth", "flat"))])
def test_what_is_kept_is_what_sorting_keeps(shape):
    generator = torch.Generator().manual_seed(7)
    rows, vocab = len(FILTERS), 4500  # two chunks
    logits = torch.randn((rows, vocab), generator=generator) * (0.01 if shape == "flat" else 3)
    if shape == "ties":
        logits = (logits * 2).round() / 2
    if shape == "banned":
        logits = torch.where(torch.rand((rows, vocab), generator=generator) < 0.99, -torch.inf, logits)
    temperature, top_p, top_k, min_p = (torch.tensor(column) for column in zip(*FILTERS, strict=True))
    filters = (temperature, top_p, top_k.to(torch.int32), min_p)
    want, got = kept_by_sorting(logits, filters), kept_by_kernels(logits, filters)
    assert got.sum(1).tolist() == want.sum(1).tolist()
    assert torch.equal(got, want)


@triton.jit
def noise_kernel(out_ptr, seed_ptr, choice_ptr, position_ptr, N: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, N)
    key = [tl.load(pointer + row).to(tl.uint32, bitcast=True) for pointer in (seed_ptr, choice_ptr, position_ptr)]
    tl.store(out_ptr + row * N + token, sampling._gumbel(key[0], key[1], key[2], token.to(tl.uint32)))


def test_noise_is_that_of_the_definition_to_the_last_bits_of_a_logarithm():
    from oarlock.backend_api.runtime import registry

    generator, count = torch.Generator().manual_seed(3), 4096
    seed, choice, position = (torch.randint(-(2**31), 2**31 - 1, (3,), generator=generator).int() for _ in range(3))
    noise = torch.empty(3, count)
    noise_kernel[(3,)](noise, seed, choice, position, N=count)
    # The reference draws from equal logits by its noise alone: its choice among the first n tokens is where the noise is largest.
    for n in (1, 2, 17, count):
        ones = torch.ones(3)
        drawn = registry()["sample"].reference(torch.zeros(3, n), ones, ones, torch.zeros(3).int(), torch.zeros(3), seed, choice, position)
        assert torch.equal(drawn, noise[:, :n].argmax(1).int())
    assert -3 < noise.min() and 6 < noise.max() < 40 and abs(noise.mean() - 0.5772) < 0.05
