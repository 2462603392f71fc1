"""Every field's range, every rule between fields, and the words of the errors."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from oarlock.errors import InvalidParameter, RequestError
from oarlock.sampling_params import FOREIGN_NAMES, NOT_BUILT, BeamSearchParams, SamplingParams

INF, NAN = math.inf, math.nan

REFUSED = {
    "n": [0, -1, 129, 10**9, 1.5, "2", True, 2.0],
    "best_of": [0, -1, 129, 1.5, True],
    "presence_penalty": [-2.01, 2.01, 10, NAN, INF, "1", True],
    "frequency_penalty": [-2.01, 2.01, NAN, -INF],
    "repetition_penalty": [0, -1, NAN, INF, -INF, False],
    "temperature": [-0.1, NAN, INF, -INF, "0.5", True, 10**400],
    "top_p": [0, -0.1, 1.01, NAN],
    "top_k": [-2, -7, 1.5, True, 2**31],
    "min_p": [-0.01, 1.01, NAN],
    "seed": [2**63, -(2**63) - 1, 1.0, "1", True],
    "length_penalty": [NAN, INF, "1"],
    "early_stopping": ["always", 1, 0, "True"],
    "stop": [[""], "", ["a", ""], [None], 5, {"a": 1}, [b"x"], b"x"],
    "stop_token_ids": [[-3], [None], ["1"], [1.0], [True], 5, "12"],
    "max_tokens": [0, -1, 1.5, True, 2**31],
    "min_tokens": [-1, 1.0, True],
    "logprobs": [-2, 1.5, True, "5"],
    "prompt_logprobs": [-2, True],
    "truncate_prompt_tokens": [0, -2, True],
    "truncation_side": ["both", 1],
    "logit_bias": [{"abc": 1}, {"-1": 1}, {-1: 1}, {5: 100.5}, {5: -101}, {5: NAN}, {5: "1"}, {True: 1}, [(1,)], "x", {"5": 1, 5: 2}, {1.5: 1}],
    "allowed_token_ids": [[], [-1], ["1"], 3, [None]],
    "bad_words": ["word", [""], [3], 3],
    "shown_special_tokens": ["<x>", [""], [3], 3],
    "bad_words_token_ids": [[[]], [["1"]], [5], [[-1]]],
    "logits_processors": [["not callable"], 3],
    "detokenize": [1, "true"],
    "skip_special_tokens": [0],
    "spaces_between_special_tokens": ["no"],
    "include_stop_str_in_output": [1],
    "ignore_eos": ["false"],
    "use_beam_search": [1],
    "skip_reading_prefix_cache": [1],
    "structured_outputs": ({"regex": ""}, {}, {"json": "["}, {"choice": []}, {"regex": "a", "choice": ["a"]}, "x"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RequestError)


def test_every_field_has_a_refused_value():
    assert {f.name for f in dataclasses.fields(SamplingParams)} == set(REFUSED)


ACCEPTED = [
    ("n", 128, 128), ("best_of", 3, 3), ("presence_penalty", -2, -2.0), ("frequency_penalty", 2, 2.0), ("repetition_penalty", 5, 5.0),
    ("temperature", 100, 100.0), ("temperature", 0, 0.0), ("top_p", 1, 1.0), ("top_p", 1e-9, 1e-9), ("top_k", -1, 0), ("top_k", 0, 0),
    ("top_k", 10**6, 10**6), ("min_p", 0, 0.0), ("min_p", 1, 1.0), ("seed", -1, None), ("seed", -5, -5), ("seed", 2**63 - 1, 2**63 - 1),
    ("stop", "x", ("x",)), ("stop", ["a", "b"], ("a", "b")), ("stop", [], ()), ("stop", None, ()), ("stop", ("\0",), ("\0",)),
    ("stop_token_ids", [3, 3, 1], (3, 1)), ("max_tokens", None, None), ("max_tokens", 1, 1), ("min_tokens", 16, 16), ("logprobs", -1, -1),
    ("logprobs", 0, 0), ("prompt_logprobs", 0, 0), ("truncate_prompt_tokens", 1, 1), ("logit_bias", {"5": 1, 6: -100}, ((5, 1.0), (6, -100.0))),
    ("logit_bias", [(5, 100)], ((5, 100.0),)), ("allowed_token_ids", [2, 2], (2,)), ("bad_words", ["a"], ("a",)),
    ("bad_words_token_ids", [[1, 2]], ((1, 2),)), ("early_stopping", None, False), ("skip_reading_prefix_cache", None, False),
    ("stop_token_ids", np.array([4, 5]), (4, 5)), ("temperature", np.float32(0.5), 0.5), ("n", np.int64(2), 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kept"), ACCEPTED)
def test_value_in_range_is_kept_in_one_form(name, value, kept):
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == kept
    assert type(got) is type(kept)


def test_numbers_survive_a_second_validation():
    for fields in ({"logit_bias": {1: 2}, "top_k": -1, "seed": -1}, {"n": 2, "use_beam_search": True}):
        once = SamplingParams(max_tokens=None, **fields)
        assert dataclasses.replace(once) == once
        assert pickle.loads(pickle.dumps(once)) == once == copy.deepcopy(once)


def test_params_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_no_token_at_all_is_for_scoring_a_prompt():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(InvalidParameter, match="prompt_logprobs is not set") as caught:
        SamplingParams(max_tokens=0, logprobs=1)
    assert caught.value.param == "max_tokens"


def test_min_tokens_above_max_tokens_is_refused():
    assert SamplingParams(min_tokens=16, max_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000
    with pytest.raises(InvalidParameter, match="max_tokens is 16") as caught:
        SamplingParams(min_tokens=17)
    assert caught.value.param == "min_tokens"


def test_best_of_below_n_is_refused():
    with pytest.raises(InvalidParameter, match="n is 3") as caught:
        SamplingParams(n=3, best_of=2)
    assert caught.value.param == "best_of"
    assert SamplingParams(n=2, best_of=2).num_branches == 2
    assert SamplingParams(n=2, best_of=5).num_branches == 5


@pytest.mark.parametrize(("fields", "param"), [({"n": 2}, "n"), ({"best_of": 2}, "best_of"), ({"n": 2, "best_of": 3}, "n")])
def test_greedy_gives_one_result_only(fields, param):
    with pytest.raises(InvalidParameter, match="temperature") as caught:
        SamplingParams(temperature=0, **fields)
    assert caught.value.param == param
    assert SamplingParams(temperature=1e-5, **fields).is_greedy is False
    assert SamplingParams(temperature=0, use_beam_search=True, **fields).is_greedy


def test_stop_strings_need_text():
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"


@pytest.mark.parametrize("fields", [{"length_penalty": 0.5}, {"early_stopping": True}, {"early_stopping": "never"}])
def test_beam_fields_need_beams(fields):
    with pytest.raises(InvalidParameter, match="use_beam_search") as caught:
        SamplingParams(**fields)
    assert caught.value.param == next(iter(fields))
    assert SamplingParams(use_beam_search=True, n=2, **fields).use_beam_search


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.5}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"stop": ["x"]}, {"n": 1}, {"best_of": 17}]
)
def test_beams_refuse_what_only_sampling_has(fields):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**({"use_beam_search": True, "n": 2} | fields))
    assert caught.value.param == next(iter(fields))


def test_absent_temperature_is_1_but_0_for_beams():
    assert SamplingParams().temperature == 1.0
    assert SamplingParams(temperature=None).temperature == 1.0
    assert SamplingParams(use_beam_search=True, n=16).temperature == 0.0
    assert SamplingParams(use_beam_search=True, n=2, best_of=4).num_branches == 4


@pytest.mark.parametrize("name", [*FOREIGN_NAMES])
def test_foreign_name_is_answered_with_the_right_one(name):
    for make in (lambda: SamplingParams(**{name: 4}), lambda: SamplingParams.from_kwargs({name: 4})):
        with pytest.raises(InvalidParameter) as caught:
            make()
        assert caught.value.param == name
        assert FOREIGN_NAMES[name] in str(caught.value)


@pytest.mark.parametrize("name", [*NOT_BUILT])
def test_feature_that_is_not_built_is_refused_when_set(name):
    for make in (lambda: SamplingParams(**{name: 4}), lambda: SamplingParams.from_kwargs({name: 4})):
        with pytest.raises(InvalidParameter, match="does not have") as caught:
            make()
        assert caught.value.param == name
    assert SamplingParams.from_kwargs({name: None, "n": 2}) == SamplingParams(n=2)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(InvalidParameter, match="did you mean temperature"):
        SamplingParams(temperatur=1)
    with pytest.raises(InvalidParameter, match="leave it out"):
        SamplingParams.from_kwargs({"zzzz": None})


@pytest.mark.parametrize("stop", ["", [""], ("",)])
def test_an_empty_stop_string_is_shown_as_a_list(stop):
    """A client that sent JSON shall not meet a tuple."""
    with pytest.raises(InvalidParameter, match=r"^stop is \[''\], but an entry is empty"):
        SamplingParams(stop=stop)


def test_long_values_are_cut_in_messages():
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(stop=("x" * 10_000, ""))
    assert len(str(caught.value)) < 400


def test_beam_search_params_become_the_same_search():
    params = BeamSearchParams(beam_width=4, max_tokens=7, length_penalty=0.5, ignore_eos=True).to_sampling_params()
    assert (params.n, params.num_branches, params.max_tokens, params.length_penalty, params.ignore_eos) == (4, 4, 7, 0.5, True)
    assert params.use_beam_search
    assert params.early_stopping == "never"
    for wrong, param in (({"beam_width": 1}, "beam_width"), ({"beam_width": 17}, "beam_width"), ({"max_tokens": 0}, "max_tokens")):
        with pytest.raises(InvalidParameter) as caught:
            BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | wrong))
        assert caught.value.param == param
    with pytest.raises(InvalidParameter, match="temperature"):
        BeamSearchParams(2, 4, temperature=0.7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.2),
        ("logit_bias", {5: 1.0}),
        ("logits_processors", [lambda ids, logits: logits]),
    ],
)
def test_beams_refuse_what_would_change_probabilities(field, value):
    with pytest.raises(InvalidParameter, match=field) as caught:
        SamplingParams(use_beam_search=True, n=2, **{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -1, "temperature is -1, but it must be at least 0"),
        ("top_p", 2, "top_p is 2, but it must be above 0 and at most 1"),
        ("presence_penalty", 3, "presence_penalty is 3, but it must be at least -2 and at most 2"),
        ("repetition_penalty", 0, "repetition_penalty is 0, but it must be above 0"),
        ("length_penalty", float("nan"), "it must be finite; give a number."),
    ],
)
def test_a_number_out_of_range_is_told_its_limits_in_words(field, value, words):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert words in str(caught.value)
