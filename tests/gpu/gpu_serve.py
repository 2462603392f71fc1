"""Llama-3-8B with made-up weights through `LLM`: steps beside what limits them, the start, the memory plan. With an HTTP stack, the server too.

Owns: the model's sizes and what is run.
Reads: `oarlock.LLM`, the command `oarlock`.
Never: judges (`gpu_figures` does).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_figures import bandwidth_share, judged, llama_weights, outside, per_step, plain, prefill_flops
from gpu_kernels import FULL, TINY
from gpu_results import Results
from gpu_timing import seconds_of
from oarlock import LLM, SamplingParams

STARTED = "OARLOCK_GPU_STARTED"  # when the process was started, as time.time() says
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 128001, "bos_token_id": 128000,
}  # fmt: skip
TINY_CONFIG = {
    **CONFIG, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    "vocab_size": 512, "max_position_embeddings": 256, "torch_dtype": "float32", "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
TINY_OPTIONS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
PROMPT, SHORT, LONG = 128, 17, 81  # tokens of a prompt; of the answers of two runs whose difference is decodes alone


class Model:
    """The model in this process, and its sizes."""

    def __init__(self, results: Results, folder: Path, device: str, is_tiny: bool) -> None:
        self.results, self.is_tiny, self.device_name = results, is_tiny, device
        self.config: dict[str, Any] = TINY_CONFIG if is_tiny else CONFIG
        self.options = TINY_OPTIONS if is_tiny else OPTIONS
        self.prompt_len, self.short, self.long = (16, 3, 9) if is_tiny else (PROMPT, SHORT, LONG)
        self.folder = folder / ("tiny-llama" if is_tiny else "llama-3-8b")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        self.taken_before = self._taken()
        self.llm = LLM(
            str(self.folder), device=device, dtype=self.config["torch_dtype"], load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, **self.options
        )
        c = self.config
        shape = (c["hidden_size"], c["num_hidden_layers"], c["intermediate_size"], c["vocab_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"])
        self.read, self.multiplied = llama_weights(*shape)
        self.item = getattr(torch, c["torch_dtype"]).itemsize

    def generate(self, prompts: int, prompt_len: int, tokens: int) -> float:
        """Seconds."""
        vocab = self.config["vocab_size"] - 2
        ids = [[2 + (n * 7919 + i * 104729) % vocab for i in range(prompt_len)] for n in range(prompts)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        found = self.llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert all(len(one.outputs[0].token_ids) == tokens for one in found)
        return seconds

    def taken(self) -> int:
        """Bytes that this run took of the device."""
        return self._taken() - self.taken_before

    def _taken(self) -> int:
        if self.device_name != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def limit(self, name: str) -> float:
        return float(self.results.data["figures"][name]["value"])


def run(results: Results, device: str, is_tiny: bool, has_server: bool) -> bool:
    """Whether every figure is there."""
    sizes = TINY if is_tiny else FULL
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    model = Model(results, results.path.parent, device, is_tiny)
    batches = (2, 4) if is_tiny else (64, 256)
    figures = [
        ("start to first token", partial(first_token, model)),
        ("copy bandwidth", partial(released, copy_rate, sizes, where)),
        ("matrix rate", partial(released, matrix_rate, sizes, where)),
        ("decode, batch 1", partial(decode, model, 1)),
        *((f"decode, batch {rows}", partial(decode, model, rows)) for rows in batches),
        ("prefill, 2048 tokens", partial(prefill, model)),
        *((f"outside kernels, batch {rows}", partial(idle, model, rows)) for rows in (1, *batches)),
        ("memory plan", partial(memory, model)),
    ]
    try:
        done = [results.measure(name, make) for name, make in figures]
    finally:
        model.llm.close()
    if has_server:
        del model.llm
        done.append(results.measure("server, start and 8 requests", partial(server, model)))
    return all(done)


def released(make: Callable[..., dict[str, Any]], sizes: dict[str, Any], where: torch.device) -> dict[str, Any]:
    """Its figure; the allocator keeps nothing of it, for what the model takes is measured, too."""
    figure = make(sizes, where)
    if where.type == "cuda":
        torch.cuda.empty_cache()
    return figure


def copy_rate(sizes: dict[str, Any], where: torch.device) -> dict[str, Any]:
    size = min(sizes["copy_bytes"], 256 << 20)  # the model has the memory
    source, target = (torch.zeros(size // 4, device=where) for _ in range(2))
    return plain(2 * size / seconds_of([lambda: target.copy_(source)], where) / 1e9, "GB/s", bytes=size)


def matrix_rate(sizes: dict[str, Any], where: torch.device) -> dict[str, Any]:
    size, dtype = sizes["matrix"], getattr(torch, sizes["dtype"])
    a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    return plain(2 * size**3 / seconds_of([lambda: a @ b], where) / 1e12, "TFLOP/s", size=size)


def first_token(model: Model) -> dict[str, Any]:
    """From the process' start, imports included."""
    model.generate(1, model.prompt_len, 1)
    return judged("start to first token", time.time() - float(os.environ.get(STARTED, time.time())), "s")


