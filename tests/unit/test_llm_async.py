"""Many streams over one scripted engine: each gets its own, ends once, and frees the engine when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from oarlock.async_llm import THREAD_CHARS, AsyncLLM
from oarlock.errors import EngineDead, InvalidParameter, PromptTooLong, QueueFull, RequestError
from oarlock.frontend.inputs import InputProcessor
from oarlock.messages import Abort, EngineOutput, EngineOutputs, ErrorInfo, SchedulerStats
from oarlock.sampling_params import SamplingParams
from toy_frontend import EOS, SUMMARY, ScriptedClient, ToyTokenizer, info, says


class Served:
    """An AsyncLLM whose engine steps in a task on the same loop."""

    def __init__(self, script=says("hello"), *, max_waiting_requests=None, **settings) -> None:  # noqa: B008
        self.client = ScriptedClient(script, **settings)
        tokenizer = ToyTokenizer()
        processor = InputProcessor(self.client.info, tokenizer, SUMMARY)
        self.llm = AsyncLLM(self.client, processor, tokenizer, max_waiting_requests=max_waiting_requests)

    async def __aenter__(self):
        self._task = asyncio.create_task(self._run())
        return self

    async def _run(self):
        while True:
            if self.client.is_alive() and self.client.has_unfinished():
                self.client.step()
            await asyncio.sleep(0)

    async def __aexit__(self, *exc):
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def idle(self):
        for _ in range(50):
            await asyncio.sleep(0)
        assert not self.client.has_unfinished()
        assert self.llm.num_open == 0


def run(test):
    async def main():
        async with asyncio.timeout(5):
            await test

    asyncio.run(main())


async def collect(stream):
    return [delta async for delta in stream]


def test_stream_and_whole_result_are_the_same():
    async def test():
        async with Served(says("hello world"), abort_lag=1) as s:
            params = SamplingParams(n=2, stop=["wor"], logprobs=2, max_tokens=20)
            deltas = await collect(s.llm.generate("p", params, "1"))
            (whole,) = await collect(s.llm.generate("p", params, "2", stream=False))
            for choice in whole.outputs:
                news = [c for d in deltas for c in d.outputs if c.index == choice.index]
                assert "".join(c.text for c in news) == choice.text == "hello "
                assert [t for c in news for t in c.token_ids] == choice.token_ids
                assert [entry for c in news for entry in c.logprobs] == choice.logprobs
                assert [c.finish_reason for c in news if c.finish_reason] == [choice.finish_reason] == ["stop"]
                assert news[-1].stop_reason == choice.stop_reason == "wor"
            assert [d.finished for d in deltas].count(True) == 1
            assert deltas[-1].finished
            assert deltas[-1].num_generated_tokens == whole.num_generated_tokens == 18
            await s.idle()

    run(test())


def test_many_requests_each_get_their_own():
    async def test():
        async with Served(lambda request, index: [*request.prompt_token_ids, EOS]) as s:
            jobs = [collect(s.llm.generate(f"prompt {i}", SamplingParams(max_tokens=20), str(i), stream=i % 2 == 0)) for i in range(20)]
            results = await asyncio.gather(*jobs)
            for i, deltas in enumerate(results):
                assert "".join(c.text for d in deltas for c in d.outputs) == f"prompt {i}"
            assert s.llm.stats.num_blocks == 64
            await s.idle()

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_invalid_input_raises_before_anything_is_queued(stream):
    async def test():
        async with Served() as s:
            cases = [
                ([], SamplingParams(), InvalidParameter, "prompt"),
                ("x" * 100, SamplingParams(), PromptTooLong, "messages"),
                ("x", SamplingParams(stop_token_ids=[9999]), InvalidParameter, "stop_token_ids"),
                ("x", SamplingParams(max_tokens=100), PromptTooLong, "max_completion_tokens"),
            ]
            for prompt, params, kind, param in cases:
                name = param if param == "messages" else "prompt"
                with pytest.raises(kind) as caught:
                    await collect(s.llm.generate(prompt, params, "1", stream=stream, param=name, max_tokens_param="max_completion_tokens"))
                assert caught.value.param == param
            with pytest.raises(InvalidParameter, match="SamplingParams"):
                await collect(s.llm.generate("x", None, "1", stream=stream))
            assert s.client.submitted == []
            await s.idle()

    run(test())


def test_what_is_best_only_at_the_end_cannot_be_streamed():
    async def test():
        async with Served() as s:
            for params, param in ((SamplingParams(best_of=2), "best_of"), (SamplingParams(use_beam_search=True, n=2), "stream")):
                with pytest.raises(InvalidParameter) as caught:
                    await collect(s.llm.generate("x", params, "1"))
                assert caught.value.param == param
            assert await collect(s.llm.generate("x", SamplingParams(n=2, best_of=2), "1"))
            (whole,) = await collect(s.llm.generate("x", SamplingParams(n=1, best_of=3), "2", stream=False))
            assert [(c.index, c.cumulative_logprob) for c in whole.outputs] == [(0, -3.0)]

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_caller_that_goes_away_ends_its_request_in_the_engine(stream):
    async def test():
        async with Served(says("x" * 60)) as s:
            params = SamplingParams(max_tokens=50)
            task = asyncio.create_task(collect(s.llm.generate("p", params, "gone", stream=stream)))
            other = asyncio.create_task(collect(s.llm.generate("q", params, "stays", stream=False)))
            while not s.client.open.get("gone", {}).get(0):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert s.client.aborts == [Abort("gone")]
            assert (await other)[0].outputs[0].finish_reason == "length"
            await s.idle()

    run(test())


def test_closing_the_stream_early_aborts_and_finishing_does_not():
    async def test():
        async with Served(says("abcdef")) as s:
            stream = s.llm.generate("p", SamplingParams(), "1")
            await anext(stream)
            await stream.aclose()
            assert s.client.aborts == [Abort("1")]
            await collect(s.llm.generate("p", SamplingParams(), "2"))
            assert s.client.aborts == [Abort("1")]
            await s.idle()

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_abort_ends_the_stream_with_that_reason(stream):
    async def test():
        async with Served(says("x" * 60)) as s:
            task = asyncio.create_task(collect(s.llm.generate("p", SamplingParams(n=2, max_tokens=50), "1", stream=stream)))
            while not s.client.open.get("1", {}).get(1):
                await asyncio.sleep(0)
            await s.llm.abort("1")
            await s.llm.abort("unknown")
            last = (await task)[-1]
            assert last.finished
            assert [c.finish_reason for c in last.outputs] == ["abort", "abort"]
            await s.idle()

    run(test())


def test_dead_engine_ends_every_stream_and_refuses_the_next():
    async def test():
        async with Served(says("x" * 60)) as s:
            tasks = [asyncio.create_task(collect(s.llm.generate("p", SamplingParams(max_tokens=50), str(i), stream=i > 0))) for i in range(3)]
            while s.client.num_steps < 3:
                await asyncio.sleep(0)
            s.client.die("worker 0 was killed")
            for task in tasks:
                with pytest.raises(EngineDead, match="worker 0"):
                    await task
            assert not s.llm.is_alive()
            assert s.llm.num_open == 0
            with pytest.raises(EngineDead, match="worker 0"):
                await collect(s.llm.generate("p", SamplingParams(), "new"))

    run(test())


def test_engine_side_error_is_raised_to_its_caller_only():
    async def test():
        async with Served(says("x" * 60)) as s:
            task = asyncio.create_task(collect(s.llm.generate("p", SamplingParams(max_tokens=50), "bad")))
            other = asyncio.create_task(collect(s.llm.generate("p", SamplingParams(max_tokens=50), "good", stream=False)))
            while not s.client.open.get("bad", {}).get(0):
                await asyncio.sleep(0)
            del s.client.open["bad"]
            error = ErrorInfo("the logits were not finite", "request")
            s.client.on_outputs(EngineOutputs((EngineOutput("bad", finish_reason="error", error=error),), SchedulerStats()))
            with pytest.raises(RequestError, match="not finite"):
                await task
            assert (await other)[0].finished
            await s.idle()

    run(test())


def test_open_requests_are_bounded():
    async def test():
        async with Served(says("x" * 60), max_waiting_requests=1, engine_info=info(max_num_seqs=1)) as s:
            params = SamplingParams(max_tokens=50)
            tasks = [asyncio.create_task(collect(s.llm.generate("p", params, str(i)))) for i in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await collect(s.llm.generate("p", params, "third"))
            await asyncio.gather(*tasks)
            await collect(s.llm.generate("p", params, "third"))

    run(test())


def test_request_id_in_use_does_not_disturb_its_owner():
    async def test():
        async with Served(says("hello")) as s:
            task = asyncio.create_task(collect(s.llm.generate("p", SamplingParams(), "same", stream=False)))
            await asyncio.sleep(0)
            with pytest.raises(InvalidParameter, match="in use"):
                await collect(s.llm.generate("p", SamplingParams(), "same"))
            assert (await task)[0].outputs[0].text == "hello"

    run(test())


def test_submit_that_fails_leaves_nothing_behind():
    async def test():
        async with Served() as s:
            s.client.submit = lambda request: (_ for _ in ()).throw(EngineDead("socket closed"))
            with pytest.raises(EngineDead, match="socket closed"):
                await collect(s.llm.generate("p", SamplingParams(), "1"))
            assert s.llm.num_open == 0
            with pytest.raises(EngineDead, match="socket closed"):  # and not that the id is in use
                await collect(s.llm.generate("p", SamplingParams(), "1"))

    run(test())


def test_long_text_is_tokenised_off_the_loop():
    import threading

    async def test():
        async with Served(says("x")) as s:
            seen = []
            encode = s.llm.tokenizer.encode
            s.llm.tokenizer.encode = lambda *a, **k: seen.append(threading.current_thread()) or encode(*a, **k)
            params = SamplingParams(truncate_prompt_tokens=3, max_tokens=1)
            await collect(s.llm.generate("y" * (THREAD_CHARS + 1), params, "1"))
            await collect(s.llm.generate("y", params, "2"))
            assert seen[0] is not threading.main_thread()
            assert seen[1] is threading.main_thread()

    run(test())


def test_few_long_texts_are_tokenised_at_once():
    import threading

    from oarlock.frontend.text_threads import MAX_AT_ONCE

    async def test():
        async with Served(says("x")) as s:
            lock, go = threading.Lock(), threading.Event()
            at_once = [0]
            encode = s.llm.tokenizer.encode

            def slow(*args, **kwargs):
                with lock:
                    at_once[0] += 1
                assert go.wait(10)
                return encode(*args, **kwargs)

            s.llm.tokenizer.encode = slow
            params = SamplingParams(truncate_prompt_tokens=3, max_tokens=1)
            tasks = [asyncio.create_task(collect(s.llm.generate("y" * (THREAD_CHARS + 1), params, str(i)))) for i in range(3 * MAX_AT_ONCE)]
            await asyncio.sleep(0.1)
            assert at_once[0] == MAX_AT_ONCE
            tasks[-1].cancel()  # it has not begun, and never does
            await asyncio.sleep(0)
            go.set()
            await asyncio.gather(*tasks[:-1])
            assert at_once[0] == 3 * MAX_AT_ONCE - 1 and tasks[-1].cancelled()

    run(test())


def test_shutdown_waits_for_a_grace_then_ends_what_is_open():
    async def test():
        async with Served(says("x" * 60)) as s:
            quick = asyncio.create_task(collect(s.llm.generate("p", SamplingParams(max_tokens=5), "1")))
            await asyncio.sleep(0)
            await s.llm.shutdown(grace_s=2)
            assert (await quick)[-1].outputs[0].finish_reason == "length"
            assert s.client.num_shutdowns == 1
        async with Served(lambda request, index: [120], engine_info=info(max_model_len=10**6)) as s:
            slow = asyncio.create_task(collect(s.llm.generate("p", SamplingParams(max_tokens=None), "1")))
            await asyncio.sleep(0)
            await s.llm.shutdown(grace_s=0.05)
            with pytest.raises(EngineDead, match="shutting down"):
                await slow
            with pytest.raises(EngineDead, match="shutting down"):
                await collect(s.llm.generate("p", SamplingParams(), "2"))

    run(test())
