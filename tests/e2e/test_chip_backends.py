"""neuron's compiled runner, simulated by its strict compiler: the command that compiles ahead, and tokens that are transformers' own."""

from __future__ import annotations

import importlib.util

import pytest
from oarlock import LLM, SamplingParams

SIMULATE = "OARLOCK_NEURON_SIMULATE"
SIZES = {"max_num_seqs": 3, "max_model_len": 48, "max_num_batched_tokens": 32}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("oarlock_neuron") is None, reason="oarlock-neuron is not installed")


@pytest.fixture
def simulated(monkeypatch, tmp_path):
    from oarlock import plugins

    monkeypatch.setenv(SIMULATE, "1")
    plugins.installed.cache_clear()  # the package says another priority now
    yield tmp_path / "programs"
    plugins.installed.cache_clear()


def test_what_was_compiled_ahead_is_only_loaded_and_serves(simulated, checkpoint, monkeypatch, capsys):
    from oarlock.cli.main import main
    from oarlock_neuron.compiler import StrictCompiler

    compiled = []
    compile_one = StrictCompiler.compile
    monkeypatch.setattr(StrictCompiler, "compile", lambda self, fn, example, **rest: compiled.append(rest["tag"]) or compile_one(self, fn, example, **rest))
    tiny = checkpoint("llama")
    flags = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = ["compile", str(tiny.path), "--device", "neuron", "--dtype", "float32", "--skip-tokenizer-init", "--neuron-cache-dir", str(simulated), *flags]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"{len(compiled)} ready after" in out and f"kept in {simulated}" in out and "simulated on the host" in out
    assert len(list(simulated.iterdir())) == len(compiled) == len(set(compiled)) >= 15
    compiled.clear()
    prompts = [[5, 9, 2, 14], list(range(20, 58)), [7]]  # the second is longer than a chunk
    with LLM(str(tiny.path), device="neuron", dtype="float32", skip_tokenizer_init=True, neuron_cache_dir=str(simulated), **SIZES) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
        found = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        sampled = llm.generate(
            prompt_token_ids=prompts[:1],
            sampling_params=SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=4, frequency_penalty=0.3, logprobs=2, detokenize=False),
            use_tqdm=False,
        )
    assert compiled == []
    for prompt, one in zip(prompts, found, strict=True):
        tiny.check(prompt, list(one.outputs[0].token_ids), "neuron, simulated")
    assert len(sampled[0].outputs[0].logprobs) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], "nothing to compile: cpu runs programs as they are"),
        (["--device", "neuron", "--enforce-eager"], "nothing to compile: --enforce-eager runs programs as they are"),
    ],
)
def test_where_nothing_is_to_be_compiled_the_command_says_so(simulated, checkpoint, capsys, arguments, words):
    from oarlock.cli.main import main

    assert main(["compile", str(checkpoint("llama").path), *arguments]) == 0
    assert capsys.readouterr().out.strip() == words
    assert not simulated.exists()
