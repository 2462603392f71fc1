"""What the kit does not ask of attention: ALiBi, sinks, shared prefixes, how work is cut, the codes of 8-bit floats, offsets beyond 2^31."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from oarlock.backend_api.runtime import AttentionParams
from oarlock.conformance.references import ReferenceAttention
from oarlock_triton_kernels import attention_chunks
from oarlock_triton_kernels import cache as stored
from oarlock_triton_kernels.attention import TritonAttention
from oarlock_triton_kernels.attention_chunks import attend_chunks, num_parts
from oarlock_triton_kernels.attention_decode import LEAST_TILES, PREFIX_KEYS, attend_decodes, num_programs, plan_decodes
from oarlock_triton_kernels.chip import chip

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 16


@dataclass
class Rows:
    """Contexts in a paged cache, and the dense keys and values that they stand for."""

    cache: tuple[torch.Tensor, torch.Tensor]
    tables: torch.Tensor
    lens: torch.Tensor
    keys: list[torch.Tensor]  # [length, KV_HEADS, DIM] of each row
    values: list[torch.Tensor]


def rows(lens: list[int], shared: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Rows:
    """Rows of these lengths; the first `shared` blocks are the same ones. A length of 0 is a padded row, whose table holds garbage."""
    random = torch.Generator().manual_seed(seed)
    counts = [max(math.ceil(n / BLOCK) - shared, 0) for n in lens]
    blocks = 1 + shared + sum(counts)
    pool = [torch.randn(blocks, KV_HEADS, BLOCK, DIM, generator=random).to(dtype) for _ in range(2)]
    for tensor in pool:
        tensor[0] = math.nan
    free = iter((torch.randperm(blocks - 1, generator=random) + 1).tolist())
    common = [next(free) for _ in range(shared)]
    tables = torch.zeros(len(lens), max(3, *(math.ceil(n / BLOCK) for n in lens)) + 1, dtype=torch.int32)
    dense: list[list[torch.Tensor]] = [[], []]
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        own = [*common, *(next(free) for _ in range(count))] if length else [blocks - 1] * 3
        tables[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        for kept, tensor in zip(dense, pool, strict=True):
            kept.append(tensor[own].transpose(1, 2).reshape(-1, KV_HEADS, DIM)[:length])
    return Rows((pool[0], pool[1]), tables, torch.tensor(lens, dtype=torch.int32), *dense)


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window=None, softcap=None, slopes=None, sinks=None) -> torch.Tensor:
    """The last len(query) tokens over their context, in float64."""
    q, k, v = (x.double() for x in (query, keys, values))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(keys))
    mine = at[len(keys) - len(query) :, None]
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * (at - mine)
    hidden = at > mine
    if window is not None:
        hidden = hidden | (at <= mine - window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), -1)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def check(got: torch.Tensor, want: torch.Tensor, limit: float = 1e-9) -> None:
    assert ((got.double() - want) ** 2).mean() <= limit * (want**2).mean()


FEATURES = {
    "alibi": {"slopes": -(2.0 ** -torch.arange(1, HEADS + 1).float())},
    "sinks": {"sinks": torch.linspace(-2, 6, HEADS)},
    "all": {"slopes": torch.linspace(-0.2, 0.1, HEADS), "sinks": torch.linspace(-3, 3, HEADS), "softcap": 5.0, "window": 40},
}


@pytest.mark.parametrize("name", FEATURES)
def test_alibi_and_sinks_of_decodes(name):
    given, features = rows([300, 5, 0, 64]), FEATURES[name]
    query = torch.randn(4, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    plan = plan_decodes(given.tables, given.lens, BLOCK, DIM, torch.float32, features.get("window"))
    out = attend_decodes(query, given.cache, plan, 0.2, **features)
    for row in (0, 1, 3):
        check(out[row], dense(query[row : row + 1], given.keys[row], given.values[row], 0.2, **features)[0])
    assert not out[2].any()


@pytest.mark.parametrize("name", FEATURES)
def test_alibi_and_sinks_of_chunks(name):
    given, features, new = rows([100, 5, 37]), FEATURES[name], [23, 5, 1]
    start = torch.tensor([0, 23, 28, 29], dtype=torch.int32)
    query = torch.randn(31, HEADS, DIM, generator=torch.Generator().manual_seed(1))  # two tokens are padding
    out = attend_chunks(query, given.cache, given.tables, given.lens, start, max(new), 0.2, **features)
    for row, (at, count) in enumerate(zip(start.tolist(), new, strict=False)):
        check(out[at : at + count], dense(query[at : at + count], given.keys[row], given.values[row], 0.2, **features))
    assert not out[29:].any()


@pytest.mark.parametrize("features", [{}, {**FEATURES["all"], "window": 600}, {"window": 530, "sinks": FEATURES["all"]["sinks"]}], ids=["plain", "all", "window"])
def test_few_new_tokens_over_a_long_context_are_cut_into_parts(features, launched):
    given, new = rows([1400, 700, 3], seed=5), [5, 9, 3]
    start = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    query = torch.randn(18, HEADS, DIM, generator=torch.Generator().manual_seed(1))  # one token is padding
    assert num_parts(4 * KV_HEADS, given.tables.shape[1] * BLOCK) == 1, "more programs would do"
    chips = replace(chip(), units=100)
    with mock.patch.object(attention_chunks, "chip", lambda: chips):
        assert num_parts(4 * KV_HEADS, given.tables.shape[1] * BLOCK) > 4
        out = attend_chunks(query, given.cache, given.tables, given.lens, start, max(new), 0.2, **features)
    for row, (at, count) in enumerate(zip(start.tolist(), new, strict=False)):
        check(out[at : at + count], dense(query[at : at + count], given.keys[row], given.values[row], 0.2, **features))
    assert not out[17:].any() and "attend_join_kernel" in launched


def test_core_gives_the_slopes_by_its_parameters():
    given, query = rows([100, 5]), torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    params = AttentionParams(HEADS, KV_HEADS, DIM, 0.2, alibi_slopes=FEATURES["alibi"]["slopes"])
    start = torch.tensor([0, 1, 2], dtype=torch.int32)
    results = []
    for kind, cache in ((TritonAttention, given.cache), (ReferenceAttention, tuple(t.transpose(1, 2).contiguous() for t in given.cache))):
        attention = kind(BLOCK, torch.float32, params)
        results += [attention.attend(query, cache, attention.metadata(given.tables, given.lens, start, max_q, 2), params) for max_q in (1, 2)]
    want = torch.stack([dense(query[n : n + 1], given.keys[n], given.values[n], 0.2, slopes=params.alibi_slopes)[0] for n in range(2)])
    for result in results:
        check(result, want)


# ---------------------------------------------------------------- shared prefixes
LONG = PREFIX_KEYS // BLOCK


@pytest.mark.parametrize(
    ("lens", "shared", "found"),
    [
        ([LONG * BLOCK + n for n in (1, 40, 16, 9, 100, 3, 7, 5)], LONG, LONG),
        ([LONG * BLOCK + n for n in (1, 40, 16, 9, 100, 3, 7)] + [0], LONG, LONG),  # a padded row shares nothing and asks for nothing
        ([LONG * BLOCK + 40] * 7 + [LONG * BLOCK], LONG, 0),  # the last row's newest key lies in the last shared block, so less than the least is shared
        ([LONG * BLOCK + 40] * 8, 0, 0),
        ([LONG * BLOCK + 40] * 8, LONG - 1, 0),
        ([LONG * BLOCK + 40] + [0] * 7, LONG, 0),  # alone
        ([0] * 8, 0, 0),
    ],
)
def test_a_prefix_that_rows_share_is_found(lens, shared, found):
    given = rows(lens, shared)
    plan = plan_decodes(given.tables, given.lens, BLOCK, DIM, torch.float32, None)
    assert plan.numbers[-1] == found * BLOCK
    tiles = [math.ceil((n - min(n, found * BLOCK)) / plan.keys) for n in lens]
    assert plan.numbers[:-1].tolist() == [sum(tiles[:at]) for at in range(9)]


@pytest.mark.parametrize("features", [{}, {"slopes": FEATURES["alibi"]["slopes"], "sinks": FEATURES["sinks"]["sinks"], "softcap": 8.0}], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_shared_prefix_changes_no_result(dtype, features, launched):
    given = rows([LONG * BLOCK + n for n in (1, 40, 16, 9, 300, 3, 7)] + [0], LONG, dtype)
    query = torch.randn(8, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    plan = plan_decodes(given.tables, given.lens, BLOCK, DIM, dtype, None)
    assert plan.numbers[-1] > 0
    out = attend_decodes(query, given.cache, plan, 0.2, **features)
    for row in range(7):
        check(out[row], dense(query[row : row + 1], given.keys[row], given.values[row], 0.2, **features)[0], 1e-9 if dtype == torch.float32 else 1e-4)
    assert not out[7].any() and "attend_prefix_kernel" in launched


def test_the_keys_of_a_shared_prefix_are_read_once_for_many_rows():
    """By the table of the last row of each program alone: with the shared blocks gone from the others' tables, all is as before."""
    given = rows([LONG * BLOCK + n for n in (1, 40, 16, 9, 100, 3, 7, 5)], LONG)
    query = torch.randn(8, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    plan = plan_decodes(given.tables, given.lens, BLOCK, DIM, torch.float32, None)
    before = attend_decodes(query, given.cache, plan, 0.2)
    reading = torch.zeros_like(given.tables)
    reading[:, LONG:] = given.tables[:, LONG:]
    per_program = 16 // (HEADS // KV_HEADS)  # of a float32 tile of 16 lines
    last = [min(first + per_program, 8) - 1 for first in range(0, 8, per_program)]
    reading[last] = given.tables[last]
    assert (reading[:, 0] == 0).sum() == 8 - len(last) > 0
    assert torch.equal(attend_decodes(query, given.cache, plan._replace(block_tables=reading), 0.2), before)


# ---------------------------------------------------------------- how work is cut
def test_programs_have_equal_work_whatever_the_lengths_are():
    given = rows([1000, 1, 64, 65, 0, 700])
    plan = plan_decodes(given.tables, given.lens, BLOCK, DIM, torch.float32, None)
    tiles = int(plan.numbers[-2])
    assert tiles == sum(math.ceil(n / plan.keys) for n in given.lens.tolist())
    programs = num_programs(KV_HEADS, 6 * given.tables.shape[1] * BLOCK // plan.keys)
    each = max(math.ceil(tiles / programs), LEAST_TILES)
    assert each * programs >= tiles and each * (programs - 1) < tiles + each
    query = torch.randn(6, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    out = attend_decodes(query, given.cache, plan, 0.2)
    for row in (0, 1, 2, 3, 5):
        check(out[row], dense(query[row : row + 1], given.keys[row], given.values[row], 0.2)[0])


# ---------------------------------------------------------------- the cache
@triton.jit
def convert_kernel(wide_ptr, code_ptr, back_ptr, n, KIND: tl.constexpr, READ: tl.constexpr, SIZE: tl.constexpr):
    """Grid (1,): float32 to codes, codes to float32."""
    at = tl.arange(0, SIZE)
    tl.store(code_ptr + at, stored.narrowed(tl.load(wide_ptr + at, mask=at < n), KIND, tl.uint8), mask=at < n)
    tl.store(back_ptr + at, stored.widened(tl.load(code_ptr + at, mask=at < n, other=0), READ, tl.float32), mask=at < n)


@pytest.mark.parametrize(
    ("dtype", "kind", "read"),
    [(torch.float8_e4m3fn, stored.E4M3, stored.E4M3), (torch.float8_e4m3fn, stored.E4M3_BY_BITS, stored.E4M3_BY_BITS), (torch.float8_e5m2, stored.E5M2, stored.E5M2)],
    ids=["e4m3", "e4m3 by bits", "e5m2"],
)
def test_8_bit_floats_are_rounded_and_read_as_torch_does(dtype, kind, read):
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = every[every.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2  # ties
    near = torch.cat((between * (1 + 1e-6), between * (1 - 1e-6)))
    top = torch.finfo(dtype).max
    given = torch.cat((finite, between, near, torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, top * 1.03, -top * 2, 1e-30])))
    want = given.clamp(-top, top).to(dtype)
    size = triton.next_power_of_2(len(given))
    code, back = torch.empty(len(given), dtype=torch.uint8), torch.empty(len(given))
    convert_kernel[(1,)](given, code, back, len(given), KIND=kind, READ=read, SIZE=size)
    is_nan = given.isnan()
    assert torch.equal(code[~is_nan], want.view(torch.uint8)[~is_nan])
    assert torch.equal(back[~is_nan], want.float()[~is_nan]) and back[is_nan].isnan().all()


def test_a_cache_of_more_than_2_to_the_31_values():
    """Memory that is not touched is not there, so this takes little."""
    blocks = 2**31 // (KV_HEADS * BLOCK * DIM) + 8
    cache = tuple(torch.empty(blocks, KV_HEADS, BLOCK, DIM, dtype=torch.float8_e5m2) for _ in range(2))
    table = torch.tensor([[blocks - 3, 1, blocks - 1]], dtype=torch.int32)
    random = torch.Generator().manual_seed(3)
    key, value, query = (torch.randn(40, heads, DIM, generator=random) for heads in (KV_HEADS, KV_HEADS, HEADS))
    slots = (table[0].repeat_interleave(BLOCK) * BLOCK + torch.arange(BLOCK).repeat(3))[:40]
    stored.write_kv(cache, key, value, slots.to(torch.int32))
    want = dense(query[-1:], *(x.to(torch.float8_e5m2).float() for x in (key, value)), 0.2)
    lens = torch.tensor([40], dtype=torch.int32)
    check(attend_decodes(query[-1:], cache, plan_decodes(table, lens, BLOCK, DIM, cache[0].dtype, None), 0.2), want)
    start = torch.tensor([0, 1], dtype=torch.int32)
    check(attend_chunks(query[-1:], cache, table, lens, start, 2, 0.2), want)
