"""One worker over several chips, simulated on the host: the same tokens as one chip, through the whole of Oarlock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oarlock.conformance.tiny_models import TinyModel

SCRIPT = '''
import json, sys
from oarlock import LLM, SamplingParams
folder, chips = sys.argv[1], int(sys.argv[2])
llm = LLM(model=folder, device="tpu", tpu_chips=chips, dtype="float32", skip_tokenizer_init=True, max_num_seqs=2,
          max_num_batched_tokens=32, num_blocks_override=16, generation_config="none")
params = SamplingParams(temperature=0.9, seed=3, max_tokens=10, ignore_eos=True, detokenize=False)
out = llm.generate([{"prompt_token_ids": [3, 14, 15, 92, 6]}, {"prompt_token_ids": list(range(40))}], params)
print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in out]))
'''
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 160, "intermediate_size": 96, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "torch_dtype": "float32", "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def tokens(folder: Path, chips: int) -> list[list[int]]:
    environment = {**os.environ, "OARLOCK_TPU_ON_HOST": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), str(chips)], env=environment, capture_output=True, text=True, timeout=600, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert found, done.stderr[-2000:]
    return json.loads(found[0].removeprefix("TOKENS "))


@pytest.mark.timeout(1200)
def test_four_chips_give_the_tokens_of_one(tmp_path):
    TinyModel("dense", tmp_path, CONFIG)  # drawn so that a prompt decides what follows it
    one = tokens(tmp_path, 1)
    assert [len(row) for row in one] == [10, 10] and one[0] != one[1]
    assert tokens(tmp_path, 4) == one
