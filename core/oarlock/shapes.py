"""Which padded shapes a step may have: integers only, the same answer in the engine and in every worker.

Owns: `BucketTable`, `StepKey` and the shape policy that both ends build from one table.
Reads: nothing.
Never: sees tensors, requests or device names.

Every step is a padded step. A device with dynamic shapes has the *exact* policy, whose padding is zero; one that captures
decodes pads those alone, as far as its table goes. A bucketed device has the *bucketed* policy: a batch is cut in two regions,
decode rows first (one token each, token i is row i), then chunk rows.

    tokens   |d d d d . .|c c c c c|c c c . .|
    rows      0 1 2 3 p p     6         7       p: padded row (seq_len 0)
              decode_rows=6   rows=8
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

BIAS_BUCKET = 1024  # (token, bias) pairs of one row on a bucketed device


@dataclass(frozen=True, slots=True)
class StepKey:
    """The static shape of one step."""

    tokens: int  # num_tokens after padding, decode region included
    rows: int  # num_rows after padding, decode region included
    blocks: int  # width of the block tables
    max_q: int  # longest chunk; 1 when there is no chunk region
    decode_rows: int  # rows of the decode region, and its tokens


@dataclass(frozen=True, slots=True)
class BucketTable:
    """What a worker declares. Empty tuples everywhere: dynamic shapes, nothing is padded. `decode_rows` and `blocks` alone: dynamic
    shapes, and steps that only decode are padded where they fit.

    Each tuple is ascending; the last entry is the largest that fits.
    """

    decode_rows: tuple[int, ...] = ()
    chunk_rows: tuple[int, ...] = ()  # rows of the chunk region
    chunk_tokens: tuple[int, ...] = ()  # tokens of the chunk region, all rows together
    chunk_lens: tuple[int, ...] = ()  # max_q of the chunk region
    blocks: tuple[int, ...] = ()
    out_rows: tuple[int, ...] = ()  # one entry: prompt positions scored at once, at least as many as a step has rows

    @property
    def is_exact(self) -> bool:
        """Whether any step can run in its own shape."""
        return not self.chunk_rows

    def __post_init__(self) -> None:
        for name in ("decode_rows", "chunk_rows", "chunk_tokens", "chunk_lens", "blocks", "out_rows"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or any(v < 1 for v in values):
                raise ValueError(f"BucketTable.{name} must ascend and be positive, got {values}")
        decodes, chunks = (self.decode_rows, self.blocks), (self.chunk_rows, self.chunk_tokens, self.chunk_lens, self.out_rows)
        if len(self.out_rows) > 1:
            raise ValueError(f"BucketTable.out_rows takes one size, got {self.out_rows}: prompt positions are always scored so many at once")
        if any(chunks) and not all((*decodes, *chunks)) or any(decodes) and not all(decodes):
            raise ValueError("a BucketTable has entries on every axis, on decode_rows and blocks alone, or on none")


def bucket(value: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `value`.

    Raises:
        ValueError: the value is above the largest bucket.
    """
    for size in buckets:
        if size >= value:
            return size
    raise ValueError(f"{value} does not fit the largest bucket, {buckets[-1] if buckets else 0}")


class ShapePolicy:
    """Answers "does this batch fit?" for the scheduler and "which key?" for the worker."""

    def __init__(self, table: BucketTable) -> None:
        self.table = table

    def fits(self, num_decodes: int, chunk_lens: Sequence[int], blocks: int) -> bool:
        """Whether a step of this many decode rows and these chunks can run. O(chunks)."""
        t = self.table
        if t.is_exact:
            return True
        if num_decodes > t.decode_rows[-1] or blocks > t.blocks[-1]:
            return False
        if not chunk_lens:
            return True
        return (
            len(chunk_lens) <= t.chunk_rows[-1] and max(chunk_lens) <= t.chunk_lens[-1] and sum(chunk_lens) <= t.chunk_tokens[-1]
        )

    def max_chunk(self) -> int | None:
        """The longest chunk one row may have, None when unbounded."""
        return None if self.table.is_exact else min(self.table.chunk_lens[-1], self.table.chunk_tokens[-1])

    def fit(self, num_decodes: int, chunk_lens: Sequence[int], blocks: int) -> StepKey:
        """The key of a step. `chunk_lens` are the token counts of the chunk rows, in order.

        Raises:
            ValueError: it does not fit (see `fits`).
        """
        t = self.table
        longest = max(chunk_lens, default=1)
        if t.is_exact and (chunk_lens or not t.decode_rows or num_decodes > t.decode_rows[-1] or blocks > t.blocks[-1]):
            return StepKey(num_decodes + sum(chunk_lens), num_decodes + len(chunk_lens), max(blocks, 1), longest, num_decodes)
        # A chunk step always carries a decode region, so that there are few programs.
        decode_rows = bucket(max(num_decodes, 1), t.decode_rows)
        width = bucket(max(blocks, 1), t.blocks)
        if not chunk_lens:
            return StepKey(decode_rows, decode_rows, width, 1, decode_rows)
        tokens, rows = bucket(sum(chunk_lens), t.chunk_tokens), bucket(len(chunk_lens), t.chunk_rows)
        return StepKey(decode_rows + tokens, decode_rows + rows, width, bucket(longest, t.chunk_lens), decode_rows)

    def keys(self) -> Iterator[StepKey]:
        """Every padded key that `fit` can yield, for warm-up. None where nothing is padded."""
        t = self.table
        for decode_rows, width in product(t.decode_rows, t.blocks):
            yield StepKey(decode_rows, decode_rows, width, 1, decode_rows)
            for tokens, rows, length in product(t.chunk_tokens, t.chunk_rows, t.chunk_lens):
                # The shortest chunk that rounds up to `length`, and the fewest rows that round up to `rows`, must fit.
                if _least(length, t.chunk_lens) <= tokens and _least(rows, t.chunk_rows) <= tokens:
                    yield StepKey(decode_rows + tokens, decode_rows + rows, width, length, decode_rows)


def _least(size: int, buckets: Sequence[int]) -> int:
    """The smallest value that `bucket` rounds up to `size`."""
    at = buckets.index(size)
    return buckets[at - 1] + 1 if at else 1
