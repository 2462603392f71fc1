"""Beam search: which (parent, token) pairs live on, which hypotheses are finished, and when the search is over.

Owns: `BeamSearch`, the finished hypotheses of one request.
Reads: `request`, `messages`.
Never: forks a branch or touches a block (the scheduler does); samples.

Score of a hypothesis = sum of log-probabilities / generated length (EOS included) ** length_penalty.
Source: HuggingFace-style beam search as GPU servers know it: 2 x width candidates a step, so that width of them survive even if
    width end. Differs: the length counts generated tokens only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oarlock.messages import FinishReason, PositionLogprobs
from oarlock.request import Branch, Request
from oarlock.scheduler.constraints import is_set
from oarlock.scheduler.stops import why_stop


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence."""

    token_ids: tuple[int, ...]  # generated tokens
    cumulative_logprob: float
    score: float
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Extension:
    """A live beam of the next step: `parent` (index among the present beams) continued by `token_id`."""

    parent: int
    token_id: int
    cumulative_logprob: float
    position: PositionLogprobs


def candidates_of(branch: Branch, position: PositionLogprobs) -> tuple[tuple[int, float], ...]:
    """(token id, logprob) pairs that this beam may continue with, best first: bans applied, 2 x width at most."""
    request = branch.request
    banned, allowed, mask = set(branch.banned), request.params.allowed_token_ids, branch.mask
    kept = [
        (token, logprob)
        for token, logprob in position.top
        if logprob is not None and token not in banned and (allowed is None or token in allowed) and (mask is None or is_set(mask, token))
    ]
    kept.sort(key=lambda c: (-c[1], c[0]))
    return tuple(kept[: 2 * request.width])


class BeamSearch:
    """The search of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.finished: list[Hypothesis] = []  # the width best, best first

    def score(self, cumulative_logprob: float, length: int) -> float:
        """`length`: generated tokens, at least 1. Never raises: a penalty beyond what floats hold gives 0 or -inf."""
        try:
            power = float(length) ** float(self._request.params.length_penalty)
        except OverflowError:
            power = math.inf
        return float(cumulative_logprob / power) if power else (-math.inf if cumulative_logprob < 0 else 0.0)

    def extend(self, beams: list[Branch]) -> list[Extension]:
        """One step of the search over beams that all have candidates: at most width extensions; none when the search is over.

        Ending candidates among the 2 x width best become finished hypotheses. Ties go to the lower parent, then token id.
        """
        request = self._request
        pool = sorted(
            (-((beam.cumulative_logprob or 0.0) + logprob), parent, token, logprob)
            for parent, beam in enumerate(beams)
            for token, logprob in beam.candidates or ()
        )
        live: list[Extension] = []
        for negative, parent, token, logprob in pool[: 2 * request.width]:
            beam = beams[parent]
            reason, stop_reason = why_stop(request, len(beam.tokens) + 1, token)
            position = self._position(beam, token, logprob)
            if reason == "stop":
                self._finish(beam, token, -negative, position, "stop", stop_reason)
            elif len(live) < request.width:
                live.append(Extension(parent, token, -negative, position))
        if live and len(beams[live[0].parent].tokens) + 1 >= request.max_total:
            for e in live:
                self._finish(beams[e.parent], e.token_id, e.cumulative_logprob, e.position, "length", None)
            return []
        if live and self._is_over(live, len(beams[live[0].parent].tokens) + 1 - request.num_prompt):
            return []
        return live

    def _position(self, beam: Branch, token: int, logprob: float) -> PositionLogprobs:
        shown = beam.tops
        rank = next((i for i, (t, _) in enumerate(shown) if t == token), len(shown)) + 1
        count = self._request.params.logprobs or 0
        return PositionLogprobs(token, logprob, rank, shown if count < 0 else shown[:count])

    def _finish(
        self, beam: Branch, token: int, total: float, position: PositionLogprobs, reason: FinishReason, stop_reason: int | None
    ) -> None:
        tokens = (*beam.tokens[self._request.num_prompt :], token)
        score = self.score(total, len(tokens))
        self.finished.append(Hypothesis(tokens, total, score, (*beam.logprobs, position), reason, stop_reason))
        self.finished.sort(key=lambda h: (-h.score, h.token_ids))
        del self.finished[self._request.width :]

    def _is_over(self, live: list[Extension], length: int) -> bool:
        request = self._request
        if len(self.finished) < request.width:
            return False
        early = request.params.early_stopping
        if early is True:
            return True
        if early == "never" and request.params.length_penalty > 0:
            length = request.max_total - request.num_prompt  # scores are negative: the longest is the best still reachable
        return self.finished[-1].score >= self.score(live[0].cumulative_logprob, length)

    def best(self) -> list[Hypothesis]:
        """The n best, best first; fewer when the search found fewer."""
        return self.finished[: self._request.params.n]
