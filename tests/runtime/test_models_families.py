"""Every native family gives transformers' own greedy tokens, in float32, for prompts shorter and longer than its window."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import FAMILIES, NEW_TOKENS, Tiny
from oarlock import LLM, SamplingParams

LENGTHS = (1, 7, 50, 130)


def run(tiny: Tiny, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, **options: Any) -> list[list[int]]:
    """Our tokens for each prompt."""
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 256, **options}
    with LLM(str(tiny.path), **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        found = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(checkpoint, name):
    tiny = checkpoint(name)
    prompts = tiny.prompts(*LENGTHS)
    for prompt, got in zip(prompts, run(tiny, prompts), strict=True):
        tiny.check(prompt, got, "cpu")
