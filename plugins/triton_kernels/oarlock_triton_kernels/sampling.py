"""Which token comes next: greedy, and a draw from what temperature, min_p, top_k and top_p leave, without sorting the vocabulary.

Owns: greedy, sample; float32 numbers as integers of the same order.
Reads: nothing of ours.
Never: lets a row's choice depend on its row, its neighbours or the number of programs; reads a tensor's values on the host.

Legend: R rows, V vocabulary, S segments of SEGMENT tokens, C chunks of CHUNK tokens.

A draw takes five launches. All but `cut_kernel` spread a row over the chip, and that one reads little:

    survey  [R, S]  the largest logit of each segment, and the mass below it
    cut     [R]     twice, by top_k and by top_p: where the kept tokens end, by bisection over float32's bits in the few segments that can hold the end
    draw    [R, C]  Gumbel-max over the kept tokens of each chunk
    pick    [R]     the best of the chunks

Why few segments: if k segments have a maximum of at least x, the k-th largest logit is at least x; if the maxima from x up already have the mass
top_p, the end of the nucleus is at least x. Segments whose maximum is smaller cannot hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels.stepwise import STEPWISE

SEGMENT = tl.constexpr(64)
CHUNK = tl.constexpr(4096)
PART = tl.constexpr(2048)  # tokens of listed segments that are looked at together
GREEDY_BELOW = tl.constexpr(1e-5)  # temperatures below this mean argmax
_WARPS = 8


@triton.jit
def _inverse(temperature):
    """1 / temperature, 1 where that means argmax."""
    return tl.math.div_rn(1.0, tl.where(temperature < GREEDY_BELOW, 1.0, temperature))


@triton.jit
def _scaled(logits, inverse):
    """Logits over the temperature; NaN as +inf, which makes the row's result -1.

    Differs: the reference divides, which rounds once; this can differ in the last bit, and not at all at temperature 1.
    """
    x = logits * inverse
    return tl.where(x <= float("inf"), x, float("inf"))


@triton.jit
def key_of(x):
    """int32 in the order of float32 `x`; both zeros are one number."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# ---------------------------------------------------------------- noise


