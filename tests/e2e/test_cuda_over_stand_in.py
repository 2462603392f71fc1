"""cuda's device, graphs and reads under the engine, over a stand-in for torch.cuda: the right tokens, and what waits for what. Not hardware."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from oarlock import LLM, SamplingParams

pytest.importorskip("oarlock_cuda")
sys.path.insert(0, str(Path(__file__).parents[2] / "backends/cuda/tests"))
cuda_stub = importlib.import_module("cuda_stub")

SIZES = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 40}


@pytest.fixture
def stub(tmp_path, monkeypatch):
    return cuda_stub.put_in_place(tmp_path, monkeypatch)


def run(tiny: Any, prompts: list[list[int]], stub: Any, new_tokens: int = 12, **options: Any) -> list[str]:
    """Greedy tokens are checked; the calls made after the start are returned."""
    with LLM(str(tiny.path), device="cuda", **{**SIZES, **options}) as llm:
        stub.calls.clear()
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        found = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        calls = [name for name, _, _ in stub.calls]
    for prompt, one in zip(prompts, found, strict=True):
        tiny.check(prompt, list(one.outputs[0].token_ids), f"cuda, stand-in, {options}")
    return calls


def steps(calls: list[str]) -> list[str]:
    """r: a graph is replayed, e: the event behind a step's results is recorded, w: it is waited for."""
    letters = {"CUDAGraph.replay": "r", "Event.record": "e", "Event.synchronize": "w"}
    return [letters[name] for name in calls if name in letters]


def test_in_steady_decode_the_next_step_is_launched_before_the_last_is_read(checkpoint, stub):
    tiny = checkpoint("llama")
    calls = run(tiny, tiny.prompts(5), stub)
    assert "synchronize" not in calls and "graph" not in calls  # nothing waits for the device as a whole, nothing is captured while serving
    told = "".join(steps(calls))
    # The prompt and the first decode are launched, then each time: read the step before, launch the step after next.
    assert told == "e" + "re" + "wre" * 10 + "ww"


def test_one_step_at_a_time_where_that_is_asked_for(checkpoint, stub):
    tiny = checkpoint("llama")
    assert "".join(steps(run(tiny, tiny.prompts(5), stub, max_in_flight=1))) == "ew" + "rew" * 11


def test_rows_are_padded_and_prompts_in_chunks_are_not_captured(checkpoint, stub):
    tiny = checkpoint("llama")
    told = steps(run(tiny, tiny.prompts(60, 3, 17), stub))
    assert 0 < told.count("r") < told.count("e") == told.count("w")


def test_enforce_eager_captures_nothing(checkpoint, stub):
    tiny = checkpoint("llama")
    calls = run(tiny, tiny.prompts(5, 9), stub, enforce_eager=True)
    assert "r" not in steps(calls)


def test_contexts_beyond_what_is_captured_run_as_they_are(checkpoint, stub):
    tiny = checkpoint("llama")
    told = steps(run(tiny, tiny.prompts(28), stub, new_tokens=10, max_seq_len_to_capture=32))
    # Of the nine decodes, those of 29 to 32 tokens of context are within two blocks of 16.
    assert told.count("r") == 4 and told.count("e") == 10


def test_windows_and_seeded_sampling(checkpoint, stub):
    tiny = checkpoint("gemma3")
    run(tiny, tiny.prompts(20, 7), stub)
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2, frequency_penalty=0.2)
    found = []
    for options in ({}, {"enforce_eager": True, "max_in_flight": 1}):
        with LLM(str(tiny.path), device="cuda", **{**SIZES, **options}) as llm:
            (one,) = llm.generate(prompt_token_ids=[tiny.prompts(6)[0]], sampling_params=params, use_tqdm=False)
            found.append(list(one.outputs[0].token_ids))
            assert len(one.outputs[0].logprobs) == 6
    assert found[0] == found[1]
