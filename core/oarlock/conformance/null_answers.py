"""What the null device answers: the formula, and the command and the route that apply it.

Owns: `next_token`, the made-up distribution, `oarlock null-tokens`, GET /null/tokens.
Reads: `backend_api`.
Never: knows a block or a step.

The next token after tokens t0 … t(n-1) is (t0 + … + t(n-1) + n) mod vocab_size.
The logit of token v is minus its distance from there, -((v - next) mod vocab_size): the next token has 0, the one after it -1, …
A prompt's vector is made of the token that would follow it: see `vector`.
No noise is added, so temperature, top_p, top_k, min_p and seed change nothing; bans, biases and penalties act on the logits.

    vocab_size 100, prompt 5 6 7:   18 + 3 = 21,   39 + 4 = 43,   82 + 5 = 87,   169 + 6 = 75
"""

from __future__ import annotations

import argparse
import math
import struct
from collections.abc import Sequence

from oarlock.backend_api import JsonReply, Route, RouteCall, RouteError, RouteServer


def next_token(total: int, count: int, vocab_size: int) -> int:
    """The token after `count` tokens whose sum is `total`."""
    return (total + count) % vocab_size


def answer(prompt: Sequence[int], max_tokens: int, vocab_size: int) -> list[int]:
    """Generated tokens of a plain request with ignore_eos."""
    total, count, found = sum(prompt), len(prompt), []
    for _ in range(max_tokens):
        found.append(next_token(total, count, vocab_size))
        total, count = total + found[-1], count + 1
    return found


def logprob(token: int, best: int, vocab_size: int) -> float:
    """Log-softmax of the logits above."""
    return -((token - best) % vocab_size) - math.log((1 - math.exp(-vocab_size)) / (1 - math.exp(-1)))


def vector(prompt: Sequence[int], size: int, dimensions: int | None, vocab_size: int) -> bytes:
    """A made-up vector of length 1, whatever was asked for: entry d is proportional to 1 + (next token + d) mod vocab_size. As float32."""
    best = next_token(sum(prompt), len(prompt), vocab_size)
    entries = [1.0 + (best + d) % vocab_size for d in range(dimensions or size)]
    length = math.sqrt(sum(entry * entry for entry in entries))
    return struct.pack(f"<{len(entries)}f", *(entry / length for entry in entries))


def main(arguments: Sequence[str]) -> int:
    """`oarlock null-tokens PROMPT`: the answer as one line of token ids."""
    parser = argparse.ArgumentParser(prog="oarlock null-tokens", description="Print the tokens that --device null answers to a prompt.")
    parser.add_argument("prompt", metavar="IDS", help="token ids with commas: 5,6,7")
    parser.add_argument("--vocab-size", type=int, required=True, help="the model's")
    parser.add_argument("--max-tokens", type=int, default=16, help="how many [16]")
    given = parser.parse_args(arguments)
    if given.vocab_size < 1:
        parser.error("--vocab-size must be at least 1")
    try:
        prompt = _ids(given.prompt)
    except ValueError:
        parser.error(f"{given.prompt!r} is no list of token ids such as 5,6,7")
    print(",".join(map(str, answer(prompt, given.max_tokens, given.vocab_size))))
    return 0


def add_route(server: RouteServer) -> None:
    """GET /null/tokens?prompt=5,6,7&max_tokens=4: the tokens to expect of the server that answers."""

    async def null_tokens(call: RouteCall) -> JsonReply:
        try:
            ids, max_tokens = _ids(call.query.get("prompt", "")), int(call.query.get("max_tokens", "16"))
        except ValueError:
            raise RouteError.invalid("prompt", "Give prompt, a list of token ids such as 5,6,7, and max_tokens, a whole number.") from None
        return JsonReply({"tokens": answer(ids, min(max_tokens, server.max_model_len), server.vocab_size)})

    server.add(Route("GET", "/null/tokens", null_tokens))


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
