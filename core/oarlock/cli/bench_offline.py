"""`oarlock bench throughput` and `oarlock bench latency`: a model in this process, without HTTP.

Owns: their flags and their loops.
Reads: `llm`, `config`, `cli.bench_prompts`, `cli.bench_report`.
Never: measures loading or the first, colder batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import oarlock
from oarlock.cli.bench_prompts import Lengths, Prompt, random_ids
from oarlock.cli.bench_report import rate_lines, spread, spread_lines, write_json
from oarlock.config.parser import Parser, make_parser, parse
from oarlock.errors import ConfigError

DEFAULTS: dict[str, Any] = {"input_len": "128", "output_len": "128", "num_prompts": 64, "shared_prefix": 0, "batches": "1,8,32", "iterations": 3, "json": None}
LATENCY_DEFAULTS: dict[str, Any] = {**DEFAULTS, "output_len": "64"}
SPREADS = {"ttft_ms": "first token", "tpot_ms": "further token", "e2e_ms": "whole batch"}


def throughput(argv: Sequence[str]) -> int:
    """All prompts at once; requests and tokens a second."""
    parser = _parser("oarlock bench throughput", DEFAULTS, "num-prompts", "shared-prefix")
    ours, values = _split(parser, argv, DEFAULTS)
    count, shared = _count(ours, "num_prompts", 1), _count(ours, "shared_prefix", 0)
    inputs, outputs = Lengths.parse(ours["input_len"], "--input-len"), Lengths.parse(ours["output_len"], "--output-len")
    with _load(values) as llm:
        _check_context(llm, ours, shared + inputs.high + outputs.high)
        ids = (0, llm.summary.vocab_size - 1)
        _generate(llm, random_ids(1, Lengths(8, 8), Lengths(4, 4), seed=1, ids=ids))
        prompts = random_ids(count, inputs, outputs, shared=shared, ids=ids)
        started = time.perf_counter()
        results = _generate(llm, prompts, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - started
        figures = _rates(results, seconds)
        print(_head(llm))
    print("\n".join(rate_lines(figures)))
    if ours["json"]:
        write_json(ours["json"], {"oarlock": oarlock.__version__, "benchmark": "throughput", **_settings(ours, values), **figures})
    return 1 if figures["failed"] else 0


def latency(argv: Sequence[str]) -> int:
    """Batches of several sizes, each some times over; milliseconds of a batch and of its tokens."""
    parser = _parser("oarlock bench latency", LATENCY_DEFAULTS, "batches", "iterations")
    ours, values = _split(parser, argv, LATENCY_DEFAULTS)
    sizes, iterations = _sizes(ours["batches"]), _count(ours, "iterations", 1)
    inputs, outputs = Lengths.parse(ours["input_len"], "--input-len"), Lengths.parse(ours["output_len"], "--output-len")
    records = []
    with _load(values) as llm:
        _check_context(llm, ours, inputs.high + outputs.high)
        print(_head(llm))
        for size in sizes:
            runs = []
            for iteration in range(iterations + 1):  # the first one warms up; every one has prompts of its own
                prompts = random_ids(size, inputs, outputs, seed=iteration * 1000 + size, ids=(0, llm.summary.vocab_size - 1))
                started = time.perf_counter()
                results = _generate(llm, prompts)
                runs.append((results, time.perf_counter() - started))
            record = _latencies(size, runs[1:])
            records.append(record)
            print("\n".join([f"batch {size}: {record['output_tokens_per_s']:.1f} output tokens/s", *spread_lines(record, SPREADS)]))
    if ours["json"]:
        write_json(ours["json"], {"oarlock": oarlock.__version__, "benchmark": "latency", **_settings(ours, values), "batches": records})
    return 1 if any(record["failed"] for record in records) else 0


# ---------------------------------------------------------------- flags
def _parser(prog: str, defaults: dict[str, Any], *more: str) -> Parser:
    """The benchmark's flags, then every option of the model."""
    texts = {
        "input-len": "tokens of a prompt: 128, or a range such as 64:512",
        "output-len": "tokens of an answer; the end of text is ignored",
        "num-prompts": "prompts",
        "shared-prefix": "tokens that all prompts begin with, on top of the input length",
        "batches": "batch sizes",
        "iterations": "batches of each size that count; one more warms up",
        "json": "write the figures to this file, too",
    }
    parser = make_parser(prog, offline=True)
    parser.usage = f"{prog} MODEL [options]"
    parser._option_string_actions["--model"].help = "The same as MODEL."
    group = parser.add_argument_group("the benchmark")
    for name in ("input-len", "output-len", *more, "json"):
        default = defaults[name.replace("-", "_")]
        kind = type(default) if default is not None else str
        group.add_argument(f"--{name}", type=kind, metavar=name.rpartition("-")[2].upper(), help=texts[name] + (f" [{default}]" if default is not None else ""))
    groups = parser._action_groups
    groups.insert(2, groups.pop())  # help shows these before the model's options
    return parser


