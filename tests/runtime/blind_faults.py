"""Mistakes that the author of a backend makes, written from the guide to backends alone, before the kit's cases were read.

Owns: the faults, each one change to the template backend, with the op or part that the kit ought to name and the level that ought to find it.
Reads: the template backend, `oarlock.backend_api`, the references as what ops mean.
Never: reads the conformance kit; holds two mistakes in one fault.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import oarlock_template
import torch
from oarlock.backend_api import AttentionSpec, Capabilities, Claims, DeviceSpec, GraphRunnerSpec, OpImpl, ProbeResult, hookimpl
from oarlock.backend_api.runtime import AttentionParams, registry
from oarlock_template.device import TemplateDevice
from oarlock_template.graph import TracingRunner
from oarlock_template.paged import MASKED, Region, TemplateAttention
from torch.utils import _pytree as pytree

T = torch.Tensor
Cache = tuple[T, ...]


@dataclass(frozen=True)
class Parts:
    """A backend as what it is made of: the template's, with an attention of the same arithmetic that can be changed piece by piece."""

    device: type = TemplateDevice
    attention: str = "blind_faults:PiecewiseAttention"
    runner: str = "oarlock_template.graph:TracingRunner"  # used where the device is compiled
    ops: dict[str, OpImpl] = field(default_factory=lambda: {impl.op: impl for impl in oarlock_template.kernels(None)})
    options: dict[str, Any] = field(default_factory=dict)  # the device's
    claims: Claims | None = oarlock_template.probe().claims


class Package:
    """The hooks of a backend made of `parts`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    @hookimpl
    def devices(self) -> list[DeviceSpec]:
        def probe() -> ProbeResult:
            return dataclasses.replace(oarlock_template.probe(), claims=self.parts.claims)

        factory = f"{self.parts.device.__module__}:{self.parts.device.__name__}"
        return [dataclasses.replace(oarlock_template.devices()[0], probe=probe, factory=factory)]

    @hookimpl
    def kernels(self, device: Any) -> list[OpImpl]:
        return list(self.parts.ops.values())

    @hookimpl
    def attention(self, device: Any) -> list[AttentionSpec]:
        return [AttentionSpec("template", self.parts.attention, 10, oarlock_template.supports_attention)]

    @hookimpl
    def graph_runner(self, device: Any) -> list[GraphRunnerSpec]:
        return [GraphRunnerSpec("template", self.parts.runner, 10)] if device.options.get("template_compile") else []


@dataclass(frozen=True)
class Fault:
    """One mistake. `apply` gives the faulted backend, of an unfaulted one."""

    name: str
    kind: str  # "op", "attention", "device", "runner", "capability", "quantised"
    level: int  # that ought to find it
    named: str  # the op or part that a failure ought to name
    apply: Callable[[Parts], Parts]
    base: Parts = field(default_factory=Parts)


FAULTS: list[Fault] = []
COMPILED = Parts(options={"template_compile": True})


def op(name: str, level: int = 2, kind: str = "op", prepare: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A fault that is one wrong op."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        impl = OpImpl(name, "faulted", f"blind_faults:{function.__name__}", 10, supports=oarlock_template.supports_op, prepare=prepare)
        apply = lambda parts: dataclasses.replace(parts, ops={**parts.ops, name: impl})
        FAULTS.append(Fault(function.__name__, kind, level, name, apply))
        return function

    return add


def attention(kind: str = "attention", named: str = "paged_attention") -> Callable[[type], type]:
    """A fault that is one wrong attention."""

    def add(cls: type) -> type:
        apply = lambda parts: dataclasses.replace(parts, attention=f"blind_faults:{cls.__name__}")
        FAULTS.append(Fault(cls.__name__, kind, 3, named, apply))
        return cls

    return add


def device(level: int, named: str, kind: str = "device", base: Parts | None = None) -> Callable[[type], type]:
    """A fault that is one wrong device."""

    def add(cls: type) -> type:
        FAULTS.append(Fault(cls.__name__, kind, level, named, lambda parts: dataclasses.replace(parts, device=cls), base or Parts()))
        return cls

    return add


def runner(named: str) -> Callable[[type], type]:
    """A fault that is one wrong graph runner."""

    def add(cls: type) -> type:
        apply = lambda parts: dataclasses.replace(parts, runner=f"blind_faults:{cls.__name__}")
        FAULTS.append(Fault(cls.__name__, "runner", 4, named, apply, COMPILED))
        return cls

    return add


def right(name: str, *args: Any, **kwargs: Any) -> Any:
    """What op `name` means."""
    return registry()[name].reference(*args, **kwargs)


def as_if_contiguous(tensor: T) -> T:
    """What a kernel reads that takes a pointer and a shape, and no strides."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), tensor.storage_offset()).clone()


