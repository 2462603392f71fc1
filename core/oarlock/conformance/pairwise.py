"""Few rows that hold every pair of values of any two factors.

Owns: the greedy construction; the same rows in every process.
Reads: nothing of ours.
Never: knows what the factors mean.

Source: the greedy of AETG (Cohen et al. 1997, "The AETG System"), with a fixed order in place of random candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[tuple[int, int], tuple[int, int]]  # ((factor, value), (factor, value)), by position


def pairwise(factors: Sequence[Sequence[Any]], allowed: Callable[[tuple[Any, ...]], bool] = lambda _: True) -> Iterator[tuple[Any, ...]]:
    """Rows, one value of each factor, that hold every pair which some allowed row can hold.

    `allowed` may rule out rows by two of their values; every value must occur in some allowed row. O(rows * pairs * factors).
    """
    left = {
        ((a, x), (b, y)): None
        for a, b in combinations(range(len(factors)), 2)
        for x, y in product(range(len(factors[a])), range(len(factors[b])))
    }
    while left:
        row = dict(next(iter(left)))
        for factor in sorted(set(range(len(factors))) - set(row), key=lambda f: -len(factors[f])):
            row[factor] = max(range(len(factors[factor])), key=lambda value: _gain(row, factor, value, left))
        values = tuple(factors[f][row[f]] for f in range(len(factors)))
        if not allowed(values):
            values = _mend(factors, row, left, allowed)
        for pair in combinations(sorted(row.items()), 2):
            left.pop(pair, None)
        if values:
            yield values


def _gain(row: dict[int, int], factor: int, value: int, left: dict[Pair, None]) -> tuple[int, int]:
    """How many open pairs a value closes with the values chosen already; ties go to the value with the most open pairs."""
    closed = sum(tuple(sorted(((factor, value), other))) in left for other in row.items())
    return closed, sum((factor, value) in pair for pair in left)


def _mend(
    factors: Sequence[Sequence[Any]], row: dict[int, int], left: dict[Pair, None], allowed: Callable[[tuple[Any, ...]], bool]
) -> tuple[Any, ...]:
    """Change `row`, in one factor outside its first pair if possible, until it is allowed. () when the pair itself cannot be: only it is closed."""
    fixed = list(row)[:2]
    for factor in (f for f in row if f not in fixed):
        for value in sorted(
            range(len(factors[factor])), key=lambda v: _gain({f: x for f, x in row.items() if f != factor}, factor, v, left), reverse=True
        ):
            changed = {**row, factor: value}
            values = tuple(factors[f][changed[f]] for f in range(len(factors)))
            if allowed(values):
                row[factor] = value
                return values
    for factor in [f for f in row if f not in fixed]:
        del row[factor]
    return ()
