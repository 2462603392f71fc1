"""Engine, processes, executor and HTTP on the null device: every expected token is computed here from the formula, without a model.

The next token after tokens t0 … t(n-1) is (t0 + … + t(n-1) + n) mod vocab_size; the logit of token v is its distance from there, negative.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oarlock import LLM, PoolingParams, SamplingParams
from oarlock.config.resolve import from_kwargs
from oarlock.conformance.null_device import NullExecutor
from oarlock.conformance.null_memory import Breach, NullMemory
from oarlock.engine.launch import prepare
from oarlock.errors import EngineDead, OarlockError
from oarlock.kv_spec import KVGroup
from oarlock.messages import CachedRequest, EngineRequest, NewRequest, ScheduledRow, SchedulerOutput
from oarlock.model_summary import load_summary
from oarlock.plugins import hook_calls
from oarlock.sampling_params import BeamSearchParams
from oarlock.scheduler.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # what real_server imports

from real_server import RealServer, join, ok
from tiny_model import EOS_ID, make_tokenizer

VOCAB = 448
PROMPTS = [[5, 6, 7], [1] * 40, list(range(3, 120)), [9]]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 256, "eos_token_id": EOS_ID,
}  # fmt: skip
# Every third layer sees all, the others 20 tokens.
HYBRID = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 20, "sliding_window_pattern": 3}
MAX_TOKENS = 60
PLAIN = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def paper(prompt: list[int], count: int, vocab: int = VOCAB) -> list[int]:
    """The formula, written down once more."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((sum(tokens) + len(tokens)) % vocab)
    return tokens[len(prompt) :]


