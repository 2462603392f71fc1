"""Triton compiles a kernel for each new mixture of its arguments, some seconds each: all are compiled at start, none while requests are served.

In a process of its own, for kernels of the tests' are interpreted: over the stand-in for torch.cuda and a described driver, with nothing compiled or
run. What is asked for is counted.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 4352, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.parametrize(("model", "most_at_start"), [("dense", 60), ("experts", 80)])  # 42 and 66 at the time of writing
def test_no_kernel_is_compiled_while_requests_are_served(tmp_path, model, most_at_start):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, model], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert not done.returncode, done.stderr[-3000:]
    asked = json.loads(done.stdout.splitlines()[-1])
    assert asked["serving"] == {}
    assert 20 < sum(asked["start"].values()) <= most_at_start


def asked_for(run: Any) -> dict[str, dict[str, int]]:
    """Kernels that `run(serving)` would have had compiled before and after it called `serving`, by name."""
    from triton import knobs

    seen: dict[str, set[str]] = defaultdict(set)
    found: dict[str, dict[str, int]] = {"start": defaultdict(int), "serving": defaultdict(int)}
    phase = ["start"]

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        name = fn.name.rpartition(".")[2]
        if key not in seen[name]:
            seen[name].add(key)
            found[phase[0]][name] += 1
        return True  # nothing is compiled, and nothing runs

    knobs.runtime.jit_cache_hook = hook
    run(lambda: phase.append(phase.pop().replace("start", "serving")))
    return found


def serve(serving: Any) -> None:
    """A model through the engine: prompts of any number and length, then requests with everything a sampler can do."""
    from oarlock import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp())
    config = CONFIG | (EXPERTS if sys.argv[1:] == ["experts"] else {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    sizes = {"max_model_len": 512, "max_num_seqs": 40, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    draws = random.Random(1)
    with LLM(str(folder), device="cuda", dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, **sizes) as llm:
        serving()
        for options in (
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
            {"temperature": 0.8, "frequency_penalty": 0.2, "allowed_token_ids": [5, 6, 7], "logprobs": 3},
        ):
            prompts = [[draws.randrange(2, 4000) for _ in range(draws.randint(1, 120))] for _ in range(60)]
            params = [SamplingParams(max_tokens=draws.randint(1, 12), ignore_eos=True, detokenize=False, **options) for _ in prompts]
            llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def main() -> None:
    """Writes what was asked for as the last line."""
    sys.path[:0] = [str(ROOT / "plugins/triton_kernels/tests"), str(ROOT / "backends/cuda/tests")]
    cuda_stub, kernel_compile = (importlib.import_module(name) for name in ("cuda_stub", "kernel_compile"))
    from oarlock_cuda import vendor
    from oarlock_triton_kernels import logits, sampling
    from triton.runtime import driver

    driver.set_active(kernel_compile.DescribedDriver(kernel_compile.CHIP["sm_90"]))
    patch = pytest.MonkeyPatch()
    stub = cuda_stub.put_in_place(Path(tempfile.mkdtemp()), patch)
    stub.total = 512 << 20
    patch.setattr(vendor, "has_triton", lambda: True)
    # What no kernel has written is garbage: tokens must be some.
    for module, name in ((sampling, "greedy"), (sampling, "sample"), (logits, "logprobs")):
        launch = getattr(module, name)
        patch.setattr(module, name, lambda *args, launch=launch: _zeroed(launch(*args)))
    print(json.dumps(asked_for(serve)))


def _zeroed(found: Any) -> Any:
    return tuple(map(_zeroed, found)) if isinstance(found, tuple) else found.zero_()


if __name__ == "__main__":
    main()