@triton.jit
def _four_rounds(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0 += x1
    x1 = ((x1 << A) | (x1 >> (32 - A))) ^ x0
    x0 += x1
    x1 = ((x1 << B) | (x1 >> (32 - B))) ^ x0
    x0 += x1
    x1 = ((x1 << C) | (x1 >> (32 - C))) ^ x0
    x0 += x1
    x1 = ((x1 << D) | (x1 >> (32 - D))) ^ x0
    return x0, x1


@triton.jit
def _gumbel(seed, choice, position, token):
    """Gumbel noise that belongs to (seed, choice, position, token): the reference's bits, its logarithms to about 2e-7.

    seed, choice, position: uint32 scalars; token: uint32, any shape; result: float32 of that shape, finite.
    Source: Threefry-2x32 with 20 rounds, Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    key2 = seed ^ choice ^ 0x1BD11BDA
    x0, x1 = position + seed + tl.zeros_like(token), token + choice
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = _four_rounds(x0 + choice, x1 + key2 + 1, 17, 29, 16, 24)
    x0, x1 = _four_rounds(x0 + key2, x1 + seed + 2, 13, 15, 26, 6)
    x0, x1 = _four_rounds(x0 + seed, x1 + choice + 3, 17, 29, 16, 24)
    x0, x1 = _four_rounds(x0 + choice, x1 + key2 + 4, 13, 15, 26, 6)
    high, low = x0 + key2, x1 + seed + 5
    u = (high >> 9).to(tl.float32) * 1.1920928955078125e-07 + ((low >> 9).to(tl.float32) * 1.4210854715202004e-14 + 7.105427357601002e-15)
    # -log1p(-u): winners have a small u, where a logarithm of 1 - u has lost all its bits. 2 atanh(z) has not, z = u / (2 - u).
    z = u / (2.0 - u)
    z2 = z * z
    series = 2.0 * z * (1.0 + z2 * (0.33333333 + z2 * (0.2 + z2 * (0.14285714 + z2 * 0.11111111))))
    exponential = tl.where(u < 0.25, series, -tl.log(tl.maximum(1.0 - u, 1e-30)))
    return -tl.log(exponential)


# ---------------------------------------------------------------- where the kept tokens end


@triton.jit(**STEPWISE)
def survey_kernel(
    maximum_ptr, mass_ptr, logits_ptr, temperature_ptr, top_p_ptr, top_k_ptr, min_p_ptr, vocab, segments, stride_r,
):  # fmt: skip
    """Grid: (R, ceil(V / CHUNK)). Of each segment: its largest scaled logit m, and the sum of exp(s - m).

    maximum_ptr, mass_ptr: [R, S]  float32, contiguous
    logits_ptr: [R, V]  float32, strides (stride_r, 1)
    temperature_ptr, top_p_ptr, min_p_ptr: [R]  float32; top_k_ptr: [R]  int32

    Reference: oarlock.runtime.reference.sampling.sample, up to its first comparison. A row that keeps everything is left out.
    Cost: 20 R V FLOP; 4 R V bytes.
    Bound: memory: the cache that holds the logits since the head wrote them.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    if _is_cut(temperature, tl.load(top_p_ptr + row), tl.load(top_k_ptr + row), tl.load(min_p_ptr + row), vocab):
        segment = tl.program_id(1) * (CHUNK // SEGMENT) + tl.arange(0, CHUNK // SEGMENT)
        token = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
        x = tl.load(logits_ptr + row.to(tl.int64) * stride_r + token, mask=token < vocab, other=float("-inf"))
        scaled = _scaled(x, _inverse(temperature))
        maximum = tl.max(scaled, 1)
        mass = tl.sum(tl.where(scaled > float("-inf"), tl.exp(scaled - maximum[:, None]), 0.0), 1)
        tl.store(maximum_ptr + row * segments + segment, maximum, mask=segment < segments)
        tl.store(mass_ptr + row * segments + segment, mass, mask=segment < segments)


@triton.jit
def _is_cut(temperature, top_p, top_k, min_p, vocab):
    """Whether a row keeps less than everything."""
    return (temperature >= GREEDY_BELOW) & ((top_p < 1.0) | ((top_k > 0) & (top_k < vocab)) | (min_p > 0.0))


@triton.jit
def _segments(maximum_ptr, segments, best, SEGMENTS: tl.constexpr):
    """(the largest scaled logit of each segment, its exp(s - best))."""
    segment = tl.arange(0, SEGMENTS)
    maximum = tl.load(maximum_ptr + segment, mask=segment < segments, other=float("-inf"))
    return maximum, tl.exp(maximum - best)


@triton.jit
def _mass(mass_ptr, maximum_ptr, segments, best, SEGMENTS: tl.constexpr):
    """The sum of exp(s - best) over all tokens."""
    segment = tl.arange(0, SEGMENTS)
    mass = tl.load(mass_ptr + segment, mask=segment < segments, other=0.0)
    return tl.sum(tl.where(mass > 0.0, mass * _segments(maximum_ptr, segments, best, SEGMENTS)[1], 0.0), 0)


@triton.jit
def _listed(list_ptr, maximum_ptr, segments, best, min_p, least, SEGMENTS: tl.constexpr):
    """Write down the segments whose maximum is at least `least` and kept by min_p, in order; returns how many."""
    maximum, mass = _segments(maximum_ptr, segments, best, SEGMENTS)
    segment = tl.arange(0, SEGMENTS)
    chosen = ((maximum >= least) & (mass >= min_p) & (segment < segments)).to(tl.int32)
    tl.debug_barrier()  # the list's last readers are done
    tl.store(list_ptr + tl.cumsum(chosen, 0) - 1, segment, mask=chosen > 0)
    tl.debug_barrier()  # and its next ones see it
    return tl.sum(chosen, 0)


@triton.jit
def _candidates(logits_ptr, list_ptr, first, count, vocab, inverse):
    """Scaled logits and ids of PART tokens of listed segments, in the order of ids; -inf where there is none."""
    lane = tl.arange(0, PART)
    place = first + lane // SEGMENT
    token = tl.load(list_ptr + place, mask=place < count, other=0) * SEGMENT + lane % SEGMENT
    is_real = (place < count) & (token < vocab)
    return _scaled(tl.load(logits_ptr + token, mask=is_real, other=float("-inf")), inverse), token


@triton.jit
def _weight(mass, min_p, by_count):
    """What a token weighs: 1 if `by_count`, else its exp(s - best) where min_p keeps it."""
    return tl.where(by_count, 1.0, tl.where(mass >= min_p, mass, 0.0))


@triton.jit
def _reaches(keys, weights, target, low, high):
    """The largest key x from low up with sum(weights where keys >= x) >= target; low where there is none. high is above every key."""
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), 0) >= target
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _bound(maximum_ptr, segments, best, min_p, by_count, target, low, high, SEGMENTS: tl.constexpr):
    """`_reaches` over the best token of each segment."""
    maximum, mass = _segments(maximum_ptr, segments, best, SEGMENTS)
    return _reaches(key_of(maximum), _weight(mass, min_p, by_count), target, low, high)


