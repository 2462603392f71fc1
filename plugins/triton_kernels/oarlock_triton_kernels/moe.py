"""Mixtures of experts: which experts a token goes to, and every token through its experts in one product over tokens sorted by expert.

Owns: moe_topk, moe_experts, moe_experts_int4, moe_experts_int8, moe_experts_fp8.
Reads: `codes` (packing and the inner loop), `linear_codes.tile_of`, `logits.rank_word`.
Never: branches on routing on the host; lets a token that is not valid reach an expert.

Legend: T tokens, E experts, A experts of a token, R = T A pairs of a token and an expert, H hidden size, S size of an expert, BM pairs of a tile,
L tiles: as many as the worst routing needs, K inputs of a product (of which I are columns of what is given), G runs of inputs that share a scale.

    count      [E]     pairs of each expert
    place      [E]     pairs by expert, each expert's filled up to whole tiles
    reorder    [R, K]  where activation order scattered each expert's groups: before gate_up, and before down
    gate_up    [L, S]  silu(x gate) * (x up), of each pair
    down       [L, H]  that times down
    combine    [T, H]  the sum of a token's pairs, by weight

    pairs by expert   |0 0 0|1|3 3 3 3 3|        BM = 2
    tiles             |0 0|0 .|1 .|3 3|3 3|3 .|. .|

Source: the sorted, padded layout is that of MegaBlocks, Gale et al. 2022, arXiv:2211.15841, section 5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels import codes
from oarlock_triton_kernels.codes import PackedCodes, product
from oarlock_triton_kernels.linear_codes import tile_of
from oarlock_triton_kernels.logits import rank_word
from oarlock_triton_kernels.sampling import value_of
from oarlock_triton_kernels.stepwise import STEPWISE

_PAIRS = tl.constexpr(2048)  # pairs that are looked at together
_TILE = 2048  # numbers of a program that adds up, or logits of one that chooses
_COLUMNS = 1024  # at most
_LEAST = tl.constexpr(-0x8000000000000000)


# ---------------------------------------------------------------- routing


@triton.jit(**STEPWISE)
def topk_kernel(
    weights_ptr, ids_ptr, logits_ptr, tokens, experts, k, stride_t,
    RENORMALISE: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(T / ROWS),). The A experts of each token: the largest logits, the lowest id first among equals; weights by softmax over all.

    weights_ptr: [T, A]  float32, contiguous; summing to 1 if RENORMALISE
    ids_ptr:     [T, A]  int32, contiguous; below E whatever the logits are
    logits_ptr:  [T, E]  strides (stride_t, 1)
    EXPERTS, TOP: E and `k` rounded up to powers of two

    Reference: oarlock.runtime.reference.moe.moe_topk.
    Cost: (8 + 2 A) T E operations; T E numbers and 8 T A bytes moved.
    Bound: latency: A reductions that wait for each other.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, place = tl.arange(0, EXPERTS)[None, :], tl.arange(0, TOP)[None, :]
    inside = (row < tokens)[:, None] & (expert < experts)
    x = tl.load(logits_ptr + (row.to(tl.int64) * stride_t)[:, None] + expert, mask=inside, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 1)[:, None]
    mass = tl.sum(tl.exp(x - best), 1)[:, None]
    word = tl.where(expert < experts, rank_word(x, expert), _LEAST)
    weights, ids = tl.zeros([ROWS, TOP], tl.float32), tl.zeros([ROWS, TOP], tl.int32)
    for n in range(k):
        top = tl.max(word, 1)[:, None]
        weights = tl.where(place == n, tl.exp(value_of((top >> 32).to(tl.int32)) - best) / mass, weights)
        ids = tl.where(place == n, 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32), ids)
        word = tl.where(word == top, _LEAST, word)
    if RENORMALISE:
        weights /= tl.sum(weights, 1)[:, None]
    at = row[:, None] * k + place
    inside = (row < tokens)[:, None] & (place < k)
    tl.store(weights_ptr + at, weights, mask=inside)
    tl.store(ids_ptr + at, ids, mask=inside)


def moe_topk(router_logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As the registry's."""
    tokens, experts = router_logits.shape
    weights = torch.empty((tokens, k), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty((tokens, k), dtype=torch.int32, device=router_logits.device)
    if weights.numel():
        logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
        columns = triton.next_power_of_2(experts)
        rows = max(1, min(_TILE // columns, triton.next_power_of_2(tokens)))
        topk_kernel[(triton.cdiv(tokens, rows),)](
            weights, ids, logits, tokens, experts, k, logits.stride(0), RENORMALISE=renormalise, ROWS=rows, EXPERTS=columns, TOP=triton.next_power_of_2(k)
        )
    return weights, ids


@triton.jit
def _is_mine(ids_ptr, valid_ptr, first, pairs, k, expert):
    """Which of the pairs from `first` on go to `expert`, [_PAIRS] int32."""
    pair = first + tl.arange(0, _PAIRS)
    of = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    is_valid = tl.load(valid_ptr + pair // k, mask=pair < pairs, other=False)
    return ((of == expert) & (is_valid != 0)).to(tl.int32)


@triton.jit(**STEPWISE)
def count_pairs_kernel(counts_ptr, ids_ptr, valid_ptr, pairs, k):
    """Grid: (E,). How many pairs go to each expert.

    counts_ptr: [E]  int32
    ids_ptr:    [T, A]  int32, contiguous
    valid_ptr:  [T]  bool

    Reference: `count` in oarlock.runtime.reference.moe.grouped_experts.
    Cost: 3 E R operations; 5 E R bytes from the cache: every expert looks at every pair, and no order of atomics is left to chance.
    Bound: latency, R / 2048 reductions.
    """
    expert, count = tl.program_id(0), 0
    for first in range(0, pairs, _PAIRS):
        count += tl.sum(_is_mine(ids_ptr, valid_ptr, first, pairs, k, expert), 0)
    tl.store(counts_ptr + expert, count)


@triton.jit(**STEPWISE)
def place_pairs_kernel(
    places_ptr, owners_ptr, counts_ptr, ids_ptr, valid_ptr, pairs, k, experts, tiles,
    BM: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Grid: (E,). Writes each expert's pairs, in their order, into its tiles.

    places_ptr: [L, BM]  int32: the pair of each place, R where a tile is filled up
    owners_ptr: [L]  int32: the expert of each tile, -1 for a tile that nobody needs
    counts_ptr: [E]  int32: of `count_pairs_kernel`
    ids_ptr:    [T, A]  int32, contiguous
    valid_ptr:  [T]  bool
    EXPERTS:    E rounded up to a power of two

    Reference: `place` and `owner` in oarlock.runtime.reference.moe.grouped_experts.
    Cost: 4 E R operations; 5 E R bytes from the cache, 4 L BM written.
    Bound: latency, R / 2048 sums that wait for each other.
    """
    expert, every = tl.program_id(0), tl.arange(0, EXPERTS)
    needed = (tl.load(counts_ptr + every, mask=every < experts, other=0) + BM - 1) // BM
    first_tile = tl.sum(tl.where(every < expert, needed, 0), 0)
    count = tl.load(counts_ptr + expert)
    own_tiles = (count + BM - 1) // BM
    at = places_ptr + first_tile * BM
    seen = 0
    for first in range(0, pairs, _PAIRS):
        mine = _is_mine(ids_ptr, valid_ptr, first, pairs, k, expert)
        tl.store(at + seen + tl.cumsum(mine, 0) - 1, first + tl.arange(0, _PAIRS), mask=mine > 0)
        seen += tl.sum(mine, 0)
    lane = tl.arange(0, BM)
    tl.store(at + count + lane, tl.zeros([BM], tl.int32) + pairs, mask=count + lane < own_tiles * BM)
    end = tl.where(expert == experts - 1, tiles, first_tile + own_tiles)
    for tile in range(first_tile, end):
        tl.store(owners_ptr + tile, tl.where(tile < first_tile + own_tiles, expert, -1))


# ---------------------------------------------------------------- products


@triton.jit(**STEPWISE)
def reorder_kernel(
    out_ptr, x_ptr, order_ptr, ids_ptr, valid_ptr, pairs, k, each, in_size, width, stride_x,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(R / ROWS), ceil(K / COLUMNS)). A pair's inputs in the order in which its expert's weight has them; 0 where that has none.

    Only where activation order scattered the groups of each expert in its own way: a launch before each product, which then reads whole lines.

    out_ptr:   [R, K]  model dtype, contiguous; pairs of tokens that are not valid are not written
    x_ptr:     [R / each, I]  strides (stride_x, 1)
    order_ptr: [E, K]  int32, contiguous; I for none
    ids_ptr:   [T, A]  int32, contiguous
    valid_ptr: [T]  bool

    Reference: `groups` of `moe_experts_int4` in core's schemes.
    Cost: 0 FLOP; R K (2 m + 4) bytes for numbers of m bytes.
    Bound: memory: what is gathered lies in one line of some kilobytes.
    """
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_valid = tl.load(valid_ptr + pair // k, mask=pair < pairs, other=False) != 0
    inside = is_valid[:, None] & (column < width)[None, :]
    expert = tl.load(ids_ptr + pair, mask=is_valid, other=0).to(tl.int64)
    source = tl.load(order_ptr + (expert * width)[:, None] + column[None, :], mask=inside, other=in_size)
    x = tl.load(x_ptr + ((pair // each).to(tl.int64) * stride_x)[:, None] + source, mask=inside & (source < in_size), other=0.0)
    tl.store(out_ptr + (pair.to(tl.int64) * width)[:, None] + column[None, :], x, mask=inside)


def columns_of(x: torch.Tensor, weight: PackedCodes, ids: torch.Tensor, valid: torch.Tensor, each: int) -> tuple[torch.Tensor, int]:
    """(x with its columns where the weight's inputs are, pairs of a row): x has a row for each `each` pairs, and where experts differ one for each pair."""
    if weight.order is None or weight.order.dim() == 1:
        return codes.columns_of(x, weight), each
    pairs, width = ids.numel(), weight.order.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    rows = max(1, min(_TILE // columns, triton.next_power_of_2(pairs)))
    reorder_kernel[(triton.cdiv(pairs, rows), triton.cdiv(width, columns))](
        out, x, weight.order, ids, valid, pairs, ids.shape[1], each, x.shape[1], width, x.stride(0), ROWS=rows, COLUMNS=columns
    )
    return out, 1


@triton.jit(**STEPWISE)
def gate_up_kernel(
    hidden_ptr, x_ptr, places_ptr, owners_ptr, codes_ptr, scales_ptr, zeros_ptr, offsets_ptr,
    pairs, each, in_size, size, steps, stride_x, stride_ce, stride_cn, stride_se,
    KIND: tl.constexpr, RUN: tl.constexpr, ZERO: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr, EVEN: tl.constexpr,
    STEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid: (L, ceil(S / (BN / 2))). silu(x gate) * (x up) of each pair of a tile, whose tokens are gathered as they are read.

    Half of a program's outputs are gates and half the ups that belong to them, so that their product needs no second kernel.

    hidden_ptr: [R, S]  model dtype, contiguous
    x_ptr:      [R / each, H]  strides (stride_x, 1): a row for A pairs, or for one where `reorder_kernel` made it
    places_ptr: [L, BM]  int32; owners_ptr: [L]  int32: of `place_pairs_kernel`
    codes_ptr:  [E, 2 S, H]  strides (stride_ce, stride_cn, 1), of words for int4: see `codes.product`
    scales_ptr, zeros_ptr, offsets_ptr: [E, G, 2 S]  stride stride_se over experts, else contiguous

    Reference: oarlock.runtime.reference.moe.moe_experts, its first product and silu_and_mul.
    Cost: 4 R H S FLOP; the weights of each expert that is needed, once, R H + R S numbers.
    Bound: memory while an expert has fewer than some 100 tokens, then the matrix units.
    """
    tile = tl.program_id(0)
    expert = tl.load(owners_ptr + tile).to(tl.int64)
    if expert >= 0:
        HALF: tl.constexpr = BN // 2
        pair = tl.load(places_ptr + tile * BM + tl.arange(0, BM))
        rows = (tl.minimum(pair, pairs - 1) // each).to(tl.int64) * stride_x
        lane = tl.arange(0, BN)
        outs = tl.minimum(tl.program_id(1) * HALF + lane % HALF, size - 1) + lane // HALF * size
        both = product(
            x_ptr, rows, codes_ptr + expert * stride_ce, outs, scales_ptr + expert * stride_se, zeros_ptr + expert * stride_se,
            offsets_ptr + expert * stride_se, 0, steps, in_size, 2 * size, stride_cn, KIND, RUN, ZERO, HAS_ZEROS, HAS_OFFSETS, EVEN, STEP,
        )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(both, [2, HALF, BM]), (1, 2, 0)))
        column = tl.program_id(1) * HALF + tl.arange(0, HALF)
        inside = (pair < pairs)[None, :] & (column < size)[:, None]
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(hidden_ptr + pair.to(tl.int64)[None, :] * size + column[:, None], hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit(**STEPWISE)
def down_kernel(
    out_ptr, hidden_ptr, places_ptr, owners_ptr, codes_ptr, scales_ptr, zeros_ptr, offsets_ptr,
    pairs, in_size, out_size, steps, stride_h, stride_ce, stride_cn, stride_se,
    KIND: tl.constexpr, RUN: tl.constexpr, ZERO: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr, EVEN: tl.constexpr,
    STEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid: (L, ceil(H / BN)). Each pair's hidden numbers times its expert's down projection.

    out_ptr:    [R, H]  model dtype, contiguous
    hidden_ptr: [R, S]  strides (stride_h, 1)
    places_ptr: [L, BM]  int32; owners_ptr: [L]  int32: of `place_pairs_kernel`
    codes_ptr:  [E, H, S]  strides (stride_ce, stride_cn, 1), of words for int4: see `codes.product`
    scales_ptr, zeros_ptr, offsets_ptr: [E, G, H]  stride stride_se over experts, else contiguous

    Reference: oarlock.runtime.reference.moe.moe_experts, its second product.
    Cost: 2 R H S FLOP; the weights of each expert that is needed, once, R H + R S numbers.
    Bound: as `gate_up_kernel`.
    """
    tile = tl.program_id(0)
    expert = tl.load(owners_ptr + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(places_ptr + tile * BM + tl.arange(0, BM))
        rows = tl.minimum(pair, pairs - 1).to(tl.int64) * stride_h
        column = tl.program_id(1) * BN + tl.arange(0, BN)
        total = product(
            hidden_ptr, rows, codes_ptr + expert * stride_ce, tl.minimum(column, out_size - 1), scales_ptr + expert * stride_se,
            zeros_ptr + expert * stride_se, offsets_ptr + expert * stride_se, 0, steps, in_size, out_size, stride_cn,
            KIND, RUN, ZERO, HAS_ZEROS, HAS_OFFSETS, EVEN, STEP,
        )  # fmt: skip
        inside = (pair < pairs)[None, :] & (column < out_size)[:, None]
        tl.store(out_ptr + pair.to(tl.int64)[None, :] * out_size + column[:, None], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(**STEPWISE)
def combine_kernel(out_ptr, parts_ptr, weights_ptr, valid_ptr, tokens, k, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid: (ceil(T / ROWS), ceil(H / COLUMNS)). The sum of a token's pairs, by weight, in float32 and in their order; 0 for a token that is not valid.

    out_ptr:     [T, H]  model dtype, contiguous
    parts_ptr:   [T, A, H]  model dtype, contiguous
    weights_ptr: [T, A]  float32, contiguous
    valid_ptr:   [T]  bool

    Reference: the last lines of oarlock.runtime.reference.moe.grouped_experts.
    Cost: 2 R H FLOP; (R + T) H numbers moved.
    Bound: memory.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = token < tokens
    is_valid = tl.load(valid_ptr + token, mask=is_token, other=False) != 0
    inside = is_valid[:, None] & (column < size)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for n in range(k):
        pair = token.to(tl.int64) * k + n
        weight = tl.load(weights_ptr + pair, mask=is_valid, other=0.0)
        total += weight[:, None] * tl.load(parts_ptr + (pair * size)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    at = (token.to(tl.int64) * size)[:, None] + column[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & (column < size)[None, :])


# ---------------------------------------------------------------- launchers


def moe_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """As the registry's."""
    return moe_experts_of_codes(x, codes.plain(w13), codes.plain(w2), weights, ids, valid)


def placed(ids: torch.Tensor, valid: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs of each tile of `rows` [L, rows] int32, expert of each tile [L] int32) for ids [T, A] int32 and valid [T] bool, both contiguous."""
    pairs, k = ids.numel(), ids.shape[1]
    tiles = min(pairs, pairs // rows + experts)
    counts, places, owners = (torch.empty(shape, dtype=torch.int32, device=ids.device) for shape in ((experts,), (tiles, rows), (tiles,)))
    count_pairs_kernel[(experts,)](counts, ids, valid, pairs, k)
    place_pairs_kernel[(experts,)](places, owners, counts, ids, valid, pairs, k, experts, tiles, BM=rows, EXPERTS=triton.next_power_of_2(experts))
    return places, owners


def moe_experts_of_codes(
    x: torch.Tensor, w13: PackedCodes, w2: PackedCodes, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """As the registry's moe_experts_int4, moe_experts_int8 and moe_experts_fp8."""
    (tokens, k), experts, size, out_size = ids.shape, w13.codes.shape[0], w13.out_size // 2, w2.out_size
    out, pairs = torch.empty((tokens, out_size), dtype=x.dtype, device=x.device), tokens * k
    if not pairs:
        return out
    ids, weights, valid = ids.contiguous(), weights.contiguous(), valid.contiguous()
    x, each = columns_of(x, w13, ids, valid, k)
    first, second = codes.form_of(w13, x.shape[1]), codes.form_of(w2, w2.order.shape[-1] if w2.order is not None else size)
    tile, tile2 = (tile_of(triton.cdiv(pairs, experts), x.element_size(), form) for form in (first, second))
    rows = min(tile["BM"], tile2["BM"])
    tile, tile2 = ({**of, "BM": rows} for of in (tile, tile2))
    places, owners = placed(ids, valid, experts, rows)
    tiles = len(owners)
    hidden = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    gate_up_kernel[(tiles, triton.cdiv(size, tile["BN"] // 2))](
        hidden, x, places, owners, w13.codes, *codes.tables_of(w13), pairs, each, x.shape[1], size, triton.cdiv(x.shape[1], first["STEP"]),
        x.stride(0), *w13.codes.stride()[:2], w13.scales.stride(0), **first, **tile,
    )  # fmt: skip
    hidden, _ = columns_of(hidden, w2, ids, valid, 1)
    parts = torch.empty((pairs, out_size), dtype=x.dtype, device=x.device)
    down_kernel[(tiles, triton.cdiv(out_size, tile2["BN"]))](
        parts, hidden, places, owners, w2.codes, *codes.tables_of(w2), pairs, hidden.shape[1], out_size, triton.cdiv(hidden.shape[1], second["STEP"]),
        hidden.stride(0), *w2.codes.stride()[:2], w2.scales.stride(0), **second, **tile2,
    )  # fmt: skip
    columns = min(_COLUMNS, triton.next_power_of_2(out_size))
    together = max(1, min(_TILE // columns, triton.next_power_of_2(tokens)))
    combine_kernel[(triton.cdiv(tokens, together), triton.cdiv(out_size, columns))](
        out, parts, weights, valid, tokens, k, out_size, ROWS=together, COLUMNS=columns
    )
    return out
