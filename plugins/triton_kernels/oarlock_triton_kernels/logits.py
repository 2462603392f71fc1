"""What happens to logits before a token is drawn, and what is reported about them.

Owns: apply_penalties, apply_bias, apply_mask, logprobs; the order of logits of which some are equal.
Reads: `sampling` (the order of floats).
Never: writes an argument; lets one row's history touch another row.

Legend: R rows, V vocabulary, L length of the history, W entries of a bias, C chunks of CHUNK tokens, Z tokens reported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels.sampling import CHUNK, key_of
from oarlock_triton_kernels.stepwise import STEPWISE

IN_PROMPT = tl.constexpr(1 << 30)  # the bit of a count that says: the prompt has the token
MAX_TOP = 32  # tokens reported up to which passes of max are cheaper than a sort
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_WARPS = 8
_HISTORY = 1024  # tokens of a history that a program counts


# ---------------------------------------------------------------- penalties, bias, mask


@triton.jit(**STEPWISE)
def count_kernel(
    counts_ptr, history_ptr, prompt_len_ptr, total_len_ptr, presence_ptr, frequency_ptr, repetition_ptr, length, vocab, stride_history,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (R, ceil(L / BLOCK)). How often each token stands in a row's output; bit 30: whether its prompt has it.

    counts_ptr:  [R, V]  int32, contiguous, all 0
    history_ptr: [R, L]  int32, strides (stride_history, 1): [:prompt_len] the prompt, [prompt_len:total_len] the output, then garbage
    prompt_len_ptr, total_len_ptr: [R]  int32; presence_ptr, frequency_ptr, repetition_ptr: [R]  float32: neutral rows are left out

    Reference: oarlock.runtime.reference.logits.apply_penalties, its scatter_adds.
    Cost: R L atomic operations on integers, whose order does not matter; 12 R L bytes.
    Bound: latency of the atomics.
    """
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.minimum(tl.load(total_len_ptr + row), length)
    neutral = (tl.load(presence_ptr + row) == 0.0) & (tl.load(frequency_ptr + row) == 0.0) & (tl.load(repetition_ptr + row) == 1.0)
    known = (at < total) & (neutral == 0)
    token = tl.load(history_ptr + row.to(tl.int64) * stride_history + at, mask=known, other=0)
    is_prompt = at < tl.load(prompt_len_ptr + row)
    counts_ptr += row.to(tl.int64) * vocab
    tl.atomic_or(counts_ptr + token, IN_PROMPT, mask=known & is_prompt, sem="relaxed")
    tl.atomic_add(counts_ptr + token, 1, mask=known & (is_prompt == 0), sem="relaxed")


@triton.jit(**STEPWISE)
def penalties_kernel(
    out_ptr, logits_ptr, counts_ptr, presence_ptr, frequency_ptr, repetition_ptr, vocab, stride_r,
):  # fmt: skip
    """Grid: (R, C). Repetition over prompt and output, then frequency and presence over the output.

    out_ptr:    [R, V]  float32, contiguous
    logits_ptr: [R, V]  float32, strides (stride_r, 1)
    counts_ptr: [R, V]  int32, contiguous: of `count_kernel`
    presence_ptr, frequency_ptr, repetition_ptr: [R]  float32; neutral 0, 0, 1

    Reference: oarlock.runtime.reference.logits.apply_penalties. A token that was not seen keeps its bits.
    Cost: 6 R V FLOP; 12 R V bytes, and 4 R V that cleared the counts.
    Bound: memory.
    """
    row = tl.program_id(0)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside, long = token < vocab, row.to(tl.int64)
    x = tl.load(logits_ptr + long * stride_r + token, mask=inside, other=0.0)
    counts = tl.load(counts_ptr + long * vocab + token, mask=inside, other=0)
    presence, frequency, repetition = tl.load(presence_ptr + row), tl.load(frequency_ptr + row), tl.load(repetition_ptr + row)
    count = counts & (IN_PROMPT - 1)
    y = tl.where(x > 0.0, tl.math.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    y = y - (frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0))
    tl.store(out_ptr + long * vocab + token, tl.where(counts != 0, y, x), mask=inside)


