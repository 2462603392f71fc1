"""A tokenizer of bytes and a scripted engine: what front-end tests need instead of a model.

Token ids 0 to 255 are bytes; then come the specials and a few words.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar

from oarlock.engine.client import EngineClient
from oarlock.errors import EngineDead
from oarlock.messages import Abort, EngineInfo, EngineOutput, EngineOutputs, EngineRequest, PositionLogprobs, SchedulerStats
from oarlock.model_summary import ModelSummary

BOS, EOS, END = 256, 257, 258
WORDS = ["hello", " world", "ab", "bc", "abc", "stop", " stop"]
VOCAB_SIZE = 272  # some ids have no token
SPECIALS = {BOS: "<bos>", EOS: "<eos>", END: "<end>"}
WORD_IDS = {word: 259 + i for i, word in enumerate(WORDS)}

SUMMARY = ModelSummary(path="/toy", architecture="ToyForCausalLM", vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), bos_token_id=BOS)


def info(**changes) -> EngineInfo:
    facts = {
        "max_model_len": 64, "vocab_size": VOCAB_SIZE, "block_size": 4, "num_blocks": 64, "num_host_blocks": 0, "max_num_seqs": 4,
        "device": "toy", "device_text": "toy", "dtype": "float32", "supports_host_callbacks": True,
    }  # fmt: skip
    return EngineInfo(**(facts | changes))


class ToyTokenizer:
    vocab_size = 259 + len(WORDS)
    eos_token_id: int | None = EOS
    all_special_ids = frozenset(SPECIALS)
    chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def __init__(self, bos_token_id: int | None = BOS, *, adds_bos: bool = False) -> None:
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos
        self.num_encoded = 0  # how many texts were tokenised

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Whole words only where the text is exactly a word; otherwise bytes."""
        self.num_encoded += 1
        ids = [WORD_IDS[text]] if text in WORD_IDS else list(text.encode())
        return [self.bos_token_id, *ids] if self.adds_bos and add_special_tokens and self.bos_token_id is not None else ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        if token_id in SPECIALS:
            return SPECIALS[token_id].encode()
        return WORDS[token_id - 259].encode() if token_id - 259 < len(WORDS) else b""

    def id_to_token(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        return next((i for i, text in SPECIALS.items() if text == token), None)

    def make_stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = (), shown: Sequence[str] = ()) -> ToyStream:
        return ToyStream(self, {i for i, text in SPECIALS.items() if text not in shown} if skip_special_tokens else set())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        stream = self.make_stream(skip_special_tokens)
        return stream.step(list(ids)) + stream.flush()


class ToyStream:
    def __init__(self, tokenizer: ToyTokenizer, skip: set[int]) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, ids: list[int]) -> str:
        kept = (i for i in ids if i not in self._skip)
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, kept)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def position(token_id: int, logprob: float = -0.5) -> PositionLogprobs:
    """Logprobs of a token that is second best to token 65 ("A")."""
    return PositionLogprobs(token_id, logprob, 2, ((65, -0.1), (token_id, logprob), (66, -2.0)))


def toy_vector(ids: Sequence[int]) -> bytes:
    """[number of tokens, last token, first token, 0.5] as float32."""
    return struct.pack("<4f", len(ids), ids[-1], ids[0], 0.5)


Script = Callable[[EngineRequest, int], Sequence[int]]


class ScriptedClient(EngineClient):
    """An engine whose tokens are given: `script(request, index)` are the tokens of a branch. Runs in `step`, like the in-process one.

    EOS and stop ids end a branch with "stop", max_tokens with "length"; a script that ends too early is repeated.
    """

    def __init__(self, script: Script, *, tokens_per_step: int = 1, abort_lag: int = 0, engine_info: EngineInfo | None = None) -> None:
        super().__init__()
        self.info = engine_info or info()
        self.script, self.tokens_per_step, self.abort_lag = script, tokens_per_step, abort_lag
        self.submitted: list[EngineRequest] = []
        self.aborts: list[Abort] = []
        self.most_open = self.num_steps = self.num_resets = self.num_shutdowns = 0
        self.open: dict[str, dict[int, list[int]]] = {}  # request -> branch -> tokens so far
        self.fail_at: dict[int, BaseException] = {}  # step number -> raised by that step
        self.dead: str | None = None
        self._requests: dict[str, EngineRequest] = {}
        self._late: list[tuple[int, Abort]] = []

    def submit(self, request: EngineRequest) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)
        self.submitted.append(request)
        self._requests[request.request_id] = request
        self.open[request.request_id] = {i: [] for i in range(request.params.num_branches)}
        self.most_open = max(self.most_open, len(self.open))

    def abort(self, abort: Abort) -> None:
        self.aborts.append(abort)
        self._late.append((self.num_steps + self.abort_lag, abort))

    def _apply_aborts(self) -> None:
        due = [a for at, a in self._late if at <= self.num_steps]
        self._late = [(at, a) for at, a in self._late if at > self.num_steps]
        for abort in due:
            branches = self.open.get(abort.request_id, {})
            for index in list(branches) if abort.index is None else [abort.index]:
                branches.pop(index, None)
            if not branches:
                self.open.pop(abort.request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.open or self._late)

    def step(self) -> EngineOutputs | None:
        if self.dead is not None:
            raise EngineDead(self.dead)
        self.num_steps += 1
        self._apply_aborts()
        if self.num_steps in self.fail_at:
            raise self.fail_at.pop(self.num_steps)
        outputs = [out for request_id in list(self.open) for out in self._advance(request_id)]
        if not outputs:
            return None
        message = EngineOutputs(tuple(outputs), SchedulerStats(num_running=len(self.open), num_blocks=64))
        self.on_outputs(message)
        return message

    def _advance(self, request_id: str) -> list[EngineOutput]:
        request, branches = self._requests[request_id], self.open[request_id]
        if request.pooling is not None:
            del self.open[request_id]
            return [EngineOutput(request_id, finish_reason="stop", pooled=toy_vector(request.prompt_token_ids), num_cached_tokens=1)]
        outputs = []
        for index, known in list(branches.items()):
            script = list(self.script(request, index)) or [0]
            first, new, stop_reason = not known, [], None
            reason = None if request.params.max_tokens else "length"
            while len(new) < self.tokens_per_step and reason is None:
                token = script[len(known) % len(script)]
                known.append(token)
                new.append(token)
                if token in request.eos_token_ids:
                    reason = "stop"
                elif token in request.params.stop_token_ids:
                    reason, stop_reason = "stop", token
                elif len(known) >= request.params.max_tokens:
                    reason = "length"
            wanted = request.params.logprobs is not None
            outputs.append(
                EngineOutput(
                    request_id,
                    index,
                    tuple(new),
                    logprobs=tuple(map(position, new)) if wanted else None,
                    finish_reason=reason,
                    stop_reason=stop_reason,
                    cumulative_logprob=-0.5 * len(known) * (index + 1) if wanted or request.params.num_branches > request.params.n else None,
                    num_cached_tokens=4 if first else 0,
                    first_scheduled_s=request.arrival_s + 0.25 if first else None,
                )
            )
            if reason:
                del branches[index]
        if not branches:
            del self.open[request_id]
        return outputs

    def die(self, reason: str) -> None:
        self.dead = reason
        self.on_dead(reason)

    def is_alive(self) -> bool:
        return self.dead is None

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def shutdown(self, grace_s: float = 0.0) -> None:
        self.num_shutdowns += 1
        self.dead = self.dead or "shut down"


def says(text: str) -> Script:
    """Every branch says this, as bytes, then EOS."""
    return lambda request, index: [*text.encode(), EOS]
