"""When a branch ends, and which tokens it may not sample.

Owns: the order of the checks.
Reads: `request`.
Never: looks at text (stop strings are the front end's) or changes a branch.
"""

from __future__ import annotations

from oarlock.messages import FinishReason
from oarlock.request import Branch, Request


def why_stop(request: Request, num_tokens: int, token: int) -> tuple[FinishReason | None, int | None]:
    """(finish reason or None, stop reason) after `token` became the last of `num_tokens` tokens, prompt included.

    In this order: min_tokens gate, EOS, stop token ids, length (model length and max_tokens are one limit).
    """
    if num_tokens - request.num_prompt >= request.params.min_tokens:
        if token in request.eos_ids:
            return "stop", None
        if token in request.stop_ids:
            return "stop", token
    return ("length" if num_tokens >= request.max_total else None), None


def banned_tokens(branch: Branch) -> tuple[int, ...]:
    """Token ids that the next sample may not be: EOS and stop ids before min_tokens, bad words.

    Counts promised tokens; bad words of several tokens need every token on the host, for which such a branch waits.
    """
    request = branch.request
    banned = request.bad_tokens
    if len(branch.tokens) + branch.num_pending - request.num_prompt < request.params.min_tokens:
        banned += request.stop_ban
    for words in request.bad_tails:
        head = len(words) - 1
        if branch.num_output >= head and tuple(branch.tokens[-head:]) == words[:-1]:
            banned += (words[-1],)
    return tuple(dict.fromkeys(banned)) if len(banned) > 1 else banned
