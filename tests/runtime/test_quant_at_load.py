"""Plain checkpoints quantised when they are read: the logits are those of what the codes mean, in every shape that a linear has, over ranks, on every device."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, Tiny
from oarlock.backend_api.runtime import IdentityCommunicator
from oarlock.conformance.quantised_models import linears_of, quantise
from oarlock.errors import ConfigError, ModelError, WeightMismatch
from oarlock.quantization import OWN
from oarlock.runtime.loader.safetensors_files import SafetensorsCheckpoint
from oarlock.runtime.quantization.at_load import AtLoad, rounded4, rounded8
from safetensors.torch import load_file
from test_models_sharding import TOKENS, logits_of, ranks
from test_quant_models import nmse
from test_quant_serving import folder_of, generate

ALONE = IdentityCommunicator(0, 1)


def meaning(weight: torch.Tensor, method: str, prefix: str, *, is_head: bool = False) -> torch.Tensor:
    """What the codes of a linear [out, in] mean, computed from them one column at a time."""
    found = AtLoad({"quant_method": method}).linear(prefix, is_head)
    assert found is not None
    read = found.read({"weight": weight}, *weight.shape)
    per_group = 32 if found.scheme == "int4" else weight.shape[1]
    offsets = torch.zeros_like(read.scales) if read.offsets is None else read.offsets
    columns = [read.codes[:, k].double() * read.scales[:, k // per_group].double() + offsets[:, k // per_group] for k in range(weight.shape[1])]
    return torch.stack(columns, 1).float()


def dequantised(folder: Path, tiny: Tiny, method: str, *, head: bool = False) -> Path:
    """The checkpoint whose linears hold what their codes mean."""
    tensors = load_file(tiny.path / "model.safetensors")
    turned = tiny.name == "gpt2"
    for name in linears_of(tensors):
        weight = tensors[name].t() if turned else tensors[name]
        found = meaning(weight, method, name.removesuffix(".weight"))
        tensors[name] = found.t() if turned else found
    if head and "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = meaning(tensors["lm_head.weight"], method, "lm_head", is_head=True)
    elif head:  # one copy serves both
        tensors["model.embed_tokens.weight"] = meaning(tensors["model.embed_tokens.weight"], method, "lm_head", is_head=True)
    return folder_of(folder, tiny, tensors, None)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2", "opt-350m", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_logits_are_those_of_what_the_codes_mean_also_over_ranks(checkpoint, tmp_path, family, method):
    assert family in FAMILIES
    tiny = checkpoint(family)
    (prompt,) = tiny.prompts(TOKENS)
    want = logits_of(dequantised(tmp_path / "plain", tiny, method), prompt, ALONE)
    loaded: dict[str, int] = {}
    got = logits_of(tiny.path, prompt, ALONE, loaded, method)
    assert nmse(got, want) < 1e-8
    assert nmse(got, logits_of(tiny.path, prompt, ALONE)) > 1e-7  # something was quantised
    assert not any(name.endswith(".weight") and "norm" not in name and "router" not in name for name in loaded)
    for found in ranks(2, lambda comm: logits_of(tiny.path, prompt, comm, None, method)):
        assert nmse(found, want) < 1e-8


@pytest.mark.parametrize(("device", "method", "tied"), [("cpu", "int8", True), ("cpu", "int4", False), ("sim-eager", "int8", False), ("sim-static", "int4", True)])
def test_a_device_with_kernels_multiplies_the_head_in_8_bits_and_others_keep_it(checkpoint, tmp_path, device, method, tied):
    tiny = checkpoint("gemma2" if tied else "llama")
    assert tied == ("lm_head.weight" not in load_file(tiny.path / "model.safetensors"))
    (prompt,) = tiny.prompts(30)
    plain = dequantised(tmp_path / "plain", tiny, method, head=device == "cpu")
    assert generate(tiny.path, prompt, device=device, quantization=method) == generate(plain, prompt, device=device)


def test_two_processes_give_the_tokens_of_one(checkpoint):
    tiny = checkpoint("llama")
    (prompt,) = tiny.prompts(30)
    assert generate(tiny.path, prompt, quantization="int4", tensor_parallel_size=2) == generate(tiny.path, prompt, quantization="int4")


def test_no_plain_linear_outlives_its_quantising(checkpoint, monkeypatch):
    alive: list[weakref.ref[torch.Tensor]] = []
    most, get = [0], SafetensorsCheckpoint.get

    def watched(self: SafetensorsCheckpoint, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = get(self, name, dtype)
        if "proj" in name:
            gc.collect()
            alive.append(weakref.ref(tensor))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(SafetensorsCheckpoint, "get", watched)
    tiny = checkpoint("llama")
    logits_of(tiny.path, tiny.prompts(TOKENS)[0], ALONE, None, "int8")
    assert len(alive) > 10 and most[0] <= 2  # the one before, at most


def numbers() -> torch.Tensor:
    """[rows, groups, columns], with a group of zeros, one of equal numbers, and an outlier."""
    weight = torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[5, 0], weight[5, 1], weight[6, 0, 7] = 0.0, 0.25, 3.0
    return weight


def test_eight_bits_are_the_nearest_codes():
    weight = numbers()
    codes, scales = rounded8(weight)
    assert torch.equal(scales, scales.half().float()) and torch.equal(codes, codes.to(torch.int8).float())
    limit = torch.maximum(scales / 2, weight.abs().amax(-1) * 2.0**-11)  # half a step, or what a scale's own rounding cuts off
    assert bool(((codes * scales[..., None] - weight).abs().amax(-1) <= limit * 1.001).all())


def test_four_bits_are_nearer_than_plain_rounding():
    weight = numbers()
    codes, scales, offsets = rounded4(weight)
    assert torch.equal(scales, scales.half().float()) and torch.equal(offsets, offsets.half().float())
    assert torch.equal(codes, codes.to(torch.uint8).float()) and float(codes.max()) == 15
    back = codes * scales[..., None] + offsets[..., None]
    assert torch.equal(back[5, :2], weight[5, :2])
    span = (weight.amax(-1) - weight.amin(-1)).clamp(min=1e-9)[..., None] / 15
    plain = ((weight - weight.amin(-1, keepdim=True)) / span).round() * span + weight.amin(-1, keepdim=True)
    error, of_plain = (back - weight).pow(2).sum(-1), (plain - weight).pow(2).sum(-1)
    assert float(error.sum()) < 0.9 * float(of_plain.sum())
    assert bool((error <= of_plain * 1.05 + 1e-12).all())  # and no group much farther


def test_made_up_weights_are_quantised_too(checkpoint):
    assert len(generate(checkpoint("mixtral").path, [5, 6, 7], tokens=3, load_format="dummy", quantization="int4")) == 3


def test_what_cannot_be_quantised_ends_the_start_in_one_line(checkpoint, tmp_path):
    tiny = checkpoint("llama")
    made = quantise("gptq-4", load_file(tiny.path / "model.safetensors"))
    path = folder_of(tmp_path / "q", tiny, made.tensors, made.settings)
    with pytest.raises(ConfigError, match=r"--quantization int8: .*q is quantised with gptq by its own settings; leave the flag out"):
        generate(path, [5], quantization="int8")
    with pytest.raises(ModelError, match="quantised weights, and GraniteForCausalLM has no native model file"):
        generate(checkpoint("granite").path, [5], quantization="int8")
    tensors = load_file(tiny.path / "model.safetensors")
    name = linears_of(tensors)[3]
    tensors[name][0, 0] = float("inf")
    with pytest.raises(WeightMismatch, match=rf"{name.removesuffix('.weight')}: it holds numbers that are not finite"):
        generate(folder_of(tmp_path / "inf", tiny, tensors, None), [5], quantization="int4")


def test_each_method_is_offered_once():
    assert [method.name for method in OWN if method.of_plain] == ["int8", "int4"]
