"""Adds deltas up to a whole result, and chooses the n best of best_of.

Owns: the sum of one request's deltas.
Reads: `frontend.outputs`, `sampling_params`.
Never: detokenises; sees engine outputs.
"""

from __future__ import annotations

import math
from dataclasses import replace

from oarlock.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from oarlock.sampling_params import SamplingParams


class Collector:
    """One request's result in the making. `result` may be read at any time."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._last: RequestOutput | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._choices: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, delta: RequestOutput) -> bool:
        """Add the next delta; True when it was the last one."""
        self._last = delta
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        for news in delta.outputs:
            choice = self._choices.get(news.index)
            if choice is None:
                choice = self._choices[news.index] = CompletionOutput(news.index, logprobs=None if self._params.logprobs is None else [])
                self._texts[news.index] = []
            self._texts[news.index].append(news.text)
            choice.token_ids.extend(news.token_ids)
            if choice.logprobs is not None and news.logprobs is not None:
                choice.logprobs.extend(news.logprobs)
            if news.cumulative_logprob is not None:
                choice.cumulative_logprob = news.cumulative_logprob
            choice.finish_reason, choice.stop_reason = news.finish_reason, news.stop_reason
        return delta.finished

    def result(self) -> RequestOutput:
        """Everything so far, as a record of its own. Choices are numbered 0 to n - 1, the best first when best_of > n."""
        assert self._last is not None, "no delta yet"
        choices = [replace(self._choices[index], text="".join(self._texts[index])) for index in sorted(self._choices)]
        params = self._params
        if params.num_branches > params.n and not params.use_beam_search:
            choices.sort(key=lambda choice: -math.inf if choice.cumulative_logprob is None else choice.cumulative_logprob, reverse=True)
            choices = choices[: params.n]
        for index, choice in enumerate(choices):
            choice.index = index
        return replace(self._last, outputs=choices, prompt_logprobs=self._prompt_logprobs)
