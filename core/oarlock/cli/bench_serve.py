"""`oarlock bench serve`: load on any server with the OpenAI API.

Owns: its flags, and the order of warm-up, load and report.
Reads: `cli.bench_client`, `cli.bench_prompts`, `cli.bench_report`, `cli.answers`.
Never: imports torch or a tokenizer; keeps a failed request out of sight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

import oarlock
from oarlock.cli.answers import DEFAULT_URL, KEY_VARIABLES, AnswerError, ServerSource, base_url, connection_settings, key_headers
from oarlock.cli.bench_client import CONNECT_S, Load, Sample, run_load, send
from oarlock.cli.bench_prompts import FIRST_ID, LAST_ID, Lengths, Prompt, random_ids, random_text, read_prompts
from oarlock.cli.bench_report import summarize, table, write_json
from oarlock.config.parser import Parser
from oarlock.errors import ConfigError

NUM_PROMPTS = 100
WARMUP_TOKENS = 8


def make_parser() -> Parser:
    """The command line of `bench serve`."""
    parser = Parser(prog="oarlock bench serve", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--url", "--base-url", default=DEFAULT_URL, metavar="URL", help=f"the server [{DEFAULT_URL}]")
    add("--model", metavar="NAME", help="model to ask for; unset: the first that the server lists")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--api-key", metavar="KEY", help=f"better in {KEY_VARIABLES[0]}, where other users cannot see it")
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add("--num-prompts", type=int, metavar="N", help=f"requests to send [{NUM_PROMPTS}, at most the file's]")
    add("--dataset", metavar="WHAT", help="random: token ids; text: random words; else a .jsonl or ShareGPT .json file [random; text for chat]")
    add("--input-len", default="128", metavar="N|LOW:HIGH", help="tokens (or words) of a random prompt, beyond the shared ones [128]")
    add("--output-len", default="128", metavar="N|LOW:HIGH", help="tokens to ask for, where a file does not say [128]")
    add("--shared-prefix", type=int, default=0, metavar="N", help="tokens (or words) that all random prompts begin with [0]")
    add("--id-range", type=int, nargs=2, default=[FIRST_ID, LAST_ID], metavar=("FIRST", "LAST"), help=f"random token ids [{FIRST_ID} {LAST_ID}]")
    add("--seed", type=int, default=0, help="of prompts and arrivals [0]")
    group = parser.add_argument_group("load")
    add = group.add_argument
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests a second on average, Poisson; inf: all at once [inf]")
    add("--max-concurrency", type=int, metavar="N", help="most requests that are open at a time; unset: no bound")
    add("--warmup", type=int, default=1, metavar="N", help="requests before the clock runs [1]")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds without a byte after which a request has failed [600]")
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add("--ignore-eos", action="store_true", help="ask for answers of full length (an extension that not every server has)")
    add("--temperature", type=float, default=0.0, metavar="X", help="[0]")
    add("--extra-body", default="{}", metavar="JSON", help="further fields of every request")
    parser.add_argument("--json", metavar="FILE", help="write settings and figures there, too")
    parser.add_argument("--label", default="", help="a name for the record in --json")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when every request was answered, else 1.

    Raises:
        ConfigError: wrong flags. AnswerError: the server does not answer, or refuses the first request.
    """
    arguments = make_parser().parse_args(argv)
    prompts, load = make_prompts(arguments), make_load(arguments)
    remedy = "start one with `oarlock serve MODEL`, or name another with --url; `oarlock bench throughput` loads a model itself"
    with ServerSource(arguments.url, arguments.model, arguments.api_key, remedy) as server:  # says what is wrong when nothing answers
        load = replace(load, model=server.name)
    figures = asyncio.run(measure(load, prompts, arguments))
    print(f"{load.model} at {load.url}, {_load_text(load)}")
    print(table(figures))
    if arguments.json:
        hidden = ("api_key", "json", "request_rate")
        settings = {name: value for name, value in vars(arguments).items() if name not in hidden}
        rate = None if math.isinf(load.request_rate) else load.request_rate
        record = {"oarlock": oarlock.__version__, **settings, "model": load.model, "num_prompts": len(prompts), "request_rate": rate}
        write_json(arguments.json, record | figures)
    return 1 if figures["failed"] else 0


def _load_text(load: Load) -> str:
    rate = "all at once" if math.isinf(load.request_rate) else f"{load.request_rate:g} requests/s"
    return rate if load.max_concurrency is None else f"{rate}, at most {load.max_concurrency} open"


