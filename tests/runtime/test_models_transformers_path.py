"""Architectures without a file of their own are served through transformers' modelling code, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GENERIC, Recipe, Tiny
from oarlock import LLM
from oarlock.backend_api.runtime import IdentityCommunicator, bind_ops
from oarlock.config.resolve import from_kwargs
from oarlock.errors import ConfigError, UnsupportedArchitecture
from oarlock.model_summary import load_summary
from oarlock.runtime.models import build_model
from running import assert_same, run

LENGTHS = (1, 7, 50, 130)
_MOSHI = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_dim": 96,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", GENERIC)
def test_greedy_tokens_are_those_of_transformers(checkpoint, name):
    tiny = checkpoint(name)
    assert_same(tiny, tiny.prompts(*LENGTHS))


@pytest.mark.parametrize("name", ["granite", "cohere2"])
def test_greedy_tokens_are_the_same_on_static_shapes(checkpoint, name):
    tiny = checkpoint(name)
    assert_same(tiny, tiny.prompts(*LENGTHS), device="sim-static")


def test_small_chunks_shared_prefixes_and_few_blocks_change_nothing(checkpoint):
    tiny = checkpoint("cohere2")
    prompts = tiny.prompts(120, 50, 90)
    prompts.append([*prompts[0][:80], *prompts[1][:10]])
    assert_same(tiny, prompts, max_num_batched_tokens=24, num_gpu_blocks_override=60, block_size=8)


def test_windows_are_those_that_the_code_asks_for(checkpoint):
    with LLM(str(checkpoint("cohere2").path), device="cpu", dtype="float32", skip_tokenizer_init=True) as llm:
        kinds = [(group.kind, group.window, group.layers) for group in llm._engine.info.kv_groups]
    assert sorted(kinds) == [("full", None, (3,)), ("window", 16, (0,)), ("window", 16, (1,)), ("window", 16, (2,))]


def test_a_window_that_the_code_keeps_to_its_masks_is_refused_where_it_matters(tmp_path):
    tiny = Tiny.make("moshi", tmp_path, Recipe("MoshiForCausalLM", "MoshiConfig", {**_MOSHI, "sliding_window": 16}))
    with pytest.raises(UnsupportedArchitecture, match=r"does not tell its attention of the window of 16 tokens .* served with --max-model-len 16"):
        run(tiny, [[5]], new_tokens=4)
    (prompt,) = tiny.prompts(6)
    (got,) = run(tiny, [prompt], new_tokens=8, max_model_len=16)
    tiny.check(prompt, got)


def test_rope_flags_reach_its_code(checkpoint):
    tiny = checkpoint("granite")
    prompts = tiny.prompts(60)
    plain = run(tiny, prompts)
    assert run(tiny, prompts, rope_theta=10000.0) == plain
    assert run(tiny, prompts, rope_theta=500.0) != plain
    assert run(tiny, prompts, rope_scaling={"rope_type": "linear", "factor": 4.0}) != plain


def test_dynamic_factors_are_fixed_at_the_served_context(checkpoint):
    """transformers changes them with the longest text of a call, after which cached keys no longer fit."""
    tiny = checkpoint("granite-dynamic")
    prompts = tiny.prompts(60, 5)
    alone = [run(tiny, [prompt], max_model_len=512)[0] for prompt in prompts]
    assert run(tiny, prompts, max_model_len=512) == alone
    assert alone != run(tiny, prompts, max_model_len=256)


def test_made_up_weights_need_no_file(checkpoint, tmp_path):
    tiny = checkpoint("olmoe")
    (tmp_path / "config.json").write_text((tiny.path / "config.json").read_text())
    (got,) = run(Tiny("dummy", tmp_path, tiny.recipe), tiny.prompts(20), load_format="dummy", new_tokens=4)
    assert len(got) == 4


def test_no_second_copy_of_the_weights_is_made(checkpoint):
    """The module's own parameters take no memory; what the worker loads is what is computed with."""
    with LLM(str(checkpoint("granite").path), device="cpu", dtype="float32", skip_tokenizer_init=True) as llm:
        worker = llm._engine._client._core.executor._worker
        assert {p.device.type for p in worker.model.base.parameters()} == {"meta"}
        assert all(isinstance(t, torch.Tensor) for t in worker.weights["parameters"].values())


def test_more_ranks_than_one_are_refused(checkpoint):
    summary = load_summary(from_kwargs(str(checkpoint("granite").path), device="cpu").engine.model)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2: GraniteForCausalLM .* not divided over ranks; use 1"):
        build_model(summary, bind_ops([], "float32"), IdentityCommunicator(0, 2), lambda params, kind: None, 16, torch.float32)


def refusal(folder: Path, config: dict[str, Any], **options: Any) -> str:
    """What is said when a model with this config is opened."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **config}))
    with pytest.raises(UnsupportedArchitecture) as caught:
        run(Tiny("refused", folder, Recipe("", "", {})), [[5, 6]], load_format="dummy", max_model_len=32, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"}, "does not let its attention be replaced"),
        ({"architectures": ["Qwen4000ForCausalLM"], "model_type": "qwen4000"}, "has no decoder-only class of that name"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "has no decoder-only class of that name"),
        (
            {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16, "num_key_value_heads": 2},
            "its attention needs s_aux",
        ),
    ],
    ids=["own attention", "unknown", "encoder-decoder", "sinks"],
)
def test_a_refusal_says_what_was_tried_and_what_is_near(tmp_path, config, reason):
    text = refusal(tmp_path, config)
    assert text.startswith(f"{config['architectures'][0]} cannot be served. Tried: a native model file (there is none); the generic path")
    assert reason in text
    assert "The nearest architectures with a native file are " in text and "all: GPT2LMHeadModel, " in text


def test_the_nearest_is_the_one_of_like_name(tmp_path):
    assert "native file are Qwen3ForCausalLM" in refusal(tmp_path, {"architectures": ["Qwen3000ForCausalLM"]})


OWN_CODE = """
from transformers import GraniteConfig, GraniteForCausalLM
class OwnConfig(GraniteConfig):
    model_type = "own"
class OwnForCausalLM(GraniteForCausalLM):
    config_class = OwnConfig
print("OWN CODE RAN")
"""
AUTO = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def test_code_of_a_checkpoint_is_not_run(tmp_path, capsys):
    (tmp_path / "modeling_own.py").write_text(OWN_CODE)
    text = refusal(tmp_path, {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": AUTO})
    assert "its auto_map points to Python code of the checkpoint, which runs only with --trust-remote-code" in text
    assert "OWN CODE RAN" not in capsys.readouterr().out


def test_code_of_a_checkpoint_runs_when_it_is_trusted(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tiny, folder = checkpoint("granite"), tmp_path / "own"
    folder.mkdir()
    config = json.loads((tiny.path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": AUTO}))
    (folder / "modeling_own.py").write_text(OWN_CODE)
    (folder / "model.safetensors").symlink_to(tiny.path / "model.safetensors")
    prompts = tiny.prompts(20)
    (got,) = run(Tiny("own", folder, tiny.recipe), prompts, trust_remote_code=True)
    tiny.check(prompts[0], got)
    assert "OWN CODE RAN" in capsys.readouterr().out


def test_own_code_that_cannot_be_imported_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "modeling_own.py").write_text("raise RuntimeError('a broken file')\n")
    text = refusal(tmp_path, {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": AUTO}, trust_remote_code=True)
    assert "the checkpoint's own code cannot be imported: RuntimeError: a broken file" in text
