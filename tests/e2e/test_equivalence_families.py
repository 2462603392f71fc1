"""Greedy tokens of every family, by every way through the engine, are those of transformers: 64 tokens in float32.

Llama and the Gemma hybrid take each feature alone, on every device. The other families take a plain run and a hostile one, in which
everything happens at once. The rest of families x features x devices runs under --full.
"""

from __future__ import annotations

import pytest
from checkpoints import FAMILIES
from equivalence import BASE, DEVICES, HOSTILE, HOSTILE_TP, WAYS, take

WHOLE = ("llama", "gemma3")  # families that take every feature on every device in every run
USUAL = ("cpu", "sim-static")  # devices of the other families' runs


def cases() -> list[object]:
    """Ordered so that cases which share an engine follow each other."""
    found = []
    for family in (*WHOLE, *(f for f in FAMILIES if f not in WHOLE)):
        for device in DEVICES:
            for way in (*WAYS, HOSTILE, HOSTILE_TP):
                if device not in way.devices:
                    continue
                usual = way in (BASE, HOSTILE) and device in USUAL or way in WAYS and family in WHOLE
                marks = () if usual else (pytest.mark.full,)
                found.append(pytest.param(family, device, way, id=f"{family}-{device}-{way.name.replace(' ', '_')}", marks=marks))
    return found


@pytest.mark.parametrize(("family", "device", "way"), cases())
def test_tokens_are_those_of_transformers(checkpoint, engines, record_property, family, device, way):
    record_property("case", f"{family}|{device}|{way.name}")
    tiny = checkpoint(family)
    take(way, engines.get(tiny, device, **way.options_for(tiny)), tiny, device)
