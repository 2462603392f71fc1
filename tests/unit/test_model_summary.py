"""Summaries from config.json: sizes, lengths, windows, rotary settings, and every refusal."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError, UnsupportedArchitecture, WeightMismatch
from oarlock.model_summary import ModelSummary, load_summary
from oarlock.weight_files import weight_files

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def summary(
    folder: Path, changes: dict[str, Any] | None = None, *, without: tuple[str, ...] = (), base: dict[str, Any] = LLAMA, **config: Any
) -> ModelSummary:
    values = {key: value for key, value in {**base, **(changes or {})}.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(values))
    return load_summary(ModelConfig(str(folder), **config))


def test_reads_a_plain_config(folder: Path) -> None:
    s = summary(folder)
    assert (s.architecture, s.num_layers, s.hidden_size, s.intermediate_size) == ("LlamaForCausalLM", 4, 64, 128)
    assert (s.num_heads, s.num_kv_heads, s.head_dim, s.vocab_size) == (4, 2, 16, 100)
    assert (s.max_model_len, s.derived_max_model_len, s.dtype) == (4096, 4096, "bfloat16")
    assert (s.eos_token_ids, s.bos_token_id, s.tie_word_embeddings) == ((2,), 1, False)
    assert (s.sliding_window, s.layer_windows, s.is_gguf, s.path) == (None, (None,) * 4, False, str(folder))


def test_needs_neither_torch_nor_transformers(folder: Path) -> None:
    summary(folder)
    code = (
        "import sys\nfrom oarlock.model_summary import load_summary\nfrom oarlock.config.sections import ModelConfig\n"
        f"load_summary(ModelConfig({str(folder)!r}))\nassert not {{'torch', 'transformers', 'huggingface_hub'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gpt2_and_opt_spell_their_sizes_differently(folder: Path) -> None:
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 512,
        "n_inner": None,
        "vocab_size": 50,
    }
    s = summary(folder, base=gpt2)
    assert (s.hidden_size, s.num_layers, s.num_heads, s.num_kv_heads, s.intermediate_size, s.max_model_len) == (32, 3, 2, 2, 128, 512)
    assert s.tie_word_embeddings is True and s.dtype == "float32"
    opt = {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 32,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 99,
        "vocab_size": 50,
    }
    assert summary(folder, base=opt).intermediate_size == 96


# ---------------------------------------------------------------- lengths
@pytest.mark.parametrize(
    ("changes", "derived"),
    [
        ({"max_seq_len": 1000, "seq_length": 3000}, 1000),
        ({"model_max_length": 10**30}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, 4096),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 32.0}}, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_scaling": {"rope_type": "default"}}, 4096),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 8192),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4096),
    ],
)
def test_the_context_is_derived_from_the_config(folder: Path, changes: dict[str, Any], derived: int) -> None:
    s = summary(folder, changes)
    assert (s.derived_max_model_len, s.max_model_len) == (derived, derived)


def test_without_any_length_it_is_2048_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert summary(folder, without=("max_position_embeddings",)).max_model_len == 2048
    assert "--max-model-len" in caplog.text


def test_a_shorter_context_is_taken_and_minus_one_means_derived(folder: Path) -> None:
    s = summary(folder, max_model_len=100)
    assert (s.max_model_len, s.derived_max_model_len) == (100, 4096)
    assert summary(folder, max_model_len=-1).max_model_len == 4096


@pytest.mark.parametrize("asked", [4097, 0, -2])
def test_a_context_that_cannot_be_is_refused(folder: Path, asked: int) -> None:
    with pytest.raises(ConfigError, match=f"--max-model-len.*{asked}") as caught:
        summary(folder, max_model_len=asked)
    assert caught.value.option == "--max-model-len"


def test_model_max_length_allows_a_longer_context(folder: Path) -> None:
    assert summary(folder, {"model_max_length": 4096, "max_position_embeddings": 2048}, max_model_len=4096).max_model_len == 4096
    with pytest.raises(ConfigError):
        summary(folder, {"model_max_length": 4096, "max_position_embeddings": 2048}, max_model_len=4097)


# ---------------------------------------------------------------- rotary settings
def test_every_spelling_of_rope_settings_becomes_one(folder: Path) -> None:
    new = summary(folder, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e5}}).hf_config
    old = summary(folder, {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 5e5}).hf_config
    assert (
        new["rope_scaling"] == old["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0} and new["rope_theta"] == old["rope_theta"] == 5e5
    )
    assert "rope_parameters" not in new
    layers = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    gemma = summary(folder, {"rope_parameters": layers, "model_type": "gemma3_text"}).hf_config
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"], gemma["rope_scaling"]) == (1e6, 1e4, {"rope_type": "linear", "factor": 8.0})


def test_the_flags_replace_the_configs_rope_settings(folder: Path) -> None:
    config = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}
    s = summary(folder, config, rope_scaling={"type": "linear", "factor": 3.0}, rope_theta=2e4)
    assert s.hf_config["rope_scaling"] == {"rope_type": "linear", "factor": 3.0} and s.hf_config["rope_theta"] == 2e4
    assert s.max_model_len == 12288


@pytest.mark.parametrize(
    "scaling", [{}, {"factor": 2.0}, {"type": "linear"}, {"rope_type": "yarn", "factor": 0}, {"type": "linear", "factor": "2"}]
)
def test_an_incomplete_rope_scaling_is_refused(folder: Path, scaling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        summary(folder, rope_scaling=scaling)
    assert caught.value.option == "--rope-scaling"
    summary(folder, rope_scaling={"type": "su", "short_factor": [1.0]})
    with pytest.raises(ConfigError, match="--rope-theta"):
        summary(folder, rope_theta=-1.0)


# ---------------------------------------------------------------- windows
SIX = {"num_hidden_layers": 6, "sliding_window": 512}


@pytest.mark.parametrize(
    ("changes", "slides"),
    [
        ({"model_type": "mistral"}, "111111"),
        ({"model_type": "phi3"}, "111111"),
        ({"model_type": "phi3", "sliding_window": 4096}, "000000"),  # as long as the context
        ({"model_type": "mistral", "sliding_window": None}, "000000"),
        ({"model_type": "qwen2", "max_window_layers": 4}, "000000"),
        ({"model_type": "qwen2", "max_window_layers": 4, "use_sliding_window": True}, "000011"),
        ({"model_type": "qwen2", "max_window_layers": 4, "use_sliding_window": False}, "000000"),
        ({"model_type": "mistral", "use_sliding_window": False}, "000000"),
        ({"model_type": "gemma2"}, "101010"),
        ({"model_type": "gemma3_text"}, "111110"),
        ({"model_type": "gemma3_text", "_sliding_window_pattern": 3, "sliding_window_pattern": None}, "110110"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"] * 3}, "010101"),
        ({"model_type": "cohere2", "sliding_window_pattern": 4}, "111011"),
    ],
)
def test_which_layers_have_a_window(folder: Path, changes: dict[str, Any], slides: str) -> None:
    s = summary(folder, {**SIX, **changes})
    assert s.layer_windows == tuple(512 if slide == "1" else None for slide in slides)
    assert s.sliding_window == (512 if "1" in slides else None)


def test_layer_types_must_be_as_many_as_layers(folder: Path) -> None:
    with pytest.raises(ModelError, match="2 layer_types for 6 layers"):
        summary(folder, {**SIX, "layer_types": ["full_attention", "sliding_attention"]})


def test_disabling_the_window_caps_the_context(folder: Path) -> None:
    s = summary(folder, {**SIX, "model_type": "gemma2"}, disable_sliding_window=True)
    assert (s.max_model_len, s.derived_max_model_len, s.sliding_window, s.layer_windows) == (512, 512, None, (None,) * 6)
    assert summary(folder, {**SIX, "model_type": "mistral"}, disable_sliding_window=True, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="above what the checkpoint allows, 512 tokens"):
        summary(folder, {**SIX, "model_type": "mistral"}, disable_sliding_window=True, max_model_len=513)


def test_disabling_the_window_has_no_effect_without_one(folder: Path) -> None:
    assert summary(folder, disable_sliding_window=True).max_model_len == 4096
    assert summary(folder, {**SIX, "use_sliding_window": False}, disable_sliding_window=True).max_model_len == 4096


def test_disabling_the_window_is_refused_with_rope_scaling_and_model_max_length(folder: Path) -> None:
    windowed = {**SIX, "model_type": "mistral"}
    with pytest.raises(ConfigError, match="rope scaling") as caught:
        summary(folder, {**windowed, "rope_scaling": {"type": "linear", "factor": 2.0}}, disable_sliding_window=True)
    assert caught.value.option == "--disable-sliding-window"
    with pytest.raises(ConfigError, match="model_max_length, which cannot be combined") as caught:
        summary(folder, {**windowed, "model_max_length": 4096}, disable_sliding_window=True, max_model_len=1000)
    assert caught.value.option == "--disable-sliding-window"


# ---------------------------------------------------------------- other fields
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": None}, "float32"),
        ({"dtype": "half"}, "float16"),
    ],
)
def test_the_checkpoints_dtype(folder: Path, changes: dict[str, Any], dtype: str) -> None:
    assert summary(folder, {"torch_dtype": None, **changes}).dtype == dtype


def test_an_unknown_dtype_is_an_error(folder: Path) -> None:
    with pytest.raises(ModelError, match="int8"):
        summary(folder, {"torch_dtype": "int8"})


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", False), ("gemma2", True), ("opt", True), ("smollm3", True)])
def test_silence_about_tied_embeddings_means_the_classs_default(folder: Path, kind: str, tied: bool) -> None:
    assert summary(folder, {"model_type": kind}).tie_word_embeddings is tied
    assert summary(folder, {"model_type": kind, "tie_word_embeddings": not tied}).tie_word_embeddings is not tied


def test_end_tokens_come_from_both_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9], "temperature": 0.6}))
    s = summary(folder)
    assert s.eos_token_ids == (2, 7, 9) and s.generation_config["temperature"] == 0.6
    none = summary(folder, generation_config="none")
    assert none.eos_token_ids == (2, 7, 9) and none.generation_config == {}
    other = folder / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.1}))
    assert summary(folder, generation_config=str(other)).generation_config == {"temperature": 0.1}
    with pytest.raises(ConfigError, match="--generation-config"):
        summary(folder, generation_config=str(folder / "absent"))


def test_quantization_settings_come_from_the_config_or_a_file_beside_it(folder: Path) -> None:
    assert summary(folder, {"quantization_config": {"quant_method": "gptq"}}).quantization_config == {"quant_method": "gptq"}
    assert summary(folder, {"compression_config": {"format": "dense"}}).quantization_config == {"format": "dense"}
    assert summary(folder).quantization_config is None
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4}))
    assert summary(folder).quantization_config == {"bits": 4}


def test_overrides_win(folder: Path) -> None:
    s = summary(
        folder,
        hf_overrides={"num_hidden_layers": 2, "architectures": ["MistralForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0}},
    )
    assert (s.num_layers, s.architecture, s.max_model_len) == (2, "MistralForCausalLM", 8192)


def test_a_composite_is_summarised_by_its_text_part(folder: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
    }
    s = summary(folder, base=outer)
    assert (s.architecture, s.num_heads, s.num_kv_heads, s.head_dim, s.vocab_size) == ("Gemma3ForCausalLM", 8, 4, 256, 262208)
    assert (s.max_model_len, s.dtype, s.eos_token_ids, s.tie_word_embeddings) == (131072, "bfloat16", (1, 106), True)
    assert s.layer_windows == (1024, 1024, 1024, 1024, 1024, None) and s.hf_config["rope_local_base_freq"] == 10_000.0


# ---------------------------------------------------------------- refusals
def test_missing_and_broken_files_are_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_summary(ModelConfig(str(folder)))
    for broken in ('{"hidden_size": 6', "", "[]", "\udcff"):
        (folder / "config.json").write_text(broken, errors="surrogateescape")
        with pytest.raises(ModelError, match=r"config\.json"):
            load_summary(ModelConfig(str(folder)))
    with pytest.raises(ModelError, match="neither a folder nor a GGUF file"):
        load_summary(ModelConfig(str(folder / "config.json")))
    (folder / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_summary(ModelConfig(str(folder)))
    summary(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        load_summary(ModelConfig(str(folder)))


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_size_is_named(folder: Path, key: str) -> None:
    with pytest.raises(ModelError, match=key):
        summary(folder, without=(key,))
    with pytest.raises(ModelError, match=key):
        summary(folder, {key: "many"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must be at most"),
        ({"hidden_size": 7}, "hidden_size is 7, not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number, not negative"),
        ({"rope_theta": "x"}, "rope_theta must be a number"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a number"),
        ({"sliding_window": "x"}, "sliding_window must be a number"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [1, True]}, "eos_token_id must be a token id"),
        ({"bos_token_id": 1.5}, "bos_token_id must be a token id"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_named(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        summary(folder, changes)


def test_a_checkpoint_that_is_only_code_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"auto_map points to Python code.*--hf-overrides"):
        summary(folder, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, without=("architectures",))
    with pytest.raises(UnsupportedArchitecture, match="names no architecture"):
        summary(folder, without=("architectures",))


# ---------------------------------------------------------------- weights
def test_the_files_that_would_be_read(folder: Path) -> None:
    def total() -> int:
        return sum(file.stat().st_size for file in weight_files(folder))

    with pytest.raises(ModelError, match="no weights"):
        total()
    (folder / "model.pt").write_bytes(b"x" * 5)
    assert total() == 5
    (folder / "pytorch_model.bin").write_bytes(b"x" * 7)
    (folder / "training_args.bin").write_bytes(b"x" * 1000)
    (folder / "optimizer.pt").write_bytes(b"x" * 1000)
    assert total() == 7
    for name, size in (("a.safetensors", 10), ("b.safetensors", 20), ("consolidated.safetensors", 500)):
        (folder / name).write_bytes(b"x" * size)
    assert total() == 530
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert total() == 30
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightMismatch, match=r"tensor y is in b\.safetensors, but that file is missing"):
        total()
    index.write_text("{")
    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        total()
