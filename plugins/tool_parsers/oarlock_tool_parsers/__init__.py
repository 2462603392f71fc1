"""The entry point: which parsers this package brings, under the names that vLLM gives them.

Owns: their records.
Reads: `oarlock.backend_api`.
Never: imports a parser.
"""

from __future__ import annotations

from oarlock.backend_api import Extension, hookimpl

TOOLS = {
    "hermes": "hermes:Hermes",
    "qwen": "hermes:Hermes",
    "llama3_json": "llama3:Llama3Json",
    "llama4_json": "llama3:Llama3Json",
    "pythonic": "pythonic:Pythonic",
    "llama4_pythonic": "pythonic:Pythonic",
    "mistral": "mistral:Mistral",
    "deepseek_v3": "deepseek:DeepSeek",
    "deepseek_v31": "deepseek:DeepSeek",
    "openai": "harmony:Harmony",
    "gpt_oss": "harmony:Harmony",
    "json": "bare_json:BareJson",
}
REASONING = {
    "deepseek_r1": "reasoning:DeepSeekR1",
    "qwen3": "reasoning:Qwen3",
    "mistral": "reasoning:MistralThink",
    "openai_gptoss": "harmony:HarmonyReasoning",
    "gpt_oss": "harmony:HarmonyReasoning",
}


@hookimpl
def extensions() -> list[Extension]:
    """One record for each name."""
    kinds = (("tool_parser", TOOLS), ("reasoning_parser", REASONING))
    return [Extension(kind=kind, name=name, factory=f"oarlock_tool_parsers.{path}") for kind, table in kinds for name, path in table.items()]
