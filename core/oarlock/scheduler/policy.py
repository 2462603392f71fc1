"""Small decisions that configuration steers: order, seeds, how to preempt, when to let prompts in.

Owns: the rules, and the latency that the delay factor refers to.
Reads: `config.SchedulerConfig`, `messages`.
Never: moves a branch.
"""

from __future__ import annotations

import hashlib

from oarlock.config.sections import SchedulerConfig
from oarlock.messages import EngineRequest
from oarlock.request import Request


def priority_of(config: SchedulerConfig, source: EngineRequest) -> int:
    """First part of the order: equal for all under first come, first served."""
    return source.priority if config.policy == "priority" else 0


def seed_bits(seed: int | None, engine_seed: int, counter: int) -> int:
    """The 32 bits of a request's random key, as a signed integer.

    A 64-bit seed is folded (high half XOR low half); a request without one gets bits that depend on the engine's seed
    and on how many such requests came before.
    """
    if seed is None:
        bits = int.from_bytes(hashlib.sha256(f"{engine_seed}:{counter}".encode()).digest()[:4], "little")
    else:
        seed &= 2**64 - 1
        bits = (seed ^ (seed >> 32)) & (2**32 - 1)
    return bits - 2**32 if bits >= 2**31 else bits


def prefers_swap(config: SchedulerConfig, request: Request) -> bool:
    """Whether a preempted branch should keep its KV on the host rather than recompute it. A prompt's mean begins anew with its row."""
    if request.source.pooling is not None:
        return False
    return config.preemption_mode == "swap" or (config.preemption_mode == "auto" and len(request.branches) > 1)


class DelayGate:
    """Holds prompts back so that more of them run together: until the oldest has waited delay_factor x the last prompt step's time."""

    def __init__(self, delay_factor: float) -> None:
        self._factor = delay_factor
        self._last_prompt_step_s = 0.0

    def observe(self, step_s: float) -> None:
        """Wall time of a step that computed prompt tokens."""
        self._last_prompt_step_s = step_s

    def is_open(self, waited_s: float) -> bool:
        return max(waited_s, 0.0) >= self._factor * self._last_prompt_step_s  # a clock that was set back makes arrivals lie ahead
