"""The kit must fail attention that is wrong in one of the usual ways."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conformance_subjects import CAPABILITIES, HostDevice, make_subject
from oarlock.backend_api import AttentionSpec
from oarlock.conformance import attention_level
from oarlock.conformance.cases import Result, run_case
from oarlock.runtime.reference import FunctionalReferenceAttention, ReferenceAttention

KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
CAPABILITIES_FP8 = dataclasses.replace(CAPABILITIES, kv_dtypes=KV_DTYPES)


def results_of(cls: type[ReferenceAttention], dtype: str = "float32") -> list[Result]:
    globals()["_under_test"] = cls
    spec = AttentionSpec(name="mine", factory=f"{__name__}:_under_test", priority=1, kv_dtypes=KV_DTYPES)
    subject = make_subject(HostDevice(0, {"capabilities": CAPABILITIES_FP8}), attention=[spec])
    cases = [case for case in attention_level.cases() if case.quick and case.dtype == dtype]
    found = [run_case(case, subject, None) for case in cases]
    assert subject.attention_served == {dtype: "mine"}
    return found


class NullBlockIsRead(ReferenceAttention):
    """Keys are masked by scores only; values of slots that hold no key are multiplied by zero."""

    def metadata(self, block_tables, seq_lens, query_start_loc, max_q, num_tokens):
        found = super().metadata(block_tables, seq_lens, query_start_loc, max_q, num_tokens)
        width, heads = block_tables.shape[1], self.params.num_kv_heads
        if self.params.window is not None:
            return found
        at = torch.arange(width * self.block_size, dtype=torch.int32)
        slots = block_tables[:, at // self.block_size] * self.block_size + at % self.block_size
        index = slots[:, None] * heads + torch.arange(heads, dtype=torch.int32)[:, None]
        return dataclasses.replace(found, index=index.reshape(-1))


class FutureIsSeen(ReferenceAttention):
    def metadata(self, block_tables, seq_lens, query_start_loc, max_q, num_tokens):
        found = super().metadata(block_tables, seq_lens, query_start_loc, max_q, num_tokens)
        return dataclasses.replace(found, bias=found.bias.amax(-2, keepdim=True).expand_as(found.bias))


class WindowIsOneWider(ReferenceAttention):
    def __init__(self, block_size, dtype, params):
        wider = params if params.window is None else dataclasses.replace(params, window=params.window + 1)
        super().__init__(block_size, dtype, wider)


class WindowIsIgnored(ReferenceAttention):
    def __init__(self, block_size, dtype, params):
        super().__init__(block_size, dtype, dataclasses.replace(params, window=None))


class SoftcapIsIgnored(ReferenceAttention):
    def attend(self, query, cache, metadata, params):
        return super().attend(query, cache, metadata, dataclasses.replace(params, softcap=None))


class ScaleIsTheHeads(ReferenceAttention):
    def attend(self, query, cache, metadata, params):
        return super().attend(query, cache, metadata, dataclasses.replace(params, scale=64**-0.5))


class HeadsAreInterleaved(ReferenceAttention):
    """Query head h reads KV head h % num_kv_heads."""

    def attend(self, query, cache, metadata, params):
        group = params.num_heads // params.num_kv_heads
        order = torch.arange(params.num_heads).view(group, params.num_kv_heads).T.reshape(-1)
        return super().attend(query[:, order], cache, metadata, params)[:, order.argsort()]


class WritesOneSlotMore(ReferenceAttention):
    def write_kv(self, cache, key, value, slots):
        cache = super().write_kv(cache, key, value, slots)
        more = (slots.amax() + self.block_size).clamp(max=cache[0].shape[0] * self.block_size - 1)
        return super().write_kv(cache, key[:1], value[:1], more[None])


class WritesValuesRounded(ReferenceAttention):
    def write_kv(self, cache, key, value, slots):
        return super().write_kv(cache, key, value.to(torch.float8_e4m3fn).to(value.dtype), slots)


class CopiesBackwards(ReferenceAttention):
    def copy_blocks(self, cache, source, destination):
        return super().copy_blocks(cache, destination, source)


class PaddedRowsAreNaN(ReferenceAttention):
    def attend(self, query, cache, metadata, params):
        out = super().attend(query, cache, metadata, params)
        if metadata.back is not None:
            return out
        return torch.where(metadata.real, out, torch.nan)


class PaddedQueriesLeak(ReferenceAttention):
    """The chunk region takes its rows from the wrong offsets when the decode region before it is padded."""

    def metadata(self, block_tables, seq_lens, query_start_loc, max_q, num_tokens):
        if max_q > 1:
            seq_lens = torch.where(seq_lens > 0, seq_lens + (query_start_loc[1:] == query_start_loc[-1]).int(), 0)
        return super().metadata(block_tables, seq_lens, query_start_loc, max_q, num_tokens)


class LosesTheFirstBlock(ReferenceAttention):
    def metadata(self, block_tables, seq_lens, query_start_loc, max_q, num_tokens):
        found = super().metadata(block_tables, seq_lens, query_start_loc, max_q, num_tokens)
        hidden = torch.arange(found.bias.shape[-1]) < self.block_size
        many = (seq_lens > 2 * self.block_size)[:, None, None, None, None]
        return dataclasses.replace(found, bias=torch.where(hidden & many, -1e30, found.bias))


class ComputesInHalf(ReferenceAttention):
    def attend(self, query, cache, metadata, params):
        return super().attend(query.bfloat16(), tuple(t.bfloat16() for t in cache), metadata, params).to(query.dtype)


class MultipliesInTf32(ReferenceAttention):
    """Ten bits of the mantissa reach the products, as some matrix units have it unless told otherwise."""

    def attend(self, query, cache, metadata, params):
        if query.dtype != torch.float32 or cache[0].dtype != torch.float32:
            return super().attend(query, cache, metadata, params)
        short = [((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for t in (query.contiguous(), *cache)]
        return super().attend(short[0], tuple(short[1:]), metadata, params)


class CutsWhatItKeeps(ReferenceAttention):
    """Towards zero instead of to the nearest, in an 8-bit cache."""

    def write_kv(self, cache, key, value, slots):
        if cache[0].dtype.itemsize > 1:
            return super().write_kv(cache, key, value, slots)
        drop = 20 if cache[0].dtype == torch.float8_e4m3fn else 21
        cut = [((t.contiguous().view(torch.int32) >> drop) << drop).view(torch.float32) for t in (key.float(), value.float())]
        return super().write_kv(cache, *cut, slots)


class LetsAnEightBitCacheOverflow(ReferenceAttention):
    def write_kv(self, cache, key, value, slots):
        if cache[0].dtype.itemsize > 1:
            return super().write_kv(cache, key, value, slots)
        for tensor, new in zip(cache, (key, value), strict=True):
            tensor.view(-1, *tensor.shape[2:]).index_put_((slots,), new.to(tensor.dtype))
        return cache


class ReadsTheOtherEightBitFloat(ReferenceAttention):
    def attend(self, query, cache, metadata, params):
        if cache[0].dtype == torch.float8_e5m2:
            cache = tuple(t.view(torch.float8_e4m3fn) for t in cache)
        return super().attend(query, cache, metadata, params)


WRONG = [
    NullBlockIsRead, FutureIsSeen, WindowIsOneWider, WindowIsIgnored, SoftcapIsIgnored, ScaleIsTheHeads, HeadsAreInterleaved, WritesOneSlotMore,
    WritesValuesRounded, CopiesBackwards, PaddedRowsAreNaN, PaddedQueriesLeak, LosesTheFirstBlock, ComputesInHalf, MultipliesInTf32,
    CutsWhatItKeeps, LetsAnEightBitCacheOverflow, ReadsTheOtherEightBitFloat,
]  # fmt: skip


@pytest.mark.parametrize("cls", [ReferenceAttention, FunctionalReferenceAttention])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_passes(cls, dtype):
    results = results_of(cls, dtype)
    assert not [r for r in results if r.is_bad], [(r.id, r.detail) for r in results if r.is_bad]


@pytest.mark.parametrize("cls", WRONG, ids=lambda c: c.__name__)
def test_wrong_attention_fails(cls):
    results = results_of(cls)
    bad = [r for r in results if r.is_bad]
    assert bad, f"{cls.__name__} passed"
    # The mistake is found by its result, not because the class raises.
    assert any(r.status == "fail" for r in bad)


def test_mistakes_of_windows_and_caps_fail_only_where_they_matter():
    for cls, word in ((WindowIsOneWider, "window="), (SoftcapIsIgnored, "softcap="), (CopiesBackwards, "copies"), (ReadsTheOtherEightBitFloat, "kv=fp8_e5m2")):
        assert all(word in r.id for r in results_of(cls) if r.is_bad), cls
