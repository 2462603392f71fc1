"""What a caller gets back, and how engine outputs become it: detokenise, stop strings, logprobs, choices.

Owns: the result records; text, stop and stream state of every open request.
Reads: `messages`, `sampling_params`, a tokenizer.
Never: sees blocks or tensors; formats HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oarlock.messages import ErrorInfo


@dataclass(slots=True)
class Logprob:
    """One token's log-probability under the raw distribution."""

    logprob: float | None  # finite, or None where the distribution gives the token no mass
    rank: int | None = None  # 1 is the most probable token
    decoded_token: str | None = None  # None when detokenisation is off
    bytes: tuple[int, ...] | None = None  # the token's exact bytes, which need not be whole UTF-8 characters


@dataclass(slots=True)
class CompletionOutput:
    """One choice. In a delta, `text`, `token_ids` and `logprobs` hold only what is new."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # over all tokens so far, when logprobs were computed
    logprobs: list[dict[int, Logprob]] | None = None  # one dict a token: the sampled token first, then the most probable
    finish_reason: str | None = None  # stop, length, abort or error; None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string; None for EOS
    lora_request: None = None


@dataclass(slots=True)
class RequestMetrics:
    """Wall-clock times of one request, in seconds of time.time(); None until they are known."""

    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def time_in_queue_s(self) -> float | None:
        return None if self.first_scheduled_s is None else max(0.0, self.first_scheduled_s - self.arrival_s)


@dataclass(slots=True)
class RequestOutput:
    """One request's result, or one delta of it (then `outputs` lists only choices with news)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # in the first delta that has them, and in every final result
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    num_generated_tokens: int = 0  # over every branch so far, discarded ones (best_of) included
    error: ErrorInfo | None = None
    lora_request: None = None
