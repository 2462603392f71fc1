"""Text, stop strings, logprobs and choices from engine outputs; and that deltas add up to the whole, however tokens were cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oarlock.errors import EngineDead, InvalidParameter, PromptTooLong, QueueFull, RequestError, WorkerError
from oarlock.frontend.collect import Collector
from oarlock.frontend.outputs import OutputProcessor, exception_for
from oarlock.frontend.stop import StopMatcher
from oarlock.messages import Abort, EngineOutput, EngineOutputs, EngineRequest, ErrorInfo, SchedulerStats
from oarlock.sampling_params import SamplingParams
from toy_frontend import BOS, END, EOS, WORD_IDS, WORDS, ToyTokenizer, position

NO_STATS = SchedulerStats()


class Run:
    """One request over hand-made engine outputs."""

    def __init__(self, params=None, tokenizer=ToyTokenizer(), **fields) -> None:  # noqa: B008  stateless enough
        self.params = params or SamplingParams(**({"max_tokens": None} | fields))
        self.aborts: list[Abort] = []
        self.processor = OutputProcessor(tokenizer, self.aborts.append)
        self.request = EngineRequest("r", (104, 105), self.params, (EOS,), arrival_s=100.0)
        self.processor.add(self.request, "hi")
        self.collector = Collector(self.params)
        self.deltas = []

    def step(self, tokens=(), finish=None, index=0, **fields):
        """One engine output; its delta, or None."""
        if "logprobs" not in fields and self.params.logprobs is not None:
            fields["logprobs"] = tuple(map(position, tokens))
        return self.receive(EngineOutput("r", index, tuple(tokens), finish_reason=finish, **fields))

    def receive(self, *outputs):
        deltas = self.processor.receive(EngineOutputs(outputs, NO_STATS))
        for delta in deltas:
            self.deltas.append(delta)
            self.collector.add(delta)
        return deltas[0] if deltas else None

    @property
    def texts(self):
        return [choice.text for delta in self.deltas for choice in delta.outputs]

    @property
    def result(self):
        return self.collector.result()

    @property
    def choice(self):
        (choice,) = self.result.outputs
        return choice


def spell(text: str) -> list[int]:
    return list(text.encode())


# ---------------------------------------------------------------- text
def test_tokens_become_text_as_they_come():
    run = Run()
    run.step(spell("a"))
    run.step([WORD_IDS[" world"], *spell("!")])
    run.step([EOS], "stop")
    assert run.texts == ["a", " world!", ""]
    choice = run.choice
    assert (choice.text, choice.token_ids) == ("a world!", [97, WORD_IDS[" world"], 33, EOS])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert [d.finished for d in run.deltas] == [False, False, True]
    assert run.aborts == []
    assert len(run.processor) == 0


def test_half_a_character_waits_for_its_other_half():
    run = Run()
    first, second = "é".encode()
    assert run.step([first]).outputs[0].text == ""
    assert run.step([second]).outputs[0].text == "é"
    last = run.step([first], "length")
    assert last.outputs[0].text == "�"  # it never came
    assert run.choice.text == "é�"


def test_stop_token_is_counted_but_has_no_text_unless_asked_for():
    for include, skip, text in ((False, False, "a"), (True, False, "a<end>"), (True, True, "a"), (False, True, "a")):
        run = Run(include_stop_str_in_output=include, skip_special_tokens=skip, stop_token_ids=[END])
        run.step([97, END], "stop", stop_reason=END)
        assert (run.choice.text, run.choice.token_ids, run.choice.stop_reason) == (text, [97, END], END)


def test_special_tokens_have_text_only_on_request():
    for skip, text in ((True, "ab"), (False, "a<bos>b")):
        run = Run(skip_special_tokens=skip)
        run.step([97, BOS, 98], "length")
        assert run.choice.text == text


def test_without_detokenising_there_are_tokens_only():
    for tokenizer, params in ((None, SamplingParams(logprobs=1, detokenize=False)), (ToyTokenizer(), SamplingParams(logprobs=1, detokenize=False))):
        run = Run(params, tokenizer)
        run.step([97], "length")
        assert (run.choice.text, run.choice.token_ids) == ("", [97])
        assert run.choice.logprobs[0][97].decoded_token is None


# ---------------------------------------------------------------- stop strings
def test_stop_string_over_several_tokens_is_cut_and_the_engine_told():
    run = Run(stop=["lo wo"])
    run.step(spell("hel"))
    run.step(spell("lo"))
    last = run.step([WORD_IDS[" world"]])
    assert run.texts == ["he", "l", ""]  # "l", then "lo", might have begun the stop string
    choice = run.choice
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hel", "stop", "lo wo")
    assert choice.token_ids == [*spell("hello"), WORD_IDS[" world"]]  # usage ends at the stopping token
    assert last.finished
    assert run.aborts == [Abort("r", "stop", 0)]


def test_nothing_is_sent_that_may_have_to_be_taken_back():
    run = Run(stop=["abcd"])
    assert run.step(spell("xab")).outputs[0].text == "x"
    assert run.step(spell("c")).outputs[0].text == ""
    assert run.step(spell("c")).outputs[0].text == "abcc"
    assert run.step(spell("ab")).outputs[0].text == ""
    assert run.step([EOS], "stop").outputs[0].text == "ab"  # the end releases what was held
    run = Run(stop=["abcd"])
    assert run.step(spell("xab"), "length").outputs[0].text == "xab"


def test_text_that_cannot_begin_a_stop_string_is_sent_at_once():
    run = Run(stop=["a very long stop string"])
    assert run.step(spell("xyz")).outputs[0].text == "xyz"


def test_tokens_after_the_stop_string_are_dropped():
    run = Run(stop=["b"], logprobs=1)
    delta = run.step(spell("abcd"), cumulative_logprob=-2.0)
    assert delta.outputs[0].token_ids == spell("ab")
    assert len(delta.outputs[0].logprobs) == 2
    assert delta.outputs[0].cumulative_logprob == pytest.approx(-1.0)
    assert run.step(spell("e"), "length") is None  # late outputs of the ended branch
    assert run.choice.token_ids == spell("ab")


def test_stop_string_is_kept_on_request():
    run = Run(stop=["bc"], include_stop_str_in_output=True)
    assert run.step(spell("ab")).outputs[0].text == "ab"  # nothing need be held back
    run.step(spell("cd"))
    assert (run.choice.text, run.choice.stop_reason) == ("abc", "bc")


def test_stop_string_wins_over_length_but_not_over_eos():
    run = Run(stop=["b"])
    run.step(spell("ab"), "length")
    assert (run.choice.text, run.choice.finish_reason, run.choice.stop_reason) == ("a", "stop", "b")
    assert run.aborts == []  # the engine has ended it already
    run = Run(stop=["<eos>"], skip_special_tokens=False, include_stop_str_in_output=True)
    run.step([97, EOS], "stop")
    assert (run.choice.text, run.choice.finish_reason, run.choice.stop_reason) == ("a<eos>", "stop", None)


def test_stop_string_counts_only_after_min_tokens():
    run = Run(stop=["a", "bc"], min_tokens=2, max_tokens=50)
    run.step(spell("a"))
    run.step(spell("b"))
    assert run.deltas[-1].finished is False
    run.step(spell("c"))  # the third token completes a stop string that began before
    assert (run.choice.text, run.choice.stop_reason) == ("a", "bc")
    run = Run(stop=["b"], min_tokens=2, max_tokens=50)
    run.step(spell("ab"))  # as EOS, a stop string may end the text from the token after min_tokens on
    run.step(spell("b"))
    assert (run.choice.text, run.choice.token_ids) == ("ab", spell("abb"))


def test_replacement_character_at_the_end_may_complete_a_stop_string():
    run = Run(stop=["�"])
    run.step([0xC3], "length")
    assert (run.choice.text, run.choice.finish_reason) == ("", "stop")


def test_stop_in_one_choice_leaves_the_others_running():
    run = Run(n=2, stop=["b"])
    run.step(spell("a"), index=0)
    run.step(spell("b"), index=1)
    assert run.aborts == [Abort("r", "stop", 1)]
    assert not run.deltas[-1].finished
    run.step(spell("z"), "length", index=0)
    assert [(c.index, c.text, c.finish_reason) for c in run.result.outputs] == [(0, "az", "length"), (1, "", "stop")]
    assert run.deltas[-1].finished


def brute_force(stops: list[str], text: str) -> tuple[int, str] | None:
    """(end, stop): the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = max((s for s in stops if text[:end].endswith(s)), key=len, default=None)
        if found:
            return end, found
    return None