def decode(model: Model, rows: int) -> dict[str, Any]:
    """One step of `rows` requests, from two runs."""
    model.generate(rows, model.prompt_len, model.short)
    seconds = per_step(*(model.generate(rows, model.prompt_len, tokens) for tokens in (model.short, model.long)), model.short, model.long)
    share = bandwidth_share(model.read * model.item, seconds, model.limit("copy bandwidth") * 1e9)
    if rows == 1:
        return judged("decode, one request", seconds * 1e3, "ms", share, tokens_per_s=rows / seconds)
    return plain(seconds * 1e3, "ms", tokens_per_s=rows / seconds, share=share, of="the copy bandwidth over the weights' bytes")


def prefill(model: Model) -> dict[str, Any]:
    tokens, c = (64, model.config) if model.is_tiny else (2048, model.config)
    seconds = min(model.generate(1, tokens, 1) for _ in range(4))
    flops = prefill_flops(tokens, model.multiplied, c["num_hidden_layers"], c["num_attention_heads"], c["head_dim"])
    return judged("prefill, 2048 tokens", seconds * 1e3, "ms", flops / seconds / (model.limit("matrix rate") * 1e12), tokens=tokens)


def idle(model: Model, rows: int) -> dict[str, Any]:
    """Share of steady decode in which no kernel ran, by the profiler's times of kernels."""
    if model.device_name != "cuda":
        return {"status": "unavailable", "reason": "kernels' times come from a GPU"}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        model.generate(rows, model.prompt_len, 48)
    spans = [(e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > e.time_range.start]
    begin, end = min(start for start, _ in spans), max(stop for _, stop in spans)
    steady = [span for span in spans if span[0] >= begin + 0.6 * (end - begin) and span[1] <= begin + 0.95 * (end - begin)]
    return judged("outside kernels", outside(steady), "of a step", kernels=len(steady))


def memory(model: Model) -> dict[str, Any]:
    """What the plan said beside what is taken, once the largest batch has run."""
    plan = {what: size for what, size, _ in model.llm._engine.info.memory_plan}
    planned = sum(plan[what] for what in ("weights", "activations", "programs", "KV cache"))
    if model.device_name != "cuda":
        return {"status": "unavailable", "reason": "what is taken is asked of a GPU", "planned": planned}
    model.generate(model.options["max_num_seqs"], model.prompt_len, model.short)  # a run that goes on after a cut has run nothing yet
    taken = model.taken()
    return judged("memory plan", abs(taken - planned) / taken, "off what was taken", planned=planned, taken=taken, plan=plan)


# ---------------------------------------------------------------- HTTP
def server(model: Model) -> dict[str, Any]:
    """`oarlock serve` to ready, and eight requests at once by `oarlock bench serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [part for name, value in model.options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "oarlock.cli.main"]
    started, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    serving = subprocess.Popen([*command, "serve", str(model.folder), "--device", model.device_name, "--load-format", "dummy", "--skip-tokenizer-init", "--port", str(port), *options])
    try:
        _wait_ready(f"{url}/health", serving)
        ready = time.perf_counter() - started
        bench = ["bench", "serve", "--url", url, "--num-prompts", "8", "--input-len", "16", "--output-len", "16", "--id-range", "10", "300", "--ignore-eos"]
        done = subprocess.run([*command, *bench], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"bench serve: {(done.stderr or done.stdout).strip().splitlines()[-3:]}")
        return plain(ready, "s to ready", said=done.stdout.strip().splitlines()[-8:])
    finally:
        serving.send_signal(signal.SIGTERM)
        try:
            serving.wait(15)
        except subprocess.TimeoutExpired:
            serving.kill()
            serving.wait()


def _wait_ready(url: str, serving: subprocess.Popen[bytes], within_s: float = 180.0) -> None:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if serving.poll() is not None:
            raise RuntimeError(f"the server ended with {serving.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {within_s:.0f} s")
