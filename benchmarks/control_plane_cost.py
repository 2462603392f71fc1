"""CPU time that one decode step costs beside the model: scheduler, batch assembly, reading results, messages.

Owns: a worker whose programs compute nothing, and the clock around each part of the real engine loop.
Reads: `engine.core`, `runtime.model_runner`, `engine.wire`, `executor.codec`.
Never: loads a model, opens a device or a socket; passes or fails.

    python benchmarks/control_plane_cost.py [--batch 1 32] [--steps 400] [--rounds 5] [--json FILE]

Everything but the programs is the code that serves: `EngineCore.step`, `Scheduler`, `KVCacheManager`, `ModelRunner` with its packed
inputs, `PendingStep`. The programs return tensors that were made before. Times are CPU seconds of the one thread that runs the
loop, so a busy machine changes them less than it changes wall time. The figure of a round is the mean over its steps, and the
table gives the median of the rounds and the range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import oarlock
import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device, GraphRunner
from oarlock.config.sections import EngineConfig, ModelConfig, SchedulerConfig
from oarlock.engine import wire
from oarlock.engine.core import EngineCore
from oarlock.executor import codec
from oarlock.executor.base import Executor
from oarlock.kv_spec import KVSpec, make_groups
from oarlock.messages import EngineRequest, WorkerReady
from oarlock.model_summary import ModelSummary
from oarlock.runtime.model_runner import ModelRunner, RunnerLimits
from oarlock.sampling_params import SamplingParams
from oarlock.shapes import BucketTable, ShapePolicy

VOCAB, BLOCK_SIZE, MAX_LEN, NUM_BLOCKS = 49152, 16, 4096, 12000
SEATS = 256
SETTLE = 8  # decode steps of every request before the clock runs
PARTS = ("schedule", "batch assembly", "reading results", "update", "loop", "messages")
LIMIT_MS = {1: 1.0, 32: 2.0}  # what the project allows
FULL = make_groups((KVSpec("full", 3, 64),) * 30)
HYBRID = make_groups((*(KVSpec("window", 1, 256, 512),) * 15, *(KVSpec("full", 1, 256),) * 3))
WORKLOADS = {
    "greedy": (FULL, {"temperature": 0.0}),
    "sampled": (FULL, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}),
    "penalties": (FULL, {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1}),
    "logprobs 5": (FULL, {"temperature": 0.0, "logprobs": 5}),
    f"greedy, {len(HYBRID)} KV groups": (HYBRID, {"temperature": 0.0}),
}


class HostDevice(Device):
    """Torch's own CPU, no package needed."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(host_is_device=True)

    def activate(self) -> None:
        pass