# Ops


@op("rms_norm")
def eps_outside_the_root(x: T, weight: T, eps: float) -> T:
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps) * weight.float()).to(x.dtype)


@op("layer_norm")
def variance_as_difference_of_means(x: T, weight: T, bias: T | None, eps: float) -> T:
    """E[x^2] - E[x]^2 in float32 loses everything where the mean is large beside the deviation."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    out = (wide - mean) * (variance + eps).rsqrt() * weight.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


@op("fused_add_rms_norm")
def residual_updated_in_place(x: T, residual: T, weight: T, eps: float) -> tuple[T, T]:
    """As other engines' op of this name does; here it may not write."""
    residual.add_(x)
    return right("rms_norm", residual, weight, eps).to(x.dtype), residual.clone()


@op("rotary")
def view_taken_for_contiguous(x: T, positions: T, table: T, interleaved: bool = False) -> T:
    """Queries and keys are views into the fused projection."""
    return right("rotary", as_if_contiguous(x), positions, table, interleaved)


@op("gelu_and_mul")
def tail_always_by_tanh(x: T, approximate: str) -> T:
    """Whole vectors obey `approximate`; the scalar loop for the rest was copied from the other variant."""
    size = x.shape[-1] // 2
    whole = size // 8 * 8
    tail = right("gelu_and_mul", torch.cat((x[..., whole:size], x[..., size + whole :]), -1), "tanh")
    return torch.cat((right("gelu_and_mul", x, approximate)[..., :whole], tail), -1)


@op("linear", prepare="oarlock_template.ops:pack")
def sums_in_bfloat16(x: T, weight: T, bias: T | None = None) -> T:
    """The accumulator has the inputs' dtype, and each tile of 16 is added to it."""
    total = x.new_zeros(x.shape[0], weight.shape[1])
    for at in range(0, x.shape[1], 16):
        total = total + x[:, at : at + 16] @ weight[at : at + 16]
    return total if bias is None else total + bias


@op("moe_topk")
def last_of_equal_experts(router_logits: T, k: int, renormalise: bool) -> tuple[T, T]:
    """A scan with >= where > was meant."""
    last = router_logits.shape[1] - 1
    ids = last - torch.sort(router_logits.flip(1), dim=-1, descending=True, stable=True).indices[:, :k]
    weights = router_logits.float().softmax(-1).gather(1, ids)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), ids.to(torch.int32)


@op("moe_experts")
def padding_multiplied_by_zero(x: T, w13: T, w2: T, weights: T, ids: T, valid: T) -> T:
    """0 times what a padded token holds, which may be NaN."""
    out = right("moe_experts", x, w13, w2, weights, torch.where(valid[:, None], ids, 0), torch.ones_like(valid))
    return out * valid[:, None].to(out.dtype)


