"""Tiny random checkpoints of every family, written by transformers, and transformers' own greedy tokens for them.

Owns: what each family's checkpoint looks like, its seed, and when a differing token is excused.
Reads: transformers, torch (both only inside functions, so that importing this module is cheap).

Weights are scaled so that greedy continuations wander: `Tiny.greedy` refuses a reference with fewer than 16 distinct
tokens. A token that differs is excused only where the reference's two best logits lie within NEAR_TIE; such places are
listed in NEAR_TIES and shown at the end of the run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEW_TOKENS = 64
NEAR_TIE = 1e-4
DISTINCT = 16
WINDOW = 16
NEAR_TIES: list[str] = []

_SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_OPT = {k: v for k, v in _SIZES.items() if k not in ("num_key_value_heads", "head_dim", "intermediate_size")} | {"ffn_dim": 96}
_GPT2 = {
    "vocab_size": 257, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_GEMMA = {**_SIZES, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0 + 0.05 * i for i in range(4)], "long_factor": [2.0 + i for i in range(4)]}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a checkpoint is made: classes of transformers, config values, and how its weights are drawn."""

    model: str  # class of transformers
    config: str
    values: dict[str, Any]
    seed: int = 0
    gain: float = 2.0  # standard deviation of a linear's output for an input of ones; higher: attention and feed-forward matter more
    embedding: float = 0.5  # standard deviation
    scales: dict[str, float] = field(default_factory=dict)  # part of a parameter's name -> factor on all of it


