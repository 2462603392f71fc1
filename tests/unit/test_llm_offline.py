"""The offline API over a scripted engine: order, errors before work, interrupts, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest
from oarlock.config.sections import EngineConfig, ModelConfig, SchedulerConfig
from oarlock.errors import ConfigError, EngineDead, InvalidParameter, ModelError, NotBuilt, OarlockError, PromptTooLong, WorkerError
from oarlock.llm import LLM
from oarlock.messages import EngineOutput, EngineOutputs, ErrorInfo, SchedulerStats
from oarlock.offline_engine import OfflineEngine
from oarlock.sampling_params import BeamSearchParams, SamplingParams
from toy_frontend import EOS, SUMMARY, ScriptedClient, ToyTokenizer, info, says

QUIET = {"use_tqdm": False}


def echo(request, index):
    """Says the prompt back, then EOS."""
    return [*request.prompt_token_ids, EOS]


def make(script=echo, config=None, tokenizer=ToyTokenizer(), **settings) -> LLM:  # noqa: B008
    return LLM.from_client(ScriptedClient(script, **settings), SUMMARY, tokenizer, config)


def client_of(llm: LLM) -> ScriptedClient:
    return llm._engine._client


def texts(results):
    return [result.outputs[0].text for result in results]


# ---------------------------------------------------------------- forms and order
def test_results_come_in_the_order_of_the_prompts_whatever_ends_first():
    prompts = ["long prompt", "a", "middle", {"prompt": "dict"}, [104, 105], {"prompt_token_ids": [106]}]
    results = make().generate(prompts, **QUIET)
    assert texts(results) == ["long prompt", "a", "middle", "dict", "hi", "j"]
    assert all(r.finished and r.outputs[0].finish_reason == "stop" for r in results)


def test_one_prompt_in_any_form_gives_one_result():
    llm = make()
    for prompt in ("hi", [104, 105], {"prompt": "hi"}, {"prompt_token_ids": [104, 105]}):
        assert texts(llm.generate(prompt, **QUIET)) == ["hi"]
    assert texts(llm.generate(inputs="hi", **QUIET)) == ["hi"]
    assert texts(llm.generate(prompt_token_ids=[104, 105], **QUIET)) == ["hi"]
    assert texts(llm.generate(prompt_token_ids=[[104], [105]], **QUIET)) == ["h", "i"]
    assert texts(llm.generate(["x", "y"], prompt_token_ids=[[104], [105]], **QUIET)) == ["h", "i"]
    assert llm.generate([], **QUIET) == []


def test_list_longer_than_the_queue_is_fed_as_the_engine_takes_it():
    config = EngineConfig(ModelConfig("m"), scheduler=SchedulerConfig(max_num_seqs=4, max_waiting_requests=3))
    llm = make(config=config)
    prompts = [f"prompt {i}" for i in range(50)]
    assert texts(llm.generate(prompts, **QUIET)) == prompts
    assert client_of(llm).most_open == 4 + 3


def test_each_prompt_has_its_own_params():
    results = make(says("abc")).generate(["x", "y"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)], **QUIET)
    assert texts(results) == ["a", "ab"]


def test_defaults_are_those_of_the_checkpoint_and_16_tokens_whatever_it_says():
    import dataclasses

    summary = dataclasses.replace(SUMMARY, generation_config={"max_new_tokens": 3, "temperature": 0.5})
    llm = LLM.from_client(ScriptedClient(says("x" * 40)), summary, ToyTokenizer())
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=16)
    assert texts(llm.generate("p", **QUIET)) == ["x" * 16]
    assert texts(make(says("x" * 40)).generate("p", **QUIET)) == ["x" * 16]


# ---------------------------------------------------------------- errors before work
@pytest.mark.parametrize(
    ("bad", "kind"),
    [([], InvalidParameter), ([99999], InvalidParameter), ("x" * 100, PromptTooLong), ("\ud800", InvalidParameter), (None, InvalidParameter)],
)
def test_one_invalid_prompt_is_named_by_index_before_any_runs(bad, kind):
    llm = make()
    with pytest.raises(kind, match="prompt 2:") as caught:
        llm.generate(["a", "b", bad, "d"], **QUIET)
    assert isinstance(caught.value, ValueError)
    assert caught.value.param == "prompt"
    assert client_of(llm).submitted == []
    assert texts(llm.generate("fine", **QUIET)) == ["fine"]


@pytest.mark.parametrize("params", [[], [SamplingParams()] * 3, {"n": 1}, "x", 5])
def test_wrong_number_or_type_of_params_is_refused(params):
    llm = make()
    with pytest.raises(InvalidParameter) as caught:
        llm.generate(["a", "b"], params, **QUIET)
    assert caught.value.param == "sampling_params"
    assert client_of(llm).submitted == []


def test_other_wrong_calls_are_refused():
    llm = make()
    for call in (
        lambda: llm.generate(**QUIET),
        lambda: llm.generate("a", inputs="b", **QUIET),
        lambda: llm.generate(["a"], prompt_token_ids=[[1], [2]], **QUIET),
        lambda: llm.generate(5, **QUIET),
        lambda: llm.generate(b"abc", **QUIET),
        lambda: llm.generate("a", priority=[1, 2], **QUIET),
        lambda: llm.beam_search("a", SamplingParams()),
        lambda: llm.chat([], **QUIET),
        lambda: llm.chat("hello", **QUIET),
        lambda: llm.chat([{"content": "x"}], **QUIET),
        lambda: llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], **QUIET),
        lambda: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"messages": []}, **QUIET),
        lambda: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"no_such_variable": 1}, **QUIET),
        lambda: llm.chat([{"role": "user", "content": "x"}], tools=[{"type": "function"}], **QUIET),
    ):
        with pytest.raises(InvalidParameter):
            call()
    for name in ("reward", "sleep", "wake_up", "collective_rpc"):
        with pytest.raises(NotBuilt, match=name):
            getattr(llm, name)("x")
    with pytest.raises(NotBuilt, match="lora_request"):
        llm.generate("a", lora_request=object(), **QUIET)
    assert client_of(llm).submitted == []


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role", "invalid_value"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id", "missing_field"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role", "unsupported_field"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0]", "invalid_type"),
        ({"role": "user", "content": "x", "rolle": "user"}, "messages[0].rolle", "unknown_field"),
        ({"role": "user"}, "messages[0].content", "missing_field"),
        ({"role": "user", "content": 5}, "messages[0].content", "invalid_type"),
    ],
)
def test_a_message_is_checked_as_it_is_over_http(message, param, code):
    """Both call `frontend.conversation.read_messages`; the HTTP cases are in tests/api."""
    llm = make()
    with pytest.raises(InvalidParameter) as caught:
        llm.chat([message], **QUIET)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert client_of(llm).submitted == []


def test_the_role_developer_is_the_system_role_where_the_template_does_not_know_it():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    developer = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    llm = make()
    assert llm.chat(developer, chat_template=template, **QUIET)[0].prompt == "<system>be brief<user>hi"
    knowing = "{# developer #}" + template
    assert llm.chat(developer, chat_template=knowing, **QUIET)[0].prompt == "<developer>be brief<user>hi"


def test_priority_needs_the_priority_policy():
    fcfs, by_priority = (EngineConfig(ModelConfig("m"), scheduler=SchedulerConfig(policy=policy)) for policy in ("fcfs", "priority"))
    with pytest.raises(InvalidParameter, match="scheduling_policy"):
        make(config=fcfs).generate("a", priority=[1], **QUIET)
    llm = make(config=by_priority)
    llm.generate(["a", "b"], priority=[1, 0], **QUIET)
    assert [r.priority for r in client_of(llm).submitted] == [1, 0]


# ---------------------------------------------------------------- what happens while it runs
def test_stop_string_ends_the_branch_in_the_engine():
    llm = make(says("one. two. three."), abort_lag=2)
    (result,) = llm.generate("p", SamplingParams(stop=". t", max_tokens=40), **QUIET)
    assert (result.outputs[0].text, result.outputs[0].stop_reason) == ("one", ". t")
    assert not client_of(llm).has_unfinished()  # nothing of it is left in the engine when the call returns


def test_interrupt_ends_the_waiting_and_never_a_step_halfway():
    steps = []

    class Slow(ScriptedClient):
        def step(self):
            steps.append("begun")
            if len(steps) == 5:
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: in the middle of a step
            time.sleep(0.002)
            super().step()
            steps.append("done")

    llm = LLM.from_client(Slow(echo, abort_lag=1), SUMMARY, ToyTokenizer())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["some prompt"] * 100, **QUIET)
    assert steps.count("begun") == steps.count("done") < 100
    assert not client_of(llm).has_unfinished()
    assert texts(llm.generate(["again"], **QUIET)) == ["again"]


def test_interrupted_launch_frees_what_it_made():
    made, before = [], set(threading.enumerate())  # engines that other tests' errors still hold are not this one's

    def launch():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the interrupt reaches the launch too
            time.sleep(0.002)
        made.append("too late")

    with pytest.raises(KeyboardInterrupt):
        OfflineEngine(launch)
    assert made == []
    assert not any(thread.name == "oarlock-engine" and thread.is_alive() for thread in set(threading.enumerate()) - before)


def test_failed_launch_raises_what_it_raised():
    def launch():
        raise ConfigError("no such device")

    with pytest.raises(ConfigError, match="no such device"):
        OfflineEngine(launch)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("boom")])
def test_error_within_a_step_leaves_the_engine_idle_and_usable(failure):
    llm = make(abort_lag=1)
    client_of(llm).fail_at[3] = failure
    with pytest.raises(type(failure)):
        llm.generate(["some prompt"] * 10, **QUIET)
    assert not client_of(llm).has_unfinished()
    assert len(llm._engine._outputs) == 0
    assert texts(llm.generate(["again", "and"], **QUIET)) == ["again", "and"]


def test_engine_that_cannot_come_to_rest_is_declared_dead():
    llm = make(abort_lag=10**6)
    client_of(llm).fail_at[1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", **QUIET)
    with pytest.raises(EngineDead, match="did not come to rest"):
        llm.generate("a", **QUIET)


def test_dead_engine_raises_at_once_and_ever_after():
    llm = make()
    client = client_of(llm)
    assert texts(llm.generate("a", **QUIET)) == ["a"]
    client.fail_at[client.num_steps + 2] = EngineDead("worker gone")
    with pytest.raises(EngineDead, match="worker gone"):
        llm.generate("abc", **QUIET)
    client.die("really gone")
    with pytest.raises(EngineDead, match="really gone"):
        llm.generate("abc", **QUIET)


class FailingClient(ScriptedClient):
    """Fails every request whose prompt begins with "bad"."""

    def _advance(self, request_id):
        request = self._requests[request_id]
        if bytes(request.prompt_token_ids[:3]) != b"bad":
            return super()._advance(request_id)
        del self.open[request_id]
        return [EngineOutput(request_id, finish_reason="error", error=ErrorInfo("the step failed", "step"))]


def test_failed_request_is_marked_and_the_others_finish(caplog):
    llm = LLM.from_client(FailingClient(echo), SUMMARY, ToyTokenizer())
    good, bad = llm.generate(["good", "bad one"], **QUIET)
    assert (good.outputs[0].text, good.error) == ("good", None)
    assert (bad.outputs[0].finish_reason, bad.error.message) == ("error", "the step failed")
    assert "the step failed" in caplog.text
    with pytest.raises(WorkerError, match="the step failed"):
        llm.generate("bad", **QUIET)


def test_call_from_within_a_call_is_an_error_and_not_a_deadlock():
    problems = []

    def script(request, index):
        try:
            llm.generate("inner", **QUIET)
        except OarlockError as error:
            problems.append(str(error))
        return [EOS]

    llm = make(script)
    llm.generate("outer", **QUIET)
    assert "called from within" in problems[0]


def test_threads_take_turns():
    llm = make()
    results: dict[int, list[str]] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: texts(llm.generate([f"t{i} {j}" for j in range(5)], **QUIET))})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [f"t{i} {j}" for j in range(5)] for i in range(4)}


def test_idle_engine_with_open_requests_is_an_error_and_not_a_spin():
    class Forgetful(ScriptedClient):
        def submit(self, request):
            self.submitted.append(request)

    with pytest.raises(EngineDead, match="have no end"):
        LLM.from_client(Forgetful(echo), SUMMARY, ToyTokenizer()).generate("a", **QUIET)


# ---------------------------------------------------------------- beams, chat, the rest
def test_beam_search_gives_sequences_with_their_prompt():
    class Beams(ScriptedClient):
        def step(self):
            (request_id,) = self.open
            del self.open[request_id]
            outputs = tuple(EngineOutput(request_id, i, (120 + i,), finish_reason="length", cumulative_logprob=-1.0 - i) for i in range(2))
            self.on_outputs(EngineOutputs(outputs, SchedulerStats()))

    llm = LLM.from_client(Beams(echo), SUMMARY, ToyTokenizer())
    (output,) = llm.beam_search("hi", BeamSearchParams(beam_width=2, max_tokens=1))
    assert [(s.tokens, s.text, s.cum_logprob) for s in output.sequences] == [([104, 105, 120], "hix", -1.0), ([104, 105, 121], "hiy", -2.0)]
    assert client_of(llm).submitted[0].params.early_stopping == "never"


def test_chat_renders_the_template_and_adds_no_special_tokens():
    llm = make(tokenizer=ToyTokenizer(adds_bos=True))
    one = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(one, SamplingParams(max_tokens=40), **QUIET)
    assert result.prompt == "[user]hi[assistant]"
    assert result.prompt_token_ids == list(b"[user]hi[assistant]")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    results = llm.chat([one, parts], SamplingParams(max_tokens=40), add_generation_prompt=False, **QUIET)
    assert texts(results) == ["[user]hi", "[user]a\nb"]
    by_parts = "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}"
    assert llm.chat(parts, chat_template=by_parts, chat_template_content_format="openai", **QUIET)[0].prompt == "<a><b>"
    with pytest.raises(InvalidParameter, match="chat_template_content_format"):
        llm.chat(parts, chat_template_content_format="other")
    assert llm.chat(one, chat_template="<{{ messages[0].content }}>", **QUIET)[0].prompt == "<hi>"


def test_chat_without_template_or_tokenizer_says_so():
    tokenizer = ToyTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InvalidParameter, match="no chat template; give one as chat_template"):
        make(tokenizer=tokenizer).chat([{"role": "user", "content": "x"}], **QUIET)
    with pytest.raises(InvalidParameter, match="skip_tokenizer_init"):
        make(tokenizer=None).chat([{"role": "user", "content": "x"}], **QUIET)


def test_tokenizer_can_be_replaced():
    llm = make(tokenizer=None)
    assert llm.get_tokenizer() is None
    assert llm.generate([1, 2], **QUIET)[0].outputs[0].text == ""
    with pytest.raises(InvalidParameter, match="token_bytes"):
        llm.set_tokenizer(object())
    llm.set_tokenizer(tokenizer := ToyTokenizer())
    assert llm.get_tokenizer() is tokenizer
    assert texts(llm.generate("hi", **QUIET)) == ["hi"]


def test_metrics_add_up():
    llm = make(says("abc"))
    llm.generate(["x", "yy"], **QUIET)
    values = {m.name: m.value for m in llm.get_metrics()}
    assert (values["vllm:prompt_tokens"], values["vllm:generation_tokens"], values["vllm:request_success"]) == (3, 8, 2)
    assert llm.reset_prefix_cache() is True
    assert client_of(llm).num_resets == 1


def test_progress_bar_counts_finished_requests(capsys):
    made = []

    class Bar:
        def __init__(self, total, **settings):
            self.total, self.count, self.closed = total, 0, False
            made.append(self)

        def update(self, n):
            self.count += n

        def set_postfix_str(self, *args, **kwargs): ...

        def close(self):
            self.closed = True

    make().generate(["a", "b"], use_tqdm=Bar)
    assert [(b.total, b.count, b.closed) for b in made] == [(2, 2, True)]
    make().generate(["a", "b"])
    assert "2/2" in capsys.readouterr().err


def test_the_progress_bar_of_vectors_counts_the_prompts_tokens():
    said = []

    class Bar:
        def __init__(self, **settings): ...
        def update(self, n): ...
        def close(self): ...
        def set_postfix_str(self, text, **kwargs):
            said.append(float(text.removesuffix(" tokens/s")))

    make().embed(["abc", "de"], use_tqdm=Bar)
    assert len(said) == 2 and min(said) > 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_that_is_not_there_is_said_without_frames_of_ours(monkeypatch, whole):
    monkeypatch.setenv("OARLOCK_TRACEBACK", "1" if whole else "")
    with pytest.raises(ModelError, match="no such file or folder") as caught:
        LLM("./nowhere")
    assert (len(caught.traceback) > 2) is whole and caught.value.__cause__ is None


# ---------------------------------------------------------------- end of life
def test_del_frees_everything_without_a_collector_run():
    gc.disable()
    try:
        llm = make()
        llm.generate("a", **QUIET)
        client, alive = client_of(llm), weakref.ref(llm)
        del llm
        assert alive() is None
        assert client.num_shutdowns == 1
    finally:
        gc.enable()


def test_closed_llm_says_so():
    with make() as llm:
        assert texts(llm.generate("a", **QUIET)) == ["a"]
    assert client_of(llm).num_shutdowns == 1
    llm.close()
    assert client_of(llm).num_shutdowns == 1
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("a", **QUIET)


def test_closing_ends_what_is_running_and_what_waits_its_turn():
    llm = make(lambda request, index: time.sleep(0.05) or [104] * 100)
    failures = []

    def call():
        try:
            llm.generate(["x"], SamplingParams(max_tokens=60), **QUIET)
        except EngineDead as error:
            failures.append(str(error))

    thread = llm._engine._thread
    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    while not client_of(llm).submitted:
        time.sleep(0.001)
    llm.close()
    for caller in callers:
        caller.join(5)
    assert not thread.is_alive() and not any(caller.is_alive() for caller in callers)
    assert len(failures) == 3 and all("closed" in failure for failure in failures)


def test_closing_from_within_a_call_ends_that_call_and_the_thread():
    llm = make()
    thread = llm._engine._thread

    def script(request, index):
        llm.close()
        return [104] * 1000

    client_of(llm).script = script
    with pytest.raises(EngineDead, match="closed while it was generating"):
        llm.generate("x", SamplingParams(max_tokens=50), **QUIET)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_is_refused_and_ends_without_waiting_for_a_thread_it_lacks():
    llm = make()
    before = texts(llm.generate("hi", **QUIET))
    child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(EngineDead, match="forked"):
                llm.generate("hi", **QUIET)
            llm.close()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 5
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert texts(llm.generate("hi", **QUIET)) == before


def test_signal_handlers_are_left_alone():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    llm = make()
    llm.generate("a", **QUIET)
    del llm
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_unknown_option_is_a_type_error_before_anything_is_read():
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM("no/such/model", max_num_seq=4)


def test_info_of_the_engine_bounds_prompts():
    llm = make(engine_info=info(max_model_len=8))
    with pytest.raises(PromptTooLong):
        llm.generate("123456789", **QUIET)