@op("greedy")
def tail_reads_the_next_row(logits: T) -> T:
    """Rows are read 16 wide, the last piece without a mask; only the end of the buffer is guarded."""
    rows, vocab = logits.shape
    width = -(-vocab // 16) * 16
    flat = torch.cat((logits.reshape(-1), logits.new_full((width,), -torch.inf)))
    best, ids = flat.as_strided((rows, width), (vocab, 1)).max(-1)
    return torch.where(torch.isfinite(best), ids, -1).to(torch.int32)


@op("sample")
def top_p_before_top_k(logits: T, temperature: T, top_p: T, top_k: T, min_p: T, seed: T, choice: T, position: T) -> T:
    """top_p of the whole distribution, where it should be of what min_p and top_k left."""
    scaled = logits / torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
    shares, ids = torch.sort(scaled.softmax(-1), dim=-1, descending=True, stable=True)
    keep = ((shares.cumsum(-1) - shares) < top_p[:, None]) | (top_p >= 1)[:, None]
    keep = torch.zeros_like(keep).scatter(1, ids, keep) | (logits == logits.amax(-1, keepdim=True))
    left = torch.where(keep | logits.isnan(), logits, -torch.inf)
    return right("sample", left, temperature, torch.ones_like(top_p), top_k, min_p, seed, choice, position)


@op("apply_mask")
def sign_bit_taken_for_unset(logits: T, bitmask: T) -> T:
    """Bit 31 alone is a negative number, which is not > 0."""
    token = torch.arange(logits.shape[1], device=logits.device)
    bit = torch.ones((), dtype=torch.int32, device=logits.device) << (token % 32).to(torch.int32)
    return torch.where((bitmask[:, token // 32] & bit) > 0, logits, -torch.inf)


@op("logprobs")
def rank_counts_equals(logits: T, targets: T, k: int) -> tuple[T, T, T, T]:
    """The number of logits that are not smaller, the target's own among them: one less only where nothing equals it."""
    logprob, rank, *top = right("logprobs", logits, targets, k)
    equals = (logits == logits.gather(1, targets.long()[:, None])).sum(-1) - 1
    return logprob, (rank + equals.clamp(min=0)).to(torch.int32), *top


# Attention


class PiecewiseAttention(TemplateAttention):
    """The template's arithmetic cut into pieces. No fault."""

    def metadata(self, block_tables: T, seq_lens: T, query_start_loc: T, max_q: int, num_tokens: int) -> Region:
        start, end = query_start_loc[:-1], query_start_loc[1:]
        count = lambda n: torch.arange(n, dtype=torch.int32, device=seq_lens.device)
        first = self._first_query(seq_lens, torch.ones_like(seq_lens) if max_q == 1 else end - start, max_q)
        keys, queries = count(block_tables.shape[1] * self.block_size), (first[:, None] + count(max_q))[..., None]
        hidden = self._beyond(keys, seq_lens, max_q)[:, None] | (keys > queries)
        if self.params.window is not None:
            hidden = hidden | self._before_window(keys, queries, self.params.window)
        rest = super().metadata(block_tables, seq_lens, query_start_loc, max_q, num_tokens)
        return dataclasses.replace(rest, hidden=hidden, outside=hidden.all(1))

    def attend(self, query: T, cache: Cache, metadata: Region, params: AttentionParams) -> T:
        num_rows, max_q, context = metadata.hidden.shape
        heads, head_dim = params.num_kv_heads, params.head_dim
        lines = [t[metadata.blocks].transpose(1, 2).reshape(num_rows, heads, context, head_dim).float() for t in cache]
        outside = metadata.outside[:, None, :, None]
        key, value = lines[0].masked_fill(outside, 0.0)[:, :, None], self._values(lines[1], outside)[:, :, None]
        padded = query if metadata.take is None else query[metadata.take]
        grouped = self._split(padded.float().view(num_rows, max_q, params.num_heads, head_dim), heads)
        weights = self._weights(self._scores(grouped, key, params), metadata.hidden[:, None, None])
        out = self._join(weights @ value).reshape(num_rows * max_q, params.num_heads, head_dim)
        return (out if metadata.back is None else out[metadata.back]).to(query.dtype)

    def _first_query(self, seq_lens: T, new: T, max_q: int) -> T:
        return seq_lens - new

    def _beyond(self, keys: T, seq_lens: T, max_q: int) -> T:
        """[num_rows, context]: the key is none of the row's."""
        return keys >= seq_lens[:, None]

    def _before_window(self, keys: T, queries: T, window: int) -> T:
        return keys <= queries - window

    def _values(self, lines: T, outside: T) -> T:
        return lines.masked_fill(outside, 0.0)

    def _split(self, query: T, kv_heads: int) -> T:
        """[num_rows, max_q, num_heads, head_dim] -> [num_rows, num_kv_heads, query heads of each, max_q, head_dim]"""
        return query.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)

    def _join(self, out: T) -> T:
        return out.permute(0, 3, 1, 2, 4)

    def _scores(self, grouped: T, key: T, params: AttentionParams) -> T:
        return self._capped((grouped * params.scale) @ key.transpose(-1, -2), params)

    def _capped(self, scores: T, params: AttentionParams) -> T:
        return scores if params.softcap is None else params.softcap * torch.tanh(scores / params.softcap)

    def _weights(self, scores: T, hidden: T) -> T:
        return scores.masked_fill(hidden, MASKED).softmax(-1)


@attention()
class ValuesNotMasked(PiecewiseAttention):
    """Weights of 0 hide what a stale slot holds, unless that is NaN."""

    def _values(self, lines: T, outside: T) -> T:
        return lines


@attention()
class WindowByBlock(PiecewiseAttention):
    """The window begins at the block in which it should begin."""

    def _before_window(self, keys: T, queries: T, window: int) -> T:
        return keys < (queries - window + 1).clamp(min=0) // self.block_size * self.block_size


@attention()
class SoftcapBeforeScale(PiecewiseAttention):
    def _scores(self, grouped: T, key: T, params: AttentionParams) -> T:
        return self._capped(grouped @ key.transpose(-1, -2), params) * params.scale


@attention()
class ChunkBeginsAtABlock(PiecewiseAttention):
    """A chunk's context is counted in whole blocks, so its queries sit too early where the last chunk ended inside one."""

    def _first_query(self, seq_lens: T, new: T, max_q: int) -> T:
        context = seq_lens - new
        return context if max_q == 1 else context // self.block_size * self.block_size


@attention()
class HeadsInterleaved(PiecewiseAttention):
    """Query head h reads KV head h % num_kv_heads, where it should read h // group."""

    def _split(self, query: T, kv_heads: int) -> T:
        return query.unflatten(2, (-1, kv_heads)).permute(0, 3, 2, 1, 4)

    def _join(self, out: T) -> T:
        return out.permute(0, 3, 2, 1, 4)


@attention()
class FullLastBlockHidden(PiecewiseAttention):
    """While decoding: seq_len % block_size keys of the last block are seen, which is none of a full one."""

    def _beyond(self, keys: T, seq_lens: T, max_q: int) -> T:
        if max_q > 1:
            return super()._beyond(keys, seq_lens, max_q)
        last, used = (seq_lens - 1) // self.block_size, seq_lens % self.block_size
        block, offset = keys // self.block_size, keys % self.block_size
        return (block > last[:, None]) | ((block == last[:, None]) & (offset >= used[:, None]))


@attention()
class FirstLayersParameters(PiecewiseAttention):
    """Scale and soft cap of the group's first layer, for all its layers."""

    def attend(self, query: T, cache: Cache, metadata: Region, params: AttentionParams) -> T:
        return super().attend(query, cache, metadata, self.params)


@attention()
class MaximumBeginsAtZero(PiecewiseAttention):
    """The running maximum of an online softmax: where all scores are far below 0, every weight underflows."""

    def _weights(self, scores: T, hidden: T) -> T:
        scores = scores.masked_fill(hidden, MASKED)
        weights = (scores - scores.amax(-1, keepdim=True).clamp(min=0)).exp()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-37)


@attention()
class PaddedRowsDivideByZero(PiecewiseAttention):
    """Hidden scores are -inf: a row that sees nothing is 0 / 0."""

    def _weights(self, scores: T, hidden: T) -> T:
        return scores.masked_fill(hidden, -math.inf).softmax(-1)


@attention(named="write_kv")
class ViewsWrittenAsContiguous(PiecewiseAttention):
    """New keys and values are views into the fused projection."""

    def write_kv(self, cache: Cache, key: T, value: T, slots: T) -> Cache:
        return super().write_kv(cache, as_if_contiguous(key), as_if_contiguous(value), slots)


# The device


@device(1, "to_host")
class ReadIgnoresStrides(TemplateDevice):
    def to_host(self, tensor: T) -> T:
        return as_if_contiguous(tensor)


@device(1, "place")
class PlaceIgnoresStrides(TemplateDevice):
    """A rank's part of a row-sharded weight is a slice of columns."""

    def place(self, name: str, tensor: T, shard: Any) -> T:
        return as_if_contiguous(tensor)


@device(1, "memory")
class MemoryInKib(TemplateDevice):
    def memory_info(self) -> tuple[int, int]:
        free, total = super().memory_info()
        return free // 1024, total // 1024


@device(1, "memory")
class MemoryNeverMoves(TemplateDevice):
    """Asked once, at start."""

    def memory_info(self) -> tuple[int, int]:
        if not hasattr(self, "_seen"):
            self._seen = super().memory_info()
        return self._seen


@device(1, "seed")
class SeededOnce(TemplateDevice):
    """The generator is made by the first seed, and later ones find it there."""

    def seed(self, value: int) -> None:
        if not hasattr(self, "_seeded"):
            self._seeded = True
            super().seed(value)


# Graph runners


@runner("graph_runner")
class KeepsTheExamplesInputs(TracingRunner):
    """A graph holds the addresses of the example's device inputs; nobody copies the later ones there."""

    def compile(self, fn: Any, example: tuple[Any, ...], tag: str) -> Any:
        run = super().compile(fn, example, tag)
        kept = example[4]
        return lambda weights, written, read, packed, device_inputs: run(weights, written, read, packed, kept)


@runner("graph_runner")
class ReusesOutputs(TracingRunner):
    """Results lie in buffers of the graph, and are overwritten by the next run before somebody has read them."""

    def compile(self, fn: Any, example: tuple[Any, ...], tag: str) -> Any:
        run = super().compile(fn, example, tag)
        buffers: list[T] = []

        def replay(*args: Any) -> Any:
            written, outputs = run(*args)
            leaves, tree = pytree.tree_flatten(outputs)
            if not buffers:
                buffers.extend(leaf.clone() for leaf in leaves)
            for buffer, leaf in zip(buffers, leaves, strict=True):
                buffer.copy_(leaf)
            return written, pytree.tree_unflatten(list(buffers), tree)

        return replay


@runner("graph_runner")
class DonatesDeviceInputs(TracingRunner):
    """Results of earlier programs are given away with the state, though a later program reads them too."""

    def compile(self, fn: Any, example: tuple[Any, ...], tag: str) -> Any:
        run = super().compile(fn, example, tag)

        def donating(*args: Any) -> Any:
            results = run(*args)
            alive = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves((results, args[:4])) if isinstance(leaf, T)}
            for leaf in pytree.tree_leaves(args[4]):
                if isinstance(leaf, T) and leaf.untyped_storage().data_ptr() not in alive:
                    leaf.fill_(math.nan if leaf.is_floating_point() else 1)
            return results

        return donating


# Buckets and capabilities


@device(4, "buckets", kind="capability", base=COMPILED)
class BucketsOfTheMoment(TemplateDevice):
    """Widths of block tables are chosen by what is free when they are asked for, so that they change once something is allocated."""

    _asked = 0

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        type(self)._asked += 1
        axes = super().buckets(max_num_seqs, max_num_batched_tokens, max_blocks)
        return axes if type(self)._asked % 2 else {**axes, "blocks": axes["blocks"][-1:]}


@op("linear", kind="capability", prepare="oarlock_template.ops:pack")
def float32_as_tf32(x: T, weight: T, bias: T | None = None) -> T:
    """float32 is declared; products are of its first 10 bits of mantissa."""

    def short(tensor: T) -> T:
        return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    out = short(x) @ short(weight) if x.dtype == torch.float32 else x @ weight
    return out if bias is None else out + bias


def split_for_one_row(x: T, weight: T, bias: T | None = None) -> T:
    """One token is summed in two halves, for which a single row leaves the units."""
    half = x.shape[1] // 2
    out = x[:, :half] @ weight[:half] + x[:, half:] @ weight[half:] if x.shape[0] == 1 else x @ weight
    return out if bias is None else out + bias


class DeclaresBatchInvariance(TemplateDevice):
    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, batch_invariant=("float32",))