def test_of_stop_strings_that_end_together_the_longest_wins_and_the_first_to_end_wins_over_all():
    for stops in (["b", "ab"], ["ab", "b"]):
        assert StopMatcher(stops).feed("xabc") == (3, "ab")
    assert StopMatcher(["abcd", "bc"]).feed("abcd") == (3, "bc")


def test_match_that_is_passed_over_may_be_the_beginning_of_the_next():
    matcher = StopMatcher(["aa"])
    assert matcher.feed("aa", armed=False) is None
    assert matcher.held == 1
    assert matcher.feed("a") == (1, "aa")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.lists(st.text("abc", max_size=4), max_size=8))
def test_matcher_agrees_with_brute_force_however_the_text_is_cut(stops, pieces):
    matcher, read = StopMatcher(stops), ""
    for piece in pieces:
        found = matcher.feed(piece)
        expected = brute_force(stops, read + piece)
        if found is None:
            assert expected is None
            read += piece
            held = max(k for s in stops for k in range(len(s)) if read.endswith(s[:k]))
            assert matcher.held == held
        else:
            assert (len(read) + found[0], found[1]) == expected
            return
    assert brute_force(stops, read) is None


TOKENS = st.one_of(st.sampled_from([97, 98, 99, 0xC3, 0xA9]), st.sampled_from([WORD_IDS[word] for word in WORDS]))


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=14),
    cuts=st.lists(st.integers(1, 4), max_size=14),
    stops=st.lists(st.sampled_from(["ab", "abc", "bc", "é", " s", "c", "ost"]), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    ending=st.sampled_from(["length", "stop"]),
)
def test_deltas_add_up_to_the_same_result_however_steps_cut_the_tokens(tokens, cuts, stops, include, min_tokens, ending):
    def run_with(sizes):
        run = Run(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=50, logprobs=1)
        left, ended = list(tokens), False
        for size in [*sizes, *[1] * len(tokens)]:
            part, left = left[:size], left[size:]
            if part and not ended:
                ended = run.step(part, None if left else ending).finished
        choice = run.choice
        assert "".join(run.texts) == choice.text
        assert sum(c.finish_reason is not None for d in run.deltas for c in d.outputs) == 1
        assert run.deltas[-1].outputs[-1].finish_reason is not None
        if choice.stop_reason is None:  # nothing may be missing
            assert choice.text == ToyTokenizer().decode(tokens if ending == "length" or include else tokens[:-1])
        assert len(choice.logprobs) == len(choice.token_ids) == run.deltas[-1].num_generated_tokens
        return choice

    assert run_with(cuts) == run_with([]) == run_with([len(tokens)])


