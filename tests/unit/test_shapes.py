"""The table of shapes: every size that a device declares has an effect."""

from __future__ import annotations

import pytest
from oarlock.shapes import BucketTable, ShapePolicy, StepKey

TABLE = BucketTable(decode_rows=(2, 8), chunk_rows=(1, 4), chunk_tokens=(16, 64), chunk_lens=(8, 32), blocks=(3, 12), out_rows=(12,))


def test_every_declared_size_is_in_some_key():
    keys = list(ShapePolicy(TABLE).keys())
    seen = {
        "decode_rows": {k.decode_rows for k in keys},
        "chunk_rows": {k.rows - k.decode_rows for k in keys} - {0},
        "chunk_tokens": {k.tokens - k.decode_rows for k in keys} - {0},
        "chunk_lens": {k.max_q for k in keys} - {1},
        "blocks": {k.blocks for k in keys},
    }
    assert {name: tuple(sorted(sizes)) for name, sizes in seen.items()} == {name: getattr(TABLE, name) for name in seen}


def test_prompt_positions_are_scored_so_many_at_once_and_no_other_number():
    with pytest.raises(ValueError, match=r"out_rows takes one size, got \(4, 12\)"):
        BucketTable((2, 8), (1, 4), (16, 64), (8, 32), (3, 12), (4, 12))


@pytest.mark.parametrize("axis", ["decode_rows", "blocks", "out_rows"])
def test_a_table_is_empty_or_whole_or_of_decodes_alone(axis):
    with pytest.raises(ValueError, match="every axis"):
        BucketTable(**{**{name: getattr(TABLE, name) for name in BucketTable.__slots__}, axis: ()})
    with pytest.raises(ValueError, match="every axis"):
        BucketTable(**{axis: (1, 2) if axis != "out_rows" else (2,)})


def test_where_only_decodes_are_padded_all_else_has_its_own_shape():
    policy = ShapePolicy(BucketTable(decode_rows=(2, 8), blocks=(3, 12)))
    padded = set(policy.keys())
    assert policy.table.is_exact and policy.max_chunk() is None and policy.fits(99, [1000], 99)
    assert padded == {StepKey(rows, rows, blocks, 1, rows) for rows in (2, 8) for blocks in (3, 12)}
    assert policy.fit(3, [], 4) == StepKey(8, 8, 12, 1, 8)
    for decodes, chunks, blocks in ((9, [], 1), (1, [], 13), (3, [5, 1], 2), (0, [7], 1)):
        key = policy.fit(decodes, chunks, blocks)
        assert key == StepKey(decodes + sum(chunks), decodes + len(chunks), blocks, max(chunks, default=1), decodes)
        assert key not in padded