def _batch_variant(parts: Parts) -> Parts:
    linear = dataclasses.replace(parts.ops["linear"], factory="blind_faults:split_for_one_row")
    return dataclasses.replace(parts, device=DeclaresBatchInvariance, ops={**parts.ops, "linear": linear})


FAULTS.append(Fault("DeclaresBatchInvariance", "capability", 4, "batch_invariant", _batch_variant))


@device(3, "write_kv", kind="capability")
class DeclaresFunctionalWrites(TemplateDevice):
    """The template's attention writes in place."""

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, kv_update="functional")


@attention(kind="capability")
class SupportsLongerHeadsThanItReads(PiecewiseAttention):
    """Heads to 256 are supported, by a tile of 128."""

    def _scores(self, grouped: T, key: T, params: AttentionParams) -> T:
        return super()._scores(grouped[..., :128], key[..., :128], params)


def _false_claim(parts: Parts) -> Parts:
    claims = parts.claims or Claims()
    return dataclasses.replace(parts, claims=dataclasses.replace(claims, dtypes=(*claims.dtypes, "float16")))


FAULTS.append(Fault("ClaimsADtypeThatItLacks", "capability", 0, "claims", _false_claim))


# Quantised linears


@op("linear_int8", kind="quantised")
def int8_without_zero_points(x: T, weight: Any, bias: T | None = None) -> T:
    return right("linear_int8", x, {name: t for name, t in weight.items() if name != "zeros"}, bias)


