"""Level 5: `oarlock serve` on the device, with a tiny random model, over HTTP.

Owns: the cases: starting, mixed load, pressure on blocks, cancels, refusals, restart, leaks, hooks.
Reads: `serving`, `tiny_models`.
Never: imports what only the server needs; trusts the server's own word where the oracle knows the answer.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from oarlock.backend_api import Support
from oarlock.conformance.cases import Case, CheckFailed
from oarlock.conformance.serving import Answer, Server
from oarlock.conformance.subject import Subject
from oarlock.conformance.tiny_models import MODELS, VOCAB, TinyModel
from oarlock.plugins import hook_calls, installed

LEVEL = 5
NEEDS = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "pydantic": "pydantic",
    "msgspec": "msgspec",
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
}
REQUESTS, THREADS, ALONE = 200, 16, 16
CONTEXT, SEQS = 256, 8
FREE_S = 2.0  # a client that hung up frees its blocks within this, and ten times what the machine takes for the smallest request
Body = dict[str, Any]


class Harbour:
    """The model on disk and the server, made when first needed."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="oarlock-conformance-"))
        self._model: TinyModel | None = None
        self._server: Server | None = None
        self.why_not = ""  # the server did not start
        self.first: dict[str, list[int]] = {}  # what the first start answered
        self.kept: dict[str, int] = {}  # what the graph runner had kept before the restart
        self.dtype = ""

    @property
    def model(self) -> TinyModel:
        if self._model is None:
            self._model = TinyModel("dense", self.folder / "model", {**MODELS["dense"], "max_position_embeddings": CONTEXT})
            _write_tokenizer(self.folder / "model")
        return self._model

    def server(self, subject: Subject) -> Server:
        """The running server. Raises CheckFailed when it cannot be had."""
        if self._server is None:
            self.dtype = dtype_of(subject)
            self._server = Server(self.model.folder, _flags(subject, self.dtype), self.folder / "serve.log")
            self.launch()
        if self.why_not:
            raise CheckFailed(f"there is no server: {self.why_not}")
        return self._server

    def launch(self) -> None:
        assert self._server is not None
        try:
            self._server.start()
        except CheckFailed as error:
            self.why_not = str(error)
            raise

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---------------------------------------------------------------- answers
    def check(self, body: Body, answer: Answer) -> None:
        """Every choice has one end; lengths and log-probabilities fit; greedy tokens are the oracle's best.

        Raises:
            CheckFailed: the answer is not what the request asked for.
        """
        if answer.status != 200:
            raise CheckFailed(f"{answer.status} {answer.body} for {body}")
        if sorted(answer.choices) != list(range(body.get("n", 1))):
            raise CheckFailed(f"choices {sorted(answer.choices)} for {body}")
        for choice in answer.choices.values():
            if len(choice.ends) != 1 or choice.ends[0] not in ("length", "stop"):
                raise CheckFailed(f"finish reasons {choice.ends} for {body}")
            count = len(choice.token_ids)
            if count > body["max_tokens"] or (choice.ends == ["length"] and count != body["max_tokens"]):
                raise CheckFailed(f"{count} tokens and finish reason {choice.ends[0]} for {body}")
            if "logprobs" in body and (
                len(choice.logprobs) != count or any(v is None or not math.isfinite(v) or v > 0 for v in choice.logprobs)
            ):
                raise CheckFailed(f"log-probabilities {choice.logprobs} of {count} tokens for {body}")
            if any(text in choice.text for text in body.get("stop", ())):
                raise CheckFailed(f"the text {choice.text!r} holds a stop string, for {body}")
            if _is_greedy(body) and self.dtype == "float32":
                self.model.check_greedy(body["prompt"], choice.token_ids)


def dtype_of(subject: Subject) -> str:
    """Tokens can be judged in float32; a device without it serves its preferred dtype, and only ends and lengths are judged."""
    return "float32" if "float32" in subject.dtypes else subject.dtypes[0]


