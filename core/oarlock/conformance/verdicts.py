"""What a run allows to say of a device, by model family and dtype: RUNS, CORRECT, SERVES; and what contradicts more.

Owns: the rules.
Reads: `cases`.
Never: runs a case; imports torch (through `cases` neither).

    RUNS     levels 0 to 2 hold, and a model of the family gave the right log-probabilities for one prompt
    CORRECT  and levels 3 and 4 hold
    SERVES   and level 5 holds, for the family and dtype that it served
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oarlock.conformance import LEVELS
from oarlock.conformance.cases import Result

TIERS = ("", "RUNS", "CORRECT", "SERVES")
_NEEDED = {"RUNS": (0, 1, 2), "CORRECT": (3, 4), "SERVES": (5,)}
SERVED_FAMILY = "dense"  # of level 5's model


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one model family in one dtype."""

    family: str
    dtype: str
    tier: str  # one of TIERS
    why_not: str = ""  # what contradicts the next tier; "" where nothing does, or nothing was run


def judge(results: Sequence[Result], served_dtype: str = "") -> list[Verdict]:
    """Verdicts of every family and dtype that the runner level ran. [] where it did not run."""
    shared = _shared_ops(results)
    pairs = dict.fromkeys((r.family, r.dtype) for r in results if r.level == 4 and r.family and r.status != "unsupported")
    return [_judge(results, shared, family, dtype, served_dtype) for family, dtype in pairs]


def _shared_ops(results: Iterable[Result]) -> set[str]:
    """Ops that exist in one dtype only, whatever the model's: sampling and what else works on logits."""
    dtypes: dict[str, set[str]] = {}
    for r in results:
        if r.op and r.dtype:
            dtypes.setdefault(r.op, set()).add(r.dtype)
    return {op for op, found in dtypes.items() if len(found) == 1 and op != "paged_attention"}


def _judge(results: Sequence[Result], shared: set[str], family: str, dtype: str, served_dtype: str) -> Verdict:
    reached = ""
    for tier, levels in _NEEDED.items():
        for level in levels:
            here = [r for r in results if r.level == level and _concerns(r, shared, family, dtype)]
            bad = [r for r in here if r.is_bad]
            if bad:
                name = f"level {level} {LEVELS[level]}"
                return Verdict(family, dtype, reached, f"{name} contradicts {tier}: {len(bad)} of {len(here)} cases, the first {bad[0].id}")
            if not any(r.status == "pass" for r in here):
                return Verdict(family, dtype, reached)
        if tier == "RUNS" and not any(
            r.level == 4 and r.status == "pass" and r.id == f"runner[{dtype},{_model_of(r)},whole]" for r in _of(results, family, dtype)
        ):
            return Verdict(
                family, dtype, "", "level 4 runner contradicts RUNS: no model gave the right log-probabilities for a whole prompt"
            )
        if tier == "SERVES" and (family, dtype) != (SERVED_FAMILY, served_dtype):
            return Verdict(family, dtype, reached)  # another model was served
        reached = tier
    return Verdict(family, dtype, reached)


def _of(results: Iterable[Result], family: str, dtype: str) -> Iterable[Result]:
    return (r for r in results if (r.family, r.dtype) == (family, dtype))


def _model_of(r: Result) -> str:
    return r.id.partition("[")[2].split(",")[1]


def _concerns(r: Result, shared: set[str], family: str, dtype: str) -> bool:
    return (r.dtype in ("", dtype) or r.op in shared) and r.family in ("", family)


def in_words(verdicts: Sequence[Verdict]) -> list[str]:
    """A line for what holds, then one for each thing that contradicts more."""
    held = []
    for tier in reversed(TIERS[1:]):
        families: dict[str, list[str]] = {}
        for v in verdicts:
            if v.tier == tier:
                families.setdefault(v.family, []).append(v.dtype)
        if families:
            held.append(f"{tier} " + "; ".join(f"{family} in {', '.join(dtypes)}" for family, dtypes in families.items()))
    lines = [". ".join(held) if held else "NOTHING HOLDS: no model family reached RUNS"] if verdicts else []
    against: dict[str, list[str]] = {}
    for v in verdicts:
        if v.why_not:
            against.setdefault(v.why_not, []).append(f"{v.family} in {v.dtype}")
    return [*lines, *(f"{why}; so for {', '.join(pairs)}" for why, pairs in against.items())]
