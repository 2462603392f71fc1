"""An fp8 KV cache: what it keeps, which scales it takes, and that everything else is as with any cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from oarlock import LLM, SamplingParams
from oarlock.backend_api import AttentionSpec, Capabilities
from oarlock.backend_api.runtime import AttentionParams
from oarlock.errors import ConfigError, UnsupportedByBackend, WeightMismatch
from oarlock.runtime.choice import choose_attention
from oarlock.runtime.reference.attention import FunctionalReferenceAttention, ReferenceAttention, narrowed
from safetensors.torch import load_file, save_file
from test_models_sharding import Host

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = [(0.03, 0.02), (0.05, 0.01), (0.02, 0.04)]
LIMIT = 2e-4  # a key near a tie between two steps falls either way where float32 and float32 differ in order


# ---------------------------------------------------------------- the reference
def test_what_the_cache_cannot_hold_becomes_the_largest_it_can() -> None:
    x = torch.tensor([0.3, 448.0, 470.0, -1e9, torch.inf])
    assert narrowed(x, E4M3).float().tolist() == [0.3125, 448.0, 448.0, -448.0, 448.0]
    assert narrowed(x * 128, E5M2).float().tolist() == [40.0, 57344.0, 57344.0, -57344.0, 57344.0]
    assert narrowed(torch.tensor(1e5), torch.float32).item() == 1e5
    assert narrowed(torch.tensor(torch.nan), E4M3).isnan()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", [ReferenceAttention, FunctionalReferenceAttention])
def test_attention_over_an_fp8_cache_is_that_over_rounded_keys_and_values(kind: type[ReferenceAttention], dtype: torch.dtype) -> None:
    params = AttentionParams(4, 2, 8, 8**-0.5)
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(20, heads, 8, generator=g) for heads in (4, 2, 2))
    tables, lens, starts = torch.tensor([[2, 3]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
    slots = torch.arange(20, dtype=torch.int32) + 32
    out = []
    for cache_dtype, key, value in ((dtype, k, v), (torch.float32, narrowed(k, dtype).float(), narrowed(v, dtype).float())):
        attention = kind(16, cache_dtype, params)
        cache = tuple(torch.full(shape, torch.nan).to(cache_dtype) for shape in attention.kv_layout(5))
        cache = attention.write_kv(cache, key, value, slots)
        cache = attention.copy_blocks(cache, torch.tensor([2, 3], dtype=torch.int32), torch.tensor([4, 1], dtype=torch.int32))
        moved = attention.metadata(torch.tensor([[4, 1]], dtype=torch.int32), lens, starts, 20, 20)
        assert all(t.dtype == cache_dtype for t in cache)
        out.append((attention.attend(q, cache, attention.metadata(tables, lens, starts, 20, 20), params), attention.attend(q, cache, moved, params)))
    assert torch.equal(out[0][0], out[1][0]) and torch.equal(out[0][1], out[0][0])


def test_an_implementation_that_does_not_name_the_cache_dtype_never_meets_it() -> None:
    params = AttentionParams(4, 2, 8, 1.0)
    records = [AttentionSpec("fast", "none:none", 10), AttentionSpec("odd", "none:none", 5, kv_dtypes=("auto", "fp8_e5m2"))]
    made, name, rejected = choose_attention(records, Host(), params, "full", "bfloat16", 16, "fp8_e4m3")
    assert name == "reference" and made.dtype == E4M3
    assert "fast: it serves a cache of auto, not of fp8_e4m3" in rejected and "odd: it serves a cache of auto, fp8_e5m2" in rejected


# ---------------------------------------------------------------- whole models
def reference(path: Path, prompt: list[int], scales: list[tuple[float, float]], dtype: torch.dtype) -> torch.Tensor:
    """transformers' log-probabilities, with keys and values rounded as the cache rounds them."""
    import transformers
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
        return narrowed(x / scale, dtype).float() * scale

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        k_scale, v_scale = scales[module.layer_idx]
        return eager_attention_forward(module, query, rounded(key, k_scale), rounded(value, v_scale), *args, **more)

    transformers.AttentionInterface.register("rounded", attend)
    transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.eager_mask)
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="rounded").eval()
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def logprobs(path: Path, prompt: list[int], **options: Any) -> torch.Tensor:
    options = {"device": "cpu", "dtype": "float32", "num_blocks_override": 16, "kv_cache_dtype": "fp8", **options}
    with LLM(str(path), skip_tokenizer_init=True, max_num_seqs=2, max_model_len=64, max_logprobs=320, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, prompt_logprobs=320)
        (out,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
    return torch.tensor([[row[token].logprob for token in range(320)] for row in out.prompt_logprobs[1:]])


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).pow(2).mean() / want.pow(2).mean())