# ---------------------------------------------------------------- logprobs
def test_logprobs_list_the_sampled_token_first_and_each_token_once():
    run = Run(logprobs=2)
    run.step([98], "length", cumulative_logprob=-0.5)
    (entry,) = run.choice.logprobs
    assert list(entry) == [98, 65]  # the sampled token is second best: k entries
    assert [(e.logprob, e.rank, e.decoded_token, e.bytes) for e in entry.values()] == [(-0.5, 2, "b", (98,)), (-0.1, 1, "A", (65,))]
    assert run.choice.cumulative_logprob == -0.5
    run = Run(logprobs=1)
    run.step([98], "length")
    assert list(run.choice.logprobs[0]) == [98, 65]  # outside the best k: k + 1 entries
    run = Run(logprobs=0)
    run.step([98], "length")
    assert list(run.choice.logprobs[0]) == [98]


def test_tokens_of_equal_text_are_kept_apart_and_bytes_are_exact():
    run = Run(logprobs=1)
    half, word = 0xC3, WORD_IDS["ab"]
    run.step([half, word, EOS], "stop")
    (first,), (second,), (third,) = ([e for i, e in p.items() if i != 65] for p in run.choice.logprobs)
    assert (first.decoded_token, first.bytes) == ("�", (0xC3,))
    assert (second.decoded_token, second.bytes) == ("ab", (97, 98))
    assert third.decoded_token == "<eos>"


def test_prompt_logprobs_arrive_once_and_stay_in_the_result():
    run = Run(prompt_logprobs=1)
    run.step(prompt_logprobs=(None, position(105)))
    assert len(run.deltas[0].prompt_logprobs) == 2
    run.step([97], "length")
    assert run.deltas[1].prompt_logprobs is None
    assert run.result.prompt_logprobs[0] is None
    assert list(run.result.prompt_logprobs[1]) == [105, 65]


