"""The one path by which every front end's request becomes an `EngineRequest`: checked, bounded, tokenised.

Owns: every check that needs the model, the tokenizer or the server's limits.
Reads: `messages`, `sampling_params`, `model_summary`, a tokenizer.
Never: renders a chat template, touches HTTP, or lets work be queued that could fail later for its content.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

from oarlock.config.sections import ModelConfig, ServerConfig
from oarlock.errors import CONTEXT_IS, PIP, InvalidParameter, ModelError, PromptTooLong
from oarlock.messages import EngineInfo, EngineRequest
from oarlock.model_summary import ModelSummary
from oarlock.pooling_params import Pooler, PoolingParams
from oarlock.sampling_params import INT32_MAX, SamplingParams

# A prompt's mapping keys: those that are honoured, and those of features that this version does not have.
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
NOT_BUILT_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds", "encoder_prompt", "decoder_prompt")

CHECKPOINT_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json

PROBE_FROM = 16  # bytes of text for each token of the context, from which only the beginning is tokenised first
CHARS_A_TOKEN = 32  # characters for each token of the context that may be tokenised though they need not fit it
PROBE_SLACK = 256  # tokens by which the last word of a beginning may differ from the same word in the whole text


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Caps on the fields that cost work. None: no cap beyond what the model itself sets."""

    max_logprobs: int = 20  # -1: the whole vocabulary may be asked for
    max_logprob_entries: int = 1 << 23  # positions x entries of one request
    max_n: int | None = None
    max_stop_strings: int | None = None
    max_stop_len: int | None = None  # characters of one stop string or bad word
    max_logit_bias: int | None = None  # entries
    max_bad_words: int | None = None  # entries
    max_stop_token_ids: int | None = None  # entries: under min_tokens each is banned anew at every step
    max_grammar_chars: int | None = None
    max_temperature: float | None = None
    max_text_chars: int | None = None  # of a text that need not fit the context, or CHARS_A_TOKEN for each of its tokens if that is more

    @classmethod
    def make(cls, model: ModelConfig, server: ServerConfig | None = None) -> InputLimits:
        """A server's limits; without `server`, an in-process caller's, who may spend its own machine."""
        if server is None:
            return cls(max_logprobs=model.max_logprobs, max_logprob_entries=model.max_logprob_entries)
        return cls(
            max_logprobs=model.max_logprobs, max_logprob_entries=model.max_logprob_entries, max_n=server.max_n, max_temperature=2.0,
            max_stop_strings=server.max_stop_strings, max_stop_len=server.max_stop_len, max_stop_token_ids=server.max_stop_token_ids,
            max_logit_bias=server.max_logit_bias, max_bad_words=server.max_bad_words, max_grammar_chars=server.max_grammar_chars,
            max_text_chars=server.max_text_chars,
        )  # fmt: skip


