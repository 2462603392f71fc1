"""GGUF headers: what is read, what is said in config.json's words, and what is refused. Files are written by the `gguf` package."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from oarlock.config.sections import ModelConfig
from oarlock.errors import ModelError, UnsupportedArchitecture, WeightMismatch
from oarlock.gguf_header import TENSOR_TYPES, is_gguf, read_header
from oarlock.model_summary import ModelSummary, load_summary

BASE: dict[str, Any] = {
    "block_count": 6,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 5000.0,
}


def write(
    path: Path, architecture: str = "llama", keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, **general: Any
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in {**{f"{architecture}.{k}": v for k, v in {**BASE, **(keys or {})}.items() if v is not None}, **general}.items():
        name = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    everything = {"token_embd.weight": np.zeros((50, 64), np.float32), "output.weight": np.zeros((50, 64), np.float32), **(tensors or {})}
    for name, data in everything.items():
        if data is not None:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def summary(path: Path, **config: Any) -> ModelSummary:
    return load_summary(ModelConfig(str(path), **config))


def test_every_value_type_is_read_as_the_reference_reads_it(path: Path) -> None:
    general = {
        "a__text": "é\U0001f389",
        "a__flag": True,
        "a__float": 0.5,
        "a__ints": [1, 2, 3],
        "a__floats": [0.5, 0.25],
        "a__strings": ["x", "", "é"],
    }
    write(path, **general)
    header = read_header(path, large_arrays=True)
    reference = gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if key.startswith("GGUF."):
            continue
        value = header.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    for tensor in reference.tensors:
        mine = header.tensors[tensor.name]
        assert (mine.offset, mine.nbytes, mine.type_name) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


def test_block_sizes_are_those_of_the_reference() -> None:
    for type_id, (name, elements, size) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (elements, size))


def test_a_large_vocabulary_is_skipped_unless_wanted_and_quick(path: Path) -> None:
    write(path, tokenizer__ggml__tokens=[f"token{i}" for i in range(65536)])
    start = time.process_time()
    header = read_header(path)
    assert time.process_time() - start < 0.2
    assert header.metadata["tokenizer.ggml.tokens"] is None and header.array_lengths["tokenizer.ggml.tokens"] == 65536
    assert read_header(path, large_arrays=True).metadata["tokenizer.ggml.tokens"][-1] == "token65535"


# ---------------------------------------------------------------- in config.json's words
def test_a_llama_header_is_summarised(path: Path) -> None:
    s = summary(write(path, tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=7, tokenizer__ggml__bos_token_id=1))
    assert (s.architecture, s.num_layers, s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads) == (
        "LlamaForCausalLM",
        6,
        64,
        96,
        4,
        2,
    )
    assert (s.head_dim, s.vocab_size, s.max_model_len, s.is_gguf, s.tie_word_embeddings) == (16, 50, 256, True, False)
    assert (s.eos_token_ids, s.bos_token_id, s.dtype) == ((2, 7), 1, "float16")
    assert s.hf_config["rope_theta"] == 5000.0 and s.hf_config["rms_norm_eps"] == pytest.approx(1e-6)


def test_no_output_tensor_means_tied_embeddings(path: Path) -> None:
    assert summary(write(path, tensors={"output.weight": None})).tie_word_embeddings is True


@pytest.mark.parametrize(("file_type", "dtype"), [(0, "float32"), (1, "float16"), (32, "bfloat16"), (15, "float16")])
def test_the_dtype_is_that_of_unquantised_files(path: Path, file_type: int, dtype: str) -> None:
    assert summary(write(path, general__file_type=file_type)).dtype == dtype


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("qwen2", {}, "Qwen2ForCausalLM"),
        ("qwen3", {"attention.key_length": 128}, "Qwen3ForCausalLM"),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}, "Qwen3MoeForCausalLM"),
        ("llama", {"expert_count": 8, "expert_used_count": 2}, "MixtralForCausalLM"),
        ("smollm3", {}, "SmolLM3ForCausalLM"),
        ("gemma2", {"attention.key_length": 32, "attention.sliding_window": 16, "attn_logit_softcapping": 50.0}, "Gemma2ForCausalLM"),
        ("gemma3", {"attention.key_length": 32, "attention.sliding_window": 16}, "Gemma3ForCausalLM"),
        ("phi3", {}, "Phi3ForCausalLM"),
        ("gpt2", {"attention.layer_norm_epsilon": 1e-5}, "GPT2LMHeadModel"),
    ],
)
def test_architectures_have_their_hugging_face_names(path: Path, architecture: str, keys: dict[str, Any], expected: str) -> None:
    s = summary(write(path, architecture, keys))
    assert (s.architecture, s.num_layers, s.hidden_size, s.num_heads) == (expected, 6, 64, 4)
    assert s.head_dim == keys.get("attention.key_length", 16)
    if architecture == "gemma2":
        assert s.layer_windows == (16, None) * 3 and s.hf_config["attn_logit_softcapping"] == 50.0
    if architecture == "gemma3":
        assert s.layer_windows == (16, 16, 16, 16, 16, None) and s.hf_config["rope_local_base_freq"] == 10000.0
    if "expert_count" in keys:
        assert (
            s.hf_config["num_experts" if architecture == "qwen3moe" else "num_local_experts"] == 8
            and s.hf_config["num_experts_per_tok"] == 2
        )


def test_rope_scaling_is_read_from_keys(path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    s = summary(write(path, "qwen2", keys))
    assert (
        s.hf_config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        and s.max_model_len == 512
    )


def test_rope_scaling_is_read_from_tensors(path: Path) -> None:
    s = summary(write(path, tensors={"rope_freqs.weight": np.array([1.0, 1.0, 3.5, 8.0], np.float32)}))
    assert s.hf_config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    tensors = {"rope_factors_short.weight": np.array([1.0, 1.5], np.float32), "rope_factors_long.weight": np.array([2.0, 4.0], np.float32)}
    keys = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    s = summary(write(path, "phi3", keys, tensors))
    assert s.hf_config["rope_scaling"] == {
        "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0], "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    }  # fmt: skip
    assert s.max_model_len == 256


def test_a_rotary_part_of_the_head_is_read(path: Path) -> None:
    assert summary(write(path, "phi3", {"rope.dimension_count": 12})).hf_config["partial_rotary_factor"] == 0.75
    assert "partial_rotary_factor" not in summary(write(path, "phi3", {"rope.dimension_count": 16})).hf_config


def test_flags_act_on_a_gguf_file_too(path: Path) -> None:
    s = summary(write(path), rope_scaling={"type": "linear", "factor": 2.0}, hf_overrides={"rms_norm_eps": 0.5}, max_model_len=300)
    assert (s.derived_max_model_len, s.max_model_len, s.hf_config["rms_norm_eps"]) == (512, 300, 0.5)


# ---------------------------------------------------------------- refusals
def test_every_truncation_is_an_error_that_names_the_file(path: Path, tmp_path: Path) -> None:
    whole = write(path, tokenizer__ggml__tokens=["a", "b"]).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, len(whole) - 26000, 7), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="cut.gguf"):
            load_summary(ModelConfig(str(cut))) if is_gguf(cut) else read_header(cut)


def test_a_truncated_tensor_is_named(path: Path) -> None:
    whole = write(path).read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(WeightMismatch, match=r"tensor output\.weight ends at byte \d+, the file at \d+"):
        summary(path)


def test_damage_is_an_error_and_never_a_crash(path: Path) -> None:
    whole = write(path, tokenizer__ggml__tokens=["a", "b"]).read_bytes()
    end = len(whole) - 2 * 50 * 64 * 4
    random = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[random.integers(4, end)] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            summary(path)
        except ModelError:
            pass


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"GGML....", "not a GGUF file"), (b"GGUF" + struct.pack("<I", 1), "version 1"), (b"GGUF" + struct.pack(">I", 3), "big-endian")],
)
def test_other_formats_are_told_apart(path: Path, data: bytes, words: str) -> None:
    path.write_bytes(data)
    with pytest.raises(ModelError, match=words):
        read_header(path)


def test_what_cannot_be_served_is_refused(path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"'mamba' is not supported; supported: llama, qwen2"):
        summary(write(path, "mamba"))
    with pytest.raises(ModelError, match="one of 3 parts"):
        summary(write(path, split__count=3))
    with pytest.raises(ModelError, match="num_hidden_layers"):
        summary(write(path, keys={"block_count": None}))
    with pytest.raises(ModelError, match="head_count_kv differs from layer to layer"):
        summary(write(path, keys={"attention.head_count_kv": [2, 2, 1, 2, 2, 2]}))
    assert summary(write(path, keys={"attention.head_count_kv": [2] * 6})).num_kv_heads == 2
