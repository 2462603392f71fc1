"""What the one input path refuses, in which words, before anything is queued or tokenised; and what it makes of the rest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from oarlock.config.sections import ModelConfig, ServerConfig
from oarlock.errors import InvalidParameter, ModelError, PromptTooLong, RequestError
from oarlock.frontend.inputs import InputLimits, InputProcessor, default_sampling_fields
from oarlock.sampling_params import SamplingParams
from toy_frontend import BOS, END, EOS, SUMMARY, VOCAB_SIZE, WORD_IDS, ToyTokenizer, info

DEFAULT = object()


def processor(tokenizer=DEFAULT, limits=None, summary=SUMMARY, **facts) -> InputProcessor:
    return InputProcessor(info(**facts), ToyTokenizer() if tokenizer is DEFAULT else tokenizer, summary, limits)


def make(prompt="hi", params=None, **settings):
    facts = {k: settings.pop(k) for k in list(settings) if k in ("max_model_len", "max_prompt_tokens", "max_num_seqs", "max_logit_bias", "supports_host_callbacks")}
    made = processor(settings.pop("tokenizer", DEFAULT), settings.pop("limits", None), settings.pop("summary", SUMMARY), **facts)
    return made.make_request(prompt, params or SamplingParams(), "r", **settings)


def refused(*args, kind=InvalidParameter, **settings) -> RequestError:
    with pytest.raises(kind) as caught:
        make(*args, **settings)
    return caught.value


# ---------------------------------------------------------------- prompts
def test_text_is_tokenised_and_kept():
    request, text = make("hi", SamplingParams(max_tokens=3), priority=2, cache_salt="s")
    assert (request.prompt_token_ids, text) == ((104, 105), "hi")
    assert (request.request_id, request.priority, request.cache_salt, request.params.max_tokens) == ("r", 2, "s", 3)
    assert request.eos_token_ids == (EOS,)
    assert request.arrival_s > 0


def test_every_form_of_prompt_gives_the_same_request():
    ids = [104, 105]
    forms = [ids, tuple(ids), np.array(ids), {"prompt": "hi"}, {"prompt_token_ids": ids}, {"prompt": "hi", "prompt_token_ids": ids}]
    for form in forms:
        request, _ = make(form)
        assert request.prompt_token_ids == (104, 105)
        assert all(type(i) is int for i in request.prompt_token_ids)
    assert make({"prompt": "x", "prompt_token_ids": [1]})[0].prompt_token_ids == (1,)
    assert make({"prompt": "hi", "cache_salt": "own"})[0].cache_salt == "own"


@pytest.mark.parametrize(
    "prompt",
    [None, 5, 1.5, b"hi", {}, {"prompt": None}, {"prompt": 5}, {"prompt_token_ids": "hi"}, {"prompt_token_ids": []}, [], ["a", "b"], [[1], [2]],
     [1, True], [1, None], [1, 2.0], ["1"], [-1], [1, VOCAB_SIZE], [2**63], [np.float32(1)], {"prompt": "x", "images": []},
     {"prompt": "x", "multi_modal_data": {"image": 1}}, {"prompt_embeds": [1.0]}],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(prompt):
    assert refused(prompt).param == "prompt"


def test_bad_token_id_is_named_with_its_index_and_the_limit():
    message = str(refused([1, VOCAB_SIZE]))
    assert f"token id {VOCAB_SIZE} at index 1" in message
    assert f"0 to {VOCAB_SIZE - 1}" in message
    assert str(refused([-1], param="tokens")).startswith("tokens")


def test_empty_text_starts_from_bos_or_is_refused():
    assert make("")[0].prompt_token_ids == (BOS,)
    assert refused("", tokenizer=ToyTokenizer(bos_token_id=None)).param == "prompt"
    assert make("", tokenizer=ToyTokenizer(adds_bos=True))[0].prompt_token_ids == (BOS,)


def test_special_tokens_are_added_unless_told_otherwise():
    tokenizer = ToyTokenizer(adds_bos=True)
    assert make("a", tokenizer=tokenizer)[0].prompt_token_ids == (BOS, 97)
    assert make("a", tokenizer=tokenizer, add_special_tokens=False)[0].prompt_token_ids == (97,)


def test_lone_surrogate_is_refused_and_nul_is_not():
    error = refused("ab\ud800c", param="messages")
    assert error.param == "messages"
    assert "U+D800" in str(error)
    assert "character 2" in str(error)
    assert make("a\0b")[0].prompt_token_ids == (97, 0, 98)


def test_hopelessly_long_text_is_refused_before_it_is_tokenised():
    tokenizer = ToyTokenizer()
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    error = refused("x" * (64 * longest + 1), tokenizer=tokenizer, kind=PromptTooLong)
    assert (error.param, error.code, tokenizer.num_encoded) == ("prompt", "context_length_exceeded", 0)
    assert "64 tokens" in str(error)
    refused("x" * (64 * longest), tokenizer=tokenizer, kind=PromptTooLong)
    assert tokenizer.num_encoded == 1
    # With truncation a long text is fine: its last tokens are kept.
    request, _ = make("y" * 10_000 + "z", SamplingParams(truncate_prompt_tokens=5, max_tokens=1))
    assert request.prompt_token_ids == (121, 121, 121, 121, 122)
    # A server has a limit for these too: their cost is not bounded by the context.
    before, limits = tokenizer.num_encoded, InputLimits(max_text_chars=10_000)
    error = refused("y" * 10_001, SamplingParams(truncate_prompt_tokens=5), tokenizer=tokenizer, limits=limits)
    assert (error.param, tokenizer.num_encoded) == ("prompt", before) and "10000" in str(error)
    assert make("y" * 10_000, SamplingParams(truncate_prompt_tokens=5, max_tokens=1), limits=limits)


def test_tokenizer_beyond_the_models_vocabulary_is_noticed():
    tokenizer = ToyTokenizer()
    tokenizer.encode = lambda text, add_special_tokens=True: [VOCAB_SIZE + 5]
    assert "model's own tokenizer" in str(refused("x", tokenizer=tokenizer))


# ---------------------------------------------------------------- lengths
def test_prompt_and_max_tokens_fill_the_context_exactly_but_no_more():
    assert make([1] * 63, SamplingParams(max_tokens=1))[0].params.max_tokens == 1
    error = refused([1] * 60, SamplingParams(max_tokens=16), kind=PromptTooLong)
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    for number in ("64", "76", "60", "16"):
        assert number in str(error)
    assert isinstance(error, ValueError)
    assert refused([1] * 60, SamplingParams(max_tokens=16), kind=PromptTooLong, max_tokens_param="max_completion_tokens").param == "max_completion_tokens"


def test_absent_max_tokens_of_beams_is_left_to_the_scheduler():
    """It alone knows what all beams share."""
    beams = SamplingParams(use_beam_search=True, n=2, max_tokens=None)
    assert make([1] * 10, beams)[0].params.max_tokens is None
    assert make([1] * 10, dataclasses.replace(beams, max_tokens=7))[0].params.max_tokens == 7
    assert refused([1] * 64, beams, kind=PromptTooLong).param == "prompt"


def test_prompt_to_be_scored_needs_no_room_for_a_token():
    score = SamplingParams(max_tokens=0, prompt_logprobs=1)
    assert make([1] * 64, score)[0].params.max_tokens == 0
    error = refused([1] * 65, score, kind=PromptTooLong)
    assert error.param == "prompt" and "needs 65: 65 of prompt and 0 of max_tokens" in str(error)


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_prompt_that_leaves_no_room_is_the_prompts_fault(length):
    for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=None)):
        error = refused([1] * length, params, kind=PromptTooLong, param="messages")
        assert error.param == "messages"
        assert str(length) in str(error)
        assert "-" not in str(error).replace("KV-", "")


def test_absent_max_tokens_means_the_rest_of_the_context():
    assert make([1] * 10, SamplingParams(max_tokens=None))[0].params.max_tokens == 54
    assert make([1] * 10, SamplingParams(max_tokens=None), max_prompt_tokens=20)[0].params.max_tokens == 10
    error = refused([1] * 10, SamplingParams(max_tokens=None, min_tokens=55))
    assert error.param == "min_tokens"


def test_what_can_never_fit_the_cache_is_refused_by_that_name():
    error = refused([1] * 30, SamplingParams(max_tokens=10), kind=PromptTooLong, max_prompt_tokens=32)
    assert error.param == "max_tokens"
    assert "KV cache can hold 32 tokens" in str(error)
    assert make([1] * 30, SamplingParams(max_tokens=2), max_prompt_tokens=32)


def test_truncation_keeps_the_last_tokens():
    request, _ = make([1, 2, 3, 4], SamplingParams(truncate_prompt_tokens=2))
    assert request.prompt_token_ids == (3, 4)
    assert make([1, 2], SamplingParams(truncate_prompt_tokens=5))[0].prompt_token_ids == (1, 2)
    assert refused("x", SamplingParams(truncate_prompt_tokens=65)).param == "truncate_prompt_tokens"


# ---------------------------------------------------------------- fields against the model
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [9999999], "min_tokens": 5}, "stop_token_ids"),
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 5}}, "logit_bias"),
        ({"bad_words_token_ids": [[1, VOCAB_SIZE]]}, "bad_words_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1_000_000}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"stop_token_ids": range(VOCAB_SIZE), "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5]], "stop_token_ids": [6], "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"use_beam_search": True, "best_of": 5}, "best_of"),
        ({"use_beam_search": True, "n": 5}, "n"),
    ],
)
def test_field_that_the_model_cannot_honour_is_refused(fields, param):
    assert refused("hi", SamplingParams(**fields)).param == param


def test_whole_vocabulary_of_logprobs_needs_max_logprobs_without_limit():
    unlimited = InputLimits(max_logprobs=-1)
    assert make("x", SamplingParams(logprobs=-1), limits=unlimited)[0].params.logprobs == -1
    assert make("x", SamplingParams(logprobs=VOCAB_SIZE), limits=unlimited)[0].params.logprobs == VOCAB_SIZE
    assert refused("x", SamplingParams(logprobs=VOCAB_SIZE + 1), limits=unlimited).param == "logprobs"
    assert make("x", SamplingParams(logprobs=20))[0].params.logprobs == 20


@pytest.mark.parametrize(
    ("fields", "most", "words"),
    [
        ({"prompt_logprobs": -1, "max_tokens": 1}, VOCAB_SIZE * 40, (f"{VOCAB_SIZE} entries for each of 40 tokens of prompt", "at most 39 tokens")),
        ({"prompt_logprobs": 4, "max_tokens": 1}, 5 * 40, ("5 entries", "at most 3 entries, or for at most 39 tokens")),
        ({"logprobs": -1, "max_tokens": 6}, VOCAB_SIZE * 6, ("1 × 6 of max_tokens", "the whole vocabulary")),
        ({"logprobs": 1, "max_tokens": 6, "n": 3, "best_of": 4}, 2 * 6 * 4, ("4 × 6 of max_tokens",)),
        ({"logprobs": 0, "max_tokens": None}, 24, ("1 × 24 of max_tokens", "at most 23 tokens")),
    ],
)
def test_logprobs_of_all_positions_together_are_bounded(fields, most, words):
    def limits(entries: int) -> InputLimits:
        return InputLimits.make(ModelConfig("m", max_logprobs=-1, max_logprob_entries=entries))

    assert make([1] * 40, SamplingParams(**fields), limits=limits(most))
    error = refused([1] * 40, SamplingParams(**fields), limits=limits(most - 1))
    assert error.param == ("logprobs" if "logprobs" in fields else "prompt_logprobs")
    for word in (*words, f"are {most},", f"limit is {most - 1}", "max_logprob_entries"):
        assert word in str(error)


def test_default_bound_allows_what_the_usual_cap_does():
    """20 entries at each of 131072 positions, three choices."""
    params = SamplingParams(logprobs=20, prompt_logprobs=20, max_tokens=65_536, n=6)
    assert make([1] * 65_536, params, max_model_len=131_072)


def test_logits_processors_run_only_beside_the_engine():
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    assert make("x", params)[0].params.logits_processors
    assert refused("x", params, supports_host_callbacks=False).param == "logits_processors"


def test_bad_words_become_tokens_with_and_without_a_leading_space():
    request, _ = make("x", SamplingParams(bad_words=["stop"], bad_words_token_ids=[[1, 2]]))
    assert request.params.bad_words_token_ids == ((1, 2), (WORD_IDS["stop"],), (WORD_IDS[" stop"],))
    again, _ = make("x", request.params)
    assert again.params == request.params
    assert make("x", SamplingParams(bad_words=[" stop"]))[0].params.bad_words_token_ids == ((WORD_IDS["stop"],), (WORD_IDS[" stop"],))
    assert make("x", SamplingParams(bad_words=[" "]))[0].params.bad_words_token_ids == ((32,),)


def test_prompt_logprobs_read_no_prefix_from_the_cache():
    assert make("x", SamplingParams(prompt_logprobs=0))[0].params.skip_reading_prefix_cache
    assert not make("x", SamplingParams(logprobs=0))[0].params.skip_reading_prefix_cache


def test_eos_comes_from_checkpoint_and_tokenizer_unless_ignored():
    summary = dataclasses.replace(SUMMARY, eos_token_ids=(END, 99999))
    assert make("x", summary=summary)[0].eos_token_ids == (END, EOS)
    assert make("x", SamplingParams(ignore_eos=True), summary=summary)[0].eos_token_ids == ()


def test_without_a_tokenizer_only_token_ids_are_taken():
    request, text = make([1, 2], tokenizer=None)
    assert (request.prompt_token_ids, text, request.params.detokenize) == ((1, 2), None, False)
    assert request.eos_token_ids == (EOS,)
    for prompt, params, param in (
        ("x", SamplingParams(), "prompt"),
        ([1], SamplingParams(stop="x"), "stop"),
        ([1], SamplingParams(bad_words=["x"]), "bad_words"),
    ):
        error = refused(prompt, params, tokenizer=None)
        assert error.param == param
        assert "skip_tokenizer_init" in str(error)
    assert "use stop_token_ids." in str(refused([1], SamplingParams(stop="x"), tokenizer=None))
    assert "use bad_words_token_ids." in str(refused([1], SamplingParams(bad_words=["x"]), tokenizer=None))


@pytest.mark.parametrize(
    ("settings", "param"),
    [({"priority": True}, "priority"), ({"priority": 2**31}, "priority"), ({"priority": "1"}, "priority"), ({"cache_salt": ""}, "cache_salt"),
     ({"cache_salt": 5}, "cache_salt"), ({"cache_salt": "x" * 1025}, "cache_salt")],
)  # fmt: skip
def test_envelope_is_checked(settings, param):
    assert refused("x", **settings).param == param


def test_request_id_and_params_are_checked():
    with pytest.raises(InvalidParameter, match="request_id"):
        processor().make_request("x", SamplingParams(), "")
    with pytest.raises(InvalidParameter, match="SamplingParams"):
        processor().make_request("x", {"n": 1}, "r")


# ---------------------------------------------------------------- limits of a server
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 9}, "n"),
        ({"best_of": 9}, "best_of"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"logit_bias": dict.fromkeys(range(200), 1)}, "logit_bias"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"temperature": 2.5}, "temperature"),
        ({"logprobs": 6}, "logprobs"),
    ],
)
def test_server_caps_are_refused_by_name_and_number(fields, param):
    limits = InputLimits.make(ModelConfig("m", max_logprobs=5), ServerConfig(max_n=8, max_logit_bias=100))
    error = refused("x", SamplingParams(**fields), limits=limits)
    assert error.param == param
    if param not in ("logprobs",):
        assert make("x", SamplingParams(**fields))  # in-process callers have no such cap


def test_more_biases_than_the_devices_shapes_hold_are_refused_to_everybody():
    error = refused("x", SamplingParams(logit_bias=dict.fromkeys(range(33), 1)), max_logit_bias=32)
    assert error.param == "logit_bias" and "33" in str(error) and "32" in str(error)
    assert make("x", SamplingParams(logit_bias=dict.fromkeys(range(32), 1)), max_logit_bias=32)


def test_checkpoint_defaults_become_fields():
    summary = dataclasses.replace(SUMMARY, generation_config={"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 9, "eos_token_id": 3})
    assert default_sampling_fields(summary) == {"temperature": 0.6, "top_k": 20}
    assert default_sampling_fields(summary, "none") == {}
    for wrong in ({"temperature": "hot"}, {"top_p": 2}, {"min_p": -1}):  # found at the start, and not by every client
        with pytest.raises(ModelError, match=rf"generation_config\.json.*{next(iter(wrong))[:4]}"):
            default_sampling_fields(dataclasses.replace(SUMMARY, generation_config=wrong))


def test_of_a_text_far_too_long_only_the_beginning_is_tokenised():
    class Counting(ToyTokenizer):
        longest_text = 0

        def encode(self, text, add_special_tokens=True):
            self.longest_text = max(self.longest_text, len(text))
            return super().encode(text, add_special_tokens)

        def token_bytes(self, token_id):
            return b"x" * 1000 if token_id == 5 else super().token_bytes(token_id)  # a long token somewhere: the byte count alone cannot refuse

    tokenizer = Counting()
    error = refused("a" * 20_000, tokenizer=tokenizer, kind=PromptTooLong)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert "first 512 characters" in str(error)
    assert tokenizer.longest_text == 512


def test_a_long_text_of_long_tokens_still_fits():
    class Packed(ToyTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [5] * (len(text) // 1000)

        def token_bytes(self, token_id):
            return b"x" * 1000

    request, _ = make("a" * 30_000, tokenizer=Packed(), params=SamplingParams(max_tokens=3))
    assert len(request.prompt_token_ids) == 30
