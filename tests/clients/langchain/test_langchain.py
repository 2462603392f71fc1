"""LangChain's own standard suite for chat models, over ChatOpenAI."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from serving import NAME


class TestStandard(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _server(self, url: str) -> None:
        type(self).base_url = f"{url}/v1"

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # Greedy, a small model says the same thing again and again; the penalty makes most of its answers end.
        own = {"temperature": 0, "max_tokens": 400, "extra_body": {"repetition_penalty": 1.2}}
        return {"model": NAME, "base_url": self.base_url, "api_key": "none", "max_retries": 0, "stream_usage": True, **own}

    @property
    def supports_json_mode(self) -> bool:
        return True