# ---------------------------------------------------------------- from flags
def make_load(arguments: argparse.Namespace) -> Load:
    """How to send, checked. The model is still as typed."""
    for name in ("max_concurrency", "num_prompts"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1", name)
    for name in ("warmup", "shared_prefix"):
        if getattr(arguments, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 0", name)
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout {arguments.timeout}: must be above 0", "timeout")
    if not arguments.request_rate > 0:  # NaN, too
        raise ConfigError(f"--request-rate {arguments.request_rate}: must be above 0; inf sends all at once", "request-rate")
    extra = _json_object(arguments.extra_body)
    extra = {"temperature": arguments.temperature} | ({"ignore_eos": True} if arguments.ignore_eos else {}) | extra
    url = base_url(arguments.url)
    return Load(url, arguments.endpoint, arguments.model or "", extra, arguments.request_rate, arguments.max_concurrency, arguments.seed)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-body {text}: not JSON: {error}", "extra-body") from None
    if not isinstance(value, dict):
        raise ConfigError(f'--extra-body {text}: must be an object such as {{"top_p": 0.9}}', "extra-body")
    return value


def make_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """As many prompts as were asked for, of a form that the endpoint takes."""
    inputs, outputs = Lengths.parse(arguments.input_len, "--input-len"), Lengths.parse(arguments.output_len, "--output-len")
    is_chat = arguments.endpoint == "chat"
    dataset = arguments.dataset or ("text" if is_chat else "random")
    count = NUM_PROMPTS if arguments.num_prompts is None else arguments.num_prompts
    if dataset == "random":
        if is_chat:
            raise ConfigError("--dataset random: token ids cannot be sent to the chat endpoint; use --dataset text", "dataset")
        first, last = arguments.id_range
        if not 0 <= first <= last:
            raise ConfigError(f"--id-range {first} {last}: must be at least 0, and the smaller number comes first", "id-range")
        return random_ids(count, inputs, outputs, shared=arguments.shared_prefix, seed=arguments.seed, ids=(first, last))
    if dataset == "text":
        return random_text(count, inputs, outputs, shared=arguments.shared_prefix, seed=arguments.seed)
    if arguments.shared_prefix:
        raise ConfigError("--shared-prefix is for random prompts; a file's prompts are sent as they are", "shared-prefix")
    prompts = read_prompts(Path(dataset), outputs, seed=arguments.seed)
    if arguments.num_prompts is not None and arguments.num_prompts > len(prompts):
        raise ConfigError(f"--num-prompts {arguments.num_prompts}: {dataset} has {len(prompts)}", "num-prompts")
    wrong = next((at for at, p in enumerate(prompts, 1) if (p.token_ids if is_chat else p.messages)), None)
    if wrong is not None:
        what = "token ids, which the chat endpoint does not take" if is_chat else "messages, which need --endpoint chat"
        raise ConfigError(f"--dataset {dataset}, entry {wrong}: has {what}", "dataset")
    return prompts[:count]


# ---------------------------------------------------------------- the run
async def measure(load: Load, prompts: Sequence[Prompt], arguments: argparse.Namespace) -> dict[str, Any]:
    """Warm up, run the load, sum it up.

    Raises:
        AnswerError: a warm-up request failed.
    """
    timeout = httpx.Timeout(arguments.timeout, connect=CONNECT_S, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Accept-Encoding": "identity", **key_headers(arguments.api_key)}
    async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, **connection_settings(load.url, httpx.AsyncHTTPTransport)) as http:
        for prompt in prompts[:1] * arguments.warmup:
            sample = await send(http, load, _warmup_prompt(prompt), 0.0)
            if sample.error is not None:
                raise AnswerError(f"the first request failed: {sample.error}")
        bar = _Bar(len(prompts))
        try:
            samples, seconds = await run_load(http, load, prompts, bar.advance)
        finally:
            bar.close()
    return summarize(samples, seconds)


def _warmup_prompt(prompt: Prompt) -> Prompt:
    """The first prompt backwards, so that its own prefix is not in the server's cache when it counts, and a short answer."""
    words = " ".join(reversed(prompt.text.split()))
    return replace(prompt, token_ids=prompt.token_ids[::-1], text=words, output_len=min(prompt.output_len, WARMUP_TOKENS))


class _Bar:
    """Requests done, on a terminal's stderr only."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            import tqdm

            self._bar = tqdm.tqdm(total=total, desc="requests", dynamic_ncols=True)

    def advance(self, sample: Sample) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
