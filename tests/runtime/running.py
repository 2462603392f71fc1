"""Greedy tokens of a tiny checkpoint through `LLM`, compared with transformers' own."""

from __future__ import annotations

from typing import Any

from checkpoints import NEW_TOKENS, Tiny
from oarlock import LLM, SamplingParams


def run(tiny: Tiny, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, **options: Any) -> list[list[int]]:
    """Our tokens for each prompt."""
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 256, **options}
    with LLM(str(tiny.path), **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        found = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


def assert_same(tiny: Tiny, prompts: list[list[int]], **options: Any) -> None:
    """Raises AssertionError where a token is not transformers' own."""
    for prompt, got in zip(prompts, run(tiny, prompts, **options), strict=True):
        assert len(got) == NEW_TOKENS
        tiny.check(prompt, got, str(options))