LOG_SUM = math.log(sum(math.exp(-distance) for distance in range(VOCAB)))  # of the logits 0, -1, -2, …


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights."""
    made = tmp_path_factory.mktemp("null")
    (made / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab_size() <= VOCAB
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return made


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def start(**options: Any) -> LLM:
        llm = LLM(str(folder), device="null", **options)
        made.append(llm)
        return llm

    yield start
    for llm in made:
        llm.close()


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = PLAIN) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def test_the_example_on_paper():
    assert paper([5, 6, 7], 4, 100) == [21, 43, 87, 75]
    from oarlock.conformance import null_answers

    assert null_answers.answer([5, 6, 7], 4, 100) == [21, 43, 87, 75]
    assert "18 + 3 = 21,   39 + 4 = 43,   82 + 5 = 87,   169 + 6 = 75" in str(null_answers.__doc__)


TIGHT = {"num_blocks_override": 30, "block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 200}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        TIGHT,
        TIGHT | {"swap_space": 0.01, "preemption_mode": "swap"},
        TIGHT | {"enable_prefix_caching": False},
        TIGHT | {"hf_overrides": HYBRID, "skip_tokenizer_init": True, "num_blocks_override": 80},
    ],
    ids=["default", "preempted", "swapped", "no-prefix-cache", "windows"],
)
def test_tokens_are_those_on_paper(make, options, in_flight):
    llm = make(**options, max_in_flight=in_flight)
    assert tokens(llm, PROMPTS) == [paper(p, MAX_TOKENS) for p in PROMPTS]
    again = llm.generate(PROMPTS, PLAIN, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in again] == [paper(p, MAX_TOKENS) for p in PROMPTS]
    if options.get("enable_prefix_caching", True) and not options:
        assert again[2].num_cached_tokens == 112  # 117 tokens: 7 full blocks of 16


def test_preemption_and_swap_happen_and_are_checked(make):
    for extra, name in (({}, "num_preemptions"), ({"swap_space": 0.01, "preemption_mode": "swap"}, "num_swap_outs")):
        llm = make(**TIGHT | extra)
        assert tokens(llm, [[i] * 60 for i in range(3, 9)]) == [paper([i] * 60, MAX_TOKENS) for i in range(3, 9)]
        assert getattr(llm._engine.inbox.stats, name) > 0


def test_a_request_ends_at_eos_and_at_stop_ids(make):
    llm = make()
    (out,) = llm.generate([[200, 248]], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)  # 448 + 2 = 2
    assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == ([EOS_ID], "stop")
    expected = paper([5, 6, 7], 4)
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[expected[3]]), use_tqdm=False)
    assert (out.outputs[0].token_ids, out.outputs[0].stop_reason) == (expected, expected[3])


def test_logprobs_are_those_of_the_distances(make):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (out,) = make().generate([[5, 6, 7]], params, use_tqdm=False)
    for token, found in zip(paper([5, 6, 7], 3), out.outputs[0].logprobs, strict=True):
        assert list(found) == [token, (token + 1) % VOCAB]
        assert [v.rank for v in found.values()] == [1, 2]
        assert [v.logprob for v in found.values()] == pytest.approx([-LOG_SUM, -1 - LOG_SUM])
    second = out.prompt_logprobs[1]  # after 5 comes 5 + 1 = 6, which is what the prompt has
    assert second[6].logprob == pytest.approx(-LOG_SUM) and second[6].rank == 1
    third = out.prompt_logprobs[2]  # after 5 6 comes 13; the prompt has 7, which is -6 from there
    assert third[7].rank == VOCAB - 6 + 1 and third[7].logprob == pytest.approx(-(VOCAB - 6) - LOG_SUM)


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, 21),
        ({"temperature": 1.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4}, 21),  # no noise is added
        ({"logit_bias": {21: -1.5}}, 22),  # -1.5 against -1
        ({"logit_bias": {21: -0.5}}, 21),
        ({"logit_bias": {300: 100.0}}, 21),  # its logit is -279
        ({"logit_bias": {100: 100.0}}, 100),  # its logit is -79
        ({"allowed_token_ids": [20, 30, 40]}, 30),  # 9 from there; 20 is 447
        ({"bad_words_token_ids": [[21]]}, 22),
        ({"stop_token_ids": [21], "min_tokens": 1}, 22),
    ],
)
def test_what_acts_on_logits_acts_here(make, fields, first):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 1, "ignore_eos": True, **fields})
    assert tokens(make(), [[5, 6, 7]], params) == [[first]]


def test_penalties_act_on_the_tokens_that_were_there(make):
    llm = make()
    base = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "allowed_token_ids": [50, 51]}
    assert tokens(llm, [[40]], SamplingParams(**base)) == [[50, 50]]
    # The two are one logit apart, so a penalty of 2 turns them round once 50 was there.
    assert tokens(llm, [[40]], SamplingParams(**base, presence_penalty=2.0)) == [[50, 51]]
    assert tokens(llm, [[40]], SamplingParams(**base, frequency_penalty=2.0)) == [[50, 51]]


def test_structured_output_is_kept_to(make):
    llm = make()
    for fields in ({}, {"n": 2, "temperature": 1.0}, {"presence_penalty": 2.0}, {"use_beam_search": True, "n": 2, "temperature": 0}):
        params = SamplingParams(max_tokens=20, structured_outputs={"choice": ["positive", "negative"]}, **fields)
        (out,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert {c.text for c in out.outputs} <= {"positive", "negative"} and {c.finish_reason for c in out.outputs} == {"stop"}


def test_branches_agree_and_beams_are_the_cheapest_sequences(make):
    llm = make()
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.9, n=3, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert [c.token_ids for c in out.outputs] == [paper([5, 6, 7], 9)] * 3
    (beams,) = llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True))
    best, *others = beams.sequences
    assert best.tokens == [5, 6, 7, *paper([5, 6, 7], 5)] and best.cum_logprob == pytest.approx(-5 * LOG_SUM)
    for beam in others:  # one step of distance 1 each: nothing cheaper is left
        assert beam.cum_logprob == pytest.approx(-5 * LOG_SUM - 1)
        costs = [(t - sum(beam.tokens[:at]) - at) % VOCAB for at, t in enumerate(beam.tokens) if at >= 3]
        assert sorted(costs) == [0, 0, 0, 0, 1]


def test_no_torch_is_imported_and_no_hook_called_while_serving(folder):
    code = f"""
