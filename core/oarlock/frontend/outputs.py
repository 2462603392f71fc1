"""What a caller gets back, and how engine outputs become it: detokenise, stop strings, logprobs, choices.

Owns: the result records; text, stop and stream state of every open request.
Reads: `messages`, `sampling_params`, a tokenizer.
Never: sees blocks or tensors; formats HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from oarlock.errors import EngineDead, InvalidParameter, OarlockError, PromptTooLong, QueueFull, RequestError, WorkerError
from oarlock.frontend.stop import StopMatcher
from oarlock.messages import Abort, EngineOutput, EngineOutputs, EngineRequest, ErrorInfo, PositionLogprobs
from oarlock.sampling_params import SamplingParams

log = logging.getLogger("oarlock.frontend")


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
    pooled: bytes | None = None  # of a request for a vector: EngineOutput.pooled


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended, for observers."""

    request: EngineRequest
    metrics: RequestMetrics
    num_cached_tokens: int
    num_generated_tokens: int
    finish_reasons: tuple[str, ...]  # of the choices that ended last
    error: ErrorInfo | None


def exception_for(error: ErrorInfo) -> OarlockError:
    """The exception that an engine-side error becomes for the caller."""
    if error.kind == "engine":
        return EngineDead(error.message)
    if error.kind == "step":
        return WorkerError(error.message)
    if error.code in ("queue_full", "queue_timeout"):
        return QueueFull(error.message, code=error.code)
    kind = PromptTooLong if error.code == "context_length_exceeded" else InvalidParameter if error.param else RequestError
    return kind(error.message, param=error.param, code=error.code)


