"""References of the mixture-of-experts ops, on static shapes.

Owns: moe_topk, moe_experts.
Reads: `layers`.
Never: branches on routing; a token that is not valid reaches no expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from oarlock.runtime.reference.layers import silu_and_mul, wide

Pick = Callable[[torch.Tensor], torch.Tensor]


def moe_topk(router_logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token: softmax in float32, then the k largest, the lowest id first among equals.

    Shapes:
        router_logits: [num_tokens, num_experts]
        result:        weights [num_tokens, k] float32 (summing to 1 if `renormalise`), ids [num_tokens, k] int32
    """
    # Sorted by logits, so that an order of equals cannot depend on how exp rounds.
    ids = torch.sort(router_logits, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = wide(router_logits).softmax(-1).gather(1, ids)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), ids.to(torch.int32)


def moe_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Each token through its k experts (gate and up, silu_and_mul, down), added up by weight in float32.

    Sorts the token-expert pairs by expert, pads each expert's pairs to whole tiles, and multiplies tile by tile:

        pairs by expert   |0 0 0|1|3 3 3 3 3|        tile = 2
        tiles             |0 0|0 .|1 .|3 3|3 3|3 .|. .|    as many tiles as the worst routing needs

    Shapes:
        x, result:    [num_tokens, hidden_size]
        w13:          [num_experts, 2 * expert_size, hidden_size]  gate rows first
        w2:           [num_experts, hidden_size, expert_size]
        weights, ids: [num_tokens, k]  float32, int32
        valid:        [num_tokens]  bool; a token that is not valid gives 0, whatever it holds
    """
    return grouped_experts(x, w13.shape[0], w13.__getitem__, w2.__getitem__, weights, ids, valid)


def grouped_experts(
    x: torch.Tensor, num_experts: int, gate_up: Pick, down: Pick, weights: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """`moe_experts` over weights that are made when they are needed.

    `gate_up` and `down` give the weights of the experts [num_tiles] int64 that own the tiles, [num_tiles, out, in] in x's dtype.
    """
    num_tokens, k = ids.shape
    pairs = num_tokens * k
    tile = max(1, -(-pairs // num_experts))
    tiles = min(pairs, pairs // tile + num_experts)
    experts = torch.arange(num_experts, dtype=torch.int32, device=x.device)
    expert = torch.where(valid[:, None], ids, num_experts).reshape(pairs)  # num_experts: no expert
    order = torch.argsort(expert, stable=True)
    expert = expert[order]
    count = (expert[:, None] == experts).sum(0)
    padded = (count + tile - 1) // tile * tile
    end = padded.cumsum(0)
    # Where a sorted pair goes: its expert's first padded place plus its number within the expert; pairs of no expert share a last row.
    shift = torch.cat(((end - padded) - (count.cumsum(0) - count), count.new_zeros(1)))
    place = torch.arange(pairs, device=x.device) + shift[expert]
    place = torch.where(expert < num_experts, place, tiles * tile)
    gathered = x.new_zeros(tiles * tile + 1, x.shape[1]).index_put((place,), x[order // k])[:-1].view(tiles, tile, x.shape[1])
    owner = (torch.arange(tiles, device=x.device)[:, None] * tile >= end).sum(1).clamp(max=num_experts - 1)
    hidden = silu_and_mul(torch.bmm(gathered, gate_up(owner).transpose(1, 2)))
    out = torch.bmm(hidden, down(owner).transpose(1, 2)).reshape(tiles * tile, x.shape[1])
    out = torch.cat((out, out.new_zeros(1, out.shape[1])))
    place = torch.empty_like(place).index_put((order,), place)  # back to the order of tokens
    total = (wide(out[place]).view(num_tokens, k, x.shape[1]) * weights[..., None].to(wide(out).dtype)).sum(1)
    return torch.where(valid[:, None], total, 0).to(x.dtype)
