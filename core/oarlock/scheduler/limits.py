"""Whether a request can ever run here. Asked once, before it waits.

Owns: the checks and their messages.
Reads: `config.SchedulerConfig`, `KVCacheManager` sizes, `shapes.ShapePolicy`.
Never: looks at what is free now.
"""

from __future__ import annotations

from oarlock.config.sections import SchedulerConfig
from oarlock.errors import CONTEXT_IS
from oarlock.kv.manager import KVCacheManager
from oarlock.messages import ErrorInfo
from oarlock.request import Request
from oarlock.shapes import ShapePolicy


class Limits:
    """What the cache, the shapes and the configuration allow."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, policy: ShapePolicy, max_model_len: int, budget: int) -> None:
        self._config, self._manager, self._policy = config, manager, policy
        self._max_model_len = max_model_len
        longest = policy.max_chunk()
        self.whole = budget if longest is None else min(budget, longest)  # most tokens of one row in one step

    def with_lookahead(self, num_tokens: int) -> int:
        """Slots to hold when a row ends at `num_tokens`."""
        return max(num_tokens, min(num_tokens + self._config.num_lookahead_slots, self._max_model_len))

    def fit(self, request: Request) -> None:
        """Where the request left its length open, end it where the cache or the shapes do. O(log context length)."""
        low, high = min(request.num_prompt + 1, request.max_total), request.max_total
        while request.params.max_tokens is None and low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(request, middle) else (low, middle - 1)
        request.max_total = high

    def refusal(self, request: Request) -> ErrorInfo | None:
        """Why this request can never run, or None."""
        length = request.num_prompt
        most = self._max_model_len - (1 if request.params.max_tokens != 0 and request.source.pooling is None else 0)
        if length > most:
            return ErrorInfo(
                f"the prompt has {length} tokens, but at most {most} fit: {CONTEXT_IS} {self._max_model_len} tokens, output included; shorten it",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        if not self._config.enable_chunked_prefill and length > self.whole:
            return ErrorInfo(
                f"the prompt has {length} tokens, but one step holds {self.whole} and chunked prefill is off; "
                "shorten it, or start the server with chunked prefill or a larger max_num_batched_tokens",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        if request.is_beam and request.width > self._config.max_num_seqs:
            return ErrorInfo(
                f"the beam width is {request.width}, but max_num_seqs is {self._config.max_num_seqs}; lower best_of (or n)",
                param="best_of" if request.params.best_of is not None else "n",
            )
        return self._cache_refusal(request)

    def longest_request(self) -> int:
        """Tokens, prompt and output together, of the longest request of one branch that can run here. O(log context length)."""
        low, high = 0, self._max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            tokens = self.with_lookahead(max(middle - 1, 1))
            fits = self._branch_blocks(tokens) <= self._manager.num_blocks and self._policy.fits(1, (), self._manager.width(tokens))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _held(self, request: Request, total: int) -> int:
        """Slots of one branch that ends with `total` tokens: the last token's KV is not needed."""
        return self.with_lookahead(max(request.num_prompt, total - 1))

    def _fits(self, request: Request, total: int) -> bool:
        tokens = self._held(request, total)
        return self.blocks_needed(request, tokens) <= self._manager.num_blocks and self._policy.fits(1, (), self._manager.width(tokens))

    def _cache_refusal(self, request: Request) -> ErrorInfo | None:
        if self._fits(request, request.max_total):
            return None
        tokens = self._held(request, request.max_total)
        width = self._manager.width(tokens)
        needed, available = self.blocks_needed(request, tokens), self._manager.num_blocks
        what = f"the prompt of {request.num_prompt} tokens with max_tokens {request.max_total - request.num_prompt}"
        if request.is_beam:
            what += f" and {request.width} beams"
        if needed > available:
            problem = f"needs {needed} KV cache blocks of {self._manager.block_size} tokens at one time, but {available} are available"
        else:
            problem = f"needs a block table of {width} entries, more than this device's largest shape"
        return ErrorInfo(f"{what} {problem}; shorten the prompt or lower max_tokens", param="max_tokens", code="kv_cache_exceeded")

    def blocks_needed(self, request: Request, tokens: int) -> int:
        """Most blocks that the request must hold at one time: those of one branch, or of all beams, which share the prompt."""
        manager, needed = self._manager, self._branch_blocks(tokens)
        if request.is_beam:
            full_groups = sum(w is None for w in manager.windows)
            needed = request.width * needed - (request.width - 1) * full_groups * (request.num_prompt // manager.block_size)
        return needed

    def _branch_blocks(self, tokens: int) -> int:
        span = 1 + self._config.num_lookahead_slots if self._config.enable_chunked_prefill else tokens
        return self._manager.blocks_at_once(tokens, span)
