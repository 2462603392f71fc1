"""Structured output as the scheduler sees it: each branch's next token waits for a mask that a plugin computes elsewhere.

Owns: which masks were asked for, and what a mask means together with EOS, stop ids, bans and allowed_token_ids.
Reads: `extensions`, `structured_outputs`, `request`, `stops`.
Never: knows a grammar; waits longer for one request than others can bear.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from oarlock import extensions
from oarlock.config.sections import EngineConfig
from oarlock.errors import PIP, ConfigError
from oarlock.messages import ErrorInfo
from oarlock.request import Branch, Request
from oarlock.scheduler.stops import banned_tokens
from oarlock.structured_outputs import StructuredOutputs

INSTALL = f"{PIP} ./plugins/structured_output"
MOMENT_S = 0.003  # after a mask was asked for, how long a step that others wait for is held back for it
EACH_S = 0.0003  # and for each that is outstanding, so that a batch stays together
IDLE_S = 0.02  # how long at a time nothing else is looked at, where there is nothing else to do
Answer = tuple[int, bytes, bool, str]  # (branch id, mask, whether the text may end here, or why there is no mask)


class Grammars(Protocol):
    """What an extension of kind "structured_output" makes. Neither call raises or waits longer than it is told."""

    def ask(self, branch_id: int, wanted: StructuredOutputs, start: int, token_ids: tuple[int, ...]) -> None:
        """Compute the mask that holds after the branch's output tokens, of which those from `start` on are given."""

    def answers(self, wait_s: float) -> list[Answer]:
        """What has come since, waiting for the first. Each ask is answered once, within limits of time and memory of the plugin's."""

    def forget(self, branch_id: int) -> None:
        """The branch has ended."""

    def close(self) -> None:
        """End what was started; idempotent."""


def make_grammars(config: EngineConfig, device: str, vocabulary: tuple[str, str]) -> tuple[dict[str, Grammars], tuple[tuple[str, str], ...]]:
    """Every backend that can serve, the default first, and for each one that is installed why it cannot, or "".

    Raises:
        ConfigError: the backend that the user named cannot serve.
    """
    wanted = config.model.guided_decoding_backend
    made: dict[str, Grammars] = {}
    found: dict[str, str] = {}
    parts = sorted(extensions.parts("structured_output", device), key=lambda part: (part[1].name != wanted, -part[1].priority))
    for _, part in parts:
        if part.name in found:
            continue
        try:
            made[part.name] = extensions.load(part)(config, vocabulary)
            found[part.name] = ""
        except Exception as error:  # noqa: BLE001  what a plugin cannot do is said where its backend is asked for
            found[part.name] = str(error)
    if wanted != "auto" and wanted not in made:
        why = found.get(wanted) or f"no installed package has it: {INSTALL}"
        raise ConfigError(f"--guided-decoding-backend {wanted}: {why}", "model.guided_decoding_backend")
    return made, tuple(sorted(found.items(), key=lambda item: bool(item[1])))


def is_set(mask: bytes | bytearray, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


class Constraints:
    """Called from the scheduler's thread. `settle` is the only call that may wait."""

    def __init__(self, grammars: Mapping[str, Grammars], vocab_size: int) -> None:
        self._grammars, self._mask_bytes = grammars, (vocab_size + 31) // 32 * 4
        self._asked: dict[int, tuple[Branch, float]] = {}  # branch id -> (branch, when)
        self._sent: dict[int, int] = {}  # branch id -> output tokens that its backend knows

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def refusal(self, request: Request) -> ErrorInfo | None:
        """Why the request's constraint cannot be served here, or None."""
        wanted = request.constraint
        if wanted is None or (wanted.backend or next(iter(self._grammars), "")) in self._grammars:
            return None
        return ErrorInfo(f"{wanted.param} needs a backend for structured output: {INSTALL}", param=wanted.param, code="unsupported_field")

    def _of(self, branch: Branch) -> Grammars:
        constraint = branch.request.constraint
        assert constraint is not None
        return self._grammars[constraint.backend or next(iter(self._grammars))]

    def ask(self, branch: Branch) -> None:
        """Its tokens have changed: the mask for the next one is needed. Nothing, where nothing constrains it or no token follows."""
        request, branch.mask = branch.request, None
        if request.constraint is None or len(branch.tokens) >= request.max_total:
            return
        start = self._sent.get(branch.branch_id, 0)
        self._sent[branch.branch_id] = branch.num_output
        self._asked[branch.branch_id] = (branch, time.monotonic())
        self._of(branch).ask(branch.branch_id, request.constraint, start, tuple(branch.tokens[request.num_prompt + start :]))

    def forget(self, branch: Branch) -> None:
        """The branch has ended."""
        if self._sent.pop(branch.branch_id, None) is not None:
            self._asked.pop(branch.branch_id, None)
            self._of(branch).forget(branch.branch_id)

    def settle(self, *, is_busy: bool) -> Iterable[tuple[Branch, ErrorInfo | None]]:
        """Give masks to the branches that asked. Yields branches that end: with an error, or None where their text is complete."""
        soon = max((when for _, when in self._asked.values()), default=0.0) + MOMENT_S + EACH_S * len(self._asked)
        until = soon if is_busy else time.monotonic() + IDLE_S
        left = max(0.0, until - time.monotonic())
        while self._asked:
            backends = {id(backend): backend for backend in (self._of(branch) for branch, _ in self._asked.values())}
            for backend in backends.values():
                for branch_id, mask, may_end, problem in backend.answers(left / len(backends)):
                    until = min(until, soon)  # those that have theirs do not wait long for the rest of their batch
                    branch, _ = self._asked.pop(branch_id, (None, 0.0))
                    if branch is not None and (end := self._take(branch, mask, may_end, problem)) is not None:
                        yield branch, end if isinstance(end, ErrorInfo) else None
            left = until - time.monotonic()
            if left <= 0:
                return

    def _take(self, branch: Branch, mask: bytes, may_end: bool, problem: str) -> ErrorInfo | str | None:
        """Keep the mask. Otherwise: an error, or "complete" where the text may end and nothing may follow."""
        request = branch.request
        assert request.constraint is not None
        param = request.constraint.param
        if not problem and len(mask) != self._mask_bytes:
            problem = f"the backend gave a mask of {len(mask)} bytes where the vocabulary takes {self._mask_bytes}"
        if problem:
            return ErrorInfo(f"{param}: {problem}", param=param, code="invalid_value")
        bits = bytearray(mask)
        for token in (request.eos_ids | request.stop_ids) if may_end else ():
            bits[token >> 3] |= 1 << (token & 7)
        branch.mask = bytes(bits)
        for token in banned_tokens(branch):
            bits[token >> 3] &= ~(1 << (token & 7))
        allowed = request.params.allowed_token_ids
        if any(is_set(bits, token) for token in allowed) if allowed is not None else bits.strip(b"\0"):
            return None
        if may_end and not request.is_beam:
            return "complete"
        what = "min_tokens, bad_words and allowed_token_ids leave no token that it allows" if mask.strip(b"\0") or may_end else "nothing can follow here"
        return ErrorInfo(f"{param}: after {branch.num_output} tokens {what}; loosen one of them", param=param, code="invalid_value")

