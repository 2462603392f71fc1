"""References of what happens to logits before a token is drawn, and of what is reported about them.

Owns: apply_penalties, apply_bias, apply_mask, logprobs.
Reads: nothing of ours.
Never: lets one row's history touch another row.
"""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Repetition over prompt and output, then frequency and presence over the output. Neutral rows are unchanged bit for bit.

    Shapes:
        logits, result:        [num_rows, vocab_size]  float32
        history:               [num_rows, length]  int32; [:prompt_len] the prompt, [prompt_len:total_len] the output, then garbage
        prompt_len, total_len: [num_rows]  int32
        presence, frequency, repetition: [num_rows]  float32; neutral 0, 0, 1
    """
    at = torch.arange(history.shape[1], dtype=torch.int32, device=logits.device)
    known = at < total_len[:, None]
    ids = torch.where(known, history, 0).long()  # garbage may be no token id at all
    zeros = torch.zeros_like(logits)
    seen = zeros.scatter_add(1, ids, known.to(logits.dtype)) > 0
    count = zeros.scatter_add(1, ids, (known & (at >= prompt_len[:, None])).to(logits.dtype))
    factor = repetition[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - (frequency[:, None] * count + presence[:, None] * (count > 0))


def apply_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add `values` at `ids`; -inf bans a token; (0, 0.0) is padding. logits [num_rows, vocab_size]; ids, values [num_rows, n]."""
    return logits.scatter_add(1, ids.long(), values.to(logits.dtype))


def apply_mask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """-inf where a token's bit is 0. Bit v % 32 of word v // 32 belongs to token v.

    Shapes:
        logits, result: [num_rows, vocab_size]  float32
        bitmask:        [num_rows, ceil(vocab_size / 32)]  int32
    """
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = torch.bitwise_and(torch.bitwise_right_shift(bitmask[..., None], bit), 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(allowed != 0, logits, -torch.inf)


_SMALL_K = 32


def logprobs(logits: torch.Tensor, targets: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the raw logits: of one target a row with its rank, and of the k best, the lowest id first among equals.

    Shapes:
        logits:  [num_rows, vocab_size]  float32
        targets: [num_rows]  int32
        result:  target_logprob [num_rows] float32, rank [num_rows] int32 (1 + the number of strictly greater logits),
                 top_ids [num_rows, k] int32, top_logprobs [num_rows, k] float32; k may be 0
    """
    scores = logits.log_softmax(-1)
    targets = targets.long()[:, None]
    rank = (logits > logits.gather(1, targets)).sum(-1) + 1
    if k > _SMALL_K:
        top = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    else:
        # k passes of max are much cheaper than a sort, and unlike topk they order equals.
        rest = logits.clamp(min=torch.finfo(logits.dtype).min)  # so that -inf marks what was taken, and nothing else
        found = []
        for _ in range(k):
            found.append(rest.max(-1, keepdim=True).indices)
            rest = rest.scatter(1, found[-1], -torch.inf)
        top = torch.cat(found, 1) if found else targets[:, :0]
    return scores.gather(1, targets).squeeze(1), rank.to(torch.int32), top.to(torch.int32), scores.gather(1, top)