def _write_tokenizer(folder: Path) -> None:
    """A word for each token: "w17"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))


def _sizes(subject: Subject) -> tuple[int, int]:
    """(block size, blocks): three of the longest requests fit, of eight that may run."""
    size = min(subject.device.capabilities.block_sizes)
    return size, 1 + 3 * -(-CONTEXT // size)


def _flags(subject: Subject, dtype: str) -> list[str]:
    size, blocks = _sizes(subject)
    flags = {
        "device": subject.spec.name,
        "dtype": dtype,
        "block-size": size,
        "num-blocks-override": blocks,
        "max-num-seqs": SEQS,
        "max-num-batched-tokens": 128,
    }
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


# ---------------------------------------------------------------- the load


def _is_greedy(body: Body) -> bool:
    return body.get("temperature") == 0 and not {"n", "frequency_penalty", "stop"} & set(body)


def _bodies(count: int, seed: int = 5) -> list[Body]:
    """Requests of every kind, the same in every run."""
    draw = random.Random(seed)
    kinds: tuple[Callable[[], Body], ...] = (
        lambda: {"temperature": 0},
        lambda: {"temperature": 0},
        lambda: {"temperature": 0, "logprobs": draw.randint(0, 5)},
        lambda: {"temperature": 0.9, "seed": draw.randint(0, 99), "top_p": 0.9},
        lambda: {"temperature": 0.8, "n": 2, "top_k": 20},
        lambda: {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.1},
        lambda: {"temperature": 1.0, "min_p": 0.02, "stop": [f"w{draw.randrange(VOCAB)}", f"w{draw.randrange(VOCAB)}"]},
    )
    found = []
    for number in range(count):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice((1, draw.randint(2, 20), draw.randint(20, 60))))]
        lengths = draw.choice(((1, 4), (4, 12), (12, 24))) if number % 20 else (50, 60)
        found.append(
            {"prompt": prompt, "max_tokens": draw.randint(*lengths), "stream": bool(draw.getrandbits(1)), **kinds[number % len(kinds)]()}
        )
    return found


def _all(server: Server, bodies: list[Body]) -> list[Answer]:
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(lambda body: server.complete(**body), bodies))


# ---------------------------------------------------------------- cases


def starts(harbour: Harbour, subject: Subject) -> None:
    """It becomes ready, and answers as the oracle does, in one piece and as a stream."""
    server = harbour.server(subject)
    for stream in (False, True):
        for prompt in ([1, 2, 3], [7], [40, 41, 42, 43] * 9):
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": stream}
            answer = server.complete(**body)
            harbour.check(body, answer)
            harbour.first[str(prompt)] = answer.choices[0].token_ids


def mixed(harbour: Harbour, subject: Subject) -> None:
    """200 requests of every kind from 16 threads: each gets its one end, and greedy ones the tokens that they get alone."""
    server, bodies = harbour.server(subject), _bodies(REQUESTS)
    before = server.metrics()["oarlock_requests_total"]
    answers = _all(server, bodies)
    for body, answer in zip(bodies, answers, strict=True):
        harbour.check(body, answer)
    ended = server.metrics()["oarlock_requests_total"] - before
    if ended != REQUESTS:
        raise CheckFailed(f"{REQUESTS} requests were answered, /metrics counts {ended:.0f}")
    greedy = [(body, answer) for body, answer in zip(bodies, answers, strict=True) if _is_greedy(body)][:ALONE]
    for body, answer in greedy:
        alone = server.complete(**body)
        harbour.check(body, alone)  # where the two differ, a near-tie must excuse both
        if harbour.dtype != "float32" and not alone.choices[0].token_ids:
            raise CheckFailed(f"no token for {body}")
        if len(alone.choices[0].token_ids) != len(answer.choices[0].token_ids):
            raise CheckFailed(
                f"alone {len(alone.choices[0].token_ids)} tokens, in the batch {len(answer.choices[0].token_ids)}, for {body}"
            )


def out_of_blocks(harbour: Harbour, subject: Subject) -> None:
    """Eight requests grow to more blocks than there are: some are preempted, and all answers are right."""
    server = harbour.server(subject)
    before = server.metrics()["vllm:num_preemptions_total"]
    draw = random.Random(9)
    bodies: list[Body] = [
        {"prompt": [draw.randrange(VOCAB) for _ in range(60)], "max_tokens": 170, "temperature": 0, "stream": bool(n % 2)}
        for n in range(SEQS)
    ]
    for body, answer in zip(bodies, _all(server, bodies), strict=True):
        harbour.check(body, answer)
    after = server.metrics()["vllm:num_preemptions_total"]
    if after <= before:
        raise CheckFailed(
            f"{SEQS} requests of 230 tokens fit into {_sizes(subject)[1] - 1} blocks of {_sizes(subject)[0]} with no preemption"
        )


def cancels(harbour: Harbour, subject: Subject) -> None:
    """Clients hang up: their blocks are free within two seconds, and the server counts what was aborted."""
    server = harbour.server(subject)
    before = server.metrics()["oarlock_requests_total:abort"]
    answer = Answer(0)
    streams = [server.events({"prompt": [n + 1, 2, 3], "max_tokens": 240, "temperature": 0, "ignore_eos": True}, answer) for n in range(6)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    server.wait_idle(_soon(server))
    if server.metrics()["oarlock_requests_total:abort"] <= before:
        raise CheckFailed("six clients hung up after the first token of 240, and /metrics counts no request as aborted")
    starts(harbour, subject)


def _soon(server: Server) -> float:
    started = time.monotonic()
    server.request("GET", "/health")
    return FREE_S + 10 * (time.monotonic() - started)


def over_long(harbour: Harbour, subject: Subject) -> None:
    """What exceeds the context is refused with its reason, in every form, and serving goes on."""
    server = harbour.server(subject)
    prompts: tuple[Any, ...] = ([1] * (CONTEXT + 1), " ".join(["w5"] * (CONTEXT + 44)), [[1] * 4000], [1, 2])
    for prompt in prompts:
        for stream in (False, True):
            answer = server.complete(prompt=prompt, max_tokens=CONTEXT, stream=stream)
            error = (answer.body or {}).get("error", {})
            if answer.status != 400 or error.get("code") != "context_length_exceeded":
                raise CheckFailed(
                    f"a request beyond the context of {CONTEXT} got {answer.status} {answer.body}; 400 context_length_exceeded is due"
                )
    starts(harbour, subject)


def restart(harbour: Harbour, subject: Subject) -> None:
    """It ends when told to, with status 0, and after another start answers with the same tokens."""
    server = harbour.server(subject)
    starts(harbour, subject)
    known, harbour.kept = dict(harbour.first), _programs(subject)
    code = server.end()
    if code:
        raise CheckFailed(f"oarlock serve ended with {code} on SIGTERM: {server.last_words()}")
    harbour.launch()
    starts(harbour, subject)
    if harbour.first != known:
        raise CheckFailed(f"after a restart the tokens are {harbour.first}, before they were {known}")


def warm_cache(harbour: Harbour, subject: Subject) -> None:
    """The restart found every program that the first start had compiled: none was written anew."""
    harbour.server(subject)
    if not harbour.kept:
        raise CheckFailed(f"after a start, {subject.graph.kept_in()} holds no program, or there was no restart")
    anew = [name for name, written in _programs(subject).items() if harbour.kept.get(name) != written]
    if anew:
        raise CheckFailed(
            f"{len(anew)} files of {len(harbour.kept)} in {subject.graph.kept_in()} were written anew by the second start: {', '.join(anew[:3])}"
        )


def _programs(subject: Subject) -> dict[str, int]:
    """Files that the graph runner keeps -> when they were written, in ns."""
    folder = subject.graph.kept_in()
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in Path(folder).rglob("*") if p.is_file()} if folder else {}


def no_leak(harbour: Harbour, subject: Subject) -> None:
    """After all that: no block held, nothing running, nothing compiled while serving."""
    server = harbour.server(subject)
    harbour_bodies = _bodies(24, seed=6)
    for body, answer in zip(harbour_bodies, _all(server, harbour_bodies), strict=True):
        harbour.check(body, answer)
    server.wait_idle(_soon(server))
    compiled = server.metrics()["oarlock_compiles_after_warmup"]
    if compiled:
        raise CheckFailed(f"{compiled:.0f} programs were compiled while serving")


def cold_hooks(harbour: Harbour, subject: Subject) -> None:
    """No hook of a plugin is called while an engine serves; counted in this process."""
    from oarlock.llm import LLM
    from oarlock.sampling_params import SamplingParams

    size, blocks = _sizes(subject)
    made = LLM(
        str(harbour.model.folder), device=subject.spec.name, dtype=dtype_of(subject), block_size=size, num_blocks_override=blocks,
        max_num_seqs=SEQS, max_num_batched_tokens=128,
    )  # fmt: skip
    try:
        prompts = [{"prompt_token_ids": [n, n + 1, n + 2]} for n in range(6)]
        before = hook_calls()
        for params in (
            SamplingParams(temperature=0, max_tokens=8),
            SamplingParams(temperature=0.8, seed=1, max_tokens=8, n=2, logprobs=2, frequency_penalty=0.3),
        ):
            made.generate(prompts, params, use_tqdm=False)
        called = hook_calls() - before
    finally:
        del made
        gc.collect()
    if called:
        raise CheckFailed(f"{called} hooks were called while serving; hooks are for the start, objects run")


def _installed(subject: Subject) -> Support:
    """A server finds its device by name: the package must be installed."""
    if not any(spec.name == subject.spec.name for plugin in installed().plugins for spec in plugin.devices):
        return Support(False, (f"no installed package provides the device {subject.spec.name}, so no server can find it",))
    return Support(True)


def _servable(subject: Subject) -> Support:
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return Support(False, (f"the server needs {', '.join(missing)}: pip install {' '.join(missing)}",))
    return _installed(subject)


def _has_pressure(subject: Subject) -> Support:
    size = _sizes(subject)[0]
    if 2 * size > CONTEXT // 2:
        return Support(
            False, (f"the smallest block size declared is {size}: a context of {CONTEXT} tokens is too few blocks to run out of",)
        )
    return _servable(subject)


def _keeps_programs(subject: Subject) -> Support:
    if not subject.graph.kept_in():
        return Support(False, ("the device's graph runner keeps no programs for a later start",))
    return _servable(subject)


def cases() -> Iterator[Case]:
    """One server for all but the last, which needs none."""
    table: tuple[tuple[Callable[[Harbour, Subject], None], Callable[[Subject], Support]], ...] = (
        (starts, _servable), (mixed, _servable), (out_of_blocks, _has_pressure), (cancels, _servable), (over_long, _servable),
        (restart, _servable), (warm_cache, _keeps_programs), (no_leak, _servable), (cold_hooks, _installed),
    )  # fmt: skip
    for check, supports in table:
        yield Case(f"serve[{check.__name__}]", LEVEL, partial(_run, check), supports=supports)


def _run(check: Callable[[Harbour, Subject], None], subject: Subject) -> None:
    check(subject.part(Harbour), subject)
