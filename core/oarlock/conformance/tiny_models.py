"""Tiny random models in folders of the usual form, and their float64 answers on the host.

Owns: the configurations, how weights are drawn, the oracle's forward pass.
Reads: `runtime.models`, `runtime.weights`, the references.
Never: downloads anything; uses a device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device, IdentityCommunicator, bind_ops
from oarlock.config.sections import ModelConfig
from oarlock.conformance.cases import CheckFailed
from oarlock.conformance.quantised_models import quantise
from oarlock.model_summary import ModelSummary, load_summary
from oarlock.runtime.layers.decoder import StepContext
from oarlock.runtime.layers.rope import rope_table
from oarlock.runtime.loader import open_checkpoint
from oarlock.runtime.models import build_model
from oarlock.runtime.reference import ReferenceAttention
from oarlock.runtime.weights import WeightLoader

VOCAB, MAX_LEN, WINDOW = 131, 96, 20
NEAR_TIE = 1e-4  # where the oracle's two best lie closer, either token is right (float32)
_BASE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_BASE |= {"vocab_size": VOCAB, "max_position_embeddings": MAX_LEN, "intermediate_size": 96, "torch_dtype": "float32", "rms_norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**_BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    "hybrid": {
        **_BASE, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
    },
    "moe": {
        **_BASE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "norm_topk_prob": True, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
# In half precision a router's near-tie falls either way, and the logits with it: there every token goes to every expert.
MODELS["moe-all"] = {**MODELS["moe"], "num_experts_per_tok": MODELS["moe"]["num_experts"]}
# name -> kind of `quantised_models`: weights alone, so that the oracle is the model of what the codes mean.
QUANTISED = {"quantized-gptq": "gptq-4-order", "quantized-fp8": "fp8"}


class _Host(Device):
    """The oracle's device: plain host tensors."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(host_is_device=True)

    def activate(self) -> None:
        """Nothing to make current."""


class TinyModel:
    """One model on disk and its oracle."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any] | None = None) -> None:
        """`name` is one of MODELS or QUANTISED; `config` replaces its config.json."""
        self.name, self.folder, config = name, folder, config or MODELS.get(name, MODELS["dense"])
        kind = QUANTISED.get(name)
        plain = folder / "plain" if kind else folder
        self.summary = _write_config(plain, config)
        ops = bind_ops([], "float32")
        self.model, specs = build_model(
            self.summary, ops, IdentityCommunicator(0, 1), lambda params, _: ReferenceAttention(16, torch.float64, params), 16, torch.float64
        )
        tensors = _draw(specs)
        if kind:
            made = quantise(kind, tensors)
            tensors, stored = made.plain, made.tensors
        save_file(tensors, str(plain / "model.safetensors"))
        checkpoint = open_checkpoint(self.summary, ModelConfig(model=str(plain)))
        self.weights = WeightLoader(checkpoint, _Host(), torch.float64, 0, 1, {}).load(specs)
        checkpoint.close()
        self.weights.setdefault("lm_head", {"weight": self.weights["embed"]["weight"]})
        self.weights["rope"] = {key: rope_table(spec, config["max_position_embeddings"]) for key, spec in self.model.spec.rope.items()}
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        if kind:
            self.summary = _write_config(folder, {**config, "quantization_config": made.settings})
            save_file(stored, str(folder / "model.safetensors"))

    @torch.no_grad()
    def logprobs(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Log-probabilities after each token, [len(tokens), vocab_size] float64: the whole sequence at once, no cache kept."""
        if tokens not in self._known:
            count, model = len(tokens), self.model
            blocks = -(-count // 16)
            table = torch.arange(1, blocks + 1, dtype=torch.int32)[None]
            positions = torch.arange(count, dtype=torch.int32)
            ends, starts = torch.tensor([count], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
            regions = [[(0, count, attention.metadata(table, ends, starts, count, count))] for attention in model.attentions]
            slots = [positions + 16 for _ in model.attentions]  # block b of the table is block b + 1 of the cache
            step = StepContext(positions, slots, regions, torch.ones(count, dtype=torch.bool), self.weights["rope"])
            shapes = model.attentions[0].kv_layout(blocks + 1)
            cache = [tuple(torch.zeros(s, dtype=torch.float64) for s in shapes) for _ in model.home]
            hidden, _ = model.forward(self.weights, torch.tensor(tokens), cache, step)
            self._known[tokens] = model.head(self.weights, hidden).double().log_softmax(-1)
        return self._known[tokens]

    def check_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Every token is the oracle's best one, near-ties apart; later tokens are judged on what came before them. Raises CheckFailed."""
        rows = self.logprobs((*prompt, *output[:-1]))[len(prompt) - 1 :]
        for n, (row, token) in enumerate(zip(rows, output, strict=False)):
            if int(row.argmax()) != token and float(row.max() - row[token]) > NEAR_TIE:
                raise CheckFailed(
                    f"token {n} of {len(output)}, after {len(prompt)} prompt tokens, is {token}; "
                    f"the reference's best is {int(row.argmax())}, {float(row.max() - row[token]):.3g} above it"
                )


def _write_config(folder: Path, config: dict[str, Any]) -> ModelSummary:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_summary(ModelConfig(model=str(folder), generation_config="none"))


def _draw(specs: list[Any]) -> dict[str, torch.Tensor]:
    """Weights by checkpoint name: products keep their scale, so that logits spread and the best token is clear."""
    random, tensors = torch.Generator().manual_seed(20), {}
    for spec in specs:
        for name, shape in zip(spec.sources, spec.shapes, strict=True):
            drawn = torch.randn(shape, generator=random)
            if spec.kind == "norm" or len(shape) == 1:
                tensors[name] = drawn * 0.1 + (0.0 if spec.unit_offset else 1.0 if spec.kind == "norm" else 0.0)
            elif spec.kind == "embedding":
                tensors[name] = drawn * 0.2
            else:
                tensors[name] = drawn * (1.5 / math.sqrt(shape[-1]))
    return tensors
