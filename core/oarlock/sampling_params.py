"""`SamplingParams`: how one request's tokens are chosen, validated before anything costs work.

Owns: the fields, their ranges, and the mapping of older and foreign names.
Reads: `errors`.
Never: knows a model (vocabulary checks are `frontend.inputs`'), HTTP or torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, Self

from oarlock import structured_outputs as structured
from oarlock.errors import InvalidParameter
from oarlock.structured_outputs import StructuredOutputs

GREEDY_EPSILON = 1e-5  # temperatures below this are greedy
MAX_BRANCHES = 128
BEAM_WIDTHS = (2, 16)  # smallest and largest
MAX_BIAS = 100.0
INT64 = (-(2**63), 2**63 - 1)
INT32_MAX = 2**31 - 1

# Names of other engines, and the field that means the same here. An error names it: a quiet mapping would hide differences.
FOREIGN_NAMES = {
    "num_beams": "best_of (with use_beam_search=True)",
    "beam_width": "best_of (with use_beam_search=True), or LLM.beam_search with BeamSearchParams",
    "beam_size": "best_of (with use_beam_search=True)",
    "max_length": "max_tokens (which counts generated tokens only, not the prompt)",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_input_length": "truncate_prompt_tokens, or the engine's max_model_len",
    "min_length": "min_tokens (which counts generated tokens only, not the prompt)",
    "min_new_tokens": "min_tokens",
    "do_sample": "temperature (0 is greedy)",
    "num_return_sequences": "n",
    "num_sequences": "n",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words_token_ids",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "top_logprobs": "logprobs",
    "include_stop": "include_stop_str_in_output",
    "batch_size": "the engine's max_num_seqs",
    "cpu_swap_space": "the engine's swap_space",
    "request_rate": "the option of `oarlock bench serve`",
}

# Known features of other engines that this version cannot honour. Refused when set, accepted when neutral (None or False).
NOT_BUILT = {
    **dict.fromkeys(("thinking_token_budget", "reasoning_effort"), "reasoning budgets"),
    "repetition_detection": "stopping at detected repetition",
    "watermarking": "watermarks",
    "logprob_token_ids": "logprobs of chosen token ids",
    "prompt_logprob_start": "prompt logprobs of a part of the prompt",
    "flat_logprobs": "flat logprobs",
    "extra_args": "arguments for server-wide logits processors",
    "vllm_xargs": "arguments for server-wide logits processors",
    "output_kind": "a choice of output kind here; streaming is chosen by the call",
    "stream_interval": "a streaming interval",
    "no_repeat_ngram_size": "n-gram blocking",
    "typical_p": "typical sampling",
    "top_a": "top-a sampling",
    "mirostat": "mirostat sampling",
}  # fmt: skip


# Other fields that ask for structured output; what they say is kept in `structured_outputs`.
STRUCTURED_NAMES = ("response_format", "guided_decoding", *structured.OLDER)


def _refuse(name: str, value: object, rule: str, remedy: str) -> InvalidParameter:
    text = repr(value)
    return InvalidParameter(f"{name} is {text if len(text) <= 80 else text[:77] + '...'}, but {rule}; {remedy}.", param=name)


def unknown_field_error(name: str, value: object = None) -> InvalidParameter | None:
    """Why `name=value` cannot be a sampling field; None if it is a field, or a known feature left off."""
    if name in SamplingParams.__slots__ or name in STRUCTURED_NAMES:
        return None
    if name in FOREIGN_NAMES:
        return InvalidParameter(f"{name} is not a sampling field here: use {FOREIGN_NAMES[name]}.", param=name)
    if name in NOT_BUILT:
        if value is None or value is False:
            return None
        return InvalidParameter(f"{name} is set, but this version does not have {NOT_BUILT[name]}; leave the field out.", param=name)
    near = difflib.get_close_matches(name, [*SamplingParams.__slots__, *FOREIGN_NAMES], n=1)
    hint = f"did you mean {FOREIGN_NAMES.get(near[0], near[0])}?" if near else "leave it out."
    return InvalidParameter(f"{name} is not a sampling field; {hint}", param=name)


def _integer(name: str, value: object, low: int, high: int = INT32_MAX, remedy: str | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _refuse(name, value, "it must be an integer", remedy or f"give one of at least {low}")
    number = int(value)
    if not low <= number <= high:
        limit = f"it must be at least {low}" if number < low else f"it must be at most {high}"
        raise _refuse(name, number, limit, remedy or f"give an integer from {low} to {high}")
    return number


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    limits = ([] if math.isinf(low) else [f"above {low:g}" if above_low else f"at least {low:g}"]) + ([] if math.isinf(high) else [f"at most {high:g}"])
    span = " and ".join(limits)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(name, value, "it must be a number", f"give one {span}".rstrip())
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refuse(name, value, "it must be finite", f"give a number {span}".rstrip())
    if not (low < number if above_low else low <= number) or number > high:
        raise _refuse(name, value, f"it must be {span}", "give such a number")
    return number


def _boolean(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise _refuse(name, value, "it must be true or false", "give a boolean")
    return value


def _items(name: str, value: object, what: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refuse(name, value, f"it must be a list of {what}", "give a list")
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    """Non-negative ids, duplicates dropped, order kept. That they lie in the vocabulary is checked where it is known."""
    items = _items(name, value, "token ids")
    if set(map(type, items)) <= {int}:  # PERF: a million may come in one request, and are checked again with every copy of it
        items = tuple(dict.fromkeys(items))
        if not items or (min(items) >= 0 and max(items) <= INT32_MAX):
            return items
    return tuple(dict.fromkeys(_integer(name, item, 0, remedy="list token ids of the model's vocabulary") for item in items))


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = _items(name, value, "strings")
    for text in strings:
        if not isinstance(text, str):
            raise _refuse(name, text, "every entry must be a string", "give a list of strings")
        if not text:
            raise _refuse(name, list(strings), "an entry is empty, which would match everywhere", "leave the empty string out")
    return strings


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    """From {id: bias}, whose ids may be decimal strings as in JSON, or from pairs."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else _items("logit_bias", value, "(token id, bias) pairs")
    bias: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _refuse("logit_bias", pair, "every entry must be a token id and a bias", "give a mapping of token id to bias")
        token_id: Any = pair[0]
        if isinstance(token_id, str):
            if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 10):
                raise _refuse("logit_bias", token_id, "every key must be a token id", "use token ids of the model's vocabulary as keys")
            token_id = int(token_id)
        token_id = _integer("logit_bias", token_id, 0, remedy="use token ids of the model's vocabulary as keys")
        if token_id in bias:
            raise _refuse("logit_bias", token_id, "this token id occurs twice", "give each token id one bias")
        bias[token_id] = _number("logit_bias", pair[1], -MAX_BIAS, MAX_BIAS)
    return tuple(bias.items())


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Frozen and valid once it exists. Lists are accepted and kept as tuples; None means the default.

    Raises:
        InvalidParameter (a ValueError): names the field, its value, the limit and the remedy; also for foreign and unknown names.
    """

    n: int = 1
    best_of: int | None = None  # None: n
    presence_penalty: float = 0.0  # output tokens only, [-2, 2]
    frequency_penalty: float = 0.0  # output tokens only, [-2, 2]
    repetition_penalty: float = 1.0  # prompt and output, > 0
    temperature: float | None = None  # None: 1.0, or 0.0 under beam search; never None once made
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 and -1: off (normalised to 0)
    min_p: float = 0.0  # [0, 1]
    seed: int | None = None  # an int64; -1 means None
    use_beam_search: bool = False  # width is best_of, else n
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: tuple[str, ...] = ()  # a single string is accepted
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: the rest of the context; 0 only with prompt_logprobs: the prompt is scored and nothing sampled
    min_tokens: int = 0
    logprobs: int | None = None  # entries beside the sampled token; -1: whole vocabulary
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[str, ...] = ()  # those that show all the same: what a parser of tool calls reads
    spaces_between_special_tokens: bool = True  # either holds already: text is the tokens' own bytes, nothing is put between them
    logits_processors: tuple[Callable[..., Any], ...] = ()  # in-process LLM only
    truncate_prompt_tokens: int | None = None  # a longer prompt is cut to k tokens; -1: to what the context leaves
    truncation_side: Literal["left", "right"] = "left"  # which end is cut off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias in [-100, 100]); a mapping is accepted
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # the frontend adds those of bad_words
    skip_reading_prefix_cache: bool = False
    structured_outputs: StructuredOutputs | None = None  # the answer's shape; a mapping is accepted, and the keywords of STRUCTURED_NAMES

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Before __init__, so that a foreign name gets an error that helps instead of Python's "unexpected keyword argument".
        for name, value in kwargs.items():
            if name not in cls.__slots__ and name not in STRUCTURED_NAMES:
                raise unknown_field_error(name, value) or InvalidParameter(
                    f"{name} is no field of this version; leave it out, or use SamplingParams.from_kwargs, which drops neutral values.", param=name
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for spec in fields(self):
            if getattr(self, spec.name) is None and spec.name != "max_tokens":
                object.__setattr__(self, spec.name, spec.default)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", structured.read({"structured_outputs": self.structured_outputs}))
        checked = self._numbers() | self._switches() | self._lists()
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.use_beam_search:
            self._check_beams()
        else:
            self._check_sampling()
        self._check_combinations()

    @classmethod
    def from_kwargs(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From a client's fields. A known feature that is left off (None or False) is dropped, anything else unknown is refused."""
        known = {}
        for name, value in values.items():
            if name in cls.__slots__ or name in STRUCTURED_NAMES:
                known[name] = value
            elif (error := unknown_field_error(name, value)) is not None:
                raise error
        return cls(**known)

    @property
    def is_greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_EPSILON

    @property
    def num_branches(self) -> int:
        """Branches the engine forks: best_of, else n (the width, under beam search)."""
        return self.best_of if self.best_of is not None else self.n

    # ---------------------------------------------------------------- single fields
    def _numbers(self) -> dict[str, Any]:
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if self.use_beam_search else 1.0
        seed = None if self.seed is None else _integer("seed", self.seed, *INT64)
        top_k = _integer("top_k", self.top_k, -1, remedy="give a positive number of tokens, or 0 or -1 for off")
        return {
            "n": _integer("n", self.n, 1, MAX_BRANCHES),
            "best_of": None if self.best_of is None else _integer("best_of", self.best_of, 1, MAX_BRANCHES),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2, 2),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0, math.inf, above_low=True),
            "temperature": _number("temperature", temperature, 0, math.inf),
            "top_p": _number("top_p", self.top_p, 0, 1, above_low=True),
            "top_k": max(0, top_k),
            "min_p": _number("min_p", self.min_p, 0, 1),
            "seed": None if seed == -1 else seed,
            "length_penalty": _number("length_penalty", self.length_penalty, -math.inf, math.inf),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 0),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, -1),
            "prompt_logprobs": None if self.prompt_logprobs is None else _integer("prompt_logprobs", self.prompt_logprobs, -1),
            "truncate_prompt_tokens": None if (cut := self.truncate_prompt_tokens) is None else _integer("truncate_prompt_tokens", cut, -1 if cut == -1 else 1),
        }

    def _switches(self) -> dict[str, Any]:
        names = (
            "use_beam_search", "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens",
            "spaces_between_special_tokens", "skip_reading_prefix_cache",
        )  # fmt: skip
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            raise _refuse("early_stopping", self.early_stopping, 'it must be true, false or "never"', "give one of the three")
        if self.truncation_side not in ("left", "right"):
            raise _refuse("truncation_side", self.truncation_side, 'it must be "left" or "right"', "give one of the two")
        return {name: _boolean(name, getattr(self, name)) for name in names}

    def _lists(self) -> dict[str, Any]:
        processors = _items("logits_processors", self.logits_processors, "callables")
        for processor in processors:
            if not callable(processor):
                raise _refuse("logits_processors", processor, "every entry must be callable", "give functions of (output ids, logits)")
        allowed = self.allowed_token_ids
        if allowed is not None:
            allowed = _token_ids("allowed_token_ids", allowed)
            if not allowed:
                raise _refuse("allowed_token_ids", [], "an empty list allows no token at all", "list at least one token id, or leave it out")
        sequences = _items("bad_words_token_ids", self.bad_words_token_ids, "token id lists")
        bad_ids = tuple(tuple(_integer("bad_words_token_ids", t, 0) for t in _items("bad_words_token_ids", s, "token ids")) for s in sequences)
        if () in bad_ids:
            raise _refuse("bad_words_token_ids", self.bad_words_token_ids, "an entry is empty", "leave the empty list out")
        return {
            "stop": _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "logits_processors": processors,
            "logit_bias": _bias(self.logit_bias),
            "allowed_token_ids": allowed,
            "bad_words": _strings("bad_words", self.bad_words),
            "shown_special_tokens": _strings("shown_special_tokens", self.shown_special_tokens),
            "bad_words_token_ids": bad_ids,
        }

    # ---------------------------------------------------------------- fields against each other
    def _check_combinations(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise _refuse("max_tokens", 0, "such a request scores its prompt, and prompt_logprobs is not set", "give at least 1, or set it")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"max_tokens is {self.max_tokens}", "min_tokens must not be larger")
        if self.best_of is not None and self.best_of < self.n:
            raise _refuse("best_of", self.best_of, f"n is {self.n} and the n best of best_of are returned", f"give best_of of at least {self.n}")
        if self.stop and not self.detokenize:
            raise _refuse("stop", list(self.stop), "stop strings need text and detokenize is false", "use stop_token_ids, or detokenize")

    def _check_sampling(self) -> None:
        if self.length_penalty != 1.0:
            raise _refuse("length_penalty", self.length_penalty, "it has a meaning only for beams", "set use_beam_search, or leave it at 1")
        if self.early_stopping is not False:
            raise _refuse("early_stopping", self.early_stopping, "it has a meaning only for beams", "set use_beam_search, or leave it out")
        if self.is_greedy and self.num_branches > 1:
            name = "n" if self.n > 1 else "best_of"
            rule = f"temperature is {self.temperature:g}, so all {self.num_branches} results would be the same"
            raise _refuse(name, getattr(self, name), rule, "raise the temperature, set use_beam_search, or ask for one result")

    def _check_beams(self) -> None:
        low, high = BEAM_WIDTHS
        if not low <= self.num_branches <= high:
            name = "n" if self.best_of is None else "best_of"
            raise _refuse(name, self.num_branches, f"the beam width (best_of, else n) must be {low} to {high}", "give a width in that range")
        neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for name, value in neutral.items():
            if getattr(self, name) != value:
                rule = "beam search takes the most probable continuations and does not sample"
                raise _refuse(name, getattr(self, name), rule, f"leave it out, or at {value:g}")
        shaping: dict[str, object] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": (), "logits_processors": ()}
        for name, untouched in shaping.items():
            if getattr(self, name) != untouched:
                rule = "beams are compared by the model's own probabilities, which this would change"
                raise _refuse(name, getattr(self, name), rule, "leave it out, or sample instead of searching")
        if self.stop:
            raise _refuse("stop", list(self.stop), "beams are compared as tokens and have no text until they end", "use stop_token_ids")


_init = SamplingParams.__init__


def _init_with_others(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
    """STRUCTURED_NAMES are keywords, not fields: what travels and is compared has one form only."""
    if not kwargs.keys().isdisjoint(STRUCTURED_NAMES):
        asked = {name: kwargs.pop(name) for name in ("structured_outputs", *STRUCTURED_NAMES) if name in kwargs}
        kwargs["structured_outputs"] = structured.read(asked)
    _init(self, *args, **kwargs)


SamplingParams.__init__ = _init_with_others  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What `LLM.beam_search` takes: a beam search that runs until no better beam can come."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, *BEAM_WIDTHS)
        _integer("max_tokens", self.max_tokens, 1)
        self.to_sampling_params()

    def to_sampling_params(self) -> SamplingParams:
        """The same search as request fields; every beam is returned, best first. Raises InvalidParameter."""
        return SamplingParams(
            n=self.beam_width,
            best_of=self.beam_width,
            use_beam_search=True,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping="never",
            ignore_eos=self.ignore_eos,
            max_tokens=self.max_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )
