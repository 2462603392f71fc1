"""CpuAttention against core's reference: every block size, head size, window and cap; NaN everywhere but in the context; the same bits
whatever the batch, the chunks and the threads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from oarlock.backend_api.runtime import AttentionParams
from oarlock.conformance.references import ReferenceAttention

pytestmark = pytest.mark.kernels
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Scene:
    """Rows with contexts in scattered blocks, written into both caches, whose every other slot holds NaN."""

    attention: object
    cache: tuple[torch.Tensor, ...]
    reference: ReferenceAttention
    reference_cache: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    lens: list[int]
    params: AttentionParams

    def queries(self, counts: list[int], dtype: torch.dtype) -> torch.Tensor:
        shape = (sum(counts), self.params.num_heads, self.params.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)

    def run(self, query: torch.Tensor, counts: list[int], rows: list[int] | None = None, lens: list[int] | None = None) -> torch.Tensor:
        return self._run(self.attention, self.cache, query, counts, rows, lens)

    def want(self, query: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return self._run(self.reference, tuple(t.double() for t in self.reference_cache), query.double(), counts, None, None)

    def _run(self, attention, cache, query, counts, rows, lens):
        chosen = list(range(len(self.lens))) if rows is None else rows
        seq_lens = torch.tensor([self.lens[r] for r in chosen] if lens is None else lens, dtype=torch.int32)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
        meta = attention.metadata(self.tables[chosen].contiguous(), seq_lens, starts, max(counts), sum(counts))
        return attention.attend(query, cache, meta, self.params)


def make_scene(dtype, lens, block_size=16, heads=6, kv_heads=2, head_dim=64, window=None, softcap=None, kept=None) -> Scene:
    """`dtype` of queries, keys and values; `kept`: of the cache, else the same."""
    from oarlock_cpu.attention import CpuAttention

    kept = kept or dtype
    params = AttentionParams(heads, kv_heads, head_dim, head_dim**-0.5, window, softcap)
    attention, reference = CpuAttention(block_size, kept, params), ReferenceAttention(block_size, kept, params)
    generator = torch.Generator().manual_seed(3)
    blocks = [-(-n // block_size) for n in lens]
    order = torch.randperm(sum(blocks), generator=generator).int() + 1
    caches = [tuple(torch.full(s, float("nan")).to(kept) for s in a.kv_layout(sum(blocks) + 1)) for a in (attention, reference)]
    tables, at = torch.zeros(len(lens), max(blocks) + 1, dtype=torch.int32), 0
    for row, (length, count) in enumerate(zip(lens, blocks, strict=True)):
        tables[row, :count] = order[at : at + count]
        at += count
        positions = torch.arange(length)
        slots = (tables[row][positions // block_size] * block_size + positions % block_size).int()
        key, value = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        if window is not None:  # keys that no query of these tests may see are given back: NaN again
            key[: max(0, length - 24 - window)] = float("nan")
            value[: max(0, length - 24 - window)] = float("nan")
        attention.write_kv(caches[0], key, value, slots)
        reference.write_kv(caches[1], key, value, slots)
    return Scene(attention, caches[0], reference, caches[1], tables, lens, params)


def assert_near(got, want, dtype):
    assert bool(got.isfinite().all())
    error = float((got.double() - want).square().mean() / want.square().mean())
    assert error < (1e-5 if dtype == torch.bfloat16 else 1e-11), error


LENS, COUNTS = [1, 17, 40, 255, 257, 513], [1, 17, 3, 24, 1, 9]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (300, 30.0), (None, 5.0), (1, None)])
def test_mixed_rows(isa, dtype, block_size, window, softcap):
    scene = make_scene(dtype, LENS, block_size, window=window, softcap=softcap)
    query = scene.queries(COUNTS, dtype)
    assert_near(scene.run(query, COUNTS), scene.want(query, COUNTS), dtype)


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("kept", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize(("heads", "head_dim", "window"), [(6, 64, None), (2, 33, 300), (14, 80, 20)])
def test_caches_of_8_bit_floats(isa, dtype, kept, block_size, heads, head_dim, window):
    scene = make_scene(dtype, LENS, block_size, heads=heads, head_dim=head_dim, window=window, kept=kept)
    query = scene.queries(COUNTS, dtype)
    whole = scene.run(query, COUNTS)
    assert_near(whole, scene.want(query, COUNTS), dtype)
    assert torch.equal(scene.run(query[-1:], [1], rows=[5])[0], whole[-1])


@pytest.mark.parametrize("kept", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bit_floats_are_torchs(isa, dtype, kept):
    """Written as torch rounds, too large ones as the largest; read as torch reads: every code, and numbers between."""
    from oarlock_cpu.attention import CpuAttention

    every = torch.arange(256, dtype=torch.uint8).view(kept).float()
    every = every[every.isfinite()]
    x = torch.cat((every, every * 1.03, every * 1.0625, every * 0.97, every * 9, torch.tensor([float("nan"), float("inf"), -float("inf")]))).to(dtype)
    attention = CpuAttention(16, kept, AttentionParams(1, 1, 16, 1.0))
    blocks = -(-len(x) // 16)
    cache = tuple(torch.zeros(shape).to(kept) for shape in attention.kv_layout(blocks))
    value = x[:, None, None].expand(-1, 1, 16)
    attention.write_kv(cache, value, value, torch.arange(len(x)).int())
    top = torch.finfo(kept).max
    want = x.float().clamp(-top, top).to(kept).float()
    held = cache[1].permute(0, 2, 4, 1, 3).reshape(-1, 16)[: len(x), 0].float()
    assert torch.equal(held.nan_to_num(7), want.nan_to_num(7)) and torch.equal(held.isnan(), want.isnan())
    # A query that sees one token alone reads its value.
    for at in range(0, len(x), 16):
        table, one = torch.tensor([[at // 16]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        meta = attention.metadata(table, one, torch.tensor([0, 1], dtype=torch.int32), 1, 1)
        got = attention.attend(torch.zeros(1, 1, 16, dtype=dtype), cache, meta, attention.params)
        assert torch.equal(got.float().nan_to_num(7), want[at].to(dtype).float().nan_to_num(7).expand(1, 1, 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 8), (9, 3, 64), (4, 4, 80), (7, 1, 96), (71, 1, 64), (8, 2, 128), (4, 1, 256), (3, 3, 33), (13, 1, 112), (2, 1, 512)]
)
def test_heads(isa, dtype, heads, kv_heads, head_dim):
    scene = make_scene(dtype, [5, 130], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    for counts in ([1, 1], [5, 20]):
        query = scene.queries(counts, dtype)
        assert_near(scene.run(query, counts), scene.want(query, counts), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 37])
def test_bits_depend_on_neither_batch_nor_chunks_nor_threads(isa, dtype, window):
    """The last query of every row, computed as part of a chunk, alone, with others, and by one thread or two."""
    lens, counts, before = [40, 300, 700], [24, 24, 24], torch.get_num_threads()
    scene = make_scene(dtype, lens, window=window)
    query = scene.queries(counts, dtype)
    whole = scene.run(query, counts)
    last = query[[23, 47, 71]]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(scene.run(query, counts), whole)
            assert torch.equal(scene.run(last, [1, 1, 1]), whole[[23, 47, 71]])
            for row in range(3):
                assert torch.equal(scene.run(last[row : row + 1], [1], rows=[row])[0], whole[24 * row + 23])
                part = scene.run(query[24 * row : 24 * row + 10], [10], rows=[row], lens=[lens[row] - 14])
                assert torch.equal(part, whole[24 * row : 24 * row + 10])
    finally:
        torch.set_num_threads(before)


def test_padded_rows_and_tokens_are_zero():
    scene = make_scene(torch.float32, [20, 30])
    query = torch.full((4, 6, 64), float("nan"))
    query[:2] = scene.queries([1, 1], torch.float32)
    decode = scene.attention.metadata(torch.zeros(4, 3, dtype=torch.int32), torch.tensor([20, 0, 30, 0]).int(), torch.arange(5).int(), 1, 4)
    decode = decode._replace(block_tables=scene.tables[[0, 0, 1, 1]].contiguous())
    out = scene.attention.attend(query[[0, 2, 1, 3]], scene.cache, decode, scene.params)
    assert torch.equal(out[[0, 2]], scene.run(query[:2], [1, 1])) and not out[[1, 3]].any()
    chunk = scene.attention.metadata(scene.tables[:1].contiguous(), torch.tensor([20]).int(), torch.tensor([0, 2]).int(), 4, 4)
    assert not scene.attention.attend(query, scene.cache, chunk, scene.params)[2:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_that_are_not_addressed_stay_as_they_were(dtype):
    scene = make_scene(dtype, [64], head_dim=40)
    before = [t.clone() for t in scene.cache]
    new = torch.randn(3, 2, 40).to(dtype)
    slots = torch.tensor([int(scene.tables[0, 1]) * 16 + 3, 0, 0], dtype=torch.int32)  # two padded tokens share the null block's slot
    scene.attention.write_kv(scene.cache, new, new, slots)
    for tensor, old in zip(scene.cache, before, strict=True):
        same = [torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(tensor, old, strict=True)]
        assert [i for i, ok in enumerate(same) if not ok] == sorted([0, int(scene.tables[0, 1])])


def test_keys_and_values_may_be_slices_of_a_wider_tensor():
    scene = make_scene(torch.bfloat16, [33])
    qkv = torch.randn(1, 10, 64).to(torch.bfloat16)
    slot = (scene.tables[0, 2] * 16).view(1)
    for attention, cache in ((scene.attention, scene.cache), (scene.reference, scene.reference_cache)):
        attention.write_kv(cache, qkv[:, 6:8], qkv[:, 8:], slot)
    query = qkv[:, :6]
    assert_near(scene.run(query, [1]), scene.want(query, [1]), torch.bfloat16)


@pytest.mark.parametrize("kept", [torch.float32, *EIGHT_BITS], ids=str)
def test_copied_blocks_serve_another_row(kept):
    scene = make_scene(torch.float32, [16, 16], kept=kept)
    scene.attention.copy_blocks(scene.cache, scene.tables[0, :1], scene.tables[1, :1])
    query = scene.queries([1], torch.float32)
    assert torch.equal(scene.run(query, [1], rows=[0]), scene.run(query, [1], rows=[1]))


def test_what_lies_outside_the_cache_is_refused():
    scene = make_scene(torch.float32, [20])
    key = torch.randn(1, 2, 64)
    with pytest.raises(RuntimeError, match="slot 48 is outside the cache of 48"):
        scene.attention.write_kv(scene.cache, key, key, torch.tensor([48], dtype=torch.int32))
    query = scene.queries([1], torch.float32)
    with pytest.raises(RuntimeError, match="reaches block 3 of a table of 3"):
        scene.run(query, [1], lens=[49])
    scene.tables[0, 0] = 9
    with pytest.raises(RuntimeError, match="has block 9 of 3"):
        scene.run(query, [1])
    with pytest.raises(RuntimeError, match="one dtype"):
        scene.attention.write_kv(scene.cache, key.bfloat16(), key.bfloat16(), torch.zeros(1, dtype=torch.int32))
