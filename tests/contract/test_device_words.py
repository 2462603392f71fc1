"""Core names no device: it reads declared capabilities."""

from __future__ import annotations

import re

import pytest
from source_code import core_modules, is_within, shown

WORDS = re.compile(r"(?<![a-z])(cuda|xpu|neuron|tpu)(?![a-z])", re.IGNORECASE)
# The option table holds flags that existing users type, and the metrics names that existing dashboards read.
EXEMPT = {"oarlock.config.options": "the option table", "oarlock.server.metrics": "metric names"}


def test_core_names_no_device():
    found = []
    for name, path in core_modules().items():
        if is_within(name, *EXEMPT):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if WORDS.search(line):
                found.append(f"{shown(path)}:{number}: {line.strip()}")
    assert not found


@pytest.mark.parametrize(
    ("line", "named"),
    [("x.cuda()", True), ("torch.xpu.x", True), ("is_cuda_device", True), ("TPU", True), ("output", False), ("neurons", False)],
)
def test_the_word_check_itself(line, named):
    assert bool(WORDS.search(line)) is named
