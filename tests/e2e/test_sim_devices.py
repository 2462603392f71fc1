"""Whole engines on the simulated devices: what a step may cost, that shapes stay fixed, and that garbage in the cache is never read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oarlock_sim
import pytest
import torch
from oarlock.config.resolve import from_kwargs
from oarlock.engine.client import InProcessClient
from oarlock.engine.launch import launch_inprocess
from oarlock.errors import OarlockError
from oarlock.messages import EngineRequest
from oarlock.model_summary import load_summary
from oarlock.plugins import hook_calls
from oarlock.runtime.model_runner import ModelRunner
from oarlock.runtime.worker import Worker
from oarlock.sampling_params import SamplingParams
from oarlock.shapes import BucketTable
from oarlock_sim import counters
from tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = (1, 5, 12, 13, 40, 100)
DEVICES = ("cpu", "sim-eager", "sim-static")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def launch(checkpoint) -> Iterator[Callable[..., InProcessClient]]:
    """Start engines by device name; they are shut down after the test."""
    started: list[InProcessClient] = []

    def start(device: str, **options: Any) -> InProcessClient:
        probe = next((d.probe() for d in oarlock_sim.devices() if d.name == device), None)
        if probe is not None and probe.status != "available":
            pytest.skip(f"{device}: {probe.reason}")
        options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 48, **options}
        config = from_kwargs(str(checkpoint), device=device, **options).engine
        client = launch_inprocess(config, load_summary(config.model))
        started.append(client)
        return client

    yield start
    for client in started:
        client.shutdown()


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, ...]]:
    """Token ids from a seed, one prompt for each length."""
    rng = np.random.default_rng(11)
    return [tuple(int(t) for t in rng.integers(3, 300, length)) for length in lengths]


def submit(client: InProcessClient, name: str, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> None:
    client.submit(EngineRequest(name, prompt, params))


def finish(client: InProcessClient) -> tuple[dict[str, list[int]], list[tuple[bool, Counter[str]]]]:
    """Run until idle: the tokens by request, and for each step whether every output was one token, with what the step counted."""
    tokens: dict[str, list[int]] = {}
    steps = []
    while client.has_unfinished():
        counters.reset()
        outputs = client.step()
        assert outputs is not None
        assert outputs.compiles_after_warmup == 0
        for output in outputs.outputs:
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        steps.append((bool(outputs.outputs), Counter(counters.COUNT)))
    return tokens, steps


def run_all(client: InProcessClient, params: SamplingParams = GREEDY) -> dict[str, list[int]]:
    """All prompts, in two waves, so that some decode while others are chunked."""
    every = prompts()
    for at, prompt in enumerate(every[:3]):
        submit(client, str(at), prompt, params)
    early: dict[str, list[int]] = {}
    for _ in range(3):
        outputs = client.step()
        assert outputs is not None
        for output in outputs.outputs:
            early.setdefault(output.request_id, []).extend(output.new_token_ids)
    for at, prompt in enumerate(every[3:], 3):
        submit(client, str(at), prompt, params)
    late, _ = finish(client)
    return {name: early.get(name, []) + late.get(name, []) for name in map(str, range(len(every)))}


def assert_cheap_decode(client: InProcessClient, params: SamplingParams) -> None:
    """Prefill first, then look at the steps in which every request decodes."""
    for at, prompt in enumerate(prompts((5, 12, 20))):
        submit(client, str(at), prompt, params)
    _, steps = finish(client)
    decode = [count for emitted, count in steps[1:] if emitted and count["ops"]]
    assert len(decode) >= 5
    for count in decode:
        assert count["d2h"] <= 1, f"{count['d2h']} device-to-host copies in one decode step"
        assert not count["sync"], f"the host waited in {[k for k in count if k.startswith('sync:')]}"
        assert not count["h2d_int64"], "the device asked for int32 indices"
        assert count["h2d"] <= 4, "host inputs travel as one packed buffer for each program"


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=3, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.7, presence_penalty=0.5, repetition_penalty=1.1, seed=4, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.0, logit_bias={5: 2.0}, min_tokens=4, max_tokens=12),
    ],
    ids=["greedy", "sampled", "penalties", "bias"],
)
def test_decode_step_copies_to_the_host_at_most_once(launch, params):
    assert_cheap_decode(launch("sim-eager"), params)


def test_overlapped_decode_step_copies_to_the_host_at_most_once(launch):
    assert_cheap_decode(launch("sim-eager", max_in_flight=2), GREEDY)


@pytest.mark.parametrize(
    ("stray", "message"),
    [
        (lambda hidden: hidden.cpu(), "2 device-to-host copies"),
        (lambda hidden: hidden[0, 0].item(), "the host waited"),
        (lambda hidden: hidden.nonzero(), "the host waited"),
        (lambda hidden: torch.arange(4).to(hidden.device), "int32 indices"),
    ],
    ids=["cpu", "item", "nonzero", "int64"],
)
def test_a_stray_read_in_the_step_fails_that_test(launch, monkeypatch, stray, message):
    sample = ModelRunner._sample

    def leaky(self: ModelRunner, pending: Any, key: Any, hidden: torch.Tensor) -> None:
        stray(hidden)
        sample(self, pending, key, hidden)

    monkeypatch.setattr(ModelRunner, "_sample", leaky)
    with pytest.raises(AssertionError, match=message):
        assert_cheap_decode(launch("sim-eager"), GREEDY)


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict[str, list[int]]:
    """Greedy continuations by transformers, each token by a forward over the whole text."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = {}
    with torch.no_grad():
        for at, prompt in enumerate(prompts()):
            tokens = list(prompt)
            for _ in range(GREEDY.max_tokens):
                best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
                assert best.values[0] - best.values[1] > 1e-3, "a near-tie: choose another seed"
                tokens.append(int(best.indices[0]))
            found[str(at)] = tokens[len(prompt) :]
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens_are_those_of_naive_recomputation(launch, expected, device):
    assert run_all(launch(device)) == expected