@op("linear_int4", kind="quantised")
def int4_groups_in_order(x: T, weight: Any, bias: T | None = None) -> T:
    """Columns whose groups activation order scattered are read as equal runs."""
    return right("linear_int4", x, {name: t for name, t in weight.items() if name != "groups"}, bias)


@op("linear_int4", kind="quantised")
def int4_half_a_byte_dropped(x: T, weight: Any, bias: T | None = None) -> T:
    """The last column of an odd number shares its byte with nothing, and is not read."""
    out = right("linear_int4", torch.cat((x[:, :-1], torch.zeros_like(x[:, -1:])), 1) if x.shape[1] % 2 else x, weight, bias)
    return out


@op("linear_w8a8_fp8", kind="quantised")
def fp8_activations_not_saturated(x: T, weight: Any, bias: T | None = None) -> T:
    """With a static scale, what lies beyond 448 of it becomes NaN in the conversion, where it should become 448."""
    out = right("linear_w8a8_fp8", x, weight, bias)
    if weight.get("input_scale") is None:
        return out
    lost = ((x.float() / weight["input_scale"]).abs() > 464).any(1, keepdim=True)  # above 464 nothing rounds to 448
    return torch.where(lost, math.nan, out)


@op("linear_w8a8", kind="quantised")
def int8_activations_rounded_half_up(x: T, weight: Any, bias: T | None = None) -> T:
    """With a static scale, halves go up, where they should go to the even number."""
    scale = weight.get("input_scale")
    if scale is None:
        return right("linear_w8a8", x, weight, bias)
    return right("linear_w8a8", (torch.floor(x.float() / scale + 0.5) * scale).to(x.dtype), weight, bias)
