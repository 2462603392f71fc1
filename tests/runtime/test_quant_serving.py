"""Quantised checkpoints by the ways that users take: `LLM`, a plugin's method, several processes, made-up weights, the plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from oarlock import LLM, SamplingParams
from oarlock.conformance.quantised_models import linears_of, quantise
from oarlock.errors import ConfigError, ModelError
from safetensors.torch import load_file, save_file


def folder_of(path: Path, tiny: Any, tensors: dict[str, torch.Tensor], settings: dict[str, Any] | None) -> Path:
    """The checkpoint with other tensors and settings."""
    shutil.copytree(tiny.path, path)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config if settings is None else {**config, "quantization_config": settings}))
    return path


def generate(path: Path, prompt: list[int], tokens: int = 24, **options: Any) -> list[int]:
    options = {"device": "cpu", "dtype": "float32", "num_blocks_override": 32, **options}
    with LLM(str(path), skip_tokenizer_init=True, max_num_seqs=2, max_model_len=128, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (out,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
    return list(out.outputs[0].token_ids)


def awq(weight: torch.Tensor, group: int = 32) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(AWQ's tensors, the weight that they mean), of a weight [out, in]. Half byte j of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[j]."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    plain = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)

    def packed(values: torch.Tensor) -> torch.Tensor:
        words = sum(values[:, column::8].long() << (4 * place) for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    return {"qweight": packed(codes.flatten(1).t()), "qzeros": packed(zeros.t()), "scales": scales.t().half()}, plain


def test_a_plugin_reads_a_format_that_core_does_not_know(checkpoint, tmp_path):
    tiny = checkpoint("llama")
    tensors, plain = load_file(tiny.path / "model.safetensors"), load_file(tiny.path / "model.safetensors")
    for name in linears_of(tensors):
        stored, plain[name] = awq(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{key}": value for key, value in stored.items()}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantised, dequantised = folder_of(tmp_path / "awq", tiny, tensors, settings), folder_of(tmp_path / "plain", tiny, plain, None)
    (prompt,) = tiny.prompts(30)
    assert generate(quantised, prompt, quantization="awq") == generate(dequantised, prompt)


@pytest.mark.full
def test_several_processes_serve_a_quantised_model(checkpoint, tmp_path):
    tiny = checkpoint("llama")
    made = quantise("gptq-4-order", load_file(tiny.path / "model.safetensors"))
    quantised, plain = folder_of(tmp_path / "quantised", tiny, made.tensors, made.settings), folder_of(tmp_path / "plain", tiny, made.plain, None)
    (prompt,) = tiny.prompts(30)
    assert generate(quantised, prompt, tensor_parallel_size=2, kv_cache_dtype="auto") == generate(plain, prompt)


@pytest.mark.parametrize("kind", ["gptq-4-order", "w8a8-static", "fp8-block"])
def test_made_up_weights_are_quantised_as_the_settings_say(checkpoint, tmp_path, kind):
    tiny = checkpoint("llama")
    path = folder_of(tmp_path / "q", tiny, {}, quantise(kind, {}).settings)
    (path / "model.safetensors").unlink()
    assert len(generate(path, [5, 6, 7], tokens=3, load_format="dummy")) == 3


def test_what_no_reader_reads_ends_the_start_in_one_line(checkpoint, tmp_path):
    tiny = checkpoint("llama")
    path = folder_of(tmp_path / "q", tiny, {}, {"quant_method": "aqlm", "nbits_per_codebook": 16})
    with pytest.raises(ModelError, match=r"q is quantised \(aqlm\), which this version does not read"):
        generate(path, [5])
    with pytest.raises(ConfigError, match="--quantization squeezellm: this version of Oarlock does not read it"):
        generate(path, [5], quantization="squeezellm")
    path = folder_of(tmp_path / "p", tiny, {}, {"quant_method": "gptq", "bits": 5})
    with pytest.raises(ModelError, match=r"settings of gptq that cannot be read: bits is 5; gptq is read with 2, 3, 4, 8"):
        generate(path, [5])


def test_transformers_own_code_is_not_served_quantised(checkpoint, tmp_path):
    tiny = checkpoint("granite")
    path = folder_of(tmp_path / "q", tiny, {}, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="GraniteForCausalLM has no native model file: transformers' own code is served with plain weights only"):
        generate(path, [5])
