"""What an engine refuses at once, what memory it takes, and what it costs when it has nothing to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Tiny
from equivalence import DEVICES, GREEDY, Engine, check_all, prompts_of
from oarlock import LLM
from oarlock.config.resolve import from_kwargs
from oarlock.errors import ConfigError, OarlockError
from oarlock.messages import EngineOutput
from oarlock.model_summary import load_summary
from oarlock.sampling_params import SamplingParams

IDLE_S = 3.0
IDLE_CPU_S = 0.05  # a poll ten times a second would cost more


@pytest.fixture
def tiny(checkpoint) -> Tiny:
    return checkpoint("llama")


@pytest.fixture
def make(tiny) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(device: str = "cpu", **options: Any) -> Engine:
        made.append(Engine(tiny.path, device, **{"max_model_len": 256, **options}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


# ---------------------------------------------------------------- admission
def refusal(engine: Engine, prompt: list[int], params: SamplingParams) -> list[EngineOutput]:
    """What the very next step says; nothing may have been computed for it."""
    engine._forget()
    engine.submit(prompt, params)
    outputs = engine.client.step()
    assert outputs is not None and not engine.events["rows"], "a request that can never fit was scheduled"
    engine.check_idle()
    return list(outputs.outputs)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("device", DEVICES)
def test_prompt_that_can_never_fit_is_refused_at_admission(make, tiny, device):
    """10 blocks of 8 hold 80 tokens; the last token needs no slot. One token fewer fits, and is answered rightly."""
    engine = make(device, block_size=8, num_blocks_override=10)
    (prompt,) = prompts_of(tiny, (64,))
    (output,) = refusal(engine, prompt, greedy(18))
    assert output.finish_reason == "error" and output.error is not None and output.error.code == "kv_cache_exceeded"
    for words in ("64 tokens", "max_tokens 18", "needs 11 KV cache blocks of 8 tokens", "10 are available", "shorten the prompt"):
        assert words in output.error.message, output.error.message
    (answer,) = engine.run([(prompt, greedy(17))])
    tiny.check(prompt, answer[0], f"the longest request that fits on {device}")
    assert len(answer[0]) == 17


def test_longest_request_that_the_engine_states_is_the_longest_that_runs(make, tiny):
    for block_size, blocks in ((8, 10), (16, 7)):
        engine = make(block_size=block_size, num_blocks_override=blocks)
        longest = engine.info.max_prompt_tokens
        (prompt,) = prompts_of(tiny, (longest - 5,))
        assert len(engine.run([(prompt, greedy(5))])[0][0]) == 5
        assert refusal(engine, prompt, greedy(6))[0].error is not None


def test_prompt_beyond_the_context_is_refused_with_the_limit(make, tiny):
    engine = make(max_model_len=100)
    (prompt,) = prompts_of(tiny, (129,))
    (output,) = refusal(engine, prompt[:100], greedy(1))
    assert output.error is not None and output.error.code == "context_length_exceeded" and "at most 99 fit" in output.error.message
    (answer,) = engine.run([(prompt[:99], greedy(10))])
    assert len(answer[0]) == 1, "the context ends the answer"


@pytest.mark.parametrize("device", DEVICES)
def test_prompt_as_long_as_the_context_is_scored_and_nothing_sampled(make, tiny, device):
    engine = make(device, max_model_len=128)
    (prompt,) = prompts_of(tiny, (129,))
    score = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2, detokenize=False)
    sampled = [engine.worker.runner.runs[name] for name in ("greedy", "sample")]
    engine.submit(prompt[:128], score)
    outputs = []
    while engine.client.has_unfinished():
        outputs += engine.client.step().outputs
    (output,) = outputs
    assert (output.finish_reason, output.new_token_ids, len(output.prompt_logprobs)) == ("length", (), 128)
    assert [entry.token_id for entry in output.prompt_logprobs[1:]] == prompt[1:128]
    assert [engine.worker.runner.runs[name] for name in ("greedy", "sample")] == sampled, "something was sampled"
    assert "at most 128 fit" in refusal(engine, prompt, score)[0].error.message
    engine.check_idle()


def test_beams_that_can_never_fit_are_refused(make, tiny):
    engine = make(block_size=8, num_blocks_override=12, max_num_seqs=8)
    (prompt,) = prompts_of(tiny, (17,))
    wide = SamplingParams(use_beam_search=True, best_of=4, n=1, max_tokens=40, ignore_eos=True, detokenize=False)
    (output,) = refusal(engine, prompt, wide)
    assert output.error is not None and "4 beams" in output.error.message and "12 are available" in output.error.message
    (output,) = refusal(engine, prompt, SamplingParams(use_beam_search=True, best_of=16, n=1, max_tokens=2, detokenize=False))
    assert output.error is not None and "beam width is 16" in output.error.message and "max_num_seqs is 8" in output.error.message


def test_whole_prompt_longer_than_a_step_is_refused_without_chunks(make, tiny):
    with pytest.raises(ConfigError, match="without chunked prefill"):
        make(enable_chunked_prefill=False, max_num_batched_tokens=64)
    engine = make(enable_chunked_prefill=False, max_model_len=64, max_num_batched_tokens=64)
    prompts = prompts_of(tiny, (40, 17, 5))
    answers = engine.run([(p, greedy(20)) for p in prompts], waves=(1, 1), gap=2)
    for prompt, answer in zip(prompts, answers, strict=True):
        tiny.check(prompt, answer[0], "prompts computed whole")
    assert not engine.events["chunks"]


def test_one_bad_prompt_of_an_offline_call_stops_it_before_anything_runs(tiny):
    with LLM(str(tiny.path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=256, num_blocks_override=4) as llm:
        fine, long = prompts_of(tiny, (17, 200))
        with pytest.raises(OarlockError, match=r"prompt 1.*\d"):
            llm.generate(prompt_token_ids=[fine, long], sampling_params=greedy(4), use_tqdm=False)
        metrics = {m.name: m.value for m in llm.get_metrics()}
        assert metrics["vllm:prompt_tokens"] == 0


# ---------------------------------------------------------------- memory
def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor of nested dicts, lists and packed weights."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(part)
    else:
        yield from tensors([getattr(tree, name) for name in tree.__dataclass_fields__ if not isinstance(getattr(tree, name), int)])


def kv_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for cache in tensors for t in cache)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_memory_is_what_the_plan_says(checkpoint, device, family):
    """The KV cache takes the bytes that were allowed, less than a block below; the host tier likewise; weights as they are."""
    engine = Engine(checkpoint(family).path, device, kv_cache_memory="4MiB", swap_space="2MiB", max_model_len=256)
    try:
        plan = {what: size for what, size, _ in engine.info.memory_plan}
        runner = engine.worker.runner
        cache, tier = kv_bytes(runner.state["kv"]), kv_bytes(runner.host_tier)
        block = cache // (engine.info.num_blocks + 1)
        assert cache == plan["KV cache"] and (4 << 20) - block < cache <= 4 << 20
        assert tier == plan["host KV tier"] and (2 << 20) - block < tier <= 2 << 20
        assert tier // block == engine.info.num_host_blocks
        whole = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for cache in runner.host_tier for t in cache}
        assert list(whole.values()) == [tier]  # one piece: pinned memory is rounded up to a power of two, and layers would each be

        every = {id(t): t for t in tensors(engine.worker.weights)}  # a tied head counts once
        size = sum(t.numel() * t.element_size() for t in every.values())
        assert plan["weights"] <= size <= 1.2 * plan["weights"]  # packed weights are rounded up to whole panels
        limits = [note for what, _, note in engine.info.memory_plan if what == "limit"]
        assert limits == ["--kv-cache-memory 4.0 MiB"]
    finally:
        engine.close()


def test_cache_too_small_for_one_request_is_refused_with_the_length_that_fits(checkpoint):
    tiny = checkpoint("llama")
    with pytest.raises(ConfigError, match="largest that fits") as caught:
        Engine(tiny.path, "cpu", kv_cache_memory="128KiB", max_model_len=704)
    (length,) = [int(w) for w in str(caught.value).replace(";", " ").split() if w.isdigit() and w != "704"]
    engine = Engine(tiny.path, "cpu", kv_cache_memory="128KiB", max_model_len=length)
    engine.close()
    with pytest.raises(ConfigError):
        Engine(tiny.path, "cpu", kv_cache_memory="128KiB", max_model_len=length + 1)
    engine = Engine(tiny.path, "cpu", kv_cache_memory="128KiB", max_model_len=-1)
    assert engine.info.max_model_len == length
    engine.close()


def test_number_of_blocks_is_the_number_asked_for(make, tiny):
    engine = make(num_blocks_override=13)
    assert engine.info.num_blocks == engine.stats.num_blocks == 13
    most = []
    for prompt in prompts_of(tiny, (64, 40, 17)):
        engine.submit(prompt, greedy(30))
    while engine.client.has_unfinished():
        most.append(engine.client.step().stats.num_used_blocks)
    assert 0 < max(most) <= 13


# ---------------------------------------------------------------- idle
def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all of its threads, and of its children that are alive."""
    tick = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if stat.parent.name == str(pid) or fields[1] == str(pid):
            total += (int(fields[11]) + int(fields[12])) / tick
    return total


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to read a process's CPU time")
@pytest.mark.parametrize("size", [1, 2])
def test_idle_engine_process_takes_no_cpu(tiny, size):
    """Before the first request and after one; with two ranks, their processes as well."""
    from oarlock.engine.launch import prepare
    from oarlock.messages import EngineRequest

    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "tensor_parallel_size": size}
    config = from_kwargs(str(tiny.path), **options).engine
    (prompt,) = prompts_of(tiny, (40,))

    async def measure() -> tuple[list[float], list[int]]:
        client = prepare(config, load_summary(config.model)).process()
        done, tokens = asyncio.Event(), []

        def receive(outputs: Any) -> None:
            for output in outputs.outputs:
                tokens.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    done.set()

        client.on_outputs = receive
        idle = []
        try:
            await client.ready()
            for _ in range(2):
                await asyncio.sleep(0.5)  # whatever follows a start or an answer
                before = cpu_seconds(client.pid)
                await asyncio.sleep(IDLE_S)
                idle.append(cpu_seconds(client.pid) - before)
                if not tokens:
                    client.submit(EngineRequest("a", tuple(prompt), GREEDY))
                    await asyncio.wait_for(done.wait(), 60)
        finally:
            client.shutdown()
        return idle, tokens

    idle, tokens = asyncio.run(measure())
    check_all(tiny, [prompt], [tokens], "an engine process")
    assert max(idle) <= IDLE_CPU_S, f"{idle} CPU seconds in {IDLE_S} s each with nothing to do"


@pytest.mark.alone
def test_idle_offline_engine_takes_no_cpu(tiny):
    import time

    with LLM(str(tiny.path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=256) as llm:
        llm.generate(prompt_token_ids=prompts_of(tiny, (40,)), sampling_params=greedy(8), use_tqdm=False)
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(IDLE_S)
        assert time.process_time() - before <= IDLE_CPU_S
