"""Compile every program of a model's shape for TPUs that are not here, through the worker's own start, and say what the compiler said.

    python tools/compile_for_tpu.py --topology v6e:2x2 [--chips 1] [--layers 32] [--model llama-3-8b|tiny] [--out FILE]

Needs the packages of oarlock-tpu. No weight is made: tensors are shapes. One line a program, JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OARLOCK_TPU_ON_HOST", "1")  # before JAX is imported: no chip is looked for

import torch
from oarlock.config.sections import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from oarlock.model_summary import load_summary
from oarlock.runtime import worker as workers
from oarlock.runtime.loader.checkpoint import DummyCheckpoint

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512, "intermediate_size": 512, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False,
    },
}  # fmt: skip


class Shapes(DummyCheckpoint):
    """Weights without numbers."""

    def get_shaped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or torch.float32, device="meta")


def compile_all(model: str, topology: str, chips: int, layers: int | None, seqs: int, tokens: int, blocks: int | None) -> dict[str, Any]:
    """Start a worker on a described machine. The plan and a record for each program."""
    config = dict(MODELS[model])
    if layers:
        config["num_hidden_layers"] = layers
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        given = ModelConfig(model=folder, load_format="dummy", generation_config="none", skip_tokenizer_init=True)
        engine = EngineConfig(
            given, CacheConfig(swap_space_bytes=0, num_blocks_override=blocks), SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens),
            device=DeviceConfig(options={"tpu_topology": topology, "tpu_chips": chips, "tpu_compile_cache": None}),
        )  # fmt: skip
        summary = load_summary(given)
        workers.open_checkpoint = lambda summary, config, **_: Shapes(0)  # type: ignore[assignment]
        started = time.monotonic()
        worker = workers.Worker(engine, summary, "tpu", "oarlock_tpu.abstract:AbstractTpu")
        worker.prepare()
        ready = worker.load()
        worker.start(ready.num_blocks, ready.num_host_blocks, ready.max_model_len)
        assert worker.runner is not None
        programs = []
        for (name, key), program in worker.runner.compiled.items():
            axes = {axis: getattr(key, axis) for axis in worker.runner.programs[name].axes}
            report = program.report
            programs.append({"program": name, "axes": axes, **asdict(report), "peak_bytes": report.peak_bytes})
            print(line(programs[-1]), flush=True)
    return {
        "model": model, "layers": config["num_hidden_layers"], "topology": topology, "chips": chips, "device": ready.device_text,
        "num_blocks": ready.num_blocks, "block_size": ready.block_size, "memory_plan": [list(row) for row in ready.memory_plan],
        "available_bytes": worker.device.memory_info()[1], "programs": programs, "seconds": time.monotonic() - started,
    }  # fmt: skip


def line(p: dict[str, Any]) -> str:
    axes = ",".join(f"{name}={value}" for name, value in p["axes"].items() if value)
    return (
        f"{p['program']}[{axes}]  {p['seconds']:.1f} s ({p['cpu_seconds']:.1f} of a processor)  arguments {p['argument_bytes'] / 2**20:.0f} MiB  donated {p['donated_bytes'] / 2**20:.0f}  "
        f"temporary {p['temporary_bytes'] / 2**20:.1f}  code {p['code_bytes'] / 2**20:.1f}  {p['flops'] / 1e9:.1f} GFLOP  "
        f"cache copies {p['cache_copies']}  all-reduces {p['all_reduces']}  kernels {p['kernels']}  64-bit {p['has_wide_numbers']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3-8b")
    parser.add_argument("--topology", default="v6e:2x2")
    parser.add_argument("--chips", type=int, default=1)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=544)
    parser.add_argument("--num-blocks-override", type=int, default=None)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    found = compile_all(a.model, a.topology, a.chips, a.layers, a.max_num_seqs, a.max_num_batched_tokens, a.num_blocks_override)
    if a.out:
        a.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