def test_without_logprobs_there_are_none():
    run = Run()
    run.step([97], "length")
    assert run.choice.logprobs is None
    assert run.choice.cumulative_logprob is None


# ---------------------------------------------------------------- choices
def test_best_of_returns_the_n_most_probable_renumbered():
    run = Run(n=2, best_of=4)
    for index, total in enumerate((-3.0, -1.0, -4.0, -2.0)):
        run.step(spell("abcd"[index]), "length", index=index, cumulative_logprob=total)
    assert [(c.index, c.text, c.cumulative_logprob) for c in run.result.outputs] == [(0, "b", -1.0), (1, "d", -2.0)]
    assert run.result.num_generated_tokens == 4


def test_choices_keep_their_order_without_best_of():
    run = Run(n=3)
    for index in (2, 0, 1):
        run.step(spell(str(index)), "length", index=index, cumulative_logprob=float(index))
    assert [c.text for c in run.result.outputs] == ["0", "1", "2"]


def test_beams_come_as_the_engine_ranked_them():
    run = Run(SamplingParams(use_beam_search=True, n=2, best_of=4))
    out = [EngineOutput("r", i, tuple(spell(t)), finish_reason="length", cumulative_logprob=p) for i, (t, p) in enumerate((("xx", -9.0), ("y", -1.0)))]
    assert run.receive(*out).finished
    assert [c.text for c in run.result.outputs] == ["xx", "y"]
    assert len(run.processor) == 0


# ---------------------------------------------------------------- life of a request
def test_times_and_cached_tokens_travel_along():
    run = Run()
    run.step([97], num_cached_tokens=16, first_scheduled_s=100.5)
    run.step([98], "length")
    metrics = run.result.metrics
    assert (metrics.arrival_s, metrics.first_scheduled_s, metrics.time_in_queue_s) == (100.0, 100.5, 0.5)
    assert metrics.first_token_s <= metrics.last_token_s <= metrics.finished_s
    assert run.result.num_cached_tokens == 16
    assert run.result.prompt_token_ids == [104, 105]
    assert run.result.prompt == "hi"


def test_error_of_one_choice_ends_the_request_once():
    run = Run(n=2)
    run.step(spell("a"), index=0)
    error = ErrorInfo("row was not finite", "request")
    delta = run.step(finish="error", index=1, error=error)
    assert delta.finished
    assert delta.error is error
    assert [(c.index, c.finish_reason) for c in delta.outputs] == [(0, "error"), (1, "error")]
    assert run.aborts == [Abort("r")]
    assert run.step(spell("b"), "length", index=0) is None


def test_cancelled_request_is_aborted_and_forgotten():
    run = Run(stop=["ab"])
    run.step(spell("xa"))
    delta = run.processor.cancel("r")
    assert (delta.finished, delta.outputs[0].finish_reason, delta.outputs[0].text) == (True, "abort", "a")
    assert run.aborts == [Abort("r")]
    assert run.processor.cancel("r") is None
    assert run.step(spell("b")) is None


def test_abort_by_the_engine_is_a_finish_reason():
    run = Run()
    run.step((), "abort")
    assert run.choice.finish_reason == "abort"


def test_request_id_in_use_is_refused():
    run = Run()
    with pytest.raises(InvalidParameter, match="in use"):
        run.processor.add(run.request)


def test_dead_engine_ends_every_request_with_the_error():
    run = Run()
    (delta,) = run.processor.fail_all(ErrorInfo("gone", "engine"))
    assert (delta.finished, delta.error.message, delta.outputs[0].finish_reason) == (True, "gone", "error")
    assert len(run.processor) == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ErrorInfo("m", "engine"), EngineDead),
        (ErrorInfo("m", "step"), WorkerError),
        (ErrorInfo("m", "request", code="queue_full"), QueueFull),
        (ErrorInfo("m", "request", param="prompt", code="context_length_exceeded"), PromptTooLong),
        (ErrorInfo("m", "request", param="stop"), InvalidParameter),
        (ErrorInfo("m", "request"), RequestError),
    ],
)
def test_engine_errors_become_the_matching_exception(error, kind):
    raised = exception_for(error)
    assert type(raised) is kind
    assert str(raised) == "m"
