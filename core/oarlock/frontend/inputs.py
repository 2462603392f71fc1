"""The one path by which every front end's request becomes an `EngineRequest`: checked, bounded, tokenised.

Owns: every check that needs the model, the tokenizer or the server's limits.
Reads: `messages`, `sampling_params`, `model_summary`, a tokenizer.
Never: renders a chat template, touches HTTP, or lets work be queued that could fail later for its content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oarlock.config.sections import ModelConfig, ServerConfig
from oarlock.messages import EngineInfo, EngineRequest
from oarlock.model_summary import ModelSummary
from oarlock.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Caps on the fields that cost work. None: no cap beyond what the model itself sets."""

    max_logprobs: int = 20  # -1: the whole vocabulary may be asked for
    max_n: int | None = None
    max_stop_strings: int | None = None
    max_stop_len: int | None = None  # characters of one stop string
    max_logit_bias: int | None = None  # entries
    max_bad_words: int | None = None  # entries

    @classmethod
    def make(cls, model: ModelConfig, server: ServerConfig | None = None) -> InputLimits:
        """A server's limits; without `server`, an in-process caller's, who may spend its own machine."""
        if server is None:
            return cls(max_logprobs=model.max_logprobs)
        return cls(model.max_logprobs, server.max_n, server.max_stop_strings, server.max_stop_len, server.max_logit_bias, server.max_bad_words)


class InputProcessor:
    """Validates and tokenises. Raises `RequestError` with `.param`; holds no per-request state, so threads may share it."""

    def __init__(self, info: EngineInfo, tokenizer: Any | None, summary: ModelSummary, limits: InputLimits | None = None) -> None:
        self.info = info
        self.tokenizer = tokenizer  # None under --skip-tokenizer-init
        self.summary = summary
        self.limits = limits or InputLimits()

    def tokenize(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of `text`, after the checks that are cheaper than tokenising. Raises RequestError naming `param`."""
        raise NotImplementedError

    def make_request(
        self,
        prompt: Any,  # str | list[int] | {"prompt": str} | {"prompt_token_ids": list[int]} (or both)
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        param: str = "prompt",  # the name that errors give the prompt: "messages" for chat
        max_tokens_param: str = "max_tokens",
    ) -> tuple[EngineRequest, str | None]:
        """The request that the engine gets, and the prompt's text where there was one."""
        raise NotImplementedError
