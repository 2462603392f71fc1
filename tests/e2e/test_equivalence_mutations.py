"""The references would notice: without rotary embedding or learned positions, without the window, or without the oldest block, tokens differ.

Each part is taken away here, by patching, from an engine that is otherwise the product's; a family is shown once for each part it has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checkpoints import FAMILIES, NEW_TOKENS, Tiny
from equivalence import Engine, context_of, prompts_of, summary_of
from oarlock.runtime.batch import Batch

LENGTHS = (40, 129)  # beyond every tiny window, and several blocks


def differing(tiny: Tiny, engine: Engine) -> list[int]:
    """For each prompt, how many of its tokens are not the reference's."""
    prompts = prompts_of(tiny, LENGTHS)
    got = engine.greedy(prompts)
    return [sum(a != b for a, b in zip(tokens, tiny.greedy(prompt).tokens, strict=True)) for prompt, tokens in zip(prompts, got, strict=True)]


def assert_noticed(tiny: Tiny, engine: Engine, what: str) -> None:
    try:
        found = differing(tiny, engine)
    finally:
        engine.close()
    assert all(count > NEW_TOKENS // 4 for count in found), f"{tiny.name} without {what}: only {found} of {NEW_TOKENS} tokens differ"


@pytest.mark.parametrize("family", FAMILIES)
def test_without_positions_tokens_differ(checkpoint, record_property, family):
    record_property("case", f"{family}|cpu|noticed without positions")
    tiny = checkpoint(family)
    engine = Engine(tiny.path, "cpu", **context_of(tiny))
    weights = engine.worker.runner.weights
    for table in weights["rope"].values():  # [positions, 2, width]: every angle becomes 0
        scale = table[0, 0, 0].item()  # some scalings lengthen every vector, too
        table[:, 0], table[:, 1] = scale, 0.0
    if "positions" in weights:
        weights["positions"]["weight"].zero_()
    assert weights["rope"] or "positions" in weights
    assert_noticed(tiny, engine, "positions")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_window_tokens_differ(checkpoint, record_property, family):
    record_property("case", f"{family}|cpu|noticed without window")
    tiny = checkpoint(family)
    summary = summary_of(tiny)
    if not any(summary.layer_windows):
        assert "sliding_window" not in tiny.recipe.values or tiny.recipe.values["sliding_window"] is None
        return  # nothing to take away
    endless = replace(summary, layer_windows=(None,) * summary.num_layers)
    assert_noticed(tiny, Engine(tiny.path, "cpu", summary=endless, **context_of(tiny)), "its window")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_oldest_block_tokens_differ(checkpoint, record_property, family, monkeypatch):
    """Every decode step reads the null block, filled with zeros, in place of the oldest block that the row can see."""
    record_property("case", f"{family}|cpu|noticed without oldest block")
    tiny = checkpoint(family)
    engine = Engine(tiny.path, "cpu", block_size=8, **context_of(tiny))
    windows, inputs = [group.window for group in engine.info.kv_groups], Batch.forward_inputs

    def without_oldest(self: Batch, rows: Any, key: Any, block_size: int, null_row: int) -> dict[str, np.ndarray]:
        host = inputs(self, rows, key, block_size, null_row)
        for place in range(key.decode_rows):
            last = host["seq_lens"][place] - 1
            for group, window in enumerate(windows):
                oldest = 0 if window is None else max(0, last - window + 1) // block_size
                assert oldest < last // block_size
                host["block_tables"][group, place, oldest] = 0
        return host

    for cache in engine.worker.runner.state["kv"]:
        for tensor in cache:
            tensor[0].zero_()
    monkeypatch.setattr(Batch, "forward_inputs", without_oldest)
    assert_noticed(tiny, engine, "its oldest block")