class IdlePrograms(GraphRunner):
    """Programs that return what was made before, whatever they are asked to compute."""

    def compile(self, fn: Any, example: tuple[Any, ...], tag: str) -> Any:
        out = self._outputs(tag.rpartition("-")[0], example)
        return lambda weights, written, read, packed, device_inputs: (written, out)

    def _outputs(self, name: str, example: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        packed, device_inputs = example[3], example[4]
        if name == "forward":
            hidden = torch.zeros(SEATS, 1)
            return {"hidden": hidden, "all": hidden}
        if name == "head":
            return {"logits": device_inputs["hidden"]}
        if name in ("greedy", "sample"):
            return {"tokens": torch.full((SEATS,), 17, dtype=torch.int32)}
        if name == "logprobs":
            picks = packed.numel() // 2
            ids, values = torch.zeros(picks, 5, dtype=torch.int32), torch.full((picks, 5), -1.0)
            return {"logprob": values[:, 0], "rank": ids[:, 0] + 1, "top_ids": ids, "top_logprobs": values}
        return {}


class Clock:
    """CPU seconds of this thread, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - started

        return run


class IdleExecutor(Executor):
    """The inline executor over a runner with idle programs."""

    def __init__(self, config: EngineConfig, summary: ModelSummary, groups: Any, clock: Clock) -> None:
        super().__init__(config, summary, "none", "")
        self.groups, self.clock, self.last_step, self.last_result = groups, clock, None, None

    def load(self) -> list[WorkerReady]:
        ready = WorkerReady(HostDevice().capabilities, self.groups, BLOCK_SIZE, NUM_BLOCKS, 0, MAX_LEN, "float32", "idle", BucketTable(), ())
        return [ready]

    def start(self, num_blocks: int, num_host_blocks: int, max_model_len: int) -> tuple[float, int]:
        device = HostDevice()
        attention = SimpleNamespace(kv_layout=lambda blocks: ((1,),))
        model = SimpleNamespace(groups=self.groups, block_size=BLOCK_SIZE, vocab_size=VOCAB, attentions=[attention] * len(self.groups), joined=False)
        limits = RunnerLimits(self.config.scheduler.max_num_seqs, max_model_len, num_blocks, num_host_blocks, 20)
        policy = ShapePolicy(BucketTable())
        self.runner = ModelRunner(device, IdlePrograms(device), model, {}, None, policy, limits, torch.float32)  # type: ignore[arg-type]
        self._execute = self.clock.timed("batch assembly", self.runner.execute)
        return 0.0, 0

    def execute(self, out: Any) -> Any:
        pending = self._execute(out)
        self.last_step = out

        def result() -> Any:
            self.last_result = pending.result()
            return self.last_result

        return SimpleNamespace(result=self.clock.timed("reading results", result))

    def canary(self) -> None:
        raise RuntimeError("a program failed; see the log")

    def shutdown(self) -> None:
        pass


@dataclass(frozen=True)
class Cost:
    """Milliseconds of CPU time a step; the parts, their sum, and what several workers add."""

    parts: dict[str, float]
    total: float
    codec: float
    codec_bytes: int  # of the last step's plan, to each worker, and of its result


def measure(groups: Any, fields: dict[str, Any], batch: int, steps: int, prompt: int = 512) -> Cost:
    """One round: `steps` decode steps of `batch` requests, after their prompts."""
    clock = Clock()
    config = EngineConfig(ModelConfig("none"), scheduler=SchedulerConfig(max_num_seqs=SEATS))
    summary = ModelSummary(path="none", architecture="none", vocab_size=VOCAB)
    executor = IdleExecutor(config, summary, groups, clock)
    core = EngineCore(config, summary, executor)
    for n in range(batch):
        params = SamplingParams(max_tokens=steps + 200, ignore_eos=True, **fields)
        core.add(EngineRequest(f"request-{n:08x}-0000-0000", tuple(range(n, n + prompt)), params))
    made: Counter[str] = Counter()
    while len(made) < batch or min(made.values()) < SETTLE:  # past every prompt, and a few steps more
        made.update(output.request_id for output in core.step().outputs)
    scheduler = core.scheduler
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update_from_output = clock.timed("update", scheduler.update_from_output)  # type: ignore[method-assign]
    step = clock.timed("step", core.step)
    pack = clock.timed("messages", wire.pack)
    unpack = clock.timed("messages", wire.unpack)
    encode = clock.timed("codec", codec.encode)
    decode = clock.timed("codec", codec.decode)
    clock.seconds.clear()
    for _ in range(steps):
        outputs = step()
        unpack(pack(wire.OUTPUTS, outputs))
        decode(encode(executor.last_step))
        decode(encode(executor.last_result))
    ms = {part: seconds / steps * 1e3 for part, seconds in clock.seconds.items()}
    inside = ("schedule", "batch assembly", "reading results", "update")
    parts = {part: ms[part] for part in inside}
    parts["loop"] = ms["step"] - sum(parts.values())
    parts["messages"] = ms["messages"]
    size = len(codec.encode(executor.last_step)) + len(codec.encode(executor.last_result))
    return Cost(parts, sum(parts.values()), ms["codec"], size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help=f"requests that decode together, at most {SEATS}")
    parser.add_argument("--steps", type=int, default=400, help="steps a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS))
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Oarlock {oarlock.__version__}, torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps; ms of CPU time a step")
    print("| requests | batch | " + " | ".join(PARTS) + " | total | limit | several workers add | bytes |\n|" + "---|" * (len(PARTS) + 6))
    records = []
    for name in arguments.workload:
        groups, fields = WORKLOADS[name]
        for batch in arguments.batch:
            rounds = [measure(groups, fields, batch, arguments.steps) for _ in range(arguments.rounds)]
            parts = {part: statistics.median(r.parts[part] for r in rounds) for part in PARTS}
            totals = sorted(r.total for r in rounds)
            total, more = statistics.median(totals), statistics.median(r.codec for r in rounds)
            cells = [*(f"{parts[p]:.3f}" for p in PARTS), f"{total:.3f} [{totals[0]:.3f}..{totals[-1]:.3f}]", f"{LIMIT_MS.get(batch, '')}", f"{more:.3f}", f"{rounds[-1].codec_bytes}"]
            print(f"| {name} | {batch} | " + " | ".join(cells) + " |", flush=True)
            records.append({"workload": name, "batch": batch, "parts_ms": parts, "total_ms": total, "range_ms": [totals[0], totals[-1]], "codec_ms": more, "codec_bytes": rounds[-1].codec_bytes})
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=2)


if __name__ == "__main__":
    main()