def test_nothing_is_compiled_while_serving(launch, expected):
    client = launch("sim-static")
    run_all(client)
    counters.reset()
    sampled = SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.3, logprobs=3, prompt_logprobs=2, seed=1, max_tokens=5)
    for at, prompt in enumerate(prompts((2, 33, 60))):
        submit(client, f"s{at}", prompt, sampled)
    finish(client)
    assert run_all(client) == expected
    assert counters.COUNT["compiles"] == 0
    assert counters.COUNT["runs"] > 0


def test_a_key_that_was_not_warmed_up_is_refused_and_fails_only_its_step(launch, monkeypatch):
    from oarlock.shapes import ShapePolicy, StepKey

    client = launch("sim-static")
    fit, calls = ShapePolicy.fit, []

    def off_by_one(self: ShapePolicy, *args: Any) -> StepKey:
        key = fit(self, *args)
        calls.append(key)
        return key if len(calls) > 1 else StepKey(key.tokens, key.rows, key.blocks + 1, key.max_q, key.decode_rows)

    monkeypatch.setattr(ShapePolicy, "fit", off_by_one)
    submit(client, "unlucky", prompts((5,))[0])
    outputs = client.step()
    assert outputs is not None
    (output,) = outputs.outputs
    assert output.finish_reason == "error" and "was not warmed up" in output.error.message
    submit(client, "next", prompts((5,))[0])
    while client.has_unfinished():
        last = client.step()
    assert last is not None and last.outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("device", ["sim-eager", "sim-static"])
def test_nan_in_freed_and_unused_blocks_changes_no_token(launch, expected, monkeypatch, device):
    """Before each step every block that no row holds is filled with NaN, so blocks are handed out full of it."""
    poisoned = Counter()
    execute = ModelRunner.execute

    def poison_first(self: ModelRunner, out: Any) -> Any:
        held = {0}
        for row in self.batch.rows.values():
            if row.branch_id not in out.finished:
                held.update(self.batch.tables[:, row.row].ravel().tolist())
        for new in out.new_requests:
            held.update(block for group in new.block_ids for block in group)
        free = [block for block in range(self.limits.num_blocks) if block not in held]
        ids = torch.tensor(free, dtype=torch.int64).to(self.device.torch_device)
        for cache in self.state["kv"]:
            for tensor in cache:
                tensor.index_fill_(0, ids, float("nan"))
        poisoned["blocks"] += len(free)
        return execute(self, out)

    monkeypatch.setattr(ModelRunner, "execute", poison_first)
    client = launch(device, enable_prefix_caching=False, num_gpu_blocks_override=60)
    assert run_all(client) == expected
    assert run_all(client) == expected  # on blocks that other requests have used
    assert poisoned["blocks"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_no_hook_is_called_while_serving(launch, device):
    client = launch(device)
    before = hook_calls()
    assert before > 0
    run_all(client)
    assert hook_calls() == before


def test_odd_block_size_and_host_tier_are_the_defaults_of_sim_eager(launch):
    info = launch("sim-eager").info
    assert info.block_size == 12
    assert info.num_host_blocks > 0


def test_a_model_too_large_for_the_simulated_memory_is_refused_with_numbers(launch):
    from oarlock_sim.tensor import MEMORY

    try:  # room for the least that such a model can have, which is looked at first, and not for this one
        with pytest.raises(OarlockError, match=r"of 0\.4 MiB\); not even one block of 6\.0 KiB fits beside weights and activations of 0\.7 MiB"):
            launch("sim-eager", sim_memory=0.0004)
    finally:
        MEMORY.total_bytes = oarlock_sim.MEMORY_BYTES


def test_buckets_follow_the_context_that_all_ranks_agreed_on(checkpoint):
    """This rank's memory holds 256 tokens, another's only 64: after the start nothing wider may be waited for, or compiled."""
    config = from_kwargs(str(checkpoint), device="sim-static", dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=48).engine
    factory = next(d.factory for d in oarlock_sim.devices() if d.name == "sim-static")
    worker = Worker(config, load_summary(config.model), "sim-static", factory)
    try:
        worker.prepare()
        ready = worker.load()
        worker.start(ready.num_blocks, 0, 64)
        agreed = BucketTable(**worker.device.buckets(8, 48, -(-64 // ready.block_size)))
        assert worker.runner.policy.table == worker.buckets == agreed != ready.buckets
    finally:
        worker.close()
