"""`SamplingParams`: how one request's tokens are chosen, validated before anything costs work.

Owns: the fields, their ranges, and the mapping of older and foreign names.
Reads: `errors`.
Never: knows a model (vocabulary checks are `frontend.inputs`'), HTTP or torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

GREEDY_EPSILON = 1e-5  # temperatures below this are greedy
MAX_BRANCHES = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Placeholder body: fields are final, validation follows in this file."""

    n: int = 1
    best_of: int | None = None  # None: n
    presence_penalty: float = 0.0  # output tokens only, [-2, 2]
    frequency_penalty: float = 0.0  # output tokens only, [-2, 2]
    repetition_penalty: float = 1.0  # prompt and output, > 0
    temperature: float = 1.0
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 and -1: off (normalised to 0)
    min_p: float = 0.0  # [0, 1]
    seed: int | None = None
    use_beam_search: bool = False  # width is best_of, else n
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None  # entries beside the sampled token; -1: whole vocabulary
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: tuple[Callable[..., Any], ...] = ()  # in-process LLM only
    truncate_prompt_tokens: int | None = None  # keep the last k
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias in [-100, 100])
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # set by the frontend from bad_words
    skip_reading_prefix_cache: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def num_branches(self) -> int:
        """Branches the engine forks: best_of, else n (the width, under beam search)."""
        return self.best_of if self.best_of is not None else self.n
