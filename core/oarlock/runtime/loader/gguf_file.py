"""A .gguf file as a checkpoint: tensors under their Hugging Face names and in Hugging Face's conventions.

Owns: the names of each architecture's tensors, and what the GGUF converter did to them, undone.
Reads: `gguf_header`, `model_summary`, `errors`, `gguf_codes`, `gguf_quant`.
Never: changes the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oarlock.errors import ModelError, WeightMismatch
from oarlock.gguf_header import GGUFTensor, read_header
from oarlock.model_summary import ModelSummary
from oarlock.runtime.loader.checkpoint import Checkpoint, cast
from oarlock.runtime.loader.gguf_codes import BlockQuantization, Form
from oarlock.runtime.loader.gguf_quant import BLOCK_TYPES, Codes, dequantise, read_codes

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2_OUTER = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f", "output": "lm_head"}
_BASE = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    **_BASE, **_QK_NORM, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
# Tensor of a layer, per HF architecture.
_LAYER: dict[str, dict[str, str]] = {
    "LlamaForCausalLM": _BASE,
    "SmolLM3ForCausalLM": _BASE,
    "Qwen2ForCausalLM": _BASE,
    "Qwen3ForCausalLM": {**_BASE, **_QK_NORM},
    "MixtralForCausalLM": {**_BASE, "ffn_gate_inp": "block_sparse_moe.gate"},
    "Qwen3MoeForCausalLM": {**_BASE, **_QK_NORM, "ffn_gate_inp": "mlp.gate"},
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Phi3ForCausalLM": {**_BASE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "GPT2LMHeadModel": {
        "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
}  # fmt: skip
# Stacked experts [num_experts, out, in] -> one name for each; {} is the expert.
_EXPERTS: dict[str, dict[str, str]] = {
    "MixtralForCausalLM": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1", "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "Qwen3MoeForCausalLM": {
        "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
}  # fmt: skip
_PERMUTED = ("LlamaForCausalLM", "MixtralForCausalLM", "SmolLM3ForCausalLM")  # their converter interleaves rotary pairs
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read by `gguf_config`


_TABLES = ("model.embed_tokens", "transformer.wte", "transformer.wpe")
_PARTS = ("codes", "scales", "offsets")


@dataclass(frozen=True, slots=True)
class _Source:
    tensor: GGUFTensor
    expert: int | None = None  # of a stack
    permuted_heads: int = 0  # rows come in this many heads, each with its two halves interleaved
    plus_one: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        return shape[::-1] if self.transposed else shape


def _is_linear(name: str, source: _Source) -> bool:
    """Whether a tensor is the weight of a linear (or a tied head's) whose rows are outputs."""
    return name.endswith(".weight") and len(source.shape) == 2 and source.expert is None and not (source.transposed or source.plus_one)


class GGUFCheckpoint(Checkpoint):
    """Tensors of one file. Block-quantised ones are dequantised each time they are asked for; of linears that keep their codes,
    `codes`, `scales` and `offsets` stand in place of `weight`.
    """

    def __init__(self, summary: ModelSummary, *, keeps_codes: bool = False) -> None:
        """`keeps_codes`: linears are multiplied as they are stored, where a block type has codes.

        Raises ModelError for an architecture without a name table, WeightMismatch for a tensor that has no name in it.
        """
        self._path = summary.path
        header = read_header(self._path)
        if summary.architecture not in _LAYER:
            raise ModelError(f"{self._path}: no GGUF tensor names are known for {summary.architecture}; known: {', '.join(_LAYER)}")
        self._sources: dict[str, _Source] = {}
        for tensor in header.tensors.values():
            if tensor.name not in _ROPE_TABLES:
                self._add(tensor, summary)
        self._tables: dict[str, torch.Tensor] = {}  # scales and offsets of the codes that were last asked for
        if keeps_codes:
            self.quantization = BlockQuantization({name.removesuffix(".weight"): s.tensor.type_name for name, s in self._sources.items() if _is_linear(name, s)})
        size = max((tensor.offset + tensor.nbytes for tensor in header.tensors.values()), default=0)
        # Private pages: the file is never written, and pages are read when they are touched.
        self._data: torch.Tensor | None = torch.from_file(self._path, shared=False, size=size, dtype=torch.uint8)

    def names(self) -> set[str]:
        found = set(self._sources)
        for prefix, form in self.quantization.forms.items() if self.quantization is not None else ():
            if prefix not in _TABLES:  # an embedding is looked up in a plain table, and is the head's weight besides
                found.remove(f"{prefix}.weight")
                found |= {f"{prefix}.{part}" for part in ("codes", "scales", *(("offsets",) if form.has_offsets else ()))}
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        coded = self._coded(name)
        if coded is None:
            return self._source(name).shape
        prefix, part, form = coded
        out_size, in_size = self._source(f"{prefix}.weight").shape
        return (out_size, in_size if part == "codes" else in_size // form.group)

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        coded = self._coded(name)
        if coded is not None:
            return self._part(*coded)
        source = self._source(name)
        raw, shape = self._raw(source)
        tensor = source.tensor
        tensor = source.tensor
        if tensor.type_name in _PLAIN:
            value = raw.view(_PLAIN[tensor.type_name]).view(shape)
        elif tensor.type_name in BLOCK_TYPES:
            value = torch.empty(shape, dtype=dtype or torch.float32)
            dequantise(raw, tensor.type_name, value)
        else:
            supported = ", ".join([*_PLAIN, *BLOCK_TYPES])
            raise WeightMismatch(f"{self._path}: tensor {tensor.name} ({name}) has type {tensor.type_name}; supported: {supported}")
        if source.plus_one:
            value = (value.float() - 1).to(value.dtype)
        return cast(value.t() if source.transposed else value, dtype)

    def _raw(self, source: _Source) -> tuple[torch.Tensor, tuple[int, ...]]:
        """(packed bytes in the order of Hugging Face's rows, shape)."""
        tensor = source.tensor
        if self._data is None:
            raise ModelError(f"{self._path} is closed")
        raw = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        shape = tensor.shape
        if source.expert is not None:
            raw, shape = raw.view(shape[0], -1)[source.expert], shape[1:]
        if source.permuted_heads:
            # Undone on the packed bytes: rows move whole.
            raw = raw.view(source.permuted_heads, shape[0] // source.permuted_heads // 2, 2, -1).transpose(1, 2).reshape(-1)
        return raw, shape

    def _coded(self, name: str) -> tuple[str, str, Form] | None:
        """(linear, part, form) of a name that stands for part of one that keeps its codes."""
        prefix, _, part = name.rpartition(".")
        form = self.quantization.forms.get(prefix) if part in _PARTS and self.quantization is not None else None
        return None if form is None else (prefix, part, form)

    def _part(self, prefix: str, part: str, form: Form) -> torch.Tensor:
        """Codes, scales or offsets of a linear. Scales are asked for after codes, and are unpacked with them."""
        name = f"{prefix}.{part}"
        if name not in self._tables:
            source = self._source(f"{prefix}.weight")
            raw, shape = self._raw(source)
            type_name = source.tensor.type_name
            codes: Codes = form.write(read_codes(raw, type_name, (shape[0], shape[1])), type_name)
            self._tables = {f"{prefix}.codes": codes.q, f"{prefix}.scales": codes.scale}
            if codes.offset is not None:
                self._tables[f"{prefix}.offsets"] = codes.offset
        return self._tables.pop(name)

    def close(self) -> None:
        self._data = None
        self._tables.clear()

    def _source(self, name: str) -> _Source:
        try:
            return self._sources[name]
        except KeyError:
            raise WeightMismatch(f"{self._path} has no tensor for {name}") from None

    def _add(self, tensor: GGUFTensor, summary: ModelSummary) -> None:
        architecture = summary.architecture
        gpt2, gemma = architecture == "GPT2LMHeadModel", architecture.startswith("Gemma")
        base, _, suffix = tensor.name.rpartition(".")
        outer = _GPT2_OUTER if gpt2 else _OUTER
        if base in outer:
            self._sources[f"{outer[base]}.{suffix}"] = _Source(tensor, plus_one=gemma and base == "output_norm")
            return
        parts = base.split(".")
        if len(parts) < 3 or parts[0] != "blk" or not parts[1].isdigit():
            raise WeightMismatch(f"{self._path}: tensor {tensor.name} belongs nowhere in {architecture}")
        layer, leaf = f"{'transformer.h' if gpt2 else 'model.layers'}.{parts[1]}", ".".join(parts[2:])
        experts = _EXPERTS.get(architecture, {})
        if leaf in experts:
            for expert in range(tensor.shape[0]):
                self._sources[f"{layer}.{experts[leaf].format(expert)}.{suffix}"] = _Source(tensor, expert=expert)
            return
        if leaf not in _LAYER[architecture]:
            raise WeightMismatch(f"{self._path}: tensor {tensor.name} belongs nowhere in {architecture}")
        heads = {"attn_q": summary.num_heads, "attn_k": summary.num_kv_heads}.get(leaf, 0) if architecture in _PERMUTED else 0
        self._sources[f"{layer}.{_LAYER[architecture][leaf]}.{suffix}"] = _Source(
            tensor,
            permuted_heads=heads,
            plus_one=gemma and leaf.endswith("norm"),
            transposed=gpt2 and suffix == "weight" and not leaf.endswith("norm"),
        )