@triton.jit
def _end(logits_ptr, list_ptr, count, vocab, inverse, best, min_p, by_count, target, low, high):
    """`_reaches` over all tokens of the listed segments, which stay in registers where they are one part."""
    if count <= PART // SEGMENT:
        scaled, _ = _candidates(logits_ptr, list_ptr, 0, count, vocab, inverse)
        low = _reaches(key_of(scaled), _weight(tl.exp(scaled - best), min_p, by_count), target, low, high)
    else:
        while high - low > 1:
            middle = low + (high - low) // 2
            found = 0.0
            for first in range(0, count, PART // SEGMENT):
                scaled, _ = _candidates(logits_ptr, list_ptr, first, count, vocab, inverse)
                weight = _weight(tl.exp(scaled - best), min_p, by_count)
                found += tl.sum(tl.where(key_of(scaled) >= middle.to(tl.int32), weight, 0.0), 0)
            low = tl.where(found >= target, middle, low)
            high = tl.where(found >= target, high, middle)
    return low


@triton.jit
def _totals(logits_ptr, list_ptr, count, vocab, inverse, best, min_p, end):
    """(tokens above the key `end`, tokens at it, mass above it that min_p keeps)."""
    above, equal, mass_above = 0, 0, 0.0
    for first in range(0, count, PART // SEGMENT):
        scaled, _ = _candidates(logits_ptr, list_ptr, first, count, vocab, inverse)
        key, mass = key_of(scaled), tl.exp(scaled - best)
        above += tl.sum((key > end).to(tl.int32), 0)
        equal += tl.sum((key == end).to(tl.int32), 0)
        mass_above += tl.sum(tl.where((key > end) & (mass >= min_p), mass, 0.0), 0)
    return above, equal, mass_above


@triton.jit
def _last_of_equals(logits_ptr, list_ptr, count, vocab, inverse, end, kept):
    """The id of the `kept`-th token, counted from 1, whose key is `end`."""
    seen, last = 0, 0
    for first in range(0, count, PART // SEGMENT):
        scaled, token = _candidates(logits_ptr, list_ptr, first, count, vocab, inverse)
        equal = (key_of(scaled) == end).to(tl.int32)
        is_last = (equal > 0) & (tl.cumsum(equal, 0) + seen == kept)
        last += tl.sum(tl.where(is_last, token, 0), 0)
        seen += tl.sum(equal, 0)
    return last


@triton.jit(**STEPWISE)
def cut_kernel(
    best_ptr, end_ptr, last_ptr, whole_ptr, list_ptr, maximum_ptr, mass_ptr, logits_ptr, temperature_ptr, top_p_ptr, top_k_ptr, min_p_ptr,
    vocab, segments, stride_r, BY_COUNT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Grid: (R,). Where the kept tokens of a row end, by top_k if BY_COUNT; launched again, by top_p over what top_k and min_p left.

    A token is kept by both if s > end, or s == end and its id <= last.

    best_ptr, end_ptr, whole_ptr: [R]  float32: the largest scaled logit; the smallest kept one, -inf where all are; mass that top_k and min_p keep
    last_ptr:   [R]  int32
    list_ptr:   [R, S]  int32, scratch
    maximum_ptr, mass_ptr: [R, S]  float32, contiguous: of `survey_kernel`
    logits_ptr: [R, V]  float32, strides (stride_r, 1)
    temperature_ptr, top_p_ptr, min_p_ptr: [R]  float32; top_k_ptr: [R]  int32
    SEGMENTS:   S rounded up to a power of two

    Reference: oarlock.runtime.reference.sampling.sample: what it finds by sorting.
    Cost: 64 operations, in 32 bisections, for each of S maxima and of the listed tokens: a few thousand of V, all where a nucleus is flat; 8 bytes
    a maximum and 4 a token, once where those that are listed fit into PART, else at each bisection.
    Bound: latency: one program a row, reductions that wait for each other.
    """
    row = tl.program_id(0)
    temperature, top_p, min_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    best, end, last, whole = temperature * 0.0 + float("inf"), temperature * 0.0 - float("inf"), vocab, 0.0
    if _is_cut(temperature, top_p, top_k, min_p, vocab):
        inverse = _inverse(temperature)
        maximum_ptr += row * segments
        mass_ptr += row * segments
        list_ptr += row * segments
        logits_ptr += row.to(tl.int64) * stride_r
        best = tl.max(_segments(maximum_ptr, segments, 0.0, SEGMENTS)[0], 0)
        if (best > float("-inf")) & (best < float("inf")):
            if BY_COUNT:
                is_active, target, floor = (top_k > 0) & (top_k < vocab), top_k.to(tl.float32), 0.0
                whole = _mass(mass_ptr, maximum_ptr, segments, best, SEGMENTS)
            else:
                end, last, whole = tl.load(end_ptr + row), tl.load(last_ptr + row), tl.load(whole_ptr + row)
                is_active, target, floor = top_p < 1.0, top_p * whole, min_p
            if is_active:
                low, high = key_of(end).to(tl.int64), key_of(best).to(tl.int64) + 1
                low = _bound(maximum_ptr, segments, best, floor, BY_COUNT, target, low, high, SEGMENTS)
                count = _listed(list_ptr, maximum_ptr, segments, best, floor, value_of(low.to(tl.int32)), SEGMENTS)
                low = _end(logits_ptr, list_ptr, count, vocab, inverse, best, floor, BY_COUNT, target, low, high)
                key = low.to(tl.int32)
                above, equal, mass_above = _totals(logits_ptr, list_ptr, count, vocab, inverse, best, min_p, key)
                mass = tl.exp(value_of(key) - best)
                if BY_COUNT:
                    kept = top_k - above
                    whole = mass_above + tl.where(mass >= min_p, mass * kept.to(tl.float32), 0.0)
                else:  # of equals, those before which less than top_p lies; the first always
                    kept = tl.minimum(tl.maximum(tl.ceil((target - mass_above) / mass), 1.0), vocab * 1.0).to(tl.int32)
                end_before = end
                end = value_of(key)
                last_of_equals = vocab
                if kept < equal:
                    last_of_equals = _last_of_equals(logits_ptr, list_ptr, count, vocab, inverse, key, kept)
                last = tl.where(end == end_before, tl.minimum(last, last_of_equals), last_of_equals)
            elif (min_p > 0.0) & BY_COUNT:
                count = _listed(list_ptr, maximum_ptr, segments, best, min_p, float("-inf"), SEGMENTS)
                whole = _totals(logits_ptr, list_ptr, count, vocab, inverse, best, min_p, key_of(end))[2]
    tl.store(best_ptr + row, best)
    tl.store(end_ptr + row, end)
    tl.store(last_ptr + row, last)
    tl.store(whole_ptr + row, whole)


# ---------------------------------------------------------------- the choice


@triton.jit(**STEPWISE)
def draw_kernel(
    noisy_ptr, scaled_ptr, token_ptr, logits_ptr, temperature_ptr, min_p_ptr, best_ptr, end_ptr, last_ptr, seed_ptr, choice_ptr, position_ptr,
    vocab, stride_r, chunks, IS_GREEDY: tl.constexpr,
):  # fmt: skip
    """Grid: (R, C). The kept token of a chunk whose scaled logit plus noise is largest; of equals the one that the reference's sort has first.

    noisy_ptr, scaled_ptr: [R, C]  float32; token_ptr: [R, C]  int32; contiguous. noisy is +inf where a logit is NaN or +inf, -inf where none is kept
    logits_ptr: [R, V]  float32, strides (stride_r, 1)
    temperature_ptr, min_p_ptr, best_ptr, end_ptr: [R]  float32; last_ptr: [R]  int32: of `cut_kernel`
    seed_ptr, choice_ptr, position_ptr: [R]  int32. With IS_GREEDY only the logits are read.

    Reference: oarlock.runtime.reference.sampling.sample and greedy.
    Cost: 150 operations a kept token, 1 a token where the row is greedy; 4 R V bytes.
    Bound: arithmetic where everything is kept (20 rounds of Threefry), else memory. A chunk that keeps nothing makes no noise.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride_r + token, mask=token < vocab, other=float("-inf"))
    if IS_GREEDY:
        scaled = _scaled(x, 1.0)
        noisy = scaled
    else:
        temperature, min_p, end = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row), tl.load(end_ptr + row)
        scaled = _scaled(x, _inverse(temperature))
        noisy = scaled
        if temperature >= GREEDY_BELOW:
            is_kept = (scaled > end) | ((scaled == end) & (token <= tl.load(last_ptr + row)))
            if min_p > 0.0:
                is_kept &= tl.exp(scaled - tl.load(best_ptr + row)) >= min_p
            noisy = tl.where(is_kept | (scaled == float("inf")), scaled, float("-inf"))
            if tl.max(noisy, 0) > float("-inf"):
                seed, choice, position = tl.load(seed_ptr + row), tl.load(choice_ptr + row), tl.load(position_ptr + row)
                noise = _gumbel(seed.to(tl.uint32, bitcast=True), choice.to(tl.uint32, bitcast=True), position.to(tl.uint32, bitcast=True), token.to(tl.uint32))
                noisy += noise
    best = tl.max(noisy, 0)
    first = tl.max(tl.where(noisy == best, scaled, float("-inf")), 0)
    tl.store(noisy_ptr + row * chunks + chunk, best)
    tl.store(scaled_ptr + row * chunks + chunk, first)
    tl.store(token_ptr + row * chunks + chunk, tl.min(tl.where((noisy == best) & (scaled == first), token, vocab), 0))


@triton.jit(**STEPWISE)
def pick_kernel(out_ptr, noisy_ptr, scaled_ptr, token_ptr, chunks, CHUNKS: tl.constexpr):
    """Grid: (R,). The best of a row's chunks; -1 where that is not finite.

    out_ptr: [R]  int32
    noisy_ptr, scaled_ptr: [R, C]  float32; token_ptr: [R, C]  int32; contiguous: of `draw_kernel`
    CHUNKS:  C rounded up to a power of two

    Reference: the last line of oarlock.runtime.reference.sampling.sample and greedy.
    Cost: 2 R C operations; 12 R C bytes.
    Bound: latency of a launch.
    """
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    at, is_real = row * chunks + chunk, chunk < chunks
    noisy = tl.load(noisy_ptr + at, mask=is_real, other=float("-inf"))
    scaled = tl.load(scaled_ptr + at, mask=is_real, other=float("-inf"))
    token = tl.load(token_ptr + at, mask=is_real, other=0x7FFFFFFF)
    best = tl.max(noisy, 0)
    first = tl.max(tl.where(noisy == best, scaled, float("-inf")), 0)
    token = tl.min(tl.where((noisy == best) & (scaled == first), token, 0x7FFFFFFF), 0)
    is_finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(out_ptr + row, tl.where(is_finite, token, -1))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """As the registry's."""
    return _drawn(logits, (logits,) * 8, is_greedy=True)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """As the registry's."""
    best, end, last = cut(logits, temperature, top_p, top_k, min_p)
    return _drawn(logits, (temperature, min_p, best, end, last, seed, choice, position), is_greedy=False)


def cut(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(largest scaled logit, smallest that top_k and top_p keep, last id of those that equal it) of each row; [R] each."""
    rows, vocab = logits.shape
    segments = triton.cdiv(vocab, SEGMENT.value)
    maximum, mass = logits.new_empty((2, rows, segments)).unbind()
    best, end, whole = logits.new_empty((3, rows)).unbind()
    last, listed = (torch.empty(shape, dtype=torch.int32, device=logits.device) for shape in ((rows,), (rows, segments)))
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        filters = (logits, temperature, top_p, top_k, min_p, vocab, segments, logits.stride(0))
        survey_kernel[(rows, triton.cdiv(vocab, CHUNK.value))](maximum, mass, *filters, num_warps=_WARPS)
        table = {"SEGMENTS": triton.next_power_of_2(segments), "num_warps": 4 if segments <= 2048 else 8}
        for by_count in (True, False):
            cut_kernel[(rows,)](best, end, last, whole, listed, maximum, mass, *filters, BY_COUNT=by_count, **table)
    return best, end, last


def _drawn(logits: torch.Tensor, of_rows: tuple[torch.Tensor, ...], *, is_greedy: bool) -> torch.Tensor:
    """[R] int32. `of_rows`: temperature, min_p, best, end, last, seed, choice, position; not read where greedy."""
    rows, vocab = logits.shape
    out = torch.empty((rows,), dtype=torch.int32, device=logits.device)
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        chunks = triton.cdiv(vocab, CHUNK.value)
        noisy, scaled = logits.new_empty((2, rows, chunks)).unbind()
        token = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
        draw_kernel[(rows, chunks)](noisy, scaled, token, logits, *of_rows, vocab, logits.stride(0), chunks, IS_GREEDY=is_greedy, num_warps=_WARPS)
        pick_kernel[(rows,)](out, noisy, scaled, token, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return out
