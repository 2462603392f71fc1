"""Quantised tiny models give the logits of their dequantised selves: every kind, over ranks, on the cpu and both simulated devices.

The checkpoints are packed by `oarlock.conformance.quantised_models`, which shares nothing with the readers. What activations
become is computed by transformers' own model with hooks before its linears.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Tiny
from oarlock import LLM, SamplingParams
from oarlock.backend_api.runtime import IdentityCommunicator
from oarlock.conformance.quantised_models import INPUT_AMAX, KINDS, linears_of, quantise
from oarlock.errors import ConfigError
from safetensors.torch import load_file, save_file
from test_models_sharding import TOKENS, logits_of, ranks

LIMIT = {"none": 1e-8, "int8": 1e-5, "fp8": 1e-4}  # rounding to a step falls either way where float32 and float32 differ in order


def written(folder: Path, tiny: Tiny, kind: str, **settings: Any) -> tuple[Path, Path]:
    """(the quantised checkpoint, its dequantised self)."""
    made = quantise(kind, load_file(tiny.path / "model.safetensors"))
    for name, tensors, extra in (("quantised", made.tensors, {"quantization_config": {**made.settings, **settings}}), ("plain", made.plain, {})):
        shutil.copytree(tiny.path, folder / name)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((tiny.path / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, **extra}))
    return folder / "quantised", folder / "plain"


def rounded(x: torch.Tensor, kind: str, parts: int = 1) -> torch.Tensor:
    """What a kind's activations become; where ranks hold a part of the columns each, each by its own scale."""
    if parts > 1:
        return torch.cat([rounded(part, kind) for part in x.chunk(parts, -1)], -1)
    top, dtype = (448.0, torch.float8_e4m3fn) if kind.startswith("fp8") else (127.0, torch.int8)
    groups = x.unflatten(-1, (-1, 16 if kind == "fp8-block" else x.shape[-1]))
    scale = torch.tensor(INPUT_AMAX / top) if kind.endswith("static") else groups.abs().amax(-1, keepdim=True) / top
    codes = (groups / scale).round().clamp(-128, 127) if dtype == torch.int8 else (groups / scale).clamp(-top, top).to(dtype).float()
    return (codes * scale).flatten(-2)


@torch.no_grad()
def reference(plain: Path, kind: str, prompt: list[int], size: int = 1) -> torch.Tensor:
    """transformers' logits of the dequantised model, activations rounded where the kind rounds them, as `size` ranks do it."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    if activations(kind) != "none":
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                parts = size if name.endswith(("o_proj", "down_proj")) else 1
                module.register_forward_pre_hook(lambda _, args, parts=parts: (rounded(args[0], kind, parts),))
    return model(torch.tensor([prompt])).logits[0]


def activations(kind: str) -> str:
    return "int8" if kind.startswith("w8a8") else "fp8" if kind in ("fp8-dynamic", "fp8-static", "fp8-block") else "none"


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).pow(2).mean() / want.pow(2).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_model_also_over_ranks(checkpoint, tmp_path, kind):
    tiny = checkpoint("llama")
    (prompt,) = tiny.prompts(TOKENS)
    quantised, plain = written(tmp_path, tiny, kind)
    want, limit = reference(plain, kind, prompt), LIMIT[activations(kind)]
    loaded: dict[str, int] = {}
    assert nmse(logits_of(quantised, prompt, IdentityCommunicator(0, 1), loaded), want) < limit
    assert not any(".weight" in name and "norm" not in name for name in loaded)
    if kind == "fp8-block":
        with pytest.raises(ConfigError, match=r"--tensor-parallel-size 4 cuts .*down_proj.weight inside its groups of 16 columns; use 3"):
            ranks(4, lambda comm: logits_of(quantised, prompt, comm))
    over_two = reference(plain, kind, prompt, 2) if kind in ("w8a8", "fp8-dynamic") else want
    for found in ranks(2, lambda comm: logits_of(quantised, prompt, comm)):
        assert nmse(found, over_two) < limit


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("kind", ["gptq-4-order", "gptq-8-zeros", "packed-4", "fp8-block"])
def test_experts_are_weight_only_and_their_routers_stay_plain(checkpoint, tmp_path, family, kind):
    tiny = checkpoint(family)
    (prompt,) = tiny.prompts(TOKENS)
    quantised, plain = written(tmp_path, tiny, kind if kind != "fp8-block" else "fp8", **({"ignore": ["lm_head", "re:.*gate$"]} if "gptq" not in kind else {}))
    want = logits_of(plain, prompt, IdentityCommunicator(0, 1))
    assert nmse(logits_of(quantised, prompt, IdentityCommunicator(0, 1)), want) < 1e-8
    for found in ranks(2, lambda comm: logits_of(quantised, prompt, comm)):
        assert nmse(found, want) < 1e-8


@pytest.mark.parametrize("family", ["phi3", "gpt2", "opt-350m"])
def test_fused_and_transposed_linears_are_cut_as_plain_ones(checkpoint, tmp_path, family):
    tiny = checkpoint(family)
    (prompt,) = tiny.prompts(TOKENS)
    if family == "gpt2":  # its plain checkpoint keeps [in, out]; a quantised one does not
        tensors = load_file(tiny.path / "model.safetensors")
        turned = {name: t.t().contiguous() if name in linears_of(tensors) and t.dim() == 2 else t for name, t in tensors.items()}
        source = Tiny(family, tmp_path / "turned", tiny.recipe)
        shutil.copytree(tiny.path, source.path)
        save_file(turned, source.path / "model.safetensors", metadata={"format": "pt"})
        quantised, plain = written(tmp_path, source, "gptq-4")
        save_file({n: t.t().contiguous() if n in linears_of(turned) and t.dim() == 2 else t for n, t in load_file(plain / "model.safetensors").items()}, plain / "model.safetensors")
    else:
        quantised, plain = written(tmp_path, tiny, "gptq-4")
    want = logits_of(plain, prompt, IdentityCommunicator(0, 1))
    for size in (1, 2):
        for found in ranks(size, lambda comm: logits_of(quantised, prompt, comm)):
            assert nmse(found, want) < 1e-8


@pytest.mark.parametrize(("device", "kinds"), [("cpu", ["gptq-3", "fp8-dynamic"]), ("sim-eager", ["gptq-4-order", "fp8-block"]), ("sim-static", ["packed-4-zeros", "w8a8"])])
def test_every_device_computes_with_quantised_weights(checkpoint, tmp_path, device, kinds):
    tiny = checkpoint("llama")
    (prompt,) = tiny.prompts(TOKENS)
    for kind in kinds:
        quantised, plain = written(tmp_path / kind, tiny, kind)
        want = reference(plain, kind, prompt)[:-1].log_softmax(-1)
        options = {"device": device, "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 2, "max_model_len": 64, "max_logprobs": 320}
        with LLM(str(quantised), num_blocks_override=16, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, prompt_logprobs=320)
            (out,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
        rows = out.prompt_logprobs[1:]
        got = torch.tensor([[row[token].logprob for token in range(320)] for row in rows])
        assert nmse(got, want) < max(LIMIT[activations(kind)], 1e-7)
