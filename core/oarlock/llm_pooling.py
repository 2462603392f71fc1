"""The part of `LLM` whose results are vectors: encode, embed, classify, score.

Owns: these methods and their result records.
Reads: `pooling_params`, `frontend`; the LLM runs the prompts.
Never: computes a vector.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oarlock.errors import InvalidParameter
from oarlock.frontend.outputs import RequestOutput
from oarlock.frontend.pairs import cosine, pair_text, paired
from oarlock.frontend.prompt_forms import prompt_list
from oarlock.pooling_params import PoolingParams, Task


@dataclass(slots=True)
class PoolingOutput:
    """A vector, under the name that each method gives it: `data` is an array of float32, the others lists or a number."""

    data: array[float]

    @property
    def embedding(self) -> list[float]:
        return self.data.tolist()

    @property
    def probs(self) -> list[float]:
        return self.data.tolist()

    @property
    def score(self) -> float:
        return self.data[0]


@dataclass(slots=True)
class PoolingRequestOutput:
    """One prompt's result."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingMethods:
    """Mixed into `LLM`. The same engine generates and gives vectors."""

    tokenizer: Any
    summary: Any
    _processor: Any
    _prepare: Callable[..., Any]
    _run: Callable[..., list[RequestOutput]]
    _refuse_lora: Callable[[object], None]

    def encode(
        self,
        prompts: Any,  # one prompt or a list: str, token ids, {"prompt": ...}, {"prompt_token_ids": ...}
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        pooling_task: Task | None = None,  # None: what the model gives
    ) -> list[PoolingRequestOutput]:
        """A vector for each prompt, in order. All prompts are checked before any runs; raises as `generate`, and the first error of a prompt."""
        self._refuse_lora(lora_request)
        every = prompt_list(prompts, None)
        if pooling_params is None or isinstance(pooling_params, PoolingParams):
            pooling_params = [pooling_params or PoolingParams()] * len(every)
        if len(pooling_params) != len(every) or not all(isinstance(p, PoolingParams) for p in pooling_params):
            raise InvalidParameter("pooling_params must be a PoolingParams, or as many as prompts.", param="pooling_params")
        return self._vectors(every, [p if pooling_task is None else replace(p, task=pooling_task) for p in pooling_params], use_tqdm)

    def embed(self, prompts: Any, *, pooling_params: PoolingParams | Sequence[PoolingParams] | None = None, **settings: Any) -> list[PoolingRequestOutput]:
        """`encode` for embeddings: `.outputs.embedding`."""
        return self.encode(prompts, pooling_params, pooling_task="embed", **settings)

    def classify(self, prompts: Any, *, pooling_params: PoolingParams | Sequence[PoolingParams] | None = None, **settings: Any) -> list[PoolingRequestOutput]:
        """`encode` for a model with a classification head: `.outputs.probs`."""
        return self.encode(prompts, pooling_params, pooling_task="classify", **settings)

    def score(
        self,
        data_1: Any,  # a text or a list: one for all of data_2, or one for each
        data_2: Any,
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        chat_template: str | None = None,  # of a classifier: the template itself or its file, with messages of the roles query and document
    ) -> list[PoolingRequestOutput]:
        """How well two texts go together: `.outputs.score`. A classifier of one label reads both; embeddings are compared by their cosine."""
        self._refuse_lora(lora_request)
        queries, documents = ([given] if isinstance(given, str) else list(given) for given in (data_1, data_2))
        pairs = paired(queries, documents, ("data_1", "data_2"))
        params, pooler = pooling_params or PoolingParams(), self._processor.pooler
        if pooler.task == "classify":
            check_one_label(pooler.labels)
            template = None
            if chat_template is not None:
                from oarlock.frontend.chat import load_chat_template

                template = load_chat_template(chat_template, self.tokenizer, self.summary)
            return self._vectors([pair_text(*pair, template) for pair in pairs], [params] * len(pairs), use_tqdm)
        if chat_template is not None:
            raise InvalidParameter("chat_template is for classifiers, and this model gives embeddings; leave it out.", param="chat_template")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        known = dict(zip(texts, self._vectors(texts, [params] * len(texts), use_tqdm), strict=True))
        return [_scored(known[one], known[other]) for one, other in pairs]

    def _vectors(self, prompts: list[Any], params: list[PoolingParams], use_tqdm: bool | Callable[..., Any]) -> list[PoolingRequestOutput]:
        results = self._run(self._prepare(prompts, params, None), use_tqdm)
        return [PoolingRequestOutput(r.request_id, PoolingOutput(floats(r.pooled)), r.prompt_token_ids, r.num_cached_tokens) for r in results]


def check_one_label(labels: Sequence[str]) -> None:
    """Raises InvalidParameter for a classifier that gives no single score."""
    if len(labels) != 1:
        raise InvalidParameter(f"this model has {len(labels)} classes, and a score is the one number of a model with one; use classify.", param="model")


def floats(data: bytes | None) -> array[float]:
    """A vector's numbers; none of a request that failed."""
    found = array("f", data or b"")
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _scored(one: PoolingRequestOutput, other: PoolingRequestOutput) -> PoolingRequestOutput:
    value = array("f", [cosine(one.outputs.data, other.outputs.data)])
    tokens, cached = one.prompt_token_ids + other.prompt_token_ids, one.num_cached_tokens + other.num_cached_tokens
    return PoolingRequestOutput(f"{one.request_id}_{other.request_id}", PoolingOutput(value), tokens, cached)
