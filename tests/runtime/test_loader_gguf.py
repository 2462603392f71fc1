"""GGUF weights: block types against the `gguf` package, names and layouts against transformers' own reader."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import IdentityCommunicator, bind_ops
from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError, WeightMismatch
from oarlock.model_summary import load_summary
from oarlock.runtime.loader import open_checkpoint
from oarlock.runtime.loader.gguf_codes import Form
from oarlock.runtime.loader.gguf_file import GGUFCheckpoint
from oarlock.runtime.loader.gguf_quant import BLOCK_TYPES, dequantise, read_codes
from oarlock.runtime.models import build_model
from oarlock.runtime.quantization.schemes import DEQUANTISE, pack_int4
from oarlock.runtime.reference import ReferenceAttention
from oarlock.runtime.weights import WeightLoader
from oarlock.runtime.worker import choose_dtype
from running import run
from test_models_sharding import Host

HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(name: str, count: int) -> np.ndarray:
    """Every bit random, the scales made finite."""
    blocks = np.random.default_rng(len(name)).integers(0, 256, (count, BLOCK_TYPES[name].block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        blocks[:, at + 1] = blocks[:, at + 1] & 0b10111111 | 0b00100000
    return blocks


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
def test_block_types_dequantise_as_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oarlock.runtime.loader.gguf_quant.CHUNK_BLOCKS_BYTES", 5000)  # several chunks, the last one short
    blocks = random_blocks(name, 203)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).reshape(-1)
    got = torch.empty(expected.size)
    dequantise(torch.from_numpy(blocks).view(-1), name, got)
    assert np.isfinite(expected).all() and np.unique(expected).size > 100
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=2e-7, atol=1e-7)


FUSED = [("Q4_K", "Q6_K"), ("Q4_0", "Q4_1"), ("Q2_K", "Q4_K"), ("Q3_K", "Q5_0"), ("Q4_0", "Q8_0"), ("Q5_K", "Q3_K", "Q4_0")]


@pytest.mark.parametrize("types", [*((name,) for name in sorted(BLOCK_TYPES)), *FUSED], ids="+".join)
def test_codes_mean_what_dequantising_gives(types: tuple[str, ...]) -> None:
    """One form for all parts of a fused linear, and no number rounded on the way."""
    form, shape = Form.of(list(types)), (6, 512)
    for name in types:
        raw = torch.from_numpy(random_blocks(name, 6 * 512 // BLOCK_TYPES[name].elements)).view(-1)
        expected = torch.empty(shape)
        dequantise(raw, name, expected)
        codes = form.write(read_codes(raw, name, shape), name)
        assert codes.q.dtype == (torch.uint8 if form.bits == 4 else torch.int8) and int(codes.q.max()) <= (15 if form.bits == 4 else 127)
        assert codes.scale.shape == (6, 512 // form.group) and (codes.offset is not None) == form.has_offsets
        weight = {"codes": pack_int4(codes.q) if form.bits == 4 else codes.q, "scales": codes.scale}
        weight |= {"offsets": codes.offset} if codes.offset is not None else {}
        got = DEQUANTISE[f"int{form.bits}"](weight, 512, torch.float32)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5 * float(expected.abs().max()))


# ---------------------------------------------------------------- whole files
# Sizes that transformers' reader leaves at their defaults for some architectures are those defaults.
HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 2, 4, 2, 48


def write(path: Path, arch: str, extra: dict[str, np.ndarray] | None = None, drop: str = "", types: dict[str, str] | None = None, file_type: int = 0) -> Path:
    """`types`: how tensors whose name has such a part are quantised."""
    dim = 128 if arch in ("qwen3", "qwen3moe") else 16
    inner = 256 if arch == "gpt2" else 96
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5) if arch == "gpt2" else writer.add_layer_norm_rms_eps(1e-6)
    if arch != "gpt2":
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(10000.0)
    if arch in ("gemma2", "gemma3", "qwen3", "qwen3moe"):
        writer.add_key_length(dim)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(32)
    if arch == "llama":
        writer.add_rope_dimension_count(dim)
        writer.add_vocab_size(VOCAB)
    if arch in ("qwen3moe", "mixtral"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(768)
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_pad_token_id(0)
    for name, data in {**tensors(arch, dim, inner), **(extra or {})}.items():
        kind = next((gguf.GGMLQuantizationType[kind] for part, kind in (types or {}).items() if part in name and data.ndim == 2), None)
        if name == drop:
            continue
        writer.add_tensor(name, data) if kind is None else writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(arch: str, dim: int, inner: int) -> dict[str, np.ndarray]:
    q, kv = HEADS * dim, KV_HEADS * dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if arch == "gpt2":
        shapes |= {"output_norm.bias": (HIDDEN,), "position_embd.weight": (1024, HIDDEN)}
    if arch not in ("gpt2", "gemma2", "gemma3"):
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,), "attn_output.weight": (HIDDEN, q)}
        if arch in ("gpt2", "phi3"):
            own["attn_qkv.weight"] = (q + 2 * (HIDDEN if arch == "gpt2" else kv), HIDDEN)
        else:
            own |= {"attn_q.weight": (q, HIDDEN), "attn_k.weight": (kv, HIDDEN), "attn_v.weight": (kv, HIDDEN)}
        if arch == "qwen2":
            own |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch == "gpt2":
            own |= {"attn_qkv.bias": (3 * HIDDEN,), "attn_output.bias": (HIDDEN,), "ffn_up.bias": (inner,), "ffn_down.bias": (HIDDEN,)}
            own |= {"attn_norm.bias": (HIDDEN,), "ffn_norm.bias": (HIDDEN,)}
        if arch in ("qwen3", "qwen3moe", "gemma3"):
            own |= {"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)}
        if arch in ("gemma2", "gemma3"):
            own |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        if arch == "qwen3moe":
            own |= {"ffn_gate_inp.weight": (4, HIDDEN), "ffn_gate_exps.weight": (4, 768, HIDDEN), "ffn_up_exps.weight": (4, 768, HIDDEN)}
            own["ffn_down_exps.weight"] = (4, HIDDEN, 768)
        else:
            own |= {"ffn_up.weight": (inner * (2 if arch == "phi3" else 1), HIDDEN), "ffn_down.weight": (HIDDEN, inner)}
            if arch not in ("gpt2", "phi3"):
                own["ffn_gate.weight"] = (inner, HIDDEN)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def opened(path: Path, **config: Any) -> Any:
    config_ = ModelConfig(str(path), **config)
    return open_checkpoint(load_summary(config_), config_)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "phi3"])
def test_names_and_values_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = write(tmp_path / "m.gguf", arch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf", pad_token_id=0)
        state = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", config=config, dtype=torch.float32).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    checkpoint = opened(path)
    assert checkpoint.names() == set(state)
    for name, expected in state.items():
        assert checkpoint.shape(name) == tuple(expected.shape), name
        torch.testing.assert_close(checkpoint.get(name), expected, rtol=0, atol=1e-6, msg=name)


def test_stacked_experts_are_given_one_by_one(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen3moe")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    checkpoint = opened(path)
    assert {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.3.down_proj.weight"} <= checkpoint.names()
    for expert in range(4):
        got = checkpoint.get(f"model.layers.0.mlp.experts.{expert}.up_proj.weight")
        assert checkpoint.shape(f"model.layers.0.mlp.experts.{expert}.up_proj.weight") == (768, HIDDEN)
        np.testing.assert_array_equal(got.numpy(), stored["blk.0.ffn_up_exps.weight"][expert])
    packed = random_blocks("Q8_0", 4 * 768 * 2)
    writer_input = {"blk.0.ffn_up_exps.weight": packed}
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0).reshape(4, 768, HIDDEN)
    checkpoint = opened(quantised(tmp_path / "q.gguf", "qwen3moe", writer_input, (4, 768, HIDDEN)))
    np.testing.assert_array_equal(checkpoint.get("model.layers.0.mlp.experts.2.up_proj.weight").numpy(), expected[2])


def quantised(path: Path, arch: str, packed: dict[str, np.ndarray], shape: tuple[int, ...], kind: str = "Q8_0") -> Path:
    """A file of one packed tensor and no vocabulary, enough for the loader."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_vocab_size(VOCAB)
    type_id = gguf.GGMLQuantizationType[kind]
    for name, data in packed.items():
        block, size = gguf.GGML_QUANT_SIZES[type_id]
        writer.add_tensor(name, data.reshape(*shape[:-1], shape[-1] // block * size), raw_dtype=type_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_rotary_permutation_is_undone_on_packed_rows(tmp_path: Path) -> None:
    packed = random_blocks("Q4_0", HIDDEN * HIDDEN // 32)
    checkpoint = opened(quantised(tmp_path / "q.gguf", "llama", {"blk.0.attn_q.weight": packed}, (HIDDEN, HIDDEN), "Q4_0"))
    stored = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0).reshape(HIDDEN, HIDDEN)
    half = HIDDEN // HEADS // 2
    expected = np.stack([stored[head * 2 * half + 2 * (row % half) + row // half] for head in range(HEADS) for row in range(2 * half)])
    np.testing.assert_array_equal(checkpoint.get("model.layers.0.self_attn.q_proj.weight").numpy(), expected)


def test_the_dtype_asked_for_is_given(tmp_path: Path) -> None:
    packed = random_blocks("Q6_K", HIDDEN)
    path = quantised(tmp_path / "q.gguf", "qwen2", {"blk.0.attn_q.weight": packed}, (HIDDEN, 256), "Q6_K")
    checkpoint = opened(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = checkpoint.get(name)
    assert whole.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(checkpoint.get(name, dtype), whole.to(dtype))


@pytest.mark.parametrize(("name", "kind"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_types_keep_their_dtype(tmp_path: Path, name: str, kind: torch.dtype) -> None:
    value = torch.randn(8, HIDDEN).to(kind)
    path = quantised(tmp_path / "q.gguf", "qwen2", {"blk.0.attn_q.weight": value.view(torch.uint8).numpy()}, (8, HIDDEN), name)
    got = opened(path).get("model.layers.0.self_attn.q_proj.weight")
    assert got.dtype == kind and torch.equal(got, value)


def test_tensors_outlive_their_checkpoint(tmp_path: Path) -> None:
    checkpoint = opened(write(tmp_path / "m.gguf", "qwen2"))
    tensor = checkpoint.get("model.norm.weight")
    before = tensor.clone()
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(tensor, before)
    with pytest.raises(ModelError, match="closed"):
        checkpoint.get("model.norm.weight")


def test_faults_name_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(WeightMismatch, match=r"tensor blk\.0\.strange\.weight belongs nowhere in LlamaForCausalLM"):
        opened(write(tmp_path / "m.gguf", "llama", {"blk.0.strange.weight": np.zeros(3, np.float32)}))
    checkpoint = opened(write(tmp_path / "m.gguf", "llama"))
    with pytest.raises(WeightMismatch, match=r"no tensor for model\.absent"):
        checkpoint.get("model.absent")
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight has shape \[64\], the model needs \[65\]"):
        checkpoint.get_shaped("model.norm.weight", (65,))
    assert torch.equal(checkpoint.get_shaped("model.norm.weight", (64,)), checkpoint.get("model.norm.weight"))
    packed = np.zeros((HIDDEN * 2, 18), np.uint8)
    checkpoint = opened(quantised(tmp_path / "q.gguf", "qwen2", {"blk.0.attn_q.weight": packed}, (HIDDEN, 64), "IQ4_NL"))
    with pytest.raises(WeightMismatch, match=r"attn_q\.weight.*has type IQ4_NL; supported: F32.*Q6_K"):
        checkpoint.get("model.layers.0.self_attn.q_proj.weight")


def test_load_formats_that_do_not_fit_the_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama")
    assert isinstance(opened(path, load_format="gguf"), GGUFCheckpoint)
    with pytest.raises(ConfigError, match="cannot read the GGUF file") as caught:
        opened(path, load_format="safetensors")
    assert caught.value.option == "--load-format"
    assert opened(path, load_format="dummy").is_dummy


# ---------------------------------------------------------------- multiplied as stored
MIXED = {"attn_q": "Q4_1", "attn_k": "Q4_0", "attn_v": "Q8_0", "attn_output": "Q4_1", "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q5_1", "token_embd": "Q8_0"}
STORED = {"qkv": "int8", "o": "int4", "gate_up": "int4", "down": "int8"}


@pytest.mark.parametrize(("arch", "drop"), [("llama", "output.weight"), ("qwen3", ""), ("gemma3", "")], ids=["llama-tied", "qwen3", "gemma3"])
def test_a_device_with_kernels_multiplies_the_files_codes(arch: str, drop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On cpu linears keep their codes, a tied head too; the tokens are those of a device that dequantises them all at load."""
    kept: list[dict[str, set[str]]] = []  # of each model: what its first layer's linears, and its head, are made of
    shared: list[bool] = []  # whether the embedding is looked up in what the head multiplies
    heads: list[str] = []  # what the head's weight is
    load = WeightLoader.load

    def watched(self: WeightLoader, *arguments: Any) -> Any:
        tree = load(self, *arguments)
        kept.append({name: set(w) for name, w in [*tree["layers"][0].items(), *tree.items()] if name in (*STORED, "lm_head")})
        heads.append(type(tree["lm_head"]["weight"]).__name__)
        shared.append(tree["embed"]["weight"] is next(iter(tree["lm_head"].values())))
        return tree

    monkeypatch.setattr(WeightLoader, "load", watched)
    path = write(tmp_path / "m.gguf", arch, drop=drop, types={**MIXED, "output.weight": "Q8_0"})
    prompts = [list(range(3, 20)), [5], list(range(40, 2, -1))]
    got = run(SimpleNamespace(path=path), prompts, new_tokens=12)  # type: ignore[arg-type]
    assert kept[0] == {name: {scheme} for name, scheme in STORED.items()} | {"lm_head": {"weight"}}
    assert heads[0] == "PackedCodes"
    assert shared[0] == (arch != "qwen3")
    assert got == run(SimpleNamespace(path=path), prompts, new_tokens=12, device="sim-eager")  # type: ignore[arg-type]
    assert kept[1]["qkv"] == {"weight"}


def test_the_plan_of_a_file_counts_its_codes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", drop="output.weight", types=MIXED)
    summary = load_summary(ModelConfig(str(path)))
    sizes = {}
    for keeps in (True, False):
        with open_checkpoint(summary, ModelConfig(str(path)), keeps_codes=keeps) as checkpoint:
            prepare = {name: lambda weight: weight for name in ("lm_head", "linear_int4", "linear_int8")} if keeps else {}
            _, specs = build_model(summary, bind_ops([], "float32"), IdentityCommunicator(0, 1), lambda p, _: ReferenceAttention(16, torch.float32, p), 16, torch.float32)
            sizes[keeps] = WeightLoader(checkpoint, Host(), torch.float32, 0, 1, prepare, checkpoint.quantization).measure(specs)
            if keeps:
                shared = WeightLoader(checkpoint, Host(), torch.float32, 0, 1, {**prepare, "embedding": lambda head: head}, checkpoint.quantization).measure(specs)
    assert sizes[True]["lm_head"] == VOCAB * HIDDEN + VOCAB * HIDDEN // 32 * 4 and sizes[False]["lm_head"] == 0
    assert "embed" in sizes[True] and shared == {name: size for name, size in sizes[True].items() if name != "embed"}
    assert sizes[True]["layers"] < sizes[False]["layers"] / 2.5


def test_a_quantised_file_takes_the_dtype_that_the_device_multiplies_blocks_in(tmp_path: Path) -> None:
    """Such a file has no dtype of its own; one of plain numbers has."""

    class Prefers(Host):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(dtypes=("bfloat16", "float32"), gguf_dtype="float32")

    quantised_file, plain = write(tmp_path / "q.gguf", "llama", types=MIXED, file_type=3), write(tmp_path / "p.gguf", "llama", file_type=1)
    summaries = {path: load_summary(ModelConfig(str(path))) for path in (quantised_file, plain)}
    assert [s.is_gguf_quantised for s in summaries.values()] == [True, False]
    assert choose_dtype("auto", summaries[quantised_file], Prefers()) == "float32"
    assert choose_dtype("auto", summaries[plain], Prefers()) == "bfloat16"
    assert choose_dtype("bfloat16", summaries[quantised_file], Prefers()) == "bfloat16"