def apply_penalties(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """As the registry's."""
    (rows, vocab), length = logits.shape, history.shape[1]
    out = torch.empty((rows, vocab), dtype=logits.dtype, device=logits.device)
    if rows:
        logits, history = _last_of_stride_1(logits), _last_of_stride_1(history)
        counts = torch.zeros((rows, vocab), dtype=torch.int32, device=logits.device)
        factors = (presence, frequency, repetition)
        if length:
            grid = (rows, triton.cdiv(length, _HISTORY))
            count_kernel[grid](counts, history, prompt_len, total_len, *factors, length, vocab, history.stride(0), BLOCK=_HISTORY)
        penalties_kernel[(rows, triton.cdiv(vocab, CHUNK.value))](out, logits, counts, *factors, vocab, logits.stride(0), num_warps=_WARPS)
    return out


@triton.jit(**STEPWISE)
def bias_kernel(out_ptr, ids_ptr, bias_values_ptr, entries, vocab, stride_ids, stride_values, WIDTH: tl.constexpr):
    """Grid: (R,). Adds each value at its token's place, in place.

    out_ptr:    [R, V]  float32, contiguous
    ids_ptr:    [R, W]  int32, strides (stride_ids, 1); bias_values_ptr: [R, W]  float32, strides (stride_values, 1); (0, 0.0) is padding
    WIDTH:      W rounded up to a power of two

    Reference: oarlock.runtime.reference.logits.apply_bias. Padding is not added: all of it would go to one address.
    Cost: R W FLOP; 16 R W bytes.
    Bound: latency.
    """
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    value = tl.load(bias_values_ptr + row * stride_values + at, mask=at < entries, other=0.0)
    token = tl.load(ids_ptr + row * stride_ids + at, mask=at < entries, other=0)
    tl.atomic_add(out_ptr + row.to(tl.int64) * vocab + token, value, mask=value != 0.0, sem="relaxed")


def apply_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As the registry's."""
    out = logits.clone(memory_format=torch.contiguous_format)
    (rows, vocab), width = logits.shape, ids.shape[1]
    if rows and width:
        ids, values = _last_of_stride_1(ids), _last_of_stride_1(values)
        bias_kernel[(rows,)](out, ids, values, width, vocab, ids.stride(0), values.stride(0), WIDTH=triton.next_power_of_2(width))
    return out


@triton.jit(**STEPWISE)
def mask_kernel(out_ptr, logits_ptr, bits_ptr, vocab, stride_r, stride_bits):
    """Grid: (R, C). -inf where a token's bit is 0.

    out_ptr:    [R, V]  float32, contiguous
    logits_ptr: [R, V]  float32, strides (stride_r, 1)
    bits_ptr:   [R, ceil(V / 32)]  int32, strides (stride_bits, 1): bit v % 32 of word v // 32 belongs to token v

    Reference: oarlock.runtime.reference.logits.apply_mask.
    Cost: 3 R V integer operations; 8.1 R V bytes.
    Bound: memory.
    """
    row = tl.program_id(0)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside, long = token < vocab, row.to(tl.int64)
    word = tl.load(bits_ptr + row * stride_bits + token // 32, mask=inside, other=0)
    x = tl.load(logits_ptr + long * stride_r + token, mask=inside, other=0.0)
    tl.store(out_ptr + long * vocab + token, tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf")), mask=inside)


def apply_mask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """As the registry's."""
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=logits.dtype, device=logits.device)
    if rows:
        logits, bitmask = _last_of_stride_1(logits), _last_of_stride_1(bitmask)
        mask_kernel[(rows, triton.cdiv(vocab, CHUNK.value))](out, logits, bitmask, vocab, logits.stride(0), bitmask.stride(0), num_warps=_WARPS)
    return out


# ---------------------------------------------------------------- log-probabilities


@triton.jit
def rank_word(logits, token):
    """int64 whose order is that of logits, the lowest id first among equals; its low half gives the id back."""
    return (key_of(tl.maximum(logits, _LOWEST)).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit(**STEPWISE)
def chunk_logprobs_kernel(
    maximum_ptr, mass_ptr, greater_ptr, top_ptr, logits_ptr, targets_ptr, vocab, stride_r, chunks, k,
):  # fmt: skip
    """Grid: (R, C). Of a chunk: its largest logit m, the sum of exp(x - m), how many logits exceed the target's, and its Z best.

    maximum_ptr, mass_ptr: [R, C]  float32; greater_ptr: [R, C]  int32; top_ptr: [R, C, Z]  int64, see `rank_word`; contiguous
    logits_ptr:  [R, V]  float32, strides (stride_r, 1)
    targets_ptr: [R]  int32

    Reference: oarlock.runtime.reference.logits.logprobs.
    Cost: (4 + 2 Z) R V operations; 4 R V bytes.
    Bound: memory for Z = 0, else the Z reductions that wait for each other.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits_ptr += row.to(tl.int64) * stride_r
    x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
    maximum = tl.max(x, 0)
    greater = x > tl.load(logits_ptr + tl.load(targets_ptr + row))
    at = row * chunks + chunk
    tl.store(maximum_ptr + at, maximum)
    tl.store(mass_ptr + at, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - maximum)), 0))
    tl.store(greater_ptr + at, tl.sum(greater.to(tl.int32), 0))
    word = tl.where(token < vocab, rank_word(x, token), -0x8000000000000000)
    for n in range(k):
        best = tl.max(word, 0)
        tl.store(top_ptr + at.to(tl.int64) * k + n, best)
        word = tl.where(word == best, -0x8000000000000000, word)


@triton.jit(**STEPWISE)
def logprobs_kernel(
    logprob_ptr, rank_ptr, top_ids_ptr, top_logprobs_ptr, maximum_ptr, mass_ptr, greater_ptr, top_ptr, logits_ptr, targets_ptr,
    stride_r, chunks, k, CHUNKS: tl.constexpr, TOPS: tl.constexpr,
):  # fmt: skip
    """Grid: (R,). Joins what the chunks of a row found.

    logprob_ptr: [R]  float32; rank_ptr: [R]  int32: of the target; top_ids_ptr: [R, Z]  int32; top_logprobs_ptr: [R, Z]  float32; contiguous
    maximum_ptr, mass_ptr, greater_ptr: [R, C]  and top_ptr: [R, C, Z]  as `chunk_logprobs_kernel` wrote them
    logits_ptr:  [R, V]  float32, strides (stride_r, 1)
    targets_ptr: [R]  int32
    CHUNKS, TOPS: C rounded up to a power of two; likewise the words of the most tokens that are reported

    Reference: oarlock.runtime.reference.logits.logprobs.
    Cost: R C Z^2 operations, Z passes over C Z words of a row; 8 R C Z + 12 R C bytes.
    Bound: latency.
    """
    row, chunk, place = tl.program_id(0), tl.arange(0, CHUNKS), tl.arange(0, TOPS)
    at, is_chunk = row * chunks + chunk, chunk < chunks
    maximum = tl.load(maximum_ptr + at, mask=is_chunk, other=float("-inf"))
    mass = tl.load(mass_ptr + at, mask=is_chunk, other=0.0)
    best = tl.max(maximum, 0)
    log_sum = tl.log(tl.sum(mass * tl.exp(maximum - best), 0))
    logits_ptr += row.to(tl.int64) * stride_r
    tl.store(logprob_ptr + row, tl.load(logits_ptr + tl.load(targets_ptr + row)) - best - log_sum)
    tl.store(rank_ptr + row, tl.sum(tl.load(greater_ptr + at, mask=is_chunk, other=0), 0) + 1)
    if k > 0:
        word = tl.load(top_ptr + row.to(tl.int64) * chunks * k + place, mask=place < chunks * k, other=-0x8000000000000000)
        for n in range(k):
            top = tl.max(word, 0)
            token = 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32)
            tl.store(top_ids_ptr + row * k + n, token)
            tl.store(top_logprobs_ptr + row * k + n, tl.load(logits_ptr + token) - best - log_sum)
            word = tl.where(word == top, -0x8000000000000000, word)


def logprobs(logits: torch.Tensor, targets: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the registry's. More than MAX_TOP tokens are sorted, by torch."""
    rows, vocab = logits.shape
    sorted_k = k if k > MAX_TOP else 0
    k -= sorted_k
    logits = _last_of_stride_1(logits)
    chunks = triton.cdiv(vocab, CHUNK.value)
    logprob, rank = logits.new_empty((rows,)), torch.empty((rows,), dtype=torch.int32, device=logits.device)
    top_ids, top_logprobs = torch.empty((rows, k), dtype=torch.int32, device=logits.device), logits.new_empty((rows, k))
    if rows:
        maximum, mass = logits.new_empty((2, rows, chunks)).unbind()
        greater = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
        top = torch.empty((rows, chunks, k), dtype=torch.int64, device=logits.device)
        found = (maximum, mass, greater, top, logits, targets)
        chunk_logprobs_kernel[(rows, chunks)](*found, vocab, logits.stride(0), chunks, k, num_warps=_WARPS)
        logprobs_kernel[(rows,)](
            logprob, rank, top_ids, top_logprobs, *found, logits.stride(0), chunks, k,
            CHUNKS=triton.next_power_of_2(chunks), TOPS=triton.next_power_of_2(chunks * MAX_TOP),
        )  # fmt: skip
    if sorted_k:
        order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :sorted_k]
        top_ids, top_logprobs = order.to(torch.int32), logits.log_softmax(-1).gather(1, order)
    return logprob, rank, top_ids, top_logprobs


def _last_of_stride_1(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
