"""Tests of the standard suite that a model of 135M parameters cannot pass, and a better one could: strict expected failures, by name."""

from __future__ import annotations

import pytest

OTHER_NUMBER = "the model calls the function, with another number than it was asked for"
EXPECTED = {
    "test_tool_calling[model0]": OTHER_NUMBER,
    "test_tool_calling[model1]": OTHER_NUMBER,
    "test_tool_calling_async": OTHER_NUMBER,
    "test_unicode_tool_call_integration": "the model goes on inside a string of the forced call until max_tokens",
    "test_tool_calling_with_no_arguments": "the model makes the same call three times, and one is looked for",
    "test_json_mode": "the model answers in JSON, as JSON mode makes it, with other keys than it was asked for",
    "test_agent_loop[model0]": "the model does not think of calling the function by itself",
    "test_agent_loop[model1]": "the model does not think of calling the function by itself",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = {item.name: item for item in items}
    for name, reason in EXPECTED.items():
        found[name].add_marker(pytest.mark.xfail(reason=reason, strict=True))