import sys
from oarlock import LLM, PoolingParams, SamplingParams
from oarlock.plugins import hook_calls
llm = LLM({str(folder)!r}, device="null")
before = hook_calls()
out = llm.generate([[n] * 5 for n in range(3, 53)], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(len(out), before > 0, hook_calls() - before, [name for name in ("torch", "transformers") if name in sys.modules])
llm.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "50 True 0 []"


def test_fifty_requests_call_no_hook(make):
    llm = make()
    before = hook_calls()
    assert before > 0
    tokens(llm, [[n] * 5 for n in range(3, 53)])
    assert hook_calls() == before


# ---------------------------------------------------------------- its own limits
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distributed_executor_backend": "mp"}, ["--distributed-executor-backend mp was given", "oarlock:null", "leave"]),
        ({"tensor_parallel_size": 2}, ["one rank", "--tensor-parallel-size is 2", "use 1"]),
        ({"threads": 2}, ["--threads 2", "leave it out"]),
        ({"block_size": 64}, ["--block-size 64"]),
    ],
)
def test_what_it_cannot_do_is_refused(make, options, words):
    with pytest.raises(OarlockError) as caught:
        make(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_its_executor_is_for_no_other_device(folder):
    with pytest.raises(OarlockError, match="--distributed-executor-backend null: device cpu has no such executor"):
        LLM(str(folder), device="cpu", distributed_executor_backend="null")


# ---------------------------------------------------------------- in a process of its own
def test_an_engine_process_answers_the_same(folder):
    async def run() -> list[list[int]]:
        config = from_kwargs(str(folder), device="null", max_in_flight=2).engine
        client = prepare(config, load_summary(config.model)).process()
        try:
            await client.ready()
            assert client.info.device == "null" and client.info.vocab_size == VOCAB
            found: dict[str, list[int]] = {str(at): [] for at in range(len(PROMPTS))}
            ended = asyncio.Event()

            def receive(outputs: Any) -> None:
                for output in outputs.outputs:
                    found[output.request_id] += output.new_token_ids
                    if output.finish_reason:
                        open_requests.remove(output.request_id)
                if not open_requests:
                    ended.set()

            open_requests = set(found)
            client.on_outputs = receive
            for at, prompt in enumerate(PROMPTS):
                client.submit(EngineRequest(str(at), tuple(prompt), PLAIN))
            await asyncio.wait_for(ended.wait(), 30)
            return [found[str(at)] for at in range(len(PROMPTS))]
        finally:
            client.shutdown()

    assert asyncio.run(run()) == [paper(p, MAX_TOKENS) for p in PROMPTS]


@pytest.mark.parametrize("options", [{}, TIGHT | {"swap_space": 0.01, "preemption_mode": "swap"}, TIGHT | {"hf_overrides": HYBRID, "num_blocks_override": 80}])
def test_vectors_are_those_on_paper_and_no_block_is_kept(make, options):
    llm = make(**options)
    for pooling, fields in (("last", {}), ("mean", {}), ("mean", {"dimensions": 32})):
        results = llm.embed([*PROMPTS, *PROMPTS], pooling_params=PoolingParams(pooling=pooling, **fields), use_tqdm=False)
        for prompt, result in zip([*PROMPTS, *PROMPTS], results, strict=True):
            entries = [1 + (paper(prompt, 1)[0] + d) % VOCAB for d in range(32)]
            assert result.outputs.embedding == pytest.approx([entry / math.hypot(*entries) for entry in entries], abs=1e-6)
    assert llm._engine.inbox.stats.num_used_blocks == 0


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RealServer(folder, "--device", "null", log=log, defaults=()) as started:
        yield started


def test_http_answers_the_same(server, folder):
    tokenizer = make_tokenizer()
    body = {"model": str(folder), "prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = ok(server.post("/v1/completions", body))
    assert [c["text"] for c in answer["choices"]] == [tokenizer.decode(paper(p, 12)) for p in PROMPTS]
    assert answer["usage"]["completion_tokens"] == 12 * len(PROMPTS)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    chunks = server.stream("/v1/completions", {**body, "prompt": PROMPTS[0]})
    assert join(chunks) == tokenizer.decode(paper(PROMPTS[0], 12))


def test_the_route_says_what_to_expect(server):
    assert ok(server.http.get("/null/tokens?prompt=5,6,7&max_tokens=5")) == {"tokens": paper([5, 6, 7], 5)}
    refused = server.http.get("/null/tokens?prompt=a,b")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_the_engine_process_holds_no_torch(server):
    maps = Path(f"/proc/{server.engine_pid()}/maps").read_text()
    assert "libtorch" not in maps


def test_the_command_says_what_to_expect():
    command = [sys.executable, "-m", "oarlock.cli.main", "null-tokens", "5,6,7", "--vocab-size", "100", "--max-tokens", "4"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "21,43,87,75\n"


# ---------------------------------------------------------------- it notices what is wrong
FULL = (KVGroup(0, "full", None, (0,)),)


def new(branch: int, length: int, blocks: tuple[int, ...], **fields: Any) -> NewRequest:
    return NewRequest(branch, tuple(range(3, 3 + length)), length, PLAIN, 0, 0, (blocks,), **fields)


def first_step(length: int = 6, blocks: tuple[int, ...] = (1, 2)) -> SchedulerOutput:
    return SchedulerOutput(1, (ScheduledRow(0, 0, length, True),), new_requests=(new(0, length, blocks),))


def memory() -> NullMemory:
    return NullMemory(FULL, num_blocks=8, block_size=4, num_host_blocks=4, max_num_seqs=2)


def test_a_right_step_passes():
    store = memory()
    ((row, known),) = store.step(first_step())
    assert row.branch_id == 0 and known.sums[-1] == sum(range(3, 9))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (first_step(blocks=(1,)), "position 5 has none"),
        (first_step(blocks=(0, 2)), "written to block 0"),
        (first_step(blocks=(1, 9)), "written to block 9"),
        (first_step(blocks=(1, 1)), "written twice"),
        (SchedulerOutput(1, (ScheduledRow(0, 4, 2, True),), new_requests=(new(0, 6, (1, 2)),)), "positions 0 to 3"),
        (SchedulerOutput(1, (ScheduledRow(0, 0, 7, True),), new_requests=(new(0, 6, (1, 2)),)), "asked for position 6"),
        (SchedulerOutput(1, (ScheduledRow(0, 0, 4, True),), new_requests=(new(0, 6, (1, 2)),)), "sample after token 4 of 6"),
        (SchedulerOutput(1, (ScheduledRow(7, 0, 1, False),)), "never announced"),
        (SchedulerOutput(1, (), finished=(3,)), "never announced"),
        (SchedulerOutput(1, (), new_requests=tuple(new(n, 1, (n + 1,)) for n in range(3))), "3 branches for 2 rows"),
        (SchedulerOutput(1, (), block_copy=((1, 2),)), "never written"),
        (SchedulerOutput(1, (), swap_in=((0, 2),)), "never written"),
        (SchedulerOutput(1, (), cached_requests=(CachedRequest(5),)), "never announced"),
    ],
)
def test_a_wrong_step_is_a_breach(step, words):
    with pytest.raises(Breach, match=words):
        memory().step(step)


def test_rows_of_one_token_come_first():
    step = SchedulerOutput(1, (ScheduledRow(0, 0, 6, True), ScheduledRow(1, 0, 1, True)), new_requests=(new(0, 6, (1, 2)), new(1, 1, (3,))))
    with pytest.raises(Breach, match="must come first"):
        memory().step(step)


@pytest.mark.parametrize(("order", "fine"), [(("swap_out", "block_copy", "swap_in"), True), (("block_copy", "swap_out", "swap_in"), False)])
def test_moves_are_made_in_the_order_of_the_contract(order, fine):
    """A block that is swapped out may be the target of a copy in the same step: only the right order keeps both."""
    store = memory()
    store.step(first_step())
    two = SchedulerOutput(2, (), new_requests=(NewRequest(1, (9, 9, 9, 9, 9), 5, PLAIN, 0, 0, ((3, 4),)),))
    store.step(two)
    store.step(SchedulerOutput(3, (ScheduledRow(1, 0, 5, False),)))
    # Block 1 goes to the host, block 3 is copied over it, and block 1's content comes back into block 5.
    moves = {"swap_out": ((1, 0),), "block_copy": ((3, 1),), "swap_in": ((0, 5),)}
    tables = (CachedRequest(0, replaced=((0, 0, 5),)), CachedRequest(1, replaced=((0, 0, 1),)))
    for at, name in enumerate(order[:-1] if not fine else ()):
        store.step(SchedulerOutput(4 + at, (), **{name: moves.pop(name)}))
    rows = (ScheduledRow(0, 5, 1, False), ScheduledRow(1, 4, 1, False))
    last = SchedulerOutput(9, rows, cached_requests=tables, **moves)
    if fine:
        store.step(last)
    else:
        with pytest.raises(Breach, match="positions 0 to 3"):
            store.step(last)


def test_a_breach_ends_the_engine(make, monkeypatch):
    """A scheduler that forgets a copy is noticed by what the copy would have held."""
    schedule = Scheduler.schedule

    def forgetful(self: Scheduler) -> SchedulerOutput | None:
        out = schedule(self)
        return out if out is None else replace(out, block_copy=())

    monkeypatch.setattr(Scheduler, "schedule", forgetful)
    llm = make(block_size=8)
    with pytest.raises(EngineDead, match="positions 16 to 20 of group 0"):
        llm.generate([list(range(3, 24))], SamplingParams(temperature=0.8, n=3, max_tokens=9, ignore_eos=True), use_tqdm=False)


def test_the_executor_is_found_by_its_name_alone(folder):
    config = from_kwargs(str(folder), device="null").engine
    launch = prepare(config, load_summary(config.model))
    assert launch.config.parallel.executor == "null"
    client = launch.inprocess()
    try:
        assert isinstance(client._core.executor, NullExecutor)
    finally:
        client.shutdown()