FAMILIES: dict[str, Recipe] = {
    "llama": Recipe("LlamaForCausalLM", "LlamaConfig", _SIZES),
    "llama-biases": Recipe(
        "LlamaForCausalLM", "LlamaConfig", {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, embedding=0.2,
    ),
    "mistral": Recipe("MistralForCausalLM", "MistralConfig", {**_SIZES, "sliding_window": WINDOW}),
    "smollm3": Recipe("SmolLM3ForCausalLM", "SmolLM3Config", {**_SIZES, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]}),
    "smollm3-window": Recipe(
        "SmolLM3ForCausalLM", "SmolLM3Config",
        {**_SIZES, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "qwen2": Recipe("Qwen2ForCausalLM", "Qwen2Config", _SIZES),
    "qwen2-window": Recipe(
        "Qwen2ForCausalLM", "Qwen2Config",
        {**_SIZES, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": Recipe("Qwen3ForCausalLM", "Qwen3Config", _SIZES, gain=3.0, scales={"q_norm": 3.0}),
    "gemma2": Recipe("Gemma2ForCausalLM", "Gemma2Config", _GEMMA, gain=3.0, embedding=0.03, scales={"post_": 4.0, "q_proj": 3.0}),
    "gemma3": Recipe(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**_GEMMA, "num_hidden_layers": 6},
        gain=3.0, embedding=0.05, scales={"post_": 30.0, "q_norm": 30.0, "k_norm": 8.0},
    ),
    "phi3": Recipe("Phi3ForCausalLM", "Phi3Config", {**_SIZES, "partial_rotary_factor": 0.5, "sliding_window": None}),
    "phi3-window": Recipe("Phi3ForCausalLM", "Phi3Config", {**_SIZES, "sliding_window": WINDOW}),
    "phi3-longrope": Recipe(
        "Phi3ForCausalLM", "Phi3Config",
        {**_SIZES, "partial_rotary_factor": 0.5, "rope_scaling": _LONGROPE, "original_max_position_embeddings": 256},
    ),
    "opt": Recipe("OPTForCausalLM", "OPTConfig", {**_OPT, "word_embed_proj_dim": 64}, gain=4.0, embedding=0.2),
    "opt-350m": Recipe(
        "OPTForCausalLM", "OPTConfig", {**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        gain=1.0, embedding=0.3, scales={"positions": 3.0, "q_proj": 6.0, "bias": 0.3},
    ),
    "gpt2": Recipe("GPT2LMHeadModel", "GPT2Config", _GPT2, gain=4.0, embedding=0.2),
    "mixtral": Recipe("MixtralForCausalLM", "MixtralConfig", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": Recipe(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**_SIZES, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "qwen3-moe-mixed": Recipe(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**_SIZES, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": False,
         "mlp_only_layers": [3], "decoder_sparse_step": 2},
        gain=2.5,
    ),
}  # fmt: skip


_NO_HEAD_DIM = {k: v for k, v in _SIZES.items() if k != "head_dim"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

# Architectures without a file in oarlock.runtime.models.
GENERIC: dict[str, Recipe] = {
    "granite": Recipe(
        "GraniteForCausalLM", "GraniteConfig",
        {**_SIZES, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.8, "attention_multiplier": 0.3},
    ),
    "granite-dynamic": Recipe(
        "GraniteForCausalLM", "GraniteConfig",
        {**_SIZES, "max_position_embeddings": 256, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "starcoder2": Recipe("Starcoder2ForCausalLM", "Starcoder2Config", {**_SIZES, "sliding_window": WINDOW}, gain=3.0, embedding=0.2),
    "cohere2": Recipe(
        "Cohere2ForCausalLM", "Cohere2Config", {**_NO_HEAD_DIM, "num_hidden_layers": 4, "sliding_window": WINDOW}, gain=3.0, embedding=0.2,
    ),
    "gpt-neox": Recipe("GPTNeoXForCausalLM", "GPTNeoXConfig", _NO_HEAD_DIM, scales={"query_key_value": 2.0}),
    "olmoe": Recipe("OlmoeForCausalLM", "OlmoeConfig", {**_NO_HEAD_DIM, **_EXPERTS}),
}  # fmt: skip


@dataclass(slots=True)
class Greedy:
    """A reference continuation."""

    tokens: list[int]
    gaps: list[float]  # at each step, between the two best logits


@dataclass(slots=True)
class Tiny:
    """A checkpoint on disk."""

    name: str
    path: Path
    recipe: Recipe
    _model: Any = None
    _known: dict[tuple[Any, ...], Greedy] = field(default_factory=dict)

    @classmethod
    def make(cls, name: str, path: Path, recipe: Recipe | None = None) -> Tiny:
        """Write the folder: config.json, generation_config.json, model.safetensors. The same bits for the same recipe."""
        import transformers

        recipe = recipe or {**FAMILIES, **GENERIC}[name]
        _quiet()
        config = getattr(transformers, recipe.config)(**json.loads(json.dumps(recipe.values)))
        model = getattr(transformers, recipe.model)(config).float().eval()
        _draw(model, recipe)
        model.save_pretrained(path)
        return cls(name, path, recipe)

    def greedy(self, prompt: list[int], new_tokens: int = NEW_TOKENS) -> Greedy:
        """transformers' own greedy continuation in float32, with its own cache."""
        import torch

        key = (tuple(prompt), new_tokens)
        if key not in self._known:
            with torch.no_grad():
                out = self._reference().generate(
                    torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=new_tokens,
                    do_sample=False, return_dict_in_generate=True, output_logits=True,
                )  # fmt: skip
            best = torch.stack(out.logits)[:, 0].float().topk(2).values
            tokens = out.sequences[0, len(prompt) :].tolist()
            assert new_tokens < NEW_TOKENS or len(set(tokens)) >= DISTINCT, f"{self.name}: only {len(set(tokens))} distinct tokens: {tokens}"
            self._known[key] = Greedy(tokens, (best[:, 0] - best[:, 1]).tolist())
        return self._known[key]

    def _reference(self) -> Any:
        import torch
        import transformers

        if self._model is None:
            _quiet()
            found = getattr(transformers, self.recipe.model).from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager")
            if found.can_generate():
                found.generation_config.eos_token_id = None  # a continuation has its full length
            self._model = found.eval()
        return self._model

    def prompts(self, *lengths: int, seed: int = 7) -> list[list[int]]:
        """Random token ids, one prompt for each length."""
        import random

        draw, vocab = random.Random(seed), self.recipe.values["vocab_size"]
        return [[draw.randrange(3, vocab) for _ in range(length)] for length in lengths]

    def check(self, prompt: list[int], got: list[int], what: str = "") -> None:
        """The tokens are the reference's, up to the first near-tie, after which texts may part.

        Raises:
            AssertionError: they are not.
        """
        want = self.greedy(prompt, len(got))
        for at, (ours, theirs) in enumerate(zip(got, want.tokens, strict=True)):
            if ours != theirs:
                gap = want.gaps[at]
                place = f"{self.name} {what} prompt of {len(prompt)}, token {at}: got {ours}, reference {theirs}, gap {gap:.2e}"
                assert gap < NEAR_TIE, f"{place}\n got {got}\nwant {want.tokens}"
                NEAR_TIES.append(place)
                return


def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _draw(model: Any, recipe: Recipe) -> None:
    """Draw every parameter, in order of names, from one seed."""
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, value in sorted(model.named_parameters()):
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 2 and ("embed" in name or ".wte" in name or ".wpe" in name):
                # Rows of one length: where the head is tied, no token wins by its length alone.
                value.copy_(noise / noise.norm(dim=1, keepdim=True) * noise.shape[1] ** 0.5 * recipe.embedding)
            elif value.dim() >= 2:
                fan_in = value.shape[0] if "c_attn" in name or "c_proj" in name or "c_fc" in name else value.shape[-1]
                value.copy_(noise * recipe.gain / fan_in**0.5)
            elif "bias" in name:
                value.copy_(noise * 0.2)
            else:
                value.add_(noise * 0.2)  # a norm: around one, or around zero where the model adds one
            for part, factor in recipe.scales.items():
                if part in name:
                    value.mul_(factor)