class OutputProcessor:
    """Turns each step's engine outputs into deltas. A whole result is the sum of its deltas (`frontend.collect`), nothing else.

    Not shared between threads.
    """

    def __init__(self, tokenizer: Any | None, send_abort: Callable[[Abort], None], note: Callable[[RequestRecord], None] | None = None) -> None:
        self.tokenizer = tokenizer  # None under --skip-tokenizer-init
        self._note = note  # told of every request that ends
        self._send_abort = send_abort
        self._requests: dict[str, _Request] = {}
        self._token_texts: dict[int, tuple[str, tuple[int, ...]]] = {}  # at most one entry a vocabulary entry

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EngineRequest, prompt: str | None = None) -> None:
        """Open a request, before it is submitted. Raises InvalidParameter when its id is open already."""
        if request.request_id in self._requests:
            raise InvalidParameter(f"request_id {request.request_id!r:.80} is in use by an open request; give another.", param="request_id")
        self._requests[request.request_id] = _Request(request, prompt)

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End an open request, here and in the engine. Its last delta, in which open choices end with "abort"; None if it is not open."""
        state = self._requests.get(request_id)
        if state is None:
            return None
        self._send_abort(Abort(request_id))
        delta = state.make_delta()
        self._end_open(state, "abort", delta)
        return delta

    def forget(self, request_id: str) -> None:
        """Drop a request that never reached the engine."""
        self._requests.pop(request_id, None)

    def receive(self, outputs: EngineOutputs) -> list[RequestOutput]:
        """One delta for each open request that has news, in the order of the outputs. Outputs of ended branches are dropped."""
        now = time.time()
        deltas: dict[str, RequestOutput] = {}
        for output in outputs.outputs:
            state = self._requests.get(output.request_id)
            if state is None:
                continue
            delta = deltas.get(output.request_id)
            if delta is None:
                delta = deltas[output.request_id] = state.make_delta()
            if output.error is not None:
                self._fail(state, output.error, delta)
                continue
            try:
                self._advance(state, output, delta, now)
            except Exception as fault:  # its text cannot be made, and that is its own affair
                log.exception("request %s: its text cannot be made", output.request_id)
                self._send_abort(Abort(output.request_id))
                state.branches.clear()  # with what they hold back: it would be the tokenizer's to give
                delta.outputs.clear()
                delta.error = ErrorInfo(f"the text of the answer cannot be made: {type(fault).__name__}: {fault}", kind="step")
                self._end_open(state, "error", delta)
        return [delta for delta in deltas.values() if delta.outputs or delta.finished or delta.prompt_logprobs is not None]

    def fail_all(self, error: ErrorInfo) -> list[RequestOutput]:
        """End every open request with `error`, as when the engine has died. The engine is told nothing."""
        deltas = []
        for state in list(self._requests.values()):
            delta = state.make_delta()
            delta.error = error
            self._end_open(state, "error", delta)
            deltas.append(delta)
        return deltas

    def _advance(self, state: _Request, output: EngineOutput, delta: RequestOutput, now: float) -> None:
        metrics = state.metrics
        if metrics.first_scheduled_s is None:
            metrics.first_scheduled_s = output.first_scheduled_s
        state.num_cached_tokens = delta.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = [None if entry is None else self._logprobs(entry, state, prompt=True) for entry in output.prompt_logprobs]
        if output.pooled is not None:
            delta.pooled = output.pooled
        branch = state.branches.get(output.index)
        if branch is None:
            branch = state.branches[output.index] = _Branch(output.index, state.request, self.tokenizer)
        if branch.is_finished or not (output.new_token_ids or output.finish_reason):
            return
        if output.new_token_ids:
            metrics.last_token_s = now
            if metrics.first_token_s is None:
                metrics.first_token_s = now
        news = branch.advance(output)
        if news.logprobs is not None and output.logprobs is not None:
            news.logprobs.extend(self._logprobs(entry, state) for entry in output.logprobs[: len(news.token_ids)])
        delta.outputs.append(news)
        state.num_generated_tokens += len(news.token_ids)
        delta.num_generated_tokens = state.num_generated_tokens
        if branch.is_finished:
            state.num_finished += 1
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self._send_abort(Abort(output.request_id, "stop", output.index))
        if state.num_finished == state.num_expected:
            self._finish(state, delta, now)

    def _fail(self, state: _Request, error: ErrorInfo, delta: RequestOutput) -> None:
        """An error of one branch ends the request: its other branches are aborted."""
        if state.num_expected - state.num_finished > 1:
            self._send_abort(Abort(state.request.request_id))
        delta.error = error
        self._end_open(state, "error", delta)

    def _end_open(self, state: _Request, reason: str, delta: RequestOutput) -> None:
        """The request ends here: every choice that is open gets its finish reason, and the text that was held back."""
        for index in range(state.num_expected):
            branch = state.branches.get(index)
            if branch is None or not branch.is_finished:
                delta.outputs.append(CompletionOutput(index, text=branch.end() if branch is not None else "", finish_reason=reason))
        self._finish(state, delta, time.time())

    def _finish(self, state: _Request, delta: RequestOutput, now: float) -> None:
        state.metrics.finished_s = now
        delta.finished = True
        delta.metrics = replace(state.metrics)
        del self._requests[state.request.request_id]
        if self._note is not None:
            reasons = tuple(choice.finish_reason for choice in delta.outputs if choice.finish_reason)
            self._note(RequestRecord(state.request, delta.metrics, state.num_cached_tokens, state.num_generated_tokens, reasons, delta.error))

    def _logprobs(self, entry: PositionLogprobs, state: _Request, *, prompt: bool = False) -> dict[int, Logprob]:
        """The token itself first, then the most probable ones, best first; a token among these is listed once."""
        params = state.request.params
        count = params.prompt_logprobs if prompt else params.logprobs
        top = entry.top if count is None or count < 0 else entry.top[:count]
        found = {entry.token_id: self._logprob(entry.token_id, entry.logprob, entry.rank, params)}
        for place, (token_id, logprob) in enumerate(top, start=1):
            if token_id not in found:
                found[token_id] = self._logprob(token_id, logprob, place, params)
        return found

    def _logprob(self, token_id: int, logprob: float | None, rank: int, params: SamplingParams) -> Logprob:
        if self.tokenizer is None or not params.detokenize:
            return Logprob(logprob, rank)
        known = self._token_texts.get(token_id)
        if known is None:
            data = self.tokenizer.token_bytes(token_id)
            known = self._token_texts[token_id] = (data.decode("utf-8", "replace"), tuple(data))
        return Logprob(logprob, rank, *known)


class _Request:
    """What the front end remembers of one open request."""

    __slots__ = (
        "branches", "metrics", "num_cached_tokens", "num_expected", "num_finished", "num_generated_tokens", "prompt",
        "prompt_token_ids", "request",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, prompt: str | None) -> None:
        self.request = request
        self.prompt = prompt
        self.prompt_token_ids = list(request.prompt_token_ids)  # shared by every delta
        self.metrics = RequestMetrics(arrival_s=request.arrival_s)
        self.branches: dict[int, _Branch] = {}
        # The engine returns only the n best beams; of sampled branches all are seen, and the best chosen by `frontend.collect`.
        self.num_expected = request.params.n if request.params.use_beam_search else request.params.num_branches
        self.num_finished = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

    def make_delta(self) -> RequestOutput:
        return RequestOutput(
            self.request.request_id,
            self.prompt,
            self.prompt_token_ids,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
        )


class _Branch:
    """One choice's text. Order of checks: min_tokens, EOS, stop token (both by the engine), stop string, length (by the engine)."""

    __slots__ = ("_held", "_matcher", "_params", "_stream", "cumulative_logprob", "index", "is_finished", "num_tokens")

    def __init__(self, index: int, request: EngineRequest, tokenizer: Any | None) -> None:
        params = request.params
        self.index = index
        self._params = params
        self._stream = None
        if tokenizer is not None and params.detokenize:
            more = {"shown": params.shown_special_tokens} if params.shown_special_tokens else {}  # a caller's own tokenizer may not know it
            self._stream = tokenizer.make_stream(skip_special_tokens=params.skip_special_tokens, prompt_ids=request.prompt_token_ids, **more)
        self._matcher = StopMatcher(params.stop)
        self._held = ""  # text that may be the beginning of a stop string, and so is not sent yet
        self.num_tokens = 0
        self.cumulative_logprob: float | None = None
        self.is_finished = False

    def advance(self, output: EngineOutput) -> CompletionOutput:
        """Take a step's tokens. Sets `is_finished`; the tokens after a stop string are dropped. Logprobs are the caller's."""
        params, stream = self._params, self._stream
        news = CompletionOutput(self.index, logprobs=None if params.logprobs is None else [])
        last = len(output.new_token_ids) - 1
        parts: list[str] = []
        stop: str | None = None
        ends_by_token = output.finish_reason == "stop"
        for place, token_id in enumerate(output.new_token_ids):
            news.token_ids.append(token_id)
            self.num_tokens += 1
            if stream is None:
                continue
            if ends_by_token and place == last:  # EOS or a stop token: its text belongs to the output only on request
                if params.include_stop_str_in_output:
                    parts.append(self._take(stream.step([token_id])))
                continue
            text, stop = self._match(stream.step([token_id]), armed=self.num_tokens > params.min_tokens)
            parts.append(text)
            if stop is not None:
                break
        if stop is None and output.finish_reason is not None and stream is not None:
            text, stop = (self._take(stream.flush()), None) if ends_by_token else self._match(stream.flush(), armed=self.num_tokens > params.min_tokens)
            parts += [text, self._take("")]
        self._close(news, output, stop)
        news.text = "".join(parts)
        return news

    def end(self) -> str:
        """The branch ends from outside; returns the text that was not sent yet."""
        self.is_finished = True
        return self._take("" if self._stream is None else self._stream.flush())

    def _close(self, news: CompletionOutput, output: EngineOutput, stop: str | None) -> None:
        self.is_finished = stop is not None or output.finish_reason is not None
        news.finish_reason = "stop" if stop is not None else output.finish_reason
        news.stop_reason = stop if stop is not None else output.stop_reason
        if output.cumulative_logprob is not None:
            dropped = (output.logprobs or ())[len(news.token_ids) :]
            self.cumulative_logprob = output.cumulative_logprob - sum(entry.logprob or 0.0 for entry in dropped)
        news.cumulative_logprob = self.cumulative_logprob

    def _take(self, text: str) -> str:
        """`text` with what was held back before it; nothing stays behind."""
        text, self._held = self._held + text, ""
        return text

    def _match(self, text: str, *, armed: bool) -> tuple[str, str | None]:
        """(text that is safe to send, the stop string that `text` completes)."""
        if not self._matcher.stops or not text:
            return text, None
        held = len(self._held)
        found = self._matcher.feed(text, armed=armed)
        text = self._take(text)
        if found is not None:
            end, stop = held + found[0], found[1]
            return text[: end if self._params.include_stop_str_in_output else end - len(stop)], stop
        if not self._params.include_stop_str_in_output:
            safe = len(text) - self._matcher.held
            text, self._held = text[:safe], text[safe:]
        return text, None