def _split(parser: Parser, argv: Sequence[str], defaults: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the benchmark's settings, the model's options)."""
    values = parse(parser, argv)
    if "model" not in values:
        raise ConfigError(f"no model: {parser.prog} MODEL", "model")
    return {name: values.pop(name, default) for name, default in defaults.items()}, values


def _count(ours: dict[str, Any], name: str, least: int) -> int:
    if ours[name] < least:
        raise ConfigError(f"--{name.replace('_', '-')} {ours[name]}: must be at least {least}", name)
    return int(ours[name])


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError(f"--batches {text}: give sizes such as 1,8,32", "batches")
    return sizes


def _settings(ours: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in ours.items() if name not in ("json", "batches")}, "options": values}


# ---------------------------------------------------------------- runs
def _load(values: dict[str, Any]) -> Any:
    from oarlock.config.resolve import resolve
    from oarlock.llm import LLM

    config = resolve(values, origin="cli").engine  # words of the command line in its errors
    if config.model.skip_tokenizer_init is False:
        values = {**values, "skip_tokenizer_init": True}  # prompts are ids; no text is measured
    return LLM(**values)


def _check_context(llm: Any, ours: dict[str, Any], most: int) -> None:
    """Raises ConfigError, in the words of the benchmark's own flags, where `most` tokens, the longest prompt and answer, exceed the context."""
    if most > (limit := llm._engine.info.max_model_len):
        flags = ("input_len", "output_len", *(["shared_prefix"] if ours["shared_prefix"] else []))
        asked = " ".join(f"--{name.replace('_', '-')} {ours[name]}" for name in flags)
        raise ConfigError(f"{asked}: up to {most} tokens, but the context is {limit}; ask for shorter ones, or raise --max-model-len", "input-len")


def _head(llm: Any) -> str:
    info = llm._engine.info
    return f"{llm.config.model.model} on {info.device} ({info.device_text}, {info.dtype})"


def _generate(llm: Any, prompts: Sequence[Prompt], *, use_tqdm: bool = False) -> list[Any]:
    from oarlock.sampling_params import SamplingParams

    params = [SamplingParams(temperature=0.0, max_tokens=p.output_len, ignore_eos=True) for p in prompts]
    return list(llm.generate([list(p.token_ids) for p in prompts], params, use_tqdm=use_tqdm))


def _rates(results: Sequence[Any], seconds: float) -> dict[str, Any]:
    good = [r for r in results if r.error is None]
    tokens_in, tokens_out = sum(len(r.prompt_token_ids) for r in good), sum(r.num_generated_tokens for r in good)
    return {
        "completed": len(good),
        "failed": len(results) - len(good),
        "duration_s": seconds,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "requests_per_s": len(good) / seconds,
        "input_tokens_per_s": tokens_in / seconds,
        "output_tokens_per_s": tokens_out / seconds,
        "total_tokens_per_s": (tokens_in + tokens_out) / seconds,
    }


def _latencies(size: int, runs: Sequence[tuple[list[Any], float]]) -> dict[str, Any]:
    """`ttft_ms`: arrival to a request's first token; `tpot_ms`: between its further tokens; `e2e_ms`: the whole batch."""
    firsts, further = [], []
    for result in (r for results, _ in runs for r in results if r.error is None):
        times, count = result.metrics, result.num_generated_tokens
        firsts.append(times.first_token_s - times.arrival_s)
        if count > 1:
            further.append((times.last_token_s - times.first_token_s) / (count - 1))
    seconds = sum(s for _, s in runs)
    rates = _rates([r for results, _ in runs for r in results], seconds)
    return {"batch": size, **rates, "ttft_ms": spread(firsts), "tpot_ms": spread(further), "e2e_ms": spread([s for _, s in runs])}