def default_sampling_fields(summary: ModelSummary, generation_config: str = "auto") -> dict[str, Any]:
    """The checkpoint's own sampling defaults, as SamplingParams fields, offline and over HTTP; {} under generation_config "none".

    Its max_new_tokens is left out: a limit that nobody asked for would cut answers.

    Raises:
        ModelError: they could serve no request.
    """
    if generation_config == "none":
        return {}
    source = summary.generation_config
    found = {name: source[name] for name in CHECKPOINT_DEFAULTS if source.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidParameter as error:
        raise ModelError(f"{summary.path}: generation_config.json: {error} Leave the file out by --generation-config none.") from None
    return found


class InputProcessor:
    """Validates and tokenises. Raises `RequestError` with `.param`; holds no per-request state, so threads may share it."""

    def __init__(self, info: EngineInfo, tokenizer: Any | None, summary: ModelSummary, limits: InputLimits | None = None) -> None:
        self.info = info
        self.tokenizer = tokenizer  # None under --skip-tokenizer-init
        self.summary = summary
        self.limits = limits or InputLimits()
        self.pooler = Pooler.of(summary.architecture, summary.hf_config, summary.path, summary.pooler_config)

    @cached_property
    def longest_text(self) -> int | None:
        """Most characters of a text that need not fit the context, as under truncate_prompt_tokens; None: no limit."""
        cap = self.limits.max_text_chars
        return None if cap is None else max(cap, CHARS_A_TOKEN * self.info.max_model_len)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text: the checkpoint's and the tokenizer's."""
        own = getattr(self.tokenizer, "eos_token_id", None)
        ids = (*self.summary.eos_token_ids, *(() if own is None else (own,)))
        return tuple(dict.fromkeys(i for i in ids if 0 <= i < self.info.vocab_size))

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: no text of more than this many bytes a token can be tokenised into fewer tokens. O(vocabulary), once."""
        assert self.tokenizer is not None
        return max((len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab_size)), default=1) or 1

    # ---------------------------------------------------------------- requests
    def make_request(
        self,
        prompt: Any,  # str | list[int] | {"prompt": str} | {"prompt_token_ids": list[int]} (or both)
        params: SamplingParams | PoolingParams,  # PoolingParams: a vector instead of tokens
        request_id: str,
        *,
        priority: int = 0,
        owner: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        param: str = "prompt",  # the name that errors give the prompt: "messages" for chat
        max_tokens_param: str = "max_tokens",
    ) -> tuple[EngineRequest, str | None]:
        """The request that the engine gets, and the prompt's text where there was one.

        Raises:
            InvalidParameter, PromptTooLong: with `.param` naming the field; nothing was queued.
        """
        pooling = self.pooler.fit(params) if isinstance(params, PoolingParams) else None
        params = self._sampling(params, pooling)
        self._check_limits(params)
        self._check_envelope(request_id, priority)
        text, ids, salt = self._split(prompt, param)
        salt = self._check_salt(cache_salt if cache_salt is not None else salt)
        params = self._fit_to_model(params)
        self._check_structured(params)
        eos = () if params.ignore_eos else self.eos_token_ids
        self._check_reachable(params, eos)
        if ids is None:
            is_cut = (params if pooling is None else pooling).truncate_prompt_tokens is not None
            ids = self.tokenize(text, add_special_tokens=add_special_tokens, param=param, bounded=not is_cut)
        else:
            text, ids = text if pooling is None else None, self.check_token_ids(ids, param)
        if pooling is not None:
            ids = self._cut(text, ids, pooling)
        elif params.truncate_prompt_tokens is not None:
            keep = params.truncate_prompt_tokens if params.truncate_prompt_tokens > 0 else max(1, self.info.max_model_len - (params.max_tokens or 1))
            ids = ids[-keep:] if params.truncation_side == "left" else ids[:keep]
        max_tokens = self._room(len(ids), params, param, max_tokens_param if pooling is None else "")
        self._check_logprob_entries("prompt_logprobs", params.prompt_logprobs, len(ids), f"{len(ids)} tokens of {param}")
        made = f"{params.num_branches} × {max_tokens} of {max_tokens_param}"
        self._check_logprob_entries("logprobs", params.logprobs, params.num_branches * max_tokens, made)
        if pooling is None and (params.max_tokens is not None or not params.use_beam_search):  # how far all beams can go is the scheduler's to say
            params = replace(params, max_tokens=max_tokens)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(ids),
            params=params,
            eos_token_ids=eos,
            arrival_s=time.time(),
            priority=priority,
            owner=owner,
            cache_salt=salt,
            pooling=pooling,
        )
        return request, text

    def _sampling(self, params: Any, pooling: PoolingParams | None) -> SamplingParams:
        """The caller's, or those under which a prompt is computed for its vector, every position of it where all are needed."""
        if pooling is not None:
            return SamplingParams(max_tokens=1, detokenize=False, skip_reading_prefix_cache=pooling.pooling != "last")
        if not isinstance(params, SamplingParams):
            raise InvalidParameter(f"sampling_params is of type {type(params).__name__}; give a SamplingParams.", param="sampling_params")
        if self.pooler.role != "generate":
            gives = "classes and scores" if self.pooler.role == "classify" else "embeddings"
            raise InvalidParameter(f"this model ({self.summary.architecture}) generates no text; it gives {gives}.", param="model", code="unsupported_field")
        return params

    def _cut(self, text: str | None, ids: list[int], pooling: PoolingParams) -> list[int]:
        """At most `truncate_prompt_tokens` of them. What the tokenizer adds before and after a text stays: a model may read its vector there."""
        keep = pooling.truncate_prompt_tokens
        keep = self.info.max_model_len if keep == -1 else keep
        if keep is None or len(ids) <= keep:
            return ids
        plain = ids if text is None or self.tokenizer is None else self.tokenizer.encode(text, False)
        before = next((at for at in range(len(ids) - len(plain) + 1) if ids[at : at + len(plain)] == plain), None)
        if before is None or not 0 < (room := keep - len(ids) + len(plain)):
            before, plain, room = 0, ids, keep
        kept = plain[:room] if pooling.truncation_side == "right" else plain[-room:]
        return [*ids[:before], *kept, *ids[before + len(plain) :]]

    def check_together(self, requests: Sequence[EngineRequest]) -> int:
        """Bound the logprobs of the prompts of one caller, whose results are held until the last one has come.

        Returns the prompts' logprob entries, all together. Raises InvalidParameter as for a single request.
        """
        params, count = requests[0].params, len(requests)
        tokens = sum(len(request.prompt_token_ids) for request in requests)
        made = sum(self._most_tokens(request) for request in requests)
        entries = self._check_logprob_entries("prompt_logprobs", params.prompt_logprobs, tokens, f"{tokens} tokens of {count} prompts")
        self._check_logprob_entries("logprobs", params.logprobs, made, f"{made} tokens that {count} prompts may get")
        return entries

    def _most_tokens(self, request: EngineRequest) -> int:
        params = request.params
        each = self.info.max_model_len - len(request.prompt_token_ids) if params.max_tokens is None else params.max_tokens
        return params.num_branches * each

    def tokenize(self, text: Any, *, add_special_tokens: bool = True, param: str = "prompt", bounded: bool = True) -> list[int]:
        """Token ids of `text`, never empty, after the checks that are cheaper than tokenising. Raises RequestError naming `param`.

        `bounded`: refuse a text that cannot fit the context before it is tokenised; other texts have a limit of their own.
        """
        if self.tokenizer is None:
            raise InvalidParameter(f"{param} is text, but the tokenizer is off (skip_tokenizer_init); give token ids.", param=param)
        num_bytes = self._text_bytes(text, param)
        if not bounded and self.longest_text is not None and len(text) > self.longest_text:
            raise InvalidParameter(
                f"{param} has {len(text)} characters, and with truncate_prompt_tokens the limit (--max-text-chars) is {self.longest_text}; send its end only.",
                param=param,
            )
        limit = self.info.max_model_len
        # Cheap first: the longest token is looked up only for texts that are large already.
        if bounded and num_bytes > limit and num_bytes > limit * self.max_token_bytes:
            least = -(-num_bytes // self.max_token_bytes)
            raise PromptTooLong(
                f"{param} is {num_bytes} bytes of text and so at least {least} tokens, but {CONTEXT_IS} {limit} tokens "
                "(max_model_len); shorten it.",
                param=param,
                code="context_length_exceeded",
            )
        if bounded and num_bytes > PROBE_FROM * limit:
            self._probe(text, param)
        ids = list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if not ids:
            bos = self.tokenizer.bos_token_id
            if bos is None:
                raise InvalidParameter(f"{param} is empty, and the model has no beginning-of-text token to start from; give a text.", param=param)
            ids = [bos]
        if max(ids) >= self.info.vocab_size:
            raise InvalidParameter(
                f"{param} gives token id {max(ids)}, beyond the model's vocabulary of {self.info.vocab_size}; is this the model's own tokenizer?",
                param=param,
            )
        return ids

    def _probe(self, text: str, param: str) -> None:
        """Tokenise the beginning of a text that is long for this context: most are refused by it, at a fraction of the cost and memory."""
        limit = self.info.max_model_len
        least = len(self.tokenizer.encode(text[: PROBE_FROM // 2 * limit], add_special_tokens=False)) if self.tokenizer else 0
        if least > limit + PROBE_SLACK:
            raise PromptTooLong(
                f"{param} begins with {least} tokens in its first {PROBE_FROM // 2 * limit} characters alone, but {CONTEXT_IS} "
                f"{limit} tokens (max_model_len); shorten it.",
                param=param,
                code="context_length_exceeded",
            )

    def check_token_ids(self, ids: Any, param: str = "prompt", *, may_be_empty: bool = False) -> list[int]:
        """The ids as plain integers, all within the vocabulary. Raises InvalidParameter naming `param` and the entry."""
        if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
            raise InvalidParameter(f"{param} is of type {type(ids).__name__}; give a list of token ids.", param=param)
        known: list[Any] = list(ids)
        if not known and not may_be_empty:
            raise InvalidParameter(f"{param} is an empty list of token ids; give at least one.", param=param)
        vocab_size = self.info.vocab_size
        plain = set(map(type, known)) <= {int}  # PERF: the common case costs three passes in C
        if not (plain and (not known or (min(known) >= 0 and max(known) < vocab_size))):
            for index, token_id in enumerate(known):
                if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                    raise InvalidParameter(f"{param} has {token_id!r:.80} at index {index}; token ids are integers.", param=param)
                if not 0 <= int(token_id) < vocab_size:
                    raise InvalidParameter(
                        f"{param} has token id {token_id} at index {index}; the model's vocabulary is 0 to {vocab_size - 1}.", param=param
                    )
            known = [int(token_id) for token_id in known]
        return known

    # ---------------------------------------------------------------- steps of make_request
    def _split(self, prompt: Any, param: str) -> tuple[str | None, Any | None, str | None]:
        """(text, token ids, cache salt) of one prompt in any of its forms; at least one of the first two is there."""
        if isinstance(prompt, str):
            return prompt, None, None
        if not isinstance(prompt, Mapping):
            if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, bytes) and isinstance(prompt[0], str | Mapping | Sequence):
                raise InvalidParameter(f"{param} holds several prompts; give them one at a time.", param=param)
            return None, prompt, None
        for key, value in prompt.items():
            if key in NOT_BUILT_KEYS and value is not None:
                raise InvalidParameter(f"{param} has {key!r}, but this version takes text and token ids only; leave it out.", param=param)
            if key not in PROMPT_KEYS and key not in NOT_BUILT_KEYS:
                raise InvalidParameter(f"{param} has the unknown key {key!r:.80}; the keys are {', '.join(PROMPT_KEYS)}.", param=param)
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is None and ids is None:
            raise InvalidParameter(f"{param} has neither 'prompt' nor 'prompt_token_ids'; give one.", param=param)
        if text is not None:
            self._text_bytes(text, param)
        return text, ids, prompt.get("cache_salt")

    def _text_bytes(self, text: Any, param: str) -> int:
        """Bytes of `text` in UTF-8. Raises InvalidParameter for what is no text, lone surrogates included."""
        if not isinstance(text, str):
            raise InvalidParameter(f"{param} is of type {type(text).__name__}; give a string or a list of token ids.", param=param)
        try:
            return len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                f"{param} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; send valid Unicode.", param=param
            ) from None

    def _check_envelope(self, request_id: str, priority: int) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise InvalidParameter(f"request_id is {request_id!r:.80}; give a string that is not empty.", param="request_id")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > INT32_MAX:
            raise InvalidParameter(f"priority is {priority!r:.80}; give an integer of 32 bits.", param="priority")

    @staticmethod
    def _check_salt(salt: Any) -> str | None:
        if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= 1024):
            raise InvalidParameter("cache_salt must be a string of 1 to 1024 characters.", param="cache_salt")
        return salt

    def _check_limits(self, params: SamplingParams) -> None:
        """The server's caps, each named with the number that was sent."""
        limits = self.limits
        longest_stop, longest_word = (max(map(len, words), default=0) for words in (params.stop, params.bad_words))
        wanted = params.structured_outputs
        caps = (
            ("n", params.n, limits.max_n, "results", "max-n"),
            ("best_of", params.num_branches, limits.max_n, "results", "max-n"),
            ("stop", len(params.stop), limits.max_stop_strings, "stop strings", "max-stop-strings"),
            ("stop", longest_stop, limits.max_stop_len, "characters in one stop string", "max-stop-len"),
            ("stop_token_ids", len(params.stop_token_ids), limits.max_stop_token_ids, "entries", "max-stop-token-ids"),
            ("logit_bias", len(params.logit_bias), limits.max_logit_bias, "entries", "max-logit-bias"),
            ("logit_bias", len(params.logit_bias), self.info.max_logit_bias or None, "entries", ""),  # the device's shapes
            ("bad_words", len(params.bad_words), limits.max_bad_words, "entries", "max-bad-words"),
            ("bad_words", longest_word, limits.max_stop_len, "characters in one entry", "max-stop-len"),
            ("temperature", params.temperature, limits.max_temperature, "", ""),
            (wanted.param if wanted else "", len(wanted.text) if wanted else 0, limits.max_grammar_chars, "characters", "max-grammar-chars"),
        )
        for name, number, cap, what, flag in caps:
            if cap is not None and number is not None and number > cap:
                shown, most = (f"{one:g}" if isinstance(one, float) else str(one) for one in (number, cap))
                limit = f"the limit here{f' (--{flag})' if flag else ''} is {most}"
                raise InvalidParameter(f"{name}: {shown} {what}".rstrip() + f", but {limit}; send less.", param=name)
        vocab_size = self.info.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is None or (limits.max_logprobs == -1 and number <= vocab_size):
                continue
            if number == -1 or limits.max_logprobs == -1 or number > limits.max_logprobs:
                cap = vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
                raise InvalidParameter(
                    f"{name} is {number}{' (the whole vocabulary)' if number == -1 else ''}, but the limit is {cap}; "
                    "ask for fewer, or start the engine with a larger max_logprobs (-1: no limit).",
                    param=name,
                )

    def _check_logprob_entries(self, name: str, asked: int | None, positions: int, what: str) -> int:
        """Entries are held for the whole request, so their number is bounded before it costs anything, and returned."""
        cap, vocab_size = self.limits.max_logprob_entries, self.info.vocab_size
        entries = 0 if asked is None else vocab_size if asked < 0 else min(asked + 1, vocab_size)  # the token itself is one more
        if positions * entries <= cap:
            return positions * entries
        each = f"at most {cap // positions - 1} entries, or for " if cap >= positions else ""
        raise InvalidParameter(
            f"{name} is {asked}{' (the whole vocabulary)' if asked == -1 else ''}: {entries} entries for each of {what} are {positions * entries}, "
            f"but the limit is {cap}; ask for {each}at most {cap // entries} tokens, or start the engine with a larger max_logprob_entries.",
            param=name,
        )

    def _fit_to_model(self, params: SamplingParams) -> SamplingParams:
        """Checks against model, tokenizer and engine; returns the fields as the engine needs them."""
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("logit_bias", (token_id for token_id, _ in params.logit_bias))
        for sequence in params.bad_words_token_ids:
            self._check_vocabulary("bad_words_token_ids", sequence)
        if params.logits_processors and not self.info.supports_host_callbacks:
            raise InvalidParameter(
                "logits_processors: functions can run only in the process of the engine; use the LLM class, or leave them out.",
                param="logits_processors",
            )
        if params.use_beam_search and params.num_branches > self.info.max_num_seqs:
            name = "n" if params.best_of is None else "best_of"
            raise InvalidParameter(
                f"{name} is {params.num_branches}, but all beams run together and max_num_seqs is {self.info.max_num_seqs}; "
                "give a smaller width, or raise max_num_seqs.",
                param=name,
            )
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > self.info.max_model_len:
            raise InvalidParameter(
                f"truncate_prompt_tokens is {keep}, but the context (max_model_len) is {self.info.max_model_len} tokens; give at most that.",
                param="truncate_prompt_tokens",
            )
        changes: dict[str, Any] = {}
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise InvalidParameter(
                        f"{name} is text, but the tokenizer is off (skip_tokenizer_init); use {name.replace('words', 'words_token_ids')}"
                        f"{'_token_ids' if name == 'stop' else ''}.",
                        param=name,
                    )
            changes["detokenize"] = False
        if params.bad_words:
            sequences = (*params.bad_words_token_ids, *self._bad_word_ids(params.bad_words))
            changes["bad_words_token_ids"] = tuple(dict.fromkeys(sequences))
        if params.prompt_logprobs is not None:
            changes["skip_reading_prefix_cache"] = True  # every prompt position must be computed to have logprobs
        return replace(params, **changes) if changes else params

    def _check_structured(self, params: SamplingParams) -> None:
        """Whether a package here can constrain the answer. That the constraint itself is possible is found when it is compiled."""
        wanted = params.structured_outputs
        if wanted is None:
            return
        states = dict(self.info.structured_outputs)
        usable = [name for name, problem in states.items() if not problem]
        fault = None
        if wanted.backend is not None and wanted.backend not in usable:
            why = states.get(wanted.backend) or f"no installed package has it; here are {', '.join(usable) or 'none'} ({PIP} ./plugins/structured_output)"
            name = "guided_decoding_backend"
            raise InvalidParameter(f"{name} is {wanted.backend!r:.80}: {why}.", param=name, code="unsupported_field")
        if not usable:
            why = "; ".join(f"{name}: {problem}" for name, problem in states.items()) or "none is installed"
            fault = f"it needs a package that constrains answers, and {why}; run {PIP} ./plugins/structured_output"
        elif self.tokenizer is None:
            fault = "a constraint is on text, and the tokenizer is off (skip_tokenizer_init); use allowed_token_ids"
        elif params.use_beam_search and not (params.stop_token_ids or (self.eos_token_ids and not params.ignore_eos)):
            fault = "under beam search an answer ends with an end-of-text token, and ignore_eos leaves none; leave ignore_eos out"
        if fault is not None:
            raise InvalidParameter(f"{wanted.param}: {fault}.", param=wanted.param, code="unsupported_field")

    def _check_vocabulary(self, name: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise InvalidParameter(
                    f"{name} has token id {token_id}, but the model's vocabulary is 0 to {self.info.vocab_size - 1}; "
                    "use ids of this model's tokenizer.",
                    param=name,
                )

    def _bad_word_ids(self, words: Iterable[str]) -> list[tuple[int, ...]]:
        """Each word at the start of a text and after a space, which most tokenizers spell with different tokens."""
        assert self.tokenizer is not None
        sequences = []
        for word in words:
            self._text_bytes(word, "bad_words")
            bare = word.lstrip()
            for text in (bare, " " + bare) if bare else (word,):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if not ids:
                    raise InvalidParameter(f"bad_words has {word!r:.80}, which the tokenizer gives no token; leave it out.", param="bad_words")
                self._check_vocabulary("bad_words", ids)
                sequences.append(ids)
        return sequences

    def _check_reachable(self, params: SamplingParams, eos: tuple[int, ...]) -> None:
        """Bans that leave nothing to choose at the first token would give a row without a single finite logit."""
        ends = {*eos, *params.stop_token_ids} if params.min_tokens else set()
        if params.allowed_token_ids is None:
            if len(ends) >= self.info.vocab_size:
                raise InvalidParameter(
                    "stop_token_ids has every token, and min_tokens bans them all at first; leave one of them out.", param="stop_token_ids"
                )
            return
        left = set(params.allowed_token_ids) - {ids[0] for ids in params.bad_words_token_ids if len(ids) == 1} - ends
        if not left:
            raise InvalidParameter(
                "allowed_token_ids leaves no token: bad_words and min_tokens (which bans EOS and stop tokens at first) exclude all of them; "
                "allow at least one more.",
                param="allowed_token_ids",
            )

    def _room(self, prompt_len: int, params: SamplingParams, param: str, max_tokens_param: str) -> int:
        """max_tokens as a number, checked against the context and against what the KV cache can ever hold. No name of it: nothing is generated."""
        limits = [(self.info.max_model_len, CONTEXT_IS + " {} tokens (max_model_len)", "or serve with a larger max_model_len")]
        if self.info.max_prompt_tokens:
            limits.append((self.info.max_prompt_tokens, "the KV cache can hold {} tokens of one request", "or give the KV cache more memory"))
        limit, what, remedy = min(limits, key=lambda entry: entry[0])
        wanted = params.max_tokens if max_tokens_param else 0
        least = 1 if wanted is None else wanted
        if prompt_len + least > limit:
            output = f" and {wanted} of {max_tokens_param}" if wanted is not None else " and at least 1 to generate"
            fault = param if prompt_len + bool(least) > limit else max_tokens_param
            raise PromptTooLong(
                f"{what.format(limit)}, but the request needs {prompt_len + least}: {prompt_len} of {param}{output if max_tokens_param else ''}; "
                f"shorten {param}, {f'lower {max_tokens_param}, ' if max_tokens_param else ''}{remedy}.",
                param=fault,
                code="context_length_exceeded",
            )
        room = limit - prompt_len if wanted is None else wanted
        if params.min_tokens > room:
            raise InvalidParameter(
                f"min_tokens is {params.min_tokens}, but only {room} tokens of the context are left after the prompt; lower it.",
                param="min_tokens",
            )
        return room