def with_scales(tiny: Any, folder: Path, scales: dict[str, Any]) -> Path:
    """The checkpoint with more tensors, in a folder of its own."""
    shutil.copytree(tiny.path, folder)
    tensors = load_file(folder / "model.safetensors") | {name: torch.as_tensor(value) for name, value in scales.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_checkpoint(scales: list[tuple[float, float]]) -> dict[str, float]:
    return {f"model.layers.{n}.self_attn.{kind}_scale": value for n, pair in enumerate(scales) for kind, value in zip("kv", pair, strict=True)}


@pytest.mark.parametrize("device", ["cpu", "sim-eager", "sim-static"])
def test_logits_are_those_of_a_model_whose_keys_and_values_are_rounded(checkpoint, tmp_path, device):
    tiny = checkpoint("llama")
    (prompt,) = tiny.prompts(40)
    scaled = with_scales(tiny, tmp_path / "scaled", of_checkpoint(SCALES))
    want = reference(tiny.path, prompt, SCALES, E4M3)
    assert nmse(logprobs(scaled, prompt, device=device), want) < LIMIT
    assert nmse(reference(tiny.path, prompt, [(1.0, 1.0)] * 3, E4M3), want) > 2 * LIMIT, "the scales must matter"


def test_scales_come_from_the_file_then_from_the_checkpoint_and_else_are_one(checkpoint, tmp_path):
    tiny = checkpoint("llama")
    (prompt,) = tiny.prompts(40)
    plain, shared = reference(tiny.path, prompt, [(1.0, 1.0)] * 3, E4M3), reference(tiny.path, prompt, [(k, k) for k, _ in SCALES], E4M3)
    assert nmse(logprobs(tiny.path, prompt), plain) < LIMIT
    old = with_scales(tiny, tmp_path / "old", {f"model.layers.{n}.self_attn.kv_scale": torch.tensor([k]) for n, (k, _) in enumerate(SCALES)})
    assert nmse(logprobs(old, prompt), shared) < LIMIT
    file = tmp_path / "scales.json"
    file.write_text(json.dumps({"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {str(n): k for n, (k, _) in enumerate(SCALES)}}}}))
    other = with_scales(tiny, tmp_path / "other", of_checkpoint([(9.0, 9.0)] * 3))
    assert nmse(logprobs(other, prompt, quantization_param_path=str(file)), shared) < LIMIT


def test_e5m2_takes_no_scale_and_other_caches_leave_them_alone(checkpoint, tmp_path):
    tiny = checkpoint("llama")
    (prompt,) = tiny.prompts(40)
    scaled = with_scales(tiny, tmp_path / "scaled", of_checkpoint(SCALES))
    assert nmse(logprobs(scaled, prompt, kv_cache_dtype="fp8_e5m2"), reference(tiny.path, prompt, [(1.0, 1.0)] * 3, E5M2)) < LIMIT
    assert torch.equal(logprobs(scaled, prompt, kv_cache_dtype="auto"), logprobs(tiny.path, prompt, kv_cache_dtype="auto"))


def generate(path: Path, prompts: list[list[int]], tokens: int, **options: Any) -> tuple[list[list[int]], list[int]]:
    """(tokens, prompt tokens from the prefix cache) of each prompt, the second time that it is asked."""
    options = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "fp8", "num_blocks_override": 64, **options}
    with LLM(str(path), skip_tokenizer_init=True, max_num_seqs=4, max_model_len=128, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        out = [llm.generate(prompt_token_ids=part, sampling_params=params, use_tqdm=False) for part in (prompts, prompts)]
        return [list(one.outputs[0].token_ids) for one in out[1]], [one.num_cached_tokens for one in out[1]]


def test_prefixes_are_reused_and_blocks_swapped_with_equal_answers(checkpoint):
    tiny = checkpoint("llama")
    prompts = tiny.prompts(50, 40, 45)
    alone = [generate(tiny.path, [prompt], 30, enable_prefix_caching=False)[0][0] for prompt in prompts]
    again, cached = generate(tiny.path, prompts, 30)
    assert again == alone and min(cached) >= 32
    swapped, _ = generate(tiny.path, prompts, 30, num_blocks_override=10, swap_space=0.1, preemption_mode="swap", enable_prefix_caching=False)
    assert swapped == alone


def test_a_block_takes_the_bytes_of_its_dtype(checkpoint):
    tiny = checkpoint("llama")
    held = {}
    for kind in ("auto", "fp8"):
        with LLM(str(tiny.path), device="cpu", dtype="float32", kv_cache_dtype=kind, kv_cache_memory="3MiB", skip_tokenizer_init=True, max_num_seqs=64) as llm:
            held[kind] = llm._engine.info.num_blocks
    assert held["fp8"] + 1 == 4 * (held["auto"] + 1)  # the null block is none of those that are held


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"model.layers.1.self_attn.k_scale": 0.1}, "layer 1 of the checkpoint has k_scale and not the other"),
        ({"model.layers.0.self_attn.kv_scale": torch.ones(2)}, r"model\.layers\.0\.self_attn\.kv_scale has shape \[2\]"),
        ({"model.layers.0.self_attn.kv_scale": -1.0}, r"kv_scale is -1\.0; a scale must be a number above 0"),
    ],
)
def test_a_scale_that_cannot_be_is_named(checkpoint, tmp_path, scales, words):
    path = with_scales(checkpoint("llama"), tmp_path / "wrong", scales)
    with pytest.raises(WeightMismatch, match=words):
        logprobs(path, [5, 6, 7])


def test_a_wrong_file_ends_the_start_before_a_worker_is_made(checkpoint, tmp_path):
    (tmp_path / "scales.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--quantization-param-path .*scales\.json: must hold"):
        logprobs(checkpoint("llama").path, [5, 6, 7], quantization_param_path=str(tmp_path / "scales.json"))


def test_a_device_that_keeps_no_such_cache_says_what_it_keeps(checkpoint, monkeypatch):
    import oarlock_cpu.device

    own = oarlock_cpu.device.CpuDevice.capabilities.fget
    fields = ("dtypes", "fast_dtypes", "block_sizes", "host_is_device", "kv_update", "collectives", "default_swap_bytes")
    monkeypatch.setattr(
        oarlock_cpu.device.CpuDevice, "capabilities", property(lambda self: Capabilities(**{name: getattr(own(self), name) for name in fields}))
    )
    with pytest.raises(UnsupportedByBackend, match="--kv-cache-dtype fp8_e4m3: .* keeps auto"):
        logprobs(checkpoint("llama").path, [5, 6, 7])
